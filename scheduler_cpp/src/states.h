// The states of a request. A resource is a member of the state that needs it and of no other, so leaving a state by any
// door gives back what it owned. What a transfer in flight touches is pinned by its ticket (transfer.h), and a state
// that holds a ticket is left only when the ticket has come back.
#pragma once

#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "residency.h"
#include "slot_pool.h"
#include "snapshots.h"
#include "token_sequence.h"
#include "transfer.h"

namespace tokenspeed {

// What a request owns from admission until the last step that carries it has returned. Counts are in tokens.
//   computed <= planned <= tokens.size() + pending
struct Run {
  TokenSequence tokens;
  Residency kv;
  RequestSlot slot;
  int computed = 0;        // KV that the caches supplied or that steps which returned have written
  int planned = 0;         // KV written, or being written by a step in flight
  int in_flight = 0;       // steps that carry the request and have not returned
  int pending = 0;         // tokens that steps in flight will sample
  bool fresh = true;       // not planned since admission: the executor must reset the slot's sampling state
  int resumed = -1;        // the snapshot that its first step goes on from
  Snapshot snapshot = {};  // of the state at `snapshot_at` tokens, filled by a step in flight
  int snapshot_at = 0;
  int latest = 0;     // pages before its latest snapshot in the output, which the next one replaces; 0: none
  NodeRef host = {};  // the deepest of its pages that has a copy on the host, kept while it runs
  std::optional<Ticket> load = {};        // fills the pages behind the committed ones from the host
  std::optional<Ticket> write_back = {};  // copies committed pages to the host
  bool unwritable = false;                // a write-back failed; none is tried again
  bool released = false;                  // its copy on the host made room for others; the next is made when it leaves

  // Whether a step or a load still touches pages that only this object owns.
  bool touched() const noexcept { return in_flight > 0 || load; }
  bool busy() const noexcept { return touched() || write_back; }
  bool busy_on_host() const noexcept { return load || write_back; }
  // Committed pages that could be copied to the host.
  int uncopied() const noexcept { return host.cache() == nullptr || unwritable ? 0 : kv.committed() - host.depth(); }
  // They. Precondition: uncopied() > 0.
  std::span<const PageId> uncopied_pages() const noexcept {
    return kv.table().subspan(static_cast<std::size_t>(host.depth()), static_cast<std::size_t>(uncopied()));
  }
};

struct Bootstrapping {
  static constexpr std::string_view kName = "Bootstrapping";
  static constexpr std::string_view kOwns = "token container; the handshake with the peer is open";
  TokenSequence tokens;
};

struct Submitted {
  static constexpr std::string_view kName = "Submitted";
  static constexpr std::string_view kOwns = "token container";
  TokenSequence tokens;
  std::uint64_t looked_up = 0;  // when the tiers last had all of it (Scheduler::Epochs), so that storage was not asked
};

// Pages of a prompt that storage supplied: the half-open range of their indices.
struct FromStorage {
  int first = 0;
  int end = 0;
};

struct Prefetching {
  static constexpr std::string_view kName = "Prefetching";
  static constexpr std::string_view kOwns = "token container, the ticket of host pages being filled from storage";
  TokenSequence tokens;
  Ticket ticket;
  FromStorage stored;  // by tickets before this one
};

struct PrefetchDone {
  static constexpr std::string_view kName = "PrefetchDone";
  static constexpr std::string_view kOwns = "token container, pin on the host pages";
  TokenSequence tokens;
  NodeRef host;
  FromStorage stored;
  bool more;  // all that was asked for came, so there may be more
};

struct Prefilling {
  static constexpr std::string_view kName = "Prefilling";
  static constexpr std::string_view kOwns =
      "token container, device pin, tail pages, request slot, progress, host pin, tickets of a load and a write-back";
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

struct Draining {
  static constexpr std::string_view kName = "Draining";
  static constexpr std::string_view kOwns = "pins on the device pages to be copied and on the host page above them";
  NodeRef device;
  NodeRef host;
};

struct WritingBack {
  static constexpr std::string_view kName = "WritingBack";
  static constexpr std::string_view kOwns = "the ticket of a write-back, pin on the device pages behind it";
  Ticket ticket;
  NodeRef device;
};

struct Retracting {
  static constexpr std::string_view kName = "Retracting";
  static constexpr std::string_view kOwns =
      "all that a step or a transfer in flight still touches, and what is to be copied to the host";
  Run run;
  bool lost = false;      // a step or a load failed: what later steps sample for the request is void
  bool distrust = false;  // the host's copy could not be loaded
};

struct Retracted {
  static constexpr std::string_view kName = "Retracted";
  static constexpr std::string_view kOwns = "token container (prompt and output so far), pin on its host pages";
  TokenSequence tokens;
  NodeRef host = {};
  bool distrust = false;  // it recomputes rather than load again
};

struct Aborting {
  static constexpr std::string_view kName = "Aborting";
  static constexpr std::string_view kOwns = "all that a step or a transfer in flight still touches";
  std::variant<Run, Ticket> held;  // of a request that was admitted, or was prefetching
  bool drain = false;              // it finished: its pages are worth a copy on the host
};

struct Finished {
  static constexpr std::string_view kName = "Finished";
  static constexpr std::string_view kOwns = "nothing";
};

using State = std::variant<Bootstrapping, Submitted, Prefetching, PrefetchDone, Prefilling, PrefillDone, Decoding,
                           Draining, WritingBack, Retracting, Retracted, Aborting, Finished>;
static_assert(std::is_nothrow_move_constructible_v<State> && std::is_nothrow_move_assignable_v<State>,
              "a transition installs its result by a move, which must not fail");

template <class S, class... Options>
concept OneOf = (std::is_same_v<S, Options> || ...);
template <class S>
concept Waiting = OneOf<S, Submitted, PrefetchDone, Retracted>;  // may be admitted
template <class S>
concept Parked = OneOf<S, Bootstrapping, Prefetching>;  // not yet
template <class S>
concept Running = OneOf<S, Prefilling, PrefillDone, Decoding>;
template <class S>
concept Ended = OneOf<S, Draining, WritingBack, Aborting, Finished>;  // the caller has heard the last of it

// Where the scheduler keeps a request: its lists follow from the state, never the other way round.
enum class Place {
  kParked,     // waits for a peer or for storage
  kWaiting,    // in the queue
  kRunning,    // in its home group's list
  kLeaving,    // gives back device pages when a step or a transfer in flight returns
  kLingering,  // gives back host pages when a transfer in flight returns
  kGone,
};

inline Place PlaceOf(const State& state) noexcept {
  return std::visit(
      []<class S>(const S& s) {
        if constexpr (Parked<S>) return Place::kParked;
        if constexpr (Waiting<S>) return Place::kWaiting;
        if constexpr (Running<S>) return Place::kRunning;
        if constexpr (std::is_same_v<S, Aborting>)
          return std::holds_alternative<Run>(s.held) ? Place::kLeaving : Place::kLingering;
        if constexpr (OneOf<S, Draining, WritingBack, Retracting>) return Place::kLeaving;
        return Place::kGone;
      },
      state);
}

// The run of a state that has one, else null.
inline const Run* RunOf(const State& state) noexcept {
  return std::visit(
      []<class S>(const S& s) -> const Run* {
        if constexpr (std::is_same_v<S, Aborting>) return std::get_if<Run>(&s.held);
        if constexpr (requires { s.run; }) return &s.run;
        return nullptr;
      },
      state);
}
inline Run* RunOf(State& state) noexcept { return const_cast<Run*>(RunOf(std::as_const(state))); }

// The token container of a state that has one, else null.
inline const TokenSequence* TokensOf(const State& state) noexcept {
  if (const Run* run = RunOf(state)) return &run->tokens;
  return std::visit(
      []<class S>(const S& s) -> const TokenSequence* {
        if constexpr (requires { s.tokens; }) return &s.tokens;
        return nullptr;
      },
      state);
}
inline TokenSequence* TokensOf(State& state) noexcept {
  return const_cast<TokenSequence*>(TokensOf(std::as_const(state)));
}

// The depth of the host page that a state pins by itself, beside its tickets; 0: none.
inline int HostPagesOf(const State& state) noexcept {
  if (const Run* run = RunOf(state)) return run->host.depth();
  return std::visit(
      []<class S>(const S& s) {
        if constexpr (requires { s.host; }) return s.host.depth();
        return 0;
      },
      state);
}

inline std::string_view NameOf(const State& state) noexcept {
  return std::visit([](const auto& s) { return s.kName; }, state);
}

}  // namespace tokenspeed
