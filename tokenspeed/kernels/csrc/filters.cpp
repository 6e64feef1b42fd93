#include "filters.h"

#include <algorithm>
#include <cmath>

namespace ts {
namespace {

bool better(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// Moves every candidate of [from, count) whose value equals `value` to `from` on; returns the end of them.
int64_t take_ties(Candidate* c, int64_t from, int64_t count, float value) {
  return std::partition(c + from, c + count, [value](const Candidate& x) { return x.value == value; }) - c;
}

// The number of best candidates whose weight exp(value - top) first reaches top_p of the total.
int64_t nucleus(Candidate* c, int64_t count, float top_p, float top) {
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) total += std::exp(static_cast<double>(c[i].value - top));
  const double target = static_cast<double>(top_p) * total;
  double reached = 0.0;
  // Sort only as far as needed: most nuclei are a few tokens.
  for (int64_t done = 0, step = 64; done < count; step *= 4) {
    const int64_t end = std::min(count, done + step);
    if (end < count) std::nth_element(c + done, c + end, c + count, better);
    std::sort(c + done, c + end, better);
    for (; done < end; ++done) {
      reached += std::exp(static_cast<double>(c[done].value - top));
      if (reached >= target) return done + 1;
    }
  }
  return count;
}

}  // namespace

int64_t filter_candidates(Candidate* c, int64_t count, int64_t top_k, float top_p, float min_p, float top) {
  if (top_k > 0 && top_k < count) {
    std::nth_element(c, c + top_k - 1, c + count, better);
    count = take_ties(c, top_k, count, c[top_k - 1].value);
  }
  if (top_p < 1.0f && count > 1) {
    const int64_t kept = nucleus(c, count, top_p, top);
    count = take_ties(c, kept, count, c[kept - 1].value);
  }
  if (min_p > 0.0f) {
    const float floor = top + std::log(std::min(min_p, 1.0f));
    count = std::partition(c, c + count, [floor](const Candidate& x) { return x.value >= floor; }) - c;
  }
  return count;
}

int64_t insert_top(Candidate* c, int64_t size, int64_t capacity, Candidate candidate) {
  int64_t at = size;
  while (at > 0 && better(candidate, c[at - 1])) --at;
  if (at >= capacity) return size;
  const int64_t grown = std::min(size + 1, capacity);
  for (int64_t i = grown - 1; i > at; --i) c[i] = c[i - 1];
  c[at] = candidate;
  return grown;
}

float log_sum(float top, double sum) { return static_cast<float>(static_cast<double>(top) + std::log(sum)); }

}  // namespace ts
