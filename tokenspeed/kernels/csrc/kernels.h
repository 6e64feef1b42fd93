// The kernel set of one instruction set. Each isa_*.cpp defines TS_ISA_NAMESPACE (and the TS_ISA_* switch that simd.h
// reads), is compiled with that set's flags, and includes this file once; it exports one table.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "filters.h"
#include "pool.h"
#include "scratch.h"
#include "types.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ts::TS_ISA_NAMESPACE {
namespace {

#include "sampling.h"
#include "state.h"

// Sum of 64-bit words: reads memory as fast as the machine gives it. `bytes` is a multiple of 64.
uint64_t read_range(const uint8_t* data, int64_t bytes) {
  I sum[4] = {izero(), izero(), izero(), izero()};
  int64_t i = 0;
  for (; i + 256 <= bytes; i += 256) {
    for (int j = 0; j < 4; ++j) sum[j] = iadd(sum[j], iload(data + i + 64 * j));
  }
  for (; i + 64 <= bytes; i += 64) sum[0] = iadd(sum[0], iload(data + i));
  alignas(64) uint32_t lanes[16];
  istore(lanes, iadd(iadd(sum[0], sum[1]), iadd(sum[2], sum[3])));
  uint64_t total = 0;
  for (const uint32_t lane : lanes) total += lane;
  return total;
}

uint64_t read_sum(const uint8_t* data, int64_t bytes) {
  constexpr int64_t kPiece = 1 << 18;
  const int64_t items = ceil_div(bytes, kPiece);
  uint64_t* const sums = scratch<uint64_t>(Scratch::kTiles, static_cast<size_t>(items));
  parallel(items, [&](int64_t i) { sums[i] = read_range(data + i * kPiece, least(kPiece, bytes - i * kPiece)); });
  uint64_t total = 0;
  for (int64_t i = 0; i < items; ++i) total += sums[i];
  return total;
}

}  // namespace

extern const Kernels kTable;
const Kernels kTable = {
    TS_ISA_NAME, linear, lookup, norm,    rope,       pointwise, append, attend,
    conv,        delta,  decay,  l2_norm, gated_norm, logits,    sample, read_sum,
};

}  // namespace ts::TS_ISA_NAMESPACE
