#include "scratch.h"

#include <array>
#include <cstdlib>
#include <new>

namespace ts {
namespace {

struct Buffers {
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
  };
  std::array<Buffer, kScratchSlots> slots;
  ~Buffers() {
    for (const Buffer& buffer : slots) std::free(buffer.data);
  }
};

thread_local Buffers buffers;

}  // namespace

void* scratch_bytes(Scratch slot, size_t bytes) {
  Buffers::Buffer& buffer = buffers.slots[static_cast<size_t>(slot)];
  if (buffer.size < bytes) {
    const size_t rounded = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    void* const data = std::aligned_alloc(4096, rounded);
    if (data == nullptr) throw std::bad_alloc();
    std::free(buffer.data);
    buffer = {data, rounded};
  }
  return buffer.data;
}

}  // namespace ts
