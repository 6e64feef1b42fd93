// The event x state table. Every pair has exactly one `Rule`: a transition, or `Ignored` for what is late, duplicate or
// without meaning there. A missing pair does not compile (see fsm.h). A rule's return type names the states it can lead
// to, and the table in the documentation is generated from those types:
//   void                  stays (the members change in place)
//   T, variant<A, B>      moves to T; to A or B
//   optional<T>           moves to T, or stays
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

// ---- Admit ---------------------------------------------------------------------------------------------------------

template <Waiting S>
struct Rule<event::Admit, S> {
  static Prefilling Apply(S& state, event::Admit& event) noexcept {
    return {{.tokens = std::move(state.tokens),
             .kv = std::move(event.kv),
             .slot = std::move(event.slot),
             .computed = event.reused,
             .planned = event.reused,
             .resumed = event.resumed}};
  }
};
template <class S>
  requires(!Waiting<S>)
struct Rule<event::Admit, S> : Ignored {};  // admitted already, or gone

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

// Records a returned step: its KV exists now, so full pages go to the prefix tree, and its token is known.
inline void Return(Run& run, const event::Advance& event) noexcept {
  run.computed += event.tokens;
  --run.in_flight;
  if (event.sampled) {
    run.tokens.Append(*event.sampled);
    --run.pending;
  }
  const int keyed = static_cast<int>(run.tokens.keys().size());  // 0 where prefix caching is off
  run.kv.Commit(run.tokens, std::min(run.computed / event.page_size, keyed));
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
    if (state.run.in_flight > 0) return std::nullopt;
    return Retracted{std::move(state.run.tokens)};
  }
};
template <>
struct Rule<event::Advance, Aborting> {  // the result is of no use any more
  static std::optional<Finished> Apply(Aborting& state, const event::Advance&) noexcept {
    Lose(state.run);
    if (state.run.in_flight > 0) return std::nullopt;
    return Finished{};
  }
};
template <class S>
  requires(!HasRun<S>)
struct Rule<event::Advance, S> : Ignored {};  // no step in flight carries it

// ---- StepFailed ----------------------------------------------------------------------------------------------------

template <Running S>
struct Rule<event::StepFailed, S> {
  static std::variant<Retracting, Retracted> Apply(S& state, const event::StepFailed&) noexcept {
    Lose(state.run);
    if (state.run.in_flight > 0) return Retracting{std::move(state.run), true};
    return Retracted{std::move(state.run.tokens)};
  }
};
template <>
struct Rule<event::StepFailed, Retracting> {
  static std::optional<Retracted> Apply(Retracting& state, const event::StepFailed&) noexcept {
    state.lost = true;
    Lose(state.run);
    if (state.run.in_flight > 0) return std::nullopt;
    return Retracted{std::move(state.run.tokens)};
  }
};
template <>
struct Rule<event::StepFailed, Aborting> {
  static std::optional<Finished> Apply(Aborting& state, const event::StepFailed&) noexcept {
    Lose(state.run);
    if (state.run.in_flight > 0) return std::nullopt;
    return Finished{};
  }
};
template <class S>
  requires(!HasRun<S>)
struct Rule<event::StepFailed, S> : Ignored {};  // no step in flight carries it

// ---- Retract -------------------------------------------------------------------------------------------------------

template <Running S>
struct Rule<event::Retract, S> {
  static std::variant<Retracting, Retracted> Apply(S& state, const event::Retract&) noexcept {
    if (state.run.in_flight > 0) return Retracting{std::move(state.run)};
    return Retracted{std::move(state.run.tokens)};
  }
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
struct EndRunning {
  template <class S, class Event>
  static std::variant<Aborting, Finished> Apply(S& state, const Event&) noexcept {
    if (state.run.in_flight > 0) return Aborting{std::move(state.run)};
    return Finished{};
  }
};
struct EndRetracting {
  template <class Event>
  static Aborting Apply(Retracting& state, const Event&) noexcept {
    return {std::move(state.run)};
  }
};

template <Waiting S>
struct Rule<event::Abort, S> : EndWaiting {};
template <Running S>
struct Rule<event::Abort, S> : EndRunning {};
template <>
struct Rule<event::Abort, Retracting> : EndRetracting {};
template <>
struct Rule<event::Abort, Aborting> : Ignored {};  // idempotent
template <>
struct Rule<event::Abort, Finished> : Ignored {};  // idempotent

template <Waiting S>
struct Rule<event::Finish, S> : EndWaiting {};
template <Running S>
struct Rule<event::Finish, S> : EndRunning {};
template <>
struct Rule<event::Finish, Retracting> : EndRetracting {};
template <>
struct Rule<event::Finish, Aborting> : Ignored {};  // the step in flight of a request that ended before
template <>
struct Rule<event::Finish, Finished> : Ignored {};  // idempotent

}  // namespace tokenspeed
