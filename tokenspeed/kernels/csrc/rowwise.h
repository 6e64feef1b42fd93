// Row-wise kernels: RMS norm (with a residual), rotary embedding, activations, KV append and embedding lookup. Each
// reads a row, computes in float32 and rounds once to the row's type; a row's result depends on that row alone.
#pragma once
#include "linear.h"

static constexpr int64_t kSerialElements = 1 << 14;  // elements below which a call stays on its thread

// Calls fn(row) for every row, over the pool where `elements` make it worth it.
template <class Fn>
static inline void each_row(int64_t rows, int64_t elements, const Fn& fn) {
  if (elements < kSerialElements) {
    for (int64_t row = 0; row < rows; ++row) fn(row);
    return;
  }
  const int64_t step = ceil_div(rows, 4 * pool_threads());
  parallel(ceil_div(rows, step), [&](int64_t item) {
    for (int64_t row = item * step; row < least(rows, (item + 1) * step); ++row) fn(row);
  });
}

// Calls fn(T{}) with the storage type of `dtype`: float, or uint16_t for the bits of a bf16.
template <class Fn>
static inline void with_dtype(DType dtype, const Fn& fn) {
  if (dtype == DType::kF32) {
    fn(float{});
  } else {
    fn(uint16_t{});
  }
}

// ---- norm ----------------------------------------------------------------------------------------------------------

// out = round(s * rsqrt(mean(s^2) + eps)) * w, where s = x or round(x + y): the order of Hugging Face's RMSNorm. Where
// w is float32 it is rounded once, after the product: the order of Gemma's.
template <class T, class W>
static inline void norm_row(const T* x, const T* y, T* sum, T* out, const W* w, int64_t d, float eps) {
  F squares = zero();
  each_vector(d, [&](int64_t i, int lanes) {
    F v = load_upto(x + i, lanes);
    if (y != nullptr) {
      v = through<T>(add(v, load_upto(y + i, lanes)));
      store_upto(sum + i, v, lanes);
    }
    squares = fma(v, v, squares);
  });
  const T* s = y != nullptr ? sum : x;
  const F scale = set1(1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(d) + eps));
  each_vector(d, [&](int64_t i, int lanes) {
    F v = mul(load_upto(s + i, lanes), scale);
    if constexpr (sizeof(W) == 2) v = through<T>(v);
    store_upto(out + i, mul(v, load_upto(w + i, lanes)), lanes);
  });
}

static void norm(const NormArgs& a) {
  with_dtype(a.dtype, [&](auto t) {
    with_dtype(a.w_dtype, [&](auto u) {
      using T = decltype(t);
      using W = decltype(u);
      each_row(a.outer * a.inner, a.outer * a.inner * a.d, [&](int64_t row) {
        const int64_t o = row / a.inner, i = row % a.inner;
        norm_row<T, W>(static_cast<const T*>(a.x) + o * a.xo + i * a.xi,
                       a.y == nullptr ? nullptr : static_cast<const T*>(a.y) + o * a.yo,
                       a.sum == nullptr ? nullptr : static_cast<T*>(a.sum) + o * a.so,
                       static_cast<T*>(a.out) + o * a.oo + i * a.oi, static_cast<const W*>(a.w), a.d, a.eps);
      });
    });
  });
}

// ---- rope ----------------------------------------------------------------------------------------------------------

template <class T>
static inline void copy_row(const T* x, T* out, int64_t n) {
  if (x != out) __builtin_memmove(out, x, static_cast<size_t>(n) * sizeof(T));
}

static void rope(const RopeArgs& a) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    each_row(a.t, a.t * a.n * a.d, [&](int64_t token) {
      const int64_t half = a.r / 2;
      const float* cos = a.table + most(0, a.pos[token]) * a.ldt;
      const float* sin = cos + half;
      for (int64_t head = 0; head < a.n; ++head) {
        const T* x = static_cast<const T*>(a.x) + token * a.xt + head * a.xn;
        T* out = static_cast<T*>(a.out) + token * a.ot + head * a.on;
        if (a.pos[token] < 0) {
          copy_row(x, out, a.d);
          continue;
        }
        each_vector(half, [&](int64_t i, int lanes) {
          const F u = load_upto(x + i, lanes), v = load_upto(x + half + i, lanes);
          const F c = load_upto(cos + i, lanes), s = load_upto(sin + i, lanes);
          store_upto(out + i, sub(mul(u, c), mul(v, s)), lanes);
          store_upto(out + half + i, add(mul(v, c), mul(u, s)), lanes);
        });
        copy_row(x + a.r, out + a.r, a.d - a.r);
      }
    });
  });
}

// ---- pointwise -----------------------------------------------------------------------------------------------------

static inline F silu(F x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// x times the normal distribution function, by tanh (Hendrycks and Gimpel, 1606.08415): (1 + tanh u) / 2 = sigmoid(2
// u).
static inline F gelu(F x) {
  const F cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
  return div(x, add(set1(1.0f), exp(mul(cubic, set1(-1.5957691216057308f)))));
}

template <Pointwise kKind, class T>
static void pointwise_rows(const PointwiseArgs& a) {
  each_row(a.rows, a.rows * a.width, [&](int64_t row) {
    const T* x = static_cast<const T*>(a.a) + row * a.lda;
    const T* y = a.b == nullptr ? nullptr : static_cast<const T*>(a.b) + row * a.ldb;
    T* out = static_cast<T*>(a.out) + row * a.ldo;
    each_vector(a.width, [&](int64_t i, int lanes) {
      F v = load_upto(x + i, lanes);
      if constexpr (kKind == Pointwise::kSilu) {
        v = silu(v);
      } else if constexpr (kKind == Pointwise::kSiluMul) {
        v = mul(through<T>(silu(v)), load_upto(y + i, lanes));
      } else if constexpr (kKind == Pointwise::kGelu) {
        v = gelu(v);
      } else if constexpr (kKind == Pointwise::kGeluMul) {
        v = mul(through<T>(gelu(v)), load_upto(y + i, lanes));
      } else if constexpr (kKind == Pointwise::kScale) {
        v = mul(v, set1(a.factor));
      } else if constexpr (kKind == Pointwise::kSoftcap) {
        v = mul(tanh(mul(v, set1(1.0f / a.factor))), set1(a.factor));
      } else if constexpr (kKind == Pointwise::kSigmoid) {
        v = div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), v))));
      } else if constexpr (kKind == Pointwise::kMulRows) {
        v = mul(v, set1(first(load_upto(y, 1))));
      } else if constexpr (kKind == Pointwise::kAdd) {
        v = add(v, load_upto(y + i, lanes));
      } else {
        v = mul(v, load_upto(y + i, lanes));
      }
      store_upto(out + i, v, lanes);
    });
  });
}

static void pointwise(const PointwiseArgs& a) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    switch (a.kind) {
      case Pointwise::kSilu:
        return pointwise_rows<Pointwise::kSilu, T>(a);
      case Pointwise::kSiluMul:
        return pointwise_rows<Pointwise::kSiluMul, T>(a);
      case Pointwise::kAdd:
        return pointwise_rows<Pointwise::kAdd, T>(a);
      case Pointwise::kMul:
        return pointwise_rows<Pointwise::kMul, T>(a);
      case Pointwise::kGelu:
        return pointwise_rows<Pointwise::kGelu, T>(a);
      case Pointwise::kGeluMul:
        return pointwise_rows<Pointwise::kGeluMul, T>(a);
      case Pointwise::kScale:
        return pointwise_rows<Pointwise::kScale, T>(a);
      case Pointwise::kSoftcap:
        return pointwise_rows<Pointwise::kSoftcap, T>(a);
      case Pointwise::kSigmoid:
        return pointwise_rows<Pointwise::kSigmoid, T>(a);
      case Pointwise::kMulRows:
        return pointwise_rows<Pointwise::kMulRows, T>(a);
    }
  });
}

// ---- KV append -----------------------------------------------------------------------------------------------------

static void append(const AppendArgs& a) {
  with_dtype(a.dtype, [&](auto t) {
    with_dtype(a.cache_dtype, [&](auto u) {
      using T = decltype(t);
      using C = decltype(u);
      each_row(a.t, a.t * a.kv * a.d, [&](int64_t token) {
        const int64_t slot = a.slot[token];
        if (slot < 0 || slot >= a.slots) return;  // a hole
        for (int64_t head = 0; head < a.kv; ++head) {
          const T* k = static_cast<const T*>(a.k) + token * a.kt + head * a.kh;
          const T* v = static_cast<const T*>(a.v) + token * a.vt + head * a.vh;
          C* kc = static_cast<C*>(a.kcache) + slot * a.cs + head * a.ch;
          C* vc = static_cast<C*>(a.vcache) + slot * a.cs + head * a.ch;
          each_vector(a.d, [&](int64_t i, int lanes) {
            store_upto(kc + i, load_upto(k + i, lanes), lanes);
            store_upto(vc + i, load_upto(v + i, lanes), lanes);
          });
        }
      });
    });
  });
}

// ---- lookup --------------------------------------------------------------------------------------------------------

// Row `row` of packed weights, as T: one lane of each vector of its tile.
template <class W, class T>
static inline void unpack_row(const uint8_t* tile, int64_t blocks, int lane, int64_t width, T* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* block = tile + b * W::kBlockBytes;
    const Scales scales = W::scales(block);
    alignas(64) float values[32];
    for (int i = 0; i < 8; ++i) {
      F v[4];
      W::values(block, i / 4, i % 4, scales, v);
      for (int j = 0; j < 4; ++j) {
        alignas(64) float lanes[16];
        store(lanes, v[j]);
        values[4 * i + j] = lanes[lane];
      }
    }
    for (int64_t i = 0; i < 32 && b * 32 + i < width; i += 16) {
      const int count = static_cast<int>(least(16, width - b * 32 - i));
      store_upto(out + b * 32 + i, load(values + i), count);
    }
  }
}

static void lookup(const LookupArgs& a) {
  with_dtype(a.out_dtype, [&](auto o) {
    using T = decltype(o);
    const int64_t blocks = ceil_div(a.width, kBlock), stride = tile_bytes(a.format, blocks);
    each_row(a.t, a.t * a.width, [&](int64_t token) {
      T* out = static_cast<T*>(a.out) + token * a.ldo;
      const int64_t id = a.ids[token], row = id - a.offset;
      if (id < 0 || row < 0 || row >= a.rows) {
        each_vector(a.width, [&](int64_t i, int lanes) { store_upto(out + i, zero(), lanes); });
      } else if (a.packed) {
        const uint8_t* tile = static_cast<const uint8_t*>(a.w) + row / kTile * stride;
        with_format(a.format, [&](auto w) {
          unpack_row<decltype(w)>(tile, blocks, static_cast<int>(row % kTile), a.width, out);
        });
      } else {
        with_dtype(a.format == Format::kF32 ? DType::kF32 : DType::kBF16, [&](auto s) {
          const decltype(s)* in = static_cast<const decltype(s)*>(a.w) + row * a.ldw;
          each_vector(a.width, [&](int64_t i, int lanes) { store_upto(out + i, load_upto(in + i, lanes), lanes); });
        });
      }
    });
  });
}
