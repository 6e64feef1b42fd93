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
  bool AllHome() const {
    return pool_.free() + cache_.evictable() == pool_.total() && slots_.free() == slots_.total() &&
           host_pool_.free() + host_cache_.evictable() == host_pool_.total();
  }

  // A decoding request on two tiers, with two pages computed.
  State Tiered() {
    State state = Submitted{Tokens()};
    event::Admit admission = Admission();
    admission.host = NodeRef(host_cache_);
    Apply(state, std::move(admission));
    Apply(state, event::Schedule{3, true});
    Apply(state, event::Advance{3, 7, kPageSize});
    Apply(state, event::Schedule{1, true});
    Apply(state, event::Advance{1, 8, kPageSize});
    return state;
  }
  // The ticket of a write-back of the first `pages` pages of the state's run.
  Ticket WriteBack(const State& state, int pages) {
    const auto& run = *RunOf(state);
    Ticket ticket{.id = 5, .pages = pages, .host = run.host.Another()};
    for (int i = 0; i < pages; ++i) {
      ticket.source.push_back(run.kv.table()[static_cast<std::size_t>(i)]);
      ticket.filling.push_back(host_pool_.Take());
      cache_.SetCopying(ticket.source.back(), true);
    }
    ticket.device = cache_.Pin(ticket.source.back());
    return ticket;
  }
  Outcome Answer(State& state, TicketId ticket, int pages) {
    return Apply(state, event::Transferred{ticket, pages, kPageSize, -1, &back_});
  }

  PagePool pool_{8};
  PrefixCache cache_{pool_, kPageSize};
  PagePool host_pool_{4};
  PrefixCache host_cache_{host_pool_, kPageSize};
  SlotPool slots_{2};
  ContentIds ids_;
  std::optional<Ticket> back_;
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

TEST_F(Fsm, AWriteBackOutlivesTheRunAndTheRestFollows) {
  State state = Tiered();
  Apply(state, event::WriteBack{WriteBack(state, 1)});
  Apply(state, event::Finish{});
  EXPECT_EQ(NameOf(state), "WritingBack");
  EXPECT_EQ(slots_.free(), slots_.total());  // only the copies hold something
  EXPECT_EQ(cache_.evictable(), 0);
  Answer(state, 5, 1);
  EXPECT_EQ(NameOf(state), "Draining");
  EXPECT_EQ(back_->host.depth(), 1);
  back_.reset();
  EXPECT_EQ(Apply(state, event::Abort{}), Outcome::kIgnored);
  Apply(state, event::GiveUp{});
  EXPECT_EQ(NameOf(state), "Finished");
  EXPECT_EQ(host_cache_.cached(), 1);
  EXPECT_TRUE(AllHome());
}

TEST_F(Fsm, AnAbortWaitsForTheWriteBackAlone) {
  State state = Tiered();
  Apply(state, event::WriteBack{WriteBack(state, 1)});
  Apply(state, event::Abort{});
  EXPECT_EQ(NameOf(state), "WritingBack");
  Answer(state, 5, 0);
  EXPECT_EQ(NameOf(state), "Finished");
  back_.reset();
  EXPECT_EQ(host_cache_.cached(), 0);
  EXPECT_TRUE(AllHome());
}

TEST_F(Fsm, ARetractionGoesToTheHostAndKeepsItsPlaceThere) {
  State state = Tiered();
  Apply(state, event::Retract{});
  EXPECT_EQ(NameOf(state), "Retracting");
  EXPECT_EQ(RunOf(state)->kv.pages(), 2);  // the tail went back at once
  Apply(state, event::WriteBack{WriteBack(state, 2)});
  EXPECT_EQ(Answer(state, 99, 2), Outcome::kStayed);  // another's ticket
  EXPECT_EQ(Answer(state, 5, 2), Outcome::kMoved);
  EXPECT_EQ(NameOf(state), "Retracted");
  back_.reset();
  EXPECT_EQ(cache_.evictable(), 2);
  EXPECT_EQ(host_cache_.evictable(), 0);
  Apply(state, event::Abort{});
  EXPECT_TRUE(AllHome());
}

TEST_F(Fsm, AShortLoadIsLostAndItsSourceForgotten) {
  {
    State other = Tiered();
    Apply(other, event::WriteBack{WriteBack(other, 2)});
    Answer(other, 5, 2);
  }
  const PageId deepest = back_->host.node();
  back_.reset();
  cache_.Flush();
  State state = Submitted{Tokens()};
  event::Admit admission = Admission();
  admission.reused = 2;
  admission.host = host_cache_.Pin(host_cache_.Parent(deepest));
  admission.load = Ticket{.id = 6, .kind = TransferKind::kLoadBack, .pages = 1, .host = admission.host.Another()};
  Apply(state, std::move(admission));
  Apply(state, event::Schedule{1, true});
  Apply(state, event::StepFailed{});
  EXPECT_EQ(NameOf(state), "Retracting");
  EXPECT_LT(pool_.free(), pool_.total());  // the load may still write
  Answer(state, 6, 0);
  EXPECT_EQ(NameOf(state), "Retracted");
  EXPECT_TRUE(std::get<Retracted>(state).distrust);
  EXPECT_EQ(pool_.free(), pool_.total());
  std::vector<PageId> path;
  const TokenSequence tokens = Tokens();
  host_cache_.Match(tokens.keys(), tokens.ids(), path);
  EXPECT_TRUE(path.empty());
  EXPECT_TRUE(AllHome());
}

TEST_F(Fsm, APrefetchHangsWhatCameBelowTheHostsPages) {
  State state = Bootstrapping{Tokens()};
  Apply(state, event::Bootstrapped{});
  Ticket ticket{.id = 7, .kind = TransferKind::kPrefetch, .pages = 1, .host = NodeRef(host_cache_)};
  ticket.filling.push_back(host_pool_.Take());
  Apply(state, event::Fetch{std::move(ticket)});
  EXPECT_EQ(NameOf(state), "Prefetching");
  EXPECT_EQ(Apply(state, event::Bootstrapped{}), Outcome::kIgnored);
  Answer(state, 7, 1);
  EXPECT_EQ(NameOf(state), "PrefetchDone");
  EXPECT_EQ(std::get<PrefetchDone>(state).host.depth(), 1);
  EXPECT_EQ(Answer(state, 7, 1), Outcome::kIgnored);
  EXPECT_EQ(host_cache_.evictable(), 0);
  Apply(state, event::Finish{});
  EXPECT_TRUE(AllHome());
}

}  // namespace
}  // namespace tokenspeed
