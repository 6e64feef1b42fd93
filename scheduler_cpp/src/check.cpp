// The invariant checker: everything the scheduler keeps incrementally is computed again from scratch and compared.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler.h"

namespace tokenspeed {
namespace {

void Require(bool holds, const std::string& rule) {
  if (!holds) throw std::logic_error("scheduler invariant broken: " + rule);
}

// The places where a page was found; each page must end with exactly one.
class Owners {
 public:
  explicit Owners(const HomeGroup& group) : count_(static_cast<std::size_t>(group.pool.total())) {
    for (PageId page = 0; page < group.pool.total(); ++page)
      if (group.pool.IsFree(page)) ++count_[static_cast<std::size_t>(page)], ++free_;
    for (PageId page = 0; page < group.pool.total(); ++page)
      if (group.cache.IsCached(page)) ++count_[static_cast<std::size_t>(page)];
    Require(free_ == group.pool.free(), "the free list disagrees with the pages' marks");
  }

  void Add(PageId page) { ++count_.at(static_cast<std::size_t>(page)); }

  void Finish() const {
    for (std::size_t page = 0; page < count_.size(); ++page)
      Require(count_[page] == 1, "page " + std::to_string(page) + " has " + std::to_string(count_[page]) +
                                     " owners; free + owned + cached must be all pages, each once");
  }

 private:
  std::vector<int> count_;
  int free_ = 0;
};

void CheckRun(const Run& run, const HomeGroup& group, const Config& config, const std::string& who) {
  const TokenSequence& tokens = run.tokens;
  Require(0 <= run.computed && run.computed <= run.planned && run.planned <= tokens.size() + run.pending,
          who + "computed <= planned <= tokens + pending does not hold");
  Require(run.pending <= run.in_flight, who + "more tokens are pending than steps are in flight");
  Require(run.in_flight > 0 || run.planned == run.computed, who + "tokens are planned but no step is in flight");
  Require(PagesFor(run.planned, config.page_size) <= run.kv.pages(), who + "planned tokens have no page");
  Require(run.kv.digest() == RowDigest(run.kv.table()), who + "the table's running digest is wrong");
  Require(static_cast<int>(tokens.keys().size()) == (config.prefix_cache ? tokens.size() / config.page_size : 0),
          who + "a full page has no key");
  if (config.prefix_cache)
    Require(run.kv.committed() == run.computed / config.page_size, who + "a full computed page is not in the tree");
  for (int i = 0; i < run.kv.committed(); ++i) {
    const PageId page = run.kv.table()[static_cast<std::size_t>(i)];
    Require(group.cache.IsCached(page), who + "a committed page is not in the tree");
    Require(std::ranges::equal(group.cache.TokensOf(page),
                               tokens.ids().subspan(static_cast<std::size_t>(i * config.page_size),
                                                    static_cast<std::size_t>(config.page_size))),
            who + "a committed page holds other tokens");
  }
  const PageId deepest =
      run.kv.committed() == 0 ? kNoPage : run.kv.table()[static_cast<std::size_t>(run.kv.committed() - 1)];
  Require(run.kv.node() == deepest, who + "the pin is not on the last committed page");
}

}  // namespace

void Scheduler::Check() const {
  std::vector<Owners> owners;
  std::vector<std::vector<int>> pins, slots, snapshots;
  std::vector<std::size_t> running(groups_.size());
  std::vector<int> leaving(groups_.size());
  for (const auto& group : groups_) {
    owners.emplace_back(*group);
    pins.emplace_back(static_cast<std::size_t>(group->pool.total()));
    slots.emplace_back(static_cast<std::size_t>(group->slots.total()));
    snapshots.emplace_back(static_cast<std::size_t>(group->cache.snapshots().total()));
    for (int i = 0; i < group->cache.snapshots().total(); ++i)
      snapshots.back()[static_cast<std::size_t>(i)] = group->cache.snapshots().PageOf(i) != kNoPage;
    Require(std::ranges::is_sorted(group->running, {}, [](const Request* r) { return r->order; }),
            "a group's running requests are not in order");
  }
  std::size_t waiting = 0;
  int queued_requests = 0;
  std::int64_t queued_tokens = 0;
  for (const auto& [id, request] : requests_) {
    const std::string who = "request " + std::to_string(id) + " (" + std::string(NameOf(request.state)) + "): ";
    Require(request.id == id, who + "is filed under another id");
    int in_flight = 0;
    for (int i = 0; i < flights_out_; ++i)
      for (const Chosen& row : flights_[static_cast<std::size_t>(oldest_flight_ + i) % flights_.size()].chosen)
        in_flight += row.request == &request;
    const Run* run = RunOf(request.state);
    Require(in_flight == (run ? run->in_flight : 0), who + "its count of steps in flight is wrong");
    const auto entry = waiting_.find(request.order);
    const Place place = PlaceOf(request.state);
    Require((entry != waiting_.end()) == (place == Place::kWaiting), who + "the queue disagrees with its state");
    Require(place != Place::kGone, who + "has ended but is still filed");
    if (place == Place::kWaiting) {
      Require(entry->second == &request, who + "its queue entry names another request");
      ++waiting;
      Require(TokensOf(request.state)->size() < request.total, who + "waits although its output is complete");
      if (!request.admitted_before()) ++queued_requests, queued_tokens += request.prompt();
      continue;
    }
    const auto g = static_cast<std::size_t>(request.group);
    const HomeGroup& group = *groups_.at(g);
    CheckRun(*run, group, config_, who);
    Require(++slots[g].at(static_cast<std::size_t>(run->slot.index())) == 1, who + "shares its request slot");
    if (run->snapshot.held())
      Require(++snapshots[g].at(static_cast<std::size_t>(run->snapshot.index())) == 1, who + "shares its snapshot");
    if (run->kv.node() != kNoPage) ++pins[g][static_cast<std::size_t>(run->kv.node())];
    for (int i = run->kv.committed(); i < run->kv.pages(); ++i)
      owners[g].Add(run->kv.table()[static_cast<std::size_t>(i)]);
    if (place == Place::kLeaving) {
      ++leaving[g];
      Require(run->in_flight > 0, who + "no step in flight holds it");
      continue;
    }
    ++running[g];
    Require(std::ranges::count(group.running, &request) == 1, who + "is not in its group's list of running requests");
    const bool prefilling = std::holds_alternative<Prefilling>(request.state);
    Require(prefilling || run->tokens.outputs() > 0, who + "decodes without a first token");
    Require(prefilling || run->tokens.size() - run->computed <= 1 + run->in_flight,
            who + "decodes with a gap in its KV");
    Require(run->tokens.outputs() + run->pending <= request.limits.max_new_tokens, who + "is planned past its length");
  }
  Require(waiting == waiting_.size(), "the queue holds requests that are not filed");
  Require(queued_requests == queued_requests_ && queued_tokens == queued_tokens_, "the queue's totals are wrong");
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const HomeGroup& group = *groups_[g];
    Require(running[g] == group.running.size(), "a group lists running requests that are not filed");
    Require(leaving[g] == group.leaving, "a group's count of leaving requests is wrong");
    Require(static_cast<int>(std::ranges::count(slots[g], 1)) + group.slots.free() == group.slots.total(),
            "request slots were lost");
    Require(static_cast<int>(std::ranges::count(snapshots[g], 1)) + group.cache.snapshots().free() ==
                group.cache.snapshots().total(),
            "state snapshots were lost");
    owners[g].Finish();
    group.cache.Check(pins[g]);
  }
}

}  // namespace tokenspeed
