// Floats and their bits, one at a time. Included by kernels.cpp and host_adam.cpp.

namespace {

constexpr uint16_t kNanBf16 = 0x7FC0;

inline uint16_t load_u16(const void* from) {
  uint16_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store_u16(void* to, uint16_t value) { std::memcpy(to, &value, sizeof value); }

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_from_bf16(uint16_t bits) { return float_from_bits(uint32_t{bits} << 16); }

// To nearest even; NaN and what rounds to infinity become kNanBf16. value is not negative.
inline uint16_t finite_bf16_or_nan(float value) {
  const uint32_t bits = bits_of_float(value);
  if (bits >= 0x7F7F8000u) return kNanBf16;  // before the sum, which a NaN of all ones would wrap around
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// To nearest even; a NaN becomes kNanBf16.
inline uint16_t bf16_near(float value) {
  const uint32_t bits = bits_of_float(value);
  if (value != value) return kNanBf16;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// The least bfloat16 not below value, which is neither negative nor near the largest.
inline uint16_t bf16_not_below(float value) { return static_cast<uint16_t>((bits_of_float(value) + 0xFFFFu) >> 16); }

}  // namespace
