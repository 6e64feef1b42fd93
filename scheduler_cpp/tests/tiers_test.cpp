// The tiers through the C++ interface: nothing is lost when any one allocation fails, and a seeded long run with late,
// short and duplicate answers (the sanitizers' food).
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <string>

#include "allocation.h"
#include "scheduler.h"

namespace tokenspeed {
namespace {

Config Small() {
  return {.page_size = 2,
          .num_pages = 12,
          .max_requests = 4,
          .token_buckets = {1, 2, 4, 8},
          .max_seq_len = 24,
          .max_in_flight = 2,
          .host_pages = 10,
          .storage = true,
          .write_back_pages = 1};
}

// With layers that see `window` tokens, and few pages of theirs beyond what is needed.
Config Windowed(Config config, int window, int spare) {
  config.window = window;
  config.window_pages = static_cast<int>(config.WindowPagesFor(1)) + spare;
  return config;
}

std::vector<Token> Prompt(int length, Token first = 0) {
  std::vector<Token> prompt(static_cast<std::size_t>(length));
  for (int i = 0; i < length; ++i) prompt[static_cast<std::size_t>(i)] = (first + i * i) % 7;
  return prompt;
}

void ExpectAllHome(Scheduler& scheduler) {
  EXPECT_TRUE(scheduler.Snapshot().empty());
  scheduler.FlushCache();
  const Stats stats = scheduler.stats();
  EXPECT_EQ(stats.kv_pages_free, stats.kv_pages_total);
  EXPECT_EQ(stats.window_pages_free, stats.window_pages_total);
  EXPECT_EQ(stats.host_pages_free, stats.host_pages_total);
}

// A fixed script in which allocation number `fail_at` fails; the caller retries the call that threw, as an engine
// would. Returns false once the script runs through without reaching that allocation.
bool SurvivesFailureAt(long fail_at, const Config& config) {
  Scheduler scheduler(config);
  std::vector<Output> outputs;
  struct Flight {
    StepId step;
    std::size_t rows;
  };
  std::vector<Flight> flights;
  std::vector<std::pair<TicketId, int>> out;
  flights.reserve(4);
  out.reserve(256);
  std::size_t sampled = 0;
  allocation::FailOnce failure(fail_at);
  auto call = [&](auto&& f) { failure.Call(f, [&] { scheduler.Check(); }); };
  for (int i = 0; i < 4; ++i)
    call([&] {
      const auto tokens = Prompt(3 + 2 * i, i / 2);
      if (scheduler.stats().waiting == i) scheduler.Submit(i, tokens, {.max_new_tokens = 8}, 0, "");
    });
  for (int turn = 0; turn < 400; ++turn) {
    bool planned = false;
    call([&] {
      if (planned) return;
      if (auto plan = scheduler.NextPlan()) {
        planned = true;
        flights.push_back({plan->step(), plan->shape().requests()});
      }
    });
    call([&] {
      for (const Transfer& transfer : scheduler.Transfers())
        out.emplace_back(transfer.ticket, static_cast<int>(transfer.host.size()));
    });
    scheduler.Check();
    if (turn % 5 == 3) scheduler.Retract(turn % 4);
    if (turn % 7 == 6) scheduler.FlushCache(Tier::kDevice);
    if (!out.empty() && turn % 3 != 1) {
      call([&] {
        if (out.empty()) return;
        const auto [ticket, pages] = out.front();
        EXPECT_TRUE(scheduler.Transferred(ticket, turn % 4 == 0 && turn < 300 ? pages / 2 : pages));
        out.erase(out.begin());
      });
    }
    if (flights.size() == 2 || (!planned && !flights.empty())) {
      call([&] {
        const std::vector<Token> tokens(flights[0].rows, turn % 3);
        scheduler.Advance(flights[0].step, tokens, outputs);
        sampled += outputs.size();
        flights.erase(flights.begin());
      });
    }
    scheduler.Check();
    if (scheduler.Snapshot().empty() && out.empty() && flights.empty() &&
        std::ranges::count(scheduler.stats().transfers, 0) == kTransferKinds)
      break;
  }
  EXPECT_EQ(sampled, 4U * 8U) << "allocation " << fail_at;
  ExpectAllHome(scheduler);
  return failure.failed();
}

TEST(Tiers, SurviveTheFailureOfAnyAllocation) {
  for (const Config& config : {Small(), Windowed(Small(), 3, 3)}) {
    long survived = 0;
    while (SurvivesFailureAt(survived, config)) ++survived;
    EXPECT_GT(survived, 100);
  }
}

TEST(Tiers, ASteadyDecodeStepThatMovesNothingAllocatesNothing) {
  Config config{.page_size = 4,
                .num_pages = 400,
                .max_requests = 8,
                .token_buckets = {8, 2048},
                .max_seq_len = 192,
                .host_pages = 400,
                .write_back_pages = 64};
  Scheduler scheduler(config);
  for (int i = 0; i < 8; ++i) scheduler.Submit(i, Prompt(164, i), {.max_new_tokens = 28}, 0, std::to_string(i));
  std::vector<Output> outputs;
  const std::vector<Token> tokens(8, 3);
  long before = 0;
  for (int step = 0; step < 24; ++step) {
    if (step == 4) before = allocation::Count();
    const auto plan = scheduler.NextPlan();
    ASSERT_TRUE(plan);
    for (const Transfer& transfer : scheduler.Transfers()) {
      ASSERT_LT(step, 2);
      scheduler.Transferred(transfer.ticket, static_cast<int>(transfer.host.size()));
    }
    scheduler.Advance(plan->step(), tokens, outputs);
  }
  EXPECT_EQ(allocation::Count() - before, 0);
}

TEST(Tiers, CanBeDestroyedWithTransfersOut) {
  for (int turns = 0; turns < 12; ++turns) {
    Scheduler scheduler(Small());
    for (int i = 0; i < 5; ++i) scheduler.Submit(i, Prompt(6, i), {.max_new_tokens = 6}, 0, "");
    std::vector<Output> outputs;
    for (int turn = 0; turn < turns; ++turn) {
      const auto plan = scheduler.NextPlan();
      for (const Transfer& transfer : scheduler.Transfers())
        if (transfer.kind == TransferKind::kPrefetch) scheduler.Transferred(transfer.ticket, turn % 2);
      if (plan && turn % 3 != 2)
        scheduler.Advance(plan->step(), std::vector<Token>(plan->shape().requests()), outputs);
      else if (plan)
        scheduler.Fail(plan->step());
    }
    scheduler.Abort(1);
    scheduler.Retract(0);
  }
}

TEST(Tiers, SeededLongRun) {
  std::mt19937 random(5);
  auto chance = [&](unsigned percent) { return random() % 100 < percent; };
  for (int round = 0; round < 12; ++round) {
    Config config = Small();
    config.page_size = 1 << (round % 3);
    config.num_pages = 24 / config.page_size;
    config.host_pages = (round % 4 == 3 ? 4 : 40) / config.page_size;
    config.storage = round % 3 != 2;
    config.dp = 1 + round % 2;
    config.max_in_flight = 1 + round / 2 % 2;
    config.prefill_chunk = round % 4 == 3 ? 1 : 0;
    config.write_back_pages = 1 + round % 5;
    if (round % 2 == 0) config = Windowed(config, 1 + round, round / 2);
    Scheduler scheduler(config);
    std::deque<std::pair<StepId, std::size_t>> flights;
    std::vector<std::pair<TicketId, int>> out;
    std::vector<Output> outputs;
    RequestId next = 0;
    auto any = [&] { return static_cast<RequestId>(random() % static_cast<unsigned>(next + 1)); };
    auto turn_of_all = [&](bool whole) {
      if (auto plan = scheduler.NextPlan()) flights.emplace_back(plan->step(), plan->shape().requests());
      for (const Transfer& transfer : scheduler.Transfers())
        out.emplace_back(transfer.ticket, static_cast<int>(transfer.host.size()));
      if (!out.empty() && (whole || chance(40))) {
        std::swap(out[random() % out.size()], out.back());
        const auto [ticket, pages] = out.back();
        out.pop_back();
        const bool kept = whole || chance(80);
        ASSERT_TRUE(
            scheduler.Transferred(ticket, kept ? pages : static_cast<int>(random() % static_cast<unsigned>(pages))));
        ASSERT_FALSE(scheduler.Transferred(ticket, pages));
      }
      if (!flights.empty() && (whole || chance(70))) {
        const auto [step, rows] = flights.front();
        std::vector<Token> tokens(rows);
        for (Token& token : tokens) token = static_cast<Token>(random() % 7);
        if (!whole && chance(4)) {
          scheduler.Fail(step);
        } else {
          scheduler.Advance(step, tokens, outputs);
        }
        flights.pop_front();
      }
    };
    for (int turn = 0; turn < 3'000; ++turn) {
      if (chance(40) && scheduler.stats().waiting < 20) {
        const int length = 1 + static_cast<int>(random() % 12);
        const int most = 24 - length;
        scheduler.Submit(
            next++, Prompt(length, static_cast<Token>(random() % 3)),
            {.max_new_tokens = 1 + static_cast<int>(random() % static_cast<unsigned>(most)), .stop_token_ids = {6}},
            static_cast<int>(random() % 3) - 1, chance(20) ? "x" : "", chance(5));
      }
      if (chance(4)) scheduler.Abort(any());
      if (chance(4)) scheduler.Finish(any());
      if (chance(4)) scheduler.Retract(any());
      if (chance(10)) scheduler.Bootstrapped(any());
      if (chance(2)) scheduler.BootstrapFailed(any());
      if (chance(2)) scheduler.FlushCache(chance(50) ? Tier::kDevice : Tier::kHost);
      turn_of_all(false);
      if (turn % 8 == 0) {
        ASSERT_NO_THROW(scheduler.Check()) << "round " << round << ", turn " << turn;
      }
    }
    for (RequestId id = 0; id < next; ++id) scheduler.BootstrapFailed(id);
    for (int turn = 0; turn < 2'000; ++turn) turn_of_all(true);
    ExpectAllHome(scheduler);
  }
}

}  // namespace
}  // namespace tokenspeed
