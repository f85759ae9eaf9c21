// csrc/*.cu on a CPU, thread by thread: what its tests run where there is no GPU.
//
// The 32 threads of a warp are fibers. Each runs until it votes or exchanges, which it cannot before the 31 others have
// come to the same one; a warp of which only some threads arrive there ends the process, where a GPU would hang or
// worse. Warps run one after the other. Not shown here: what the compiler for GPUs makes of the source, and its memory.
//
//     c++ -std=c++17 -O1 -ffp-contract=off -shared -fPIC -DONEBIT_BLOCK=256 tests/support/emulated_cuda.cpp

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace {

constexpr int kWarp = 32;
constexpr size_t kStack = 64 * 1024;

struct Index {
  unsigned x;
} threadIdx, blockIdx;

struct Warp {
  ucontext_t scheduler, fibers[kWarp];
  alignas(16) char stacks[kWarp][kStack];
  bool done[kWarp];
  uint32_t slots[2][kWarp];  // of two exchanges in turn: nobody writes the next before all have read the last
  int arrived[kWarp];        // exchanges so far
  int current;
} warp;

// What each thread gives, seen by all.
const uint32_t* exchange(uint32_t value) {
  uint32_t* slots = warp.slots[warp.arrived[warp.current]++ % 2];
  slots[warp.current] = value;
  swapcontext(&warp.fibers[warp.current], &warp.scheduler);
  return slots;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t __float_as_uint(float value) { return bits_of(value); }
float __uint_as_float(uint32_t bits) { return float_of(bits); }
float __fsqrt_rn(float value) { return std::sqrt(value); }
float __fdiv_rn(float a, float b) { return a / b; }

uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int apart) { return exchange(value)[warp.current ^ apart]; }
float __shfl_xor_sync(uint32_t mask, float value, int apart) {
  return float_of(__shfl_xor_sync(mask, bits_of(value), apart));
}
uint32_t __ballot_sync(uint32_t, bool vote) {
  const uint32_t* votes = exchange(vote);
  uint32_t ballot = 0;
  for (int l = 0; l < kWarp; ++l) ballot |= votes[l] << l;
  return ballot;
}

}  // namespace

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#include "../../csrc/lanes.cu"
#include "../../csrc/sign.cu"
#include "../../csrc/codes.cu"

namespace {

float float_from_half(u16 bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}

u16 half_near(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  u16 bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}

// One thread of a launch: fibers take no arguments.
void (*run_thread)(void* const* arguments);
void* const* thread_arguments;

void fiber() {
  run_thread(thread_arguments);
  warp.done[warp.current] = true;
  swapcontext(&warp.fibers[warp.current], &warp.scheduler);
}

void run_warp() {
  for (int l = 0; l < kWarp; ++l) {
    ucontext_t& context = warp.fibers[l];
    getcontext(&context);
    context.uc_stack.ss_sp = warp.stacks[l], context.uc_stack.ss_size = kStack, context.uc_link = nullptr;
    makecontext(&context, fiber, 0);
    warp.done[l] = false, warp.arrived[l] = 0;
  }
  const unsigned first = threadIdx.x;
  for (int left = kWarp; left > 0;) {
    for (int l = 0; l < kWarp; ++l) {
      if (warp.done[l]) continue;
      warp.current = l, threadIdx.x = first + l;
      swapcontext(&warp.scheduler, &warp.fibers[l]);
      left -= warp.done[l];
    }
    if (left != 0 && left != kWarp) {
      std::fprintf(stderr, "%d threads of a warp vote or exchange without the others\n", left);
      std::abort();
    }
  }
}

// As cuLaunchKernel: an argument is where its value lies.
template <class... Arguments, size_t... I>
void call(void (*kernel)(Arguments...), void* const* arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Arguments*>(arguments[I])...);
}

template <auto kernel>
struct Thread;
template <class... Arguments, void (*kernel)(Arguments...)>
struct Thread<kernel> {
  static void run(void* const* arguments) { call(kernel, arguments, std::index_sequence_for<Arguments...>()); }
};

template <auto kernel>
void launch(unsigned blocks, unsigned threads, void* const* arguments) {
  run_thread = Thread<kernel>::run, thread_arguments = arguments;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (unsigned first = 0; first < threads; first += kWarp) {
      threadIdx.x = first;
      run_warp();
    }
}

}  // namespace

#define EMULATE(NAME)                                                                             \
  extern "C" void emulate_##NAME(unsigned blocks, unsigned threads, void* const* arguments) { \
    launch<NAME>(blocks, threads, arguments);                                                     \
  }

#if ONEBIT_BLOCK % 64 == 0
EMULATE(sign_encode)
EMULATE(sign_decode)
EMULATE(sign_decode_mean)
EMULATE(sign_encode_mean)
EMULATE(sign_encode_momentum)
EMULATE(sign_encode_momentum_variance)
EMULATE(sign_encode_momentum_packed)
EMULATE(sign_encode_momentum_packed_variance)
EMULATE(sign_encode_gradients)
EMULATE(sign_encode_gradients_returning)
EMULATE(sign_apply)
EMULATE(int4_apply)
EMULATE(sign_owner_step)
EMULATE(local_step)
EMULATE(local_step_variance)
EMULATE(correct_residual)
EMULATE(correct_residual_variance)
EMULATE(sign_momentum_sums)
EMULATE(sign_momentum_sums_variance)
EMULATE(sign_momentum_sums_packed)
EMULATE(sign_momentum_sums_packed_variance)
#endif
EMULATE(int8_encode)
EMULATE(int8_decode)
EMULATE(int8_decode_mean)
EMULATE(int4_encode)
EMULATE(int4_decode)
EMULATE(int4_decode_mean)
EMULATE(log4_encode)
EMULATE(log4_decode)
EMULATE(log4_decode_mean)
