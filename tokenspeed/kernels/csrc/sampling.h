// Sampling: argmax and Gumbel-max over a vocabulary or a shard of it, and the full sampler. Invariant: a token depends
// on its row's logits, its parameters and (seed, position, token id) only: noise is a counter-based function of those
// three, so neither the batch nor the way the vocabulary is sharded nor the thread count changes what is drawn.
//
// NaN never wins. A row with nothing above -inf yields id -1 (value -inf). Log-probabilities are clamped to
// -9999, so that every reported number is finite.
#pragma once
#include "attention.h"
#include "filters.h"

static constexpr int64_t kNoiseIds = 64;   // ids of one noise block: 16 Philox counters of 4 words
static constexpr int64_t kSegment = 8192;  // ids an item scans
static constexpr float kLogprobFloor = -9999.0f;
static constexpr float kNegligible = 40.0f;  // e^-40 of the best cannot move a nucleus in float32; noise spans 20.2

// Philox 4x32-10 (Salmon et al., SC'11), counters (id / 4 + lane, position, 0, 0), key = the request's seed.
static inline void philox(uint32_t counter, uint32_t position, uint32_t k0, uint32_t k1, I* x) {
  alignas(64) int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<int32_t>(counter + static_cast<uint32_t>(i));
  x[0] = iload(lanes);
  x[1] = iset1(static_cast<int32_t>(position));
  x[2] = izero();
  x[3] = izero();
  const I m0 = iset1(static_cast<int32_t>(0xd2511f53u)), m1 = iset1(static_cast<int32_t>(0xcd9e8d57u));
  for (int round = 0; round < 10; ++round) {
    I hi0, lo0, hi1, lo1;
    mul_wide(m0, x[0], hi0, lo0);
    mul_wide(m1, x[2], hi1, lo1);
    const I a = ixor(ixor(hi1, x[1]), iset1(static_cast<int32_t>(k0)));
    const I b = ixor(ixor(hi0, x[3]), iset1(static_cast<int32_t>(k1)));
    x[0] = a;
    x[1] = lo1;
    x[2] = b;
    x[3] = lo0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
}

// -log(-log(u)), u = (n + 0.5) * 2^-24 of a 24-bit n, to a few ulp on both ends: above one half, -log(u) is taken of
// 1 - u, which is exact where u is not.
static inline F gumbel(I word) {
  const I n = shr(word, 8);
  const F low = mul(to_float(iadd(iadd(n, n), iset1(1))), set1(2.98023223876953125e-8f));  // u, exact for n < 2^23
  const I mirrored = iadd(iset1(0xffffff), ixor(n, iset1(-1)));                            // 2^24 - 2 - n
  const I odd = iadd(iadd(mirrored, mirrored), iset1(3));                                  // 2 (2^24 - 1 - n) + 1
  const F t = mul(to_float(odd), set1(2.98023223876953125e-8f));                           // 1 - u, exact for n >= 2^23
  const F w = sub(set1(1.0f), t);
  const M tiny = gt(set1(5.9604644775390625e-8f), sub(set1(1.0f), w));  // w rounded to 1: -log(1 - t) = t
  const F ratio = div(t, blend(tiny, set1(1.0f), sub(set1(1.0f), w)));
  const F high = blend(tiny, t, mul(sub(zero(), log(w)), ratio));
  const F e = blend(gt(set1(0.5f), low), sub(zero(), log(low)), high);
  return sub(zero(), log(e));
}

// Noise of global ids [first, first + 64); first is a multiple of 4.
static inline void noise_block(const SamplingRow& p, int64_t first, float* out) {
  I x[4];
  philox(static_cast<uint32_t>(first / 4), p.position, p.seed_lo, p.seed_hi, x);
  alignas(64) float lanes[4][16];
  for (int c = 0; c < 4; ++c) store(lanes[c], gumbel(x[c]));
  for (int i = 0; i < 16; ++i) {
    for (int c = 0; c < 4; ++c) out[4 * i + c] = lanes[c][i];
  }
}

// ---- argmax --------------------------------------------------------------------------------------------------------

struct Best {
  F value;
  I index;
};

static inline Best best_start(int32_t index) { return {set1(minus_infinity()), iset1(index)}; }

static inline I lane_ids(int64_t firstid) {
  alignas(64) int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<int32_t>(firstid) + i;
  return iload(lanes);
}

static inline F load_logits(const float* z, int lanes) {  // missing lanes are -inf
  if (lanes == 16) return load(z);
  alignas(64) float t[16];
  for (int i = 0; i < 16; ++i) t[i] = i < lanes ? z[i] : minus_infinity();
  return load(t);
}

static inline void best_update(Best& best, F v, I ids) {
  const M m = gt(v, best.value);
  best.value = blend(m, v, best.value);
  best.index = blend(m, ids, best.index);
}

static inline Candidate best_finish(const Best& best) {
  alignas(64) float values[16];
  alignas(64) int32_t ids[16];
  store(values, best.value);
  istore(ids, best.index);
  Candidate out{values[0], ids[0]};
  for (int i = 1; i < 16; ++i) {
    if (values[i] > out.value || (values[i] == out.value && ids[i] < out.id)) out = {values[i], ids[i]};
  }
  return out;
}

// z / temperature (+ noise) over local ids [from, to) of a shard whose first id is `offset`: written to `out` if not
// null; the best of the result is returned.
static inline Candidate scan(const float* z, float* out, int64_t from, int64_t to, int64_t offset, const SamplingRow* p,
                             bool temper, bool gumbel_noise) {
  Best best = best_start(static_cast<int32_t>(offset + from));
  alignas(64) float noise[kNoiseIds + 16];
  const F temperature = set1(temper ? p->temperature : 1.0f);
  int64_t i = from;
  while (i < to) {
    const int64_t block = (offset + i) / 4 * 4;  // noise comes in groups of four global ids
    const int64_t end = least(to, block + kNoiseIds - offset);
    if (gumbel_noise) noise_block(*p, block, noise);
    for (; i < end; i += 16) {
      const int lanes = static_cast<int>(least(16, end - i));
      F v = load_logits(z + i, lanes);
      if (temper) v = div(v, temperature);
      if (gumbel_noise) v = add(v, load_upto(noise + (offset + i - block), lanes));
      if (out != nullptr) store_upto(out + i, v, lanes);
      best_update(best, v, lane_ids(offset + i));
    }
    i = end;
  }
  return best_finish(best);
}

static inline bool sampled(const SamplingRow* p) {
  return p != nullptr && (p->flags & kGreedy) == 0 && (p->flags & kRowValid) != 0 && p->temperature > 0.0f;
}

static void logits(const LogitsArgs& a) {
  if (a.s == 0) return;
  const int64_t segments = most(1, ceil_div(a.v, kSegment));
  Candidate* const found = scratch<Candidate>(Scratch::kTiles, static_cast<size_t>(a.s * segments));
  const auto item = [&](int64_t i) {
    const int64_t row = i / segments, from = i % segments * kSegment, to = least(a.v, from + kSegment);
    const SamplingRow* p = a.params == nullptr ? nullptr : a.params + row;
    const bool draw = sampled(p);
    found[i] = scan(a.z + row * a.ldz, a.out == nullptr ? nullptr : a.out + row * a.ldo, from, to, a.offset, p,
                    draw && a.temper, draw && a.gumbel);
  };
  if (a.s * a.v < kSerialElements) {
    for (int64_t i = 0; i < a.s * segments; ++i) item(i);
  } else {
    parallel(a.s * segments, item);
  }
  if (a.index == nullptr) return;
  for (int64_t row = 0; row < a.s; ++row) {
    Candidate best = found[row * segments];
    for (int64_t i = 1; i < segments; ++i) {  // segments ascend, so a tie keeps the lower id
      if (found[row * segments + i].value > best.value) best = found[row * segments + i];
    }
    if (a.value != nullptr) a.value[row] = best.value;
    a.index[row] = best.value > minus_infinity() ? best.id : -1;
  }
}

// ---- the full sampler ----------------------------------------------------------------------------------------------

static inline float row_max(const float* z, int64_t n) {  // NaN is ignored
  F top = set1(minus_infinity());
  each_vector(n, [&](int64_t i, int lanes) { top = max(load_logits(z + i, lanes), top); });
  return hmax(top);
}

// log sum exp over the row, NaN ignored; +inf where the row holds +inf.
static inline float row_log_sum(const float* z, int64_t n, float top) {
  if (!(top > minus_infinity()) || top == __builtin_inff()) return top;
  const F base = set1(top);
  double total = 0.0;
  for (int64_t i = 0; i < n; i += 1024) {
    F sum = zero();
    each_vector(least(1024, n - i), [&](int64_t j, int lanes) {
      const F e = exp(sub(load_logits(z + i + j, lanes), base));
      sum = add(sum, max(e, zero()));  // max returns its second operand where e is NaN
    });
    total += static_cast<double>(hsum(sum));
  }
  return log_sum(top, total);
}

static inline float logprob_of(float z, float normaliser) {
  const float value = z - normaliser;
  return value >= kLogprobFloor ? value : z == __builtin_inff() ? 0.0f : kLogprobFloor;
}

// Raw log-probabilities of the best `count` tokens; unused places hold id -1 and the floor.
static inline void top_logprobs(const float* z, int64_t n, int64_t count, float normaliser, int32_t* ids, float* out) {
  Candidate best[kTopLogprobs];
  int64_t size = 0;
  float floor = minus_infinity();
  each_vector(count > 0 ? n : 0, [&](int64_t i, int lanes) {
    if (!any(gt(load_logits(z + i, lanes), set1(floor)))) return;
    for (int j = 0; j < lanes; ++j) {
      if (!(z[i + j] > floor)) continue;
      size = insert_top(best, size, count, {z[i + j], static_cast<int32_t>(i + j)});
      if (size == count) floor = best[count - 1].value;
    }
  });
  for (int64_t i = 0; i < kTopLogprobs; ++i) {
    ids[i] = i < size ? best[i].id : -1;
    out[i] = i < size ? logprob_of(best[i].value, normaliser) : kLogprobFloor;
  }
}

// Bias and penalties: the logits the row samples from.
static inline void adjust(const SampleArgs& a, const SamplingRow& p, float* z) {
  const bool slotted = p.slot >= 0 && p.slot < a.rows;
  if ((p.flags & kBias) != 0 && slotted) {
    const float* bias = a.bias + p.slot * a.ldb;
    each_vector(a.vocab, [&](int64_t i, int lanes) {
      store_upto(z + i, add(load_upto(z + i, lanes), load_upto(bias + i, lanes)), lanes);
    });
  }
  if ((p.flags & kPenalties) != 0 && slotted) {
    const int32_t* counts = a.counts + p.slot * a.ldc;
    const uint8_t* seen = a.seen + p.slot * a.lds;
    for (int64_t i = 0; i < a.vocab; ++i) {
      if (counts[i] > 0 || seen[i] != 0) z[i] = z[i] > 0.0f ? z[i] / p.repetition : z[i] * p.repetition;
      if (counts[i] > 0) z[i] = z[i] - p.presence - p.frequency * static_cast<float>(counts[i]);
    }
  }
}

// Draws among the candidates that the filters keep; z is tempered, `top` its finite maximum.
static inline int32_t draw_filtered(const SamplingRow& p, const float* z, int64_t n, float top) {
  Candidate* const c = scratch<Candidate>(Scratch::kOrder, static_cast<size_t>(n));
  int64_t count = 0;
  const float floor = top - kNegligible;
  for (int64_t i = 0; i < n; ++i) {
    c[count] = {z[i], static_cast<int32_t>(i)};
    count += z[i] >= floor ? 1 : 0;
  }
  count = filter_candidates(c, count, p.top_k, p.top_p, p.min_p, top);
  Candidate best{minus_infinity(), 0};
  for (int64_t i = 0; i < count; ++i) {  // the order of `c` does not matter: a tie goes to the lower id
    alignas(64) float noise[kNoiseIds];
    const int64_t block = c[i].id / 4 * 4;
    noise_block(p, block, noise);
    const Candidate drawn{c[i].value + noise[c[i].id - block], c[i].id};
    if (drawn.value > best.value || (drawn.value == best.value && drawn.id < best.id)) best = drawn;
  }
  return best.id;
}

static void sample_row(const SampleArgs& a, int64_t row) {
  const SamplingRow& p = a.params[row];
  const float* const raw = a.z + row * a.ldz;
  int32_t* const top_ids = a.top_ids + row * kTopLogprobs;
  float* const top_values = a.top_logprobs + row * kTopLogprobs;
  const bool valid = (p.flags & kRowValid) != 0;
  const bool report = valid && (p.flags & kLogprobs) != 0;

  float normaliser = 0.0f;
  if (report) normaliser = row_log_sum(raw, a.vocab, row_max(raw, a.vocab));
  const int64_t wanted = report ? most(0, least(kTopLogprobs, p.top_logprobs)) : 0;
  top_logprobs(raw, a.vocab, wanted, normaliser, top_ids, top_values);
  a.token[row] = -1;
  a.logprob[row] = 0.0f;
  if (!valid) return;

  const float* z = raw;
  if ((p.flags & (kBias | kPenalties)) != 0) {
    float* const work = scratch<float>(Scratch::kLogits, static_cast<size_t>(a.vocab));
    __builtin_memcpy(work, raw, static_cast<size_t>(a.vocab) * sizeof(float));
    adjust(a, p, work);
    z = work;
  }
  Candidate winner;
  if (!sampled(&p)) {
    winner = scan(z, nullptr, 0, a.vocab, 0, nullptr, false, false);
  } else if ((p.flags & kFilters) == 0) {
    winner = scan(z, nullptr, 0, a.vocab, 0, &p, true, true);
  } else {
    float* const tempered = scratch<float>(Scratch::kPanel, static_cast<size_t>(a.vocab));
    winner = scan(z, tempered, 0, a.vocab, 0, &p, true, false);
    const bool finite = winner.value > minus_infinity() && winner.value < __builtin_inff();
    if (finite) winner.id = draw_filtered(p, tempered, a.vocab, winner.value);
  }
  if (!(winner.value > minus_infinity())) return;  // nothing to choose from: token -1, not counted
  a.token[row] = winner.id;
  if (report) a.logprob[row] = logprob_of(raw[winner.id], normaliser);
  if ((p.flags & kPenalties) != 0 && p.slot >= 0 && p.slot < a.rows) a.counts[p.slot * a.ldc + winner.id] += 1;
}

static void sample(const SampleArgs& a) {
  if (a.vocab <= 0) return;
  if (a.s * a.vocab < kSerialElements) {
    for (int64_t row = 0; row < a.s; ++row) sample_row(a, row);
  } else {
    parallel(a.s, [&](int64_t row) { sample_row(a, row); });
  }
}
