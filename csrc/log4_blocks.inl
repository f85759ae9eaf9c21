// The log4 frame of comm/kernels/log4_reference.py: a sign and one of eight powers of two below the block's largest.
// Plain loops over integers, which compilers make vectors of; floats alone go through `Lanes`.
// Included by frames.inl once per instruction set.

using Bits = uint32_t __attribute__((may_alias));
using Words = uint16_t __attribute__((may_alias));

// ±2^-k of codes k + 8·(negative), as float bits; code 7 is 0 where the block contains a zero.
ONEBIT_TARGET inline void powers_of(const uint8_t* codes, bool has_zero, float* powers, int64_t block) {
  Bits* bits = reinterpret_cast<Bits*>(powers);
  const uint32_t least = has_zero ? 7 : 8;
  for (int64_t i = 0; i < block; ++i) {
    const uint32_t code = codes[i], k = code & 7;
    const uint32_t power = ((127 - k) << 23) | ((code & 8) << 28);
    bits[i] = k >= least ? 0 : power;
  }
}

ONEBIT_TARGET inline void unpack(const uint8_t* bytes, uint8_t* codes, int64_t block) {
  Words* pairs = reinterpret_cast<Words*>(codes);
  for (int64_t b = 0; b < block / 2; ++b) pairs[b] = static_cast<uint16_t>((bytes[b] & 0xF) | ((bytes[b] & 0xF0) << 4));
}

// One block: x ← residual, bytes and scale ← its part of the frame. codes and powers: room for a block each.
template <class Error, bool kPadded>
ONEBIT_TARGET inline void encode_block(float* x, const void* error, int64_t error_at, int64_t block, int32_t count,
                                       uint8_t* bytes, uint8_t* scale, uint8_t* codes, float* powers) {
  const Lanes zero = Lanes::splat(0.0f);
  for (int64_t i = 0; i < block; i += kLanes) {
    Lanes c = Error::add(Lanes::load(x + i), error, error_at + i);
    if (kPadded) c = Lanes::select(real_lanes(count, i), c, zero);
    c.store(x + i);
  }
  const Bits* bits = reinterpret_cast<const Bits*>(x);
  uint32_t largest = 0, smallest = ~0u;
  for (int64_t i = 0; i < block; ++i) {
    const uint32_t magnitude = bits[i] & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
    smallest = magnitude < smallest ? magnitude : smallest;
  }
  const uint16_t scale_bf16 = largest >= kInfinityBits ? kNanBf16 : bf16_not_below(float_from_bits(largest));
  if (scale_bf16 >= kInfinityBits >> 16) {
    store_u16(scale, kNanBf16);
    std::memset(bytes, 0, block / 2);
    std::memset(x, 0, block * sizeof(float));
    return;
  }
  const bool has_zero = smallest == 0 && scale_bf16 != 0;
  store_u16(scale, has_zero ? scale_bf16 | 0x8000 : scale_bf16);
  const float s = float_from_bf16(scale_bf16);
  if (scale_bf16 == 0) {
    std::memset(codes, 0, block);
  } else {
    const float up = s < 0x1p-60f ? 0x1p64f : 1.0f;  // exact; no threshold is subnormal
    const int32_t threshold = static_cast<int32_t>(bits_of_float(s * up * 0.75f)) + 0x7FFFFF;
    const int32_t most = has_zero ? 6 : 7, of_zero = has_zero ? 1 : 0;
    const Lanes ups = Lanes::splat(up);
    for (int64_t i = 0; i < block; i += kLanes) (Lanes::load(x + i) * ups + zero).store(powers + i);  // -0.0 becomes +0.0
    const Bits* scaled = reinterpret_cast<const Bits*>(powers);
    for (int64_t i = 0; i < block; ++i) {
      const int32_t magnitude = static_cast<int32_t>(scaled[i] & 0x7FFFFFFF);
      int32_t k = (threshold - magnitude) >> 23;
      k = k < 0 ? 0 : k;
      k = k > most ? most : k;
      k += magnitude == 0 ? of_zero : 0;
      codes[i] = static_cast<uint8_t>(k + static_cast<int32_t>((scaled[i] >> 28) & 8));
    }
  }
  const Words* pairs = reinterpret_cast<const Words*>(codes);
  for (int64_t b = 0; b < block / 2; ++b) bytes[b] = static_cast<uint8_t>((pairs[b] & 0xF) | (pairs[b] >> 4));
  powers_of(codes, has_zero, powers, block);
  const Lanes scales = Lanes::splat(s);
  for (int64_t i = 0; i < block; i += kLanes) {
    Lanes rest = Lanes::load(x + i) - Lanes::load(powers + i) * scales;
    if (kPadded) rest = Lanes::select(real_lanes(count, i), rest, zero);
    rest.store(x + i);
  }
}

template <class Error>
ONEBIT_TARGET void encode_blocks(const EncodeJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  std::vector<uint8_t> codes(block);
  std::vector<float> powers(block);
  BlockAt at(begin, job.J);
  for (int64_t left = end - begin; left > 0; --left, at.next()) {
    float* x = job.x + at.k * job.x_stride + at.j * block;
    const int64_t error_at = at.k * job.error_stride + at.j * block;
    uint8_t* frame = job.frames + at.k * job.frame_stride;
    uint8_t *bytes = frame + at.j * (block / 2), *scale = frame + job.J * (block / 2) + 2 * at.j;
    const int32_t count = job.counts ? job.counts[at.k * job.counts_stride + at.j] : static_cast<int32_t>(block);
    if (count < block)
      encode_block<Error, true>(x, job.error, error_at, block, count, bytes, scale, codes.data(), powers.data());
    else
      encode_block<Error, false>(x, job.error, error_at, block, count, bytes, scale, codes.data(), powers.data());
  }
}

ONEBIT_TARGET void encode(const EncodeJob& job, int64_t begin, int64_t end) {
  switch (job.error_kind) {
    case FloatKind::kNone: return encode_blocks<NoError>(job, begin, end);
    case FloatKind::kFloat32: return encode_blocks<Float32Error>(job, begin, end);
    case FloatKind::kBfloat16: return encode_blocks<Bfloat16Error>(job, begin, end);
  }
}

// Powers of one block of a frame; returns its scale.
ONEBIT_TARGET inline float decode_block(const uint8_t* bytes, const uint8_t* scale, int64_t block, uint8_t* codes,
                                        float* powers) {
  const float s = float_from_bf16(load_u16(scale));
  unpack(bytes, codes, block);
  powers_of(codes, s < 0.0f, powers, block);
  return std::fabs(s);
}

ONEBIT_TARGET void decode(const DecodeJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  std::vector<uint8_t> codes(block);
  std::vector<float> powers(block);
  const Lanes weight = Lanes::splat(job.weight), keep = Lanes::splat(job.keep);
  BlockAt at(begin, job.J);
  for (int64_t left = end - begin; left > 0; --left, at.next()) {
    const uint8_t* frame = job.frames + at.k * job.frame_stride;
    const uint8_t *bytes = frame + at.j * (block / 2), *scale = frame + job.J * (block / 2) + 2 * at.j;
    const Lanes s = Lanes::splat(decode_block(bytes, scale, block, codes.data(), powers.data()));
    float* out = job.out + at.k * job.out_stride + at.j * block;
    for (int64_t i = 0; i < block; i += kLanes) {
      const Lanes value = Lanes::load(powers.data() + i) * s * weight;
      (job.reads_out ? Lanes::load(out + i) * keep + value : value).store(out + i);
    }
  }
}

ONEBIT_TARGET void decode_mean(const DecodeMeanJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  std::vector<uint8_t> codes(block);
  std::vector<float> powers(block);
  const Lanes share = Lanes::splat(static_cast<float>(1.0 / static_cast<double>(job.K)));
  for (int64_t j = begin; j < end; ++j) {
    float* out = job.out + j * block;
    for (int64_t k = 0; k < job.K; ++k) {
      const uint8_t* frame = job.frames + k * job.frame_stride;
      const uint8_t* scale = frame + job.J * (block / 2) + 2 * j;
      const Lanes s = Lanes::splat(decode_block(frame + j * (block / 2), scale, block, codes.data(), powers.data()));
      const bool is_last = k + 1 == job.K;
      for (int64_t i = 0; i < block; i += kLanes) {
        const Lanes value = Lanes::load(powers.data() + i) * s;
        const Lanes sum = (k == 0 ? Lanes::splat(-0.0f) : Lanes::load(out + i)) + value;  // -0.0 + value is value
        (is_last ? sum * share : sum).store(out + i);
      }
    }
  }
}

constexpr Kernel kernel{encode, decode, decode_mean};
