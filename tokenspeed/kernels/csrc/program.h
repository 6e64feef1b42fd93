// A recorded sequence of kernel calls, replayed without Python: the CPU's counterpart of a captured graph. While a
// thread records, its calls are stored and not run. Invariant: a replay makes exactly the recorded calls, in order, on
// the recorded addresses; whoever records keeps the memory behind them alive.
#pragma once
#include <memory>
#include <variant>
#include <vector>

#include "dispatch.h"
#include "types.h"

namespace ts {

using Call = std::variant<LinearArgs, LookupArgs, NormArgs, RopeArgs, PointwiseArgs, AppendArgs, AttendArgs, ConvArgs,
                          DeltaArgs, DecayArgs, L2NormArgs, GatedNormArgs, LogitsArgs, SampleArgs>;

class Program {
 public:
  void add(const Call& call) { calls_.push_back(call); }
  size_t size() const { return calls_.size(); }
  void run() const;

 private:
  std::vector<Call> calls_;
};

// Runs the call, or stores it where this thread records.
void submit(const Call& call);

// Starts recording on this thread; throws std::logic_error if it already does.
void begin_capture();
// Ends recording; throws std::logic_error if this thread does not record.
std::shared_ptr<Program> end_capture();

}  // namespace ts
