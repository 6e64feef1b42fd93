// Request slots of one home group: the index under which the executor keeps a running request's sampling state and, of
// a model with recurrent layers, what they remember of it. A slot belongs to one request from admission until the last
// step that carries it has returned.
#pragma once

#include <utility>
#include <vector>

#include "fatal.h"

namespace tokenspeed {

class SlotPool;

class RequestSlot {
 public:
  RequestSlot(SlotPool& pool, int index) noexcept : pool_(&pool), index_(index) {}
  RequestSlot(RequestSlot&& other) noexcept : pool_(other.pool_), index_(std::exchange(other.index_, -1)) {}
  RequestSlot& operator=(RequestSlot&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(index_, other.index_);
    return *this;
  }
  ~RequestSlot();

  int index() const noexcept { return index_; }

 private:
  SlotPool* pool_;
  int index_;
};

class SlotPool {
 public:
  explicit SlotPool(int slots) : total_(slots) {
    free_.reserve(static_cast<std::size_t>(slots));
    for (int slot = slots - 1; slot >= 0; --slot) free_.push_back(slot);
  }
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;
  ~SlotPool() {
    if (free() != total_) Fatal("a slot pool was destroyed while slots were away");
  }

  int total() const noexcept { return total_; }
  int free() const noexcept { return static_cast<int>(free_.size()); }

  // Precondition: free() > 0.
  [[nodiscard]] RequestSlot Take() noexcept {
    if (free_.empty()) Fatal("a request slot was taken from an empty pool");
    const int slot = free_.back();
    free_.pop_back();
    return {*this, slot};
  }
  void Return(int slot) noexcept { free_.push_back(slot); }

 private:
  int total_;
  std::vector<int> free_;  // a stack
};

inline RequestSlot::~RequestSlot() {
  if (index_ >= 0) pool_->Return(index_);
}

}  // namespace tokenspeed
