// Replaced global operator new: counts the calling thread's allocations, and can make the n-th one fail. Only for
// tests.
#pragma once

namespace tokenspeed::allocation {

long Count();                // since the thread started
long Disarm();               // no failure from here on; what was left of the count, or -1
void FailAfter(long count);  // the allocation after `count` more throws std::bad_alloc, once; -1: none

}  // namespace tokenspeed::allocation
