// The evictable leaves of a prefix cache, least recently used first. Holds each page at most once, knows where each one
// stands, and never allocates after construction: push, remove and pop are O(log n).
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "types.h"

namespace tokenspeed {

class LruHeap {
 public:
  explicit LruHeap(int pages) : position_(static_cast<std::size_t>(pages), -1) {
    heap_.reserve(static_cast<std::size_t>(pages));
  }

  bool empty() const noexcept { return heap_.empty(); }
  std::size_t size() const noexcept { return heap_.size(); }
  PageId top() const noexcept { return heap_.front().page; }
  bool Contains(PageId page) const noexcept { return position_[static_cast<std::size_t>(page)] >= 0; }

  // `epoch`: the step in which the page was last in use. Of one epoch the deepest page goes first, so that a suffix
  // goes before a prefix; the page id decides the rest, so that a run can be repeated.
  void Push(PageId page, std::uint64_t epoch, int depth) noexcept {
    heap_.push_back({epoch, depth, page});
    SiftUp(heap_.size() - 1);
  }

  void Remove(PageId page) noexcept {
    const auto hole = static_cast<std::size_t>(position_[static_cast<std::size_t>(page)]);
    position_[static_cast<std::size_t>(page)] = -1;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (hole == heap_.size()) return;
    Place(hole, last);
    SiftDown(hole);
    SiftUp(static_cast<std::size_t>(position_[static_cast<std::size_t>(last.page)]));
  }

 private:
  struct Entry {
    std::uint64_t epoch;
    int depth;
    PageId page;
    bool operator<(const Entry& other) const noexcept {
      return std::tuple(epoch, -depth, page) < std::tuple(other.epoch, -other.depth, other.page);
    }
  };

  void Place(std::size_t at, const Entry& entry) noexcept {
    heap_[at] = entry;
    position_[static_cast<std::size_t>(entry.page)] = static_cast<int>(at);
  }

  void SiftUp(std::size_t at) noexcept {
    const Entry entry = heap_[at];
    while (at > 0 && entry < heap_[(at - 1) / 2]) {
      Place(at, heap_[(at - 1) / 2]);
      at = (at - 1) / 2;
    }
    Place(at, entry);
  }

  void SiftDown(std::size_t at) noexcept {
    const Entry entry = heap_[at];
    for (std::size_t child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
      if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
      if (!(heap_[child] < entry)) break;
      Place(at, heap_[child]);
      at = child;
    }
    Place(at, entry);
  }

  std::vector<Entry> heap_;
  std::vector<int> position_;  // by page; -1: not in the heap
};

}  // namespace tokenspeed
