// Replaced global operator new: counts the calling thread's allocations, and can make the n-th one fail. Only for
// tests.
#pragma once

#include <new>

namespace tokenspeed::allocation {

long Count();                // since the thread started
long Disarm();               // no failure from here on; what was left of the count, or -1
void FailAfter(long count);  // the allocation after `count` more throws std::bad_alloc, once; -1: none

// The calls of a script, of which allocation number `at` fails: the call that meets it is made again, as an engine
// would.
class FailOnce {
 public:
  explicit FailOnce(long at) : left_(at) {}

  // Calls `f`; if it throws, `between` and `f` once more.
  template <class F, class Between>
  void Call(F&& f, Between&& between) {
    FailAfter(left_);
    try {
      f();
      left_ = Disarm();
    } catch (const std::bad_alloc&) {
      left_ = Disarm();
      failed_ = true;
      between();
      f();
    }
  }
  bool failed() const { return failed_; }

 private:
  long left_;
  bool failed_ = false;
};

}  // namespace tokenspeed::allocation
