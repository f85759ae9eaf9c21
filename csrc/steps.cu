// Frames of whole steps of a scale, int8 and int4: their kernels, over what sets the codes apart. Compiled after lanes.cu.

namespace {

struct Int8Code {
  static constexpr float kSteps = 127.0f;
  static __device__ __forceinline__ i64 bytes(i64 elements) { return elements; }
  static __device__ __forceinline__ int load(const u8* codes, i64 element) {
    return static_cast<signed char>(codes[element]);
  }
  // By whole warps, each half of one with 16 elements in a row.
  static __device__ __forceinline__ void store(u8* codes, i64 element, int q, bool inside) {
    if (inside) codes[element] = static_cast<u8>(q);
  }
};

// Two elements in a byte, the even one in its low half.
struct Int4Code {
  static constexpr float kSteps = 7.0f;
  static __device__ __forceinline__ i64 bytes(i64 elements) { return elements / 2; }
  static __device__ __forceinline__ int load(const u8* codes, i64 element) {
    return (static_cast<int>(codes[element / 2] >> (element % 2 * 4) & 0xF) ^ 8) - 8;
  }
  static __device__ __forceinline__ void store(u8* codes, i64 element, int q, bool inside) {
    const u32 mine = static_cast<u32>(q) & 0xFu, next = __shfl_xor_sync(kEveryThread, mine, 1);
    if (inside && element % 2 == 0) codes[element / 2] = static_cast<u8>(mine | next << 4);
  }
};

template <class Code>
__device__ __forceinline__ void encode_steps(float* x, i64 x_stride, const void* error, i64 error_stride, i64 error_kind,
                                             u8* frames, i64 frame_stride, i64 frame_bytes, const int* counts,
                                             i64 counts_stride, i64 K, i64 J) {
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
  u32 bits = 0;  // of the largest |c|: an infinity is above every number, and a NaN above both
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    float* c = kept + (kKept ? row : 0);
    compute_c(row, c);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const u32 size = __float_as_uint(c[r]) & ~kSignBit;
      bits = size > bits ? size : bits;
    }
  }
  bits = largest_bits(bits);
  const u32 not_below = (__float_as_uint(__fdiv_rn(__uint_as_float(bits), Code::kSteps)) + 0xFFFFu) >> 16;
  const float farthest = float_from_bf16(not_below) * (Code::kSteps + 1.0f);  // that any code decodes to
  const bool is_bad = bits >= kInfinityBits || __float_as_uint(farthest) >= kInfinityBits;
  const u32 scale = is_bad ? kNanBf16 : not_below;
  const float step = is_bad || scale == 0 ? 1.0f : float_from_bf16(scale);
  if (at.inside && lane() == 0) reinterpret_cast<u16*>(frame + Code::bytes(J * kBlock))[at.j] = static_cast<u16>(scale);
  u8* codes = frame + Code::bytes(static_cast<i64>(at.j) * kBlock);
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    float* c = kept + (kKept ? row : 0);
    if (!kKept) compute_c(row, c);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const float value = is_bad ? 0.0f : c[r];
      const float q = rintf(__fdiv_rn(value, step));  // step is not below max|c|/kSteps by more than a rounding
      Code::store(codes, (row + r) * kLanes + lane(), static_cast<int>(q), at.inside);
      c[r] = is_bad ? 0.0f : value - q * step;
    }
    if (at.inside) store_floats(mine, kFloat32, row * kLanes + lane(), c);
  }
}

template <class Code>
__device__ __forceinline__ void decode_steps(const u8* frames, i64 frame_stride, float* out, i64 out_stride, i64 K, i64 J,
                                             float weight, float keep, i64 reads_out) {
  const Place at(static_cast<u32>(K * J), static_cast<u32>(J));
  if (!at.inside) return;
  const u8* frame = frames + at.k * frame_stride;
  const float scale = float_from_bf16(reinterpret_cast<const u16*>(frame + Code::bytes(J * kBlock))[at.j]);
  const u8* codes = frame + Code::bytes(static_cast<i64>(at.j) * kBlock);
  float* mine = out + at.k * out_stride + static_cast<i64>(at.j) * kBlock;
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    u32 old[kBatch];
    int q[kBatch];
    float values[kBatch];
    load_raw(old, mine, reads_out ? kFloat32 : kNone, row * kLanes + lane());
#pragma unroll
    for (int r = 0; r < kBatch; ++r) q[r] = Code::load(codes, (row + r) * kLanes + lane());
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const float value = static_cast<float>(q[r]) * scale * weight;
      values[r] = reads_out ? __uint_as_float(old[r]) * keep + value : value;
    }
    store_floats(mine, kFloat32, row * kLanes + lane(), values);
  }
}

template <class Code>
__device__ __forceinline__ void mean_of_steps(const u8* frames, i64 frame_stride, i64 K, float* out, i64 J, float share) {
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
      const float step = float_from_bf16(*reinterpret_cast<const u16*>(scale + k * frame_stride));
      const u8* codes = frames + k * frame_stride + Code::bytes(first);
#pragma unroll
      for (int r = 0; r < kBatch; ++r)
        sum[r] = sum[r] + static_cast<float>(Code::load(codes, (row + r) * kLanes + lane())) * step;
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) sum[r] = sum[r] * share;
    store_floats(out, kFloat32, first + row * kLanes + lane(), sum);
  }
}

template <class Code>
__device__ __forceinline__ void apply_steps(const u8* frames, i64 frame_stride, i64 K, i64 J, const Pointers& tensors,
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
                  static_cast<float>(Code::load(codes, (row + r) * kLanes + lane())) * scale * weighted;
    store_floats(p, kind, from, values, left - inside_block);
  }
}

}  // namespace

ONEBIT_KERNEL int8_encode(float* x, i64 x_stride, const void* error, i64 error_stride, i64 error_kind, u8* frames,
                          i64 frame_stride, i64 frame_bytes, const int* counts, i64 counts_stride, i64 K, i64 J) {
  encode_steps<Int8Code>(x, x_stride, error, error_stride, error_kind, frames, frame_stride, frame_bytes, counts,
                         counts_stride, K, J);
}

ONEBIT_KERNEL int8_decode(const u8* frames, i64 frame_stride, float* out, i64 out_stride, i64 K, i64 J, float weight,
                          float keep, i64 reads_out) {
  decode_steps<Int8Code>(frames, frame_stride, out, out_stride, K, J, weight, keep, reads_out);
}

ONEBIT_KERNEL int8_decode_mean(const u8* frames, i64 frame_stride, i64 K, float* out, i64 J, float share) {
  mean_of_steps<Int8Code>(frames, frame_stride, K, out, J, share);
}

ONEBIT_KERNEL int4_encode(float* x, i64 x_stride, const void* error, i64 error_stride, i64 error_kind, u8* frames,
                          i64 frame_stride, i64 frame_bytes, const int* counts, i64 counts_stride, i64 K, i64 J) {
  encode_steps<Int4Code>(x, x_stride, error, error_stride, error_kind, frames, frame_stride, frame_bytes, counts,
                         counts_stride, K, J);
}

ONEBIT_KERNEL int4_decode(const u8* frames, i64 frame_stride, float* out, i64 out_stride, i64 K, i64 J, float weight,
                          float keep, i64 reads_out) {
  decode_steps<Int4Code>(frames, frame_stride, out, out_stride, K, J, weight, keep, reads_out);
}

ONEBIT_KERNEL int4_decode_mean(const u8* frames, i64 frame_stride, i64 K, float* out, i64 J, float share) {
  mean_of_steps<Int4Code>(frames, frame_stride, K, out, J, share);
}

ONEBIT_KERNEL int4_apply(const u8* frames, i64 frame_stride, i64 K, i64 J, const int* owners, const i64* params,
                         const i64* first, i64 S, const float* weight, const float* keep) {
  const Pointers tensors{owners, params, first, static_cast<int>(S)};
  apply_steps<Int4Code>(frames, frame_stride, K, J, tensors, weight, keep);
}
