// The window group of one tier: what layers that see only the last positions keep of a prefix. Each page of the prefix
// tree may have such a page beside it, and a prefix can be taken up only where the last pages before its end, as many
// as the window reaches, have theirs. So the tree holds long prefixes whole while window pages come and go on their
// own.
//
// On the device window pages lie in a pool of their own. Beside a tree page one is pinned by every request that can
// still see it and by transfers that copy it, else idle, and evicted when its memory is needed: first those that
// requests passed by, then those at the ends of prefixes that were asked for, each least recently used first. On the
// host a page's window part lies in the page itself, and is there or not.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lru_heap.h"
#include "page_pool.h"
#include "types.h"

namespace tokenspeed {

// Which positions a window shows, in pages. `tokens` 0: there is no window group.
struct Window {
  int tokens = 0;
  int page_size = 1;

  bool any() const noexcept { return tokens > 0; }
  // The first page that the token at `position` sees.
  int FirstSeen(int position) const noexcept { return position < tokens ? 0 : (position - tokens + 1) / page_size; }
  // The first page that is needed to go on behind `pages` full ones.
  int FirstBehind(int pages) const noexcept { return FirstSeen(pages * page_size); }
};

class WindowPages {
 public:
  // Beside a tree of `nodes` pages; `pool` null: the window part of page i lies in page i.
  WindowPages(Window window, PagePool* pool, int nodes)
      : window_(window),
        pool_(pool),
        beside_(window.any() ? static_cast<std::size_t>(nodes) : 0, kNoPage),
        pages_(pool == nullptr ? 0 : static_cast<std::size_t>(pool->total())),
        idle_(pool == nullptr ? 0 : pool->total()) {}
  WindowPages(const WindowPages&) = delete;
  WindowPages& operator=(const WindowPages&) = delete;

  const Window& window() const noexcept { return window_; }
  PagePool& pool() noexcept { return *pool_; }
  int total() const noexcept { return static_cast<int>(pages_.size()); }
  // The window page beside a tree page, or kNoPage.
  PageId Of(PageId node) const noexcept { return beside_.empty() ? kNoPage : beside_[static_cast<std::size_t>(node)]; }
  // The tree page that a window page lies beside, or kNoPage.
  PageId NodeOf(PageId page) const noexcept { return At(page).node; }
  int PinsOf(PageId page) const noexcept { return At(page).pins; }
  bool IsIdle(PageId page) const noexcept { return idle_.Contains(page); }
  std::uint64_t EpochOf(PageId page) const noexcept { return At(page).epoch; }
  bool IsKeptLonger(PageId page) const noexcept { return At(page).end; }

  // The longest part of `path` that can be taken up.
  std::span<const PageId> Servable(std::span<const PageId> path) const noexcept {
    if (!window_.any()) return path;
    auto end = static_cast<int>(path.size());
    for (int page = end - 1; page >= window_.FirstBehind(end); --page)
      if (Of(path[static_cast<std::size_t>(page)]) == kNoPage) end = page;  // no end up to here sees past the gap
    return path.first(static_cast<std::size_t>(end));
  }

  // Pages that can be drawn: free ones, and idle ones.
  int idle() const noexcept { return static_cast<int>(idle_.size()); }
  int available() const noexcept { return pool_ == nullptr ? 0 : pool_->free() + idle(); }
  // Precondition: available() > 0.
  OwnedPage Take() noexcept {
    if (pool_->free() == 0) EvictOne();
    return pool_->Take();
  }

  // Puts a page beside a tree page of this depth that has none, pinned once.
  void Attach(PageId node, int depth, OwnedPage page) noexcept {
    const PageId id = page.Release();
    beside_[static_cast<std::size_t>(node)] = id;
    At(id) = {.node = node, .depth = depth, .pins = 1};
  }
  // Of the host: the window part of a tree page is there.
  void Mark(PageId node) noexcept {
    if (window_.any()) beside_[static_cast<std::size_t>(node)] = node;
  }

  void Pin(PageId page) noexcept {
    if (At(page).pins++ == 0) idle_.Remove(page);
  }
  void Unpin(PageId page) noexcept {
    Entry& entry = At(page);
    entry.epoch = epoch_ | (entry.end ? kEnd : 0);
    if (--entry.pins == 0) idle_.Push(page, entry.epoch, entry.depth);
  }
  // It lies at the end of a prefix that was asked for, and may be again. Precondition: it is pinned.
  void KeepLonger(PageId page) noexcept { At(page).end = true; }

  // The tree page leaves the tree; nobody pins what lies beside it.
  void Drop(PageId node) noexcept {
    const PageId page = Of(node);
    if (page == kNoPage) return;
    beside_[static_cast<std::size_t>(node)] = kNoPage;
    if (pool_ == nullptr) return;
    idle_.Remove(page);
    At(page) = {};
    pool_->Return(page);
  }
  void Flush() noexcept {
    while (!idle_.empty()) EvictOne();
  }
  void Tick() noexcept { ++epoch_; }

 private:
  static constexpr std::uint64_t kEnd = std::uint64_t{1} << 63;

  struct Entry {
    PageId node = kNoPage;
    int depth = 0;
    int pins = 0;
    bool end = false;
    std::uint64_t epoch = 0;  // in which it was unpinned last
  };

  Entry& At(PageId page) noexcept { return pages_[static_cast<std::size_t>(page)]; }
  const Entry& At(PageId page) const noexcept { return pages_[static_cast<std::size_t>(page)]; }
  void EvictOne() noexcept { Drop(At(idle_.top()).node); }

  Window window_;
  PagePool* pool_;
  std::vector<PageId> beside_;  // by tree page; empty where there is no window group
  std::vector<Entry> pages_;    // by window page; of the device
  LruHeap idle_;
  std::uint64_t epoch_ = 0;
};

// Pins of a transfer on window pages, one for each page it copies, or kNoPage. Move-only; unpins when dropped.
class WindowPins {
 public:
  WindowPins() noexcept = default;
  explicit WindowPins(WindowPages& owner) noexcept : owner_(&owner) {}
  WindowPins(WindowPins&& other) noexcept
      : owner_(std::exchange(other.owner_, nullptr)), pages_(std::move(other.pages_)) {}
  WindowPins& operator=(WindowPins&& other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(pages_, other.pages_);
    return *this;
  }
  ~WindowPins() {
    if (owner_ == nullptr) return;
    for (PageId page : pages_)
      if (page != kNoPage) owner_->Unpin(page);
  }

  void Reserve(std::size_t pages) { pages_.reserve(pages); }
  // Pins what lies beside a tree page, if anything does. Never allocates after `Reserve`.
  PageId Add(PageId node) noexcept {
    const PageId page = owner_->Of(node);
    if (page != kNoPage) owner_->Pin(page);
    pages_.push_back(page);
    return page;
  }
  const std::vector<PageId>& pages() const noexcept { return pages_; }

 private:
  WindowPages* owner_ = nullptr;
  std::vector<PageId> pages_;
};

}  // namespace tokenspeed
