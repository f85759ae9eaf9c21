// Adam on blocks of 256 elements, over `Lanes` and `Words`. Included by host_adam.cpp once per instruction set.

// v ← the values of a block's codes.
ONEBIT_TARGET inline void decode(const uint8_t* codes, float scale, float* v) {
  const Words base = Words::splat((bits_of_float(scale) >> 23) * 8u - 255u);
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Words code = Words::load_bytes(codes + i);
    (code + base).left<20>().where_any(code).store(v + i);
  }
}

// The code of each v, none of which has a sign. random: 20 bits.
ONEBIT_TARGET inline void encode_lanes(const float* v, Words random, Words base, uint8_t* codes) {
  const Words bits = Words::load(v), code = (bits + random).right<20>() - base;
  Words::smaller(Words::larger(code, Words::splat(1)), Words::splat(255)).where_any(bits).store_bytes(codes);
}

// first: the index of the block's first element, modulo 2^32. Two elements share the 32 bits of one hash.
ONEBIT_TARGET inline void encode(const float* v, uint32_t first, uint32_t seed, uint8_t* codes, float* scale) {
  Words largest = Words::splat(0);
  for (int64_t i = 0; i < kBlock; i += kLanes) largest = Words::larger(largest, Words::load(v + i));
  uint32_t lanes[kLanes];
  largest.store(lanes);
  const uint32_t above = (*std::max_element(lanes, lanes + kLanes) >> 23) + 1;
  const uint32_t exponent = std::min(std::max(above, kLeastExponent), kLargestExponent);
  *scale = float_from_bits(exponent << 23);
  const Words base = Words::splat(exponent * 8u - 255u), low = Words::splat(0xFFFFu);
  Words start = (Words::splat(first) + Words::count()) * Words::splat(kGolden) + Words::splat(seed);
  for (int64_t i = 0; i < kBlock / 2; i += kLanes) {
    Words x = (start ^ start.right<16>()) * Words::splat(0x21F0AAADu);
    x = (x ^ x.right<15>()) * Words::splat(0xD35A2D97u);
    x = x ^ x.right<15>();
    start = start + Words::splat(static_cast<uint32_t>(kLanes) * kGolden);
    encode_lanes(v + i, (x & low).left<4>(), base, codes + i);
    encode_lanes(v + i + kBlock / 2, x.right<16>().left<4>(), base, codes + i + kBlock / 2);
  }
}

template <Kind kKind>
ONEBIT_TARGET inline Lanes load(const void* from, int64_t i) {
  if (kKind == Kind::kBfloat16) return Lanes::load_bf16(static_cast<const uint16_t*>(from) + i);
  return Lanes::load(static_cast<const float*>(from) + i);
}

template <Kind kKind>
ONEBIT_TARGET inline void store(Lanes x, void* to, int64_t i) {
  if (kKind == Kind::kBfloat16) return x.store_bf16(static_cast<uint16_t*>(to) + i);
  x.store(static_cast<float*>(to) + i);
}

template <Kind kGrad, Kind kM>
ONEBIT_TARGET void update(float* p, const void* grad, void* m, float* v, const Constants& c) {
  const Lanes grad_scale = Lanes::splat(c.grad_scale), keep = Lanes::splat(c.keep), l2 = Lanes::splat(c.l2);
  const Lanes lerp = Lanes::splat(c.lerp), beta2 = Lanes::splat(c.beta2), add = Lanes::splat(c.one_minus_beta2);
  const Lanes eps = Lanes::splat(c.eps), move = Lanes::splat(c.move);
  const bool has_l2 = c.l2 != 0.0f, from_grad = c.from_grad;
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Lanes p_old = Lanes::load(p + i), m_old = load<kM>(m, i);
    Lanes g = load<kGrad>(grad, i) * grad_scale;
    if (has_l2) g = g + p_old * l2;
    const Lanes m_new = (from_grad ? g : m_old) + (g - m_old) * lerp;
    const Lanes v_new = Lanes::load(v + i) * beta2 + (g * add) * g;
    (p_old * keep + (m_new * move) / (v_new.sqrt() + eps)).store(p + i);
    store<kM>(m_new, m, i);
    v_new.store(v + i);
  }
}

ONEBIT_TARGET inline void update(float* p, Tensor g, Tensor m, float* v, const Constants& c) {
  constexpr Kind kWide = Kind::kFloat32, kNarrow = Kind::kBfloat16;
  if (g.kind == kWide)
    m.kind == kWide ? update<kWide, kWide>(p, g.data, m.data, v, c) : update<kWide, kNarrow>(p, g.data, m.data, v, c);
  else
    m.kind == kWide ? update<kNarrow, kWide>(p, g.data, m.data, v, c) : update<kNarrow, kNarrow>(p, g.data, m.data, v, c);
}

ONEBIT_TARGET inline void write_out(const float* p, Tensor out) {
  if (out.kind == Kind::kFloat16) {
    for (int64_t i = 0; i < kBlock; i += kLanes) store_float16(p + i, static_cast<uint16_t*>(out.data) + i);
  } else if (out.kind == Kind::kBfloat16) {
    for (int64_t i = 0; i < kBlock; i += kLanes) store<Kind::kBfloat16>(Lanes::load(p + i), out.data, i);
  } else if (out.kind == Kind::kFloat32) {
    std::memcpy(out.data, p, kBlock * sizeof(float));
  }
}

// All of them hold 256 elements.
ONEBIT_TARGET inline void step(const Block& b, const Constants& c) {
  if (b.v.kind == Kind::kEightBits) {
    alignas(64) float v[kBlock];
    decode(static_cast<uint8_t*>(b.v.data), *b.scale, v);
    update(b.p, b.g, b.m, v, c);
    encode(v, b.first, c.seed, static_cast<uint8_t*>(b.v.data), b.scale);
  } else {
    update(b.p, b.g, b.m, static_cast<float*>(b.v.data), c);
  }
  write_out(b.p, b.out);
}

ONEBIT_TARGET void adam(const AdamJob& job, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const Block block = job.block(b);
    const int64_t count = job.n - b * kBlock;
    if (count >= kBlock) {
      step(block, job.constants);
    } else {
      Padded padded(block, count);
      step(padded.block, job.constants);
      padded.copy_back(block, count);
    }
  }
}
