// The chosen requests as arrays. Rows keep their place from plan to plan as far as they can, so that a table row is
// extended in place; once the memory is there nothing can fail, and the events that record the plan are sent last.
#include <algorithm>
#include <bit>
#include <utility>

#include "scheduler.h"

namespace tokenspeed {
namespace {

// The load-back whose pages the request's first step reads, if it has not ended.
const Ticket* Reads(const Chosen& chosen) noexcept {
  const Run& run = *RunOf(chosen.request->state);
  return run.fresh && run.load ? &*run.load : nullptr;
}

}  // namespace

Plan Scheduler::Emit() {
  int tokens = 0;
  for (auto& group : groups_) tokens = std::max(tokens, config_.budget() - group->tokens_left);
  const int bucket = config_.BucketFor(tokens);
  int loads = 0;
  for (const auto& group : groups_)
    for (const Chosen& chosen : group->chosen) loads += Reads(chosen) != nullptr;
  const PlanShape shape{config_.dp,   bucket, std::min(bucket, config_.max_requests),
                        TableWidth(), loads,  config_.windowed()};
  const std::shared_ptr<PlanBuffer> buffer = plans_.Acquire(shape.width);
  InFlight& record = flights_[static_cast<std::size_t>(oldest_flight_ + flights_out_) % flights_.size()];
  record.chosen.assign(shape.requests(), {});
  row_digests_.assign(shape.requests() * static_cast<std::size_t>(1 + shape.windows), 0);
  // Nothing below can fail.
  Plan plan(buffer, next_step_, shape);
  auto load = plan.arrays().loads.begin();
  for (const auto& group : groups_)
    for (const Chosen& chosen : group->chosen)
      if (const Ticket* ticket = Reads(chosen)) *load++ = ticket->id;
  for (std::size_t g = 0; g < groups_.size(); ++g) EmitGroup(g, *buffer, shape, plan.arrays(), record);
  plan.Seal(row_digests_);
  record.step = next_step_++;
  ++flights_out_;
  return plan;
}

// Columns of the tables: what this step needs, rounded up so that it changes seldom (in steps of an eighth), and given
// back only when half of it would do. Depends on the requests alone, never on which buffers are in use.
int Scheduler::TableWidth() noexcept {
  unsigned needed = 1;
  for (const auto& group : groups_)
    for (const Chosen& chosen : group->chosen)
      needed = std::max(needed, static_cast<unsigned>(RunOf(chosen.request->state)->kv.pages()));
  const unsigned grain = std::max(8U, std::bit_floor(needed) / 8);
  const int rounded = static_cast<int>((needed + grain - 1) / grain * grain);
  const int target = std::min(rounded, PagesFor(config_.max_seq_len, config_.page_size));
  if (target > width_ || 2 * target <= width_) width_ = target;
  return width_;
}

// Orders the group's chosen requests by row: one that had a row below the count keeps it (the older one, where a
// request that sat out the last plans comes back for a row that was given away), the others fill the gaps.
void Scheduler::Arrange(HomeGroup& group) noexcept {
  auto& arranged = group.arranged;
  const auto count = group.chosen.size();
  arranged.assign(count, {});
  for (const Chosen& chosen : group.chosen) {
    const auto row = static_cast<std::size_t>(chosen.request->row);  // -1 wraps to a huge value
    if (row < count && arranged[row].request == nullptr) arranged[row] = chosen;
  }
  std::size_t gap = 0;
  for (const Chosen& chosen : group.chosen) {
    const auto row = static_cast<std::size_t>(chosen.request->row);
    if (row < count && arranged[row].request == chosen.request) continue;
    while (arranged[gap].request != nullptr) ++gap;
    arranged[gap] = chosen;
    chosen.request->row = static_cast<int>(gap);
  }
}

// The state slot that keeps the state at `end` tokens, where a page ends there and a snapshot can be had; else -1.
int Scheduler::SaveState(HomeGroup& group, Run& run, int end) const noexcept {
  if (config_.state_snapshots == 0 || !config_.prefix_cache || end % config_.page_size != 0 || run.snapshot.held())
    return -1;
  if (run.latest > 0 && group.cache.snapshots().free() == 0) {  // it replaces its own, not another request's
    run.kv.Forget(run.latest);
    run.latest = 0;
  }
  run.snapshot = group.cache.snapshots().Take();
  run.snapshot_at = end;
  return run.snapshot.held() ? config_.max_requests + run.snapshot.index() : -1;
}

void Scheduler::EmitGroup(std::size_t index, PlanBuffer& buffer, const PlanShape& shape, const PlanArrays& arrays,
                          InFlight& record) noexcept {
  HomeGroup& group = *groups_[index];
  Arrange(group);
  const std::size_t row_base = index * static_cast<std::size_t>(shape.rows);
  const std::size_t token_base = index * static_cast<std::size_t>(shape.bucket);
  const std::size_t rows = group.arranged.size();
  std::size_t token = token_base;
  for (std::size_t i = 0; i < rows; ++i) {
    const Chosen& chosen = group.arranged[i];
    Request& request = *chosen.request;
    Run& run = *RunOf(request.state);
    const std::size_t row = row_base + i;
    for (int pos = run.planned; pos < run.planned + chosen.tokens; ++pos, ++token) {
      arrays.ids[token] = pos < run.tokens.size() ? run.tokens[pos] : -(run.slot.index() + 1);
      arrays.pos[token] = pos;
      const auto page = static_cast<std::size_t>(pos / config_.page_size);
      const int offset = pos % config_.page_size;
      arrays.slot[token] = run.kv.table()[page] * config_.page_size + offset;
      if (shape.windows > 0) arrays.window_slot[token] = run.kv.window_table()[page] * config_.page_size + offset;
      arrays.row[token] = static_cast<std::int32_t>(i);
    }
    arrays.request_ids[row] = request.id;
    arrays.request_slots[row] = run.slot.index();
    arrays.last[row] = chosen.samples ? static_cast<std::int32_t>(token - token_base) - 1 : -1;
    arrays.out_pos[row] = chosen.samples ? run.planned + chosen.tokens : -1;
    arrays.new_rows[row] = run.fresh;
    arrays.load_state[row] = run.fresh && run.resumed >= 0 ? config_.max_requests + run.resumed : -1;
    arrays.save_state[row] = SaveState(group, run, run.planned + chosen.tokens);
    buffer.WriteRow(PlanBuffer::Table::kFull, row, run.kv.content(), run.kv.table());
    row_digests_[row] = run.kv.digest();
    if (shape.windows > 0) {
      buffer.WriteRow(PlanBuffer::Table::kWindow, row, run.kv.content(), run.kv.window_table());
      row_digests_[shape.requests() + row] = run.kv.window_digest();
    }
    record.chosen[row] = chosen;
    Send(request, event::Schedule{chosen.tokens, chosen.samples});
  }
  arrays.num_rows[index] = static_cast<std::int32_t>(rows);
  arrays.num_tokens[index] = static_cast<std::int32_t>(token - token_base);
  step_tokens_ += static_cast<std::int64_t>(token - token_base);

  auto fill = [](auto array, std::size_t from, std::size_t to, int value) {
    std::fill(array.begin() + static_cast<std::ptrdiff_t>(from), array.begin() + static_cast<std::ptrdiff_t>(to),
              value);
  };
  const std::size_t token_end = token_base + static_cast<std::size_t>(shape.bucket);
  fill(arrays.ids, token, token_end, 0);
  for (auto array : {arrays.pos, arrays.slot, arrays.row}) fill(array, token, token_end, -1);
  if (shape.windows > 0) fill(arrays.window_slot, token, token_end, -1);
  const std::size_t first_hole = row_base + rows, row_end = row_base + static_cast<std::size_t>(shape.rows);
  fill(arrays.request_ids, first_hole, row_end, -1);
  for (auto array : {arrays.last, arrays.request_slots, arrays.out_pos, arrays.load_state, arrays.save_state})
    fill(array, first_hole, row_end, -1);
  fill(arrays.new_rows, first_hole, row_end, 0);
  for (std::size_t row = first_hole; row < row_end; ++row) {
    buffer.ClearRow(PlanBuffer::Table::kFull, row);
    if (shape.windows > 0) buffer.ClearRow(PlanBuffer::Table::kWindow, row);
  }
}

}  // namespace tokenspeed
