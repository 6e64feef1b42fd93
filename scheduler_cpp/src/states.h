// The states of a request. A resource is a member of the state that needs it and of no other, so leaving a state by any
// door gives back what it owned. States that a further tier or a disaggregated prefill add own their tickets likewise.
#pragma once

#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "residency.h"
#include "slot_pool.h"
#include "snapshots.h"
#include "token_sequence.h"

namespace tokenspeed {

// What a request owns from admission until the last step that carries it has returned. Counts are in tokens.
//   computed <= planned <= tokens.size() + pending
struct Run {
  TokenSequence tokens;
  Residency kv;
  RequestSlot slot;
  int computed = 0;        // KV written by steps that returned
  int planned = 0;         // KV written, or being written by a step in flight
  int in_flight = 0;       // steps that carry the request and have not returned
  int pending = 0;         // tokens that steps in flight will sample
  bool fresh = true;       // not planned since admission: the executor must reset the slot's sampling state
  int resumed = -1;        // the snapshot that its first step goes on from
  Snapshot snapshot = {};  // of the state at `snapshot_at` tokens, filled by a step in flight
  int snapshot_at = 0;
  int latest = 0;  // pages before its latest snapshot in the output, which the next one replaces; 0: none
};

struct Submitted {
  static constexpr std::string_view kName = "Submitted";
  static constexpr std::string_view kOwns = "token container";
  TokenSequence tokens;
};

struct Prefilling {
  static constexpr std::string_view kName = "Prefilling";
  static constexpr std::string_view kOwns = "token container, node pin, tail pages, request slot, progress";
  Run run;
};

struct PrefillDone {
  static constexpr std::string_view kName = "PrefillDone";
  static constexpr std::string_view kOwns = "as Prefilling; the first token is known";
  Run run;
};

struct Decoding {
  static constexpr std::string_view kName = "Decoding";
  static constexpr std::string_view kOwns = "as Prefilling, with room for the tokens of the next step";
  Run run;
};

struct Retracting {
  static constexpr std::string_view kName = "Retracting";
  static constexpr std::string_view kOwns = "all that a step in flight still touches, token container";
  Run run;
  bool lost = false;  // a step failed: what later steps sample for the request is void
};

struct Retracted {
  static constexpr std::string_view kName = "Retracted";
  static constexpr std::string_view kOwns = "token container (prompt and output so far)";
  TokenSequence tokens;
};

struct Aborting {
  static constexpr std::string_view kName = "Aborting";
  static constexpr std::string_view kOwns = "all that a step in flight still touches";
  Run run;
};

struct Finished {
  static constexpr std::string_view kName = "Finished";
  static constexpr std::string_view kOwns = "nothing";
};

using State = std::variant<Submitted, Prefilling, PrefillDone, Decoding, Retracting, Retracted, Aborting, Finished>;
static_assert(std::is_nothrow_move_constructible_v<State> && std::is_nothrow_move_assignable_v<State>,
              "a transition installs its result by a move, which must not fail");

template <class S>
concept HasRun = requires(S& state) { state.run; };
template <class S>
concept Waiting = std::is_same_v<S, Submitted> || std::is_same_v<S, Retracted>;
template <class S>
concept Running = std::is_same_v<S, Prefilling> || std::is_same_v<S, PrefillDone> || std::is_same_v<S, Decoding>;

// Where the scheduler keeps a request: its lists follow from the state, never the other way round.
enum class Place { kWaiting, kRunning, kLeaving, kGone };

inline Place PlaceOf(const State& state) noexcept {
  return std::visit(
      []<class S>(const S&) {
        if constexpr (Waiting<S>) return Place::kWaiting;
        if constexpr (Running<S>) return Place::kRunning;
        if constexpr (HasRun<S> && !Running<S>) return Place::kLeaving;
        return Place::kGone;
      },
      state);
}

// The run of a state that has one, else null.
inline const Run* RunOf(const State& state) noexcept {
  return std::visit(
      []<class S>(const S& s) -> const Run* {
        if constexpr (HasRun<S>) return &s.run;
        return nullptr;
      },
      state);
}
inline Run* RunOf(State& state) noexcept { return const_cast<Run*>(RunOf(std::as_const(state))); }

// The token container of a state that has one, else null.
inline const TokenSequence* TokensOf(const State& state) noexcept {
  return std::visit(
      []<class S>(const S& s) -> const TokenSequence* {
        if constexpr (HasRun<S>) return &s.run.tokens;
        if constexpr (Waiting<S>) return &s.tokens;
        return nullptr;
      },
      state);
}
inline TokenSequence* TokensOf(State& state) noexcept {
  return const_cast<TokenSequence*>(TokensOf(std::as_const(state)));
}

inline std::string_view NameOf(const State& state) noexcept {
  return std::visit([](const auto& s) { return s.kName; }, state);
}

}  // namespace tokenspeed
