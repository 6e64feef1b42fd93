// How each packed weight format is read: `values` yields 4 consecutive K of 16 output rows as floats, in natural K
// order, so that every caller adds the products of one output in the same order whatever the batch; `dwords` yields the
// bytes for integer dot products. Part of every ISA's translation unit.
#pragma once
#include "simd.h"

struct Scales {
  F d;
  F m;  // the minimum; -zero * d for a format with a zero point; the second half's scale for kQ8S16
};

template <Format kFormat>
struct Weights {
  static constexpr bool kNibbles = kFormat == Format::kQ4_0 || kFormat == Format::kQ4_1 || kFormat == Format::kQ4F;
  static constexpr bool kBytes = kFormat == Format::kQ8_0 || kFormat == Format::kQ8S16;
  static constexpr bool kQuantised = kNibbles || kBytes;
  static constexpr bool kMin = kFormat == Format::kQ4_1 || kFormat == Format::kQ4F;
  static constexpr bool kHalves = kFormat == Format::kQ8S16;  // one scale for each 16 values
  static constexpr int kZero = kBytes ? 128 : kFormat == Format::kQ4_0 ? 8 : 0;
  static constexpr int64_t kBlockBytes = block_bytes(kFormat);
  static constexpr int64_t kQuantBytes = kNibbles ? 256 : 512;

  // `block` is the start of a block: tile + b * kBlockBytes.
  static inline Scales scales(const uint8_t* block) {
    if constexpr (!kQuantised) {
      return {zero(), zero()};
    } else if constexpr (kFormat == Format::kQ4F || kFormat == Format::kQ8S16) {
      const float* p = reinterpret_cast<const float*>(block + kQuantBytes);
      return {load(p), load(p + 16)};
    } else if constexpr (kFormat == Format::kQ4_1) {
      const uint16_t* p = reinterpret_cast<const uint16_t*>(block + kQuantBytes);
      return {load_f16(p), load_f16(p + 16)};
    } else {
      const F d = load_f16(reinterpret_cast<const uint16_t*>(block + kQuantBytes));
      return {d, mul(d, set1(-static_cast<float>(kZero)))};
    }
  }

  // Weights of the block's values 16 half + 4 quarter + {0, 1, 2, 3}.
  static inline void values(const uint8_t* block, int half, int quarter, const Scales& s, F* out) {
    const int i = 4 * half + quarter;
    if constexpr (kFormat == Format::kF32) {
      const float* p = reinterpret_cast<const float*>(block) + 4 * i * 16;
      for (int j = 0; j < 4; ++j) out[j] = load(p + 16 * j);
    } else if constexpr (kFormat == Format::kBF16) {
      for (int j = 0; j < 2; ++j) {
        const I pair = iload(block + (2 * i + j) * 64);
        out[2 * j] = as_float(shl(pair, 16));
        out[2 * j + 1] = as_float(iand(pair, iset1(static_cast<int32_t>(0xffff0000u))));
      }
    } else if constexpr (kNibbles) {
      const I w = iload(block + quarter * 64);
      const int high = 4 * half;
      for (int j = 0; j < 4; ++j) out[j] = fma(nibble(w, 8 * j + high), s.d, s.m);
    } else {
      const I w = ixor(iload(block + i * 64), iset1(static_cast<int32_t>(0x80808080u)));
      const F d = kHalves && half == 1 ? s.m : s.d;
      for (int j = 0; j < 4; ++j) out[j] = mul(to_float(sar(shl(w, 24 - 8 * j), 24)), d);
    }
  }

  // Unsigned bytes of the block's values 4 i + {0..3} for i in 0..7: out[i].
  static inline void dwords(const uint8_t* block, I* out) {
    if constexpr (kNibbles) {
      const I mask = iset1(0x0f0f0f0f);
      for (int i = 0; i < 4; ++i) {
        const I w = iload(block + i * 64);
        out[i] = iand(w, mask);
        out[4 + i] = iand(shr(w, 4), mask);
      }
    } else {
      for (int i = 0; i < 8; ++i) out[i] = iload(block + i * 64);
    }
  }
};

// Calls fn(Weights<format>{}).
template <class Fn>
static inline void with_format(Format format, const Fn& fn) {
  switch (format) {
    case Format::kF32:
      return fn(Weights<Format::kF32>{});
    case Format::kBF16:
      return fn(Weights<Format::kBF16>{});
    case Format::kQ4_0:
      return fn(Weights<Format::kQ4_0>{});
    case Format::kQ4_1:
      return fn(Weights<Format::kQ4_1>{});
    case Format::kQ8_0:
      return fn(Weights<Format::kQ8_0>{});
    case Format::kQ4F:
      return fn(Weights<Format::kQ4F>{});
    case Format::kQ8S16:
      return fn(Weights<Format::kQ8S16>{});
  }
}
