// Kernels of recurrent layers: causal convolution and gated delta rule over a state slot a request, decay, l2 norm and
// gated RMS norm. Rows of a request lie side by side and in order; a request's part of a state is walked by one thread,
// a token at a time, so what comes out does not depend on the batch, on how a prompt was cut, or on the threads.
#pragma once
#include "attention.h"

static constexpr int64_t kColumns = 32;  // of a head's state that one thread walks: 128 rows of them fit the L1 cache

// Calls fn(first, count, slot, goes_on) for every request's rows of a step, and hole(token) for every other row.
template <class Fn, class Hole>
static inline void each_segment(const SegmentArgs& a, const Fn& fn, const Hole& hole) {
  for (int64_t i = 0; i < a.t;) {
    const int32_t row = a.row[i];
    const int64_t slot = row < 0 ? -1 : a.state[row];
    int64_t end = i + 1;
    while (end < a.t && a.row[end] == row) ++end;
    if (slot < 0 || slot >= a.states) {
      for (int64_t token = i; token < end; ++token) hole(token);
    } else {
      fn(i, end - i, slot, a.pos[i] > 0);
    }
    i = end;
  }
}

// ---- causal convolution --------------------------------------------------------------------------------------------

template <class T, class W>
static void conv_channels(const ConvArgs& a, int64_t head, int64_t c, int lanes) {
  const int64_t taps = a.taps, inner = a.n * a.d;
  F w[kMaxTaps], seen[kMaxTaps];
  for (int64_t k = 0; k < taps; ++k) {
    alignas(64) float column[16] = {};
    const W* p = static_cast<const W*>(a.w) + (head * a.d + c) * taps + k;
    for (int i = 0; i < lanes; ++i) column[i] = first(load_upto(p + i * taps, 1));
    w[k] = load(column);
  }
  const T* x = static_cast<const T*>(a.x) + head * a.xn + c;
  T* out = static_cast<T*>(a.out) + head * a.on + c;
  each_segment(
      a.rows,
      [&](int64_t first, int64_t count, int64_t slot, bool goes_on) {
        T* past = static_cast<T*>(a.past) + slot * (taps - 1) * inner + head * a.d + c;
        for (int64_t k = 0; k + 1 < taps; ++k) seen[k] = goes_on ? load_upto(past + k * inner, lanes) : zero();
        for (int64_t i = first; i < first + count; ++i) {
          seen[taps - 1] = load_upto(x + i * a.xt, lanes);
          F y = mul(seen[0], w[0]);
          for (int64_t k = 1; k < taps; ++k) y = fma(seen[k], w[k], y);
          store_upto(out + i * a.ot, silu(through<T>(y)), lanes);
          for (int64_t k = 0; k + 1 < taps; ++k) seen[k] = seen[k + 1];
        }
        for (int64_t k = 0; k + 1 < taps; ++k) store_upto(past + k * inner, seen[k], lanes);
      },
      [&](int64_t token) { store_upto(out + token * a.ot, zero(), lanes); });
}

static void conv(const ConvArgs& a) {
  with_dtype(a.dtype, [&](auto t) {
    with_dtype(a.w_dtype, [&](auto u) {
      each_row(a.n, a.rows.t * a.n * a.d, [&](int64_t head) {
        each_vector(a.d, [&](int64_t c, int lanes) { conv_channels<decltype(t), decltype(u)>(a, head, c, lanes); });
      });
    });
  });
}

// ---- gated delta rule ----------------------------------------------------------------------------------------------

// Columns c .. of one value head, in N vectors of which the last has `lanes` lanes.
template <class T, int N>
static void delta_columns(const DeltaArgs& a, int64_t head, int64_t c, int lanes) {
  const int64_t key = head / (a.hv / a.hk);
  const auto width = [&](int v) { return v + 1 < N ? 16 : lanes; };
  each_segment(
      a.rows,
      [&](int64_t first_row, int64_t count, int64_t slot, bool goes_on) {
        float* s = a.memory + (slot * a.hv + head) * a.dk * a.dv + c;
        for (int64_t i = 0; i < a.dk && !goes_on; ++i) {
          for (int v = 0; v < N; ++v) store_upto(s + i * a.dv + 16 * v, zero(), width(v));
        }
        for (int64_t token = first_row; token < first_row + count; ++token) {
          const float* q = a.q + token * a.qt + key * a.qn;
          const float* k = a.k + token * a.kt + key * a.kn;
          const T* value = static_cast<const T*>(a.v) + token * a.vt + head * a.vn + c;
          T* out = static_cast<T*>(a.out) + token * a.ot + head * a.on + c;
          const F keep = exp(set1(a.decay[token * a.gt + head]));
          const F rate = set1(first(load_upto(static_cast<const T*>(a.beta) + token * a.bt + head, 1)));
          F known[N], learned[N], answer[N];
          TS_UNROLL(4)
          for (int v = 0; v < N; ++v) known[v] = answer[v] = zero();
          for (int64_t i = 0; i < a.dk; ++i) {
            const F ki = set1(k[i]);
            TS_UNROLL(4)
            for (int v = 0; v < N; ++v) known[v] = fma(ki, load_upto(s + i * a.dv + 16 * v, width(v)), known[v]);
          }
          TS_UNROLL(4)
          for (int v = 0; v < N; ++v) {
            learned[v] = mul(sub(load_upto(value + 16 * v, width(v)), mul(known[v], keep)), rate);
          }
          for (int64_t i = 0; i < a.dk; ++i) {
            const F ki = set1(k[i]), qi = set1(q[i]);
            TS_UNROLL(4)
            for (int v = 0; v < N; ++v) {
              float* at = s + i * a.dv + 16 * v;
              const F next = fma(ki, learned[v], mul(keep, load_upto(at, width(v))));
              store_upto(at, next, width(v));
              answer[v] = fma(qi, next, answer[v]);
            }
          }
          for (int v = 0; v < N; ++v) store_upto(out + 16 * v, mul(answer[v], set1(a.scale)), width(v));
        }
      },
      [&](int64_t token) {
        T* out = static_cast<T*>(a.out) + token * a.ot + head * a.on + c;
        for (int v = 0; v < N; ++v) store_upto(out + 16 * v, zero(), width(v));
      });
}

static void delta(const DeltaArgs& a) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t parts = ceil_div(a.dv, kColumns);
    each_row(a.hv * parts, a.rows.t * a.hv * a.dk * a.dv, [&](int64_t item) {
      const int64_t head = item / parts, c = item % parts * kColumns, columns = least(kColumns, a.dv - c);
      if (columns > 16) {
        delta_columns<T, 2>(a, head, c, static_cast<int>(columns - 16));
      } else {
        delta_columns<T, 1>(a, head, c, static_cast<int>(columns));
      }
    });
  });
}

// ---- what goes around them -----------------------------------------------------------------------------------------

// log(1 + e^x).
static inline F softplus(F x) {
  const F e = exp(sub(zero(), abs(x)));
  const F series = mul(e, fma(e, fma(e, set1(1.0f / 3), set1(-0.5f)), set1(1.0f)));
  return add(max(x, zero()), blend(gt(set1(1e-3f), e), series, log(add(e, set1(1.0f)))));
}

static void decay(const DecayArgs& a) {
  with_dtype(a.dtype, [&](auto t) {
    each_row(a.t, a.t * a.n, [&](int64_t token) {
      const decltype(t)* x = static_cast<const decltype(t)*>(a.x) + token * a.xt;
      float* out = a.out + token * a.ot;
      each_vector(a.n, [&](int64_t i, int lanes) {
        const F rate = softplus(add(load_upto(x + i, lanes), load_upto(a.dt + i, lanes)));
        store_upto(out + i, sub(zero(), mul(exp(load_upto(a.a + i, lanes)), rate)), lanes);
      });
    });
  });
}

static void l2_norm(const L2NormArgs& a) {
  with_dtype(a.dtype, [&](auto t) {
    each_row(a.t * a.n, a.t * a.n * a.d, [&](int64_t row) {
      const int64_t token = row / a.n, head = row % a.n;
      const decltype(t)* x = static_cast<const decltype(t)*>(a.x) + token * a.xt + head * a.xn;
      float* out = a.out + token * a.ot + head * a.on;
      F squares = zero();
      each_vector(a.d, [&](int64_t i, int lanes) {
        const F v = load_upto(x + i, lanes);
        squares = fma(v, v, squares);
      });
      const F scale = set1(1.0f / __builtin_sqrtf(hsum(squares) + a.eps));
      each_vector(a.d, [&](int64_t i, int lanes) { store_upto(out + i, mul(load_upto(x + i, lanes), scale), lanes); });
    });
  });
}

template <class T, class W>
static void gated_norm_rows(const GatedNormArgs& a) {
  each_row(a.t * a.n, a.t * a.n * a.d, [&](int64_t row) {
    const int64_t token = row / a.n, head = row % a.n;
    const T* x = static_cast<const T*>(a.x) + token * a.xt + head * a.xn;
    const T* z = static_cast<const T*>(a.z) + token * a.zt + head * a.zn;
    T* out = static_cast<T*>(a.out) + token * a.ot + head * a.on;
    F squares = zero();
    each_vector(a.d, [&](int64_t i, int lanes) {
      const F v = load_upto(x + i, lanes);
      squares = fma(v, v, squares);
    });
    const F scale = set1(1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(a.d) + a.eps));
    each_vector(a.d, [&](int64_t i, int lanes) {
      const F normed = through<T>(mul(load_upto(x + i, lanes), scale));
      const F weighed = through<T>(mul(normed, load_upto(static_cast<const W*>(a.w) + i, lanes)));
      store_upto(out + i, mul(weighed, silu(load_upto(z + i, lanes))), lanes);
    });
  });
}

static void gated_norm(const GatedNormArgs& a) {
  with_dtype(a.dtype,
             [&](auto t) { with_dtype(a.w_dtype, [&](auto u) { gated_norm_rows<decltype(t), decltype(u)>(a); }); });
}
