// 16 words of 32 bits as four vectors of four, for any machine. Included by host_adam.cpp.

typedef uint32_t Uint4 __attribute__((vector_size(16)));

struct Words {
  Uint4 v[4];

  template <class Make>
  static Words each(Make make) { return {{make(0), make(1), make(2), make(3)}}; }

  static Words splat(uint32_t value) {
    return each([=](int) { return Uint4{value, value, value, value}; });
  }
  static Words count() {
    return each([](uint32_t i) { return Uint4{4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3}; });
  }
  static Words load(const float* from) {
    Words words;
    std::memcpy(words.v, from, sizeof words.v);
    return words;
  }
  static Words load_bytes(const uint8_t* from) {
    return each([=](int i) { return Uint4{from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]}; });
  }
  void store(void* to) const { std::memcpy(to, v, sizeof v); }
  // The words are in 0..255.
  void store_bytes(uint8_t* to) const {
    for (int l = 0; l < kLanes; ++l) to[l] = static_cast<uint8_t>(v[l / 4][l % 4]);
  }

  Words operator+(const Words& o) const {
    return each([&](int i) { return v[i] + o.v[i]; });
  }
  Words operator-(const Words& o) const {
    return each([&](int i) { return v[i] - o.v[i]; });
  }
  Words operator*(const Words& o) const {
    return each([&](int i) { return v[i] * o.v[i]; });
  }
  Words operator^(const Words& o) const {
    return each([&](int i) { return v[i] ^ o.v[i]; });
  }
  Words operator&(const Words& o) const {
    return each([&](int i) { return v[i] & o.v[i]; });
  }
  template <int kBits>
  Words left() const {
    return each([&](int i) { return v[i] << kBits; });
  }
  template <int kBits>
  Words right() const {
    return each([&](int i) { return v[i] >> kBits; });
  }
  // As signed words.
  static Words larger(const Words& a, const Words& b) {
    return each([&](int i) {
      const Uint4 is_a = (Uint4)((Int4)a.v[i] > (Int4)b.v[i]);
      return (is_a & a.v[i]) | (~is_a & b.v[i]);
    });
  }
  static Words smaller(const Words& a, const Words& b) {
    return each([&](int i) {
      const Uint4 is_a = (Uint4)((Int4)a.v[i] < (Int4)b.v[i]);
      return (is_a & a.v[i]) | (~is_a & b.v[i]);
    });
  }
  // These where `of` is not 0, else 0.
  Words where_any(const Words& of) const {
    return each([&](int i) { return v[i] & (Uint4)(of.v[i] != 0); });
  }
};

// 16 floats, to nearest even.
ONEBIT_TARGET inline void store_float16(const float* from, uint16_t* to) {
  for (int l = 0; l < kLanes; ++l) to[l] = float16_near(from[l]);
}
