// What can happen to a request. An event brings everything its transition needs, built beforehand: building may fail
// and leaves the request as it was, applying cannot fail. Resources an ignored event brings go back with it.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>

#include "residency.h"
#include "slot_pool.h"
#include "transfer.h"

namespace tokenspeed::event {

struct Bootstrapped {
  static constexpr std::string_view kName = "Bootstrapped";
  static constexpr std::string_view kWhen = "the handshake with the peer is done";
};

struct BootstrapFailed {
  static constexpr std::string_view kName = "BootstrapFailed";
  static constexpr std::string_view kWhen = "the handshake with the peer failed";
};

struct Fetch {
  static constexpr std::string_view kName = "Fetch";
  static constexpr std::string_view kWhen = "host pages are to be filled from storage while the request waits";
  Ticket ticket;
};

struct Admit {  // the planner found room
  static constexpr std::string_view kName = "Admit";
  static constexpr std::string_view kWhen = "the planner found a slot and pages for the whole prefill";
  Residency kv;
  RequestSlot slot;
  int reused;        // tokens whose KV the prefix cache supplies, on the device or through `load`
  int resumed = -1;  // the snapshot of the state behind them; -1: none
  NodeRef host = {};
  std::optional<Ticket> load = {};
  bool released = false;  // see Run
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
  StepId reader = -1;  // the last step in flight, which may still read the request's old table; -1: none
};

struct StepFailed {
  static constexpr std::string_view kName = "StepFailed";
  static constexpr std::string_view kWhen = "a step that carried the request failed";
};

struct WriteBack {
  static constexpr std::string_view kName = "WriteBack";
  static constexpr std::string_view kWhen = "computed pages are to be copied to the host";
  Ticket ticket;
};

struct GiveUp {
  static constexpr std::string_view kName = "GiveUp";
  static constexpr std::string_view kWhen = "the host has no room for what is to be copied, or has it";
};

struct Transferred {
  static constexpr std::string_view kName = "Transferred";
  static constexpr std::string_view kWhen = "a transfer of the request ended, with all, some or none of its pages";
  TicketId ticket;
  int pages;  // the first so many arrived
  int page_size;
  StepId reader = -1;                // as Advance's
  std::optional<Ticket>* back = {};  // takes the ticket of a write-back, whose `host` is now on the last page that came
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

using Events = std::tuple<event::Bootstrapped, event::BootstrapFailed, event::Fetch, event::Admit, event::Schedule,
                          event::Advance, event::StepFailed, event::WriteBack, event::GiveUp, event::Transferred,
                          event::Retract, event::Abort, event::Finish>;

}  // namespace tokenspeed
