// Properties of the event x state table as a whole, and of what a transition does with resources.
#include "fsm.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

namespace tokenspeed {
namespace {

constexpr int kPageSize = 2;

class Fsm : public ::testing::Test {
 protected:
  TokenSequence Tokens() const {
    static constexpr Token kPrompt[] = {1, 2, 3};
    TokenSequence tokens(kPrompt, kPageSize, RootKey({}), true);
    tokens.Reserve(16);
    return tokens;
  }
  event::Admit Admission() {
    Residency kv(pool_, cache_, ids_, {}, 8);
    for (int i = 0; i < 2; ++i) kv.Append(pool_.Take());
    return {std::move(kv), slots_.Take(), 0};
  }
  State Running() {
    State state = Submitted{Tokens()};
    Apply(state, Admission());
    return state;
  }
  bool AllHome() const { return pool_.free() + cache_.evictable() == pool_.total() && slots_.free() == slots_.total(); }

  PagePool pool_{8};
  PrefixCache cache_{pool_, kPageSize};
  SlotPool slots_{2};
  ContentIds ids_;
};

TEST_F(Fsm, EveryPairIsInTheTableOnce) {
  std::set<std::pair<std::string_view, std::string_view>> pairs;
  for (const TableCell& cell : TransitionTable()) {
    EXPECT_TRUE(pairs.emplace(cell.event, cell.from).second);
    EXPECT_NE(cell.ignored, cell.stays || !cell.to.empty());
  }
  EXPECT_EQ(pairs.size(), std::tuple_size_v<Events> * std::variant_size_v<State>);
}

TEST_F(Fsm, EveryStateIsReachedAndOnlyFinishedIsTheEnd) {
  std::map<std::string_view, std::set<std::string_view>> next;
  for (const TableCell& cell : TransitionTable()) next[cell.from].insert(cell.to.begin(), cell.to.end());
  std::set<std::string_view> reached{"Submitted", "Bootstrapping"};
  for (std::size_t before = 0; before != reached.size();) {
    before = reached.size();
    for (std::string_view from : std::set(reached)) reached.insert(next[from].begin(), next[from].end());
  }
  EXPECT_EQ(reached.size(), std::variant_size_v<State>);
  for (const auto& [from, to] : next) EXPECT_EQ(to.empty(), from == "Finished") << from;
}

TEST_F(Fsm, AbortAndFinishLeadOutOfEveryState) {
  for (const TableCell& cell : TransitionTable()) {
    if (cell.event != "Abort" && cell.event != "Finish") continue;
    if (std::set<std::string_view>{"Aborting", "Draining", "WritingBack", "Finished"}.contains(cell.from)) {
      EXPECT_TRUE(cell.ignored);
      continue;
    }
    EXPECT_FALSE(cell.stays);
    for (std::string_view to : cell.to)
      EXPECT_TRUE(to == "Aborting" || to == "Draining" || to == "WritingBack" || to == "Finished");
  }
}

TEST_F(Fsm, ResourcesOfAnIgnoredEventGoBack) {
  {
    State state = Running();
    EXPECT_EQ(Apply(state, Admission()), Outcome::kIgnored);
    EXPECT_EQ(pool_.free(), 6);
    EXPECT_EQ(slots_.free(), 1);
  }
  EXPECT_TRUE(AllHome());
}

TEST_F(Fsm, ALife) {
  State state = Running();
  EXPECT_EQ(NameOf(state), "Prefilling");
  Apply(state, event::Schedule{2, false});
  Apply(state, event::Schedule{1, true});
  Apply(state, event::Schedule{1, true});  // optimistic: its input is being sampled
  EXPECT_EQ(Apply(state, event::Advance{2, {}, kPageSize}), Outcome::kStayed);
  EXPECT_EQ(cache_.cached(), 1);  // the page is full and computed
  EXPECT_EQ(Apply(state, event::Advance{1, 7, kPageSize}), Outcome::kMoved);
  EXPECT_EQ(NameOf(state), "PrefillDone");
  Apply(state, event::Advance{1, 8, kPageSize});
  EXPECT_EQ(NameOf(state), "Decoding");
  EXPECT_EQ(cache_.cached(), 2);
  EXPECT_EQ(RunOf(state)->computed, 4);
  EXPECT_EQ(TokensOf(state)->outputs(), 2);
  Apply(state, event::Finish{});
  EXPECT_EQ(NameOf(state), "Finished");
  EXPECT_TRUE(AllHome());
}

TEST_F(Fsm, WhatAStepTouchesStaysUntilItReturns) {
  State state = Running();
  Apply(state, event::Schedule{3, true});
  Apply(state, event::Abort{});
  EXPECT_EQ(NameOf(state), "Aborting");
  EXPECT_FALSE(AllHome());
  EXPECT_EQ(Apply(state, event::Abort{}), Outcome::kIgnored);
  Apply(state, event::Advance{3, 7, kPageSize});
  EXPECT_EQ(NameOf(state), "Finished");
  EXPECT_TRUE(AllHome());
  EXPECT_EQ(cache_.cached(), 0);
}

TEST_F(Fsm, AFailureVoidsWhatWasPlannedOnTopOfIt) {
  State state = Running();
  Apply(state, event::Schedule{3, true});
  Apply(state, event::Schedule{1, true});
  Apply(state, event::StepFailed{});
  EXPECT_EQ(NameOf(state), "Retracting");
  Apply(state, event::Advance{1, 7, kPageSize});
  EXPECT_EQ(NameOf(state), "Retracted");
  EXPECT_EQ(TokensOf(state)->outputs(), 0);
  EXPECT_TRUE(AllHome());
}

TEST_F(Fsm, ARetractionKeepsTheTokensOfStepsInFlight) {
  State state = Running();
  Apply(state, event::Schedule{3, true});
  Apply(state, event::Retract{});
  EXPECT_EQ(Apply(state, event::Retract{}), Outcome::kIgnored);
  Apply(state, event::Advance{3, 7, kPageSize});
  EXPECT_EQ(NameOf(state), "Retracted");
  EXPECT_EQ(TokensOf(state)->outputs(), 1);
  EXPECT_TRUE(AllHome());
}

}  // namespace
}  // namespace tokenspeed
