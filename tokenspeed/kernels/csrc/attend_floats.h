// The products of attention in float32, of any types. Invariant: a score is one chain of fused multiply-adds over the
// dimensions in order, a value one over the positions in order, whatever else the call computes.
//
// K blocks are transposed to [d][kBlockKv], V blocks widened to float32, once a tile.
#pragma once
#include "attend_rows.h"

#if defined(TS_ISA_AVX512)
static constexpr int kScoreVectors = 4;  // vectors of positions scored at once: what the registers hold
#else
static constexpr int kScoreVectors = 2;
#endif

template <class T, class C>
struct FloatProducts {
  static constexpr int64_t kPad = 16;  // dp is a multiple of it

  static inline void query(const T* in, int64_t d, int64_t, float* q) {
    each_vector(d, [&](int64_t i, int lanes) { store(q + i, load_upto(in + i, lanes)); });
  }

  // The keys of a part of the block, of the head `offset` elements behind, transposed.
  static inline void keys(const BlockRows<C>& now, int64_t part, int64_t offset, int64_t d, int64_t dp, float* keys,
                          Ahead<C>& ahead) {
    const C* const* const rows = now.keys + part;
    for (int64_t i = 0; i < dp; i += 16) {
      F r[16];
      if (i + 16 <= d) {
        TS_UNROLL(16)
        for (int64_t p = 0; p < 16; ++p) r[p] = load_as(rows[p] + offset + i);
      } else {
        for (int64_t p = 0; p < 16; ++p) r[p] = load_as_n(rows[p] + offset + i, static_cast<int>(d - i));
      }
      transpose16(r);
      TS_UNROLL(16)
      for (int64_t j = 0; j < 16; ++j) store(keys + (i + j) * kBlockKv + part, r[j]);
      ahead.tick();
    }
  }

  // scores[query][kBlockKv] = q . keys for kQueries queries.
  template <int kQueries>
  static inline void score(const float* q, int64_t d, int64_t dp, const float* keys, float* scores) {
    for (int64_t at = 0; at < kBlockKv; at += 16 * kScoreVectors) {
      F acc[kQueries][kScoreVectors];
      for (int r = 0; r < kQueries; ++r) {
        for (int v = 0; v < kScoreVectors; ++v) acc[r][v] = zero();
      }
      for (int64_t i = 0; i < d; ++i) {
        F k[kScoreVectors];
        for (int v = 0; v < kScoreVectors; ++v) k[v] = load(keys + i * kBlockKv + at + 16 * v);
        TS_UNROLL(4)
        for (int r = 0; r < kQueries; ++r) {
          const F x = set1(q[r * dp + i]);
          for (int v = 0; v < kScoreVectors; ++v) acc[r][v] = fma(k[v], x, acc[r][v]);
        }
      }
      for (int r = 0; r < kQueries; ++r) {
        for (int v = 0; v < kScoreVectors; ++v) store(scores + r * kBlockKv + at + 16 * v, acc[r][v]);
      }
    }
  }

  // Turns a row of scores into weights 2^(score - base) and adds them to `sum`, lane by lane.
  static inline F weigh(float* scores, F base, F sum) {
    for (int64_t i = 0; i < kBlockKv; i += 16) {
      const F e = exp2(sub(load(scores + i), base));
      store(scores + i, e);
      sum = add(sum, e);
    }
    return sum;
  }

  // The values of the part widened to rows of dp.
  static inline void values(const BlockRows<C>& now, int64_t part, int64_t offset, int64_t d, int64_t dp,
                            float* values) {
    for (int64_t p = part; p < least(now.count, part + kPart); ++p) {
      const C* const in = now.values[p] + offset;
      each_vector(d, [&](int64_t i, int lanes) { store(values + p * dp + i, load_upto(in + i, lanes)); });
    }
  }

  // out[query][16 kVectors] = out * keep[query] + weights[query] . values of positions [from, to), for kQueries
  // queries, from dimension `i` on.
  template <int kQueries, int kVectors>
  static inline void accumulate_part(const float* weights, const float* values, int64_t i, int64_t dp, int64_t from,
                                     int64_t to, const float* keep, float* out) {
    F acc[kQueries][kVectors];
    for (int r = 0; r < kQueries; ++r) {
      for (int v = 0; v < kVectors; ++v) acc[r][v] = mul(load(out + r * dp + i + 16 * v), set1(keep[r]));
    }
    for (int64_t p = from; p < to; ++p) {
      F x[kVectors];
      for (int v = 0; v < kVectors; ++v) x[v] = load(values + p * dp + i + 16 * v);
      TS_UNROLL(4)
      for (int r = 0; r < kQueries; ++r) {
        const F w = set1(weights[r * kBlockKv + p]);
        for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(w, x[v], acc[r][v]);
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
    for (; i < dp; i += 16) accumulate_part<kQueries, 1>(weights, values, i, dp, from, to, keep, out);
  }
};
