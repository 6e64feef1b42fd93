// What can happen to a request. An event brings everything its transition needs, built beforehand: building may fail
// and leaves the request as it was, applying cannot fail. Resources an ignored event brings go back with it.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>

#include "residency.h"
#include "slot_pool.h"

namespace tokenspeed::event {

struct Admit {  // the planner found room
  static constexpr std::string_view kName = "Admit";
  static constexpr std::string_view kWhen = "the planner found a slot and pages for the whole prefill";
  Residency kv;
  RequestSlot slot;
  int reused;        // tokens whose KV the prefix cache supplies
  int resumed = -1;  // the snapshot of the state behind them; -1: none
};

struct Schedule {
  static constexpr std::string_view kName = "Schedule";
  static constexpr std::string_view kWhen = "a plan carries the request's next tokens";
  int tokens;
  bool samples;  // the step samples the token after them
};

struct Advance {
  static constexpr std::string_view kName = "Advance";
  static constexpr std::string_view kWhen = "a step that carried the request returned";
  int tokens;                    // as planned by the step's Schedule
  std::optional<Token> sampled;  // engaged where Schedule::samples was set
  int page_size;
};

struct StepFailed {
  static constexpr std::string_view kName = "StepFailed";
  static constexpr std::string_view kWhen = "a step that carried the request failed";
};

struct Retract {
  static constexpr std::string_view kName = "Retract";
  static constexpr std::string_view kWhen = "an older request needs the pages, or the caller asks";
};

struct Abort {
  static constexpr std::string_view kName = "Abort";
  static constexpr std::string_view kWhen = "the client is gone";
};

struct Finish {
  static constexpr std::string_view kName = "Finish";
  static constexpr std::string_view kWhen = "a stop condition or the length limit was met";
};

}  // namespace tokenspeed::event

namespace tokenspeed {

using Events = std::tuple<event::Admit, event::Schedule, event::Advance, event::StepFailed, event::Retract,
                          event::Abort, event::Finish>;

}  // namespace tokenspeed
