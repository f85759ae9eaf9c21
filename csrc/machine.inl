// What this machine has: instruction sets and threads. Included by kernels.cpp and host_adam.cpp.

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define ONEBIT_X86 1
#endif

static_assert(FLT_EVAL_METHOD == 0, "float arithmetic must round to float: build without x87");
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames and codes are little-endian, and so must be the machine"
#endif

#define ONEBIT_API extern "C" __attribute__((visibility("default")))

namespace {

enum Isa : int { kAuto = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

int best_isa() {
#ifdef ONEBIT_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return kAvx512;
  if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
  return kPortable;
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
