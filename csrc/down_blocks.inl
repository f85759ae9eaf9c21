// What comes down from the owners of chunks, in one pass over memory each: rules 7 and 13 of comm/kernels/reference.py over
// `Lanes`. Included by frames.inl once per frame that comes down, after its blocks.

ONEBIT_TARGET void apply(const ApplyJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  std::vector<float> room(block);
  BlockAt at(begin, job.J);
  SegmentAt segment(job.params, begin, block);
  for (int64_t b = begin; b < end; ++b, at.next(), segment.next()) {
    if (!segment.is_inside()) continue;
    const int64_t s = segment.s;
    const FloatKind kind = static_cast<FloatKind>(job.params.kinds[s]);
    if (kind == FloatKind::kNone) continue;
    const uint8_t* frame = job.frames + at.k * job.frame_stride;
    const Lanes scale = Lanes::splat(float_from_bf16(load_u16(frame + code_bytes(job.J * block) + 2 * at.j)));
    const Lanes keep = Lanes::splat(job.keep[s]);
    const Weighted value(frame + code_bytes(at.j * block), scale, Lanes::splat(job.weight[s]));
    const int64_t size = kind == FloatKind::kFloat32 ? 4 : 2, start = (b - job.params.first[s]) * block;
    char* p = static_cast<char*>(job.params.data[s]) + start * size;
    const int64_t left = job.params.numels[s] - start;
    void* to = left >= block ? static_cast<void*>(p) : room.data();
    if (left < block) std::memcpy(to, p, left * size);
    for (int64_t i = 0; i < block; i += kLanes) store_as(to, kind, i, load_as(to, kind, i) * keep + value(i));
    if (left < block) std::memcpy(p, to, left * size);
  }
}

ONEBIT_TARGET void step_masters(const MastersJob& job, int64_t begin, int64_t end) {
  const int64_t block = job.block;
  std::vector<float> memory(2 * block);
  float *c = memory.data(), *room = c + block;
  const Lanes weight = Lanes::splat(job.weight), keep = Lanes::splat(job.keep), zero = Lanes::splat(0.0f);
  SegmentAt segment(job.replicas, begin, block);
  for (int64_t j = begin; j < end; ++j, segment.next()) {
    const int32_t count = job.counts[j];
    const bool is_inside = segment.is_inside();
    const FloatKind kind = is_inside ? static_cast<FloatKind>(job.replicas.kinds[segment.s]) : FloatKind::kNone;
    const void* replica = is_inside ? block_of(job.replicas, segment.s, j, block, room) : nullptr;
    const float* update = job.update + j * block;
    float* masters = job.masters + j * block;
    for (int64_t i = 0; i < block && count > 0; i += kLanes) {
      const Lanes held = Lanes::load(masters + i);
      Lanes stepped = held * keep + Lanes::load(update + i) * weight;
      if (count < block) stepped = Lanes::select(real_lanes(count, i), stepped, held);
      stepped.store(masters + i);
      (stepped - (replica ? load_as(replica, kind, i) : zero)).store(c + i);
    }
    encode_values(c, block, count, job.mean_abs, job.frame + code_bytes(j * block),
                  job.frame + code_bytes(job.J * block) + 2 * j);
  }
}

constexpr Down down{apply, step_masters};
