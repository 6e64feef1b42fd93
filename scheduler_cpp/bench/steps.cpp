// Allocations of a steady decode step, counted by a replaced operator new: 256 requests with 50,000-token contexts and
// pages of 16 tokens. `scheduler_steps shared|unshared|windowed|tiered STEPS` prints the mean over STEPS steps; in the
// tiered case the steps in which a transfer starts or ends are left out, as each of those is an object of its own.
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "../tests/allocation.h"
#include "scheduler.h"

using namespace tokenspeed;

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: scheduler_steps shared|unshared|windowed|tiered STEPS\n"), 2;
  constexpr int kRequests = 256, kContext = 50'000, kShared = 47'008, kGroups = 16;
  const std::string_view name = argv[1];
  const bool shared = name != "unshared";
  const Config config{.page_size = 16,
                      .num_pages = shared ? 100'000 : 1'000'000,
                      .max_requests = kRequests,
                      .token_buckets = {kRequests, 65'536},
                      .max_seq_len = 65'536,
                      .window = name == "windowed" ? 1024 : 0,
                      .window_pages = name == "windowed" ? 40'000 : 0,
                      .host_pages = name == "tiered" ? 100'000 : 0};
  Scheduler scheduler(config);
  for (int i = 0; i < kRequests; ++i) {
    std::vector<Token> prompt(kContext);
    for (int at = 0; at < kContext; ++at)
      prompt[static_cast<std::size_t>(at)] =
          (at * 7919 + (shared && at < kShared ? i % kGroups : kGroups + i) * 104'729) % 150'000;
    scheduler.Submit(i, prompt, {.max_new_tokens = 15'000}, 0, "");
  }
  std::vector<Output> outputs;
  std::vector<Token> tokens;
  long allocations = 0, counted = 0, most = std::atol(argv[2]);
  for (long step = 0; counted < most; ++step) {
    const long before = allocation::Count();
    const auto plan = scheduler.NextPlan();
    if (!plan) return std::fprintf(stderr, "no plan\n"), 1;
    const auto transfers = scheduler.Transfers();
    const bool decodes = plan->arrays().num_tokens[0] == kRequests && plan->shape().bucket == kRequests;
    const long planned = allocation::Count() - before;
    tokens.resize(plan->shape().requests());
    for (std::size_t i = 0; i < tokens.size(); ++i)
      tokens[i] = static_cast<Token>((step * 31 + static_cast<long>(i)) % 150'000);
    for (const Transfer& transfer : transfers)
      scheduler.Transferred(transfer.ticket, static_cast<int>(transfer.host.size()));
    const long middle = allocation::Count();
    scheduler.Advance(plan->step(), tokens, outputs);
    if (!decodes || !transfers.empty() || step < 64) continue;
    allocations += planned + allocation::Count() - middle;
    ++counted;
  }
  std::printf("%g\n", static_cast<double>(allocations) / static_cast<double>(counted));
}
