// What kernels read and write: c = x + error, tensors in their own memory, and which lanes are padding. Included by
// kernels.cpp.

struct NoError {
  ONEBIT_TARGET static Lanes add(Lanes x, const void*, int64_t) { return x; }
  ONEBIT_TARGET static void prefetch(const void*, int64_t) {}
};

struct Float32Error {
  ONEBIT_TARGET static Lanes add(Lanes x, const void* error, int64_t i) {
    return x + Lanes::load(static_cast<const float*>(error) + i);
  }
  ONEBIT_TARGET static void prefetch(const void* error, int64_t i) {
    __builtin_prefetch(static_cast<const float*>(error) + i);
  }
};

struct Bfloat16Error {
  ONEBIT_TARGET static Lanes add(Lanes x, const void* error, int64_t i) {
    return x + Lanes::load_bf16(static_cast<const uint16_t*>(error) + i);
  }
  ONEBIT_TARGET static void prefetch(const void* error, int64_t i) {
    __builtin_prefetch(static_cast<const uint16_t*>(error) + i);
  }
};

// Bit l is 1 where lane l of the lanes starting at element i is one of the first `count` elements.
ONEBIT_TARGET inline uint16_t real_lanes(int64_t count, int64_t i) {
  if (count <= i) return 0;
  return count - i >= kLanes ? uint16_t{0xFFFF} : static_cast<uint16_t>((1u << (count - i)) - 1u);
}

// Element `at` and those after it: of floats or bfloat16.
ONEBIT_TARGET inline Lanes load_as(const void* from, FloatKind kind, int64_t at) {
  if (kind == FloatKind::kFloat32) return Lanes::load(static_cast<const float*>(from) + at);
  return Lanes::load_bf16(static_cast<const uint16_t*>(from) + at);
}

ONEBIT_TARGET inline void store_as(void* to, FloatKind kind, int64_t at, Lanes lanes) {
  if (kind == FloatKind::kFloat32)
    lanes.store(static_cast<float*>(to) + at);
  else
    lanes.store_bf16(static_cast<uint16_t*>(to) + at);
}

// The part of tensor s in block b, readable up to the block's end; `room` takes a copy of a short tail.
ONEBIT_TARGET inline const void* block_of(const PointersJob& tensors, int64_t s, int64_t b, int64_t block, float* room) {
  const FloatKind kind = static_cast<FloatKind>(tensors.kinds[s]);
  if (kind == FloatKind::kNone) return nullptr;
  const int64_t size = kind == FloatKind::kFloat32 ? 4 : 2, start = (b - tensors.first[s]) * block;
  const char* from = static_cast<const char*>(tensors.data[s]) + start * size;
  const int64_t left = tensors.numels[s] - start;
  if (left >= block) return from;
  std::memset(room, 0, block * sizeof(float));
  std::memcpy(room, from, left * size);
  return room;
}
