// One data-parallel home group: a page pool, its prefix cache and request slots, and the requests that live there.
// `running` is sorted, oldest first. free + owned + cached pages = all pages, at all times.
#pragma once

#include <cstdint>
#include <vector>

#include "config.h"
#include "page_pool.h"
#include "prefix_cache.h"
#include "request.h"
#include "slot_pool.h"

namespace tokenspeed {

// `tokens` of a request in one step.
struct Chosen {
  Request* request = nullptr;
  int tokens = 0;
  bool samples = false;
};

struct HomeGroup {
  explicit HomeGroup(const Config& config)
      : pool(config.num_pages), cache(pool, config.page_size, config.state_snapshots), slots(config.max_requests) {
    const auto most = static_cast<std::size_t>(config.max_requests);
    for (auto* list : {&chosen, &arranged}) list->reserve(most);
    running.reserve(most);
  }
  HomeGroup(const HomeGroup&) = delete;
  HomeGroup& operator=(const HomeGroup&) = delete;

  // Pages that can be drawn: free ones, and cached ones that nobody uses.
  int available() const noexcept { return pool.free() + cache.evictable(); }
  // Draws a page, evicting the least recently used one if need be. Precondition: available() > 0.
  OwnedPage TakePage() noexcept {
    if (pool.free() == 0) cache.EvictOne();
    return pool.Take();
  }

  PagePool pool;
  PrefixCache cache;
  SlotPool slots;
  std::vector<Request*> running;
  int leaving = 0;  // requests that hold resources only until a step in flight returns

  // The plan being made.
  std::vector<Chosen> chosen;    // in the order of choice
  std::vector<Chosen> arranged;  // by request row
  int tokens_left = 0;           // of the step's budget
  int prefill_left = 0;          // of the step's prefill bound
  bool open = false;             // may admit

  std::uint64_t epoch = 0;  // changes when a request enters or leaves

  // The waiting request that last found no room here, and what it saw. Probing it again (a walk over its whole prefix)
  // is useless while nothing left or came, no page became available, and its match did not get longer.
  struct Blocked {
    std::uint64_t sequence = 0;  // 0: none
    std::uint64_t epoch = 0;
    int available = 0;
    int matched = 0;  // pages
    PageId last = kNoPage;
  } blocked;
};

}  // namespace tokenspeed
