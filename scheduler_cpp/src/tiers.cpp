// What moves between device, host and storage. All of it is best effort beside the requests' service: a copy is made
// where there is room for it and given up where there is none, and nothing that runs waits for one, except a request
// that would otherwise compute what is on its way.
#include <algorithm>
#include <string>
#include <utility>

#include "scheduler.h"

namespace tokenspeed {
namespace {

constexpr int kFirstFetch = 8;  // pages asked of storage at first; each answer in full doubles them

// Whether a running request holds pages on the host that no transfer is about.
bool HasCopyToSpare(const Request* request) noexcept {
  const Run& run = *RunOf(request->state);
  return !run.busy_on_host() && run.host.depth() > 0;
}

template <class T>
void ReserveOneMore(std::vector<T>& list) {
  if (list.size() == list.capacity()) list.reserve(2 * list.size() + 4);
}

}  // namespace

std::vector<Transfer> Scheduler::Transfers() {
  StartFetches();
  if (config_.tiered())
    for (int g = 0; g < config_.dp; ++g) StartWriteBacks(g);
  return std::exchange(outbox_, {});
}

// Room for one more ticket, so that `Register` cannot fail.
void Scheduler::ReserveTransfer() {
  ReserveOneMore(out_);
  ReserveOneMore(outbox_);
}

void Scheduler::Register(const Ticket& ticket, Request* request, Transfer&& transfer) noexcept {
  transfer.ticket = ticket.id;
  transfer.kind = ticket.kind;
  transfer.request = request == nullptr ? -1 : request->id;
  out_.push_back({ticket.id, ticket.kind, ticket.pages, transfer.group, request});
  outbox_.push_back(std::move(transfer));
  ++transfers_[static_cast<std::size_t>(ticket.kind)];
}

// A load-back of the host's pages behind the first `matched` of `path`; the device pages are still to be named.
Ticket Scheduler::MakeLoad(int index, const Request& request, std::span<const PageId> path, std::size_t matched,
                           Transfer& transfer) {
  ReserveTransfer();
  const auto pages = path.subspan(matched);
  const auto keys = TokensOf(request.state)->keys().subspan(matched, pages.size());
  transfer.group = index;
  transfer.device.resize(pages.size());
  if (config_.windowed()) transfer.window.resize(pages.size());
  transfer.host.assign(pages.begin(), pages.end());
  transfer.keys.assign(keys.begin(), keys.end());
  return {.id = next_ticket_++,
          .kind = TransferKind::kLoadBack,
          .pages = static_cast<int>(pages.size()),
          .host = groups_[static_cast<std::size_t>(index)]->host_cache.Pin(path.back())};
}

// ---- Storage to host -----------------------------------------------------------------------------------------------

// Oldest first, and what finds no room on the host is tried again: newer requests do not take the room that it waits
// for. What the tiers had all of may be evicted while it waits, so it is looked at again whenever a request came or
// went.
void Scheduler::StartFetches() {
  if (!config_.storage) return;
  auto has_room = [](const auto& group) {
    return group->host_available() > 0 || std::ranges::any_of(group->running, HasCopyToSpare);
  };
  const std::uint64_t now = Epochs();
  int seen = 0;
  for (auto at = waiting_.begin();
       at != waiting_.end() && seen < config_.max_requests && std::ranges::any_of(groups_, has_room);) {
    Request& request = *at->second;
    ++at, ++seen;  // a fetch takes the entry out of the queue
    auto* submitted = std::get_if<Submitted>(&request.state);
    auto* fetched = std::get_if<PrefetchDone>(&request.state);
    if (!(submitted != nullptr && submitted->looked_up != now) && !(fetched != nullptr && fetched->more)) continue;
    const bool has_all = submitted != nullptr && TiersHave(submitted->tokens);
    const Fetched verdict = has_all ? Fetched::kNothing : StartFetch(request);  // a fetch ends the state
    if (verdict == Fetched::kNoRoom) return;
    if (verdict == Fetched::kStarted) {
      --seen;
      continue;
    }
    if (submitted != nullptr) submitted->looked_up = now;
    if (fetched != nullptr) fetched->more = false;
  }
}

// Changes whenever a request enters a home group, or leaves one.
std::uint64_t Scheduler::Epochs() const noexcept {
  std::uint64_t sum = 1;
  for (const auto& group : groups_) sum += group->epoch;
  return sum;
}

// Whether the tiers have what can be reused of a prompt, as far as its pages' keys say: cheaper than to match them.
// That the device has a page says nothing of its window part.
bool Scheduler::TiersHave(const TokenSequence& tokens) const noexcept {
  const auto keys = tokens.keys().first(static_cast<std::size_t>(tokens.reusable_pages()));
  const int enough = static_cast<int>(keys.size()) - config_.storage_min_pages + 1;
  return std::ranges::any_of(groups_, [&](const auto& group) {
    return group->host_cache.Reach(keys) >= enough || (!config_.windowed() && group->cache.Reach(keys) >= enough);
  });
}

// Asks storage for the pages behind those that the tiers have, in the group that has the most.
Scheduler::Fetched Scheduler::StartFetch(Request& request) {
  const TokenSequence& tokens = *TokensOf(request.state);
  const auto keys = tokens.keys().first(static_cast<std::size_t>(tokens.reusable_pages()));
  const auto* fetched = std::get_if<PrefetchDone>(&request.state);
  int best = -1, on_device = 0;
  for (int g = 0; g < config_.dp; ++g) {
    HomeGroup& group = *groups_[static_cast<std::size_t>(g)];
    if (fetched != nullptr && fetched->host.cache() != &group.host_cache) continue;
    group.cache.Match(keys, tokens.ids(), path_);
    group.cache.Resumable(path_);
    group.host_cache.Match(keys, tokens.ids(), host_path_);
    const std::size_t cached = std::max(path_.size(), host_path_.size());
    const std::size_t best_cached = std::max(static_cast<std::size_t>(on_device), best_host_path_.size());
    if (best >= 0 &&
        (cached < best_cached ||
         (cached == best_cached && group.running.size() >= groups_[static_cast<std::size_t>(best)]->running.size())))
      continue;
    best = g;
    on_device = static_cast<int>(path_.size());
    std::swap(host_path_, best_host_path_);
  }
  HomeGroup& group = *groups_[static_cast<std::size_t>(best)];
  const auto& path = best_host_path_;
  const int on_host = static_cast<int>(path.size());
  const int missing = static_cast<int>(keys.size()) - std::max(on_host, on_device);
  // Fetched pages hang below the host's, so what only the device has would be fetched as well.
  if (missing < (fetched == nullptr ? config_.storage_min_pages : 1) || missing < on_device - on_host)
    return Fetched::kNothing;
  ReserveTransfer();
  NodeRef host = group.host_cache.Pin(path.empty() ? kNoPage : path.back());
  const int before = fetched == nullptr ? 0 : fetched->stored.end - fetched->stored.first;
  const int most = std::max({config_.storage_min_pages, kFirstFetch, 2 * before});
  const int wanted = std::min(static_cast<int>(keys.size()) - on_host, most);
  MakeHostRoom(group, wanted, request);
  const int pages = std::min(wanted, group.host_available());
  if (pages == 0) return Fetched::kNoRoom;
  const auto count = static_cast<std::size_t>(pages);
  const auto named = keys.subspan(static_cast<std::size_t>(on_host), count);
  Transfer transfer{.group = best, .keys = {named.begin(), named.end()}};
  Ticket ticket{.id = next_ticket_++, .kind = TransferKind::kPrefetch, .pages = pages, .host = std::move(host)};
  transfer.host.reserve(count);
  ticket.filling.reserve(count);
  // Nothing below can fail.
  for (int i = 0; i < pages; ++i) {
    ticket.filling.push_back(group.TakeHostPage());
    transfer.host.push_back(ticket.filling.back().id());
  }
  Register(ticket, &request, std::move(transfer));
  Send(request, event::Fetch{std::move(ticket)});
  return Fetched::kStarted;
}

// Lets go of the host's copies of what runs, newest first: the device has those pages. Then of what newer requests than
// this one have fetched: they may fetch it again.
void Scheduler::MakeHostRoom(HomeGroup& group, int pages, const Request& request) noexcept {
  for (auto at = group.running.rbegin(); at != group.running.rend() && group.host_available() < pages; ++at) {
    if (!HasCopyToSpare(*at)) continue;
    Run& run = *RunOf((*at)->state);
    run.host = NodeRef(group.host_cache);
    run.released = true;
  }
  for (auto at = waiting_.rbegin(); at != waiting_.rend() && at->second != &request; ++at) {
    if (group.host_available() >= pages) return;
    auto* fetched = std::get_if<PrefetchDone>(&at->second->state);
    if (fetched == nullptr || fetched->host.cache() != &group.host_cache || fetched->host.depth() == 0) continue;
    fetched->host = NodeRef(group.host_cache);
    fetched->more = true;
  }
}

// ---- Device to host ------------------------------------------------------------------------------------------------

void Scheduler::StartWriteBacks(int index) {
  HomeGroup& group = *groups_[static_cast<std::size_t>(index)];
  for (auto at = group.leaving.begin(); at != group.leaving.end();) {
    Request& request = *at->second;
    ++at;  // what has nothing to copy leaves
    Copy copy = Copy::kLater;
    if (auto* draining = std::get_if<Draining>(&request.state)) {
      const int pages = draining->device.depth() - draining->host.depth();
      path_.resize(static_cast<std::size_t>(pages));
      group.cache.PathTo(draining->device.node(), path_);
      copy = StartWriteBack(index, request, path_, draining->host);
    } else if (auto* retracting = std::get_if<Retracting>(&request.state);
               retracting != nullptr && !retracting->run.busy()) {
      Run& run = retracting->run;
      copy = StartWriteBack(index, request, run.uncopied_pages(), run.host);
    }
    if (copy == Copy::kNothing) Send(request, event::GiveUp{});
  }
  for (Request* request : group.running) {
    Run& run = *RunOf(request->state);
    const bool due =
        run.uncopied() >= config_.write_back_pages ||
        (run.uncopied() > 0 && run.host.depth() < run.kv.first_seen());  // its window part may soon be gone
    if (due && !run.write_back && !run.released && group.host_available() > 0)
      StartWriteBack(index, *request, run.uncopied_pages(), run.host);
  }
}

// Starts to copy `pages`, the path on the device below the page that `host` is a copy of; `host` descends over those
// that have a copy.
Scheduler::Copy Scheduler::StartWriteBack(int index, Request& request, std::span<const PageId> pages, NodeRef& host) {
  HomeGroup& group = *groups_[static_cast<std::size_t>(index)];
  const PrefixCache& device = group.cache;
  while (!pages.empty()) {
    const PageId page = pages.front();
    const PageId copy = group.host_cache.FindChild(host.node(), device.KeyOf(page), device.TokensOf(page).data());
    if (copy == kNoPage) break;
    group.host_cache.Descend(host, copy);
    pages = pages.subspan(1);
  }
  if (pages.empty()) return Copy::kNothing;
  const auto end = std::ranges::find_if(pages, [&](PageId page) { return device.IsCopying(page); });
  pages = pages.first(static_cast<std::size_t>(end - pages.begin()));
  if (pages.empty()) return Copy::kLater;  // another request copies them
  const int room = std::min(static_cast<int>(pages.size()), group.host_available());
  if (room == 0) return Copy::kNothing;
  pages = pages.first(static_cast<std::size_t>(room));
  ReserveTransfer();
  Transfer transfer{.group = index, .device = {pages.begin(), pages.end()}};
  transfer.host.reserve(pages.size());
  transfer.keys.reserve(pages.size());
  Ticket ticket{.id = next_ticket_++, .kind = TransferKind::kWriteBack, .pages = room, .source = transfer.device};
  ticket.filling.reserve(pages.size());
  if (config_.windowed()) {
    ticket.window = WindowPins(group.cache.window());
    ticket.window.Reserve(pages.size());
    transfer.window.reserve(pages.size());
  }
  // Nothing below can fail.
  ticket.device = group.cache.Pin(pages.back());
  ticket.host = host.Another();
  for (PageId page : pages) {
    ticket.filling.push_back(group.TakeHostPage());
    transfer.host.push_back(ticket.filling.back().id());
    transfer.keys.push_back(device.KeyOf(page));
    group.cache.SetCopying(page, true);
    if (config_.windowed()) transfer.window.push_back(ticket.window.Add(page));
  }
  Register(ticket, &request, std::move(transfer));
  Send(request, event::WriteBack{std::move(ticket)});
  return Copy::kStarted;
}

// ---- Host to storage -----------------------------------------------------------------------------------------------

// Stores the pages of a write-back that came to the host, those that lack no layer's part. Storage that is slow must
// not pin the host.
void Scheduler::StartBackup(int index, Ticket&& written, Transfer&& transfer) noexcept {
  HomeGroup& group = *groups_[static_cast<std::size_t>(index)];
  group.host_cache.PathTo(written.host.node(), transfer.host);
  if (config_.windowed())
    std::erase_if(transfer.host, [&](PageId page) { return group.host_cache.window().Of(page) == kNoPage; });
  const int pages = static_cast<int>(transfer.host.size());
  if (pages == 0 || 2 * (group.backup_pages + pages) > config_.host_pages) return;
  Ticket ticket{.id = next_ticket_++, .kind = TransferKind::kBackup, .pages = pages, .host = std::move(written.host)};
  for (PageId page : transfer.host) transfer.keys.push_back(group.host_cache.KeyOf(page));
  group.backup_pages += pages;
  Register(ticket, nullptr, std::move(transfer));
  group.backups.push_back(std::move(ticket));
}

// ---- What came back ------------------------------------------------------------------------------------------------

bool Scheduler::Transferred(TicketId ticket, int pages) {
  const auto at = std::ranges::lower_bound(out_, ticket, {}, &Out::id);
  if (at == out_.end() || at->id != ticket) return false;
  if (pages < 0 || pages > at->pages)
    throw std::invalid_argument("transfer " + std::to_string(ticket) + " returned " + std::to_string(pages) +
                                " pages; it has " + std::to_string(at->pages));
  const Out out = *at;
  HomeGroup& group = *groups_[static_cast<std::size_t>(out.group)];
  const bool stores = config_.storage && out.kind == TransferKind::kWriteBack;
  Transfer transfer{.group = out.group};
  if (stores) {
    ReserveTransfer();
    ReserveOneMore(group.backups);
    transfer.host.resize(static_cast<std::size_t>(pages));
    transfer.keys.reserve(static_cast<std::size_t>(pages));
  }
  // Nothing below can fail.
  out_.erase(std::ranges::lower_bound(out_, ticket, {}, &Out::id));
  const auto kind = static_cast<std::size_t>(out.kind);
  --transfers_[kind];
  moved_pages_[kind] += pages;
  missing_pages_[kind] += out.pages - pages;
  if (out.request == nullptr) {
    group.backup_pages -= out.pages;
    group.backups.erase(std::ranges::find(group.backups, ticket, &Ticket::id));
    return true;
  }
  std::optional<Ticket> back;
  Send(*out.request, event::Transferred{ticket, pages, config_.page_size, LastInFlight(), &back});
  if (stores && back) StartBackup(out.group, std::move(*back), std::move(transfer));
  return true;
}

}  // namespace tokenspeed
