// The digest that travels with a plan, so that ranks which disagree find out before they compute. 64 bits, not
// cryptographic: it guards against divergence and torn buffers, not against an adversary.
//
// A table row's digest is a sum over its cells, so a request keeps it up to date as its pages grow and a step costs
// O(rows) rather than O(cells). A cell that holds -1 counts nothing, so a row's digest does not depend on its width.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "types.h"

namespace tokenspeed {

// The finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
constexpr std::uint64_t Mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// What page `page` in column `column` adds to its row's digest.
constexpr std::uint64_t CellDigest(std::size_t column, PageId page) noexcept {
  if (page == kNoPage) return 0;
  return Mix((static_cast<std::uint64_t>(column) << 32 | static_cast<std::uint32_t>(page)) + 0x9e3779b97f4a7c15ULL);
}

inline std::uint64_t RowDigest(std::span<const PageId> row) noexcept {
  std::uint64_t sum = 0;
  for (std::size_t column = 0; column < row.size(); ++column) sum += CellDigest(column, row[column]);
  return sum;
}

// An order-dependent digest of words and arrays.
class Digest {
 public:
  void Add(std::uint64_t word) noexcept { state_ = Mix(state_ ^ word) + 0x9e3779b97f4a7c15ULL; }

  template <class T>
  void Add(std::span<const T> values) noexcept {
    const auto bytes = std::as_bytes(values);
    // Four independent chains hide the latency of the multiplications.
    std::uint64_t lanes[4] = {1, 2, 3, 4};
    std::size_t at = 0;
    for (; at + 32 <= bytes.size(); at += 32)
      for (std::size_t lane = 0; lane < 4; ++lane)
        lanes[lane] = Step(lanes[lane], bytes.data() + at + 8 * lane, sizeof(std::uint64_t));
    for (; at < bytes.size(); at += 8)
      lanes[0] = Step(lanes[0], bytes.data() + at, bytes.size() - at < 8 ? bytes.size() - at : 8);
    Add(bytes.size());
    for (std::uint64_t lane : lanes) Add(lane);
  }

  std::uint64_t value() const noexcept { return state_; }

 private:
  static std::uint64_t Step(std::uint64_t lane, const std::byte* at, std::size_t bytes) noexcept {
    std::uint64_t word = 0;
    std::memcpy(&word, at, bytes);
    lane = (lane ^ word) * 0x9fb21c651e98df25ULL;
    return lane ^ (lane >> 32);
  }

  std::uint64_t state_ = 0;
};

}  // namespace tokenspeed
