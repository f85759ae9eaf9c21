// The sign frame in C++: the same bytes and the same floats as comm/kernels/reference.py, which specifies both.
//
// sign_blocks.inl holds the algorithm, written over the specification's 16 lanes. It is compiled once per instruction
// set, each time over another lanes_*.inl, and the best one this CPU has is chosen per call. Loaded by
// comm/kernels/cpu.py with ctypes: raw pointers, sizes and strides in elements, checked there.
//
// Built with -ffp-contract=off: every product and every sum rounds once.
//
// Shape legend: K rows, J blocks of a row, B bytes of a frame.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define ONEBIT_X86 1
#endif

static_assert(FLT_EVAL_METHOD == 0, "float arithmetic must round to float: build without x87");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames are little-endian, and so must be the machine"
#endif

namespace {

constexpr int64_t kLanes = 16;
constexpr uint16_t kNanBf16 = 0x7FC0;

enum class ErrorKind : int { kNone = 0, kFloat32 = 1, kBfloat16 = 2 };

struct EncodeJob {
  float* x;
  int64_t x_stride;
  const void* error;
  int64_t error_stride;
  ErrorKind error_kind;
  uint8_t* frames;
  int64_t frame_stride;
  const int32_t* counts;
  int64_t counts_stride;
  int64_t J;
  int64_t block;
  bool mean_abs;
};

struct DecodeJob {
  const uint8_t* frames;
  int64_t frame_stride;
  float* out;
  int64_t out_stride;
  int64_t J;
  int64_t block;
  float weight;
  float keep;
  bool reads_out;
};

struct DecodeMeanJob {
  const uint8_t* frames;
  int64_t frame_stride;
  int64_t K;
  float* out;
  int64_t J;
  int64_t block;
};

// Row k, block j of the row: a walk over K·J blocks, row after row, with one division.
struct BlockAt {
  int64_t k, j;
  const int64_t J;

  BlockAt(int64_t index, int64_t J) : k(index / J), j(index % J), J(J) {}
  void next() {
    if (++j == J) j = 0, ++k;
  }
};

// Each function does blocks [begin, end) of the K·J blocks, counted row after row.
struct Kernel {
  void (*encode)(const EncodeJob&, int64_t begin, int64_t end);
  void (*decode)(const DecodeJob&, int64_t begin, int64_t end);
  void (*decode_mean)(const DecodeMeanJob&, int64_t begin, int64_t end);
};

inline uint16_t load_u16(const void* from) {
  uint16_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store_u16(void* to, uint16_t value) { std::memcpy(to, &value, sizeof value); }

inline float float_from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// To nearest even; NaN and what rounds to infinity become kNanBf16. value is not negative.
inline uint16_t finite_bf16_or_nan(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return rounded < 0x7F80u ? static_cast<uint16_t>(rounded) : kNanBf16;
}

}  // namespace

#define ONEBIT_TARGET
namespace portable {
namespace {
#include "lanes_portable.inl"
#include "sign_blocks.inl"
}  // namespace
}  // namespace portable
#undef ONEBIT_TARGET

#ifdef ONEBIT_X86
#define ONEBIT_TARGET __attribute__((target("avx2")))
namespace avx2 {
namespace {
#include "lanes_avx2.inl"
#include "sign_blocks.inl"
}  // namespace
}  // namespace avx2
#undef ONEBIT_TARGET

#define ONEBIT_TARGET __attribute__((target("avx512f,avx512dq")))
namespace avx512 {
namespace {
#include "lanes_avx512.inl"
#include "sign_blocks.inl"
}  // namespace
}  // namespace avx512
#undef ONEBIT_TARGET
#endif

namespace {

enum Isa : int { kAuto = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

int best_isa() {
#ifdef ONEBIT_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return kAvx512;
  if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
  return kPortable;
}

// nullptr where this CPU lacks `isa`.
const Kernel* kernel_for(int isa) {
  static const int best = best_isa();
  if (isa == kAuto) isa = best;
  if (isa > best) return nullptr;
  switch (isa) {
    case kPortable: return &portable::kernel;
#ifdef ONEBIT_X86
    case kAvx2: return &avx2::kernel;
    case kAvx512: return &avx512::kernel;
#endif
    default: return nullptr;
  }
}

// Blocks are independent: the split changes no byte.
template <class Job>
void run(void (*work)(const Job&, int64_t, int64_t), const Job& job, int64_t blocks, int threads) {
  if (blocks == 0) return;
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      const int64_t parts = omp_get_num_threads();
      const int64_t part = omp_get_thread_num();
      work(job, blocks * part / parts, blocks * (part + 1) / parts);
    }
    return;
  }
#endif
  (void)threads;
  work(job, 0, blocks);
}

}  // namespace

#define ONEBIT_API extern "C" __attribute__((visibility("default")))

// Raise it together with cpu.py's when a signature or a frame changes: a library built from older sources is then refused.
ONEBIT_API int onebit_abi_version() { return 1; }

ONEBIT_API int onebit_best_isa() { return best_isa(); }

ONEBIT_API int onebit_has_openmp() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

// All three return 0, or 1 where this CPU lacks `isa` (then nothing is written).

ONEBIT_API int onebit_sign_encode(float* x, int64_t x_stride, const void* error, int64_t error_stride, int error_kind,
                                  uint8_t* frames, int64_t frame_stride, int64_t frame_bytes, const int32_t* counts,
                                  int64_t counts_stride, int64_t K, int64_t J, int64_t block, int mean_abs, int isa,
                                  int threads) {
  const Kernel* kernel = kernel_for(isa);
  if (!kernel) return 1;
  const int64_t used_bytes = J * block / 8 + 2 * J;
  for (int64_t k = 0; k < K; ++k) std::memset(frames + k * frame_stride + used_bytes, 0, frame_bytes - used_bytes);
  const EncodeJob job{x,      x_stride,      error, error_stride, static_cast<ErrorKind>(error_kind), frames, frame_stride,
                      counts, counts_stride, J,     block,        mean_abs != 0};
  run(kernel->encode, job, K * J, threads);
  return 0;
}

ONEBIT_API int onebit_sign_decode(const uint8_t* frames, int64_t frame_stride, float* out, int64_t out_stride, int64_t K,
                                  int64_t J, int64_t block, double weight, double keep, int isa, int threads) {
  const Kernel* kernel = kernel_for(isa);
  if (!kernel) return 1;
  const DecodeJob job{frames, frame_stride, out, out_stride, J, block, static_cast<float>(weight),
                      static_cast<float>(keep), keep != 0.0};
  run(kernel->decode, job, K * J, threads);
  return 0;
}

ONEBIT_API int onebit_sign_decode_mean(const uint8_t* frames, int64_t frame_stride, int64_t K, float* out, int64_t J,
                                       int64_t block, int isa, int threads) {
  const Kernel* kernel = kernel_for(isa);
  if (!kernel) return 1;
  const DecodeMeanJob job{frames, frame_stride, K, out, J, block};
  run(kernel->decode_mean, job, J, threads);
  return 0;
}
