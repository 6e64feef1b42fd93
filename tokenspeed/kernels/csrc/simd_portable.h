// 16 lanes in plain C++, for any machine; the compiler vectorises the loops for its baseline.
#pragma once
#include <cmath>
#include <cstring>

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct M {
  bool v[16];
};

#define TS_EACH for (int i = 0; i < 16; ++i)
template <class To, class From>
static inline To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To out;
  std::memcpy(&out, &x, sizeof(To));
  return out;
}
static inline F set1(float x) {
  F o;
  TS_EACH o.v[i] = x;
  return o;
}
static inline F zero() { return set1(0.0f); }
static inline F load_n(const float* p, int n) {
  F o = zero();
  for (int i = 0; i < n; ++i) o.v[i] = p[i];
  return o;
}
static inline F load(const float* p) { return load_n(p, 16); }
static inline void store_n(float* p, F x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.v[i];
}
static inline void store(float* p, F x) { store_n(p, x, 16); }
static inline F load_bf16_n(const uint16_t* p, int n) {
  F o = zero();
  for (int i = 0; i < n; ++i) o.v[i] = bits_of<float>(static_cast<uint32_t>(p[i]) << 16);
  return o;
}
static inline F load_bf16(const uint16_t* p) { return load_bf16_n(p, 16); }
static inline float half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_of<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude < 0x400u) {  // a subnormal half is magnitude * 2^-24 exactly
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return sign != 0 ? -value : value;
  }
  return bits_of<float>(sign | ((magnitude << 13) + 0x38000000u));
}
static inline F load_f16(const uint16_t* p) {
  F o;
  TS_EACH o.v[i] = half(p[i]);
  return o;
}
static inline void store_bf16_n(uint16_t* p, F x, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = bits_of<uint32_t>(x.v[i]);
    p[i] = x.v[i] != x.v[i] ? uint16_t{0x7fc0} : static_cast<uint16_t>((bits + ((bits >> 16) & 1) + 0x7fff) >> 16);
  }
}
static inline void store_bf16(uint16_t* p, F x) { store_bf16_n(p, x, 16); }

#define TS_BINARY(name, type, expression)   \
  static inline type name(type x, type y) { \
    type o;                                 \
    TS_EACH o.v[i] = expression;            \
    return o;                               \
  }
TS_BINARY(add, F, x.v[i] + y.v[i])
TS_BINARY(sub, F, x.v[i] - y.v[i])
TS_BINARY(mul, F, x.v[i] * y.v[i])
TS_BINARY(div, F, x.v[i] / y.v[i])
TS_BINARY(min, F, x.v[i] < y.v[i] ? x.v[i] : y.v[i])  // y where either is NaN, as on x86
TS_BINARY(max, F, x.v[i] > y.v[i] ? x.v[i] : y.v[i])
TS_BINARY(iand, I, x.v[i] & y.v[i])
TS_BINARY(ixor, I, x.v[i] ^ y.v[i])
TS_BINARY(iadd, I, static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) + static_cast<uint32_t>(y.v[i])))
#undef TS_BINARY
static inline F fma(F x, F y, F z) { return add(mul(x, y), z); }
static inline F abs(F x) {
  F o;
  TS_EACH o.v[i] = std::fabs(x.v[i]);
  return o;
}
static inline F round(F x) {  // |x| < 2^22: the sum's last bit is the unit
  F o;
  TS_EACH o.v[i] = (x.v[i] + 12582912.0f) - 12582912.0f;
  return o;
}
static inline float first(F x) { return x.v[0]; }
static inline float hsum(F x) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
  }
  return x.v[0];
}
static inline float hmax(F x) {
  float out = x.v[0];
  TS_EACH out = x.v[i] > out ? x.v[i] : out;
  return out;
}

static inline M gt(F x, F y) {
  M o;
  TS_EACH o.v[i] = x.v[i] > y.v[i];
  return o;
}
static inline bool any(M m) {
  bool out = false;
  TS_EACH out |= m.v[i];
  return out;
}
static inline F blend(M m, F yes, F no) {
  TS_EACH no.v[i] = m.v[i] ? yes.v[i] : no.v[i];
  return no;
}
static inline I blend(M m, I yes, I no) {
  TS_EACH no.v[i] = m.v[i] ? yes.v[i] : no.v[i];
  return no;
}
static inline I iset1(int32_t x) {
  I o;
  TS_EACH o.v[i] = x;
  return o;
}
static inline I izero() { return iset1(0); }
static inline I iload(const void* p) {
  I o;
  std::memcpy(o.v, p, sizeof(o.v));
  return o;
}
static inline void istore(void* p, I x) { std::memcpy(p, x.v, sizeof(x.v)); }
// The 16 lanes, each within [-128, 127], as bytes.
static inline void store_i8(int8_t* p, I x) { TS_EACH p[i] = static_cast<int8_t>(x.v[i]); }
static inline I shl(I x, int n) {
  TS_EACH x.v[i] = static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) << n);
  return x;
}
static inline I shr(I x, int n) {
  TS_EACH x.v[i] = static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) >> n);
  return x;
}
static inline I sar(I x, int n) {
  TS_EACH x.v[i] >>= n;
  return x;
}
static inline F to_float(I x) {
  F o;
  TS_EACH o.v[i] = static_cast<float>(x.v[i]);
  return o;
}
static inline I to_int(F x) {  // out-of-range and NaN become INT_MIN, as on x86
  I o;
  TS_EACH o.v[i] =
      x.v[i] > -2147483648.0f && x.v[i] < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(x.v[i])) : INT32_MIN;
  return o;
}
static inline F as_float(I x) {
  F o;
  std::memcpy(o.v, x.v, sizeof(o.v));
  return o;
}
static inline I as_int(F x) {
  I o;
  std::memcpy(o.v, x.v, sizeof(o.v));
  return o;
}
// {hi, lo} of the unsigned 64-bit product x * y of each lane, for Philox.
static inline void mul_wide(I x, I y, I& hi, I& lo) {
  TS_EACH {
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(x.v[i])) * static_cast<uint32_t>(y.v[i]);
    hi.v[i] = static_cast<int32_t>(product >> 32);
    lo.v[i] = static_cast<int32_t>(product);
  }
}
// The nibble `shift / 4` of every lane as a float.
static inline F nibble(I x, int shift) { return to_float(iand(shr(x, shift), iset1(15))); }

// 16 dot products of 4 bytes: acc += u8 * s8.
template <bool kNarrow>
static inline I dot_u8s8(I acc, I u, I s) {
  TS_EACH {
    for (int b = 0; b < 32; b += 8) {
      acc.v[i] += static_cast<int32_t>(static_cast<uint8_t>(u.v[i] >> b)) * static_cast<int8_t>(s.v[i] >> b);
    }
  }
  return acc;
}
static inline void transpose16(F* r) {
  for (int i = 0; i < 16; ++i) {
    for (int j = i + 1; j < 16; ++j) {
      const float t = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = t;
    }
  }
}
#undef TS_EACH
