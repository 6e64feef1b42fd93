// Reusable 64-byte-aligned scratch memory of the calling thread, so that no kernel allocates once it is warm.
#pragma once
#include <cstddef>

namespace ts {

// Distinct uses within one call hold distinct slots; a slot's contents last until the same thread asks for it again.
enum class Scratch : int {
  kActivations = 0,
  kScales,
  kSums,
  kPanel,
  kAccumulators,
  kAttention,
  kPartials,
  kTiles,
  kLogits,
  kOrder
};
constexpr int kScratchSlots = 10;

void* scratch_bytes(Scratch slot, size_t bytes);

template <class T>
inline T* scratch(Scratch slot, size_t count) {
  return static_cast<T*>(scratch_bytes(slot, count * sizeof(T)));
}

}  // namespace ts
