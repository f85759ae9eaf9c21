// 16 floats in one register. Included by kernels.cpp.

struct Lanes {
  __m512 v;

  ONEBIT_TARGET static Lanes splat(float value) { return {_mm512_set1_ps(value)}; }
  ONEBIT_TARGET static Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }
  ONEBIT_TARGET static Lanes load_bf16(const uint16_t* from) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16))};
  }
  ONEBIT_TARGET static Lanes load_int8(const uint8_t* from) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
  }
  ONEBIT_TARGET void store(float* to) const { _mm512_storeu_ps(to, v); }
  // To nearest even; a NaN becomes kNanBf16.
  ONEBIT_TARGET void store_bf16(uint16_t* to) const {
    const __m512i bits = _mm512_castps_si512(v), even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), even), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_blend_epi32(is_nan, near, _mm512_set1_epi32(kNanBf16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(chosen));
  }
  // The lanes hold whole numbers in -128..127.
  ONEBIT_TARGET void store_int8(uint8_t* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
  }

  ONEBIT_TARGET Lanes operator+(Lanes o) const { return {_mm512_add_ps(v, o.v)}; }
  ONEBIT_TARGET Lanes operator-(Lanes o) const { return {_mm512_sub_ps(v, o.v)}; }
  ONEBIT_TARGET Lanes operator*(Lanes o) const { return {_mm512_mul_ps(v, o.v)}; }
  ONEBIT_TARGET Lanes operator/(Lanes o) const { return {_mm512_div_ps(v, o.v)}; }
  ONEBIT_TARGET Lanes sqrt() const { return {_mm512_sqrt_ps(v)}; }
  ONEBIT_TARGET Lanes abs() const { return {_mm512_abs_ps(v)}; }
  ONEBIT_TARGET Lanes negated() const { return {_mm512_xor_ps(v, _mm512_set1_ps(-0.0f))}; }

  // To the nearest whole number, ties to even; the sign stays, also a zero's. |lane| < 2^22.
  ONEBIT_TARGET Lanes rounded() const {
    return {_mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  // a if a > b, otherwise b; so b if one of them is a NaN.
  ONEBIT_TARGET static Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
  // Of lanes without a sign bit, by their bits: an infinity is above every number and a NaN above both.
  ONEBIT_TARGET static Lanes larger_bits(Lanes a, Lanes b) {
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
  }

  // Bit l is the sign bit of lane l.
  ONEBIT_TARGET uint16_t sign_bits() const {
    return static_cast<uint16_t>(_mm512_movepi32_mask(_mm512_castps_si512(v)));
  }

  // These, none of them below zero, with the signs of `of`.
  ONEBIT_TARGET Lanes signed_as(Lanes of) const {
    return {_mm512_or_ps(v, _mm512_and_ps(of.v, _mm512_set1_ps(-0.0f)))};
  }

  // Lane l is `set`'s where bit l is 1, else `clear`'s.
  ONEBIT_TARGET static Lanes select(uint16_t bits, Lanes set, Lanes clear) {
    return {_mm512_mask_blend_ps(bits, clear.v, set.v)};
  }

  // l + (l+8), then l + (l+4), l + (l+2), l + (l+1).
  ONEBIT_TARGET float sum_in_halves() const {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
};
