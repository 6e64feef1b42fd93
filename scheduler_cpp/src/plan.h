// One step's work as flat arrays: what to compute, where its KV goes, what to sample. A plan owns one allocation that
// nobody else writes while it lives; the scheduler recycles allocations (see plan_pool.h), so that a table is carried
// from step to step and only its changes are written.
//
// A plan has `dp` home blocks of `bucket` token rows and `rows` request rows; the tokens of a request row are adjacent
// and in order, and the valid rows come first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "types.h"

namespace tokenspeed {

struct PlanShape {
  int dp = 0;
  int bucket = 0;   // t: token rows a home block
  int rows = 0;     // s: request rows a home block
  int width = 0;    // columns of the table
  int loads = 0;    // load-backs that the step reads
  int windows = 0;  // 1: windowed layers have a table of their own

  std::size_t tokens() const noexcept { return static_cast<std::size_t>(dp) * static_cast<std::size_t>(bucket); }
  std::size_t requests() const noexcept { return static_cast<std::size_t>(dp) * static_cast<std::size_t>(rows); }
  std::size_t cells() const noexcept { return requests() * static_cast<std::size_t>(width); }
};

// All arrays of a plan. T = dp * bucket, S = dp * rows; row indices count within the home block. Those of the window
// group are empty where there is none; their table's columns before what a row's tokens see name pages that are safe to
// read.
struct PlanArrays {
  std::span<std::int64_t> request_ids;    // [S] -1: hole
  std::span<std::int64_t> loads;          // [loads] tickets of the load-backs whose pages the step reads
  std::span<std::int32_t> ids;            // [T] token id; -(slot + 1): the token last sampled for that slot; 0: hole
  std::span<std::int32_t> pos;            // [T] position in the sequence; -1: hole
  std::span<std::int32_t> slot;           // [T] KV slot, page * page_size + offset; -1: hole
  std::span<std::int32_t> window_slot;    // [T] as `slot`, of windowed layers
  std::span<std::int32_t> row;            // [T] request row; -1: hole
  std::span<std::int32_t> last;           // [S] token row whose output samples the next token; -1: none
  std::span<std::int32_t> request_slots;  // [S] slot of the sampling state; -1: hole
  std::span<std::int32_t> out_pos;        // [S] position of the token that is sampled; -1: none
  std::span<std::int32_t> load_state;     // [S] state slot to copy into the request's before the step; -1: none
  std::span<std::int32_t> save_state;     // [S] state slot to copy the request's into behind the step; -1: none
  std::span<std::int32_t> num_tokens;     // [dp] valid token rows
  std::span<std::int32_t> num_rows;       // [dp] valid request rows
  std::span<std::int32_t> table;          // [S, width] page ids; -1: none
  std::span<std::int32_t> window_table;   // [S, width] as `table`, of windowed layers
  std::span<std::uint8_t> new_rows;       // [S] 1: admitted with this plan

  // Calls `visit(array)` for each array but the tables, in the order of the packed form.
  template <class F>
  void ForEachButTables(F&& visit) const {
    visit(request_ids), visit(loads), visit(ids), visit(pos), visit(slot), visit(window_slot), visit(row), visit(last),
        visit(request_slots);
    visit(out_pos), visit(load_state), visit(save_state), visit(num_tokens), visit(num_rows), visit(new_rows);
  }
};

// The memory of plans, one at a time: regions sized for the largest bucket, so an array never moves as the shape
// varies.
class PlanBuffer {
 public:
  PlanBuffer(int dp, int max_bucket, int max_rows, int width, int windows);

  // The arrays of a plan of this shape; its width must be `width()`.
  PlanArrays Arrays(const PlanShape& shape) const noexcept;
  int width() const noexcept { return width_; }

  // What each row of a table (by its index over all home blocks) holds, so that the next plan writes only what differs.
  struct RowTag {
    std::uint64_t content = 0;  // Residency::content(); 0: the row is all -1
    int filled = 0;             // columns that are not -1
  };
  enum class Table { kFull, kWindow };
  // Makes row `index` hold `pages` then -1. `content` names the pages; equal names with more pages are an append.
  void WriteRow(Table table, std::size_t index, std::uint64_t content, std::span<const PageId> pages) noexcept;
  void ClearRow(Table table, std::size_t index) noexcept { WriteRow(table, index, 0, {}); }

  std::atomic<bool> in_use = false;

 private:
  std::size_t max_tokens_, max_requests_;
  std::size_t dp_;
  int width_;
  int windows_;
  std::unique_ptr<std::byte[]> bytes_;
  std::unique_ptr<RowTag[]> tags_;
};

class Plan {
 public:
  // Takes `buffer` for itself until destruction. The caller fills the arrays and then calls `Seal`.
  Plan(std::shared_ptr<PlanBuffer> buffer, StepId step, const PlanShape& shape) noexcept;
  Plan(Plan&& other) noexcept = default;
  Plan& operator=(Plan&& other) = delete;
  ~Plan() {
    if (buffer_) buffer_->in_use.store(false, std::memory_order_release);
  }

  StepId step() const noexcept { return step_; }
  const PlanShape& shape() const noexcept { return shape_; }
  const PlanArrays& arrays() const noexcept { return arrays_; }
  std::uint64_t digest() const noexcept { return digest_; }

  // Computes the digest; `row_digests` [S * (1 + windows)] are the RowDigests of the tables' rows.
  void Seal(std::span<const std::uint64_t> row_digests) noexcept;

  // The packed form: a header, then every array without gaps, the tables last. Little endian, for processes of one
  // host.
  std::size_t packed_size() const noexcept;
  // Throws std::invalid_argument when `out` is smaller than packed_size().
  void Pack(std::span<std::byte> out) const;
  // Copies and verifies; trailing bytes are allowed (a shared-memory ring's slot). Throws std::invalid_argument.
  static Plan Unpack(std::span<const std::byte> bytes);

 private:
  std::uint64_t DigestWith(std::span<const std::uint64_t> row_digests) const noexcept;

  std::shared_ptr<PlanBuffer> buffer_;
  StepId step_;
  PlanShape shape_;
  PlanArrays arrays_;
  std::uint64_t digest_ = 0;
};

}  // namespace tokenspeed
