// 16 words of 32 bits in one register. Included by host_adam.cpp.

struct Words {
  __m512i v;

  ONEBIT_TARGET static Words splat(uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
  ONEBIT_TARGET static Words count() {
    return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
  }
  ONEBIT_TARGET static Words load(const float* from) { return {_mm512_loadu_si512(from)}; }
  ONEBIT_TARGET static Words load_bytes(const uint8_t* from) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
  }
  ONEBIT_TARGET void store(void* to) const { _mm512_storeu_si512(to, v); }
  // The words are in 0..255.
  ONEBIT_TARGET void store_bytes(uint8_t* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(v));
  }

  ONEBIT_TARGET Words operator+(Words o) const { return {_mm512_add_epi32(v, o.v)}; }
  ONEBIT_TARGET Words operator-(Words o) const { return {_mm512_sub_epi32(v, o.v)}; }
  ONEBIT_TARGET Words operator*(Words o) const { return {_mm512_mullo_epi32(v, o.v)}; }
  ONEBIT_TARGET Words operator^(Words o) const { return {_mm512_xor_si512(v, o.v)}; }
  ONEBIT_TARGET Words operator&(Words o) const { return {_mm512_and_si512(v, o.v)}; }
  template <int kBits>
  ONEBIT_TARGET Words left() const { return {_mm512_slli_epi32(v, kBits)}; }
  template <int kBits>
  ONEBIT_TARGET Words right() const { return {_mm512_srli_epi32(v, kBits)}; }
  // As signed words.
  ONEBIT_TARGET static Words larger(Words a, Words b) { return {_mm512_max_epi32(a.v, b.v)}; }
  ONEBIT_TARGET static Words smaller(Words a, Words b) { return {_mm512_min_epi32(a.v, b.v)}; }
  // These where `of` is not 0, else 0.
  ONEBIT_TARGET Words where_any(Words of) const { return {_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(of.v, of.v), v)}; }
};

// 16 floats, to nearest even.
ONEBIT_TARGET inline void store_float16(const float* from, uint16_t* to) {
  const __m256i halves = _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
