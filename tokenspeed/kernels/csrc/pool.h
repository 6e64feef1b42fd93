// The one thread pool of the process. A call splits its work into items that the caller and the workers claim from one
// 64-bit ticket; which thread runs an item never changes a result, because items write disjoint outputs. Workers spin
// briefly between calls (a decode step issues a call every few microseconds) and then park, and the caller spins
// briefly for the last items and then blocks: neither an idle engine nor a wait on shared processors costs CPU. A
// second caller that finds the pool busy runs its own items itself: no call ever waits for another.
#pragma once
#include <cstdint>

namespace ts {

using TaskFn = void (*)(const void* context, int64_t item);

// Runs fn(context, 0..items-1) and returns when all are done. The caller takes part.
void pool_run(int64_t items, TaskFn fn, const void* context);

// Threads that take part in a call, the caller included.
int pool_threads();
// Resizes the pool; 0: the number of processors in this process's affinity mask. Throws std::invalid_argument if < 0.
void pool_resize(int threads);
// Processors in the affinity mask of this process.
int pool_available();

template <class Fn>
inline void parallel(int64_t items, const Fn& fn) {
  pool_run(items, [](const void* context, int64_t item) { (*static_cast<const Fn*>(context))(item); }, &fn);
}

}  // namespace ts
