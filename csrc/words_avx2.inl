// 16 words of 32 bits in two registers. Included by host_adam.cpp.

struct Words {
  __m256i low, high;

  ONEBIT_TARGET static Words splat(uint32_t value) {
    return {_mm256_set1_epi32(static_cast<int>(value)), _mm256_set1_epi32(static_cast<int>(value))};
  }
  ONEBIT_TARGET static Words count() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
  }
  ONEBIT_TARGET static Words load(const float* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 8))};
  }
  ONEBIT_TARGET static Words load_bytes(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  }
  ONEBIT_TARGET void store(void* to) const {
    _mm256_storeu_si256(static_cast<__m256i*>(to), low);
    _mm256_storeu_si256(static_cast<__m256i*>(to) + 1, high);
  }
  // The words are in 0..255.
  ONEBIT_TARGET void store_bytes(uint8_t* to) const {
    // packus works on each half of a register: words 0-3, 8-11, 4-7, 12-15 come out; the permutation puts them in order.
    const __m256i mixed = _mm256_packus_epi32(low, high);
    const __m256i words = _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0));
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  }

  ONEBIT_TARGET Words operator+(Words o) const { return {_mm256_add_epi32(low, o.low), _mm256_add_epi32(high, o.high)}; }
  ONEBIT_TARGET Words operator-(Words o) const { return {_mm256_sub_epi32(low, o.low), _mm256_sub_epi32(high, o.high)}; }
  ONEBIT_TARGET Words operator*(Words o) const {
    return {_mm256_mullo_epi32(low, o.low), _mm256_mullo_epi32(high, o.high)};
  }
  ONEBIT_TARGET Words operator^(Words o) const { return {_mm256_xor_si256(low, o.low), _mm256_xor_si256(high, o.high)}; }
  ONEBIT_TARGET Words operator&(Words o) const { return {_mm256_and_si256(low, o.low), _mm256_and_si256(high, o.high)}; }
  template <int kBits>
  ONEBIT_TARGET Words left() const { return {_mm256_slli_epi32(low, kBits), _mm256_slli_epi32(high, kBits)}; }
  template <int kBits>
  ONEBIT_TARGET Words right() const { return {_mm256_srli_epi32(low, kBits), _mm256_srli_epi32(high, kBits)}; }
  // As signed words.
  ONEBIT_TARGET static Words larger(Words a, Words b) {
    return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
  }
  ONEBIT_TARGET static Words smaller(Words a, Words b) {
    return {_mm256_min_epi32(a.low, b.low), _mm256_min_epi32(a.high, b.high)};
  }
  // These where `of` is not 0, else 0.
  ONEBIT_TARGET Words where_any(Words of) const {
    const __m256i zero = _mm256_setzero_si256();
    return {_mm256_andnot_si256(_mm256_cmpeq_epi32(of.low, zero), low),
            _mm256_andnot_si256(_mm256_cmpeq_epi32(of.high, zero), high)};
  }
};

// 16 floats, to nearest even.
ONEBIT_TARGET inline void store_float16(const float* from, uint16_t* to) {
  for (int l = 0; l < kLanes; ++l) to[l] = float16_near(from[l]);
}
