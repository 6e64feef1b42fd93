#include "scheduler.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "hash.h"

namespace tokenspeed {
namespace {

Config Validated(Config config) {
  config.Validate();
  return config;
}

[[noreturn]] void Refuse(RequestId id, const std::string& why) {
  throw std::invalid_argument("request " + std::to_string(id) + ": " + why);
}

}  // namespace

Scheduler::Scheduler(Config config)
    : config_(Validated(std::move(config))),
      kv_events_(config_.kv_events),
      plans_(config_.dp, config_.budget(), std::min(config_.budget(), config_.max_requests), config_.windowed()) {
  for (int g = 0; g < config_.dp; ++g) groups_.push_back(std::make_unique<HomeGroup>(config_, g, kv_events_));
  const std::size_t rows =
      static_cast<std::size_t>(config_.dp) * static_cast<std::size_t>(std::min(config_.budget(), config_.max_requests));
  for (InFlight& flight : flights_) flight.chosen.reserve(rows);
  row_digests_.reserve(config_.windowed() ? 2 * rows : rows);
}

void Scheduler::Submit(RequestId id, std::span<const Token> tokens, Limits limits, int priority, std::string_view salt,
                       bool bootstrap) {
  const auto length = static_cast<std::int64_t>(tokens.size());
  if (id < 0) Refuse(id, "the id is negative; ids are 0 or more (-1 marks a hole in a plan)");
  if (length == 0) Refuse(id, "the prompt is empty; give at least one token");
  if (requests_.contains(id)) Refuse(id, "the id is in use; wait until the request has ended");
  if (limits.max_new_tokens < 1)
    Refuse(id, "max_new_tokens is " + std::to_string(limits.max_new_tokens) + "; it must be at least 1");
  if (limits.min_new_tokens < 0 || limits.min_new_tokens > limits.max_new_tokens)
    Refuse(id, "min_new_tokens is " + std::to_string(limits.min_new_tokens) + "; it must lie in 0.." +
                   std::to_string(limits.max_new_tokens) + " (max_new_tokens)");
  if (const auto bad = std::ranges::find_if(tokens, [](Token token) { return token < 0; }); bad != tokens.end())
    Refuse(id, "token " + std::to_string(bad - tokens.begin()) + " of the prompt is " + std::to_string(*bad) +
                   "; token ids are 0 or more");
  const std::int64_t total = length + limits.max_new_tokens;
  if (total > config_.max_seq_len)
    Refuse(id, "prompt and max_new_tokens come to " + std::to_string(total) + " tokens, but max_seq_len is " +
                   std::to_string(config_.max_seq_len));
  // The last token's KV is never computed, hence one less.
  const int pages = PagesFor(static_cast<int>(total - 1), config_.page_size);
  if (pages > config_.num_pages)
    Refuse(id, "it can never fit: it needs " + std::to_string(pages) + " pages of " +
                   std::to_string(config_.page_size) + " tokens (prompt " + std::to_string(length) +
                   ", max_new_tokens " + std::to_string(limits.max_new_tokens) + "), but the pool has " +
                   std::to_string(config_.num_pages) + "; shorten it or give the pool more pages");
  if (config_.max_queued_requests > 0 && queued_requests_ >= config_.max_queued_requests)
    throw QueueFull("the queue is full: " + std::to_string(queued_requests_) +
                    " requests wait and max_queued_requests is " + std::to_string(config_.max_queued_requests) +
                    "; try again later");
  // A single prompt longer than the bound must still be served, so an empty queue takes it.
  if (config_.max_queued_tokens > 0 && queued_requests_ > 0 && queued_tokens_ + length > config_.max_queued_tokens)
    throw QueueFull("the queue is full: " + std::to_string(queued_tokens_) + " prompt tokens wait, this one has " +
                    std::to_string(length) + ", and max_queued_tokens is " + std::to_string(config_.max_queued_tokens) +
                    "; try again later");

  std::ranges::sort(limits.stop_token_ids);
  const Order order{next_step_ + std::int64_t{priority} * config_.ageing_steps, next_sequence_};
  const PageKey root = RootKey({{KeyTag::kCacheSalt, salt}});
  RequestQueue entry;
  TokenSequence sequence(tokens, config_.page_size, root, config_.prefix_cache, config_.hash_bits);
  entry.emplace(order, nullptr);
  const auto [at, inserted] = requests_.try_emplace(
      id, Request{.id = id,
                  .order = order,
                  .arrival = next_step_,
                  .limits = std::move(limits),
                  .total = static_cast<int>(total),
                  .state = bootstrap ? State(Bootstrapping{std::move(sequence)}) : Submitted{std::move(sequence)},
                  .queue_entry = {}});
  // Nothing below can fail.
  auto node = entry.extract(entry.begin());
  node.mapped() = &at->second;
  if (bootstrap) {
    at->second.queue_entry = std::move(node);
    ++parked_;
  } else {
    waiting_.insert(std::move(node));
  }
  ++next_sequence_;
  ++queued_requests_;
  queued_tokens_ += length;
}

template <class Event>
bool Scheduler::SendTo(RequestId id, Event event) noexcept {
  const auto at = requests_.find(id);
  return at != requests_.end() && Send(at->second, std::move(event)) != Outcome::kIgnored;
}

bool Scheduler::Abort(RequestId id) noexcept { return SendTo(id, event::Abort{}); }
bool Scheduler::Finish(RequestId id) noexcept { return SendTo(id, event::Finish{}); }
bool Scheduler::Retract(RequestId id) noexcept { return SendTo(id, event::Retract{}); }
bool Scheduler::Bootstrapped(RequestId id) noexcept { return SendTo(id, event::Bootstrapped{}); }
bool Scheduler::BootstrapFailed(RequestId id) noexcept { return SendTo(id, event::BootstrapFailed{}); }

void Scheduler::Relist(Request& request, Place before, Place after) noexcept {
  switch (before) {
    case Place::kParked:
      --parked_;
      break;
    case Place::kWaiting:
      request.queue_entry = waiting_.extract(request.order);
      break;
    case Place::kRunning: {
      auto& running = GroupOf(request).running;
      running.erase(std::ranges::find(running, &request));
      break;
    }
    case Place::kLeaving:
      request.queue_entry = GroupOf(request).leaving.extract(request.order);
      break;
    case Place::kLingering:
      --lingering_;
      break;
    case Place::kGone:
      break;
  }
  if (before == Place::kRunning && (after == Place::kWaiting || std::holds_alternative<Retracting>(request.state)))
    ++retractions_;
  if (request.group >= 0) ++GroupOf(request).epoch;
  switch (after) {
    case Place::kParked:
      ++parked_;
      break;
    case Place::kWaiting:
      waiting_.insert(std::move(request.queue_entry));
      break;
    case Place::kRunning: {
      auto& running = GroupOf(request).running;
      const auto at = std::ranges::upper_bound(running, request.order, {}, [](const Request* r) { return r->order; });
      running.insert(at, &request);  // capacity: max_requests
      break;
    }
    case Place::kLeaving:
      GroupOf(request).leaving.insert(std::move(request.queue_entry));
      break;
    case Place::kLingering:
      ++lingering_;
      LeaveQueue(request);
      break;
    case Place::kGone:
      if (!request.admitted_before() && before != Place::kLingering) LeaveQueue(request);
      requests_.erase(request.id);
      break;
  }
}

void Scheduler::LeaveQueue(const Request& request) noexcept {
  --queued_requests_;
  queued_tokens_ -= request.prompt();
}

Scheduler::InFlight& Scheduler::Oldest(StepId step) {
  if (flights_out_ == 0) throw std::invalid_argument("step " + std::to_string(step) + " is not in flight; no step is");
  InFlight& flight = flights_[static_cast<std::size_t>(oldest_flight_)];
  if (flight.step != step)
    throw std::invalid_argument("step " + std::to_string(step) +
                                " cannot return now; steps return in order, and step " + std::to_string(flight.step) +
                                " is the oldest in flight");
  return flight;
}

void Scheduler::Retire() noexcept {
  const StepId step = flights_[static_cast<std::size_t>(oldest_flight_)].step;
  for (auto& group : groups_) {
    group->pool.Release(step);
    group->window_pool.Release(step);
  }
  oldest_flight_ = (oldest_flight_ + 1) % static_cast<int>(flights_.size());
  --flights_out_;
}

void Scheduler::Advance(StepId step, std::span<const Token> tokens, std::vector<Output>& outputs) {
  const InFlight& flight = Oldest(step);
  if (tokens.size() != flight.chosen.size())
    throw std::invalid_argument("step " + std::to_string(step) + " returned " + std::to_string(tokens.size()) +
                                " tokens; its plan has dp * rows = " + std::to_string(flight.chosen.size()));
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (flight.chosen[i].samples && tokens[i] < 0)
      throw std::invalid_argument("step " + std::to_string(step) + " returned token " + std::to_string(tokens[i]) +
                                  " in row " + std::to_string(i) + "; token ids are 0 or more");
  outputs.clear();
  outputs.reserve(tokens.size());
  // Nothing below can fail.
  for (std::size_t i = 0; i < tokens.size(); ++i)
    if (flight.chosen[i].request != nullptr) AdvanceRow(flight.chosen[i], tokens[i], outputs);
  Retire();
}

void Scheduler::AdvanceRow(const Chosen& row, Token token, std::vector<Output>& outputs) noexcept {
  Request& request = *row.request;  // a request outlives every step that carries it
  const auto* retracting = std::get_if<Retracting>(&request.state);
  const bool wanted =
      row.samples && !std::holds_alternative<Aborting>(request.state) && !(retracting != nullptr && retracting->lost);
  Send(request, event::Advance{.tokens = row.tokens,
                               .sampled = row.samples ? std::optional(token) : std::nullopt,
                               .page_size = config_.page_size,
                               .reader = flights_out_ > 1 ? LastInFlight() : -1});
  if (!wanted) return;
  const int count = TokensOf(request.state)->outputs();
  FinishReason reason = FinishReason::kNone;
  if (request.limits.Stops(token, count)) {
    reason = FinishReason::kStop;
  } else if (count == request.limits.max_new_tokens) {
    reason = FinishReason::kLength;
  }
  outputs.push_back({request.id, token, reason, request.cached, count});
  if (reason != FinishReason::kNone) Send(request, event::Finish{});
}

void Scheduler::Fail(StepId step) {
  const InFlight& flight = Oldest(step);
  for (const Chosen& row : flight.chosen)
    if (row.request != nullptr) Send(*row.request, event::StepFailed{});
  Retire();
}

int Scheduler::FlushCache(Tier tier) noexcept {
  int pages = 0;
  for (auto& group : groups_) {
    if (tier != Tier::kHost) pages += group->cache.Flush();
    if (tier != Tier::kDevice) pages += group->host_cache.Flush();
  }
  return pages;
}

int Scheduler::CachedPrefix(std::span<const Token> tokens, std::string_view salt) const {
  if (!config_.prefix_cache || tokens.empty()) return 0;
  const TokenSequence sequence(tokens, config_.page_size, RootKey({{KeyTag::kCacheSalt, salt}}), true,
                               config_.hash_bits);
  std::vector<PageId> path;
  std::size_t pages = 0;
  const auto keys = sequence.keys().first(static_cast<std::size_t>(sequence.reusable_pages()));
  for (const auto& group : groups_) {
    group->cache.Match(keys, tokens, path);
    group->cache.Resumable(path);
    pages = std::max(pages, path.size());
    group->host_cache.Match(keys, tokens, path);
    group->host_cache.Resumable(path);
    pages = std::max(pages, path.size());
  }
  return static_cast<int>(pages) * config_.page_size;
}

Stats Scheduler::stats() const noexcept {
  Stats stats{.waiting = static_cast<int>(waiting_.size()) + parked_,
              .leaving = lingering_,
              .in_flight = flights_out_,
              .queued_tokens = queued_tokens_,
              .prefix_query_tokens = prefix_query_tokens_,
              .prefix_hit_tokens = hit_device_ + hit_host_ + hit_storage_,
              .hit_tokens_device = hit_device_,
              .hit_tokens_host = hit_host_,
              .hit_tokens_storage = hit_storage_,
              .transfers = transfers_,
              .moved_pages = moved_pages_,
              .missing_pages = missing_pages_,
              .retractions = retractions_,
              .queue_age_steps = waiting_.empty() ? 0 : next_step_ - waiting_.begin()->second->arrival,
              .decode_skips = decode_skips_,
              .decode_stall_tokens = decode_stall_,
              .steps = next_step_,
              .step_tokens = step_tokens_};
  for (const auto& group : groups_) {
    stats.running += static_cast<int>(group->running.size());
    stats.leaving += static_cast<int>(group->leaving.size());
    stats.kv_pages_total += group->pool.total();
    stats.kv_pages_free += group->pool.free();
    stats.kv_pages_cached += group->cache.cached();
    stats.kv_pages_evictable += group->cache.evictable();
    stats.window_pages_total += group->window_pool.total();
    stats.window_pages_free += group->window_pool.free();
    stats.window_pages_idle += group->cache.window().idle();
    stats.evicted_pages += group->cache.evicted_total();
    stats.host_pages_total += group->host_pool.total();
    stats.host_pages_free += group->host_pool.free();
    stats.host_pages_cached += group->host_cache.cached();
    stats.host_pages_pinned += group->host_pool.total() - group->host_available();
    stats.host_evicted_pages += group->host_cache.evicted_total();
  }
  return stats;
}

std::vector<RequestInfo> Scheduler::Snapshot() const {
  std::vector<const Request*> ordered;
  ordered.reserve(requests_.size());
  for (const auto& [id, request] : requests_) ordered.push_back(&request);
  std::ranges::sort(ordered, {}, [](const Request* request) { return request->order; });
  std::vector<RequestInfo> infos;
  infos.reserve(ordered.size());
  for (const Request* request : ordered) {
    const TokenSequence* tokens = TokensOf(request->state);
    const Run* run = RunOf(request->state);
    infos.push_back({request->id, NameOf(request->state), run ? run->computed : 0, tokens ? tokens->size() : 0,
                     tokens ? tokens->outputs() : 0, run ? run->kv.pages() : 0, request->group,
                     run ? run->in_flight : 0, run ? run->kv.window_pages() - run->kv.first_seen() : 0,
                     HostPagesOf(request->state), static_cast<int>(std::ranges::count(out_, request, &Out::request)),
                     next_step_ - request->arrival});
  }
  return infos;
}

}  // namespace tokenspeed
