// What runs next. Within a home group: first every decoding request, oldest first, one token each; then the prefills
// under way, oldest first; then waiting requests in order, as far as tokens, slots and pages go.
//
// Why nothing waits for ever: the oldest running request always gets its page (newer ones are retracted for it, and
// submission refused what the pool cannot hold) and never lacks window pages for long; a waiting request that finds no
// room stops the admission of all newer ones, so what runs ends and makes room; it is admitted only with room for its
// whole prefill and one page for each running request, so it does not push anyone out at once, nor is it pushed out.
#include <algorithm>
#include <utility>

#include "fatal.h"
#include "scheduler.h"

namespace tokenspeed {
namespace {

// Whether the request's next token row is a decode step: its last token is known and alone without KV, or is about to
// be sampled by a step in flight and does not end the output by its number.
bool WantsDecode(const Request& request, const Run& run) noexcept {
  const int unplanned = run.tokens.size() - run.planned;
  if (unplanned == 0) return run.pending > 0 && run.tokens.outputs() + run.pending < request.limits.max_new_tokens;
  return unplanned == 1 && !std::holds_alternative<Prefilling>(request.state);
}

}  // namespace

std::optional<Plan> Scheduler::NextPlan() {
  if (flights_out_ == config_.max_in_flight) return std::nullopt;
  StartFetches();
  // What requests passed by is copied before its window pages can be drawn for others.
  if (config_.windowed() && config_.tiered())
    for (int g = 0; g < config_.dp; ++g) StartWriteBacks(g);
  bool any = false;
  for (auto& group : groups_) {
    group->cache.Tick();
    group->host_cache.Tick();
    group->chosen.clear();
    group->tokens_left = config_.budget();
    group->open = true;
    ChooseDecodes(*group);
    group->decodes = !group->chosen.empty();
    group->prefill_left = group->decodes ? config_.stall() : config_.budget();
    ChoosePrefills(*group);
  }
  AdmitWaiting();
  for (const auto& group : groups_) {
    any |= !group->chosen.empty();
    if (group->decodes) decode_stall_ = std::max<std::int64_t>(decode_stall_, config_.stall() - group->prefill_left);
  }
  if (!any) return std::nullopt;
  return Emit();
}

void Scheduler::ChooseDecodes(HomeGroup& group) noexcept {
  // By index: making room takes the newest requests off the end of the list.
  for (std::size_t i = 0; i < group.running.size(); ++i) {
    Request& request = *group.running[i];
    if (!WantsDecode(request, *RunOf(request.state))) continue;
    if (!MakeRoom(group, request)) {
      ++decode_skips_;
      continue;
    }
    group.chosen.push_back({&request, 1, true});
    --group.tokens_left;
  }
}

bool Scheduler::MakeRoom(HomeGroup& group, Request& request) noexcept {
  Run& run = *RunOf(request.state);
  if (run.planned / config_.page_size == run.kv.pages()) {
    while (group.available() == 0) {
      group.open = false;  // what becomes free belongs to those that run
      // Pages of a request on its way out come back with what is in flight: retract no more than needed.
      if (group.expects_pages()) return false;
      Request& newest = *group.running.back();
      Send(newest, event::Retract{});
      if (&newest == &request) return false;
    }
    run.kv.Append(group.TakePage());
  }
  return DrawWindowPages(group, run, 1) == 1;
}

// Draws window pages for the next `tokens` of a run; for how many there are enough. All requests that may run have room
// for theirs (Config::max_running), so a page that lacks is held by what is in flight, and comes back with it.
int Scheduler::DrawWindowPages(HomeGroup& group, Run& run, int tokens) const noexcept {
  if (!config_.windowed()) return tokens;
  WindowPages& window = group.cache.window();
  const int pages = PagesFor(run.planned + tokens, config_.page_size);
  while (run.kv.window_pages() < pages && window.available() > 0) run.kv.AppendWindowPage(window.Take());
  return std::min(tokens, run.kv.window_pages() * config_.page_size - run.planned);
}

void Scheduler::ChoosePrefills(HomeGroup& group) noexcept {
  for (Request* request : group.running)
    if (std::holds_alternative<Prefilling>(request->state)) ChoosePrefill(group, *request);
}

void Scheduler::ChoosePrefill(HomeGroup& group, Request& request) noexcept {
  Run& run = *RunOf(request.state);
  const int unplanned = run.tokens.size() - run.planned;
  int tokens = std::min({unplanned, config_.chunk(), group.tokens_left, group.prefill_left});
  // A chunk ends with a page where it can, so that a snapshot of the state fits there; what is left of a prompt behind
  // its last full page is a step of its own.
  const int past = (run.planned + tokens) % config_.page_size;
  if (config_.state_snapshots > 0 && past < tokens) tokens -= past;
  tokens = DrawWindowPages(group, run, tokens);
  if (tokens == 0) return;
  group.chosen.push_back({&request, tokens, tokens == unplanned});
  group.tokens_left -= tokens;
  group.prefill_left -= tokens;
}

void Scheduler::AdmitWaiting() {
  int skipped = 0;
  for (auto at = waiting_.begin(); at != waiting_.end() && skipped < config_.max_requests;) {
    Request& request = *at->second;
    ++at;  // admission takes the entry out of the queue
    bool any_open = false;
    HomeGroup* best = nullptr;
    int best_index = 0;
    const bool wait = ComputedElsewhere(request);
    for (int g = 0; g < config_.dp; ++g) {
      HomeGroup& group = *groups_[static_cast<std::size_t>(g)];
      group.open = group.open && group.slots.free() > 0 && group.tokens_left > 0 && group.prefill_left > 0 &&
                   static_cast<int>(group.running.size()) < config_.max_running();
      any_open |= group.open;
      if (wait || !group.open || (request.admitted_before() && request.group != g)) continue;
      if (!Fits(group, request)) continue;
      // The longest cached prefix, then the fewest requests, then the lowest index.
      const std::size_t cached = std::max(path_.size(), host_path_.size());
      const std::size_t best_cached = std::max(best_path_.size(), best_host_path_.size());
      if (best == nullptr || cached > best_cached ||
          (cached == best_cached && group.running.size() < best->running.size())) {
        best = &group;
        best_index = g;
        std::swap(path_, best_path_);
        std::swap(host_path_, best_host_path_);
        best_drawn_ = drawn_;
        best_known_ = known_;
      }
    }
    if (!any_open) return;
    if (wait) {
      ++skipped;
    } else if (best != nullptr) {
      Admit(*best, best_index, request);
    } else {
      // No newer request may take the room that this one waits for.
      for (int g = 0; g < config_.dp; ++g)
        if (!request.admitted_before() || request.group == g) groups_[static_cast<std::size_t>(g)]->open = false;
    }
  }
}

// Whether a running prefill is about to compute the very page that this request would compute first: waiting for it is
// cheaper than computing it twice. A key stands for the whole prefix, so one comparison a prefill decides.
bool Scheduler::ComputedElsewhere(const Request& request) const noexcept {
  if (!config_.prefix_cache) return false;
  const TokenSequence& wanted = *TokensOf(request.state);
  for (int g = 0; g < config_.dp; ++g) {
    if (request.admitted_before() && request.group != g) continue;
    for (const Request* other : groups_[static_cast<std::size_t>(g)]->running) {
      const auto* prefill = std::get_if<Prefilling>(&other->state);
      if (prefill == nullptr) continue;
      const auto next = static_cast<std::size_t>(prefill->run.kv.committed());
      const auto keys = prefill->run.tokens.keys();
      if (next < keys.size() && next < static_cast<std::size_t>(wanted.reusable_pages()) &&
          keys[next] == wanted.keys()[next])
        return true;
    }
  }
  return false;
}

// Read-only probe: the pages that admission would draw against the pages that can be drawn. On success `path_` holds
// the prefix that can be taken up from the device and `host_path_` the one from the host, which may be longer: what
// lies behind the device's is loaded into pages that are drawn like those of the rest.
bool Scheduler::Fits(HomeGroup& group, const Request& request) {
  const TokenSequence& tokens = *TokensOf(request.state);
  const auto reusable = config_.prefix_cache ? tokens.keys().first(static_cast<std::size_t>(tokens.reusable_pages()))
                                             : std::span<const PageKey>();
  const HomeGroup::Blocked& seen = group.blocked;
  if (seen.sequence == request.order.sequence && seen.epoch == group.epoch && group.available() <= seen.available) {
    const auto next = static_cast<std::size_t>(seen.matched);
    if (next >= reusable.size() ||
        group.cache.FindChild(seen.last, reusable[next], tokens.page(seen.matched)) == kNoPage)
      return false;
  }
  if (config_.windowed() && group.cache.window().available() < config_.window_start()) return false;
  group.cache.Match(reusable, tokens.ids(), path_);
  known_ = static_cast<int>(path_.size());
  group.cache.Resumable(path_);
  const int matched = static_cast<int>(path_.size());
  const int headroom = static_cast<int>(group.running.size());  // each may need a page for its next token
  drawn_ = PagesAtAdmission(request) - matched + group.cache.IdlePages(path_);
  if (drawn_ + headroom <= group.available()) {
    host_path_.clear();
    if (config_.tiered()) {
      group.host_cache.Match(reusable, tokens.ids(), host_path_);
      group.host_cache.Resumable(host_path_);
    }
    return true;
  }
  group.blocked = {request.order.sequence, group.epoch, group.available(), matched,
                   path_.empty() ? kNoPage : path_.back()};
  return false;
}

// Pages for all known tokens and the next one, except where that one is the last and needs no KV.
int Scheduler::PagesAtAdmission(const Request& request) const noexcept {
  return PagesFor(std::min(TokensOf(request.state)->size() + 1, request.total - 1), config_.page_size);
}

// The tokens that each tier supplies, where the device has the first `on_device` of `reused`.
CachedTokens Scheduler::CachedAt(const Request& request, int on_device, int reused) const noexcept {
  CachedTokens cached{.device = on_device, .host = reused - on_device};
  if (const auto* fetched = std::get_if<PrefetchDone>(&request.state)) {
    const int first = std::max(fetched->stored.first * config_.page_size, on_device);
    cached.storage = std::max(std::min(fetched->stored.end * config_.page_size, reused) - first, 0);
    cached.host -= cached.storage;
  }
  return cached;
}

void Scheduler::Admit(HomeGroup& group, int index, Request& request) {
  const int pages = PagesAtAdmission(request);
  TokensOf(request.state)->Reserve(request.total);
  const int left = group.available() - best_drawn_;
  const int on_device = static_cast<int>(best_path_.size()), on_host = static_cast<int>(best_host_path_.size());
  const auto* retracted = std::get_if<Retracted>(&request.state);
  const bool loads = on_host > on_device && !(retracted != nullptr && retracted->distrust);
  const int taken = loads ? on_host : on_device;  // pages
  const int first_seen = config_.windowed() ? group.cache.window().window().FirstBehind(taken) : 0;
  Residency kv(group.pool, group.cache, content_ids_, {best_path_, first_seen, best_known_},
               PagesFor(request.total, config_.page_size));
  std::optional<Ticket> load;
  Transfer transfer;
  if (loads) load = MakeLoad(index, request, best_host_path_, best_path_.size(), transfer);
  // Nothing below can fail.
  NodeRef host;
  if (config_.tiered()) host = group.host_cache.Pin(best_host_path_.empty() ? kNoPage : best_host_path_.back());
  while (kv.pages() < pages) kv.Append(group.TakePage());
  if (group.available() != left) Fatal("an admission drew other than it was credited");
  const int reused = taken * config_.page_size;
  if (load) {
    while (config_.windowed() && kv.window_pages() < taken) kv.AppendWindowPage(group.cache.window().Take());
    for (int page = on_device; page < taken; ++page) {
      const auto from = static_cast<std::size_t>(page), to = from - best_path_.size();
      transfer.device[to] = kv.table()[from];
      if (config_.windowed()) transfer.window[to] = page < first_seen ? kNoPage : kv.window_table()[from];
    }
    Register(*load, &request, std::move(transfer));
  }
  if (!request.admitted_before()) {
    LeaveQueue(request);
    request.group = index;
    request.cached = CachedAt(request, on_device * config_.page_size, reused);
    prefix_query_tokens_ += request.prompt();
    hit_device_ += request.cached.device;
    hit_host_ += request.cached.host;
    hit_storage_ += request.cached.storage;
  }
  const bool resumes = config_.state_snapshots > 0 && !best_path_.empty();
  const int resumed = resumes ? group.cache.snapshots().Use(best_path_.back()) : -1;
  // The host let go of what it lacks of the device's prefix, and storage has that as a rule: to copy it again at once
  // would push out what others come back for.
  const bool released = config_.storage && on_host + config_.write_back_pages < on_device;
  Send(request,
       event::Admit{std::move(kv), group.slots.Take(), reused, resumed, std::move(host), std::move(load), released});
  ChoosePrefill(group, request);
}

}  // namespace tokenspeed
