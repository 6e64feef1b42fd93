// Python bindings. Pointers arrive as integers (Tensor.data_ptr()), strides in elements, dtypes as the integers of
// DType; the Python wrappers check shapes and dtypes. Every call releases the GIL. Arguments are positional: keyword
// parsing would cost more than a small kernel.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "dispatch.h"
#include "pool.h"
#include "program.h"
#include "types.h"

namespace py = pybind11;

namespace {

using Release = py::call_guard<py::gil_scoped_release>;
using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

ts::DType dtype(int value) {
  if (value != 0 && value != 1) throw std::invalid_argument("dtype must be 0 (float32) or 1 (bfloat16)");
  return static_cast<ts::DType>(value);
}

ts::Format format(int value) {
  if (value < 0 || value >= ts::kFormats) throw std::invalid_argument("unknown packed weight format");
  return static_cast<ts::Format>(value);
}

void linear(Address x, int64_t ldx, int x_dtype, Address w, int w_format, int64_t m, int64_t n, int64_t k, Address bias,
            int bias_dtype, Address out, int64_t ldo, int out_dtype, bool int8_activations) {
  ts::submit(ts::LinearArgs{at<void>(x), ldx, dtype(x_dtype), at<uint8_t>(w), format(w_format), m, n, k, at<void>(bias),
                            dtype(bias_dtype), at<void>(out), ldo, dtype(out_dtype), int8_activations});
}

void lookup(Address ids, int64_t t, int64_t rows, int64_t width, int64_t offset, Address w, int64_t ldw, bool packed,
            int w_format, Address out, int64_t ldo, int out_dtype) {
  ts::submit(ts::LookupArgs{at<int32_t>(ids), t, rows, width, offset, at<void>(w), ldw, packed, format(w_format),
                            at<void>(out), ldo, dtype(out_dtype)});
}

void norm(Address x, int64_t xo, int64_t xi, Address y, int64_t yo, Address w, int w_dtype, Address sum, int64_t so,
          Address out, int64_t oo, int64_t oi, int64_t outer, int64_t inner, int64_t d, float eps, int type) {
  ts::submit(ts::NormArgs{at<void>(x), xo, xi, at<void>(y), yo, at<void>(w), dtype(w_dtype), at<void>(sum), so,
                          at<void>(out), oo, oi, outer, inner, d, eps, dtype(type)});
}

void rope(Address x, int64_t xt, int64_t xn, Address pos, Address table, int64_t ldt, Address out, int64_t ot,
          int64_t on, int64_t t, int64_t n, int64_t d, int64_t r, int type) {
  ts::submit(ts::RopeArgs{at<void>(x), xt, xn, at<int32_t>(pos), at<float>(table), ldt, at<void>(out), ot, on, t, n, d,
                          r, dtype(type)});
}

void pointwise(int kind, Address a, int64_t lda, Address b, int64_t ldb, Address out, int64_t ldo, int64_t rows,
               int64_t width, float factor, int type) {
  if (kind < 0 || kind >= ts::kPointwiseKinds) throw std::invalid_argument("unknown pointwise kind");
  ts::submit(ts::PointwiseArgs{static_cast<ts::Pointwise>(kind), at<void>(a), lda, at<void>(b), ldb, at<void>(out), ldo,
                               rows, width, factor, dtype(type)});
}

void append(Address k, int64_t kt, int64_t kh, Address v, int64_t vt, int64_t vh, Address slot, Address kcache,
            Address vcache, int64_t cs, int64_t ch, int64_t t, int64_t kv, int64_t d, int64_t slots, int type,
            int cache_type) {
  ts::submit(ts::AppendArgs{at<void>(k), kt, kh, at<void>(v), vt, vh, at<int32_t>(slot), at<void>(kcache),
                            at<void>(vcache), cs, ch, t, kv, d, slots, dtype(type), dtype(cache_type)});
}

void attend(Address q, int64_t qt, int64_t qn, Address kcache, Address vcache, int64_t cs, int64_t ch, Address pos,
            Address row, Address table, int64_t ldt, Address out, int64_t ot, int64_t on, int64_t t, int64_t n,
            int64_t kv, int64_t d, int64_t page, float scale, int64_t window, float softcap, Address sinks,
            int sinks_type, int type, int cache_type) {
  ts::submit(ts::AttendArgs{at<void>(q),
                            qt,
                            qn,
                            at<void>(kcache),
                            at<void>(vcache),
                            cs,
                            ch,
                            at<int32_t>(pos),
                            at<int32_t>(row),
                            at<int32_t>(table),
                            ldt,
                            at<void>(out),
                            ot,
                            on,
                            t,
                            n,
                            kv,
                            d,
                            page,
                            scale,
                            window,
                            softcap,
                            at<void>(sinks),
                            dtype(sinks_type),
                            dtype(type),
                            dtype(cache_type)});
}

void conv(Address pos, Address row, Address state, int64_t t, int64_t states, Address x, int64_t xt, int64_t xn,
          Address w, int w_dtype, Address past, Address out, int64_t ot, int64_t on, int64_t n, int64_t d, int64_t taps,
          int type) {
  if (taps < 2 || taps > ts::kMaxTaps) throw std::invalid_argument("a convolution has 2 to 8 taps");
  ts::submit(ts::ConvArgs{{at<int32_t>(pos), at<int32_t>(row), at<int32_t>(state), t, states},
                          at<void>(x),
                          xt,
                          xn,
                          at<void>(w),
                          dtype(w_dtype),
                          at<void>(past),
                          at<void>(out),
                          ot,
                          on,
                          n,
                          d,
                          taps,
                          dtype(type)});
}

void delta(Address pos, Address row, Address state, int64_t t, int64_t states, Address q, int64_t qt, int64_t qn,
           Address k, int64_t kt, int64_t kn, Address v, int64_t vt, int64_t vn, Address decay, int64_t gt,
           Address beta, int64_t bt, Address memory, Address out, int64_t ot, int64_t on, int64_t hk, int64_t hv,
           int64_t dk, int64_t dv, float scale, int type) {
  ts::submit(ts::DeltaArgs{{at<int32_t>(pos), at<int32_t>(row), at<int32_t>(state), t, states},
                           at<float>(q),
                           qt,
                           qn,
                           at<float>(k),
                           kt,
                           kn,
                           at<void>(v),
                           vt,
                           vn,
                           at<float>(decay),
                           gt,
                           at<void>(beta),
                           bt,
                           at<float>(memory),
                           at<void>(out),
                           ot,
                           on,
                           hk,
                           hv,
                           dk,
                           dv,
                           scale,
                           dtype(type)});
}

void decay(Address x, int64_t xt, Address a, Address dt, Address out, int64_t ot, int64_t t, int64_t n, int type) {
  ts::submit(ts::DecayArgs{at<void>(x), xt, at<float>(a), at<float>(dt), at<float>(out), ot, t, n, dtype(type)});
}

void l2_norm(Address x, int64_t xt, int64_t xn, Address out, int64_t ot, int64_t on, int64_t t, int64_t n, int64_t d,
             float eps, int type) {
  ts::submit(ts::L2NormArgs{at<void>(x), xt, xn, at<float>(out), ot, on, t, n, d, eps, dtype(type)});
}

void gated_norm(Address x, int64_t xt, int64_t xn, Address z, int64_t zt, int64_t zn, Address w, int w_dtype,
                Address out, int64_t ot, int64_t on, int64_t t, int64_t n, int64_t d, float eps, int type) {
  ts::submit(ts::GatedNormArgs{at<void>(x), xt, xn, at<void>(z), zt, zn, at<void>(w), dtype(w_dtype), at<void>(out), ot,
                               on, t, n, d, eps, dtype(type)});
}

void logits(Address z, int64_t ldz, Address params, Address out, int64_t ldo, Address value, Address index, int64_t s,
            int64_t v, int64_t offset, bool temper, bool gumbel) {
  ts::submit(ts::LogitsArgs{at<float>(z), ldz, at<ts::SamplingRow>(params), at<float>(out), ldo, at<float>(value),
                            at<int32_t>(index), s, v, offset, temper, gumbel});
}

void sample(Address z, int64_t ldz, Address params, Address counts, int64_t ldc, Address seen, int64_t lds,
            Address bias, int64_t ldb, int64_t rows, Address token, Address logprob, Address top_ids,
            Address top_logprobs, int64_t s, int64_t vocab) {
  ts::submit(ts::SampleArgs{at<float>(z), ldz, at<ts::SamplingRow>(params), at<int32_t>(counts), ldc, at<uint8_t>(seen),
                            lds, at<float>(bias), ldb, rows, at<int32_t>(token), at<float>(logprob),
                            at<int32_t>(top_ids), at<float>(top_logprobs), s, vocab});
}

// True if the kernel took the advice. Elsewhere than on Linux there is nothing to ask.
bool advise_huge_pages([[maybe_unused]] Address data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  return madvise(at<void>(data), static_cast<size_t>(bytes), MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

uint64_t read_sum(Address data, int64_t bytes) { return ts::kernels().read_sum(at<uint8_t>(data), bytes / 64 * 64); }

}  // namespace

PYBIND11_MODULE(_cpu, m, py::mod_gil_not_used()) {
  m.doc() = "C++ CPU kernels of TokenSpeed. Use tokenspeed.kernels, which checks shapes and dtypes.";
  m.def("linear", &linear, Release());
  m.def("lookup", &lookup, Release());
  m.def("norm", &norm, Release());
  m.def("rope", &rope, Release());
  m.def("pointwise", &pointwise, Release());
  m.def("append", &append, Release());
  m.def("attend", &attend, Release());
  m.def("conv", &conv, Release());
  m.def("delta", &delta, Release());
  m.def("decay", &decay, Release());
  m.def("l2_norm", &l2_norm, Release());
  m.def("gated_norm", &gated_norm, Release());
  m.def("logits", &logits, Release());
  m.def("sample", &sample, Release());
  m.def("advise_huge_pages", &advise_huge_pages);
  m.def("read_sum", &read_sum, Release());
  py::class_<ts::Program, std::shared_ptr<ts::Program>>(m, "Program")
      .def("run", &ts::Program::run, Release())
      .def("__len__", &ts::Program::size);
  m.def("begin_capture", &ts::begin_capture);
  m.def("end_capture", &ts::end_capture);
  m.def("tile_bytes", [](int w_format, int64_t blocks) { return ts::tile_bytes(format(w_format), blocks); });
  m.def("threads", &ts::pool_threads);
  m.def("set_threads", &ts::pool_resize, py::arg("threads"), Release());
  m.def("available_threads", &ts::pool_available);
  m.def("source_hash", [] { return TS_SOURCE_HASH; });
  m.def("isa", [] { return ts::kernels().name; });
  m.def("supported_isas", &ts::supported_isas);
  m.def("set_isa", &ts::set_isa, py::arg("name"));
}
