// Paged attention, decode and prefill in one kernel. Invariant: a query's result depends on its own row's keys and
// values and its position alone: positions are taken in blocks of 32 with an online softmax, 4 blocks make a split
// whose partial result starts afresh, and splits are merged in order. So a token computed in a prefill chunk, in a
// decode batch, or with a context cut over threads has the same bits.
//
// Work items are (query tile, KV head, range of splits). A query tile is up to kTileTokens consecutive tokens of one
// request times the query heads of the KV head (GQA packing), so K and V are read once for all of them. K blocks are
// transposed into [d][32] and V blocks widened to float32 once a tile, then used by every query of it.
#pragma once
#include "rowwise.h"

static constexpr int64_t kBlockKv = 32;     // positions a softmax step
static constexpr int64_t kSplit = 128;      // positions a partial result
static constexpr int64_t kTileTokens = 16;  // consecutive tokens of a request that share K/V reads

struct QueryTile {
  int64_t first, count;  // tokens
  int64_t row;           // request row of the block table; -1: a hole
  int64_t last_pos;      // largest position among the tokens
};

// Scratch of one work item: `queries` = tokens * group, d padded to vectors.
struct AttendScratch {
  float* q;       // [queries][dp], scaled
  float* keys;    // [dp][32]
  float* values;  // [32][dp]
  float* scores;  // [queries][32]
  float* acc;     // [queries][dp]: the current split
  float* top;     // [queries]: its running maximum
  float* sum;     // [queries]: its running denominator
  float* keep;    // [queries]: the factor of what was accumulated before this block
};

// Addresses of the keys and values of one block; null past the context or on a page that was never assigned, so that
// such a cache row is never read, whatever it holds.
template <class C>
struct BlockRows {
  const C* keys[kBlockKv];
  const C* values[kBlockKv];

  inline void find(const AttendArgs& a, int64_t row, int64_t head, int64_t first, int64_t count) {
    const int32_t* table = a.table + row * a.ldt;
    int64_t page = first / a.page, within = first % a.page;
    for (int64_t p = 0; p < kBlockKv; ++p) {
      keys[p] = nullptr;
      values[p] = nullptr;
      if (p >= count) continue;
      if (table[page] >= 0) {
        const int64_t at = (static_cast<int64_t>(table[page]) * a.page + within) * a.cs + head * a.ch;
        keys[p] = static_cast<const C*>(a.kcache) + at;
        values[p] = static_cast<const C*>(a.vcache) + at;
      }
      if (++within == a.page) {
        within = 0;
        ++page;
      }
    }
  }
};

// Brings `now` into the scratch (keys transposed, values widened) while it fetches the rows of `next`: pages are
// scattered, which the hardware's prefetchers cannot follow.
template <class C>
static inline void load_block(const BlockRows<C>& now, const BlockRows<C>& next, int64_t d, int64_t count, int64_t dp,
                              const AttendScratch& s) {
  const int64_t bytes = d * static_cast<int64_t>(sizeof(C));
  for (int64_t half = 0; half < kBlockKv; half += 16) {
    for (int64_t i = 0; i < dp; i += 16) {
      const int lanes = static_cast<int>(least(16, d - i));
      F r[16];
      for (int64_t p = 0; p < 16; ++p) {
        const C* key = now.keys[half + p];
        r[p] = key == nullptr ? zero() : load_upto(key + i, lanes);
      }
      transpose16(r);
      for (int64_t j = 0; j < 16; ++j) store(s.keys + (i + j) * kBlockKv + half, r[j]);
    }
    for (int64_t p = half; p < half + 16; ++p) {
      if (next.keys[p] != nullptr) prefetch(next.keys[p], bytes);
    }
  }
  for (int64_t p = 0; p < count; ++p) {
    for (int64_t i = 0; i < dp; i += 16) {
      const C* value = now.values[p];
      const F v = value == nullptr ? zero() : load_upto(value + i, static_cast<int>(least(16, d - i)));
      store(s.values + p * dp + i, v);
    }
    if (next.values[p] != nullptr) prefetch(next.values[p], bytes);
  }
}

// scores[query][32] = q . keys for kQueries queries.
template <int kQueries>
static inline void score_rows(const float* q, int64_t dp, int64_t d, const float* keys, float* scores) {
  F acc[kQueries][2];
  for (int r = 0; r < kQueries; ++r) acc[r][0] = acc[r][1] = zero();
  for (int64_t i = 0; i < d; ++i) {
    const F k0 = load(keys + i * kBlockKv), k1 = load(keys + i * kBlockKv + 16);
#pragma GCC unroll 8
    for (int r = 0; r < kQueries; ++r) {
      const F v = set1(q[r * dp + i]);
      acc[r][0] = fma(k0, v, acc[r][0]);
      acc[r][1] = fma(k1, v, acc[r][1]);
    }
  }
  for (int r = 0; r < kQueries; ++r) {
    store(scores + r * kBlockKv, acc[r][0]);
    store(scores + r * kBlockKv + 16, acc[r][1]);
  }
}

// acc[query][kVectors * 16 of d] = acc * keep[query] + weights[query] . values, for kQueries queries.
template <int kQueries, int kVectors>
static inline void accumulate_rows(const float* weights, const float* values, int64_t dp, int64_t count,
                                   const float* keep, float* out) {
  F acc[kQueries][kVectors];
  for (int r = 0; r < kQueries; ++r) {
    for (int v = 0; v < kVectors; ++v) acc[r][v] = mul(load(out + r * dp + 16 * v), set1(keep[r]));
  }
  for (int64_t p = 0; p < count; ++p) {
    F x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = load(values + p * dp + 16 * v);
#pragma GCC unroll 4
    for (int r = 0; r < kQueries; ++r) {
      const F w = set1(weights[r * kBlockKv + p]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(w, x[v], acc[r][v]);
    }
  }
  for (int r = 0; r < kQueries; ++r) {
    for (int v = 0; v < kVectors; ++v) store(out + r * dp + 16 * v, acc[r][v]);
  }
}

template <int kQueries>
static inline void accumulate(const float* weights, const float* values, int64_t dp, int64_t count, const float* keep,
                              float* out) {
  int64_t i = 0;
  for (; i + 64 <= dp; i += 64) accumulate_rows<kQueries, 4>(weights, values + i, dp, count, keep, out + i);
  for (; i < dp; i += 16) accumulate_rows<kQueries, 1>(weights, values + i, dp, count, keep, out + i);
}

static inline float minus_infinity() { return -__builtin_inff(); }

// Attends positions [from, to) of one split for every query of the tile; leaves acc, top and sum in the scratch.
template <class C>
static inline void attend_split(const AttendArgs& a, const QueryTile& tile, int64_t head, int64_t from, int64_t to,
                                int64_t group, int64_t dp, const AttendScratch& s) {
  const int64_t queries = tile.count * group;
  for (int64_t r = 0; r < queries; ++r) {
    s.top[r] = minus_infinity();
    s.sum[r] = 0.0f;
  }
  for (int64_t i = 0; i < queries * dp; i += 16) store(s.acc + i, zero());
  int64_t full = to;  // positions below it are visible to every query
  for (int64_t t = 0; t < tile.count; ++t) full = least(full, a.pos[tile.first + t] + 1);
  BlockRows<C> rows[2];
  rows[0].find(a, tile.row, head, from, least(kBlockKv, to - from));
  for (int64_t begin = from, turn = 0; begin < to; begin += kBlockKv, turn ^= 1) {
    const int64_t count = least(kBlockKv, to - begin), after = begin + kBlockKv;
    rows[turn ^ 1].find(a, tile.row, head, after, most(0, least(kBlockKv, tile.last_pos + 1 - after)));
    load_block<C>(rows[turn], rows[turn ^ 1], a.d, count, dp, s);
    int64_t r = 0;
    for (; r + 4 <= queries; r += 4) score_rows<4>(s.q + r * dp, dp, a.d, s.keys, s.scores + r * kBlockKv);
    for (; r < queries; ++r) score_rows<1>(s.q + r * dp, dp, a.d, s.keys, s.scores + r * kBlockKv);
    for (r = 0; r < queries; ++r) {
      float* scores = s.scores + r * kBlockKv;
      const int64_t visible = least(count, a.pos[tile.first + r / group] + 1 - begin);
      for (int64_t p = most(0, visible); p < kBlockKv; ++p) scores[p] = minus_infinity();
      const F s0 = load(scores), s1 = load(scores + 16);
      const float block_top = hmax(max(s0, s1));
      const float top = block_top > s.top[r] ? block_top : s.top[r];
      // Nothing visible yet: exp(-inf - 0) = 0 keeps every term at zero. A NaN score reaches the sum through s0 and s1.
      const F base = set1(top == minus_infinity() ? 0.0f : top);
      const F e0 = exp(sub(s0, base)), e1 = exp(sub(s1, base));
      store(scores, e0);
      store(scores + 16, e1);
      s.keep[r] = first(exp(sub(set1(s.top[r]), base)));
      s.sum[r] = s.sum[r] * s.keep[r] + hsum(add(e0, e1));
      s.top[r] = top;
    }
    if (begin + count <= full) {
      for (r = 0; r + 4 <= queries; r += 4) {
        accumulate<4>(s.scores + r * kBlockKv, s.values, dp, count, s.keep + r, s.acc + r * dp);
      }
      for (; r < queries; ++r) accumulate<1>(s.scores + r * kBlockKv, s.values, dp, count, s.keep + r, s.acc + r * dp);
    } else {  // the causal edge: a query never touches a later value, not even with a zero weight (it may be NaN)
      for (r = 0; r < queries; ++r) {
        const int64_t visible = most(0, least(count, a.pos[tile.first + r / group] + 1 - begin));
        accumulate<1>(s.scores + r * kBlockKv, s.values, dp, visible, s.keep + r, s.acc + r * dp);
      }
    }
  }
}

// Merges one split's partial result into the running one of `queries` queries.
static inline void merge(int64_t queries, int64_t dp, const float* acc, const float* top, const float* sum,
                         float* into_acc, float* into_top, float* into_sum) {
  for (int64_t r = 0; r < queries; ++r) {
    if (top[r] == minus_infinity() && sum[r] == 0.0f) continue;  // saw no position
    const float best = top[r] > into_top[r] ? top[r] : into_top[r];
    const F base = set1(best == minus_infinity() ? 0.0f : best);
    const F old = set1(first(exp(sub(set1(into_top[r]), base))));
    const F fresh = set1(first(exp(sub(set1(top[r]), base))));
    for (int64_t i = r * dp; i < (r + 1) * dp; i += 16) {
      store(into_acc + i, fma(load(acc + i), fresh, mul(load(into_acc + i), old)));
    }
    into_sum[r] = into_sum[r] * first(old) + sum[r] * first(fresh);
    into_top[r] = best;
  }
}

template <class T>
static inline void write_out(const AttendArgs& a, const QueryTile& tile, int64_t head, int64_t group, int64_t dp,
                             const float* acc, const float* sum) {
  for (int64_t r = 0; r < tile.count * group; ++r) {
    T* out = static_cast<T*>(a.out) + (tile.first + r / group) * a.ot + (head * group + r % group) * a.on;
    const F inverse = set1(1.0f / sum[r]);
    each_vector(a.d, [&](int64_t i, int lanes) { store_upto(out + i, mul(load(acc + r * dp + i), inverse), lanes); });
  }
}

template <class T>
static inline void load_queries(const AttendArgs& a, const QueryTile& tile, int64_t head, int64_t group, int64_t dp,
                                float* q) {
  const F scale = set1(a.scale);
  for (int64_t r = 0; r < tile.count * group; ++r) {
    const T* in = static_cast<const T*>(a.q) + (tile.first + r / group) * a.qt + (head * group + r % group) * a.qn;
    each_vector(a.d, [&](int64_t i, int lanes) { store(q + r * dp + i, mul(load_upto(in + i, lanes), scale)); });
  }
}

static inline int64_t splits_of(const QueryTile& tile) { return tile.row < 0 ? 0 : tile.last_pos / kSplit + 1; }

// Cuts the tokens into query tiles; returns their number.
static inline int64_t make_tiles(const AttendArgs& a, QueryTile* tiles) {
  int64_t count = 0;
  for (int64_t t = 0; t < a.t; ++t) {
    const int64_t row = a.row[t] < 0 || a.pos[t] < 0 ? -1 : a.row[t];
    QueryTile* last = count > 0 ? &tiles[count - 1] : nullptr;
    if (last != nullptr && last->row == row && last->count < kTileTokens) {
      ++last->count;
      last->last_pos = most(last->last_pos, a.pos[t]);
    } else {
      tiles[count++] = {t, 1, row, a.pos[t]};
    }
  }
  return count;
}

template <class T, class C>
static void attend_typed(const AttendArgs& a) {
  const int64_t group = a.n / a.kv, dp = ceil_div(a.d, 16) * 16;
  QueryTile* const tiles = scratch<QueryTile>(Scratch::kTiles, static_cast<size_t>(a.t));
  const int64_t count = make_tiles(a, tiles);

  // One partial result: [queries] tops, [queries] sums, [queries][dp] accumulators.
  const int64_t record = kTileTokens * group * (dp + 2);
  int64_t work = 0, max_splits = 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t splits = splits_of(tiles[i]);
    max_splits = most(max_splits, splits);
    work += tiles[i].count * (tiles[i].row < 0 ? 1 : tiles[i].last_pos + 1) * a.n * a.d;
  }

  // Runs splits [from, to) of (tile, head), calling done(split, scratch) after each.
  const auto run = [&](const QueryTile& tile, int64_t head, int64_t from, int64_t to, const auto& done) {
    const int64_t queries = tile.count * group;
    const int64_t vectors = ceil_div(queries, 16) * 16;
    float* p = scratch<float>(Scratch::kAttention,
                              static_cast<size_t>(queries * (2 * dp + kBlockKv) + 2 * kBlockKv * dp + 3 * vectors));
    AttendScratch s{};
    s.q = p;
    s.acc = s.q + queries * dp;
    s.scores = s.acc + queries * dp;
    s.keys = s.scores + queries * kBlockKv;
    s.values = s.keys + kBlockKv * dp;
    s.top = s.values + kBlockKv * dp;
    s.sum = s.top + vectors;
    s.keep = s.sum + vectors;
    load_queries<T>(a, tile, head, group, dp, s.q);
    for (int64_t split = from; split < to; ++split) {
      const int64_t end = least((split + 1) * kSplit, tile.last_pos + 1);
      attend_split<C>(a, tile, head, split * kSplit, end, group, dp, s);
      done(split, s);
    }
  };
  const auto zero_out = [&](const QueryTile& tile) {
    for (int64_t t = tile.first; t < tile.first + tile.count; ++t) {
      for (int64_t h = 0; h < a.n; ++h) {
        T* out = static_cast<T*>(a.out) + t * a.ot + h * a.on;
        each_vector(a.d, [&](int64_t i, int lanes) { store_upto(out + i, zero(), lanes); });
      }
    }
  };
  // A running result over all splits of a tile, in order; finished by write_out.
  const auto start_total = [&](const QueryTile& tile, int64_t slots) {
    float* total = scratch<float>(Scratch::kPartials, static_cast<size_t>(slots));
    for (int64_t r = 0; r < tile.count * group; ++r) {
      total[r] = minus_infinity();
      total[tile.count * group + r] = 0.0f;
    }
    for (int64_t i = 0; i < tile.count * group * dp; ++i) total[2 * tile.count * group + i] = 0.0f;
    return total;
  };

  const bool serial = work < kSerialWork;
  const auto dispatch = [&](int64_t items, const auto& fn) {
    if (serial) {
      for (int64_t i = 0; i < items; ++i) fn(i);
    } else {
      parallel(items, fn);
    }
  };

  constexpr int64_t kPartialFloats =
      1 << 20;  // 4 MiB of partial results: beyond it there are tiles enough to share out
  if (serial || max_splits == 1 || count * max_splits * a.kv * record > kPartialFloats) {
    // Last tile first: in a prefill it has the longest context.
    dispatch(count * a.kv, [&](int64_t item) {
      const QueryTile& tile = tiles[count - 1 - item / a.kv];
      const int64_t head = item % a.kv, queries = tile.count * group;
      if (tile.row < 0) {
        if (head == 0) zero_out(tile);
        return;
      }
      float* const total = start_total(tile, record);
      run(tile, head, 0, splits_of(tile), [&](int64_t, const AttendScratch& s) {
        merge(queries, dp, s.acc, s.top, s.sum, total + 2 * queries, total, total + queries);
      });
      write_out<T>(a, tile, head, group, dp, total + 2 * queries, total + queries);
    });
    return;
  }

  float* const partials = scratch<float>(Scratch::kPanel, static_cast<size_t>(count * max_splits * a.kv * record));
  dispatch(count * max_splits * a.kv, [&](int64_t item) {
    const int64_t split = item / a.kv % max_splits, head = item % a.kv;
    const QueryTile& tile = tiles[item / (a.kv * max_splits)];
    if (split >= splits_of(tile)) return;
    const int64_t queries = tile.count * group;
    run(tile, head, split, split + 1, [&](int64_t, const AttendScratch& s) {
      float* const to = partials + item * record;
      for (int64_t r = 0; r < queries; ++r) {
        to[r] = s.top[r];
        to[queries + r] = s.sum[r];
      }
      for (int64_t i = 0; i < queries * dp; i += 16) store(to + 2 * queries + i, load(s.acc + i));
    });
  });
  dispatch(count * a.kv, [&](int64_t item) {
    const int64_t index = item / a.kv, head = item % a.kv;
    const QueryTile& tile = tiles[index];
    if (tile.row < 0) {
      if (head == 0) zero_out(tile);
      return;
    }
    const int64_t queries = tile.count * group;
    float* const total = start_total(tile, record);
    for (int64_t split = 0; split < splits_of(tile); ++split) {
      const float* from = partials + ((index * max_splits + split) * a.kv + head) * record;
      merge(queries, dp, from + 2 * queries, from, from + queries, total + 2 * queries, total, total + queries);
    }
    write_out<T>(a, tile, head, group, dp, total + 2 * queries, total + queries);
  });
}

static void attend(const AttendArgs& a) {
  if (a.t == 0 || a.n == 0) return;
  with_dtype(a.dtype,
             [&](auto t) { with_dtype(a.cache_dtype, [&](auto c) { attend_typed<decltype(t), decltype(c)>(a); }); });
}
