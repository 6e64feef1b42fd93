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
  Owners(const PagePool& pool, const PrefixCache& cache) : count_(static_cast<std::size_t>(pool.total())) {
    int free = 0;
    for (PageId page = 0; page < pool.total(); ++page) {
      count_[static_cast<std::size_t>(page)] = pool.IsFree(page) + cache.IsCached(page) + pool.IsHeld(page);
      free += pool.IsFree(page);
    }
    Require(free == pool.free(), "the free list disagrees with the pages' marks");
  }

  void Add(PageId page) { ++count_.at(static_cast<std::size_t>(page)); }

  void Finish() const {
    for (std::size_t page = 0; page < count_.size(); ++page)
      Require(count_[page] == 1, "page " + std::to_string(page) + " has " + std::to_string(count_[page]) +
                                     " owners; free + owned + cached must be all pages, each once");
  }

 private:
  std::vector<int> count_;
};

// The window group's pages of the device: who owns them, and who pins those that lie beside the tree's.
class WindowCheck {
 public:
  explicit WindowCheck(const HomeGroup& group)
      : group_(group), owners_(static_cast<std::size_t>(group.window_pool.total())), pins_(owners_.size()) {
    const PagePool& pool = group.window_pool;
    int free = 0;
    for (PageId page = 0; page < pool.total(); ++page) {
      const bool beside = group.cache.window().NodeOf(page) != kNoPage;
      owners_[static_cast<std::size_t>(page)] = pool.IsFree(page) + beside + pool.IsHeld(page);
      free += pool.IsFree(page);
    }
    Require(free == pool.free(), "the free list of window pages disagrees with their marks");
  }

  void Pin(PageId page) {
    if (page != kNoPage) ++pins_.at(static_cast<std::size_t>(page));
  }
  void Add(const Residency& kv) {
    for (int i = kv.first_seen(); i < kv.window_pages(); ++i) {
      const PageId page = kv.window_table()[static_cast<std::size_t>(i)];
      if (i >= kv.committed()) {
        ++owners_.at(static_cast<std::size_t>(page));
        continue;
      }
      Pin(page);
      Require(group_.cache.window().Of(kv.table()[static_cast<std::size_t>(i)]) == page,
              "a request sees a window page that does not lie beside its page of the tree");
    }
  }
  void Finish() const {
    for (std::size_t page = 0; page < owners_.size(); ++page) {
      const auto id = static_cast<PageId>(page);
      Require(owners_[page] == 1, "window page " + std::to_string(page) + " has " + std::to_string(owners_[page]) +
                                      " owners; free + owned + cached must be all pages, each once");
      Require(pins_[page] == group_.cache.window().PinsOf(id),
              "window page " + std::to_string(page) + " is pinned other than its users say");
    }
  }

 private:
  const HomeGroup& group_;
  std::vector<int> owners_, pins_;
};

// One tier of a home group: who owns its pages, and who pins its nodes.
class TierCheck {
 public:
  TierCheck(const PagePool& pool, const PrefixCache& cache)
      : cache_(cache), owners_(pool, cache), pins_(static_cast<std::size_t>(pool.total())) {}

  void Own(PageId page) { owners_.Add(page); }
  void Pin(const NodeRef& ref) {
    if (ref.node() == kNoPage) return;
    Require(ref.cache() == &cache_, "a pin is on a node of another tier or group");
    ++pins_.at(static_cast<std::size_t>(ref.node()));
  }
  void PinNode(PageId node) { ++pins_.at(static_cast<std::size_t>(node)); }
  void Finish() const {
    owners_.Finish();
    cache_.Check(pins_);
  }

 private:
  const PrefixCache& cache_;
  Owners owners_;
  std::vector<int> pins_;
};

// All that is counted again of one home group.
struct GroupCheck {
  explicit GroupCheck(const HomeGroup& group)
      : device(group.pool, group.cache),
        host(group.host_pool, group.host_cache),
        window(group),
        slots(static_cast<std::size_t>(group.slots.total())),
        snapshots(static_cast<std::size_t>(group.cache.snapshots().total())),
        copying(static_cast<std::size_t>(group.pool.total())) {
    for (int i = 0; i < group.cache.snapshots().total(); ++i)
      snapshots[static_cast<std::size_t>(i)] = group.cache.snapshots().PageOf(i) != kNoPage;
  }

  void Add(const Ticket& ticket) {
    device.Pin(ticket.device);
    host.Pin(ticket.host);
    for (PageId page : ticket.window.pages()) window.Pin(page);
    for (const OwnedPage& page : ticket.filling) host.Own(page.id());
    const bool fills = ticket.kind == TransferKind::kWriteBack || ticket.kind == TransferKind::kPrefetch;
    Require(static_cast<int>(ticket.filling.size()) == (fills ? ticket.pages : 0), "a ticket lost pages");
    Require(static_cast<int>(ticket.source.size()) == (ticket.kind == TransferKind::kWriteBack ? ticket.pages : 0),
            "a write-back lost its source");
    for (PageId page : ticket.source) Require(++copying.at(static_cast<std::size_t>(page)) == 1, "copied twice");
    tickets.push_back(ticket.id);
  }

  TierCheck device, host;
  WindowCheck window;
  std::vector<int> slots, snapshots, copying;
  std::vector<TicketId> tickets;
  std::size_t running = 0, leaving = 0;
};

// The tickets that a state holds.
template <class F>
void ForEachTicket(const State& state, F&& visit) {
  if (const Run* run = RunOf(state)) {
    if (run->load) visit(*run->load);
    if (run->write_back) visit(*run->write_back);
  }
  std::visit(
      [&]<class S>(const S& s) {
        if constexpr (requires { s.ticket; }) visit(s.ticket);
        if constexpr (std::is_same_v<S, Aborting>)
          if (const auto* ticket = std::get_if<Ticket>(&s.held)) visit(*ticket);
      },
      state);
}

void CheckRun(const Run& run, Place place, const HomeGroup& group, const Config& config, const std::string& who) {
  const TokenSequence& tokens = run.tokens;
  Require(0 <= run.computed && run.computed <= run.planned && run.planned <= tokens.size() + run.pending,
          who + "computed <= planned <= tokens + pending does not hold");
  Require(run.pending <= run.in_flight, who + "more tokens are pending than steps are in flight");
  Require(run.in_flight > 0 || run.planned == run.computed, who + "tokens are planned but no step is in flight");
  const bool copies = place == Place::kLeaving && !run.touched();  // what the copy does not need has gone back
  Require(copies ? run.kv.pages() == run.kv.committed() : PagesFor(run.planned, config.page_size) <= run.kv.pages(),
          who + "planned tokens have no page, or are kept for nothing");
  Require(run.kv.digest() == RowDigest(run.kv.table()), who + "the table's running digest is wrong");
  Require(run.kv.window_digest() == RowDigest(run.kv.window_table()),
          who + "the window table's running digest is wrong");
  if (config.windowed() && !copies) {
    Require(PagesFor(run.planned, config.page_size) <= run.kv.window_pages(),
            who + "planned tokens have no window page");
    // One that leaves because its load broke goes back to before what it sees.
    const int seen = group.cache.window().window().FirstBehind(run.computed / config.page_size);
    Require(place == Place::kLeaving || (run.load ? run.kv.first_seen() <= seen : run.kv.first_seen() == seen),
            who + "lacks window pages that it sees, or keeps others");
  }
  Require(static_cast<int>(tokens.keys().size()) == (config.prefix_cache ? tokens.size() / config.page_size : 0),
          who + "a full page has no key");
  if (config.prefix_cache)
    Require(run.load ? run.kv.committed() <= run.computed / config.page_size
                     : run.kv.committed() == run.computed / config.page_size,
            who + "a full computed page is not in the tree");
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
  std::vector<GroupCheck> checks;
  for (const auto& group : groups_) {
    checks.emplace_back(*group);
    Require(std::ranges::is_sorted(group->running, {}, [](const Request* r) { return r->order; }),
            "a group's running requests are not in order");
    for (const Ticket& ticket : group->backups) checks.back().Add(ticket);
  }
  std::size_t waiting = 0;
  int queued_requests = 0, parked = 0, lingering = 0;
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
    const Place place = PlaceOf(request.state);
    Require(place != Place::kGone, who + "has ended but is still filed");
    const auto entry = waiting_.find(request.order);
    Require((entry != waiting_.end()) == (place == Place::kWaiting), who + "the queue disagrees with its state");
    Require(entry == waiting_.end() || entry->second == &request, who + "its queue entry names another request");
    waiting += place == Place::kWaiting;
    parked += place == Place::kParked;
    lingering += place == Place::kLingering;
    if (place == Place::kWaiting || place == Place::kParked) {
      Require(TokensOf(request.state)->size() < request.total, who + "waits although its output is complete");
      if (!request.admitted_before()) ++queued_requests, queued_tokens += request.prompt();
    }
    // Resources lie in its home group, or in the group that a fetch chose.
    ForEachTicket(request.state, [&](const Ticket& ticket) {
      const auto out = std::ranges::find(out_, ticket.id, &Out::id);
      Require(out != out_.end() && out->request == &request, who + "its ticket is not out, or another's");
      checks.at(static_cast<std::size_t>(out->group)).Add(ticket);
    });
    auto pin = [&](const NodeRef& ref) {
      for (std::size_t g = 0; g < groups_.size(); ++g) {
        if (ref.cache() == &groups_[g]->cache) checks[g].device.Pin(ref);
        if (ref.cache() == &groups_[g]->host_cache) checks[g].host.Pin(ref);
      }
    };
    std::visit(
        [&]<class S>(const S& s) {
          if constexpr (requires { s.host; }) pin(s.host);
          if constexpr (requires { s.device; }) pin(s.device);
        },
        request.state);
    if (place == Place::kLeaving || place == Place::kRunning) {
      const auto g = static_cast<std::size_t>(request.group);
      const HomeGroup& group = *groups_.at(g);
      const auto& list = group.leaving;
      Require(list.contains(request.order) == (place == Place::kLeaving), who + "its group's lists disagree");
      Require((std::ranges::count(group.running, &request) == 1) == (place == Place::kRunning),
              who + "its group's list of running requests disagrees");
      ++(place == Place::kRunning ? checks[g].running : checks[g].leaving);
    }
    if (run == nullptr) continue;
    const auto g = static_cast<std::size_t>(request.group);
    const HomeGroup& group = *groups_.at(g);
    GroupCheck& check = checks[g];
    CheckRun(*run, place, group, config_, who);
    Require(++check.slots.at(static_cast<std::size_t>(run->slot.index())) == 1, who + "shares its request slot");
    if (run->snapshot.held())
      Require(++check.snapshots.at(static_cast<std::size_t>(run->snapshot.index())) == 1, who + "shares its snapshot");
    if (run->kv.node() != kNoPage) check.device.PinNode(run->kv.node());
    pin(run->host);
    for (int i = run->kv.committed(); i < run->kv.pages(); ++i)
      check.device.Own(run->kv.table()[static_cast<std::size_t>(i)]);
    check.window.Add(run->kv);
    if (place == Place::kLeaving) {
      const auto* retracting = std::get_if<Retracting>(&request.state);
      const bool copies = retracting != nullptr && !retracting->lost && run->uncopied() > 0;
      Require(run->busy() || copies, who + "nothing in flight holds it");
      continue;
    }
    const bool prefilling = std::holds_alternative<Prefilling>(request.state);
    Require(prefilling || run->tokens.outputs() > 0, who + "decodes without a first token");
    Require(prefilling || run->tokens.size() - run->computed <= 1 + run->in_flight,
            who + "decodes with a gap in its KV");
    Require(run->tokens.outputs() + run->pending <= request.limits.max_new_tokens, who + "is planned past its length");
  }
  Require(waiting == waiting_.size(), "the queue holds requests that are not filed");
  Require(parked == parked_ && lingering == lingering_, "the count of parked or lingering requests is wrong");
  Require(queued_requests == queued_requests_ && queued_tokens == queued_tokens_, "the queue's totals are wrong");
  std::size_t tickets = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const HomeGroup& group = *groups_[g];
    const GroupCheck& check = checks[g];
    Require(check.running == group.running.size(), "a group lists running requests that are not filed");
    Require(check.leaving == group.leaving.size(), "a group lists leaving requests that are not filed");
    Require(static_cast<int>(std::ranges::count(check.slots, 1)) + group.slots.free() == group.slots.total(),
            "request slots were lost");
    Require(static_cast<int>(std::ranges::count(check.snapshots, 1)) + group.cache.snapshots().free() ==
                group.cache.snapshots().total(),
            "state snapshots were lost");
    for (PageId page = 0; page < group.pool.total(); ++page)
      Require(check.copying[static_cast<std::size_t>(page)] == group.cache.IsCopying(page),
              "page " + std::to_string(page) + " is marked as copied by no ticket, or is not marked");
    for (TicketId ticket : check.tickets)
      Require(std::ranges::count(out_, ticket, &Out::id) == 1, "a ticket is held that is not out");
    tickets += check.tickets.size();
    check.device.Finish();
    check.host.Finish();
    check.window.Finish();
  }
  Require(tickets == out_.size(), "a ticket that is out is held by nobody");
}

}  // namespace tokenspeed
