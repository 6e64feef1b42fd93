#include "page_pool.h"

#include "fatal.h"

namespace tokenspeed {

PagePool::PagePool(int pages) : is_free_(static_cast<std::size_t>(pages), 1) {
  free_.reserve(static_cast<std::size_t>(pages));
  for (PageId page = pages - 1; page >= 0; --page) free_.push_back(page);  // page 0 is taken first
}

PagePool::~PagePool() {
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

}  // namespace tokenspeed
