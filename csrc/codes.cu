// Frames of a code for each element, int8, int4 and log4: their kernels, over what sets the codes apart. Compiled after
// lanes.cu.
//
// A code is made from the scale's bits of its block, is `of` a float, and is what `value` gives for its bits.

namespace {

// The bits of the largest |c| of a block: an infinity is above every number, and a NaN above both. And of the smallest.
struct Extent {
  u32 largest = 0, smallest = 0xFFFFFFFFu;

  __device__ __forceinline__ void add(float c) {
    const u32 size = __float_as_uint(c) & ~kSignBit;
    largest = size > largest ? size : largest;
    smallest = size < smallest ? size : smallest;
  }
};

__device__ __forceinline__ u32 bf16_not_below(u32 bits) { return (bits + 0xFFFFu) >> 16; }

// Whole steps of a scale, up to kSteps.
template <int kSteps>
struct Steps {
  u32 scale;
  float step;

  explicit __device__ __forceinline__ Steps(Extent extent) {
    const u32 bits = largest_bits(extent.largest);
    const u32 not_below = bf16_not_below(__float_as_uint(__fdiv_rn(__uint_as_float(bits), float(kSteps))));
    const float farthest = float_from_bf16(not_below) * float(kSteps + 1);  // that any code decodes to
    scale = bits >= kInfinityBits || __float_as_uint(farthest) >= kInfinityBits ? kNanBf16 : not_below;
    step = is_bad() || scale == 0 ? 1.0f : float_from_bf16(scale);
  }
  __device__ __forceinline__ bool is_bad() const { return scale == kNanBf16; }

  // The code, and its value. `step` is not below max|c|/kSteps by more than a rounding.
  __device__ __forceinline__ u32 of(float c, float& value) const {
    const float q = rintf(__fdiv_rn(c, step));
    value = q * step;
    return static_cast<u32>(static_cast<int>(q));
  }
};

struct Bytes {
  static __device__ __forceinline__ i64 bytes(i64 elements) { return elements; }
  // By whole warps, each half of one with 16 elements in a row.
  static __device__ __forceinline__ void store(u8* codes, i64 element, u32 code, bool inside) {
    if (inside) codes[element] = static_cast<u8>(code);
  }
};

// Two elements in a byte, the even one in its low half.
struct Nibbles {
  static __device__ __forceinline__ i64 bytes(i64 elements) { return elements / 2; }
  static __device__ __forceinline__ u32 load(const u8* codes, i64 element) {
    return codes[element / 2] >> (element % 2 * 4) & 0xF;
  }
  static __device__ __forceinline__ void store(u8* codes, i64 element, u32 code, bool inside) {
    const u32 mine = code & 0xFu, next = __shfl_xor_sync(kEveryThread, mine, 1);
    if (inside && element % 2 == 0) codes[element / 2] = static_cast<u8>(mine | next << 4);
  }
};

struct Int8Code : Bytes, Steps<127> {
  using Steps::Steps;
  static __device__ __forceinline__ u32 load(const u8* codes, i64 element) { return codes[element]; }
  static __device__ __forceinline__ float value(u32 code, float scale) {
    return static_cast<float>(static_cast<signed char>(code)) * scale;
  }
};

struct Int4Code : Nibbles, Steps<7> {
  using Steps::Steps;
  static __device__ __forceinline__ float value(u32 code, float scale) {
    return static_cast<float>(static_cast<int>(code ^ 8) - 8) * scale;
  }
};

// k + 8·(c < 0) for ±2^-k of the scale, which is negative if the block contains a zero: 7 is then 0.
struct Log4Code : Nibbles {
  u32 scale;
  float up;
  int threshold, most;

  explicit __device__ __forceinline__ Log4Code(Extent extent) {
    const u32 largest = largest_bits(extent.largest), smallest = ~largest_bits(~extent.smallest);
    const u32 not_below = bf16_not_below(largest);
    const bool has_zero = largest != 0 && smallest == 0;
    scale = not_below >= kInfinityBits >> 16 ? kNanBf16 : has_zero ? not_below | kSignBit >> 16 : not_below;
    const float s = float_from_bf16(not_below);
    up = s < 0x1p-60f ? 0x1p64f : 1.0f;  // exact; no threshold is subnormal
    threshold = static_cast<int>(__float_as_uint(s * up * 0.75f)) + 0x7FFFFF;
    most = has_zero ? 6 : 7;
  }
  __device__ __forceinline__ bool is_bad() const { return scale == kNanBf16; }

  __device__ __forceinline__ u32 of(float c, float& decoded) const {
    const u32 bits = __float_as_uint(c * up + 0.0f);  // -0.0 is no negative number
    const int size = static_cast<int>(bits & ~kSignBit);
    int k = (threshold - size) >> 23;
    k = k < 0 ? 0 : k > most ? most : k;
    if (most == 6 && size == 0) k = 7;
    const u32 code = scale == 0 || is_bad() ? 0 : k | (bits >> 28 & 8);
    decoded = value(code, float_from_bf16(scale));
    return code;
  }
  static __device__ __forceinline__ float value(u32 code, float scale) {
    const u32 k = code & 7, power = (127 - k) << 23 | (code & 8) << 28;
    return __uint_as_float(k == 7 && scale < 0.0f ? 0 : power) * __uint_as_float(__float_as_uint(scale) & ~kSignBit);
  }
};

template <class Code>
__device__ __forceinline__ void encode_codes(float* x, i64 x_stride, const void* error, i64 error_stride,
                                             i64 error_kind, u8* frames, i64 frame_stride, i64 frame_bytes,
                                             const int* counts, i64 counts_stride, i64 K, i64 J) {
  const Place at(static_cast<u32>(K * J), static_cast<u32>(J));
  u8* frame = frames + at.k * frame_stride;
  float* mine = x + at.k * x_stride + static_cast<i64>(at.j) * kBlock;
  const int kind = static_cast<int>(error_kind), count = counts ? counts[at.k * counts_stride + at.j] : kBlock;
  const i64 error_at = at.k * error_stride + static_cast<i64>(at.j) * kBlock;
  clear_tail(frame, J * (Code::bytes(kBlock) + 2), frame_bytes, at, J);

  const auto compute_c = [&](int row, float* c) {
    u32 raw[kBatch], owed[kBatch];
    load_raw(raw, mine, kFloat32, row * kLanes + lane());
    load_raw(owed, error, kind, error_at + row * kLanes + lane());
#pragma unroll
    for (int r = 0; r < kBatch; ++r) c[r] = __uint_as_float(raw[r]);
    finish_c(c, owed, kind, count, row);
  };
  float kept[kKept ? kRows : kBatch];
  Extent extent;
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    float* c = kept + (kKept ? row : 0);
    compute_c(row, c);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) extent.add(c[r]);
  }
  const Code code(extent);
  if (at.inside && lane() == 0)
    reinterpret_cast<u16*>(frame + Code::bytes(J * kBlock))[at.j] = static_cast<u16>(code.scale);
  u8* codes = frame + Code::bytes(static_cast<i64>(at.j) * kBlock);
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    float* c = kept + (kKept ? row : 0);
    if (!kKept) compute_c(row, c);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const float sent = code.is_bad() ? 0.0f : c[r];
      float value;
      Code::store(codes, (row + r) * kLanes + lane(), code.of(sent, value), at.inside);
      c[r] = code.is_bad() ? 0.0f : sent - value;
    }
    if (at.inside) store_floats(mine, kFloat32, row * kLanes + lane(), c);
  }
}

template <class Code>
__device__ __forceinline__ void decode_codes(const u8* frames, i64 frame_stride, float* out, i64 out_stride, i64 K,
                                             i64 J, float weight, float keep, i64 reads_out) {
  const Place at(static_cast<u32>(K * J), static_cast<u32>(J));
  if (!at.inside) return;
  const u8* frame = frames + at.k * frame_stride;
  const float scale = float_from_bf16(reinterpret_cast<const u16*>(frame + Code::bytes(J * kBlock))[at.j]);
  const u8* codes = frame + Code::bytes(static_cast<i64>(at.j) * kBlock);
  float* mine = out + at.k * out_stride + static_cast<i64>(at.j) * kBlock;
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    u32 old[kBatch];
    u32 code[kBatch];
    float values[kBatch];
    load_raw(old, mine, reads_out ? kFloat32 : kNone, row * kLanes + lane());
#pragma unroll
    for (int r = 0; r < kBatch; ++r) code[r] = Code::load(codes, (row + r) * kLanes + lane());
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const float value = Code::value(code[r], scale) * weight;
      values[r] = reads_out ? __uint_as_float(old[r]) * keep + value : value;
    }
    store_floats(mine, kFloat32, row * kLanes + lane(), values);
  }
}

template <class Code>
__device__ __forceinline__ void mean_of_codes(const u8* frames, i64 frame_stride, i64 K, float* out, i64 J,
                                              float share) {
  const Place at(static_cast<u32>(J), static_cast<u32>(J));
  if (!at.inside) return;
  const u8* scale = frames + Code::bytes(J * kBlock) + 2 * at.j;
  const i64 first = static_cast<i64>(at.j) * kBlock;
#pragma unroll 1
  for (int row = 0; row < kRows; row += kBatch) {
    float sum[kBatch];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) sum[r] = -0.0f;  // -0.0 + value is value, also where that is -0.0
#pragma unroll 4
    for (int k = 0; k < static_cast<int>(K); ++k) {
      const float each = float_from_bf16(*reinterpret_cast<const u16*>(scale + k * frame_stride));
      const u8* codes = frames + k * frame_stride + Code::bytes(first);
#pragma unroll
      for (int r = 0; r < kBatch; ++r)
        sum[r] = sum[r] + Code::value(Code::load(codes, (row + r) * kLanes + lane()), each);
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) sum[r] = sum[r] * share;
    store_floats(out, kFloat32, first + row * kLanes + lane(), sum);
  }
}

template <class Code>
__device__ __forceinline__ void apply_codes(const u8* frames, i64 frame_stride, i64 K, i64 J, const Pointers& tensors,
                                            const float* weight, const float* keep) {
  const Place at(static_cast<u32>(K * J), static_cast<u32>(J));
  const int s = tensors.owners[at.b];
  if (!at.inside || s < 0) return;
  const int kind = tensors.kind(s), left = tensors.left(s, at.b);
  if (kind == kNone) return;
  void* p = reinterpret_cast<void*>(tensors.data[s]);
  const u8* frame = frames + at.k * frame_stride;
  const float scale = float_from_bf16(*(reinterpret_cast<const u16*>(frame + Code::bytes(J * kBlock)) + at.j));
  const float weighted = weight[s], kept = keep[s];
  const u8* codes = frame + Code::bytes(static_cast<i64>(at.j) * kBlock);
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    const int inside_block = row * kLanes + lane();
    const i64 from = tensors.start(s, at.b) + inside_block;
    u32 old[kBatch];
    float values[kBatch];
    load_raw(old, p, kind, from, left - inside_block);
    widen(old, kind);
#pragma unroll
    for (int r = 0; r < kBatch; ++r)
      values[r] = __uint_as_float(old[r]) * kept +
                  Code::value(Code::load(codes, (row + r) * kLanes + lane()), scale) * weighted;
    store_floats(p, kind, from, values, left - inside_block);
  }
}

}  // namespace

// The kernels NAME_encode, NAME_decode and NAME_decode_mean of a code.
#define ONEBIT_CODE(NAME, Code)                                                                                        \
  ONEBIT_KERNEL NAME##_encode(float* x, i64 x_stride, const void* error, i64 error_stride, i64 error_kind, u8* frames, \
                              i64 frame_stride, i64 frame_bytes, const int* counts, i64 counts_stride, i64 K, i64 J) { \
    encode_codes<Code>(x, x_stride, error, error_stride, error_kind, frames, frame_stride, frame_bytes, counts,        \
                       counts_stride, K, J);                                                                           \
  }                                                                                                                    \
  ONEBIT_KERNEL NAME##_decode(const u8* frames, i64 frame_stride, float* out, i64 out_stride, i64 K, i64 J,            \
                              float weight, float keep, i64 reads_out) {                                               \
    decode_codes<Code>(frames, frame_stride, out, out_stride, K, J, weight, keep, reads_out);                          \
  }                                                                                                                    \
  ONEBIT_KERNEL NAME##_decode_mean(const u8* frames, i64 frame_stride, i64 K, float* out, i64 J, float share) {        \
    mean_of_codes<Code>(frames, frame_stride, K, out, J, share);                                                       \
  }

ONEBIT_CODE(int8, Int8Code)
ONEBIT_CODE(int4, Int4Code)
ONEBIT_CODE(log4, Log4Code)

ONEBIT_KERNEL int4_apply(const u8* frames, i64 frame_stride, i64 K, i64 J, const int* owners, const i64* params,
                         const i64* first, i64 S, const float* weight, const float* keep) {
  const Pointers tensors{owners, params, first, static_cast<int>(S)};
  apply_codes<Int4Code>(frames, frame_stride, K, J, tensors, weight, keep);
}
