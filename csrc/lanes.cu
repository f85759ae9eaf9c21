// The frames in CUDA: the same bytes and the same floats as comm/kernels/reference.py, which specifies both. Here is what
// all kernels share; sign.cu and codes.cu have those of sign frames, and of int8, int4 and log4.
//
// Compiled as one text at run time by comm/kernels/cupy.py, once for each block size (ONEBIT_BLOCK), and in the tests by
// nvcc for GPUs that are not there and by a C++ compiler that emulates warps (tests/support/emulated_cuda.cpp). Nothing
// is included: NVRTC has no headers, and CuPy would not see that one has changed.
//
// A half-warp of 16 threads does one block, thread l the elements of lane l, one in each row of 16: l, l+16, l+32, … Then
// - the specified sum needs nothing but a float per thread and four exchanges at the end, and 16 sign bits are one ballot;
// - c stays in registers between the sum and the residual, 16 of them for a block of 256: each byte of memory is read
//   once and written once. Blocks above kLargestKept elements compute c twice instead.
// - A load instruction of a warp takes 64 bytes of each of two blocks, whole sectors, and needs no alignment but the
//   element's: gradients and parameters are read in place. Four floats per thread would need fewer instructions
//   (a load in 16 bytes, 4 threads per block), but four times the registers per thread, 16-byte alignment of every
//   tensor, and six exchanges to bring 4-bit pieces of the signs together.
// - What hides latency is bytes in flight: kBatch rows of every input are loaded before the first is used (also no
//   division, which is a branch, is between them), 32 bytes per input and thread. A multiprocessor of an H100 needs
//   20-40 KiB in flight for all of its share of the memory's bandwidth; 1024 threads with three inputs have 96.
//
// Compiled with --fmad=false: every product and every sum rounds once; division and square root round to nearest.
//
// Shape legend: K rows, J blocks of a row, B bytes of a frame.

#ifndef ONEBIT_BLOCK
#define ONEBIT_BLOCK 256
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

namespace {

constexpr int kLanes = 16;
constexpr int kThreads = 128;               // of a launched block: comm/kernels/cupy.py has the same number
constexpr int kBlock = ONEBIT_BLOCK;        // elements per scale
constexpr int kRows = kBlock / kLanes;      // of a block; a thread has one element of each
constexpr int kBatch = kRows % 8 == 0 ? 8 : kRows % 4 == 0 ? 4 : kRows % 2 == 0 ? 2 : 1;  // rows loaded at a time
constexpr int kLargestKept = 512;
constexpr bool kKept = kBlock <= kLargestKept;
constexpr int kUnrolled = kKept ? kRows / kBatch : 1;
constexpr u32 kEveryThread = 0xFFFFFFFFu;
constexpr u32 kSignBit = 0x80000000u;
constexpr u32 kInfinityBits = 0x7F800000u;
constexpr u32 kNanBf16 = 0x7FC0u;
constexpr int kNoLimit = 0x7FFFFFFF;
static_assert(kBlock > 0 && kBlock % kLanes == 0, "a block is a whole number of rows of 16 lanes");

// As in comm/kernels/cupy.py.
enum Kind : int { kNone = 0, kFloat32 = 1, kBfloat16 = 2, kFloat16 = 3 };

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float float_from_half(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ u16 half_near(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#else
__device__ float float_from_half(u16 bits);
__device__ u16 half_near(float value);
#endif

// To nearest even; a NaN becomes kNanBf16.
__device__ __forceinline__ u32 bf16_near(float value) {
  const u32 bits = __float_as_uint(value);
  return value != value ? kNanBf16 : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ float float_from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ int lane() { return threadIdx.x % kLanes; }

// The block of this half-warp. A half-warp past the last block computes the last one again, because a warp votes as a
// whole, and does not write (`inside`).
struct Place {
  u32 b, k, j;  // b counts all K·J blocks, row after row
  bool inside;

  __device__ __forceinline__ Place(u32 blocks, u32 J) {
    b = (blockIdx.x * kThreads + threadIdx.x) / kLanes;
    inside = b < blocks;
    if (!inside) b = blocks - 1;
    k = b / J, j = b % J;
  }
};

// In every thread.
__device__ __forceinline__ u32 largest_bits(u32 bits) {
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    const u32 other = __shfl_xor_sync(kEveryThread, bits, apart);
    bits = other > bits ? other : bits;
  }
  return bits;
}

// This lane's elements of kBatch rows, first as they lie: `widen` makes floats of them once all inputs are asked for, so
// that no load waits for another. Those from element `room` on are not there and are zeros. What depends on a kind is
// decided once per batch: by element, the compiler made a copy of the code for each combination.
template <class Word>
__device__ __forceinline__ void load_words(u32 (&raw)[kBatch], const Word* from, int room) {
#pragma unroll
  for (int r = 0; r < kBatch; ++r) raw[r] = r * kLanes < room ? from[r * kLanes] : Word(0);
}

__device__ __forceinline__ void load_raw(u32 (&raw)[kBatch], const void* data, int kind, i64 at, int room = kNoLimit) {
  if (kind == kFloat32) return load_words(raw, static_cast<const u32*>(data) + at, room);
  if (kind != kNone) return load_words(raw, static_cast<const u16*>(data) + at, room);
#pragma unroll
  for (int r = 0; r < kBatch; ++r) raw[r] = 0;
}

__device__ __forceinline__ void widen(u32 (&raw)[kBatch], int kind) {
  if (kind == kBfloat16) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) raw[r] <<= 16;
  } else if (kind == kFloat16) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) raw[r] = __float_as_uint(float_from_half(static_cast<u16>(raw[r])));
  }
}

template <class Word>
__device__ __forceinline__ void store_words(Word* to, const u32 (&raw)[kBatch], int room) {
#pragma unroll
  for (int r = 0; r < kBatch; ++r)
    if (r * kLanes < room) to[r * kLanes] = static_cast<Word>(raw[r]);
}

__device__ __forceinline__ void store_floats(void* data, int kind, i64 at, const float* values, int room = kNoLimit) {
  u32 raw[kBatch];
  if (kind == kFloat32) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) raw[r] = __float_as_uint(values[r]);
    return store_words(static_cast<u32*>(data) + at, raw, room);
  }
  if (kind == kBfloat16) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) raw[r] = bf16_near(values[r]);
  } else {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) raw[r] = half_near(values[r]);
  }
  store_words(static_cast<u16*>(data) + at, raw, room);
}

// c ← c + error if there is one, and +0.0 after the first `count` elements of the block.
__device__ __forceinline__ void finish_c(float* c, u32 (&error)[kBatch], int error_kind, int count, int row) {
  widen(error, error_kind);
  if (error_kind != kNone) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) c[r] = c[r] + __uint_as_float(error[r]);
  }
  if (count < kBlock) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r)
      if ((row + r) * kLanes + lane() >= count) c[r] = 0.0f;
  }
}

// Writes the zero bytes after the last scale of a row, fewer than 16, in the half-warp of the row's last block.
__device__ __forceinline__ void clear_tail(u8* frame, i64 used_bytes, i64 frame_bytes, const Place& at, u32 J) {
  if (at.inside && at.j == J - 1 && used_bytes + 2 * lane() < frame_bytes)
    reinterpret_cast<u16*>(frame + used_bytes)[lane()] = 0;
}

// Tensors in place: segment s begins with block first[s]; owners: the segment of each block, -1 for none.
struct Pointers {
  const int* owners;
  const i64* data;   // S addresses, followed by their kinds
  const i64* first;  // followed by the lengths
  int S;

  __device__ __forceinline__ int kind(int s) const { return static_cast<int>(data[S + s]); }
  // Elements of segment s before block b.
  __device__ __forceinline__ i64 start(int s, u32 b) const { return (static_cast<i64>(b) - first[s]) * kBlock; }
  // Elements of block b that are there.
  __device__ __forceinline__ int left(int s, u32 b) const {
    const i64 left = first[S + s] - start(s, b);
    return left < kBlock ? static_cast<int>(left) : kBlock;
  }
};

}  // namespace

#define ONEBIT_KERNEL extern "C" __global__ void __launch_bounds__(kThreads)

// Pointers, sizes, and strides in elements are checked in comm/kernels/arguments.py. The number of blocks is K·J < 2^31.
// Kinds are those of `Kind`. counts may be null, and so may what is of kind 0.
