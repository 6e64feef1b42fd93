// 16 lanes on AVX-512 (F, BW, DQ, VL), with VNNI and BF16 instructions where the translation unit enables them.
#pragma once
#include <immintrin.h>

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct M {
  __mmask16 v;
};

static inline F zero() { return {_mm512_setzero_ps()}; }
static inline F set1(float a) { return {_mm512_set1_ps(a)}; }
static inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
static inline F load_n(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)};
}
static inline void store_n(float* p, F a, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v);
}
static inline F widen(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
static inline F load_bf16(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
static inline F load_bf16_n(const uint16_t* p, int n) {
  return widen(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
}
static inline F load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Round to nearest even by integer arithmetic (VCVTNEPS2BF16 would flush subnormals); a NaN stays a quiet NaN.
static inline __m256i narrow(F a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i out = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  out = _mm512_mask_mov_epi32(out, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(out);
}
static inline void store_bf16(uint16_t* p, F a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
static inline void store_bf16_n(uint16_t* p, F a, int n) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), narrow(a));
}

static inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where either is NaN
static inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
static inline F round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline float first(F a) { return _mm512_cvtss_f32(a.v); }
static inline float hsum(F a) { return _mm512_reduce_add_ps(a.v); }
static inline float hmax(F a) { return _mm512_reduce_max_ps(a.v); }

static inline M gt(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
static inline bool any(M m) { return m.v != 0; }
static inline F blend(M m, F yes, F no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
static inline I blend(M m, I yes, I no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }

static inline I izero() { return {_mm512_setzero_si512()}; }
static inline I iset1(int32_t a) { return {_mm512_set1_epi32(a)}; }
static inline I iload(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline void istore(void* p, I a) { _mm512_storeu_si512(p, a.v); }
// The 16 lanes, each within [-128, 127], as bytes.
static inline void store_i8(int8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
static inline I iadd(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline I iand(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
static inline I ixor(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
static inline I shl(I a, int n) { return {_mm512_slli_epi32(a.v, static_cast<unsigned>(n))}; }
static inline I shr(I a, int n) { return {_mm512_srli_epi32(a.v, static_cast<unsigned>(n))}; }
static inline I sar(I a, int n) { return {_mm512_srai_epi32(a.v, static_cast<unsigned>(n))}; }
static inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
static inline I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
// The low 32 bits of the 64-bit products' halves: {hi, lo} of a * b per lane (unsigned), for Philox.
static inline void mul_wide(I a, I b, I& hi, I& lo) {
  const __m512i even = _mm512_mul_epu32(a.v, b.v);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), _mm512_srli_epi64(b.v, 32));
  lo.v = _mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CCAA);
  hi.v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
// The nibble `shift / 4` of every lane as a float.
static inline F nibble(I a, int shift) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(a.v, static_cast<unsigned>(shift)), table)};
}
// 16 saturation-free dot products of 4 bytes: acc += u8 * s8. kNarrow: every u8 is below 64, so 16-bit pairs suffice.
template <bool kNarrow>
static inline I dot_u8s8(I acc, I u, I s) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(acc.v, u.v, s.v)};
#else
  if constexpr (kNarrow) {
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(_mm512_maddubs_epi16(u.v, s.v), _mm512_set1_epi16(1)))};
  } else {
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u.v, _mm512_set1_epi16(0xff)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(s.v, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u.v, 8), _mm512_srai_epi16(s.v, 8));
    return {_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd))};
  }
#endif
}
#if defined(__AVX512BF16__)
#define TS_HAS_DOT_BF16 1
// acc += a[2i] * b[2i] + a[2i + 1] * b[2i + 1] of bf16 pairs.
static inline F dot_bf16(F acc, I a, I b) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}
// The first n of 32 words; zeros behind them.
static inline I iload_u16(const uint16_t* p, int n) {
  return {_mm512_maskz_loadu_epi16(n <= 0 ? 0 : static_cast<__mmask32>((1ull << n) - 1), p)};
}
// Both as bf16, `low` in the first 16 words; rounded to nearest even, subnormals to zero.
static inline I pack_bf16(F low, F high) { return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v))}; }
// The pairs (a[i], b[i]) of words: of the first 16 in `low`, of the others in `high`.
[[gnu::always_inline]] static inline void interleave_u16(I a, I b, I& low, I& high) {
  const __m512i index =
      _mm512_setr_epi32(0x00200000, 0x00210001, 0x00220002, 0x00230003, 0x00240004, 0x00250005, 0x00260006, 0x00270007,
                        0x00280008, 0x00290009, 0x002a000a, 0x002b000b, 0x002c000c, 0x002d000d, 0x002e000e, 0x002f000f);
  low.v = _mm512_permutex2var_epi16(a.v, index, b.v);
  high.v = _mm512_permutex2var_epi16(a.v, _mm512_add_epi32(index, _mm512_set1_epi32(0x00100010)), b.v);
}
#endif

[[gnu::always_inline]] static inline void transpose16(F* r) {
  __m512 t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v);
  }
  __m512 u[16];
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(t[4 * i + j]), b = _mm512_castps_pd(t[4 * i + 2 + j]);
      u[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      u[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88), b = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
    r[j].v = _mm512_shuffle_f32x4(a, c, 0x88);
    r[8 + j].v = _mm512_shuffle_f32x4(a, c, 0xdd);
    r[4 + j].v = _mm512_shuffle_f32x4(b, d, 0x88);
    r[12 + j].v = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}
