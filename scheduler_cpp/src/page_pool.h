// The pages of one tier. A page is at any time in exactly one place: in the pool's free list, in an OwnedPage (or the
// Residency that absorbed it), in the prefix cache, or held until a step in flight has read it for the last time. The
// pool's destructor checks that all of them came home.
#pragma once

#include <utility>
#include <vector>

#include "types.h"

namespace tokenspeed {

class PagePool;

// One page, owned. Returns it to the pool when dropped; `Release` hands ownership to the caller.
class OwnedPage {
 public:
  OwnedPage(PagePool& pool, PageId page) noexcept : pool_(&pool), page_(page) {}
  OwnedPage(OwnedPage&& other) noexcept : pool_(other.pool_), page_(std::exchange(other.page_, kNoPage)) {}
  OwnedPage& operator=(OwnedPage&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(page_, other.page_);
    return *this;
  }
  ~OwnedPage();

  PageId id() const noexcept { return page_; }
  [[nodiscard]] PageId Release() noexcept { return std::exchange(page_, kNoPage); }

 private:
  PagePool* pool_;
  PageId page_;
};

class PagePool {
 public:
  explicit PagePool(int pages);
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;
  ~PagePool();

  int total() const noexcept { return static_cast<int>(is_free_.size()); }
  int free() const noexcept { return static_cast<int>(free_.size()); }
  bool IsFree(PageId page) const noexcept { return is_free_[static_cast<std::size_t>(page)]; }

  // The most recently returned page (its memory is the warmest). Precondition: free() > 0.
  [[nodiscard]] OwnedPage Take() noexcept;
  // Never allocates: the free list's capacity is the pool's size.
  void Return(PageId page) noexcept;

  // Takes a page back that steps up to `until` (in flight) may still read: it is free once that step has returned, so
  // that a transfer, which runs beside the steps, never writes it too early. `until` < 0: at once.
  void Hold(OwnedPage page, StepId until) noexcept;
  // Step `step` has returned.
  void Release(StepId step) noexcept;
  int held() const noexcept { return static_cast<int>(held_.size()); }
  bool IsHeld(PageId page) const noexcept;

 private:
  struct Held {
    PageId page;
    StepId until;
  };
  std::vector<PageId> free_;  // a stack
  std::vector<char> is_free_;
  std::vector<Held> held_;  // ascending `until`
};

inline OwnedPage::~OwnedPage() {
  if (page_ != kNoPage) pool_->Return(page_);
}

}  // namespace tokenspeed
