// 16 floats in two registers. Included by kernels.cpp.

struct Lanes {
  __m256 low, high;

  ONEBIT_TARGET static Lanes splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  ONEBIT_TARGET static Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  ONEBIT_TARGET static Lanes load_bf16(const uint16_t* from) { return {widen(from), widen(from + 8)}; }
  ONEBIT_TARGET static Lanes load_int8(const uint8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  ONEBIT_TARGET void store(float* to) const {
    _mm256_storeu_ps(to, low);
    _mm256_storeu_ps(to + 8, high);
  }
  // To nearest even; a NaN becomes kNanBf16.
  ONEBIT_TARGET void store_bf16(uint16_t* to) const {
    // packus works on each half of a register: lanes 0-3, 8-11, 4-7, 12-15 come out; the permutation puts them in order.
    const __m256i mixed = _mm256_packus_epi32(narrow(low), narrow(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0)));
  }
  // The lanes hold whole numbers in -128..127.
  ONEBIT_TARGET void store_int8(uint8_t* to) const {
    // packs works on each half of a register: lanes 0-3, 8-11, 4-7, 12-15 come out; the permutation puts them in order.
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
    const __m256i words = _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0));
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  }

  ONEBIT_TARGET Lanes operator+(Lanes o) const { return {_mm256_add_ps(low, o.low), _mm256_add_ps(high, o.high)}; }
  ONEBIT_TARGET Lanes operator-(Lanes o) const { return {_mm256_sub_ps(low, o.low), _mm256_sub_ps(high, o.high)}; }
  ONEBIT_TARGET Lanes operator*(Lanes o) const { return {_mm256_mul_ps(low, o.low), _mm256_mul_ps(high, o.high)}; }
  ONEBIT_TARGET Lanes operator/(Lanes o) const { return {_mm256_div_ps(low, o.low), _mm256_div_ps(high, o.high)}; }
  ONEBIT_TARGET Lanes sqrt() const { return {_mm256_sqrt_ps(low), _mm256_sqrt_ps(high)}; }
  ONEBIT_TARGET Lanes abs() const {
    const __m256 minus_zero = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(minus_zero, low), _mm256_andnot_ps(minus_zero, high)};
  }
  ONEBIT_TARGET Lanes negated() const {
    const __m256 minus_zero = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(minus_zero, low), _mm256_xor_ps(minus_zero, high)};
  }

  // To the nearest whole number, ties to even; the sign stays, also a zero's. |lane| < 2^22.
  ONEBIT_TARGET Lanes rounded() const {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(low, kNearestEven), _mm256_round_ps(high, kNearestEven)};
  }
  // a if a > b, otherwise b; so b if one of them is a NaN.
  ONEBIT_TARGET static Lanes larger(Lanes a, Lanes b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
  }
  // Of lanes without a sign bit, by their bits: an infinity is above every number and a NaN above both.
  ONEBIT_TARGET static Lanes larger_bits(Lanes a, Lanes b) {
    return {larger_bits(a.low, b.low), larger_bits(a.high, b.high)};
  }

  // Bit l is the sign bit of lane l.
  ONEBIT_TARGET uint16_t sign_bits() const {
    return static_cast<uint16_t>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
  }

  // These, none of them below zero, with the signs of `of`. Three instructions fewer than `select`.
  ONEBIT_TARGET Lanes signed_as(Lanes of) const {
    const __m256 minus_zero = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(low, _mm256_and_ps(of.low, minus_zero)), _mm256_or_ps(high, _mm256_and_ps(of.high, minus_zero))};
  }

  // Lane l is `set`'s where bit l is 1, else `clear`'s.
  ONEBIT_TARGET static Lanes select(uint16_t bits, Lanes set, Lanes clear) {
    const __m256i every = _mm256_set1_epi32(bits);
    // blendv looks at the top bit of each lane: shift the lane's own bit there.
    const __m256i for_low = _mm256_sllv_epi32(every, _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
    const __m256i for_high = _mm256_sllv_epi32(every, _mm256_setr_epi32(23, 22, 21, 20, 19, 18, 17, 16));
    return {_mm256_blendv_ps(clear.low, set.low, _mm256_castsi256_ps(for_low)),
            _mm256_blendv_ps(clear.high, set.high, _mm256_castsi256_ps(for_high))};
  }

  // l + (l+8), then l + (l+4), l + (l+2), l + (l+1).
  ONEBIT_TARGET float sum_in_halves() const {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

 private:
  ONEBIT_TARGET static __m256i narrow(__m256 wide) {
    const __m256i bits = _mm256_castps_si256(wide), even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), even), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(near, _mm256_set1_epi32(kNanBf16), is_nan);
  }
  ONEBIT_TARGET static __m256 larger_bits(__m256 a, __m256 b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
  }
  ONEBIT_TARGET static __m256 widen(const uint16_t* from) {
    const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
  }
};
