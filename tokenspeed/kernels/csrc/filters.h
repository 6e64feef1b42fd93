// Selection among candidate tokens: scalar code shared by every instruction set, hence outside their namespaces.
#pragma once
#include <cstdint>

namespace ts {

struct Candidate {
  float value;  // tempered logit
  int32_t id;
};

// Keeps the candidates that pass top-k, then top-p (over the softmax of what top-k kept: the smallest set of the most
// probable whose probability reaches top_p, at least one), then min-p (probability of at least min_p times the best's).
// Ties at a threshold are kept. Reorders `c`; returns how many of its first elements are kept. top_k <= 0, top_p >= 1
// and min_p <= 0 are off. `top` is the largest value, finite.
int64_t filter_candidates(Candidate* c, int64_t count, int64_t top_k, float top_p, float min_p, float top);

// Inserts (value, id) into a list sorted by value descending then id ascending, holding at most `capacity`.
// Returns the new size.
int64_t insert_top(Candidate* c, int64_t size, int64_t capacity, Candidate candidate);

// log(sum) + top, in double.
float log_sum(float top, double sum);

}  // namespace ts
