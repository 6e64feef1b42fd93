#include "config.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace tokenspeed {
namespace {

void Require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

void AtLeast(const char* name, int value, int least) {
  Require(value >= least,
          std::string(name) + " is " + std::to_string(value) + "; it must be at least " + std::to_string(least));
}

}  // namespace

int Config::BucketFor(int tokens) const noexcept {
  return *std::lower_bound(token_buckets.begin(), token_buckets.end(), tokens);
}

std::int64_t Config::WindowPagesFor(int requests) const noexcept {
  const std::int64_t each = window - 4 + 3 * std::int64_t{page_size};
  const std::int64_t pages = (std::int64_t{max_in_flight} * budget() + requests * each + page_size - 1) / page_size;
  return std::min(pages, requests * std::int64_t{PagesFor(max_seq_len, page_size)});
}

int Config::max_running() const noexcept {
  int most = std::min(max_requests, budget());
  if (!windowed()) return most;
  int fits = 1;
  while (fits < most) {
    const int middle = most - (most - fits) / 2;
    if (WindowPagesFor(middle) <= window_pages) {
      fits = middle;
    } else {
      most = middle - 1;
    }
  }
  return fits;
}

void Config::Validate() const {
  AtLeast("page_size", page_size, 1);
  AtLeast("num_pages", num_pages, 1);
  AtLeast("max_requests", max_requests, 1);
  AtLeast("max_seq_len", max_seq_len, 2);
  AtLeast("dp", dp, 1);
  AtLeast("prefill_chunk", prefill_chunk, 0);
  AtLeast("max_queued_requests", max_queued_requests, 0);
  AtLeast("max_queued_tokens", max_queued_tokens, 0);
  AtLeast("decode_stall_tokens", decode_stall_tokens, 0);
  AtLeast("ageing_steps", ageing_steps, 1);
  AtLeast("state_snapshots", state_snapshots, 0);
  AtLeast("window", window, 0);
  AtLeast("window_pages", window_pages, 0);
  AtLeast("host_pages", host_pages, 0);
  AtLeast("storage_min_pages", storage_min_pages, 1);
  AtLeast("write_back_pages", write_back_pages, 1);
  AtLeast("kv_events", kv_events, 0);
  AtLeast("hash_bits", hash_bits, 0);
  Require(hash_bits < 64 || hash_bits == 128,
          "hash_bits is " + std::to_string(hash_bits) + "; it must be 128, or below 64 to make keys collide");
  Require(!storage || hash_bits == 128, "storage finds a page by its key alone, so it needs all 128 hash_bits");
  Require(!storage || tiered(), "storage needs host_pages: what is stored passes through host pages");
  Require(!tiered() || prefix_cache,
          "host_pages needs prefix_cache: the host tier keeps what the prefix cache computed");
  Require(!tiered() || state_snapshots == 0,
          "host_pages cannot serve a model with recurrent states (state_snapshots is " +
              std::to_string(state_snapshots) +
              "): a state does not travel, so no page beyond the device could be used");
  Require(max_in_flight == 1 || max_in_flight == 2,
          "max_in_flight is " + std::to_string(max_in_flight) + "; it must be 1 (synchronous) or 2 (overlapped)");
  Require(!token_buckets.empty(), "token_buckets is empty; give at least one size");
  AtLeast("token_buckets[0]", token_buckets.front(), 1);
  for (std::size_t i = 1; i < token_buckets.size(); ++i)
    Require(token_buckets[i - 1] < token_buckets[i], "token_buckets must ascend; " + std::to_string(token_buckets[i]) +
                                                         " follows " + std::to_string(token_buckets[i - 1]));
  Require(windowed() || window_pages == 0, "window_pages is " + std::to_string(window_pages) +
                                               " but window is 0: give the positions that windowed layers see");
  Require(!windowed() || WindowPagesFor(1) <= window_pages,
          "window_pages is " + std::to_string(window_pages) + "; one request with a window of " +
              std::to_string(window) + " positions and steps of " + std::to_string(budget()) + " tokens may need " +
              std::to_string(WindowPagesFor(1)) + " pages of " + std::to_string(page_size));
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  for (const auto& [name, pages] : {std::pair("num_pages", num_pages), std::pair("window_pages", window_pages)})
    Require(static_cast<std::int64_t>(pages) * page_size <= kMax,
            std::string(name) + " * page_size is " + std::to_string(static_cast<std::int64_t>(pages) * page_size) +
                "; KV slots are 32-bit, so it must stay below 2^31: use fewer pages");
  Require(static_cast<std::int64_t>(dp) * budget() <= kMax && static_cast<std::int64_t>(dp) * max_requests <= kMax,
          "dp times the largest bucket (or max_requests) must stay below 2^31");
}

}  // namespace tokenspeed
