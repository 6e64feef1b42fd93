// What came to and left the prefix caches, for routers that send a request where its prefix is. The log is bounded and
// never allocates after construction: where nobody reads it in time it forgets everything and says so with one
// "cleared", which errs towards knowing too little, and numbers go on so that a reader sees a gap.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "types.h"

namespace tokenspeed {

enum class Tier : std::uint8_t { kAll, kDevice, kHost };

constexpr std::string_view NameOf(Tier tier) noexcept {
  constexpr std::string_view kNames[] = {"all", "device", "host"};
  return kNames[static_cast<std::size_t>(tier)];
}

struct KvEvent {
  enum class Kind : std::uint8_t { kStored, kRemoved, kCleared };

  std::int64_t number = 0;  // ascending from 0; a gap: events were forgotten
  Kind kind = Kind::kStored;
  Tier tier = Tier::kAll;
  int group = -1;       // home group; -1: all
  PageKey key = {};     // of kStored and kRemoved
  PageKey parent = {};  // of kStored; zero: the page starts a prompt
};

constexpr std::string_view NameOf(KvEvent::Kind kind) noexcept {
  constexpr std::string_view kNames[] = {"stored", "removed", "cleared"};
  return kNames[static_cast<std::size_t>(kind)];
}

class KvEventLog {
 public:
  explicit KvEventLog(int capacity) : capacity_(static_cast<std::size_t>(capacity)) { events_.reserve(capacity_); }

  void Add(KvEvent event) noexcept {
    if (capacity_ == 0) return;
    event.number = next_++;
    if (events_.size() == capacity_) {
      events_.clear();
      event = {.number = event.number, .kind = KvEvent::Kind::kCleared};
    }
    events_.push_back(event);
  }

  // The events since the last call. Strong guarantee.
  std::vector<KvEvent> Take() {
    std::vector<KvEvent> taken;
    taken.reserve(capacity_);
    std::swap(taken, events_);
    return taken;
  }

 private:
  std::size_t capacity_;
  std::vector<KvEvent> events_;
  std::int64_t next_ = 0;
};

}  // namespace tokenspeed
