// The argument records of every CPU kernel and the per-ISA table of entry points. Plain data only: a record names raw
// pointers, element counts and row strides (in elements), so a kernel never sees a framework type. All lengths are 64
// bit.
#pragma once
#include <cstdint>

namespace ts {

enum class DType : int { kF32 = 0, kBF16 = 1 };

// Packed weight formats. Every format stores 16 output rows interleaved ("a tile"), so that a SIMD lane is an output
// row and no horizontal reduction is needed; K is padded to blocks of 32 with zeros. A block holds its quants, then its
// scales, so that a tile is one forward stream through memory.
enum class Format : int {
  kF32 = 0,    // [32][16] f32
  kBF16 = 1,   // [16][16][2] bf16
  kQ4_0 = 2,   // [4][16] u32 of nibbles (low: K = 4 i + byte, high: 16 + 4 i + byte), [16] f16 scale; zero point 8
  kQ4_1 = 3,   // the same nibbles, [2][16] f16 scale and minimum
  kQ8_0 = 4,   // [8][16] u32 of bytes biased by 128, [16] f16 scale
  kQ4F = 5,    // nibbles, [2][16] f32 scale and minimum (Q4_K)
  kQ8S16 = 6,  // biased bytes, [2][16] f32 scale of the first and the second 16 values (Q6_K)
};
constexpr int kFormats = 7;
constexpr int64_t kTile = 16;   // output rows a tile
constexpr int64_t kBlock = 32;  // values of K a block

// Bytes of one block of a tile: the quants and the scales of 32 values of 16 rows.
constexpr int64_t block_bytes(Format format) {
  switch (format) {
    case Format::kF32:
      return 32 * 16 * 4;
    case Format::kBF16:
      return 32 * 16 * 2;
    case Format::kQ4_0:
      return 256 + 32;
    case Format::kQ4_1:
      return 256 + 64;
    case Format::kQ8_0:
      return 512 + 32;
    case Format::kQ4F:
      return 256 + 128;
    case Format::kQ8S16:
      return 512 + 128;
  }
  return 0;
}

// Bytes of one packed tile: 64-byte aligned so that consecutive tiles keep aligned loads. `blocks` is ceil(K / 32).
constexpr int64_t tile_bytes(Format format, int64_t blocks) { return (blocks * block_bytes(format) + 63) / 64 * 64; }

struct LinearArgs {
  const void* x;  // [m, k], row stride ldx
  int64_t ldx;
  DType x_dtype;
  const uint8_t* w;  // packed [ceil(n / 16)] tiles
  Format format;
  int64_t m, n, k;
  const void* bias;  // [n] or null
  DType bias_dtype;
  void* out;  // [m, n], row stride ldo
  int64_t ldo;
  DType out_dtype;
  bool int8_activations;  // quantise x to int8 a 32-block (quantised formats only)
};

struct LookupArgs {
  const int32_t* ids;  // [t]
  int64_t t, rows, width;
  int64_t offset;  // id of row 0
  const void* w;   // raw [rows, width] (row stride ldw) or packed tiles
  int64_t ldw;
  bool packed;
  Format format;  // of a raw table: kF32 or kBF16
  void* out;      // [t, width]
  int64_t ldo;
  DType out_dtype;
};

struct NormArgs {
  const void* x;  // [outer, inner, d]: strides xo, xi
  int64_t xo, xi;
  const void* y;  // residual added to x first, or null; strides yo (inner is 1)
  int64_t yo;
  const void* w;  // [d]
  DType w_dtype;
  void* sum;  // x + y, or null
  int64_t so;
  void* out;
  int64_t oo, oi;
  int64_t outer, inner, d;
  float eps;
  DType dtype;
};

struct RopeArgs {
  const void* x;  // [t, n, d]: strides xt, xn
  int64_t xt, xn;
  const int32_t* pos;  // [t]; negative: a hole, the row is copied
  const float* table;  // [positions, r]: cos(r/2) | sin(r/2), row stride ldt
  int64_t ldt;
  void* out;
  int64_t ot, on;
  int64_t t, n, d, r;
  DType dtype;
};

enum class Pointwise : int {
  kSilu = 0,
  kSiluMul = 1,
  kAdd = 2,
  kMul = 3,
  kGelu = 4,
  kGeluMul = 5,
  kScale = 6,    // times `factor`
  kSoftcap = 7,  // factor tanh(x / factor)
  kSigmoid = 8,
  kMulRows = 9,  // b holds a value a row: [rows], stride ldb
};
constexpr int kPointwiseKinds = 10;
struct PointwiseArgs {
  Pointwise kind;
  const void* a;  // [rows, width], row stride lda
  int64_t lda;
  const void* b;  // the same, or null for a unary kind
  int64_t ldb;
  void* out;
  int64_t ldo;
  int64_t rows, width;
  float factor;  // of kScale and kSoftcap
  DType dtype;
};

struct AppendArgs {
  const void* k;  // [t, kv, d]: strides kt, kh
  int64_t kt, kh;
  const void* v;
  int64_t vt, vh;
  const int32_t* slot;  // [t]; -1: skip
  void* kcache;         // [slots, kv, d]: strides cs (slot), ch (head)
  void* vcache;
  int64_t cs, ch;
  int64_t t, kv, d, slots;
  DType dtype, cache_dtype;
};

struct AttendArgs {
  const void* q;  // [t, n, d]: strides qt, qn
  int64_t qt, qn;
  const void* kcache;  // [slots, kv, d]: strides cs, ch
  const void* vcache;
  int64_t cs, ch;
  const int32_t* pos;    // [t]
  const int32_t* row;    // [t]; -1: a hole, zeros come out
  const int32_t* table;  // [s, l], row stride ldt
  int64_t ldt;
  void* out;  // [t, n, d]: strides ot, on
  int64_t ot, on;
  int64_t t, n, kv, d, page;
  float scale;
  int64_t window;     // positions a token sees, its own the last; 0: all
  float softcap;      // c of c tanh(score / c); 0: none
  const void* sinks;  // [n], or null
  DType sinks_dtype;
  DType dtype, cache_dtype;
};

// One row of `params`: 16 words, written by the engine's sampling state and read by every sampling kernel.
struct SamplingRow {
  uint32_t flags;
  uint32_t seed_lo, seed_hi;
  uint32_t position;
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  float repetition, presence, frequency;
  int32_t top_logprobs;
  int32_t slot;
  uint32_t reserved[3];
};
static_assert(sizeof(SamplingRow) == 64);
enum SamplingFlag : uint32_t {
  kGreedy = 1,
  kPenalties = 2,
  kBias = 4,
  kLogprobs = 8,
  kFilters = 16,
  kRowValid = 32,
};
constexpr int64_t kTopLogprobs = 20;

struct LogitsArgs {  // temper, add_gumbel, argmax and their fusion, on a shard of the vocabulary
  const float* z;    // [s, v], row stride ldz
  int64_t ldz;
  const SamplingRow* params;  // [s] or null (plain argmax)
  float* out;                 // [s, v] or null
  int64_t ldo;
  float* value;    // [s] or null
  int32_t* index;  // [s]
  int64_t s, v, offset;
  bool temper, gumbel;
};

struct SampleArgs {
  const float* z;  // [s, v], row stride ldz
  int64_t ldz;
  const SamplingRow* params;  // [s]
  int32_t* counts;            // [rows, ldc]
  int64_t ldc;
  const uint8_t* seen;  // [rows, lds]
  int64_t lds;
  const float* bias;  // [rows, ldb]
  int64_t ldb;
  int64_t rows;      // request slots
  int32_t* token;    // [s]
  float* logprob;    // [s]
  int32_t* top_ids;  // [s, 20]
  float* top_logprobs;
  int64_t s, vocab;
};

// Whose rows a step of a recurrent layer holds, and where their state lies.
struct SegmentArgs {
  const int32_t* pos;    // [t]: a segment whose first position is 0 starts from zeros
  const int32_t* row;    // [t]; -1: a hole, zeros come out
  const int32_t* state;  // [s]: the state slot of a request row
  int64_t t, states;
};

constexpr int64_t kMaxTaps = 8;
struct ConvArgs {
  SegmentArgs rows;
  const void* x;  // [t, n, d]: strides xt, xn
  int64_t xt, xn;
  const void* w;  // [n, d, taps]
  DType w_dtype;
  void* past;  // [states, taps - 1, n, d], of x's type
  void* out;   // [t, n, d]: strides ot, on
  int64_t ot, on;
  int64_t n, d, taps;
  DType dtype;
};

struct DeltaArgs {
  SegmentArgs rows;
  const float* q;  // [t, hk, dk]: strides qt, qn
  int64_t qt, qn;
  const float* k;
  int64_t kt, kn;
  const void* v;  // [t, hv, dv]: strides vt, vn
  int64_t vt, vn;
  const float* decay;  // [t, hv], row stride gt
  int64_t gt;
  const void* beta;  // [t, hv], row stride bt, of v's type
  int64_t bt;
  float* memory;  // [states, hv, dk, dv]
  void* out;      // [t, hv, dv]: strides ot, on
  int64_t ot, on;
  int64_t hk, hv, dk, dv;
  float scale;
  DType dtype;
};

struct DecayArgs {
  const void* x;  // [t, n], row stride xt
  int64_t xt;
  const float *a, *dt;  // [n]
  float* out;           // [t, n], row stride ot
  int64_t ot;
  int64_t t, n;
  DType dtype;
};

struct L2NormArgs {
  const void* x;  // [t, n, d]: strides xt, xn
  int64_t xt, xn;
  float* out;
  int64_t ot, on;
  int64_t t, n, d;
  float eps;
  DType dtype;
};

struct GatedNormArgs {
  const void* x;  // [t, n, d]: strides xt, xn
  int64_t xt, xn;
  const void* z;
  int64_t zt, zn;
  const void* w;  // [d]
  DType w_dtype;
  void* out;
  int64_t ot, on;
  int64_t t, n, d;
  float eps;
  DType dtype;
};

// What one instruction set provides. Each isa_*.cpp defines one table; dispatch.cpp picks the best the machine has.
struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*lookup)(const LookupArgs&);
  void (*norm)(const NormArgs&);
  void (*rope)(const RopeArgs&);
  void (*pointwise)(const PointwiseArgs&);
  void (*append)(const AppendArgs&);
  void (*attend)(const AttendArgs&);
  void (*conv)(const ConvArgs&);
  void (*delta)(const DeltaArgs&);
  void (*decay)(const DecayArgs&);
  void (*l2_norm)(const L2NormArgs&);
  void (*gated_norm)(const GatedNormArgs&);
  void (*logits)(const LogitsArgs&);
  void (*sample)(const SampleArgs&);
  uint64_t (*read_sum)(const uint8_t* data, int64_t bytes);  // the benchmark's read ceiling
};

}  // namespace ts
