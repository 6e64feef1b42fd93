// Applies events to states by the table of transitions.h. All event x state pairs are visited at compile time, so there
// is no run-time "invalid transition": a new state or event does not build until each of its pairs has a rule.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

#include "transitions.h"

namespace tokenspeed {

enum class Outcome { kIgnored, kStayed, kMoved };

template <class Event, class S>
inline constexpr bool kIsIgnored = std::is_base_of_v<Ignored, Rule<Event, S>>;

template <class Event, class S>
using ResultOf = decltype(Rule<Event, S>::Apply(std::declval<S&>(), std::declval<Event&>()));

// Strong guarantee: the new state is complete before it replaces the old one, and nothing here can throw.
template <class Event>
Outcome Apply(State& state, Event event) noexcept {
  return std::visit(
      [&]<class S>(S& from) -> Outcome {
        if constexpr (kIsIgnored<Event, S>) {
          return Outcome::kIgnored;
        } else {
          static_assert(noexcept(Rule<Event, S>::Apply(from, event)), "a rule must not throw");
          if constexpr (std::is_void_v<ResultOf<Event, S>>) {
            Rule<Event, S>::Apply(from, event);
            return Outcome::kStayed;
          } else {
            return Install(state, Rule<Event, S>::Apply(from, event));
          }
        }
      },
      state);
}

template <class S>
Outcome Install(State& state, S next) noexcept {
  state = std::move(next);
  return Outcome::kMoved;
}
template <class... S>
Outcome Install(State& state, std::variant<S...> next) noexcept {
  return std::visit([&](auto& s) { return Install(state, std::move(s)); }, next);
}
template <class S>
Outcome Install(State& state, std::optional<S> next) noexcept {
  return next ? Install(state, std::move(*next)) : Outcome::kStayed;
}

// ---- The table as data ---------------------------------------------------------------------------------------------

struct TableCell {
  std::string_view event;
  std::string_view from;
  bool ignored = false;
  bool stays = false;
  std::vector<std::string_view> to;
};

template <class Result>
struct Targets;
template <>
struct Targets<void> {
  static void AddTo(TableCell& cell) { cell.stays = true; }
};
template <class S>
struct Targets {
  static void AddTo(TableCell& cell) { cell.to.push_back(S::kName); }
};
template <class... S>
struct Targets<std::variant<S...>> {
  static void AddTo(TableCell& cell) { (cell.to.push_back(S::kName), ...); }
};
template <class S>
struct Targets<std::optional<S>> {
  static void AddTo(TableCell& cell) {
    cell.stays = true;
    Targets<S>::AddTo(cell);
  }
};

template <class Event, class S>
concept HasRule = requires { sizeof(Rule<Event, S>); };

template <class Event, class S>
TableCell CellOf() {
  static_assert(HasRule<Event, S>, "this event x state pair has no rule in transitions.h");
  TableCell cell{.event = Event::kName, .from = S::kName, .to = {}};
  if constexpr (kIsIgnored<Event, S>) {
    cell.ignored = true;
  } else {
    Targets<ResultOf<Event, S>>::AddTo(cell);
  }
  return cell;
}

template <class F>
void ForEachState(F&& visit) {
  [&]<class... S>(std::type_identity<std::variant<S...>>) {
    (visit(std::type_identity<S>{}), ...);
  }(std::type_identity<State>{});
}
template <class F>
void ForEachEvent(F&& visit) {
  [&]<class... E>(std::type_identity<std::tuple<E...>>) {
    (visit(std::type_identity<E>{}), ...);
  }(std::type_identity<Events>{});
}

// All pairs, events in the order of `Events`, states in the order of `State`.
inline std::vector<TableCell> TransitionTable() {
  std::vector<TableCell> table;
  ForEachEvent([&]<class E>(std::type_identity<E>) {
    ForEachState([&]<class S>(std::type_identity<S>) { table.push_back(CellOf<E, S>()); });
  });
  return table;
}

template <class... E, class... S>
consteval bool EveryPairHasARule(std::type_identity<std::tuple<E...>>, std::type_identity<std::variant<S...>>) {
  auto row = []<class Event>(std::type_identity<Event>) { return (HasRule<Event, S> && ...); };
  return (row(std::type_identity<E>{}) && ...);
}
static_assert(EveryPairHasARule(std::type_identity<Events>{}, std::type_identity<State>{}),
              "an event x state pair has no rule in transitions.h");

// The documentation page (Markdown with a Mermaid diagram) of the table above.
std::string StatesMarkdown();

}  // namespace tokenspeed
