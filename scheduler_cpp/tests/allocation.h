// Replaced global operator new: counts allocations, and can make the n-th one fail. Only for the test program.
#pragma once

namespace tokenspeed::allocation {

long Count();                // since the program started
long Disarm();               // no failure from here on; what was left of the count, or -1
void FailAfter(long count);  // the allocation after `count` more throws std::bad_alloc, once; -1: none

}  // namespace tokenspeed::allocation
