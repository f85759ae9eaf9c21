// What surrounds the sign frame in an optimizer's step, in one pass over memory each: rules 6 and 8 to 12 of
// comm/kernels/reference.py over `Lanes`. Included by kernels.cpp once per instruction set, after sign_blocks.inl.

// How many elements ahead of the arithmetic memory is fetched. The processor's own fetching begins anew at each page, and
// three or four tensors have a new page every few blocks: encode_momentum took 1.5 to 1.9 times as long as torch.addcmul,
// and takes 1.3 times. Loops that write three tensors, or read their residual late, gain nothing (AVX2, EPYC 7003,
// 2026-11).
constexpr int64_t kAhead = 512;

ONEBIT_TARGET inline void fetch(const void* from, FloatKind kind, int64_t at) {
  if (kind == FloatKind::kFloat32)
    __builtin_prefetch(static_cast<const float*>(from) + at);
  else if (kind != FloatKind::kNone)
    __builtin_prefetch(static_cast<const uint16_t*>(from) + at);
}

// One block of c = source(i) + error, i counting its elements; kept in `c`, which stays in the nearest cache, between the
// loop that sums and the loop that subtracts. The first loop fetches, unlike that of `encode_block`, because arithmetic
// takes its time there; in the second one it made encode_momentum a fifth slower (AVX2, EPYC 7003, 2026-11).
template <class Source>
ONEBIT_TARGET inline void encode_from(const Source& source, const FusedEncode& job, int64_t k, int64_t j, float* c) {
  const int64_t block = job.block, at = (k * job.J + j) * block;
  const int64_t count = job.counts ? job.counts[k * job.counts_stride + j] : block;
  uint8_t* frame = job.frames + k * job.frame_stride;
  uint8_t* bits = frame + j * (block / 8);
  uint8_t* scale = frame + job.J * (block / 8) + 2 * j;
  const Lanes zero = Lanes::splat(0.0f);
  Lanes sum = zero;
  for (int64_t i = 0; i < block; i += kLanes) {
    source.fetch_ahead(i + kAhead);
    fetch(job.error, job.error_kind, at + i + kAhead);
    Lanes lanes = source(i);
    if (job.error_kind != FloatKind::kNone) lanes = lanes + load_as(job.error, job.error_kind, at + i);
    if (count < block) lanes = Lanes::select(real_lanes(count, i), lanes, zero);
    lanes.store(c + i);
    sum = sum + (job.mean_abs ? lanes.abs() : lanes * lanes);
  }
  const float mean = sum.sum_in_halves() / static_cast<float>(count > 0 ? count : 1);
  const uint16_t scale_bf16 = finite_bf16_or_nan(job.mean_abs ? mean : std::sqrt(mean));
  store_u16(scale, scale_bf16);
  const Lanes plus = Lanes::splat(float_from_bf16(scale_bf16)), again = plus * Lanes::splat(job.returned);
  if (scale_bf16 == kNanBf16) {
    std::memset(bits, 0, block / 8);
    for (int64_t i = 0; i < block && job.residual; i += kLanes) {
      Lanes residual = job.returns ? again : zero;
      if (count < block) residual = Lanes::select(real_lanes(count, i), residual, zero);
      store_as(job.residual, job.residual_kind, at + i, residual);
    }
    return;
  }
  const bool stays = !job.residual || (job.returns && count == 0);
  for (int64_t i = 0; i < block; i += kLanes) {
    const Lanes lanes = Lanes::load(c + i);
    store_u16(bits + i / 8, lanes.sign_bits());  // padding is +0.0 by now: zero bits
    if (stays) continue;
    Lanes residual = lanes - plus.signed_as(lanes);
    if (job.returns) residual = residual + again.signed_as(lanes);
    if (count < block) residual = Lanes::select(real_lanes(count, i), residual, zero);
    store_as(job.residual, job.residual_kind, at + i, residual);
  }
}

struct BufferSource {
  const float* values;

  ONEBIT_TARGET void fetch_ahead(int64_t) const {}  // they are in the nearest cache
  ONEBIT_TARGET Lanes operator()(int64_t i) const { return Lanes::load(values + i); }
};

ONEBIT_TARGET void encode_mean(const EncodeMeanJob& job, int64_t begin, int64_t end) {
  std::vector<float> c(job.to.block);
  const int64_t block = job.to.block;
  const Lanes share = Lanes::splat(static_cast<float>(1.0 / static_cast<double>(job.K)));
  const uint8_t* scales = job.received + job.to.J * (block / 8);
  for (int64_t j = begin; j < end; ++j) {
    for (int64_t i = 0; i < block; i += 64)
      mean_of_64(job.received + (j * block + i) / 8, scales + 2 * j, job.received_stride, job.K, share, c.data() + i);
    encode_from(BufferSource{c.data()}, job.to, 0, j, c.data());
  }
}

struct MomentumSource {
  const void* grad;  // of this block
  FloatKind grad_kind;
  const float* D;
  bool is_variance;
  Lanes floor, correction, eps;
  const float* m;  // or else bits and scale of the frame
  const uint8_t* bits;
  Lanes plus, minus;
  Lanes keep, add, own, unscale;

  template <class Job>
  ONEBIT_TARGET void set(const Job& job) {
    is_variance = job.floor != nullptr;
    correction = Lanes::splat(job.correction), eps = Lanes::splat(job.eps);
    add = Lanes::splat(job.add), own = Lanes::splat(job.own), unscale = Lanes::splat(job.unscale);
  }

  ONEBIT_TARGET void fetch_ahead(int64_t i) const {
    fetch(D, FloatKind::kFloat32, i);
    fetch(grad, grad_kind, i);
  }

  ONEBIT_TARGET Lanes divisor(int64_t i) const {
    const Lanes d = Lanes::load(D + i);
    return is_variance ? Lanes::larger(d * correction, floor).sqrt() + eps : d;
  }

  ONEBIT_TARGET Lanes normalised(Lanes g, Lanes d) const { return g / (d * d + (g * g) * own).sqrt(); }

  ONEBIT_TARGET Lanes operator()(int64_t i) const {
    const bool has_grad = grad_kind != FloatKind::kNone;
    const Lanes y = has_grad ? normalised(load_as(grad, grad_kind, i) * unscale, divisor(i)) : Lanes::splat(0.0f);
    return y * add + old(i) * keep;
  }

  ONEBIT_TARGET Lanes old(int64_t i) const { return m ? Lanes::load(m + i) : value_at(bits, plus, minus, i); }

  // D and m of block b, which is block j of row k.
  template <class Job>
  ONEBIT_TARGET void enter(const Job& job, int64_t b, int64_t k, int64_t j, int64_t J, int64_t block) {
    D = job.D + b * block;
    if (is_variance) floor = Lanes::splat(job.floor[b]);
    m = job.m ? job.m + b * block : nullptr;
    if (m) return;
    const uint8_t* frame = job.m_frames + k * job.m_stride;
    bits = frame + j * (block / 8);
    plus = Lanes::splat(float_from_bf16(load_u16(frame + J * (block / 8) + 2 * j)));
    minus = plus.negated();
  }
};

// Sums of g² and g·(m·D) over the block that the source has entered.
ONEBIT_TARGET inline void sum_block(const MomentumSource& source, int64_t block, float* sums) {
  Lanes squares = Lanes::splat(0.0f), products = squares;
  for (int64_t i = 0; i < block && source.grad_kind != FloatKind::kNone; i += kLanes) {
    const Lanes g = load_as(source.grad, source.grad_kind, i);
    squares = squares + g * g;
    products = products + g * (source.old(i) * source.divisor(i));
  }
  sums[0] = squares.sum_in_halves();
  sums[1] = products.sum_in_halves();
}

ONEBIT_TARGET void encode_momentum(const MomentumJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.to.block;
  std::vector<float> memory(2 * block);
  float *c = memory.data(), *room = c + block;
  MomentumSource source;
  source.set(job);
  source.keep = Lanes::splat(job.keep);
  BlockAt at(begin, job.to.J);
  SegmentAt segment(job.grads, begin, block);
  for (int64_t b = begin; b < end; ++b, at.next(), segment.next()) {
    source.grad_kind = segment.is_inside() ? static_cast<FloatKind>(job.grads.kinds[segment.s]) : FloatKind::kNone;
    source.grad = segment.is_inside() ? block_of(job.grads, segment.s, b, block, room) : nullptr;
    source.enter(job, b, at.k, at.j, job.to.J, block);
    encode_from(source, job.to, at.k, at.j, c);
    if (job.sums) sum_block(source, block, job.sums + 2 * b);  // while all that it reads is in the nearest cache
  }
}

struct GradientSource {
  const void* grad;  // of this block
  FloatKind kind;
  Lanes add, unscale;

  ONEBIT_TARGET void fetch_ahead(int64_t i) const { fetch(grad, kind, i); }

  ONEBIT_TARGET Lanes operator()(int64_t i) const {
    return kind == FloatKind::kNone ? Lanes::splat(0.0f) : load_as(grad, kind, i) * unscale * add;
  }
};

ONEBIT_TARGET void encode_gradients(const GradientJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.to.block;
  std::vector<float> memory(2 * block);
  float *c = memory.data(), *room = c + block;
  GradientSource source;
  source.add = Lanes::splat(job.add), source.unscale = Lanes::splat(job.unscale);
  BlockAt at(begin, job.to.J);
  SegmentAt segment(job.grads, begin, block);
  for (int64_t b = begin; b < end; ++b, at.next(), segment.next()) {
    source.kind = segment.is_inside() ? static_cast<FloatKind>(job.grads.kinds[segment.s]) : FloatKind::kNone;
    source.grad = segment.is_inside() ? block_of(job.grads, segment.s, b, block, room) : nullptr;
    encode_from(source, job.to, at.k, at.j, c);
  }
}

ONEBIT_TARGET void local_step(const LocalJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  std::vector<float> memory(3 * block);
  float *grad_room = memory.data(), *p_room = grad_room + block, *anchor_room = p_room + block;
  const Lanes weight = Lanes::splat(job.weight), kept = Lanes::splat(job.kept);
  MomentumSource source;
  source.set(job);
  source.keep = Lanes::splat(job.keep);
  SegmentAt segment(job.grads, begin, block);
  for (int64_t b = begin; b < end; ++b, segment.next()) {
    const bool is_inside = segment.is_inside();
    const int64_t s = segment.s;
    source.grad_kind = is_inside ? static_cast<FloatKind>(job.grads.kinds[s]) : FloatKind::kNone;
    source.grad = is_inside ? block_of(job.grads, s, b, block, grad_room) : nullptr;
    source.D = job.D + b * block;
    if (source.is_variance) source.floor = Lanes::splat(job.floor[b]);
    float *m = job.m + b * block, *u = job.u + b * block, *anchor = job.anchor ? job.anchor + b * block : nullptr;
    source.m = m;
    const FloatKind kind = is_inside ? static_cast<FloatKind>(job.params.kinds[s]) : FloatKind::kNone;
    const int64_t size = kind == FloatKind::kFloat32 ? 4 : 2, start = is_inside ? (b - job.params.first[s]) * block : 0;
    const int64_t left = is_inside ? job.params.numels[s] - start : 0;
    char* p = kind == FloatKind::kNone ? nullptr : static_cast<char*>(job.params.data[s]) + start * size;
    const bool is_short = p && left < block;
    void* to = is_short ? static_cast<void*>(p_room) : p;
    float* anchor_to = is_short && anchor ? anchor_room : anchor;
    if (is_short) std::memcpy(to, p, left * size);
    for (int64_t i = 0; i < block; i += kLanes) {
      const Lanes next = source(i), moved = next * weight;
      next.store(m + i);
      (Lanes::load(u + i) + moved).store(u + i);
      if (!p) continue;
      const Lanes held = load_as(to, kind, i);
      if (anchor) held.store(anchor_to + i);
      store_as(to, kind, i, held * kept - moved);
    }
    if (!is_short) continue;
    std::memcpy(p, to, left * size);
    if (anchor) std::memcpy(anchor, anchor_room, left * sizeof(float));
  }
}

ONEBIT_TARGET void owner_step(const OwnerJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  std::vector<float> memory(2 * block);
  float *means = memory.data(), *hats = means + block;
  const float share = static_cast<float>(1.0 / static_cast<double>(job.K));
  const Lanes zero = Lanes::splat(0.0f), weight = Lanes::splat(job.weight), own = Lanes::splat(job.own);
  const Lanes common = Lanes::splat(job.common), eps = Lanes::splat(job.eps), one = Lanes::splat(1.0f);
  const uint8_t* scales = job.received + job.J * (block / 8);
  for (int64_t j = begin; j < end; ++j) {
    const int64_t first = j * block, count = job.counts[j];
    const float correction1 = job.corrections ? job.corrections[j] : job.correction1;
    const float correction2 = job.corrections ? job.corrections[job.J + j] : job.correction2;
    const Lanes c1 = Lanes::splat(correction1), c2 = Lanes::splat(correction2);
    const uint8_t* frame = job.received + job.row * job.received_stride;
    const uint8_t* bits = frame + j * (block / 8);
    const Lanes plus = Lanes::splat(float_from_bf16(load_u16(frame + job.J * (block / 8) + 2 * j))), minus = plus.negated();
    for (int64_t i = 0; i < block; i += 64)
      mean_of_64(job.received + (first + i) / 8, scales + 2 * j, job.received_stride, job.K, Lanes::splat(share), means + i);
    Lanes sums[5];  // of v̂, g², q², g·q̂, g·m̂; -0.0 + value is value, also where that is -0.0
    for (Lanes& sum : sums) sum = Lanes::splat(-0.0f);
    for (int64_t i = 0; i < block; i += kLanes) {
      const Lanes v = Lanes::load(job.variance + first + i);
      Lanes g = Lanes::load(job.grad + first + i), q = value_at(bits, plus, minus, i), m = Lanes::load(means + i) * c1;
      const uint16_t real = count < block ? real_lanes(count, i) : 0xFFFF;
      if (count < block) g = Lanes::select(real, g, zero), q = Lanes::select(real, q, zero), m = Lanes::select(real, m, zero);
      Lanes next = v + ((m * common + g * own) * g - v) * weight, hat = Lanes::larger(zero, next) * c2;
      if (count < block) next = Lanes::select(real, next, v), hat = Lanes::select(real, hat, zero);
      next.store(job.variance + first + i);
      m.store(means + i);
      hat.store(hats + i);
      sums[0] = sums[0] + hat;
      sums[1] = sums[1] + g * g;
      sums[2] = sums[2] + q * q;
      sums[3] = sums[3] + g * (q * c1);
      sums[4] = sums[4] + g * m;
    }
    for (int64_t s = 1; s < 5; ++s) job.sums[4 * j + s - 1] = sums[s].sum_in_halves();
    float scale = float_from_bf16(load_u16(scales + 2 * j));
    for (int64_t k = 1; k < job.K; ++k) scale = scale + float_from_bf16(load_u16(scales + k * job.received_stride + 2 * j));
    scale = scale * share * correction1 * job.inverse_limit;
    const float floor = sums[0].sum_in_halves() * job.floor / static_cast<float>(count > 0 ? count : 1);
    const Lanes least = Lanes::splat(scale * scale > floor ? scale * scale : floor);
    for (int64_t i = 0; i < block; i += kLanes) {
      Lanes D = Lanes::larger(Lanes::load(hats + i), least).sqrt() + eps;
      if (count < block) D = Lanes::select(real_lanes(count, i), D, one);
      (Lanes::load(means + i) / D).store(job.direction + first + i);
      if (job.D) D.store(job.D + first + i);
    }
  }
}

ONEBIT_TARGET void correct_residual(const CorrectionJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  std::vector<float> room(block);
  MomentumSource source;
  source.set(job);
  const Lanes again = Lanes::splat(job.again);
  SegmentAt segment(job.grads, begin, block);
  for (int64_t b = begin; b < end; ++b, segment.next()) {
    if (!segment.is_inside()) continue;
    const FloatKind kind = static_cast<FloatKind>(job.grads.kinds[segment.s]);
    if (kind == FloatKind::kNone) continue;
    const void* grad = block_of(job.grads, segment.s, b, block, room.data());
    source.D = job.D + b * block;
    if (source.is_variance) source.floor = Lanes::splat(job.floor[b]);
    for (int64_t i = 0; i < block; i += kLanes) {
      const Lanes g = load_as(grad, kind, i), d = source.divisor(i);
      const Lanes more = source.normalised(g * again, d) - source.normalised(g * source.unscale, d);
      const int64_t at = b * block + i;
      store_as(job.residual, job.residual_kind, at, load_as(job.residual, job.residual_kind, at) + more * source.add);
    }
  }
}

ONEBIT_TARGET void momentum_sums(const SumsJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  std::vector<float> room(block);
  MomentumSource source;
  source.is_variance = job.floor != nullptr;
  source.correction = Lanes::splat(job.correction), source.eps = Lanes::splat(job.eps);
  BlockAt at(begin, job.J);
  SegmentAt segment(job.grads, begin, block);
  for (int64_t b = begin; b < end; ++b, at.next(), segment.next()) {
    source.grad_kind = segment.is_inside() ? static_cast<FloatKind>(job.grads.kinds[segment.s]) : FloatKind::kNone;
    source.grad = segment.is_inside() ? block_of(job.grads, segment.s, b, block, room.data()) : nullptr;
    source.enter(job, b, at.k, at.j, job.J, block);
    sum_block(source, block, job.sums + 2 * b);
  }
}

constexpr Fused fused{encode_mean, encode_momentum, encode_gradients, local_step, owner_step, correct_residual, momentum_sums};
