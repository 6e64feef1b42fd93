// One vector type of 16 float (F) or int32 (I) lanes, whatever the machine: the kernels are written once on it and
// compiled once an instruction set. Everything here and in the kernels has internal linkage, and no kernel file
// instantiates standard-library templates: a function compiled for AVX-512 must never be the copy that the linker keeps
// for a machine without it.
#pragma once
#include <cstdint>

#include "types.h"

// Keeps accumulators in registers. Not for the portable set, whose vectors are loops of their own.
#define TS_PRAGMA(text) _Pragma(#text)
#if defined(TS_ISA_AVX512) || defined(TS_ISA_AVX2)
#define TS_UNROLL(n) TS_PRAGMA(GCC unroll n)
#else
#define TS_UNROLL(n)
#endif

#if defined(TS_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(TS_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

// e^x, about 1 ulp, after Cephes expf; 0 below -87.3 (subnormal results are flushed), saturates at e^88, NaN stays NaN.
static inline F exp(F x) {
  const M dead = gt(set1(-87.336544f), x);
  const F y = max(set1(-87.336544f), min(set1(88.0f), x));  // min and max pass a NaN in the second operand
  const F n = round(mul(y, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return blend(dead, zero(), mul(p, as_float(shl(iadd(to_int(n), iset1(127)), 23))));
}

// 2^x for x <= 127, about 1 ulp, after Cephes exp2f; 0 below -126.5 (subnormal results are flushed), NaN stays NaN.
static inline F exp2(F x) {
  const F y = max(set1(-200.0f), x);  // max passes a NaN in the second operand
  const F n = round(y), r = sub(y, n);
  F p = set1(1.535336188319500e-4f);
  p = fma(p, r, set1(1.339887440266574e-3f));
  p = fma(p, r, set1(9.618437357674640e-3f));
  p = fma(p, r, set1(5.550332471162809e-2f));
  p = fma(p, r, set1(2.402264791363012e-1f));
  p = fma(p, r, set1(6.931472028550421e-1f));
  p = fma(p, r, set1(1.0f));
  const M dead = gt(set1(-126.0f), n);
  return blend(dead, zero(), mul(p, as_float(shl(iadd(to_int(n), iset1(127)), 23))));
}

// tanh x, within 2e-7.
static inline F tanh(F x) {
  const F e = exp(add(x, x));
  return div(sub(e, set1(1.0f)), add(e, set1(1.0f)));
}

// Natural logarithm of a positive normal x, about 1 ulp, after Cephes logf.
static inline F log(F x) {
  const I bits = as_int(x);
  F e = to_float(iadd(shr(bits, 23), iset1(-126)));
  F m = as_float(iadd(iand(bits, iset1(0x007fffff)), iset1(0x3f000000)));  // in [0.5, 1)
  const M low = gt(set1(0.707106781186547524f), m);
  e = sub(e, blend(low, set1(1.0f), zero()));
  m = sub(add(m, blend(low, m, zero())), set1(1.0f));
  const F z = mul(m, m);
  F p = set1(7.0376836292e-2f);
  p = fma(p, m, set1(-1.1514610310e-1f));
  p = fma(p, m, set1(1.1676998740e-1f));
  p = fma(p, m, set1(-1.2420140846e-1f));
  p = fma(p, m, set1(1.4249322787e-1f));
  p = fma(p, m, set1(-1.6668057665e-1f));
  p = fma(p, m, set1(2.0000714765e-1f));
  p = fma(p, m, set1(-2.4999993993e-1f));
  p = fma(p, m, set1(3.3333331174e-1f));
  F y = mul(mul(p, m), z);
  y = fma(e, set1(-2.12194440e-4f), y);
  y = fma(z, set1(-0.5f), y);
  return fma(e, set1(0.693359375f), add(m, y));
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Asks for the lines of [p, p + bytes). The address may lie past the end of a buffer: a prefetch never faults.
static inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 3);
}

// Typed element access: T is float or uint16_t (the bits of a bf16).
static inline F load_as(const float* p) { return load(p); }
static inline F load_as(const uint16_t* p) { return load_bf16(p); }
static inline F load_as_n(const float* p, int n) { return load_n(p, n); }
static inline F load_as_n(const uint16_t* p, int n) { return load_bf16_n(p, n); }
static inline void store_as(float* p, F x) { store(p, x); }
static inline void store_as(uint16_t* p, F x) { store_bf16(p, x); }
static inline void store_as_n(float* p, F x, int n) { store_n(p, x, n); }
static inline void store_as_n(uint16_t* p, F x, int n) { store_bf16_n(p, x, n); }

// Calls fn(i, lanes) for every vector of a row of `n` elements; lanes is 16 but for the last.
template <class Fn>
static inline void each_vector(int64_t n, const Fn& fn) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) fn(i, 16);
  if (i < n) fn(i, static_cast<int>(n - i));
}
template <class T>
static inline F load_upto(const T* p, int n) {
  return n == 16 ? load_as(p) : load_as_n(p, n);
}
template <class T>
static inline void store_upto(T* p, F x, int n) {
  if (n == 16) {
    store_as(p, x);
  } else {
    store_as_n(p, x, n);
  }
}
// v rounded to T and widened again.
template <class T>
static inline F through(F x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    alignas(64) uint16_t t[16];
    store_bf16(t, x);
    return load_bf16(t);
  }
}
