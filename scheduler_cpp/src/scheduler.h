// The control plane. It alone decides what runs next and who owns a page; the caller executes plans and reports back.
// Deterministic: the same calls give the same plans. Not thread safe (the binding serialises calls).
//
// A plan is in flight from NextPlan until Advance or Fail names its step; steps return in order. With max_in_flight = 2
// the next plan is made before the previous one returned, and a decoding request's input is then the token that the
// step in flight is about to sample (see PlanArrays::ids).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "config.h"
#include "fsm.h"
#include "home_group.h"
#include "plan.h"
#include "plan_pool.h"
#include "request.h"
#include "transfer.h"

namespace tokenspeed {

// The bounded queue cannot take the request now; trying again later can succeed.
struct QueueFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Totals since construction, and the present occupancy over all home groups.
struct Stats {
  int running = 0;  // admitted and not on their way out
  int waiting = 0;
  int leaving = 0;  // ended or retracted, held by a step or a transfer in flight
  int in_flight = 0;
  int kv_pages_total = 0, kv_pages_free = 0, kv_pages_cached = 0, kv_pages_evictable = 0;
  int window_pages_total = 0, window_pages_free = 0, window_pages_idle = 0;  // idle: cached, and used by nobody
  std::int64_t queued_tokens = 0;                                            // prompt tokens of requests never admitted
  std::int64_t prefix_query_tokens = 0;  // prompt tokens of requests at their first admission
  std::int64_t prefix_hit_tokens = 0;    // those found in the prefix cache, of whatever tier
  std::int64_t hit_tokens_device = 0, hit_tokens_host = 0, hit_tokens_storage = 0;
  int host_pages_total = 0, host_pages_free = 0, host_pages_cached = 0, host_pages_pinned = 0;
  std::int64_t host_evicted_pages = 0;
  std::array<int, kTransferKinds> transfers = {};               // in flight, by kind
  std::array<std::int64_t, kTransferKinds> moved_pages = {};    // that arrived
  std::array<std::int64_t, kTransferKinds> missing_pages = {};  // that did not
  std::int64_t retractions = 0;  // admitted requests sent back to wait, for whatever reason
  std::int64_t evicted_pages = 0;
  std::int64_t queue_age_steps = 0;      // plans made since the request at the head of the queue came
  std::int64_t decode_skips = 0;         // decode tokens that a plan left out for want of a page
  std::int64_t decode_stall_tokens = 0;  // the most prefill tokens in a plan that also decodes
  std::int64_t steps = 0;                // plans made
  std::int64_t step_tokens = 0;          // token rows planned
};

struct RequestInfo {
  RequestId id;
  std::string_view state;
  int computed_tokens, total_tokens, output_tokens, pages, group, in_flight;
  int window_pages;        // that it can still see
  int host_pages;          // of its path, pinned
  int transfers;           // in flight for it
  std::int64_t age_steps;  // plans made since it came
};

class Scheduler {
 public:
  // Throws std::invalid_argument naming the field that cannot work.
  explicit Scheduler(Config config);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  const Config& config() const noexcept { return config_; }

  // Queues a request. Throws std::invalid_argument (it could never run) or QueueFull; nothing has changed then.
  // `priority`: a class; lower goes first. `salt` separates prefix cache domains.
  // `bootstrap`: it waits for Bootstrapped or BootstrapFailed (which ends it) before it can be served.
  void Submit(RequestId id, std::span<const Token> tokens, Limits limits, int priority, std::string_view salt,
              bool bootstrap = false);

  // Each is idempotent, and false for a request that is unknown or has ended.
  bool Abort(RequestId id) noexcept;    // gives back everything, at once or when the step in flight returns
  bool Finish(RequestId id) noexcept;   // as if a stop token had been met: no more output
  bool Retract(RequestId id) noexcept;  // sends a running request back to wait; it will recompute what no tier keeps
  bool Bootstrapped(RequestId id) noexcept;
  bool BootstrapFailed(RequestId id) noexcept;

  // The next step, or nothing when nothing can run or max_in_flight plans are out.
  std::optional<Plan> NextPlan();

  // The oldest step in flight returned `tokens` ([dp * rows], row order; rows that sampled none are not read). Fills
  // `outputs` in row order. Throws std::invalid_argument, nothing changed, for another step or a malformed answer.
  void Advance(StepId step, std::span<const Token> tokens, std::vector<Output>& outputs);
  // The oldest step in flight failed: its requests wait again, without what the step would have given.
  void Fail(StepId step);

  // The transfers to start now, each handed out once, in the order in which they must be enqueued: before the step of
  // the plan made last, and whenever nothing runs.
  std::vector<Transfer> Transfers();
  // The first `pages` of a transfer's pages arrived; the others are given up. False, nothing changed, for a ticket that
  // is unknown or was answered before. Throws std::invalid_argument for more pages than it has.
  bool Transferred(TicketId ticket, int pages);

  // What came to and left the prefix caches since the last call.
  std::vector<KvEvent> KvEvents() { return kv_events_.Take(); }

  // Evicts every cached page of the tier that nobody uses; the number of pages.
  int FlushCache(Tier tier = Tier::kAll) noexcept;

  // Tokens of a prompt that the prefix cache would supply from the device or the host, in the best home group. Changes
  // nothing.
  int CachedPrefix(std::span<const Token> tokens, std::string_view salt) const;

  Stats stats() const noexcept;
  std::vector<RequestInfo> Snapshot() const;  // in the order of service
  // Throws std::logic_error naming the first broken invariant. O(pages + tokens).
  void Check() const;

 private:
  friend struct Fingerprint;  // tests: the canonical form of a state

  struct InFlight {
    StepId step = 0;
    std::vector<Chosen> chosen;  // [dp * rows] in row order; null requests are holes
  };

  // The only way a request changes state: applies the event and moves the request between the lists accordingly. The
  // reference is dangling afterwards where the request is gone.
  template <class Event>
  Outcome Send(Request& request, Event event) noexcept {
    const Place before = PlaceOf(request.state);
    const Outcome outcome = Apply(request.state, std::move(event));
    if (const Place after = PlaceOf(request.state); before != after) Relist(request, before, after);
    return outcome;
  }
  void Relist(Request& request, Place before, Place after) noexcept;
  void LeaveQueue(const Request& request) noexcept;  // the bounded queue, at the first admission or the end
  template <class Event>
  bool SendTo(RequestId id, Event event) noexcept;
  HomeGroup& GroupOf(const Request& request) noexcept { return *groups_[static_cast<std::size_t>(request.group)]; }

  // planner.cpp: what runs next.
  void ChooseDecodes(HomeGroup& group) noexcept;
  bool MakeRoom(HomeGroup& group, Request& request) noexcept;
  int DrawWindowPages(HomeGroup& group, Run& run, int tokens) const noexcept;
  void ChoosePrefills(HomeGroup& group) noexcept;
  void AdmitWaiting();
  bool ComputedElsewhere(const Request& request) const noexcept;
  bool Fits(HomeGroup& group, const Request& request);
  int PagesAtAdmission(const Request& request) const noexcept;
  CachedTokens CachedAt(const Request& request, int on_device, int reused) const noexcept;
  void Admit(HomeGroup& group, int index, Request& request);
  void ChoosePrefill(HomeGroup& group, Request& request) noexcept;

  // tiers.cpp: what moves between device, host and storage.
  enum class Copy { kStarted, kLater, kNothing };
  void StartFetches();
  enum class Fetched { kStarted, kNothing, kNoRoom };
  Fetched StartFetch(Request& request);
  bool TiersHave(const TokenSequence& tokens) const noexcept;
  std::uint64_t Epochs() const noexcept;
  void MakeHostRoom(HomeGroup& group, int pages, const Request& request) noexcept;
  void StartWriteBacks(int index);
  Copy StartWriteBack(int index, Request& request, std::span<const PageId> pages, NodeRef& host);
  void StartBackup(int index, Ticket&& written, Transfer&& transfer) noexcept;
  void ReserveTransfer();
  void Register(const Ticket& ticket, Request* request, Transfer&& transfer) noexcept;
  Ticket MakeLoad(int index, const Request& request, std::span<const PageId> path, std::size_t matched,
                  Transfer& transfer);
  StepId LastInFlight() const noexcept { return config_.tiered() && flights_out_ > 0 ? next_step_ - 1 : -1; }

  // emit.cpp: the plan as arrays.
  Plan Emit();
  void Arrange(HomeGroup& group) noexcept;
  int TableWidth() noexcept;
  int SaveState(HomeGroup& group, Run& run, int end) const noexcept;
  void EmitGroup(std::size_t index, PlanBuffer& buffer, const PlanShape& shape, const PlanArrays& arrays,
                 InFlight& record) noexcept;

  // scheduler.cpp: what came back.
  InFlight& Oldest(StepId step);
  void Retire() noexcept;
  void AdvanceRow(const Chosen& row, Token token, std::vector<Output>& outputs) noexcept;

  const Config config_;
  ContentIds content_ids_;
  KvEventLog kv_events_;  // before groups_: their caches tell it
  std::vector<std::unique_ptr<HomeGroup>> groups_;
  std::unordered_map<RequestId, Request> requests_;  // after groups_: requests give back to them
  RequestQueue waiting_;
  int parked_ = 0;     // requests that wait for a peer or for storage
  int lingering_ = 0;  // ended requests whose prefetch has not come back
  std::uint64_t next_sequence_ = 1;
  int queued_requests_ = 0;
  std::int64_t queued_tokens_ = 0;

  PlanPool plans_;
  int width_ = 0;
  std::array<InFlight, 2> flights_;  // a ring
  int oldest_flight_ = 0;
  int flights_out_ = 0;
  StepId next_step_ = 0;

  // Tickets out, ascending, and what is to be told of them.
  struct Out {
    TicketId id;
    TransferKind kind;
    int pages;
    int group;
    Request* request;  // null: of none
  };
  std::vector<Out> out_;
  std::vector<Transfer> outbox_;
  TicketId next_ticket_ = 0;
  std::array<int, kTransferKinds> transfers_ = {};
  std::array<std::int64_t, kTransferKinds> moved_pages_ = {}, missing_pages_ = {};

  std::vector<PageId> path_, best_path_;  // scratch of admission
  std::vector<PageId> host_path_, best_host_path_;
  int drawn_ = 0, best_drawn_ = 0;          // pages
  int known_ = 0, best_known_ = 0;          // pages that the device has of a prompt
  std::vector<std::uint64_t> row_digests_;  // scratch of emission
  std::int64_t prefix_query_tokens_ = 0, retractions_ = 0, step_tokens_ = 0;
  std::int64_t hit_device_ = 0, hit_host_ = 0, hit_storage_ = 0;
  std::int64_t decode_skips_ = 0, decode_stall_ = 0;
};

}  // namespace tokenspeed
