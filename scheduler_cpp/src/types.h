// Scalar vocabulary of the control plane. Every quantity a plan carries is a 32-bit integer; ids that outlive a
// process (request ids, step numbers) are 64-bit.
#pragma once

#include <cstdint>

namespace tokenspeed {

using Token = std::int32_t;   // vocabulary id, never negative in a token sequence
using PageId = std::int32_t;  // index of a KV page in one home group's pool, 0..num_pages-1
using RequestId = std::int64_t;
using StepId = std::int64_t;
using TicketId = std::int64_t;  // of a transfer between tiers; never given twice by one scheduler

inline constexpr PageId kNoPage = -1;

// The 128-bit name of a full page: it stands for the page's tokens, everything before them, and the cache domain.
struct PageKey {
  std::uint64_t lo = 0;
  std::uint64_t hi = 0;
  bool operator==(const PageKey&) const = default;
};

// Pages that hold `tokens` tokens.
constexpr int PagesFor(int tokens, int page_size) { return (tokens + page_size - 1) / page_size; }

}  // namespace tokenspeed
