// A request as the scheduler keeps it: what the caller asked, its place in the order, and its state. The resources are
// the state's (states.h); what is here may be read in every state.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
#include <vector>

#include "states.h"
#include "types.h"

namespace tokenspeed {

// The order in which requests are served, fixed at submission. `due` is the arrival in steps plus `ageing_steps` a
// priority class, so a request of a later class goes first once it has waited that much longer: nobody starves.
struct Order {
  std::int64_t due = 0;
  std::uint64_t sequence = 0;  // of submission; unique
  auto operator<=>(const Order&) const = default;
};

// When a request's output ends.
struct Limits {
  int max_new_tokens = 0;
  int min_new_tokens = 0;                  // a stop id sampled before this many tokens does not end the output
  std::vector<Token> stop_token_ids = {};  // sorted

  bool Stops(Token token, int outputs) const noexcept {
    return outputs >= min_new_tokens && std::ranges::binary_search(stop_token_ids, token);
  }
};

// Where the prompt tokens that a cache supplied at the first admission came from.
struct CachedTokens {
  int device = 0;
  int host = 0;
  int storage = 0;
  int total() const noexcept { return device + host + storage; }
};

struct Request;
using RequestQueue = std::map<Order, Request*>;

struct Request {
  RequestId id;
  Order order;
  StepId arrival;  // plans made before its submission
  Limits limits;
  int total;  // prompt + max_new_tokens
  State state;
  int group = -1;  // home group; fixed by the first admission
  int row = -1;    // row in the group's last plan that carried it
  CachedTokens cached = {};
  // The request's entry while it is in no queue, so that it can enter one without an allocation.
  RequestQueue::node_type queue_entry;

  int prompt() const noexcept { return total - limits.max_new_tokens; }
  bool admitted_before() const noexcept { return group >= 0; }
};

enum class FinishReason { kNone, kStop, kLength };

// One sampled token.
struct Output {
  RequestId request_id;
  Token token;
  FinishReason finish_reason;  // not kNone: the request has ended
  CachedTokens cached;
  int num_output;  // tokens sampled so far, this one included
};

}  // namespace tokenspeed
