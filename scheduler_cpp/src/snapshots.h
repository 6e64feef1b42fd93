// State snapshots of one home group: copies of what recurrent layers remember of a prefix, each kept beside the page of
// the prefix tree that ends it. A prefix can be shared only where it has one. A snapshot is free, beside a page, or a
// ticket of the run whose step is about to fill it; which copy is made when is the plan's word, and the executor makes
// copies in the order of plans, so a snapshot that changes hands needs no pin.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "types.h"

namespace tokenspeed {

class Snapshots;

// A snapshot that a step in flight fills; goes back when dropped. Move-only; holds none by default.
class Snapshot {
 public:
  Snapshot() noexcept = default;
  Snapshot(Snapshots& owner, int index) noexcept : owner_(&owner), index_(index) {}
  Snapshot(Snapshot&& other) noexcept : owner_(other.owner_), index_(std::exchange(other.index_, -1)) {}
  Snapshot& operator=(Snapshot&& other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(index_, other.index_);
    return *this;
  }
  ~Snapshot();

  bool held() const noexcept { return index_ >= 0; }
  int index() const noexcept { return index_; }
  int Release() noexcept { return std::exchange(index_, -1); }

 private:
  Snapshots* owner_ = nullptr;
  int index_ = -1;
};

class Snapshots {
 public:
  Snapshots(int count, int pages) : of_page_(count > 0 ? static_cast<std::size_t>(pages) : 0, -1) {
    entries_.resize(static_cast<std::size_t>(count));
    free_.reserve(entries_.size());
    for (int index = count - 1; index >= 0; --index) free_.push_back(index);
  }
  Snapshots(const Snapshots&) = delete;
  Snapshots& operator=(const Snapshots&) = delete;

  int total() const noexcept { return static_cast<int>(entries_.size()); }
  int free() const noexcept { return static_cast<int>(free_.size()); }
  // The snapshot beside a page, or -1.
  int Of(PageId page) const noexcept { return of_page_.empty() ? -1 : of_page_[static_cast<std::size_t>(page)]; }
  // The page that a snapshot lies beside, or kNoPage.
  PageId PageOf(int index) const noexcept { return entries_[static_cast<std::size_t>(index)].page; }

  // The snapshot beside a page that has one, which becomes the one used last.
  int Use(PageId page) noexcept {
    const int index = Of(page);
    entries_[static_cast<std::size_t>(index)].used = ++clock_;
    return index;
  }

  // A free snapshot, or the one beside a page that was used longest ago; none where steps in flight fill them all.
  [[nodiscard]] Snapshot Take() noexcept {
    if (free_.empty()) {
      int oldest = -1;
      for (int index = 0; index < total(); ++index) {
        const Entry& entry = entries_[static_cast<std::size_t>(index)];
        if (entry.page != kNoPage && (oldest < 0 || entry.used < entries_[static_cast<std::size_t>(oldest)].used))
          oldest = index;
      }
      if (oldest < 0) return {};
      Drop(entries_[static_cast<std::size_t>(oldest)].page);
    }
    const int index = free_.back();
    free_.pop_back();
    return {*this, index};
  }

  // Puts a filled snapshot beside a page; false, and the snapshot goes back, where the page has one.
  bool Keep(PageId page, Snapshot snapshot) noexcept {
    if (Of(page) >= 0) return false;
    const int index = snapshot.Release();
    of_page_[static_cast<std::size_t>(page)] = index;
    entries_[static_cast<std::size_t>(index)] = {page, ++clock_};
    return true;
  }

  // Takes back the snapshot beside a page, if it has one.
  void Drop(PageId page) noexcept {
    const int index = Of(page);
    if (index < 0) return;
    of_page_[static_cast<std::size_t>(page)] = -1;
    entries_[static_cast<std::size_t>(index)] = {};
    Return(index);
  }

  void Return(int index) noexcept { free_.push_back(index); }

 private:
  struct Entry {
    PageId page = kNoPage;
    std::uint64_t used = 0;
  };

  std::vector<Entry> entries_;
  std::vector<int> of_page_;  // by page id; empty where there are no snapshots
  std::vector<int> free_;     // a stack
  std::uint64_t clock_ = 0;
};

inline Snapshot::~Snapshot() {
  if (index_ >= 0) owner_->Return(index_);
}

}  // namespace tokenspeed
