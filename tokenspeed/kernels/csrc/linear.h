// linear: out[m, n] = x[m, k] @ w[n, k]^T + bias, on packed weights. Invariant: an output's products are added in one
// fixed order that depends on K alone, so a token's result does not change with the batch it is computed in, with the
// thread count, or with how rows are cut into items.
//
// Three inner kernels share that outline:
//  - `exact`: weights become float32 and are multiplied by float32 activations. A few rows dequantise in registers
//    (memory bound); many rows dequantise a panel once and reuse it from L2.
//  - `int8`: activations are quantised to int8 a block of 32 (scale amax / 127) and multiplied with integer dot
//    products; the sum over a block is exact.
//  - `dot_bf16`: bf16 pairs, where the machine has the instruction.
#pragma once
#include "pool.h"
#include "scratch.h"
#include "weights.h"

static constexpr int kMaxRows =
#if defined(TS_ISA_AVX512)
    8;  // rows of x held in registers at once
#else
    4;
#endif
static constexpr int64_t kPanelK = 512;     // K of a dequantised panel: 2 tiles * 512 * 64 bytes = 64 KiB
static constexpr int64_t kPanelRows = 128;  // rows of x a panel serves
// How far ahead of the multiplication a tile is fetched, when few rows make a call memory bound. The hardware's own
// prefetchers stop at every 4 KiB page, which is less than a tile.
static constexpr int64_t kPrefetch = 4096;
static constexpr int64_t kSerialWork = 1 << 15;  // multiply-adds below which a call stays on its thread

// ---- epilogue ------------------------------------------------------------------------------------------------------

static inline F bias_of(const LinearArgs& a, int64_t n, int lanes) {
  if (a.bias == nullptr) return zero();
  if (a.bias_dtype == DType::kF32) return load_upto(static_cast<const float*>(a.bias) + n, lanes);
  return load_upto(static_cast<const uint16_t*>(a.bias) + n, lanes);
}

static inline void put(const LinearArgs& a, int64_t row, int64_t n, F value, F bias, int lanes) {
  if (a.bias != nullptr) value = add(value, bias);
  if (a.out_dtype == DType::kF32) {
    store_upto(static_cast<float*>(a.out) + row * a.ldo + n, value, lanes);
  } else {
    store_upto(static_cast<uint16_t*>(a.out) + row * a.ldo + n, value, lanes);
  }
}

static inline int lanes_of(const LinearArgs& a, int64_t n) { return static_cast<int>(least(kTile, a.n - n)); }

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

// Calls fn with the number of rows as a constant: 1, 2, 4 or 8, the least that holds `rows`; spare rows repeat the
// last.
template <class Fn>
static inline void with_rows(int64_t rows, const Fn& fn) {
  if (rows <= 1) {
    fn(Count<1>{});
  } else if (rows <= 2) {
    fn(Count<2>{});
  } else if (rows <= 4 || kMaxRows == 4) {
    fn(Count<4>{});
  } else {
    fn(Count<8>{});
  }
}

// ---- exact ---------------------------------------------------------------------------------------------------------

// kTiles tiles times kRows rows, weights dequantised in registers.
template <class W, int kRows, int kTiles>
static inline void exact_rows(const LinearArgs& a, const float* x, int64_t ldx, int64_t blocks, int64_t stride,
                              int64_t tile, int64_t row, int64_t rows) {
  F acc[kRows][kTiles];
  const float* xr[kRows];
  for (int r = 0; r < kRows; ++r) {
    xr[r] = x + (row + least(r, rows - 1)) * ldx;
    for (int t = 0; t < kTiles; ++t) acc[r][t] = zero();
  }
  const uint8_t* w = a.w + tile * stride;
  for (int64_t b = 0; b < blocks; ++b) {
    Scales scales[kTiles];
    for (int t = 0; t < kTiles; ++t) {
      const uint8_t* block = w + t * stride + b * W::kBlockBytes;
      scales[t] = W::scales(block);
      prefetch(block + kPrefetch, W::kBlockBytes);
    }
    TS_UNROLL(2)
    for (int half = 0; half < 2; ++half) {
      TS_UNROLL(4)
      for (int quarter = 0; quarter < 4; ++quarter) {
        const int64_t k = b * 32 + half * 16 + quarter * 4;
        TS_UNROLL(4)
        for (int t = 0; t < kTiles; ++t) {
          F v[4];
          W::values(w + t * stride + b * W::kBlockBytes, half, quarter, scales[t], v);
          TS_UNROLL(4)
          for (int j = 0; j < 4; ++j) {
            TS_UNROLL(8)
            for (int r = 0; r < kRows; ++r) acc[r][t] = fma(v[j], set1(xr[r][k + j]), acc[r][t]);
          }
        }
      }
    }
  }
  for (int t = 0; t < kTiles; ++t) {
    const int64_t n = (tile + t) * kTile;
    const F bias = bias_of(a, n, lanes_of(a, n));
    for (int r = 0; r < kRows && r < rows; ++r) put(a, row + r, n, acc[r][t], bias, lanes_of(a, n));
  }
}

// kRows rows times 2 float panels ([k][16] each, `gap` floats apart), continuing the sums in c ([rows][2][16]).
template <int kRows>
static inline void panel_rows(const float* panel, int64_t gap, const float* x, int64_t ldx, int64_t count, float* c,
                              int64_t rows) {
  F acc[kRows][2];
  const float* xr[kRows];
  for (int r = 0; r < kRows; ++r) {
    xr[r] = x + least(r, rows - 1) * ldx;
    for (int t = 0; t < 2; ++t) acc[r][t] = r < rows ? load(c + r * 32 + t * 16) : zero();
  }
  for (int64_t k = 0; k < count; ++k) {
    const F w0 = load(panel + k * 16), w1 = load(panel + gap + k * 16);
    TS_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const F v = set1(xr[r][k]);
      acc[r][0] = fma(w0, v, acc[r][0]);
      acc[r][1] = fma(w1, v, acc[r][1]);
    }
  }
  for (int r = 0; r < kRows && r < rows; ++r) {
    for (int t = 0; t < 2; ++t) store(c + r * 32 + t * 16, acc[r][t]);
  }
}

// Two tiles times up to kPanelRows rows through dequantised panels of K.
template <class W>
static inline void exact_panel(const LinearArgs& a, const float* x, int64_t ldx, int64_t blocks, int64_t stride,
                               int64_t tile, int64_t tiles, int64_t row, int64_t rows) {
  float* const panel = scratch<float>(Scratch::kPanel, 2 * kPanelK * 16);
  float* const c = scratch<float>(Scratch::kAccumulators, kPanelRows * 32);
  for (int64_t i = 0; i < rows * 32; i += 16) store(c + i, zero());
  for (int64_t b0 = 0; b0 < blocks; b0 += kPanelK / 32) {
    const int64_t b1 = least(blocks, b0 + kPanelK / 32);
    for (int64_t t = 0; t < 2; ++t) {
      const uint8_t* w = a.w + least(tile + t, tiles - 1) * stride;
      for (int64_t b = b0; b < b1; ++b) {
        const uint8_t* block = w + b * W::kBlockBytes;
        const Scales scales = W::scales(block);
        for (int i = 0; i < 8; ++i) {
          F v[4];
          W::values(block, i / 4, i % 4, scales, v);
          for (int j = 0; j < 4; ++j) store(panel + (t * kPanelK + (b - b0) * 32 + 4 * i + j) * 16, v[j]);
        }
      }
    }
    for (int64_t r = 0; r < rows; r += kMaxRows) {
      with_rows(rows - r, [&](auto count) {
        panel_rows<decltype(count)::value>(panel, kPanelK * 16, x + (row + r) * ldx + b0 * 32, ldx, (b1 - b0) * 32,
                                           c + r * 32, rows - r);
      });
    }
  }
  for (int64_t t = 0; t < 2 && tile + t < tiles; ++t) {
    const int64_t n = (tile + t) * kTile;
    const F bias = bias_of(a, n, lanes_of(a, n));
    for (int64_t r = 0; r < rows; ++r) put(a, row + r, n, load(c + r * 32 + t * 16), bias, lanes_of(a, n));
  }
}

// Tiles an item takes, so that there are several items a thread and none is trivially small.
static inline int64_t tiles_an_item(int64_t tiles, int64_t unit) {
  const int64_t wanted = ceil_div(tiles, 8 * pool_threads());
  return most(unit, wanted / unit * unit);
}

template <class Fn>
static inline void run_items(const LinearArgs& a, int64_t items, const Fn& fn) {
  if (a.m * a.n * a.k < kSerialWork) {
    for (int64_t i = 0; i < items; ++i) fn(i);
  } else {
    parallel(items, fn);
  }
}

template <class W>
static void exact(const LinearArgs& a, const float* x, int64_t ldx) {
  const int64_t blocks = ceil_div(a.k, kBlock), tiles = ceil_div(a.n, kTile), stride = tile_bytes(a.format, blocks);
  if (a.m <= kMaxRows) {
    const int64_t step = tiles_an_item(tiles, 4);
    run_items(a, ceil_div(tiles, step), [&](int64_t item) {
      const int64_t end = least(tiles, (item + 1) * step);
      with_rows(a.m, [&](auto rows) {
        constexpr int kRows = decltype(rows)::value;
        constexpr int kTiles = kRows >= 4 ? 2 : 4;
        int64_t tile = item * step;
        for (; tile + kTiles <= end; tile += kTiles) {
          exact_rows<W, kRows, kTiles>(a, x, ldx, blocks, stride, tile, 0, a.m);
        }
        for (; tile < end; ++tile) exact_rows<W, kRows, 1>(a, x, ldx, blocks, stride, tile, 0, a.m);
      });
    });
    return;
  }
  const int64_t pairs = ceil_div(tiles, 2);
  run_items(a, pairs * ceil_div(a.m, kPanelRows), [&](int64_t item) {
    const int64_t row = item / pairs * kPanelRows;
    exact_panel<W>(a, x, ldx, blocks, stride, item % pairs * 2, tiles, row, least(kPanelRows, a.m - row));
  });
}

// ---- int8 activations ----------------------------------------------------------------------------------------------

struct Int8Rows {
  const int8_t* q;       // [m][32 * blocks]
  const float* scale;    // [m][blocks]
  const int32_t* start;  // [m][blocks][2]: -zero * sum of each 16 quants
  const float* sum;      // [m][blocks]: scale * sum of the 32 quants
};

template <class T>
static inline void quantise_row(const T* x, int64_t k, int64_t blocks, int zero_point, int8_t* q, float* scale,
                                int32_t* start, float* sum) {
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t left = k - b * 32;
    const F v0 = load_upto(x + b * 32, static_cast<int>(least(16, left)));
    const F v1 = left > 16 ? load_upto(x + b * 32 + 16, static_cast<int>(least(16, left - 16))) : zero();
    const float amax = hmax(max(abs(v0), abs(v1)));
    const float poison = hsum(mul(add(abs(v0), abs(v1)), zero()));  // NaN where the block holds an inf or a NaN
    const float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    const I q0 = to_int(mul(v0, set1(inverse))), q1 = to_int(mul(v1, set1(inverse)));
    store_i8(q + b * 32, q0);
    store_i8(q + b * 32 + 16, q1);
    const float s0 = hsum(to_float(q0)), s1 = hsum(to_float(q1));  // at most 16 * 127: exact
    scale[b] = amax / 127.0f + poison;
    sum[b] = scale[b] * (s0 + s1);
    const bool finite = poison == 0.0f;
    start[2 * b] = finite ? -zero_point * static_cast<int32_t>(s0) : 0;
    start[2 * b + 1] = finite ? -zero_point * static_cast<int32_t>(s1) : 0;
  }
}

template <class W, int kRows>
static inline void int8_rows(const LinearArgs& a, const Int8Rows& x, int64_t blocks, const uint8_t* w, int64_t tile,
                             int64_t row, int64_t rows) {
  F acc[kRows];
  int64_t xr[kRows];
  for (int r = 0; r < kRows; ++r) {
    xr[r] = (row + least(r, rows - 1)) * blocks;
    acc[r] = zero();
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* block = w + b * W::kBlockBytes;
    if constexpr (kRows < kMaxRows) prefetch(block + kPrefetch, W::kBlockBytes);
    I q[8];
    W::dwords(block, q);
    const Scales s = W::scales(block);
    TS_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = xr[r] + b;
      const int32_t* xq = reinterpret_cast<const int32_t*>(x.q + at * 32);
      I low = izero(), high = izero();
      if constexpr (W::kZero != 0) {
        low = iset1(x.start[2 * at]);
        high = iset1(x.start[2 * at + 1]);
      }
      TS_UNROLL(4)
      for (int i = 0; i < 4; ++i) {
        low = dot_u8s8<W::kNibbles>(low, q[i], iset1(xq[i]));
        high = dot_u8s8<W::kNibbles>(high, q[4 + i], iset1(xq[4 + i]));
      }
      const F scale = set1(x.scale[at]);
      if constexpr (W::kHalves) {
        acc[r] = fma(to_float(low), mul(s.d, scale), acc[r]);
        acc[r] = fma(to_float(high), mul(s.m, scale), acc[r]);
      } else {
        acc[r] = fma(to_float(iadd(low, high)), mul(s.d, scale), acc[r]);
        if constexpr (W::kMin) acc[r] = fma(s.m, set1(x.sum[at]), acc[r]);
      }
    }
  }
  const int64_t n = tile * kTile;
  const F bias = bias_of(a, n, lanes_of(a, n));
  for (int r = 0; r < kRows && r < rows; ++r) put(a, row + r, n, acc[r], bias, lanes_of(a, n));
}

template <class W>
static void int8(const LinearArgs& a) {
  const int64_t blocks = ceil_div(a.k, kBlock), tiles = ceil_div(a.n, kTile), stride = tile_bytes(a.format, blocks);
  int8_t* const q = scratch<int8_t>(Scratch::kActivations, static_cast<size_t>(a.m * blocks * 32));
  float* const scale = scratch<float>(Scratch::kScales, static_cast<size_t>(a.m * blocks * 2));
  int32_t* const start = scratch<int32_t>(Scratch::kSums, static_cast<size_t>(a.m * blocks * 2));
  float* const sum = scale + a.m * blocks;
  const auto quantise = [&](int64_t row) {
    const int64_t at = row * blocks;
    if (a.x_dtype == DType::kF32) {
      quantise_row(static_cast<const float*>(a.x) + row * a.ldx, a.k, blocks, W::kZero, q + at * 32, scale + at,
                   start + 2 * at, sum + at);
    } else {
      quantise_row(static_cast<const uint16_t*>(a.x) + row * a.ldx, a.k, blocks, W::kZero, q + at * 32, scale + at,
                   start + 2 * at, sum + at);
    }
  };
  if (a.m * a.k < kSerialWork) {
    for (int64_t row = 0; row < a.m; ++row) quantise(row);
  } else {
    const int64_t step = ceil_div(a.m, 4 * pool_threads());
    parallel(ceil_div(a.m, step), [&](int64_t item) {
      for (int64_t row = item * step; row < least(a.m, (item + 1) * step); ++row) quantise(row);
    });
  }
  const Int8Rows x{q, scale, start, sum};
  // Rows of x that stay in L2 while the tiles pass by.
  const int64_t chunk = most(32, least(512, (256 << 10) / (blocks * 32) / kMaxRows * kMaxRows));
  const int64_t step = tiles_an_item(tiles, 1), groups = ceil_div(tiles, step);
  run_items(a, groups * ceil_div(a.m, chunk), [&](int64_t item) {
    const int64_t first = item / groups * chunk, last = least(a.m, first + chunk);
    const int64_t end = least(tiles, (item % groups + 1) * step);
    for (int64_t tile = item % groups * step; tile < end; ++tile) {
      for (int64_t row = first; row < last; row += kMaxRows) {
        with_rows(last - row, [&](auto rows) {
          int8_rows<W, decltype(rows)::value>(a, x, blocks, a.w + tile * stride, tile, row, last - row);
        });
      }
    }
  });
}

// ---- bf16 pairs ----------------------------------------------------------------------------------------------------

#if defined(TS_HAS_DOT_BF16)
template <int kRows, int kTiles>
static inline void dot_bf16_rows(const LinearArgs& a, const uint16_t* x, int64_t ldx, int64_t pairs, int64_t stride,
                                 int64_t tile, int64_t row, int64_t rows) {
  F acc[kRows][kTiles];
  const uint16_t* xr[kRows];
  for (int r = 0; r < kRows; ++r) {
    xr[r] = x + (row + least(r, rows - 1)) * ldx;
    for (int t = 0; t < kTiles; ++t) acc[r][t] = zero();
  }
  const uint8_t* w = a.w + tile * stride;
  for (int64_t p = 0; p < pairs; ++p) {
    I v[kTiles];
    for (int t = 0; t < kTiles; ++t) v[t] = iload(w + t * stride + p * 64);
    TS_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, xr[r] + 2 * p, 4);
      for (int t = 0; t < kTiles; ++t) acc[r][t] = dot_bf16(acc[r][t], v[t], iset1(pair));
    }
  }
  for (int t = 0; t < kTiles; ++t) {
    const int64_t n = (tile + t) * kTile;
    const F bias = bias_of(a, n, lanes_of(a, n));
    for (int r = 0; r < kRows && r < rows; ++r) put(a, row + r, n, acc[r][t], bias, lanes_of(a, n));
  }
}

static void linear_dot_bf16(const LinearArgs& a, const uint16_t* x, int64_t ldx) {
  const int64_t blocks = ceil_div(a.k, kBlock), tiles = ceil_div(a.n, kTile), stride = tile_bytes(a.format, blocks);
  const int64_t step = tiles_an_item(tiles, 4), groups = ceil_div(tiles, step);
  const int64_t chunk = a.m <= kMaxRows ? kMaxRows : kPanelRows;
  run_items(a, groups * ceil_div(a.m, chunk), [&](int64_t item) {
    const int64_t first = item / groups * chunk, last = least(a.m, first + chunk);
    const int64_t end = least(tiles, (item % groups + 1) * step);
    for (int64_t tile = item % groups * step; tile < end; tile += 2) {
      for (int64_t row = first; row < last; row += kMaxRows) {
        with_rows(last - row, [&](auto rows) {
          constexpr int kRows = decltype(rows)::value;
          if (tile + 2 <= end) {
            dot_bf16_rows<kRows, 2>(a, x, ldx, blocks * 16, stride, tile, row, last - row);
          } else {
            dot_bf16_rows<kRows, 1>(a, x, ldx, blocks * 16, stride, tile, row, last - row);
          }
        });
      }
    }
  });
}
#endif

// ---- entry ---------------------------------------------------------------------------------------------------------

// Rows of x as T (float or bf16 bits), zero padded to whole blocks: x itself where it already is so.
template <class T>
static inline const T* padded(const LinearArgs& a, int64_t& ldx) {
  const int64_t width = ceil_div(a.k, kBlock) * kBlock;
  const bool same = (a.x_dtype == DType::kF32) == (sizeof(T) == 4);
  if (same && width == a.k) {
    ldx = a.ldx;
    return static_cast<const T*>(a.x);
  }
  ldx = width;
  T* const out = scratch<T>(Scratch::kActivations, static_cast<size_t>(a.m * width));
  const auto copy = [&](int64_t row) {
    each_vector(width, [&](int64_t i, int) {
      const int lanes = static_cast<int>(most(0, least(16, a.k - i)));
      const F v = a.x_dtype == DType::kF32 ? load_upto(static_cast<const float*>(a.x) + row * a.ldx + i, lanes)
                                           : load_upto(static_cast<const uint16_t*>(a.x) + row * a.ldx + i, lanes);
      store_as(out + row * width + i, v);
    });
  };
  if (a.m * width < kSerialWork) {
    for (int64_t row = 0; row < a.m; ++row) copy(row);
  } else {
    parallel(a.m, copy);
  }
  return out;
}

static void linear(const LinearArgs& a) {
  if (a.m == 0 || a.n == 0) return;
  if (a.int8_activations) {
    switch (a.format) {
      case Format::kQ4_0:
        return int8<Weights<Format::kQ4_0>>(a);
      case Format::kQ4_1:
        return int8<Weights<Format::kQ4_1>>(a);
      case Format::kQ8_0:
        return int8<Weights<Format::kQ8_0>>(a);
      case Format::kQ4F:
        return int8<Weights<Format::kQ4F>>(a);
      case Format::kQ8S16:
        return int8<Weights<Format::kQ8S16>>(a);
      default:
        break;  // dense weights have no integer form
    }
  }
  int64_t ldx = 0;
#if defined(TS_HAS_DOT_BF16)
  if (a.format == Format::kBF16 && a.x_dtype == DType::kBF16) {
    const uint16_t* const x = padded<uint16_t>(a, ldx);
    return linear_dot_bf16(a, x, ldx);
  }
#endif
  const float* const x = padded<float>(a, ldx);
  with_format(a.format, [&](auto w) { exact<decltype(w)>(a, x, ldx); });
}
