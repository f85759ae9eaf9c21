// Every frame over `Lanes`. Included by kernels.cpp once per instruction set.

#include "input_lanes.inl"

namespace sign {
#include "sign_blocks.inl"
#include "down_blocks.inl"
#include "sign_fused.inl"
}
namespace int8 {
struct Code {
  static constexpr float kSteps = 127.0f;
  static constexpr int64_t bytes(int64_t elements) { return elements; }
  ONEBIT_TARGET static Lanes load(const uint8_t* from) { return Lanes::load_int8(from); }
  ONEBIT_TARGET static void store(Lanes q, uint8_t* to) { q.store_int8(to); }
};
#include "step_blocks.inl"
}
namespace int4 {
struct Code {
  static constexpr float kSteps = 7.0f;
  static constexpr int64_t bytes(int64_t elements) { return elements / 2; }
  ONEBIT_TARGET static Lanes load(const uint8_t* from) {
    alignas(kLanes) uint8_t wide[kLanes];
#ifdef ONEBIT_X86  // SSE2, which every one has; the loops below take five times as long
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), low = _mm_set1_epi8(0xF);
    const __m128i nibbles = _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    const __m128i sign = _mm_set1_epi8(8);
    _mm_store_si128(reinterpret_cast<__m128i*>(wide), _mm_sub_epi8(_mm_xor_si128(nibbles, sign), sign));
#else
    for (int b = 0; b < kLanes / 2; ++b) {
      wide[2 * b] = static_cast<uint8_t>(((from[b] & 0xF) ^ 8) - 8);
      wide[2 * b + 1] = static_cast<uint8_t>(((from[b] >> 4) ^ 8) - 8);
    }
#endif
    return Lanes::load_int8(wide);
  }
  ONEBIT_TARGET static void store(Lanes q, uint8_t* to) {
    alignas(kLanes) uint8_t wide[kLanes];
    q.store_int8(wide);
#ifdef ONEBIT_X86
    const __m128i words = _mm_load_si128(reinterpret_cast<const __m128i*>(wide));
    const __m128i pairs = _mm_or_si128(_mm_and_si128(words, _mm_set1_epi16(0xF)),
                                       _mm_and_si128(_mm_srli_epi16(words, 4), _mm_set1_epi16(0xF0)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(pairs, pairs));
#else
    for (int b = 0; b < kLanes / 2; ++b) to[b] = static_cast<uint8_t>((wide[2 * b] & 0xF) | (wide[2 * b + 1] << 4));
#endif
  }
};
#include "step_blocks.inl"
#include "down_blocks.inl"
}

namespace log4 {
#include "log4_blocks.inl"
}

constexpr Kernels kernels{sign::kernel, int8::kernel, int4::kernel, log4::kernel, sign::down, int4::down, sign::fused};
