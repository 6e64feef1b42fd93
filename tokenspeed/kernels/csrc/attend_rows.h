// Where a block of positions lies in the paged caches, and the tiles of queries that share it. Invariant: a position
// past the context or on a page that was never assigned is a row of zeros, so such a cache row is never read.
#pragma once
#include "rowwise.h"

static constexpr int64_t kBlockKv = 32;  // positions a softmax step
static constexpr int64_t kPart = 16;     // positions brought into the products' form at once

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

// Addresses of the keys and values of one block, of one KV head; the next head's lie a.ch behind, where the caller has
// as many zeros.
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

// Rows of the next block, asked for bit by bit while this one is worked on: pages are scattered, which the hardware's
// prefetchers cannot follow.
template <class C>
struct Ahead {
  const BlockRows<C>& block;
  int64_t bytes;  // of each row
  int64_t ticks;  // of a block
  int64_t done = 0, line = 0, position = 0, at = 0;

  inline void tick() {
    const int64_t row = bytes / 64, until = block.count * row * ++done / ticks;
    for (; line < until; ++line) {
      __builtin_prefetch(reinterpret_cast<const char*>(block.keys[position]) + at * 64, 0, 2);
      __builtin_prefetch(reinterpret_cast<const char*>(block.values[position]) + at * 64, 0, 2);
      if (++at == row) {
        at = 0;
        ++position;
      }
    }
  }
};
