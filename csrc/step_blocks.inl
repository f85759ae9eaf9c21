// The int8 frame of comm/kernels/reference.py and the int4 frame of comm/kernels/int4_reference.py over `Lanes`: whole
// steps of a scale.
// Included by frames.inl once per frame, with what sets them apart in `Code`: kSteps, bytes, load, store.

// The largest |c|, as its bits: at or above kInfinityBits if the block holds an infinity or a NaN.
ONEBIT_TARGET inline uint32_t largest_bits(Lanes largest) {
  uint32_t lanes[kLanes], bits = 0;
  largest.store(reinterpret_cast<float*>(lanes));
  for (int l = 0; l < kLanes; ++l) bits = lanes[l] > bits ? lanes[l] : bits;
  return bits;
}

// One block: x ← residual, bytes and scale ← its part of the frame. Reads memory once: between the two loops c is in
// x, in the nearest cache.
template <class Error, bool kPadded>
ONEBIT_TARGET inline void encode_block(float* x, const void* error, int64_t error_at, int64_t block, int32_t count,
                                       uint8_t* bytes, uint8_t* scale) {
  const Lanes zero = Lanes::splat(0.0f);
  Lanes largest = zero;
#pragma GCC unroll 4
  for (int64_t i = 0; i < block; i += kLanes) {
    Lanes c = Error::add(Lanes::load(x + i), error, error_at + i);
    if (kPadded) c = Lanes::select(real_lanes(count, i), c, zero);
    c.store(x + i);
    largest = Lanes::larger_bits(largest, c.abs());
  }
  const uint32_t bits = largest_bits(largest);
  const uint16_t scale_bf16 = bf16_not_below(float_from_bits(bits) / Code::kSteps);
  const float farthest = float_from_bf16(scale_bf16) * (Code::kSteps + 1.0f);  // that any code decodes to
  if (bits >= kInfinityBits || bits_of_float(farthest) >= kInfinityBits) {
    store_u16(scale, kNanBf16);
    std::memset(bytes, 0, Code::bytes(block));
    std::memset(x, 0, block * sizeof(float));
    return;
  }
  store_u16(scale, scale_bf16);
  const Lanes s = Lanes::splat(scale_bf16 == 0 ? 1.0f : float_from_bf16(scale_bf16));
#pragma GCC unroll 4
  for (int64_t i = 0; i < block; i += kLanes) {
    __builtin_prefetch(x + block + i);
    Error::prefetch(error, error_at + block + i);
    const Lanes c = Lanes::load(x + i);
    const Lanes q = (c / s).rounded();  // s is not below max|c|/kSteps by more than a rounding: within ±kSteps
    Code::store(q, bytes + Code::bytes(i));
    (c - q * s).store(x + i);  // padding: 0 - 0
  }
}

template <class Error>
ONEBIT_TARGET void encode_blocks(const EncodeJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  BlockAt at(begin, job.J);
  for (int64_t left = end - begin; left > 0; --left, at.next()) {
    float* x = job.x + at.k * job.x_stride + at.j * block;
    const int64_t error_at = at.k * job.error_stride + at.j * block;
    uint8_t* frame = job.frames + at.k * job.frame_stride;
    uint8_t* bytes = frame + at.j * Code::bytes(block);
    uint8_t* scale = frame + job.J * Code::bytes(block) + 2 * at.j;
    const int32_t count = job.counts ? job.counts[at.k * job.counts_stride + at.j] : static_cast<int32_t>(block);
    if (count < block)
      encode_block<Error, true>(x, job.error, error_at, block, count, bytes, scale);
    else
      encode_block<Error, false>(x, job.error, error_at, block, count, bytes, scale);
  }
}

ONEBIT_TARGET void encode(const EncodeJob& job, int64_t begin, int64_t end) {
  switch (job.error_kind) {
    case FloatKind::kNone: return encode_blocks<NoError>(job, begin, end);
    case FloatKind::kFloat32: return encode_blocks<Float32Error>(job, begin, end);
    case FloatKind::kBfloat16: return encode_blocks<Bfloat16Error>(job, begin, end);
  }
}

template <bool kReadsOut>
ONEBIT_TARGET void decode_blocks(const DecodeJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  const Lanes weight = Lanes::splat(job.weight), keep = Lanes::splat(job.keep);
  BlockAt at(begin, job.J);
  for (int64_t left = end - begin; left > 0; --left, at.next()) {
    const uint8_t* frame = job.frames + at.k * job.frame_stride;
    const uint8_t* bytes = frame + at.j * Code::bytes(block);
    const Lanes scale = Lanes::splat(float_from_bf16(load_u16(frame + job.J * Code::bytes(block) + 2 * at.j)));
    float* out = job.out + at.k * job.out_stride + at.j * block;
#pragma GCC unroll 4
    for (int64_t i = 0; i < block; i += kLanes) {
      const Lanes value = Code::load(bytes + Code::bytes(i)) * scale * weight;
      (kReadsOut ? Lanes::load(out + i) * keep + value : value).store(out + i);
    }
  }
}

ONEBIT_TARGET void decode(const DecodeJob& job, int64_t begin, int64_t end) {
  job.reads_out ? decode_blocks<true>(job, begin, end) : decode_blocks<false>(job, begin, end);
}

// The sum of 16 elements stays in a register over the rows, so that out is written once.
ONEBIT_TARGET void decode_mean(const DecodeMeanJob& job, int64_t begin, int64_t end) {
  const Lanes share = Lanes::splat(static_cast<float>(1.0 / static_cast<double>(job.K)));
  for (int64_t j = begin; j < end; ++j) {
    const uint8_t* scale = job.frames + job.J * Code::bytes(job.block) + 2 * j;
    for (int64_t i = j * job.block; i < (j + 1) * job.block; i += kLanes) {
      Lanes sum = Lanes::splat(-0.0f);  // -0.0 + value is value, also where that is -0.0
      for (int64_t k = 0; k < job.K; ++k) {
        const int64_t row = k * job.frame_stride;
        sum = sum + Code::load(job.frames + Code::bytes(i) + row) * Lanes::splat(float_from_bf16(load_u16(scale + row)));
      }
      (sum * share).store(job.out + i);
    }
  }
}

constexpr Kernel kernel{encode, decode, decode_mean};

constexpr int64_t code_bytes(int64_t elements) { return Code::bytes(elements); }

// weight·value of each element of a block.
struct Weighted {
  const uint8_t* codes;
  Lanes scale, weight;

  ONEBIT_TARGET Weighted(const uint8_t* codes, Lanes scale, Lanes weight) : codes(codes), scale(scale), weight(weight) {}
  ONEBIT_TARGET Lanes operator()(int64_t i) const { return Code::load(codes + Code::bytes(i)) * scale * weight; }
};

// The frame of one block of c, which becomes the residual.
ONEBIT_TARGET inline void encode_values(float* c, int64_t block, int32_t count, bool, uint8_t* codes, uint8_t* scale) {
  encode_block<NoError, true>(c, nullptr, 0, block, count, codes, scale);
}
