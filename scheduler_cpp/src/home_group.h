// One data-parallel home group: pages of the device and of the host, a prefix cache over each, request slots, and the
// requests that live there. `running` is sorted, oldest first. free + owned + cached pages = all pages of a tier, and
// of the window group, at all times.
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
  HomeGroup(const Config& config, int index, KvEventLog& log)
      : pool(config.num_pages),
        window_pool(config.window_pages),
        cache(pool, config.page_size, config.state_snapshots, &log, {.tier = Tier::kDevice, .group = index},
              {config.window, config.page_size}, &window_pool),
        host_pool(config.host_pages),
        host_cache(host_pool, config.page_size, 0, &log, {.tier = Tier::kHost, .group = index},
                   {config.window, config.page_size}),
        slots(config.max_requests) {
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

  // Pages that come back to the pool without anybody being retracted, when a step or a transfer in flight returns.
  bool expects_pages() const noexcept { return !leaving.empty() || pool.held() > 0; }

  // The same of the host's pages.
  int host_available() const noexcept { return host_pool.free() + host_cache.evictable(); }
  OwnedPage TakeHostPage() noexcept {
    if (host_pool.free() == 0) host_cache.EvictOne();
    return host_pool.Take();
  }

  PagePool pool;
  PagePool window_pool;
  PrefixCache cache;
  PagePool host_pool;
  PrefixCache host_cache;
  SlotPool slots;
  std::vector<Request*> running;
  RequestQueue leaving;         // hold device pages only until a step or a transfer in flight returns
  std::vector<Ticket> backups;  // to storage; of no request
  int backup_pages = 0;         // pages that they pin

  // The plan being made.
  std::vector<Chosen> chosen;    // in the order of choice
  std::vector<Chosen> arranged;  // by request row
  int tokens_left = 0;           // of the step's budget
  int prefill_left = 0;          // of the step's prefill bound
  bool decodes = false;
  bool open = false;  // may admit

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
