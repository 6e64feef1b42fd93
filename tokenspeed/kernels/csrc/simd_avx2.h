// 16 lanes as two AVX2 registers (AVX2, FMA, F16C).
#pragma once
#include <immintrin.h>

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct M {
  __m256 a, b;
};

static inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline F load_n(const float* p, int n) {
  alignas(64) float t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
static inline void store_n(float* p, F x, int n) {
  alignas(64) float t[16];
  store(t, x);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
static inline __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
static inline F load_bf16(const uint16_t* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline F load_bf16_n(const uint16_t* p, int n) {
  alignas(64) uint16_t t[16] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load_bf16(t);
}
static inline F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Round to nearest even; a NaN stays a quiet NaN. The result's 16-bit values sit in 32-bit lanes.
static inline __m256i narrow(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i out = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(out, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
}
static inline void store_bf16(uint16_t* p, F x) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(x.a), narrow(x.b)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
static inline void store_bf16_n(uint16_t* p, F x, int n) {
  alignas(64) uint16_t t[16];
  store_bf16(t, x);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}

static inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }  // y where either is NaN
static inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline F round(F x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline float first(F x) { return _mm256_cvtss_f32(x.a); }
static inline float hsum(F x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
static inline float hmax(F x) {
  const __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}

static inline M gt(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)}; }
static inline bool any(M m) { return _mm256_movemask_ps(_mm256_or_ps(m.a, m.b)) != 0; }
static inline F blend(M m, F yes, F no) {
  return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
static inline I blend(M m, I yes, I no) {
  return {_mm256_blendv_epi8(no.a, yes.a, _mm256_castps_si256(m.a)),
          _mm256_blendv_epi8(no.b, yes.b, _mm256_castps_si256(m.b))};
}

static inline I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I iload(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
static inline void istore(void* p, I x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
// The 16 lanes, each within [-128, 127], as bytes.
static inline void store_i8(int8_t* p, I x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
static inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
static inline I ixor(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
static inline I shl(I x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
static inline I shr(I x, int n) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
static inline I sar(I x, int n) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }
static inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
static inline void mul_wide(__m256i x, __m256i y, __m256i& hi, __m256i& lo) {
  const __m256i even = _mm256_mul_epu32(x, y);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(y, 32));
  lo = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  hi = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
// {hi, lo} of the unsigned 64-bit product a * b of each lane, for Philox.
static inline void mul_wide(I x, I y, I& hi, I& lo) {
  mul_wide(x.a, y.a, hi.a, lo.a);
  mul_wide(x.b, y.b, hi.b, lo.b);
}
// The nibble `shift / 4` of every lane as a float.
static inline F nibble(I x, int shift) { return to_float(iand(shr(x, shift), iset1(15))); }

template <bool kNarrow>
static inline __m256i dot_u8s8(__m256i acc, __m256i u, __m256i s) {
  if constexpr (kNarrow) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
  } else {
    const __m256i even =
        _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
  }
}
// 16 saturation-free dot products of 4 bytes: acc += u8 * s8. kNarrow: every u8 is below 64, so 16-bit pairs suffice.
template <bool kNarrow>
static inline I dot_u8s8(I acc, I u, I s) {
  return {dot_u8s8<kNarrow>(acc.a, u.a, s.a), dot_u8s8<kNarrow>(acc.b, u.b, s.b)};
}

static inline void transpose8(__m256* r) {
  __m256 t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      u[4 * i + 2 * j] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0x44);
      u[4 * i + 2 * j + 1] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0xee);
    }
  }
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    r[4 + j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
}
[[gnu::always_inline]] static inline void transpose16(F* r) {
  __m256 block[8];
  __m256 swap[8];
  for (int i = 0; i < 8; ++i) block[i] = r[i].a;
  transpose8(block);
  for (int i = 0; i < 8; ++i) r[i].a = block[i];
  for (int i = 0; i < 8; ++i) block[i] = r[8 + i].b;
  transpose8(block);
  for (int i = 0; i < 8; ++i) r[8 + i].b = block[i];
  for (int i = 0; i < 8; ++i) block[i] = r[i].b;
  for (int i = 0; i < 8; ++i) swap[i] = r[8 + i].a;
  transpose8(block);
  transpose8(swap);
  for (int i = 0; i < 8; ++i) r[i].b = swap[i];
  for (int i = 0; i < 8; ++i) r[8 + i].a = block[i];
}
