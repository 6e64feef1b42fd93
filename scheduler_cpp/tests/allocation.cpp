#include "allocation.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace tokenspeed::allocation {
namespace {
thread_local long count = 0;  // a thread counts, and fails, for itself
thread_local long fail_after = -1;
}  // namespace

long Count() { return count; }
long Disarm() { return std::exchange(fail_after, -1); }
void FailAfter(long after) { fail_after = after; }

void* Allocate(std::size_t bytes) {
  ++count;
  if (fail_after >= 0 && fail_after-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}

}  // namespace tokenspeed::allocation

void* operator new(std::size_t bytes) { return tokenspeed::allocation::Allocate(bytes); }
void* operator new[](std::size_t bytes) { return tokenspeed::allocation::Allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
