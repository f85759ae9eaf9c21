// Sign frames: the parts of a block, and their kernels. Compiled after lanes.cu.

#if ONEBIT_BLOCK % 64 == 0
namespace {
namespace sign {

constexpr i64 kBitBytes = kBlock / 8;

// Of floats, in every thread: l + (l+8), then l + (l+4), l + (l+2), l + (l+1). Sums commute, so all lanes get the same.
__device__ __forceinline__ float sum_in_halves(float lane_sum) {
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) lane_sum = lane_sum + __shfl_xor_sync(kEveryThread, lane_sum, apart);
  return lane_sum;
}

__device__ __forceinline__ const u16* scale_of(const u8* frame, u32 J, u32 j) {
  return reinterpret_cast<const u16*>(frame + J * kBitBytes) + j;
}

// This thread's sign bits of kBatch rows, two rows in a word: the odd row's at bit 31, the even one's at bit 15.
struct Signs {
  u32 words[kBatch / 2];

  // bits: of the block; rows of frames lie at multiples of 8 bytes.
  __device__ __forceinline__ void load(const u8* bits, int row) {
    const u64* from = reinterpret_cast<const u64*>(bits + 2 * row);
#pragma unroll
    for (int i = 0; i < kBatch / 4; ++i) {
      const u64 four_rows = from[i];
      words[2 * i] = static_cast<u32>(four_rows) << (15 - lane());
      words[2 * i + 1] = static_cast<u32>(four_rows >> 32) << (15 - lane());
    }
  }
  // magnitude with the sign put in; the opposite sign if magnitude is negative.
  __device__ __forceinline__ float value(int r, float magnitude) const {
    const u32 word = r % 2 ? words[r / 2] : words[r / 2] << 16;
    return __uint_as_float(__float_as_uint(magnitude) ^ (word & kSignBit));
  }
};

// Where nothing is summed over lanes a thread may take any elements: four neighbours of each 64, thread l those from 4·l
// on. One load brings them if their address is a multiple of their four sizes; their signs are bits of one word.
constexpr int kQuads = kBlock / 64;
constexpr int kQuadBatch = kQuads % 4 == 0 ? 4 : kQuads % 2 == 0 ? 2 : 1;  // loaded at a time
typedef u32 Quads[kQuadBatch][4];

template <class Word>
struct alignas(4 * sizeof(Word)) Four {
  Word words[4];
};

__device__ __forceinline__ bool is_aligned_in_fours(const void* data, int kind, i64 at) {
  const int size = kind == kFloat32 ? 4 : 2;
  return (reinterpret_cast<u64>(data) + static_cast<u64>(at * size)) % (4 * size) == 0;
}

template <class Word>
__device__ __forceinline__ void load_four_words(Quads& raw, const Word* from) {
#pragma unroll
  for (int i = 0; i < kQuadBatch; ++i) {
    const Four<Word> four = *reinterpret_cast<const Four<Word>*>(from + 64 * i);
#pragma unroll
    for (int e = 0; e < 4; ++e) raw[i][e] = four.words[e];
  }
}

template <class Word>
__device__ __forceinline__ void store_four_words(Word* to, const Quads& raw) {
#pragma unroll
  for (int i = 0; i < kQuadBatch; ++i) {
    Four<Word> four;
#pragma unroll
    for (int e = 0; e < 4; ++e) four.words[e] = static_cast<Word>(raw[i][e]);
    *reinterpret_cast<Four<Word>*>(to + 64 * i) = four;
  }
}

// data: aligned in fours; of kind kFloat32, kBfloat16 or kFloat16. at: of this thread's first.
__device__ __forceinline__ void load_quads(Quads& raw, const void* data, int kind, i64 at) {
  if (kind == kFloat32)
    load_four_words(raw, static_cast<const u32*>(data) + at);
  else
    load_four_words(raw, static_cast<const u16*>(data) + at);
}

// Floats, in place. What depends on the kind is decided once, as in lanes.cu.
__device__ __forceinline__ void widen_quads(Quads& raw, int kind) {
#pragma unroll
  for (int i = 0; i < kQuadBatch; ++i) {
    if (kind == kBfloat16) {
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[i][e] <<= 16;
    } else if (kind == kFloat16) {
#pragma unroll
      for (int e = 0; e < 4; ++e) raw[i][e] = __float_as_uint(float_from_half(static_cast<u16>(raw[i][e])));
    }
  }
}

__device__ __forceinline__ void store_quads(void* data, int kind, i64 at, const float (&values)[kQuadBatch][4]) {
  Quads raw;
  if (kind == kFloat32) {
#pragma unroll
    for (int n = 0; n < 4 * kQuadBatch; ++n) raw[n / 4][n % 4] = __float_as_uint(values[n / 4][n % 4]);
    return store_four_words(static_cast<u32*>(data) + at, raw);
  }
  if (kind == kBfloat16) {
#pragma unroll
    for (int n = 0; n < 4 * kQuadBatch; ++n) raw[n / 4][n % 4] = bf16_near(values[n / 4][n % 4]);
  } else {
#pragma unroll
    for (int n = 0; n < 4 * kQuadBatch; ++n) raw[n / 4][n % 4] = half_near(values[n / 4][n % 4]);
  }
  store_four_words(static_cast<u16*>(data) + at, raw);
}

// The signs of this thread's neighbours, kQuadBatch times four: bit e of a word is element e's.
struct QuadSigns {
  u32 words[kQuadBatch];

  // bits: of the block. quad: the first of these.
  __device__ __forceinline__ void load(const u8* bits, int quad) {
    const u64* from = reinterpret_cast<const u64*>(bits) + quad;
#pragma unroll
    for (int i = 0; i < kQuadBatch; ++i) words[i] = static_cast<u32>(from[i] >> (4 * lane()));
  }
  // magnitude with the sign put in; the opposite sign if magnitude is negative.
  __device__ __forceinline__ float value(int i, int e, float magnitude) const {
    return __uint_as_float(__float_as_uint(magnitude) ^ ((words[i] << (31 - e)) & kSignBit));
  }
};

// Where a block's frame and residual go, and what is added to c.
struct Target {
  const void* error;
  int error_kind;
  i64 error_at;  // the block's first element
  void* residual;
  int residual_kind;
  i64 residual_at;
  u8* bits;
  u16* scale;
  int count;
  bool mean_abs;
  bool inside;
};

template <class Source>
__device__ __forceinline__ void compute_c(Source& source, const Target& to, int row, float* c) {
  u32 error[kBatch];
  load_raw(error, to.error, to.error_kind, to.error_at + row * kLanes + lane());
  source.load(row);
  source.compute(c);
  finish_c(c, error, to.error_kind, to.count, row);
}

// What becomes of the error: the block's new residual; no change; or a residual with a share of the value sent.
enum class Owed { kResidual, kStays, kReturns };

// One block of c = source + error. Reads memory once if c is kept.
template <Owed kOwed = Owed::kResidual, class Source>
__device__ __forceinline__ void encode_from(Source& source, const Target& to, float returned = 0.0f) {
  float kept[kKept ? kRows : kBatch];
  float sum = 0.0f;
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    float* c = kept + (kKept ? row : 0);
    compute_c(source, to, row, c);
    if (to.mean_abs) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r) sum = sum + fabsf(c[r]);
    } else {
#pragma unroll
      for (int r = 0; r < kBatch; ++r) sum = sum + c[r] * c[r];
    }
  }
  const float mean = __fdiv_rn(sum_in_halves(sum), static_cast<float>(to.count > 0 ? to.count : 1));
  const u32 exact = __float_as_uint(to.mean_abs ? mean : __fsqrt_rn(mean));
  const bool is_bad = exact >= 0x7F7F8000u;  // rounds to infinity, or is a NaN
  const u32 scale = is_bad ? kNanBf16 : (exact + 0x7FFFu + ((exact >> 16) & 1u)) >> 16;
  if (to.inside && lane() == 0) *to.scale = static_cast<u16>(scale);

  u32 mine = 0;  // lane l takes the bits of row l of each 16 rows, so that they are written together
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    float* c = kept + (kKept ? row : 0);
    if (!kKept) compute_c(source, to, row, c);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const u32 minus = is_bad ? 0u : __float_as_uint(c[r]) & kSignBit;
      const u32 signs = __ballot_sync(kEveryThread, minus != 0) >> (threadIdx.x & kLanes);
      if ((row + r) % kLanes == lane()) mine = signs;
      const float value = __uint_as_float(scale << 16 | minus);
      c[r] = c[r] - value;
      if constexpr (kOwed == Owed::kReturns) c[r] = (is_bad ? 0.0f : c[r]) + value * returned;
    }
    const int real = kOwed != Owed::kReturns && is_bad ? 0 : to.count;
    if (real < kBlock) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r)
        if ((row + r) * kLanes + lane() >= real) c[r] = 0.0f;
    }
    const bool stays = kOwed == Owed::kStays || (kOwed == Owed::kReturns && to.count == 0);
    if (to.inside && !stays) store_floats(to.residual, to.residual_kind, to.residual_at + row * kLanes + lane(), c);
    const int end = row + kBatch, base = row / kLanes * kLanes;
    if ((end % kLanes == 0 || end == kRows) && to.inside && base + lane() < kRows)
      reinterpret_cast<u16*>(to.bits)[base + lane()] = static_cast<u16>(mine);
  }
}

struct RowSource {
  const float* x;  // the block's
  u32 raw[kBatch];

  __device__ __forceinline__ void load(int row) { load_raw(raw, x, kFloat32, row * kLanes + lane()); }
  __device__ __forceinline__ void compute(float* c) const {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) c[r] = __uint_as_float(raw[r]);
  }
};

// The mean over K frames: row after row, in registers.
struct MeanSource {
  const u8* bits;
  const u16* scale;
  i64 stride;
  int K;
  float share;
  float sum[kBatch];

  __device__ __forceinline__ void load(int row) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) sum[r] = -0.0f;  // -0.0 + value is value, also where that is -0.0
#pragma unroll 4
    for (int k = 0; k < K; ++k) {
      Signs signs;
      signs.load(bits + k * stride, row);
      const float magnitude = float_from_bf16(*reinterpret_cast<const u16*>(reinterpret_cast<const u8*>(scale) + k * stride));
#pragma unroll
      for (int r = 0; r < kBatch; ++r) sum[r] = sum[r] + signs.value(r, magnitude);
    }
  }
  __device__ __forceinline__ void compute(float* c) const {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) c[r] = sum[r] * share;
  }
};

struct GradientSource {
  const void* grad;
  int kind, left;
  i64 at;
  float add, unscale;
  u32 g[kBatch];

  __device__ __forceinline__ void load(int row) {
    const int from = row * kLanes + lane();
    load_raw(g, grad, kind, at + from, left - from);
  }
  __device__ __forceinline__ void compute(float* c) {
    widen(g, kind);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) c[r] = __uint_as_float(g[r]) * unscale * add;
  }
};

template <bool kPacked, bool kVariance>
struct MomentumSource {
  const void* grad;
  int grad_kind, grad_left;
  i64 grad_at;
  const float* D;  // or the variance: the block's
  float floor, correction, eps;
  const float* m;  // the block's, or else bits and scale of its frame
  const u8* m_bits;
  float m_scale;
  float keep, add, own, unscale;

  u32 g[kBatch], d[kBatch], old[kPacked ? 1 : kBatch];
  Signs signs;

  __device__ __forceinline__ void load_gradients(int row) {
    const int at = row * kLanes + lane();
    load_raw(g, grad, grad_kind, grad_at + at, grad_left - at);
    load_raw(d, D, kFloat32, at);
  }
  __device__ __forceinline__ void load(int row) {
    load_gradients(row);
    if constexpr (kPacked)
      signs.load(m_bits, row);
    else
      load_raw(old, m, kFloat32, row * kLanes + lane());
  }
  __device__ __forceinline__ float divisor(int r) const {
    const float number = __uint_as_float(d[r]);
    return kVariance ? __fsqrt_rn(fmaxf(number * correction, floor)) + eps : number;
  }
  __device__ __forceinline__ float normalised(float mine, float divisor) const {
    return __fdiv_rn(mine, __fsqrt_rn(divisor * divisor + (mine * mine) * own));
  }
  __device__ __forceinline__ float before(int r) const {
    if constexpr (kPacked)
      return signs.value(r, m_scale);
    else
      return __uint_as_float(old[r]);
  }
  __device__ __forceinline__ void compute(float* c) {
    widen(g, grad_kind);
#pragma unroll
    for (int r = 0; r < kBatch; ++r)
      c[r] = normalised(__uint_as_float(g[r]) * unscale, divisor(r)) * add + before(r) * keep;
  }
};

// kBatch rows of a block's residual, from element `flat` on, as if the gradients had had the factor `again`.
template <class Source>
__device__ __forceinline__ void correct_rows(Source& source, int row, float again, void* residual, int kind, i64 flat) {
  const i64 at = flat + row * kLanes + lane();
  u32 held[kBatch];
  float values[kBatch];
  load_raw(held, residual, kind, at);
  source.load_gradients(row);
  widen(held, kind);
  widen(source.g, source.grad_kind);
#pragma unroll
  for (int r = 0; r < kBatch; ++r) {
    const float g = __uint_as_float(source.g[r]), d = source.divisor(r);
    const float more = source.normalised(g * again, d) - source.normalised(g * source.unscale, d);
    values[r] = __uint_as_float(held[r]) + more * source.add;
  }
  store_floats(residual, kind, at, values);
}

// Of kBatch rows: g² and g·(m·D), added to this lane's sums.
template <class Source>
__device__ __forceinline__ void add_rows(Source& source, int row, float& squares, float& products) {
  source.load(row);
  widen(source.g, source.grad_kind);
#pragma unroll
  for (int r = 0; r < kBatch; ++r) {
    const float g = __uint_as_float(source.g[r]);
    squares = squares + g * g;
    products = products + g * (source.before(r) * source.divisor(r));
  }
}

// kBatch rows of a block's local step. start: of the block in its parameter, of which `left` elements lie in it.
template <class Source>
__device__ __forceinline__ void take_rows(Source& source, int row, void* p, int kind, i64 start, int left, float* m,
                                          float* u, float* anchor, float weight, float kept) {
  const int within = row * kLanes + lane();
  u32 sum[kBatch], held[kBatch];
  float values[kBatch], moved[kBatch];
  load_raw(sum, u, kFloat32, within);
  load_raw(held, p, kind, start + within, left - within);
  source.load(row);
  source.compute(values);
  store_floats(m, kFloat32, within, values);
#pragma unroll
  for (int r = 0; r < kBatch; ++r) moved[r] = values[r] * weight;
#pragma unroll
  for (int r = 0; r < kBatch; ++r) values[r] = __uint_as_float(sum[r]) + moved[r];
  store_floats(u, kFloat32, within, values);
  if (kind == kNone) return;
  widen(held, kind);
  if (anchor) store_words(reinterpret_cast<u32*>(anchor) + within, held, left - within);
#pragma unroll
  for (int r = 0; r < kBatch; ++r) values[r] = __uint_as_float(held[r]) * kept - moved[r];
  store_floats(p, kind, start + within, values, left - within);
}

// a if a > b, otherwise b; so b if one of them is a NaN.
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

// Of an owner's step, what kBatch rows of a block are made of, and make. Asked twice: nothing is kept between the sums
// and what needs them, and the second time all of it comes from a cache.
struct OwnerRows {
  MeanSource means;
  const u8* bits;  // of the owner's own frame
  float magnitude;
  const float* grad;  // the block's, as the variance
  const float* variance;
  float correction1, correction2, weight, own, common;
  int count;

  float g[kBatch], q[kBatch], m_hat[kBatch], next[kBatch], v_hat[kBatch];

  __device__ __forceinline__ void compute(int row) {
    const int at = row * kLanes + lane();
    u32 grads[kBatch], before[kBatch];
    Signs signs;
    load_raw(grads, grad, kFloat32, at);
    load_raw(before, variance, kFloat32, at);
    signs.load(bits, row);
    means.load(row);
    means.compute(m_hat);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const bool is_real = at + r * kLanes < count;
      const float v = __uint_as_float(before[r]);
      g[r] = is_real ? __uint_as_float(grads[r]) : 0.0f;
      q[r] = is_real ? signs.value(r, magnitude) : 0.0f;
      m_hat[r] = is_real ? m_hat[r] * correction1 : 0.0f;
      const float after = v + ((m_hat[r] * common + g[r] * own) * g[r] - v) * weight;
      next[r] = is_real ? after : v;
      v_hat[r] = is_real ? larger(0.0f, after) * correction2 : 0.0f;
    }
  }
};

}  // namespace sign
}  // namespace

ONEBIT_KERNEL sign_encode(float* x, i64 x_stride, const void* error, i64 error_stride, i64 error_kind, u8* frames,
                          i64 frame_stride, i64 frame_bytes, const int* counts, i64 counts_stride, i64 K, i64 J,
                          i64 mean_abs) {
  const Place at(static_cast<u32>(K * J), static_cast<u32>(J));
  u8* frame = frames + at.k * frame_stride;
  float* mine = x + at.k * x_stride + static_cast<i64>(at.j) * kBlock;
  const sign::Target to{error,
                        static_cast<int>(error_kind),
                        at.k * error_stride + static_cast<i64>(at.j) * kBlock,
                        mine,
                        kFloat32,
                        0,
                        frame + at.j * sign::kBitBytes,
                        const_cast<u16*>(sign::scale_of(frame, J, at.j)),
                        counts ? counts[at.k * counts_stride + at.j] : kBlock,
                        mean_abs != 0,
                        at.inside};
  clear_tail(frame, J * (sign::kBitBytes + 2), frame_bytes, at, J);
  sign::RowSource source;
  source.x = mine;
  sign::encode_from(source, to);
}

ONEBIT_KERNEL sign_decode(const u8* frames, i64 frame_stride, float* out, i64 out_stride, i64 K, i64 J, float weight,
                          float keep, i64 reads_out) {
  const Place at(static_cast<u32>(K * J), static_cast<u32>(J));
  if (!at.inside) return;
  const u8* frame = frames + at.k * frame_stride;
  const float magnitude = float_from_bf16(*sign::scale_of(frame, J, at.j)) * weight;
  float* mine = out + at.k * out_stride + static_cast<i64>(at.j) * kBlock;
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    sign::Signs signs;
    u32 old[kBatch];
    float values[kBatch];
    signs.load(frame + at.j * sign::kBitBytes, row);
    load_raw(old, mine, reads_out ? kFloat32 : kNone, row * kLanes + lane());
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const float value = signs.value(r, magnitude);
      values[r] = reads_out ? __uint_as_float(old[r]) * keep + value : value;
    }
    store_floats(mine, kFloat32, row * kLanes + lane(), values);
  }
}

ONEBIT_KERNEL sign_decode_mean(const u8* frames, i64 frame_stride, i64 K, float* out, i64 J, float share) {
  const Place at(static_cast<u32>(J), static_cast<u32>(J));
  if (!at.inside) return;
  sign::MeanSource source;
  source.bits = frames + at.j * sign::kBitBytes, source.scale = sign::scale_of(frames, J, at.j);
  source.stride = frame_stride, source.K = static_cast<int>(K), source.share = share;
#pragma unroll 1
  for (int row = 0; row < kRows; row += kBatch) {
    float values[kBatch];
    source.load(row);
    source.compute(values);
    store_floats(out, kFloat32, static_cast<i64>(at.j) * kBlock + row * kLanes + lane(), values);
  }
}

ONEBIT_KERNEL sign_encode_mean(const u8* received, i64 received_stride, i64 K, float share, const void* error,
                               i64 error_kind, u8* frame, i64 frame_bytes, const int* counts, void* residual,
                               i64 residual_kind, i64 J, i64 mean_abs) {
  const Place at(static_cast<u32>(J), static_cast<u32>(J));
  const i64 first = static_cast<i64>(at.j) * kBlock;
  const sign::Target to{error,
                        static_cast<int>(error_kind),
                        first,
                        residual,
                        static_cast<int>(residual_kind),
                        first,
                        frame + at.j * sign::kBitBytes,
                        const_cast<u16*>(sign::scale_of(frame, J, at.j)),
                        counts ? counts[at.j] : kBlock,
                        mean_abs != 0,
                        at.inside};
  clear_tail(frame, J * (sign::kBitBytes + 2), frame_bytes, at, J);
  sign::MeanSource source;
  source.bits = received + at.j * sign::kBitBytes, source.scale = sign::scale_of(received, J, at.j);
  source.stride = received_stride, source.K = static_cast<int>(K), source.share = share;
  sign::encode_from(source, to);
}

// One kernel for each form of momentum (frames or floats) and D (floats or a variance): each with its own registers.
// floor, correction, eps: of a variance. m: frames and the stride of their rows, or floats.
#define ONEBIT_ENCODE_MOMENTUM(NAME, PACKED, VARIANCE)                                                                   \
  ONEBIT_KERNEL NAME(const int* owners, const i64* grads, const i64* first, i64 S, const float* D, const float* floor,   \
                     float correction, float eps, const void* m, i64 m_stride, float keep, float add, float own,         \
                     float unscale, const void* error, i64 error_kind, u8* frames, i64 frame_stride, i64 frame_bytes,    \
                     const int* counts, i64 counts_stride, void* residual, i64 residual_kind, i64 K, i64 J,              \
                     i64 mean_abs) {                                                                                     \
    const Place at(static_cast<u32>(K * J), static_cast<u32>(J));                                                        \
    const i64 flat = static_cast<i64>(at.b) * kBlock;                                                                    \
    u8* frame = frames + at.k * frame_stride;                                                                            \
    const sign::Target to{error,                                                                                         \
                          static_cast<int>(error_kind),                                                                  \
                          flat,                                                                                          \
                          residual,                                                                                      \
                          static_cast<int>(residual_kind),                                                               \
                          flat,                                                                                          \
                          frame + at.j * sign::kBitBytes,                                                                \
                          const_cast<u16*>(sign::scale_of(frame, J, at.j)),                                              \
                          counts ? counts[at.k * counts_stride + at.j] : kBlock,                                         \
                          mean_abs != 0,                                                                                 \
                          at.inside};                                                                                    \
    clear_tail(frame, J * (sign::kBitBytes + 2), frame_bytes, at, J);                                                    \
    sign::MomentumSource<PACKED, VARIANCE> source;                                                                       \
    const Pointers tensors{owners, grads, first, static_cast<int>(S)};                                                   \
    const int s = owners[at.b];                                                                                          \
    source.grad_kind = s < 0 ? kNone : tensors.kind(s);                                                                  \
    source.grad = s < 0 ? nullptr : reinterpret_cast<const void*>(grads[s]);                                             \
    source.grad_at = s < 0 ? 0 : tensors.start(s, at.b);                                                                 \
    source.grad_left = s < 0 ? 0 : tensors.left(s, at.b);                                                                \
    source.D = D + flat, source.correction = correction, source.eps = eps;                                               \
    source.floor = VARIANCE ? floor[at.b] : 0.0f;                                                                        \
    if (PACKED) {                                                                                                        \
      const u8* m_frame = static_cast<const u8*>(m) + at.k * m_stride;                                                   \
      source.m_bits = m_frame + at.j * sign::kBitBytes;                                                                  \
      source.m_scale = float_from_bf16(*sign::scale_of(m_frame, J, at.j));                                               \
    } else {                                                                                                             \
      source.m = static_cast<const float*>(m) + flat;                                                                    \
    }                                                                                                                    \
    source.keep = keep, source.add = add, source.own = own, source.unscale = unscale;                                    \
    sign::encode_from(source, to);                                                                                       \
  }

ONEBIT_ENCODE_MOMENTUM(sign_encode_momentum, false, false)
ONEBIT_ENCODE_MOMENTUM(sign_encode_momentum_variance, false, true)
ONEBIT_ENCODE_MOMENTUM(sign_encode_momentum_packed, true, false)
ONEBIT_ENCODE_MOMENTUM(sign_encode_momentum_packed_variance, true, true)

// owed: the error and, if it is returned, the residual.
#define ONEBIT_ENCODE_GRADIENTS(NAME, OWED)                                                                              \
  ONEBIT_KERNEL NAME(const int* owners, const i64* grads, const i64* first, i64 S, float add, float unscale, void* owed, \
                     i64 owed_kind, float returned, u8* frames, i64 frame_stride, i64 frame_bytes, const int* counts,    \
                     i64 counts_stride, i64 K, i64 J, i64 mean_abs) {                                                    \
    const Place at(static_cast<u32>(K * J), static_cast<u32>(J));                                                        \
    const i64 flat = static_cast<i64>(at.b) * kBlock;                                                                    \
    u8* frame = frames + at.k * frame_stride;                                                                            \
    const sign::Target to{owed,                                                                                          \
                          static_cast<int>(owed_kind),                                                                   \
                          flat,                                                                                          \
                          owed,                                                                                          \
                          static_cast<int>(owed_kind),                                                                   \
                          flat,                                                                                          \
                          frame + at.j * sign::kBitBytes,                                                                \
                          const_cast<u16*>(sign::scale_of(frame, J, at.j)),                                              \
                          counts ? counts[at.k * counts_stride + at.j] : kBlock,                                         \
                          mean_abs != 0,                                                                                 \
                          at.inside};                                                                                    \
    clear_tail(frame, J * (sign::kBitBytes + 2), frame_bytes, at, J);                                                    \
    sign::GradientSource source;                                                                                         \
    const Pointers tensors{owners, grads, first, static_cast<int>(S)};                                                   \
    const int s = owners[at.b];                                                                                          \
    source.kind = s < 0 ? kNone : tensors.kind(s);                                                                       \
    source.grad = s < 0 ? nullptr : reinterpret_cast<const void*>(grads[s]);                                             \
    source.at = s < 0 ? 0 : tensors.start(s, at.b);                                                                      \
    source.left = s < 0 ? 0 : tensors.left(s, at.b);                                                                     \
    source.add = add, source.unscale = unscale;                                                                          \
    sign::encode_from<OWED>(source, to, returned);                                                                       \
  }

ONEBIT_ENCODE_GRADIENTS(sign_encode_gradients, sign::Owed::kStays)
ONEBIT_ENCODE_GRADIENTS(sign_encode_gradients_returning, sign::Owed::kReturns)

ONEBIT_KERNEL sign_apply(const u8* frames, i64 frame_stride, i64 K, i64 J, const int* owners, const i64* params,
                         const i64* first, i64 S, const float* weight, const float* keep) {
  const Place at(static_cast<u32>(K * J), static_cast<u32>(J));
  const int s = owners[at.b];
  if (!at.inside || s < 0) return;
  const Pointers tensors{owners, params, first, static_cast<int>(S)};
  const int kind = tensors.kind(s), left = tensors.left(s, at.b);
  if (kind == kNone) return;
  void* p = reinterpret_cast<void*>(params[s]);
  const u8* frame = frames + at.k * frame_stride;
  const float magnitude = float_from_bf16(*sign::scale_of(frame, J, at.j)) * weight[s], kept = keep[s];
  const i64 start = tensors.start(s, at.b);
  if (left >= kBlock && sign::is_aligned_in_fours(p, kind, start)) {
#pragma unroll kUnrolled
    for (int quad = 0; quad < sign::kQuads; quad += sign::kQuadBatch) {
      const i64 from = start + 64 * quad + 4 * lane();
      sign::QuadSigns signs;
      sign::Quads old;
      float values[sign::kQuadBatch][4];
      sign::load_quads(old, p, kind, from);
      signs.load(frame + at.j * sign::kBitBytes, quad);
      sign::widen_quads(old, kind);
#pragma unroll
      for (int n = 0; n < 4 * sign::kQuadBatch; ++n)
        values[n / 4][n % 4] = __uint_as_float(old[n / 4][n % 4]) * kept + signs.value(n / 4, n % 4, magnitude);
      sign::store_quads(p, kind, from, values);
    }
    return;
  }
#pragma unroll kUnrolled
  for (int row = 0; row < kRows; row += kBatch) {
    const int inside_block = row * kLanes + lane();
    const i64 from = start + inside_block;
    sign::Signs signs;
    u32 old[kBatch];
    float values[kBatch];
    load_raw(old, p, kind, from, left - inside_block);
    signs.load(frame + at.j * sign::kBitBytes, row);
    widen(old, kind);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) values[r] = __uint_as_float(old[r]) * kept + signs.value(r, magnitude);
    store_floats(p, kind, from, values, left - inside_block);
  }
}

// Rule 9. corrections: of each block, or null.
ONEBIT_KERNEL sign_owner_step(const u8* received, i64 received_stride, i64 K, i64 row, float share, const float* grad,
                              const int* counts, float* variance, float* direction, float* D, float* sums,
                              const float* corrections, float correction1, float correction2, float weight, float own,
                              float common, float eps, float floor, float inverse_limit, i64 J) {
  const Place at(static_cast<u32>(J), static_cast<u32>(J));
  const i64 first = static_cast<i64>(at.j) * kBlock;
  const u8* frame = received + row * received_stride;
  const u16* scales = sign::scale_of(received, J, at.j);
  sign::OwnerRows rows;
  rows.means.bits = received + at.j * sign::kBitBytes, rows.means.scale = scales;
  rows.means.stride = received_stride, rows.means.K = static_cast<int>(K), rows.means.share = share;
  rows.bits = frame + at.j * sign::kBitBytes;
  rows.magnitude = float_from_bf16(*sign::scale_of(frame, J, at.j));
  rows.grad = grad + first, rows.variance = variance + first;
  rows.correction1 = corrections ? corrections[at.j] : correction1;
  rows.correction2 = corrections ? corrections[J + at.j] : correction2;
  rows.weight = weight, rows.own = own, rows.common = common, rows.count = counts[at.j];
  float v_hats = -0.0f, of_block[4] = {-0.0f, -0.0f, -0.0f, -0.0f};  // -0.0 + value is value, also where that is -0.0
#pragma unroll 1
  for (int from = 0; from < kRows; from += kBatch) {
    rows.compute(from);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const float g = rows.g[r], q = rows.q[r];
      v_hats = v_hats + rows.v_hat[r];
      of_block[0] = of_block[0] + g * g;
      of_block[1] = of_block[1] + q * q;
      of_block[2] = of_block[2] + g * (q * rows.correction1);
      of_block[3] = of_block[3] + g * rows.m_hat[r];
    }
  }
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const float sum = sign::sum_in_halves(of_block[s]);
    if (at.inside && lane() == s) sums[4 * static_cast<i64>(at.j) + s] = sum;
  }
  float scale = float_from_bf16(*scales);
  for (int k = 1; k < static_cast<int>(K); ++k)
    scale = scale + float_from_bf16(*reinterpret_cast<const u16*>(reinterpret_cast<const u8*>(scales) + k * received_stride));
  scale = scale * share * rows.correction1 * inverse_limit;
  const float n = static_cast<float>(rows.count > 0 ? rows.count : 1);
  const float least = sign::larger(scale * scale, __fdiv_rn(sign::sum_in_halves(v_hats) * floor, n));
  if (!at.inside) return;
#pragma unroll 1
  for (int from = 0; from < kRows; from += kBatch) {
    const int within = from * kLanes + lane();
    float D_rows[kBatch], direction_rows[kBatch];
    rows.compute(from);
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const bool is_real = within + r * kLanes < rows.count;
      D_rows[r] = is_real ? __fsqrt_rn(sign::larger(rows.v_hat[r], least)) + eps : 1.0f;
      direction_rows[r] = __fdiv_rn(rows.m_hat[r], D_rows[r]);
    }
    store_floats(variance + first, kFloat32, within, rows.next);
    store_floats(direction + first, kFloat32, within, direction_rows);
    if (D) store_floats(D + first, kFloat32, within, D_rows);
  }
}

// Rule 8, for both forms of D. Nothing but the gradients' and the parameters' pointers is per tensor.
#define ONEBIT_LOCAL_STEP(NAME, VARIANCE)                                                                                \
  ONEBIT_KERNEL NAME(const int* owners, const i64* grads, const i64* first, i64 S, const i64* params, const float* D,    \
                     const float* floor, float correction, float eps, float* m, float keep, float add, float own,        \
                     float unscale, float* u, float* anchor, float weight, float kept, i64 K, i64 J) {                   \
    const Place at(static_cast<u32>(K * J), static_cast<u32>(J));                                                        \
    if (!at.inside) return;                                                                                              \
    const i64 flat = static_cast<i64>(at.b) * kBlock;                                                                    \
    const int s = owners[at.b];                                                                                          \
    const Pointers tensors{owners, grads, first, static_cast<int>(S)};                                                   \
    const Pointers written{owners, params, first, static_cast<int>(S)};                                                  \
    const i64 start = s < 0 ? 0 : tensors.start(s, at.b);                                                                \
    const int left = s < 0 ? 0 : tensors.left(s, at.b);                                                                  \
    const int kind = s < 0 ? kNone : written.kind(s);                                                                    \
    void* p = s < 0 ? nullptr : reinterpret_cast<void*>(params[s]);                                                      \
    sign::MomentumSource<false, VARIANCE> source;                                                                        \
    source.grad_kind = s < 0 ? kNone : tensors.kind(s);                                                                  \
    source.grad = s < 0 ? nullptr : reinterpret_cast<const void*>(grads[s]);                                             \
    source.grad_at = start, source.grad_left = left;                                                                     \
    source.D = D + flat, source.correction = correction, source.eps = eps;                                               \
    source.floor = VARIANCE ? floor[at.b] : 0.0f;                                                                        \
    source.m = m + flat;                                                                                                 \
    source.keep = keep, source.add = add, source.own = own, source.unscale = unscale;                                    \
    _Pragma("unroll 1") for (int row = 0; row < kRows; row += kBatch) {                                                  \
      sign::take_rows(source, row, p, kind, start, left, m + flat, u + flat, anchor ? anchor + flat : nullptr, weight,   \
                      kept);                                                                                             \
    }                                                                                                                    \
  }

ONEBIT_LOCAL_STEP(local_step, false)
ONEBIT_LOCAL_STEP(local_step_variance, true)

// Rule 11, for both forms of D.
#define ONEBIT_CORRECT_RESIDUAL(NAME, VARIANCE)                                                                         \
  ONEBIT_KERNEL NAME(const int* owners, const i64* grads, const i64* first, i64 S, const float* D, const float* floor,  \
                     float correction, float eps, float add, float own, float unscale, float again, void* residual,     \
                     i64 residual_kind, i64 blocks) {                                                                   \
    const Place at(static_cast<u32>(blocks), static_cast<u32>(blocks));                                                 \
    const int s = owners[at.b];                                                                                         \
    if (!at.inside || s < 0) return;                                                                                    \
    const i64 flat = static_cast<i64>(at.b) * kBlock;                                                                   \
    const Pointers tensors{owners, grads, first, static_cast<int>(S)};                                                  \
    sign::MomentumSource<false, VARIANCE> source;                                                                       \
    source.grad_kind = tensors.kind(s), source.grad = reinterpret_cast<const void*>(grads[s]);                          \
    source.grad_at = tensors.start(s, at.b), source.grad_left = tensors.left(s, at.b);                                  \
    source.D = D + flat, source.correction = correction, source.eps = eps;                                              \
    source.floor = VARIANCE ? floor[at.b] : 0.0f;                                                                       \
    source.add = add, source.own = own, source.unscale = unscale;                                                       \
    if (source.grad_kind == kNone) return;                                                                              \
    _Pragma("unroll 1") for (int row = 0; row < kRows; row += kBatch)                                                   \
      sign::correct_rows(source, row, again, residual, static_cast<int>(residual_kind), flat);                          \
  }

ONEBIT_CORRECT_RESIDUAL(correct_residual, false)
ONEBIT_CORRECT_RESIDUAL(correct_residual_variance, true)

// Rule 12, for both forms of m and of D.
#define ONEBIT_MOMENTUM_SUMS(NAME, PACKED, VARIANCE)                                                                    \
  ONEBIT_KERNEL NAME(const int* owners, const i64* grads, const i64* first, i64 S, const float* D, const float* floor,  \
                     float correction, float eps, const void* m, i64 m_stride, float* sums, i64 K, i64 J) {             \
    const Place at(static_cast<u32>(K * J), static_cast<u32>(J));                                                       \
    const i64 flat = static_cast<i64>(at.b) * kBlock;                                                                   \
    const int s = owners[at.b];                                                                                         \
    const Pointers tensors{owners, grads, first, static_cast<int>(S)};                                                  \
    sign::MomentumSource<PACKED, VARIANCE> source;                                                                      \
    source.grad_kind = s < 0 ? kNone : tensors.kind(s);                                                                 \
    source.grad = s < 0 ? nullptr : reinterpret_cast<const void*>(grads[s]);                                            \
    source.grad_at = s < 0 ? 0 : tensors.start(s, at.b), source.grad_left = s < 0 ? 0 : tensors.left(s, at.b);          \
    source.D = D + flat, source.correction = correction, source.eps = eps;                                              \
    source.floor = VARIANCE ? floor[at.b] : 0.0f;                                                                       \
    if (PACKED) {                                                                                                       \
      const u8* m_frame = static_cast<const u8*>(m) + at.k * m_stride;                                                  \
      source.m_bits = m_frame + at.j * sign::kBitBytes;                                                                 \
      source.m_scale = float_from_bf16(*sign::scale_of(m_frame, J, at.j));                                              \
    } else {                                                                                                            \
      source.m = static_cast<const float*>(m) + flat;                                                                   \
    }                                                                                                                   \
    float squares = 0.0f, products = 0.0f;                                                                              \
    _Pragma("unroll 1") for (int row = 0; row < kRows; row += kBatch) sign::add_rows(source, row, squares, products);   \
    const float of_squares = sign::sum_in_halves(squares), of_products = sign::sum_in_halves(products);                 \
    if (at.inside && lane() < 2) sums[2 * static_cast<i64>(at.b) + lane()] = lane() == 0 ? of_squares : of_products;    \
  }

ONEBIT_MOMENTUM_SUMS(sign_momentum_sums, false, false)
ONEBIT_MOMENTUM_SUMS(sign_momentum_sums_variance, false, true)
ONEBIT_MOMENTUM_SUMS(sign_momentum_sums_packed, true, false)
ONEBIT_MOMENTUM_SUMS(sign_momentum_sums_packed_variance, true, true)

#endif
