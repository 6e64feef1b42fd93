#include "page_pool.h"

#include <algorithm>
#include <limits>

#include "fatal.h"

namespace tokenspeed {

PagePool::PagePool(int pages) : is_free_(static_cast<std::size_t>(pages), 1) {
  free_.reserve(static_cast<std::size_t>(pages));
  held_.reserve(static_cast<std::size_t>(pages));
  for (PageId page = pages - 1; page >= 0; --page) free_.push_back(page);  // page 0 is taken first
}

PagePool::~PagePool() {
  Release(std::numeric_limits<StepId>::max());
  if (free() != total()) Fatal("a page pool was destroyed while pages were away");
}

OwnedPage PagePool::Take() noexcept {
  if (free_.empty()) Fatal("a page was taken from an empty pool");
  const PageId page = free_.back();
  free_.pop_back();
  is_free_[static_cast<std::size_t>(page)] = 0;
  return {*this, page};
}

void PagePool::Return(PageId page) noexcept {
  char& is_free = is_free_[static_cast<std::size_t>(page)];
  if (is_free) Fatal("a page was returned twice");
  is_free = 1;
  free_.push_back(page);
}

void PagePool::Hold(OwnedPage page, StepId until) noexcept {
  if (until >= 0) held_.push_back({page.Release(), until});
}

void PagePool::Release(StepId step) noexcept {
  const auto waiting = std::ranges::find_if(held_, [&](const Held& held) { return held.until > step; });
  for (auto held = held_.begin(); held != waiting; ++held) Return(held->page);
  held_.erase(held_.begin(), waiting);
}

bool PagePool::IsHeld(PageId page) const noexcept {
  return std::ranges::any_of(held_, [&](const Held& held) { return held.page == page; });
}

}  // namespace tokenspeed
