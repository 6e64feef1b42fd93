// The event x state table. Every pair has exactly one `Rule`: a transition, or `Ignored` for what is late, duplicate or
// without meaning there. A missing pair does not compile (see fsm.h). A rule's return type names the states it can lead
// to, and the table in the documentation is generated from those types:
//   void                         stays (the members change in place)
//   T, variant<A, B>             moves to T; to A or B
//   optional<T>, of a variant    moves, or stays
// Rules are noexcept: all that can fail happened while the event was built, which gives `Apply` the strong guarantee.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include "events.h"
#include "states.h"

namespace tokenspeed {

struct Ignored {};

template <class Event, class S>
struct Rule;  // no definition: a pair without a rule is a compile error

// ---- Bootstrapped, BootstrapFailed, Fetch --------------------------------------------------------------------------

template <>
struct Rule<event::Bootstrapped, Bootstrapping> {
  static Submitted Apply(Bootstrapping& state, const event::Bootstrapped&) noexcept {
    return {std::move(state.tokens)};
  }
};
template <>
struct Rule<event::BootstrapFailed, Bootstrapping> {
  static Finished Apply(Bootstrapping&, const event::BootstrapFailed&) noexcept { return {}; }
};
template <class S>
  requires(!std::is_same_v<S, Bootstrapping>)
struct Rule<event::Bootstrapped, S> : Ignored {};  // a duplicate, or the request has ended
template <class S>
  requires(!std::is_same_v<S, Bootstrapping>)
struct Rule<event::BootstrapFailed, S> : Ignored {};

template <>
struct Rule<event::Fetch, Submitted> {
  static Prefetching Apply(Submitted& state, event::Fetch& event) noexcept {
    const int first = event.ticket.host.depth();
    return {std::move(state.tokens), std::move(event.ticket), {first, first}};
  }
};
template <>
struct Rule<event::Fetch, PrefetchDone> {
  static Prefetching Apply(PrefetchDone& state, event::Fetch& event) noexcept {
    return {std::move(state.tokens), std::move(event.ticket), state.stored};
  }
};
template <class S>
  requires(!OneOf<S, Submitted, PrefetchDone>)
struct Rule<event::Fetch, S> : Ignored {};  // it does not wait for its first admission

// ---- Admit ---------------------------------------------------------------------------------------------------------

template <Waiting S>
struct Rule<event::Admit, S> {
  static Prefilling Apply(S& state, event::Admit& event) noexcept {
    return {{.tokens = std::move(state.tokens),
             .kv = std::move(event.kv),
             .slot = std::move(event.slot),
             .computed = event.reused,
             .planned = event.reused,
             .resumed = event.resumed,
             .host = std::move(event.host),
             .load = std::move(event.load),
             .released = event.released}};
  }
};
template <class S>
  requires(!Waiting<S>)
struct Rule<event::Admit, S> : Ignored {};  // cannot be admitted yet, is admitted already, or gone

// ---- Schedule ------------------------------------------------------------------------------------------------------

// Records that a step in flight computes the request's next tokens.
inline void Launch(Run& run, const event::Schedule& event) noexcept {
  run.planned += event.tokens;
  run.pending += event.samples;
  ++run.in_flight;
  run.fresh = false;
}

template <>
struct Rule<event::Schedule, Prefilling> {
  static void Apply(Prefilling& state, const event::Schedule& event) noexcept { Launch(state.run, event); }
};
template <>
struct Rule<event::Schedule, PrefillDone> {
  static Decoding Apply(PrefillDone& state, const event::Schedule& event) noexcept {
    Launch(state.run, event);
    return {std::move(state.run)};
  }
};
template <>
struct Rule<event::Schedule, Decoding> {
  static void Apply(Decoding& state, const event::Schedule& event) noexcept { Launch(state.run, event); }
};
template <class S>
  requires(!Running<S>)
struct Rule<event::Schedule, S> : Ignored {};  // owns no pages to compute into, or is on its way out

// ---- What a run leaves behind --------------------------------------------------------------------------------------

using Freed = std::variant<Draining, WritingBack, Finished>;
using SetBack = std::variant<Retracting, Retracted>;

// Of a run that no step or load touches. A finished one's pages go on to the host.
inline Freed Free(Run run, bool drain) noexcept {
  const bool more = drain && run.uncopied() > 0;
  if (run.write_back) {
    NodeRef device = more ? run.kv.TakePin() : NodeRef();
    return WritingBack{std::move(*run.write_back), std::move(device)};
  }
  if (more) return Draining{run.kv.TakePin(), std::move(run.host)};
  return Finished{};
}

// Of a run that is to wait again; what failed is not copied to the host. Pages that nothing touches go back at once, so
// that an older request need not wait for the copy.
inline SetBack SetAside(Run run, bool lost, bool distrust = false) noexcept {
  if (!run.touched()) run.kv.DropTail();
  if (run.busy() || (!lost && run.uncopied() > 0)) return Retracting{std::move(run), lost, distrust};
  return Retracted{std::move(run.tokens), std::move(run.host), distrust};
}

// The same for one that is on its way already: nothing while it still has to stay.
inline std::optional<Retracted> Leave(Retracting& state) noexcept {
  if (!state.run.touched()) state.run.kv.DropTail();
  if (state.run.busy() || (!state.lost && state.run.uncopied() > 0)) return std::nullopt;
  return Retracted{std::move(state.run.tokens), std::move(state.run.host), state.distrust};
}
inline std::optional<Freed> Leave(Aborting& state) noexcept {
  Run* run = std::get_if<Run>(&state.held);
  if (run == nullptr || run->touched()) return std::nullopt;
  return Free(std::move(*run), state.drain);
}

// ---- Advance -------------------------------------------------------------------------------------------------------

// A step filled the snapshot: it goes beside its page. In the output a request keeps only its latest one.
inline void KeepSnapshot(Run& run, int page_size) noexcept {
  const int pages = run.snapshot_at / page_size;
  const bool kept = run.kv.Keep(pages, std::move(run.snapshot));
  run.snapshot = {};
  if (run.snapshot_at <= run.tokens.prompt()) return;
  if (run.latest > 0) run.kv.Forget(run.latest);
  run.latest = kept ? pages : 0;
}

// Full computed pages go to the prefix tree, and what no window shows any more is passed by; behind a load in flight
// both follow when it has ended.
inline void Commit(Run& run, int page_size, StepId reader) noexcept {
  if (run.load) return;
  const int keyed = static_cast<int>(run.tokens.keys().size());  // 0 where prefix caching is off
  run.kv.Commit(run.tokens, std::min(run.computed / page_size, keyed), reader);
  if (run.kv.windowed()) run.kv.PassBy(run.computed / page_size, run.tokens.prompt());
}

// Records a returned step: its KV exists now, so full pages go to the prefix tree, and its token is known.
inline void Return(Run& run, const event::Advance& event) noexcept {
  run.computed += event.tokens;
  --run.in_flight;
  if (event.sampled) {
    run.tokens.Append(*event.sampled);
    --run.pending;
  }
  Commit(run, event.page_size, event.reader);
  if (run.snapshot.held() && run.computed >= run.snapshot_at) KeepSnapshot(run, event.page_size);
}

// Records that a step in flight came back without use: what was planned on top of it is void as well.
inline void Lose(Run& run) noexcept {
  --run.in_flight;
  run.planned = run.computed;
  run.pending = 0;
  run.snapshot = {};
}

template <>
struct Rule<event::Advance, Prefilling> {
  static std::optional<PrefillDone> Apply(Prefilling& state, const event::Advance& event) noexcept {
    Return(state.run, event);
    if (!event.sampled) return std::nullopt;
    return PrefillDone{std::move(state.run)};
  }
};
template <>
struct Rule<event::Advance, PrefillDone> {  // its first decode step was planned while the prefill was in flight
  static Decoding Apply(PrefillDone& state, const event::Advance& event) noexcept {
    Return(state.run, event);
    return {std::move(state.run)};
  }
};
template <>
struct Rule<event::Advance, Decoding> {
  static void Apply(Decoding& state, const event::Advance& event) noexcept { Return(state.run, event); }
};
template <>
struct Rule<event::Advance, Retracting> {
  static std::optional<Retracted> Apply(Retracting& state, const event::Advance& event) noexcept {
    if (state.lost) {
      Lose(state.run);
    } else {
      Return(state.run, event);
    }
    return Leave(state);
  }
};
template <>
struct Rule<event::Advance, Aborting> {  // the result is of no use any more
  static std::optional<Freed> Apply(Aborting& state, const event::Advance&) noexcept {
    if (Run* run = std::get_if<Run>(&state.held)) Lose(*run);
    return Leave(state);
  }
};
template <class S>
  requires(!Running<S> && !OneOf<S, Retracting, Aborting>)
struct Rule<event::Advance, S> : Ignored {};  // no step in flight carries it

// ---- StepFailed ----------------------------------------------------------------------------------------------------

template <Running S>
struct Rule<event::StepFailed, S> {
  static SetBack Apply(S& state, const event::StepFailed&) noexcept {
    Lose(state.run);
    return SetAside(std::move(state.run), true);
  }
};
template <>
struct Rule<event::StepFailed, Retracting> {
  static std::optional<Retracted> Apply(Retracting& state, const event::StepFailed&) noexcept {
    state.lost = true;
    Lose(state.run);
    return Leave(state);
  }
};
template <>
struct Rule<event::StepFailed, Aborting> {
  static std::optional<Freed> Apply(Aborting& state, const event::StepFailed&) noexcept {
    if (Run* run = std::get_if<Run>(&state.held)) Lose(*run);
    return Leave(state);
  }
};
template <class S>
  requires(!Running<S> && !OneOf<S, Retracting, Aborting>)
struct Rule<event::StepFailed, S> : Ignored {};  // no step in flight carries it

// ---- WriteBack, GiveUp ---------------------------------------------------------------------------------------------

template <class S>
  requires(Running<S> || std::is_same_v<S, Retracting>)
struct Rule<event::WriteBack, S> {
  static void Apply(S& state, event::WriteBack& event) noexcept { state.run.write_back = std::move(event.ticket); }
};
template <>
struct Rule<event::WriteBack, Draining> {
  static WritingBack Apply(Draining& state, event::WriteBack& event) noexcept {
    return {std::move(event.ticket), std::move(state.device)};
  }
};
template <class S>
  requires(!Running<S> && !OneOf<S, Retracting, Draining>)
struct Rule<event::WriteBack, S> : Ignored {};  // it has nothing to copy, or copies already

template <>
struct Rule<event::GiveUp, Draining> {
  static Finished Apply(Draining&, const event::GiveUp&) noexcept { return {}; }
};
template <>
struct Rule<event::GiveUp, Retracting> {
  static std::optional<Retracted> Apply(Retracting& state, const event::GiveUp&) noexcept {
    state.run.unwritable = true;
    return Leave(state);
  }
};
template <class S>
  requires(!OneOf<S, Draining, Retracting>)
struct Rule<event::GiveUp, S> : Ignored {};  // nothing hangs on the copy

// ---- Transferred ---------------------------------------------------------------------------------------------------

enum class Settled { kNot, kWhole, kUnusable };  // kUnusable: pages of a load are missing

// Takes a ticket of the run back; a part of a write-back is kept, a part of a load is not. A whole load's pages are as
// good as computed ones, whatever becomes of the steps that read them.
inline Settled Settle(Run& run, event::Transferred& event) noexcept {
  if (run.write_back && run.write_back->id == event.ticket) {
    Ticket ticket = std::move(*run.write_back);
    run.write_back.reset();
    run.unwritable |= event.pages < ticket.pages;
    ticket.FinishWriteBack(event.pages);
    run.host = ticket.host.Another();
    *event.back = std::move(ticket);
    return Settled::kWhole;
  }
  if (!run.load || run.load->id != event.ticket) return Settled::kNot;
  const bool whole = event.pages == run.load->pages;
  if (!whole) {
    run.load->ForgetFrom(event.pages);
    run.host = NodeRef(*run.host.cache());
    run.computed = run.kv.committed() * event.page_size;
    if (run.in_flight == 0) run.planned = run.computed;
  }
  run.load.reset();
  if (!whole) return Settled::kUnusable;
  Commit(run, event.page_size, event.reader);
  return Settled::kWhole;
}

template <Running S>
struct Rule<event::Transferred, S> {
  static std::optional<SetBack> Apply(S& state, event::Transferred& event) noexcept {
    if (Settle(state.run, event) != Settled::kUnusable) return std::nullopt;
    return SetAside(std::move(state.run), true, true);
  }
};
template <>
struct Rule<event::Transferred, Retracting> {
  static std::optional<Retracted> Apply(Retracting& state, event::Transferred& event) noexcept {
    if (Settle(state.run, event) == Settled::kUnusable) state.lost = state.distrust = true;
    return Leave(state);
  }
};
template <>
struct Rule<event::Transferred, Aborting> {
  static std::optional<Freed> Apply(Aborting& state, event::Transferred& event) noexcept {
    Run* run = std::get_if<Run>(&state.held);
    if (run == nullptr) return Finished{};  // the pages of a prefetch go back
    if (Settle(*run, event) == Settled::kUnusable) state.drain = false;
    return Leave(state);
  }
};
template <>
struct Rule<event::Transferred, WritingBack> {
  static std::variant<Draining, Finished> Apply(WritingBack& state, event::Transferred& event) noexcept {
    const bool whole = event.pages == state.ticket.pages;
    state.ticket.FinishWriteBack(event.pages);
    NodeRef host = state.ticket.host.Another();
    *event.back = std::move(state.ticket);
    if (whole && state.device.depth() > host.depth()) return Draining{std::move(state.device), std::move(host)};
    return Finished{};
  }
};
template <>
struct Rule<event::Transferred, Prefetching> {
  static PrefetchDone Apply(Prefetching& state, event::Transferred& event) noexcept {
    Ticket& ticket = state.ticket;
    ticket.FinishPrefetch(state.tokens, event.pages);
    const FromStorage stored{state.stored.first, ticket.host.depth()};
    return {std::move(state.tokens), std::move(ticket.host), stored, event.pages == ticket.pages};
  }
};
template <class S>
  requires(!Running<S> && !OneOf<S, Retracting, Aborting, WritingBack, Prefetching>)
struct Rule<event::Transferred, S> : Ignored {};  // it has no transfer in flight

// ---- Retract -------------------------------------------------------------------------------------------------------

template <Running S>
struct Rule<event::Retract, S> {
  static SetBack Apply(S& state, const event::Retract&) noexcept { return SetAside(std::move(state.run), false); }
};
template <class S>
  requires(!Running<S>)
struct Rule<event::Retract, S> : Ignored {};  // holds no pages, or gives them back already

// ---- Abort and Finish ----------------------------------------------------------------------------------------------

struct EndWaiting {
  template <class S, class Event>
  static Finished Apply(S&, const Event&) noexcept {
    return {};
  }
};
// A finished request's pages are worth a copy on the host; an aborted one's go as fast as they can.
template <bool kDrain>
struct EndRun {
  template <class S, class Event>
  static std::variant<Aborting, Draining, WritingBack, Finished> Apply(S& state, const Event&) noexcept {
    if (state.run.touched()) return Aborting{std::move(state.run), kDrain};
    return std::visit(
        [](auto&& next) { return std::variant<Aborting, Draining, WritingBack, Finished>(std::move(next)); },
        Free(std::move(state.run), kDrain));
  }
};
struct EndFetch {
  template <class Event>
  static Aborting Apply(Prefetching& state, const Event&) noexcept {
    return {std::move(state.ticket)};
  }
};

template <class S>
  requires(Waiting<S> || std::is_same_v<S, Bootstrapping>)
struct Rule<event::Abort, S> : EndWaiting {};
template <class S>
  requires(Running<S> || std::is_same_v<S, Retracting>)
struct Rule<event::Abort, S> : EndRun<false> {};
template <>
struct Rule<event::Abort, Prefetching> : EndFetch {};
template <Ended S>
struct Rule<event::Abort, S> : Ignored {};  // idempotent

template <class S>
  requires(Waiting<S> || std::is_same_v<S, Bootstrapping>)
struct Rule<event::Finish, S> : EndWaiting {};
template <class S>
  requires(Running<S> || std::is_same_v<S, Retracting>)
struct Rule<event::Finish, S> : EndRun<true> {};
template <>
struct Rule<event::Finish, Prefetching> : EndFetch {};
template <Ended S>
struct Rule<event::Finish, S> : Ignored {};  // idempotent, or the step in flight of a request that ended before

}  // namespace tokenspeed
