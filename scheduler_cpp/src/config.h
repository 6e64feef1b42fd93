// What a scheduler is built from. A value that cannot work is refused at construction, with the field named; no field
// is accepted without effect.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "types.h"

namespace tokenspeed {

struct Config {
  int page_size = 0;               // tokens a page
  int num_pages = 0;               // pages a home group
  int max_requests = 0;            // request slots, and rows at most, a home group
  std::vector<int> token_buckets;  // token rows a home group, ascending; the largest is a step's budget
  int max_seq_len = 0;             // prompt + output at most, in tokens
  int dp = 1;                      // home groups
  int prefill_chunk = 0;           // prefill tokens of one request in one step; 0: the budget
  bool prefix_cache = true;
  int max_queued_requests = 0;  // waiting requests at most; 0: unbounded
  int max_queued_tokens = 0;    // their prompt tokens at most; 0: unbounded
  int max_in_flight = 1;        // plans handed out and not returned: 1, or 2 to overlap
  int decode_stall_tokens = 0;  // prefill tokens in a step that also decodes; 0: the budget
  int ageing_steps = 256;       // waiting so many steps weighs as much as one priority class
  // Copies of recurrent states a home group; where there are any, a prefix is shared only up to a page that has one.
  int state_snapshots = 0;
  // Layers that see no more than the last `window` positions, their own among them, keep their KV in pages of their
  // own: a running request holds those alone that it can still see.
  int window = 0;             // 0: no such layers
  int window_pages = 0;       // their pages a home group
  int host_pages = 0;         // host pages a home group; 0: no host tier
  bool storage = false;       // a store exists behind the host pages
  int storage_min_pages = 1;  // fewer missing pages than this are not asked of the store
  int write_back_pages = 8;   // a running request's computed pages go to the host in runs of at least so many

  int budget() const noexcept { return token_buckets.back(); }
  int chunk() const noexcept { return prefill_chunk == 0 ? budget() : prefill_chunk; }
  int stall() const noexcept { return decode_stall_tokens == 0 ? budget() : decode_stall_tokens; }
  int hash_bits = 128;  // of a page's key; below 64 only to test that collisions share nothing
  int kv_events = 0;    // events kept until they are read; 0: none

  bool tiered() const noexcept { return host_pages > 0; }
  bool windowed() const noexcept { return window > 0; }
  // Window pages that an admission takes: what its first token sees, and its own.
  int window_start() const noexcept {
    return std::min(PagesFor(window - 1, page_size) + 1, PagesFor(max_seq_len, page_size));
  }
  // Window pages that `requests` running ones hold at most, whatever is in flight. One with n tokens in flight holds
  // what is seen from the last page boundary that it has computed, at most ceil((n + window + page_size - 3) /
  // page_size) + 1, and the tokens in flight of all come to max_in_flight * budget().
  std::int64_t WindowPagesFor(int requests) const noexcept;
  // Requests that a home group runs at once: each gets at least one token in every step, and window pages never run
  // out.
  int max_running() const noexcept;
  // The smallest bucket that holds `tokens` (at most the budget).
  int BucketFor(int tokens) const noexcept;

  // Throws std::invalid_argument.
  void Validate() const;
};

}  // namespace tokenspeed
