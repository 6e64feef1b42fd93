// The scheduler as a whole: no allocation in a steady step, nothing lost when any one allocation fails, the checker
// itself, and a seeded long run.
#include "scheduler.h"

#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <random>
#include <string>
#include <thread>

#include "allocation.h"

namespace tokenspeed {
namespace {

Config Small() {
  return {.page_size = 2,
          .num_pages = 12,
          .max_requests = 4,
          .token_buckets = {1, 2, 4, 8},
          .max_seq_len = 24,
          .max_in_flight = 2};
}

std::vector<Token> Prompt(int length, Token first = 0) {
  std::vector<Token> prompt(static_cast<std::size_t>(length));
  for (int i = 0; i < length; ++i) prompt[static_cast<std::size_t>(i)] = (first + i * i) % 7;
  return prompt;
}

TEST(Scheduler, ASteadyDecodeStepAllocatesNothing) {
  for (int dp : {1, 2}) {
    Config config{
        .page_size = 4, .num_pages = 400, .max_requests = 8, .token_buckets = {8, 2048}, .max_seq_len = 192, .dp = dp};
    Scheduler scheduler(config);
    for (int i = 0; i < 8 * dp; ++i) scheduler.Submit(i, Prompt(164, i), {.max_new_tokens = 28}, 0, std::to_string(i));
    std::vector<Output> outputs;
    const std::vector<Token> tokens(static_cast<std::size_t>(8 * dp), 3);
    long before = 0;
    for (int step = 0; step < 24; ++step) {
      if (step == 4) before = allocation::Count();
      const auto plan = scheduler.NextPlan();
      ASSERT_TRUE(plan);
      scheduler.Advance(plan->step(), tokens, outputs);
      ASSERT_EQ(outputs.size(), tokens.size());
    }
    // Meanwhile every request filled five pages: drawn, hashed, committed, and written to the block tables.
    EXPECT_EQ(allocation::Count() - before, 0);
  }
}

// Runs a fixed script in which allocation number `fail_at` fails; the caller retries the call that threw, as an engine
// would. Returns false once the script runs through without reaching that allocation.
bool SurvivesFailureAt(long fail_at) {
  Scheduler scheduler(Small());
  std::vector<Output> outputs;
  struct Flight {
    StepId step;
    std::size_t rows;
  };
  std::array<Flight, 2> flights{};  // a plan that was made must not be forgotten, so no allocation here
  std::size_t out = 0;
  std::size_t sampled = 0;
  allocation::FailOnce failure(fail_at);
  auto call = [&](auto&& f) { failure.Call(f, [&] { scheduler.Check(); }); };
  for (int i = 0; i < 5; ++i) {
    call([&] {
      const auto tokens = Prompt(3 + i, i / 2);
      if (scheduler.stats().waiting + scheduler.stats().running == i)
        scheduler.Submit(i, tokens, {.max_new_tokens = 8}, 0, "");
    });
  }
  for (int turn = 0; turn < 400; ++turn) {
    bool planned = false;
    call([&] {
      if (auto plan = scheduler.NextPlan()) {
        planned = true;
        flights[out++] = {plan->step(), plan->shape().requests()};
      }
    });
    if (turn == 3) scheduler.Retract(1);
    if (out == 0) break;
    if (out == 2 || !planned) {
      call([&] {
        const std::vector<Token> tokens(flights[0].rows, turn % 3);
        scheduler.Advance(flights[0].step, tokens, outputs);
        sampled += outputs.size();
      });
      flights[0] = flights[1];
      --out;
    }
    scheduler.Check();
  }
  EXPECT_EQ(sampled, 5U * 8U) << "allocation " << fail_at;
  EXPECT_TRUE(scheduler.Snapshot().empty());
  scheduler.FlushCache();
  EXPECT_EQ(scheduler.stats().kv_pages_free, 12);
  return failure.failed();
}

TEST(Scheduler, SurvivesTheFailureOfAnyAllocation) {
  long survived = 0;
  while (SurvivesFailureAt(survived)) ++survived;
  EXPECT_GT(survived, 50);
}

TEST(Scheduler, RefusesWithoutChange) {
  Scheduler scheduler(Small());
  EXPECT_THROW(scheduler.Submit(0, Prompt(20), {.max_new_tokens = 6}, 0, ""), std::invalid_argument);
  EXPECT_THROW(scheduler.Submit(0, {}, {.max_new_tokens = 6}, 0, ""), std::invalid_argument);
  EXPECT_EQ(scheduler.stats().waiting, 0);
  std::vector<Output> outputs;
  EXPECT_THROW(scheduler.Advance(0, {}, outputs), std::invalid_argument);
  EXPECT_THROW(scheduler.Fail(0), std::invalid_argument);
  scheduler.Check();
}

TEST(Scheduler, CanBeDestroyedAtAnyMoment) {
  // The pools' destructors check that every page and slot came home.
  for (int turns = 0; turns < 12; ++turns) {
    Scheduler scheduler(Small());
    for (int i = 0; i < 5; ++i) scheduler.Submit(i, Prompt(4, i), {.max_new_tokens = 6}, 0, "");
    std::vector<Output> outputs;
    std::deque<Plan> plans;
    for (int turn = 0; turn < turns; ++turn) {
      if (auto plan = scheduler.NextPlan()) plans.push_back(std::move(*plan));
      if (plans.size() < 2) continue;
      scheduler.Advance(plans.front().step(), std::vector<Token>(plans.front().shape().requests()), outputs);
      plans.pop_front();
    }
    scheduler.Abort(1);
    scheduler.Retract(0);
  }
}

TEST(Scheduler, PlansMayDieOnAnotherThread) {
  // A worker that reads a plan and drops it late; the scheduler must not write into the buffer meanwhile (TSan sees
  // it).
  Scheduler scheduler(Small());
  for (int i = 0; i < 4; ++i) scheduler.Submit(i, Prompt(4, i), {.max_new_tokens = 18}, 0, "");
  std::vector<Output> outputs;
  std::deque<std::jthread> readers;
  while (auto plan = scheduler.NextPlan()) {
    const StepId step = plan->step();
    const std::vector<Token> tokens(plan->shape().requests(), 2);
    readers.emplace_back([plan = std::move(*plan)] {
      std::vector<std::byte> packed(plan.packed_size());
      plan.Pack(packed);
      EXPECT_EQ(Plan::Unpack(packed).digest(), plan.digest());
    });
    scheduler.Advance(step, tokens, outputs);
    if (readers.size() > 3) readers.pop_front();
  }
  EXPECT_TRUE(scheduler.Snapshot().empty());
}

TEST(Scheduler, SeededLongRun) {
  std::mt19937 random(11);
  auto chance = [&](unsigned percent) { return random() % 100 < percent; };
  for (int round = 0; round < 12; ++round) {
    Config config = Small();
    config.page_size = 1 << (round % 3);
    config.num_pages = 24 / config.page_size;
    config.dp = 1 + round % 2;
    config.max_in_flight = 1 + round / 2 % 2;
    config.prefill_chunk = round % 4 == 3 ? 1 : 0;
    config.prefix_cache = round % 5 != 4;
    config.state_snapshots = round % 4 == 1 ? 1 + round % 3 : 0;
    Scheduler scheduler(config);
    std::deque<Plan> plans;
    std::vector<Output> outputs;
    RequestId next = 0;
    auto any = [&] { return static_cast<RequestId>(random() % static_cast<unsigned>(next + 1)); };
    for (int turn = 0; turn < 3'000; ++turn) {
      if (chance(40) && scheduler.stats().waiting < 20) {
        const int length = 1 + static_cast<int>(random() % 12);
        const int most = 24 - length;
        scheduler.Submit(
            next++, Prompt(length, static_cast<Token>(random() % 3)),
            {.max_new_tokens = 1 + static_cast<int>(random() % static_cast<unsigned>(most)), .stop_token_ids = {6}},
            static_cast<int>(random() % 3) - 1, chance(20) ? "x" : "");
      }
      if (chance(4)) scheduler.Abort(any());
      if (chance(4)) scheduler.Finish(any());
      if (chance(4)) scheduler.Retract(any());
      if (chance(1)) scheduler.FlushCache();
      if (auto plan = scheduler.NextPlan()) plans.push_back(std::move(*plan));
      if (!plans.empty() && chance(70)) {
        const Plan& plan = plans.front();
        std::vector<Token> tokens(plan.shape().requests());
        for (Token& token : tokens) token = static_cast<Token>(random() % 7);
        if (chance(4)) {
          scheduler.Fail(plan.step());
        } else {
          scheduler.Advance(plan.step(), tokens, outputs);
        }
        plans.pop_front();
      }
      if (turn % 8 == 0) {
        ASSERT_NO_THROW(scheduler.Check()) << "round " << round << ", turn " << turn;
      }
    }
  }
}

}  // namespace
}  // namespace tokenspeed
