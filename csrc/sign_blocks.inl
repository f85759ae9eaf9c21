// The sign frame of comm/kernels/reference.py over `Lanes`. Included by kernels.cpp once per instruction set.

// One block: x ← residual, bits and scale ← its part of the frame. Reads memory once: between the two loops c is in x,
// in the nearest cache. The second loop, which needs nothing from memory, fetches the next block meanwhile: 1.07 times
// the time of torch.add instead of 1.27 (AVX2, EPYC 7003, 2026-11).
template <class Error, bool kMeanAbs, bool kPadded>
ONEBIT_TARGET inline void encode_block(float* x, const void* error, int64_t error_at, int64_t block, int32_t count,
                                       uint8_t* bits, uint8_t* scale) {
  const Lanes zero = Lanes::splat(0.0f);
  Lanes sum = zero;
#pragma GCC unroll 4
  for (int64_t i = 0; i < block; i += kLanes) {
    Lanes c = Error::add(Lanes::load(x + i), error, error_at + i);
    if (kPadded) c = Lanes::select(real_lanes(count, i), c, zero);
    c.store(x + i);
    sum = sum + (kMeanAbs ? c.abs() : c * c);
  }
  const float n = static_cast<float>(count > 0 ? count : 1);
  const float mean = sum.sum_in_halves() / n;
  const uint16_t scale_bf16 = finite_bf16_or_nan(kMeanAbs ? mean : std::sqrt(mean));
  store_u16(scale, scale_bf16);
  if (scale_bf16 == kNanBf16) {
    std::memset(bits, 0, block / 8);
    std::memset(x, 0, block * sizeof(float));
    return;
  }
  const Lanes plus = Lanes::splat(float_from_bf16(scale_bf16));
#pragma GCC unroll 4
  for (int64_t i = 0; i < block; i += kLanes) {
    __builtin_prefetch(x + block + i);
    Error::prefetch(error, error_at + block + i);
    const Lanes c = Lanes::load(x + i);
    store_u16(bits + i / 8, c.sign_bits());  // padding is +0.0 by now: zero bits
    Lanes residual = c - plus.signed_as(c);
    if (kPadded) residual = Lanes::select(real_lanes(count, i), residual, zero);
    residual.store(x + i);
  }
}

template <class Error, bool kMeanAbs>
ONEBIT_TARGET void encode_blocks(const EncodeJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  BlockAt at(begin, job.J);
  for (int64_t left = end - begin; left > 0; --left, at.next()) {
    float* x = job.x + at.k * job.x_stride + at.j * block;
    const int64_t error_at = at.k * job.error_stride + at.j * block;
    uint8_t* frame = job.frames + at.k * job.frame_stride;
    uint8_t* bits = frame + at.j * (block / 8);
    uint8_t* scale = frame + job.J * (block / 8) + 2 * at.j;
    const int32_t count = job.counts ? job.counts[at.k * job.counts_stride + at.j] : static_cast<int32_t>(block);
    if (count < block)
      encode_block<Error, kMeanAbs, true>(x, job.error, error_at, block, count, bits, scale);
    else if (block == 256 && count == 256)
      encode_block<Error, kMeanAbs, false>(x, job.error, error_at, 256, 256, bits, scale);
    else
      encode_block<Error, kMeanAbs, false>(x, job.error, error_at, block, count, bits, scale);
  }
}

ONEBIT_TARGET void encode(const EncodeJob& job, int64_t begin, int64_t end) {
  switch (job.error_kind) {
    case FloatKind::kNone:
      return job.mean_abs ? encode_blocks<NoError, true>(job, begin, end) : encode_blocks<NoError, false>(job, begin, end);
    case FloatKind::kFloat32:
      return job.mean_abs ? encode_blocks<Float32Error, true>(job, begin, end)
                          : encode_blocks<Float32Error, false>(job, begin, end);
    case FloatKind::kBfloat16:
      return job.mean_abs ? encode_blocks<Bfloat16Error, true>(job, begin, end)
                          : encode_blocks<Bfloat16Error, false>(job, begin, end);
  }
}

template <bool kReadsOut>
ONEBIT_TARGET void decode_blocks(const DecodeJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  const Lanes weight = Lanes::splat(job.weight), keep = Lanes::splat(job.keep);
  BlockAt at(begin, job.J);
  for (int64_t left = end - begin; left > 0; --left, at.next()) {
    const uint8_t* frame = job.frames + at.k * job.frame_stride;
    const uint8_t* bits = frame + at.j * (block / 8);
    const Lanes scale = Lanes::splat(float_from_bf16(load_u16(frame + job.J * (block / 8) + 2 * at.j)));
    const Lanes plus = scale * weight, minus = scale.negated() * weight;
    float* out = job.out + at.k * job.out_stride + at.j * block;
#pragma GCC unroll 4
    for (int64_t i = 0; i < block; i += kLanes) {
      const Lanes value = Lanes::select(load_u16(bits + i / 8), minus, plus);
      (kReadsOut ? Lanes::load(out + i) * keep + value : value).store(out + i);
    }
  }
}

ONEBIT_TARGET void decode(const DecodeJob& job, int64_t begin, int64_t end) {
  job.reads_out ? decode_blocks<true>(job, begin, end) : decode_blocks<false>(job, begin, end);
}

// The mean of 64 elements. Their sum stays in registers over the rows, so that out is written once; 256 elements would
// fill AVX2's registers twice over, and write in bursts (a quarter slower on an EPYC 9004, 2026-11).
ONEBIT_TARGET inline void mean_of_64(const uint8_t* bits, const uint8_t* scale, int64_t frame_stride, int64_t K,
                                     Lanes share, float* out) {
  Lanes sum[4];
  for (Lanes& lanes : sum) lanes = Lanes::splat(-0.0f);  // -0.0 + value is value, also where that is -0.0
  for (int64_t k = 0; k < K; ++k, bits += frame_stride, scale += frame_stride) {
    const Lanes plus = Lanes::splat(float_from_bf16(load_u16(scale))), minus = plus.negated();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[i] = sum[i] + Lanes::select(load_u16(bits + 2 * i), minus, plus);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) (sum[i] * share).store(out + i * kLanes);
}

ONEBIT_TARGET void decode_mean(const DecodeMeanJob& job, int64_t begin, int64_t end) {
  const Lanes share = Lanes::splat(static_cast<float>(1.0 / static_cast<double>(job.K)));
  const uint8_t* scales = job.frames + job.J * (job.block / 8);
  for (int64_t j = begin; j < end; ++j)
    for (int64_t i = j * job.block; i < (j + 1) * job.block; i += 64)
      mean_of_64(job.frames + i / 8, scales + 2 * j, job.frame_stride, job.K, share, job.out + i);
}

constexpr Kernel kernel{encode, decode, decode_mean};

constexpr int64_t code_bytes(int64_t elements) { return elements / 8; }

ONEBIT_TARGET inline Lanes value_at(const uint8_t* bits, Lanes plus, Lanes minus, int64_t i) {
  return Lanes::select(load_u16(bits + i / 8), minus, plus);
}

// weight·value of each element of a block.
struct Weighted {
  const uint8_t* codes;
  Lanes plus, minus;

  ONEBIT_TARGET Weighted(const uint8_t* codes, Lanes scale, Lanes weight)
      : codes(codes), plus(scale * weight), minus(scale.negated() * weight) {}
  ONEBIT_TARGET Lanes operator()(int64_t i) const { return value_at(codes, plus, minus, i); }
};

// The frame of one block of c, which becomes the residual.
ONEBIT_TARGET inline void encode_values(float* c, int64_t block, int32_t count, bool mean_abs, uint8_t* codes,
                                        uint8_t* scale) {
  mean_abs ? encode_block<NoError, true, true>(c, nullptr, 0, block, count, codes, scale)
           : encode_block<NoError, false, true>(c, nullptr, 0, block, count, codes, scale);
}
