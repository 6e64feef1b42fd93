// Paged attention, decode and prefill in one kernel. Invariant: a query's result depends on its own row's keys and
// values and its position alone: positions are taken in blocks of 32 with an online softmax, blocks make splits of 256
// whose partial result starts afresh, and splits are merged in order. So a token computed in a prefill chunk, in a
// decode batch, or with a context cut over threads has the same bits.
//
// Work items are (query tile, KV heads, range of splits). A query tile is up to kTileTokens consecutive tokens of one
// request times the query heads of a KV head (GQA packing), so K and V are read once for all of them. A cache row holds
// all heads side by side, so a decode item takes all heads block by block and reads memory in whole rows.
//
// Under a window a tile starts at the block of its first visible position; blocks and splits keep their places, and one
// that a query does not see leaves the query's state as it was, so bits do not depend on the tile either.
//
// Scores are kept in base 2: times the scale and log2 e.
#pragma once
#include "attend_floats.h"
#include "attend_pairs.h"

static constexpr int64_t kSplit = 256;      // positions a partial result
static constexpr int64_t kItemSplits = 4;   // splits an item takes, at most
static constexpr int64_t kTileTokens = 16;  // consecutive tokens of a request that share K/V reads
static constexpr float kLog2E = 1.44269504088896341f;

// Scratch of one work item: `rows` = heads * tokens * group, KV head outermost; d padded to vectors.
struct AttendScratch {
  float* q;       // [rows][dp], as the products want it
  float* acc;     // [rows][dp]: the current split
  float* sums;    // [rows][16]: its running denominator, lane by lane
  float* top;     // [rows]: its running maximum
  float* sum;     // [rows]: its denominator, at its end
  float* keys;    // [heads][dp][kBlockKv], as the products want them
  float* values;  // [heads][kBlockKv][dp]
  float* zeros;   // [heads][dp]
  float* scores;  // [queries][kBlockKv] of one head, as are those below
  float* keep;    // [queries]: the factor of what was accumulated before this block
  float* base;    // [queries]: what is taken off the scores

  // The same with what is of all heads starting at head `head`, of `queries` queries.
  AttendScratch at_head(int64_t head, int64_t queries, int64_t dp) const {
    AttendScratch s = *this;
    const int64_t row = head * queries;
    s.q += row * dp;
    s.acc += row * dp;
    s.sums += row * 16;
    s.top += row;
    s.sum += row;
    s.keys += head * kBlockKv * dp;
    s.values += head * kBlockKv * dp;
    return s;
  }
};

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

// The maximum, or 0 where nothing is visible yet: 2^(-inf - 0) = 0 keeps every term at zero.
static inline F base_of(F top) { return blend(gt(top, set1(minus_infinity())), top, zero()); }

// The scores of one block from `begin` on, scaled, bent and masked; leaves their largest in keep[query].
static inline void finish_scores(const AttendArgs& a, const QueryTile& tile, int64_t begin, int64_t count,
                                 int64_t group, bool open, const AttendScratch& s) {
  const F scale = set1(a.softcap > 0.0f ? a.scale / a.softcap : a.scale * kLog2E), cap = set1(a.softcap * kLog2E);
  for (int64_t r = 0; r < tile.count * group; ++r) {
    float* scores = s.scores + r * kBlockKv;
    F largest = set1(minus_infinity());
    for (int64_t i = 0; i < kBlockKv; i += 16) {
      F v = mul(load(scores + i), scale);
      if (a.softcap > 0.0f) v = mul(tanh(v), cap);
      store(scores + i, v);
      largest = max(largest, v);
    }
    if (!open) {
      const int64_t pos = a.pos[tile.first + r / group], visible = least(count, pos + 1 - begin);
      for (int64_t p = most(0, visible); p < kBlockKv; ++p) scores[p] = minus_infinity();
      for (int64_t p = 0; p < least(kBlockKv, first_seen(a, pos) - begin); ++p) scores[p] = minus_infinity();
      largest = load(scores);
      for (int64_t i = 16; i < kBlockKv; i += 16) largest = max(largest, load(scores + i));
    }
    s.keep[r] = hmax(largest);
  }
}

// The keys and values of one block as the products want them, a page's worth of all heads at a time: memory is read in
// order.
template <class P, class C>
static inline void stage_block(const AttendArgs& a, const BlockRows<C>& now, Ahead<C>& ahead, int64_t heads, int64_t dp,
                               const AttendScratch& s) {
  for (int64_t part = 0; part < kBlockKv; part += kPart) {
    for (int64_t h = 0; h < heads; ++h) {
      P::keys(now, part, h * a.ch, a.d, dp, s.keys + h * kBlockKv * dp, ahead);
    }
    for (int64_t h = 0; h < heads; ++h) {
      P::values(now, part, h * a.ch, a.d, dp, s.values + h * kBlockKv * dp);
      ahead.tick();
    }
  }
}

// The block's positions from `begin` on, for the queries of one KV head: scores, online softmax, weighted values.
// Positions from `clear` to below `full` are visible to every query.
template <class P, class C>
static inline void attend_block(const AttendArgs& a, const QueryTile& tile, int64_t count, Ahead<C>& ahead,
                                int64_t begin, int64_t clear, int64_t full, int64_t group, int64_t dp,
                                const AttendScratch& s) {
  const int64_t queries = tile.count * group;
  const bool open = begin >= clear && begin + count <= full;
  query_groups(queries, [&](auto n, int64_t r) {
    P::template score<decltype(n)::value>(s.q + r * dp, a.d, dp, s.keys, s.scores + r * kBlockKv);
  });
  ahead.tick();
  finish_scores(a, tile, begin, count, group, open && count == kBlockKv, s);
  each_vector(queries, [&](int64_t r, int lanes) {
    const F old = load_upto(s.top + r, lanes), largest = load_upto(s.keep + r, lanes);
    const F top = blend(gt(largest, old), largest, old), base = base_of(top);
    store_upto(s.keep + r, exp2(sub(old, base)), lanes);
    store_upto(s.base + r, base, lanes);
    store_upto(s.top + r, top, lanes);
  });
  for (int64_t r = 0; r < queries; ++r) {  // a NaN score reaches the sum
    float* const sums = s.sums + r * 16;
    store(sums, P::weigh(s.scores + r * kBlockKv, set1(s.base[r]), mul(load(sums), set1(s.keep[r]))));
  }
  ahead.tick();
  if (open) {
    query_groups(queries, [&](auto n, int64_t r) {
      P::template accumulate<decltype(n)::value>(s.scores + r * kBlockKv, s.values, dp, 0, count, s.keep + r,
                                                 s.acc + r * dp);
    });
    return;
  }
  // The edges: a query never touches a value that it does not see, not even with a zero weight (it may be NaN).
  for (int64_t r = 0; r < queries; ++r) {
    const int64_t pos = a.pos[tile.first + r / group];
    const int64_t from = least(count, most(0, first_seen(a, pos) - begin));
    const int64_t to = most(from, least(count, pos + 1 - begin));
    P::template accumulate<1>(s.scores + r * kBlockKv, s.values, dp, from, to, s.keep + r, s.acc + r * dp);
  }
}

// Attends positions [from, to) of one split, block by block, for the queries of KV heads [head, head_end); leaves acc,
// top and sum in the scratch. Rows are asked for one block ahead, up to position `until`.
template <class P, class C>
static inline void attend_split(const AttendArgs& a, const QueryTile& tile, int64_t head, int64_t head_end,
                                int64_t from, int64_t to, int64_t until, int64_t group, int64_t dp,
                                const AttendScratch& s) {
  const int64_t queries = tile.count * group, heads = head_end - head;
  for (int64_t r = 0; r < heads * queries; ++r) {
    s.top[r] = minus_infinity();
    store(s.sums + r * 16, zero());
  }
  for (int64_t i = 0; i < heads * queries * dp; i += 16) store(s.acc + i, zero());
  const int64_t full = least(to, tile.first_pos + 1), clear = first_seen(a, tile.last_pos);
  const int64_t bytes = heads * a.d * static_cast<int64_t>(sizeof(C));
  const C* const zeros = reinterpret_cast<const C*>(s.zeros);
  BlockRows<C> now, next;
  next.find(a, tile.row, head, from, least(kBlockKv, to - from), zeros);
  next.fetch(0, kBlockKv, bytes);
  for (int64_t begin = from; begin < to; begin += kBlockKv) {
    const int64_t after = begin + kBlockKv;
    now = next;
    if (now.count > to - begin) now.find(a, tile.row, head, begin, to - begin, zeros);
    next.find(a, tile.row, head, after, most(0, least(kBlockKv, until - after)), zeros);
    Ahead<C> ahead{next, bytes, heads * (kBlockKv / kPart * (dp / P::kPad + 1) + 2)};
    stage_block<P, C>(a, now, ahead, heads, dp, s);
    for (int64_t h = 0; h < heads; ++h) {
      attend_block<P, C>(a, tile, now.count, ahead, begin, clear, full, group, dp, s.at_head(h, queries, dp));
    }
  }
  for (int64_t r = 0; r < heads * queries; ++r) s.sum[r] = hsum(load(s.sums + r * 16));
}

// Merges one split's partial result into the running one of `queries` queries.
static inline void merge(int64_t queries, int64_t dp, const float* acc, const float* top, const float* sum,
                         float* into_acc, float* into_top, float* into_sum) {
  each_vector(queries, [&](int64_t first_row, int lanes) {
    const F t = load_upto(top + first_row, lanes), into = load_upto(into_top + first_row, lanes);
    const F best = blend(gt(t, into), t, into), base = base_of(best);
    alignas(64) float old[16], fresh[16];
    store(old, exp2(sub(into, base)));
    store(fresh, exp2(sub(t, base)));
    store_upto(into_top + first_row, best, lanes);
    for (int64_t j = 0; j < lanes; ++j) {
      const int64_t r = first_row + j;
      if (top[r] == minus_infinity() && sum[r] == 0.0f) continue;  // saw no position, which leaves `best` as it was
      for (int64_t i = r * dp; i < (r + 1) * dp; i += 16) {
        store(into_acc + i, fma(load(acc + i), set1(fresh[j]), mul(load(into_acc + i), set1(old[j]))));
      }
      into_sum[r] = into_sum[r] * old[j] + sum[r] * fresh[j];
    }
  });
}

// What a query's accumulated values are multiplied by: one over its denominator, the head's sink included.
static inline float inverse_sum(const AttendArgs& a, int64_t head, float top, float sum) {
  if (a.sinks == nullptr) return 1.0f / sum;
  float sink = 0.0f;
  with_dtype(a.sinks_dtype,
             [&](auto t) { sink = first(load_as_n(static_cast<const decltype(t)*>(a.sinks) + head, 1)); });
  sink *= kLog2E;
  const float base = sink > top ? sink : top;
  const float own = first(exp2(set1(top - base))), rest = first(exp2(set1(sink - base)));
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

template <class P, class T>
static inline void load_queries(const AttendArgs& a, const QueryTile& tile, int64_t head, int64_t group, int64_t dp,
                                float* q) {
  for (int64_t r = 0; r < tile.count * group; ++r) {
    P::query(static_cast<const T*>(a.q) + (tile.first + r / group) * a.qt + (head * group + r % group) * a.qn, a.d, dp,
             q + r * dp);
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

// T: of the queries, C: of the caches, P: their products.
template <class T, class C, class P>
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
        dp(ceil_div(args.d, P::kPad) * P::kPad),
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
    const int64_t size =
        2 * rows * dp + 16 * rows + 4 * row_vectors + (2 * kBlockKv + 1) * heads * dp + queries * kBlockKv;
    AttendScratch s{};
    s.q = scratch<float>(Scratch::kAttention, static_cast<size_t>(size));
    s.acc = s.q + rows * dp;
    s.sums = s.acc + rows * dp;
    s.top = s.sums + 16 * rows;
    s.sum = s.top + row_vectors;
    s.keep = s.sum + row_vectors;
    s.base = s.keep + row_vectors;
    s.keys = s.base + row_vectors;
    s.values = s.keys + heads * kBlockKv * dp;
    s.zeros = s.values + heads * kBlockKv * dp;
    s.scores = s.zeros + dp;
    for (int64_t i = 0; i < heads * dp; i += 16) store(s.zeros + i, zero());
    return s;
  }

  // Runs splits [from, to) of KV heads [head, head_end) of a tile, calling done(split, head, its scratch) after each.
  template <class Done>
  void run(const QueryTile& tile, int64_t head, int64_t head_end, int64_t from, int64_t to, const Done& done) const {
    const int64_t queries = tile.count * group, until = least(to * kSplit, tile.last_pos + 1);
    const AttendScratch s = make_scratch(head_end - head, queries);
    for (int64_t h = head; h < head_end; ++h) {
      load_queries<P, T>(a, tile, h, group, dp, s.at_head(h - head, queries, dp).q);
    }
    const int64_t start = first_seen(a, tile.first_pos) / kBlockKv * kBlockKv;
    for (int64_t split = from; split < to; ++split) {
      const int64_t begin = most(start, split * kSplit), end = least((split + 1) * kSplit, until);
      attend_split<P, C>(a, tile, head, head_end, begin, end, until, group, dp, s);
      for (int64_t h = head; h < head_end; ++h) done(split, h, s.at_head(h - head, queries, dp));
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

  // All KV heads where they lie side by side, that leaves enough of `items` and the queries are few; with many, one
  // head's state fills the cache.
  int64_t heads_an_item(int64_t items) const {
    return a.ch == a.d && items >= wanted_items() && max_queries <= 16 ? a.kv : 1;
  }

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
#if defined(TS_HAS_DOT_BF16)
  if (a.dtype == DType::kBF16 && a.cache_dtype == DType::kBF16) {
    return Attention<uint16_t, uint16_t, PairProducts>(a).run_all();
  }
#endif
  with_dtype(a.dtype, [&](auto t) {
    with_dtype(a.cache_dtype, [&](auto c) {
      using T = decltype(t);
      using C = decltype(c);
      Attention<T, C, FloatProducts<T, C>>(a).run_all();
    });
  });
}
