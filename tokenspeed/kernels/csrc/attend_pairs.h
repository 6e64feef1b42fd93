// The products of attention on pairs of bf16, where the machine multiplies them: queries, keys and values as they are,
// weights rounded to bf16 (and summed as rounded, so that they still add up to one). Invariant: a score is one chain
// over the pairs of dimensions in order, a value one over the pairs of positions in order, whatever else the call
// computes; a weight of zero times a value that a query may see adds nothing, so where a chain starts and ends changes
// no bit.
//
// K blocks are transposed to [d / 2][kBlockKv] pairs, V blocks woven to [kBlockKv / 2][dp] pairs of neighbours.
#pragma once
#include "attend_rows.h"

#if defined(TS_HAS_DOT_BF16)
struct PairProducts {
  using C = uint16_t;
  static constexpr int64_t kPad = 32;

  static inline I pairs_at(const C* row, int64_t i, int64_t d) {
    return i + 32 <= d ? iload(row + i) : iload_u16(row + i, static_cast<int>(d - i));
  }

  static inline void query(const C* in, int64_t d, int64_t dp, float* q) {
    for (int64_t i = 0; i < dp; i += 32) istore(q + i / 2, i < d ? pairs_at(in, i, d) : izero());
  }

  static inline void keys(const BlockRows<C>& now, int64_t part, int64_t offset, int64_t d, int64_t dp, float* keys,
                          Ahead<C>& ahead) {
    const C* const* const rows = now.keys + part;
    for (int64_t i = 0; i < dp; i += 32) {
      F r[16];
      if (i + 32 <= d) {
        TS_UNROLL(16)
        for (int64_t p = 0; p < 16; ++p) r[p] = as_float(iload(rows[p] + offset + i));
      } else {
        for (int64_t p = 0; p < 16; ++p) r[p] = as_float(iload_u16(rows[p] + offset + i, static_cast<int>(d - i)));
      }
      transpose16(r);
      TS_UNROLL(16)
      for (int64_t j = 0; j < 16; ++j) store(keys + (i / 2 + j) * kBlockKv + part, r[j]);
      ahead.tick();
    }
  }

  template <int kQueries>
  static inline void score(const float* q, int64_t d, int64_t dp, const float* keys, float* scores) {
    constexpr int kVectors = kBlockKv / 16;
    F acc[kQueries][kVectors];
    for (int r = 0; r < kQueries; ++r) {
      for (int v = 0; v < kVectors; ++v) acc[r][v] = zero();
    }
    for (int64_t i = 0; i < ceil_div(d, 2); ++i) {
      I k[kVectors];
      for (int v = 0; v < kVectors; ++v) k[v] = iload(keys + i * kBlockKv + 16 * v);
      TS_UNROLL(4)
      for (int r = 0; r < kQueries; ++r) {
        const I x = as_int(set1(q[r * dp + i]));
        for (int v = 0; v < kVectors; ++v) acc[r][v] = dot_bf16(acc[r][v], k[v], x);
      }
    }
    for (int r = 0; r < kQueries; ++r) {
      for (int v = 0; v < kVectors; ++v) store(scores + r * kBlockKv + 16 * v, acc[r][v]);
    }
  }

  static inline F weigh(float* scores, F base, F sum) {
    const I ones = iset1(0x3f803f80);
    for (int64_t i = 0; i < kBlockKv; i += 32) {
      const F low = exp2(sub(load(scores + i), base)), high = exp2(sub(load(scores + i + 16), base));
      const I both = pack_bf16(low, high);
      istore(scores + i / 2, both);
      sum = dot_bf16(sum, both, ones);
    }
    return sum;
  }

  static inline void values(const BlockRows<C>& now, int64_t part, int64_t offset, int64_t d, int64_t dp,
                            float* values) {
    for (int64_t p = part / 2; p < ceil_div(least(now.count, part + kPart), 2); ++p) {
      const C *first = now.values[2 * p] + offset, *second = now.values[2 * p + 1] + offset;
      for (int64_t i = 0; i < dp; i += 32) {
        I low, high;
        interleave_u16(pairs_at(first, i, d), pairs_at(second, i, d), low, high);
        istore(values + p * dp + i, low);
        istore(values + p * dp + i + 16, high);
      }
    }
  }

  // A value outside [from, to) counts as zero: it may be anything where the one query does not see it.
  template <int kQueries, int kVectors>
  static inline void accumulate_part(const float* weights, const float* values, int64_t i, int64_t dp, int64_t from,
                                     int64_t to, const float* keep, float* out) {
    F acc[kQueries][kVectors];
    for (int r = 0; r < kQueries; ++r) {
      for (int v = 0; v < kVectors; ++v) acc[r][v] = mul(load(out + r * dp + i + 16 * v), set1(keep[r]));
    }
    for (int64_t p = from / 2; p < ceil_div(to, 2); ++p) {
      I x[kVectors];
      for (int v = 0; v < kVectors; ++v) x[v] = iload(values + p * dp + i + 16 * v);
      if constexpr (kQueries == 1) {
        const uint32_t first = 2 * p >= from ? 0xffffu : 0, second = 2 * p + 1 < to ? 0xffff0000u : 0;
        for (int v = 0; v < kVectors; ++v) x[v] = iand(x[v], iset1(static_cast<int32_t>(first | second)));
      }
      TS_UNROLL(4)
      for (int r = 0; r < kQueries; ++r) {
        const I w = as_int(set1(weights[r * kBlockKv + p]));
        for (int v = 0; v < kVectors; ++v) acc[r][v] = dot_bf16(acc[r][v], x[v], w);
      }
    }
    for (int r = 0; r < kQueries; ++r) {
      for (int v = 0; v < kVectors; ++v) store(out + r * dp + i + 16 * v, acc[r][v]);
    }
  }

  template <int kQueries>
  static inline void accumulate(const float* weights, const float* values, int64_t dp, int64_t from, int64_t to,
                                const float* keep, float* out) {
    int64_t i = 0;
    for (; i + 64 <= dp; i += 64) accumulate_part<kQueries, 4>(weights, values, i, dp, from, to, keep, out);
    if (i < dp) accumulate_part<kQueries, 2>(weights, values, i, dp, from, to, keep, out);
  }
};
#endif
