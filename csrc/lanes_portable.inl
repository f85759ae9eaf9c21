// 16 floats as four vectors of four, for any machine: compilers turn these into SSE2, NEON, … or plain floats.
// Included by kernels.cpp.

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));

struct Lanes {
  Float4 v[4];

  static Lanes splat(float value) {
    const Float4 four = {value, value, value, value};
    return {{four, four, four, four}};
  }
  static Lanes load(const float* from) {
    Lanes lanes;
    std::memcpy(lanes.v, from, sizeof lanes.v);
    return lanes;
  }
  static Lanes load_bf16(const uint16_t* from) {
    float wide[kLanes];
    for (int l = 0; l < kLanes; ++l) wide[l] = float_from_bf16(from[l]);
    return load(wide);
  }
  static Lanes load_int8(const uint8_t* from) {
    float wide[kLanes];
    for (int l = 0; l < kLanes; ++l) wide[l] = static_cast<int8_t>(from[l]);
    return load(wide);
  }
  void store(float* to) const { std::memcpy(to, v, sizeof v); }
  // To nearest even; a NaN becomes kNanBf16.
  void store_bf16(uint16_t* to) const {
    float wide[kLanes];
    store(wide);
    for (int l = 0; l < kLanes; ++l) to[l] = bf16_near(wide[l]);
  }
  // The lanes hold whole numbers in -128..127.
  void store_int8(uint8_t* to) const {
    float wide[kLanes];
    store(wide);
    for (int l = 0; l < kLanes; ++l) to[l] = static_cast<uint8_t>(static_cast<int32_t>(wide[l]));
  }

  Lanes operator+(const Lanes& o) const { return {{v[0] + o.v[0], v[1] + o.v[1], v[2] + o.v[2], v[3] + o.v[3]}}; }
  Lanes operator-(const Lanes& o) const { return {{v[0] - o.v[0], v[1] - o.v[1], v[2] - o.v[2], v[3] - o.v[3]}}; }
  Lanes operator*(const Lanes& o) const { return {{v[0] * o.v[0], v[1] * o.v[1], v[2] * o.v[2], v[3] * o.v[3]}}; }
  Lanes operator/(const Lanes& o) const { return {{v[0] / o.v[0], v[1] / o.v[1], v[2] / o.v[2], v[3] / o.v[3]}}; }
  Lanes sqrt() const {
    float wide[kLanes];
    store(wide);
    for (int l = 0; l < kLanes; ++l) wide[l] = std::sqrt(wide[l]);
    return load(wide);
  }
  Lanes abs() const {
    const auto positive = [](Float4 four) { return (Float4)((Int4)four & 0x7FFFFFFF); };
    return {{positive(v[0]), positive(v[1]), positive(v[2]), positive(v[3])}};
  }
  Lanes negated() const { return {{-v[0], -v[1], -v[2], -v[3]}}; }

  // To the nearest whole number, ties to even; the sign stays, also a zero's. |lane| < 2^22.
  Lanes rounded() const {
    // Floats of 1.5·2^23 are a step of 1 apart: adding it rounds. A negative zero loses its sign there: put it back.
    const auto whole = [](Float4 four) {
      const Float4 near = (four + 0x1.8p23f) - 0x1.8p23f;
      return (Float4)(((Int4)near & 0x7FFFFFFF) | ((Int4)four & ~0x7FFFFFFF));
    };
    return {{whole(v[0]), whole(v[1]), whole(v[2]), whole(v[3])}};
  }
  // a if a > b, otherwise b; so b if one of them is a NaN.
  static Lanes larger(const Lanes& a, const Lanes& b) {
    Lanes larger;
    for (int i = 0; i < 4; ++i) {
      const Int4 is_a = (Int4)(a.v[i] > b.v[i]);
      larger.v[i] = (Float4)((is_a & (Int4)a.v[i]) | (~is_a & (Int4)b.v[i]));
    }
    return larger;
  }
  // Of lanes without a sign bit, by their bits: an infinity is above every number and a NaN above both.
  static Lanes larger_bits(const Lanes& a, const Lanes& b) {
    Lanes larger;
    for (int i = 0; i < 4; ++i) {
      const Int4 is_a = (Int4)((Int4)a.v[i] > (Int4)b.v[i]);
      larger.v[i] = (Float4)((is_a & (Int4)a.v[i]) | (~is_a & (Int4)b.v[i]));
    }
    return larger;
  }

  // Bit l is the sign bit of lane l.
  uint16_t sign_bits() const {
    Int4 bits = {0, 0, 0, 0};
    for (int i = 0; i < 4; ++i) bits |= ((Int4)v[i] >> 31) & lane_bits(i);
    return static_cast<uint16_t>(bits[0] | bits[1] | bits[2] | bits[3]);
  }

  // These, none of them below zero, with the signs of `of`.
  Lanes signed_as(const Lanes& of) const {
    Lanes both;
    for (int i = 0; i < 4; ++i) both.v[i] = (Float4)((Int4)v[i] | ((Int4)of.v[i] & ~0x7FFFFFFF));
    return both;
  }

  // Lane l is `set`'s where bit l is 1, else `clear`'s.
  static Lanes select(uint16_t bits, const Lanes& set, const Lanes& clear) {
    Lanes chosen;
    for (int i = 0; i < 4; ++i) {
      const Int4 is_set = (Int4)((lane_bits(i) & bits) != 0);
      chosen.v[i] = (Float4)((is_set & (Int4)set.v[i]) | (~is_set & (Int4)clear.v[i]));
    }
    return chosen;
  }

  // l + (l+8), then l + (l+4), l + (l+2), l + (l+1).
  float sum_in_halves() const {
    const Float4 four = (v[0] + v[2]) + (v[1] + v[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
  }

 private:
  static Int4 lane_bits(int i) { return Int4{1, 2, 4, 8} << (4 * i); }
};
