// What every encoder reads: c = x + error, and which lanes are padding. Included by kernels.cpp.

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
