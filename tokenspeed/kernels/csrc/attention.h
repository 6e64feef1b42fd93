// Paged attention, decode and prefill in one kernel. Invariant: a query's result depends on its own row's keys and
// values and its position alone: positions are taken in blocks of 32 with an online softmax, 4 blocks make a split
// whose partial result starts afresh, and splits are merged in order. So a token computed in a prefill chunk, in a
// decode batch, or with a context cut over threads has the same bits.
//
// Work items are (query tile, KV heads, range of splits). A query tile is up to kTileTokens consecutive tokens of one
// request times the query heads of a KV head (GQA packing), so K and V are read once for all of them. K blocks are
// transposed into [d][32] and, for many queries, V blocks widened to float32, once a tile. A cache row holds all heads
// side by side, so a decode item takes all heads block by block and reads memory in whole rows.
//
// Under a window a tile starts at the block of its first visible position; blocks and splits keep their places, and one
// that a query does not see leaves the query's state as it was, so bits do not depend on the tile either.
#pragma once
#include "rowwise.h"

static constexpr int64_t kBlockKv = 32;     // positions a softmax step
static constexpr int64_t kSplit = 128;      // positions a partial result
static constexpr int64_t kItemSplits = 8;   // splits an item takes, at most
static constexpr int64_t kTileTokens = 16;  // consecutive tokens of a request that share K/V reads

struct QueryTile {
  int64_t first, count;  // tokens
  int64_t row;           // request row of the block table; -1: a hole
  int64_t first_pos;     // smallest position among the tokens
  int64_t last_pos;      // largest position among the tokens
};

// First position that a token at `pos` sees.
static inline int64_t first_seen(const AttendArgs& a, int64_t pos) {
  return a.window > 0 ? most(0, pos + 1 - a.window) : 0;
}

// Scratch of one work item: `rows` = heads * tokens * group, KV head outermost; d padded to vectors.
struct AttendScratch {
  float* q;       // [rows][dp], scaled
  float* acc;     // [rows][dp]: the current split
  float* top;     // [rows]: its running maximum
  float* sum;     // [rows]: its running denominator
  float* keys;    // [dp][32] of one head, as are those below
  float* values;  // [32][dp]
  float* zeros;   // [dp]
  float* scores;  // [queries][32]
  float* keep;    // [queries]: the factor of what was accumulated before this block

  // The same with the first four starting at row `row`.
  AttendScratch from_row(int64_t row, int64_t dp) const {
    AttendScratch s = *this;
    s.q += row * dp;
    s.acc += row * dp;
    s.top += row;
    s.sum += row;
    return s;
  }
};

// Addresses of the keys and values of one block. A position past the context or on a page that was never assigned gets
// a row of zeros, so that such a cache row is never read, whatever it holds.
template <class C>
struct BlockRows {
  const C* keys[kBlockKv];
  const C* values[kBlockKv];
  int64_t count;  // positions within the context

  inline void find(const AttendArgs& a, int64_t row, int64_t head, int64_t first, int64_t positions, const C* zeros) {
    const int32_t* table = a.table + row * a.ldt;
    const C* const keycache = static_cast<const C*>(a.kcache) + head * a.ch;
    const C* const valuecache = static_cast<const C*>(a.vcache) + head * a.ch;
    count = positions;
    for (int64_t p = 0; p < kBlockKv; ++p) keys[p] = values[p] = zeros;
    for (int64_t p = 0, page = first / a.page, within = first % a.page; p < positions; ++page, within = 0) {
      const int64_t slot = static_cast<int64_t>(table[page]) * a.page;
      for (; within < a.page && p < positions; ++within, ++p) {
        if (table[page] < 0) continue;
        keys[p] = keycache + (slot + within) * a.cs;
        values[p] = valuecache + (slot + within) * a.cs;
      }
    }
  }

  // Asks for `bytes` of the rows of positions [from, to) of the block, into the second-level cache.
  inline void fetch(int64_t from, int64_t to, int64_t bytes) const {
    for (int64_t p = from; p < least(to, count); ++p) {
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(keys[p]) + i, 0, 2);
        __builtin_prefetch(reinterpret_cast<const char*>(values[p]) + i, 0, 2);
      }
    }
  }
};

// Rows of the next block to ask for while this one is worked on: pages are scattered, which the hardware's prefetchers
// cannot follow.
template <class C>
struct Ahead {
  const BlockRows<C>& block;
  int64_t from, to;  // positions
  int64_t bytes;     // of each row
};

// The block's keys transposed to [dp][32]; the rows ahead are asked for between the transpositions.
template <class C>
static inline void load_keys(const BlockRows<C>& now, const Ahead<C>& ahead, int64_t d, int64_t dp, float* keys) {
  const int64_t steps = 2 * dp / 16, wanted = ahead.to - ahead.from;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t half = step & 1 ? 16 : 0, i = step / 2 * 16;
    F r[16];
    if (i + 16 <= d) {
      TS_UNROLL(16)
      for (int64_t p = 0; p < 16; ++p) r[p] = load_as(now.keys[half + p] + i);
    } else {
      for (int64_t p = 0; p < 16; ++p) r[p] = load_as_n(now.keys[half + p] + i, static_cast<int>(d - i));
    }
    transpose16(r);
    TS_UNROLL(16)
    for (int64_t j = 0; j < 16; ++j) store(keys + (i + j) * kBlockKv + half, r[j]);
    ahead.block.fetch(ahead.from + wanted * step / steps, ahead.from + wanted * (step + 1) / steps, ahead.bytes);
  }
}

// The block's values widened to float32 rows of dp.
template <class C>
static inline void load_values(const BlockRows<C>& now, int64_t d, int64_t dp, float* values, const float** rows) {
  for (int64_t p = 0; p < now.count; ++p) {
    rows[p] = values + p * dp;
    each_vector(d, [&](int64_t i, int lanes) { store(values + p * dp + i, load_upto(now.values[p] + i, lanes)); });
  }
}

// scores[query][32] = q . keys for kQueries queries.
template <int kQueries>
static inline void score_rows(const float* q, int64_t dp, int64_t d, const float* keys, float* scores) {
  F acc[kQueries][2];
  for (int r = 0; r < kQueries; ++r) acc[r][0] = acc[r][1] = zero();
  for (int64_t i = 0; i < d; ++i) {
    const F k0 = load(keys + i * kBlockKv), k1 = load(keys + i * kBlockKv + 16);
    TS_UNROLL(8)
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

// out[query][16 kVectors] = out * keep[query] + weights[query] . values, for kQueries queries, from dimension `i` on.
template <int kQueries, int kVectors, class V>
static inline void accumulate_rows(const float* weights, const V* const* values, int64_t i, int lanes, int64_t dp,
                                   int64_t count, const float* keep, float* out) {
  F acc[kQueries][kVectors];
  for (int r = 0; r < kQueries; ++r) {
    for (int v = 0; v < kVectors; ++v) acc[r][v] = mul(load(out + r * dp + i + 16 * v), set1(keep[r]));
  }
  for (int64_t p = 0; p < count; ++p) {
    F x[kVectors];
    for (int v = 0; v < kVectors; ++v)
      x[v] = kVectors == 1 ? load_upto(values[p] + i, lanes) : load_as(values[p] + i + 16 * v);
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

template <int kQueries, class V>
static inline void accumulate(const float* weights, const V* const* values, int64_t d, int64_t dp, int64_t count,
                              const float* keep, float* out) {
  int64_t i = 0;
  for (; i + 64 <= d; i += 64) accumulate_rows<kQueries, 4>(weights, values, i, 16, dp, count, keep, out);
  for (; i < d; i += 16) {
    const int lanes = static_cast<int>(least(16, d - i));
    accumulate_rows<kQueries, 1>(weights, values, i, lanes, dp, count, keep, out);
  }
}

// Calls fn(Count<n>{}, first) over the queries in groups of 4 and a last one of 1 to 3.
template <class Fn>
static inline void query_groups(int64_t queries, const Fn& fn) {
  int64_t r = 0;
  for (; r + 4 <= queries; r += 4) fn(Count<4>{}, r);
  switch (queries - r) {
    case 3:
      return fn(Count<3>{}, r);
    case 2:
      return fn(Count<2>{}, r);
    case 1:
      return fn(Count<1>{}, r);
    default:
      return;
  }
}

static inline float minus_infinity() { return -__builtin_inff(); }

// One block of positions from `begin` on, for the queries of one KV head: scores, online softmax, weighted values.
// Positions from `clear` to below `full` are visible to every query.
template <class C>
static inline void attend_block(const AttendArgs& a, const QueryTile& tile, const BlockRows<C>& now,
                                const Ahead<C>& ahead, int64_t begin, int64_t clear, int64_t full, int64_t group,
                                int64_t dp, const AttendScratch& s) {
  const int64_t queries = tile.count * group, count = now.count;
  load_keys<C>(now, ahead, a.d, dp, s.keys);
  query_groups(queries, [&](auto n, int64_t r) {
    score_rows<decltype(n)::value>(s.q + r * dp, dp, a.d, s.keys, s.scores + r * kBlockKv);
  });
  for (int64_t r = 0; r < queries; ++r) {
    float* scores = s.scores + r * kBlockKv;
    const int64_t pos = a.pos[tile.first + r / group], visible = least(count, pos + 1 - begin);
    if (a.softcap > 0.0f) {
      const F cap = set1(a.softcap), inverse = set1(1.0f / a.softcap);
      store(scores, mul(tanh(mul(load(scores), inverse)), cap));
      store(scores + 16, mul(tanh(mul(load(scores + 16), inverse)), cap));
    }
    for (int64_t p = most(0, visible); p < kBlockKv; ++p) scores[p] = minus_infinity();
    for (int64_t p = 0; p < least(kBlockKv, first_seen(a, pos) - begin); ++p) scores[p] = minus_infinity();
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
  const auto weigh = [&](const auto* const* values) {
    if (begin >= clear && begin + count <= full) {
      query_groups(queries, [&](auto n, int64_t r) {
        accumulate<decltype(n)::value>(s.scores + r * kBlockKv, values, a.d, dp, count, s.keep + r, s.acc + r * dp);
      });
      return;
    }
    // The edges: a query never touches a value that it does not see, not even with a zero weight (it may be NaN).
    for (int64_t r = 0; r < queries; ++r) {
      const int64_t pos = a.pos[tile.first + r / group];
      const int64_t from = least(count, most(0, first_seen(a, pos) - begin));
      const int64_t visible = most(0, least(count, pos + 1 - begin) - from);
      accumulate<1>(s.scores + r * kBlockKv + from, values + from, a.d, dp, visible, s.keep + r, s.acc + r * dp);
    }
  };
  if (sizeof(C) != 4 && queries > 4) {  // few queries read the values where they lie
    const float* rows[kBlockKv];
    load_values<C>(now, a.d, dp, s.values, rows);
    weigh(rows);
  } else {
    weigh(now.values);
  }
}

// Attends positions [from, to) of one split, block by block, for the queries of KV heads [head, head_end); leaves acc,
// top and sum in the scratch. Rows are asked for one block ahead, up to position `until`.
template <class C>
static inline void attend_split(const AttendArgs& a, const QueryTile& tile, int64_t head, int64_t head_end,
                                int64_t from, int64_t to, int64_t until, int64_t group, int64_t dp,
                                const AttendScratch& s) {
  const int64_t queries = tile.count * group, heads = head_end - head;
  for (int64_t r = 0; r < heads * queries; ++r) {
    s.top[r] = minus_infinity();
    s.sum[r] = 0.0f;
  }
  for (int64_t i = 0; i < heads * queries * dp; i += 16) store(s.acc + i, zero());
  const int64_t full = least(to, tile.first_pos + 1), clear = first_seen(a, tile.last_pos);
  const int64_t bytes = (a.ch == a.d ? heads * a.d : a.d) * static_cast<int64_t>(sizeof(C));
  const C* const zeros = reinterpret_cast<const C*>(s.zeros);
  BlockRows<C> now, next;
  now.find(a, tile.row, head, from, least(kBlockKv, to - from), zeros);
  now.fetch(0, kBlockKv, bytes);
  for (int64_t begin = from; begin < to; begin += kBlockKv) {
    const int64_t after = begin + kBlockKv;
    next.find(a, tile.row, head, after, most(0, least(kBlockKv, until - after)), zeros);
    for (int64_t h = 0; h < heads; ++h) {
      now.find(a, tile.row, head + h, begin, least(kBlockKv, to - begin), zeros);
      const Ahead<C> ahead{next, kBlockKv * h / heads, kBlockKv * (h + 1) / heads, bytes};
      attend_block<C>(a, tile, now, ahead, begin, clear, full, group, dp, s.from_row(h * queries, dp));
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

// What a query's accumulated values are multiplied by: one over its denominator, the head's sink included.
static inline float inverse_sum(const AttendArgs& a, int64_t head, float top, float sum) {
  if (a.sinks == nullptr) return 1.0f / sum;
  float sink = 0.0f;
  with_dtype(a.sinks_dtype,
             [&](auto t) { sink = first(load_as_n(static_cast<const decltype(t)*>(a.sinks) + head, 1)); });
  const float base = sink > top ? sink : top;
  const float own = first(exp(set1(top - base))), rest = first(exp(set1(sink - base)));
  return own / (sum * own + rest);
}

template <class T>
static inline void write_out(const AttendArgs& a, const QueryTile& tile, int64_t head, int64_t group, int64_t dp,
                             const float* acc, const float* top, const float* sum) {
  for (int64_t r = 0; r < tile.count * group; ++r) {
    T* out = static_cast<T*>(a.out) + (tile.first + r / group) * a.ot + (head * group + r % group) * a.on;
    const F inverse = set1(inverse_sum(a, head * group + r % group, top[r], sum[r]));
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

// The splits that a tile sees are [first_split, end_split).
static inline int64_t first_split(const AttendArgs& a, const QueryTile& tile) {
  return tile.row < 0 ? 0 : first_seen(a, tile.first_pos) / kSplit;
}
static inline int64_t end_split(const QueryTile& tile) { return tile.row < 0 ? 0 : tile.last_pos / kSplit + 1; }

// Cuts the tokens into query tiles; returns their number.
static inline int64_t make_tiles(const AttendArgs& a, QueryTile* tiles) {
  int64_t count = 0;
  for (int64_t t = 0; t < a.t; ++t) {
    const int64_t row = a.row[t] < 0 || a.pos[t] < 0 ? -1 : a.row[t];
    QueryTile* last = count > 0 ? &tiles[count - 1] : nullptr;
    if (last != nullptr && last->row == row && last->count < kTileTokens) {
      ++last->count;
      last->first_pos = least(last->first_pos, a.pos[t]);
      last->last_pos = most(last->last_pos, a.pos[t]);
    } else {
      tiles[count++] = {t, 1, row, a.pos[t], a.pos[t]};
    }
  }
  return count;
}

template <class T, class C>
struct Attention {
  const AttendArgs& a;
  int64_t group;  // query heads a KV head
  int64_t dp;     // d padded to vectors
  QueryTile* tiles;
  int64_t count = 0, max_splits = 1, max_queries = 0, work = 0;
  int64_t record = 0;  // floats of one partial result: [queries] tops, [queries] sums, [queries][dp] accumulators

  explicit Attention(const AttendArgs& args)
      : a(args),
        group(args.n / args.kv),
        dp(ceil_div(args.d, 16) * 16),
        tiles(scratch<QueryTile>(Scratch::kTiles, static_cast<size_t>(args.t))) {
    count = make_tiles(a, tiles);
    for (int64_t i = 0; i < count; ++i) {
      max_splits = most(max_splits, end_split(tiles[i]) - first_split(a, tiles[i]));
      max_queries = most(max_queries, tiles[i].count * group);
      const int64_t seen = tiles[i].row < 0 ? 1 : tiles[i].last_pos + 1 - first_seen(a, tiles[i].first_pos);
      work += tiles[i].count * seen * a.n * a.d;
    }
    record = max_queries * (dp + 2);
  }

  AttendScratch make_scratch(int64_t heads, int64_t queries) const {
    const int64_t rows = heads * queries, row_vectors = ceil_div(rows, 16) * 16;
    const int64_t size = 2 * rows * dp + 3 * row_vectors + (2 * kBlockKv + 1) * dp + queries * kBlockKv;
    AttendScratch s{};
    s.q = scratch<float>(Scratch::kAttention, static_cast<size_t>(size));
    s.acc = s.q + rows * dp;
    s.top = s.acc + rows * dp;
    s.sum = s.top + row_vectors;
    s.keep = s.sum + row_vectors;
    s.keys = s.keep + row_vectors;
    s.values = s.keys + kBlockKv * dp;
    s.zeros = s.values + kBlockKv * dp;
    s.scores = s.zeros + dp;
    for (int64_t i = 0; i < dp; i += 16) store(s.zeros + i, zero());
    return s;
  }

  // Runs splits [from, to) of KV heads [head, head_end) of a tile, calling done(split, head, its scratch) after each.
  template <class Done>
  void run(const QueryTile& tile, int64_t head, int64_t head_end, int64_t from, int64_t to, const Done& done) const {
    const int64_t queries = tile.count * group, until = least(to * kSplit, tile.last_pos + 1);
    const AttendScratch s = make_scratch(head_end - head, queries);
    for (int64_t h = head; h < head_end; ++h) {
      load_queries<T>(a, tile, h, group, dp, s.from_row((h - head) * queries, dp).q);
    }
    const int64_t start = first_seen(a, tile.first_pos) / kBlockKv * kBlockKv;
    for (int64_t split = from; split < to; ++split) {
      const int64_t begin = most(start, split * kSplit), end = least((split + 1) * kSplit, until);
      attend_split<C>(a, tile, head, head_end, begin, end, until, group, dp, s);
      for (int64_t h = head; h < head_end; ++h) done(split, h, s.from_row((h - head) * queries, dp));
    }
  }

  void zero_out(const QueryTile& tile) const {
    for (int64_t t = tile.first; t < tile.first + tile.count; ++t) {
      for (int64_t h = 0; h < a.n; ++h) {
        T* out = static_cast<T*>(a.out) + t * a.ot + h * a.on;
        each_vector(a.d, [&](int64_t i, int lanes) { store_upto(out + i, zero(), lanes); });
      }
    }
  }

  // An empty running result in `total`.
  void start(float* total, int64_t queries) const {
    for (int64_t r = 0; r < queries; ++r) {
      total[r] = minus_infinity();
      total[queries + r] = 0.0f;
    }
    for (int64_t i = 0; i < queries * dp; i += 16) store(total + 2 * queries + i, zero());
  }
  void add_split(float* total, int64_t queries, const float* acc, const float* top, const float* sum) const {
    merge(queries, dp, acc, top, sum, total + 2 * queries, total, total + queries);
  }
  void finish(const QueryTile& tile, int64_t head, const float* total) const {
    const int64_t queries = tile.count * group;
    write_out<T>(a, tile, head, group, dp, total + 2 * queries, total, total + queries);
  }

  template <class Fn>
  void dispatch(int64_t items, const Fn& fn) const {
    if (work < kSerialWork) {
      for (int64_t i = 0; i < items; ++i) fn(i);
    } else {
      parallel(items, fn);
    }
  }

  static int64_t wanted_items() { return 4 * pool_threads(); }  // for an even share

  // All KV heads where that leaves enough of `items` and the queries are few; with many, one head's state fills the
  // cache.
  int64_t heads_an_item(int64_t items) const { return items >= wanted_items() && max_queries <= 16 ? a.kv : 1; }

  // An item runs whole contexts: nothing is stored between splits.
  void whole_contexts() const {
    const int64_t heads = heads_an_item(count), parts = a.kv / heads;
    dispatch(count * parts, [&](int64_t item) {
      const QueryTile& tile = tiles[count - 1 - item / parts];  // last first: in a prefill it has the longest context
      const int64_t head = item % parts * heads, queries = tile.count * group;
      if (tile.row < 0) {
        if (head == 0) zero_out(tile);
        return;
      }
      float* const totals = scratch<float>(Scratch::kPartials, static_cast<size_t>(heads * record));
      for (int64_t h = 0; h < heads; ++h) start(totals + h * record, queries);
      run(tile, head, head + heads, first_split(a, tile), end_split(tile),
          [&](int64_t, int64_t h, const AttendScratch& s) {
            add_split(totals + (h - head) * record, queries, s.acc, s.top, s.sum);
          });
      for (int64_t h = 0; h < heads; ++h) finish(tile, head + h, totals + h * record);
    });
  }

  // Items run ranges of splits and store each partial result; a second pass merges them in order.
  void split_contexts() const {
    float* const partials = scratch<float>(Scratch::kPanel, static_cast<size_t>(count * max_splits * a.kv * record));
    const auto partial = [&](int64_t index, int64_t split, int64_t head) {
      return partials + ((index * max_splits + split - first_split(a, tiles[index])) * a.kv + head) * record;
    };
    const int64_t heads = heads_an_item(count * max_splits), parts = a.kv / heads;
    const int64_t step = most(1, least(kItemSplits, count * max_splits * parts / wanted_items()));
    const int64_t ranges = ceil_div(max_splits, step);
    dispatch(count * ranges * parts, [&](int64_t item) {
      const int64_t index = item / (parts * ranges), head = item % parts * heads;
      const QueryTile& tile = tiles[index];
      const int64_t from = first_split(a, tile) + item / parts % ranges * step, queries = tile.count * group;
      const int64_t to = least(from + step, end_split(tile));
      if (from >= to) return;
      run(tile, head, head + heads, from, to, [&](int64_t split, int64_t h, const AttendScratch& s) {
        float* const out = partial(index, split, h);
        for (int64_t r = 0; r < queries; ++r) {
          out[r] = s.top[r];
          out[queries + r] = s.sum[r];
        }
        for (int64_t i = 0; i < queries * dp; i += 16) store(out + 2 * queries + i, load(s.acc + i));
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
      float* const total = scratch<float>(Scratch::kPartials, static_cast<size_t>(record));
      start(total, queries);
      for (int64_t split = first_split(a, tile); split < end_split(tile); ++split) {
        const float* from = partial(index, split, head);
        add_split(total, queries, from + 2 * queries, from, from + queries);
      }
      finish(tile, head, total);
    });
  }

  void run_all() const {
    constexpr int64_t kPartialFloats = 1 << 20;  // 4 MiB of partial results; beyond it there are tiles enough
    if (work < kSerialWork || max_splits == 1 || count * max_splits * a.kv * record > kPartialFloats) {
      whole_contexts();
    } else {
      split_contexts();
    }
  }
};

static void attend(const AttendArgs& a) {
  if (a.t == 0 || a.n == 0) return;
  with_dtype(a.dtype, [&](auto t) {
    with_dtype(a.cache_dtype, [&](auto c) { Attention<decltype(t), decltype(c)>(a).run_all(); });
  });
}
