// tokenspeed._scheduler: the control plane for Python. Calls are serialised by a mutex that is taken with the GIL
// released, so a planning step never stops the interpreter's other threads. A plan's arrays are views of the plan's own
// memory and keep it alive; the scheduler does not reuse that memory before.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace py = pybind11;

namespace tokenspeed {
namespace {

using TokenArray = py::array_t<Token, py::array::c_style>;  // int32 only: a lossy cast is refused, not made

std::span<const Token> SpanOf(const TokenArray& array, const char* name) {
  if (array.ndim() != 1)
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.ndim()) +
                                " dimensions; a one-dimensional int32 array is needed");
  return {array.data(), static_cast<std::size_t>(array.size())};
}

// `array`, which `owner` holds, as a numpy array that keeps it alive. Read-only; without a shape it is flat.
template <class T>
py::array View(const py::object& owner, std::span<T> array, std::vector<py::ssize_t> shape = {}) {
  if (shape.empty()) shape = {static_cast<py::ssize_t>(array.size())};
  py::array_t<std::remove_const_t<T>> view(std::move(shape), array.data(), owner);
  view.attr("flags").attr("writeable") = false;
  return view;
}

template <class Member>
auto ArrayOf(Member member) {
  return [member](const py::object& self) { return View(self, self.cast<const Plan&>().arrays().*member); };
}

std::span<const std::byte> BytesOf(const py::buffer_info& info) {
  return {static_cast<const std::byte*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)};
}

py::buffer_info Contiguous(const py::buffer& buffer, bool writable) {
  py::buffer_info info = buffer.request(writable);
  py::ssize_t stride = info.itemsize;
  for (py::ssize_t dim = info.ndim - 1; dim >= 0; --dim) {
    if (info.shape[static_cast<std::size_t>(dim)] > 1 && info.strides[static_cast<std::size_t>(dim)] != stride)
      throw std::invalid_argument("the buffer is not contiguous");
    stride *= info.shape[static_cast<std::size_t>(dim)];
  }
  return info;
}

// Called in every turn of the engine's loop, so the keys are made once.
py::dict StatsDict(const Stats& s) {
  const std::pair<const char*, std::int64_t> fields[] = {{"running", s.running},
                                                         {"waiting", s.waiting},
                                                         {"leaving", s.leaving},
                                                         {"in_flight", s.in_flight},
                                                         {"kv_pages_total", s.kv_pages_total},
                                                         {"kv_pages_free", s.kv_pages_free},
                                                         {"kv_pages_cached", s.kv_pages_cached},
                                                         {"kv_pages_evictable", s.kv_pages_evictable},
                                                         {"queued_tokens", s.queued_tokens},
                                                         {"window_pages_total", s.window_pages_total},
                                                         {"window_pages_free", s.window_pages_free},
                                                         {"window_pages_idle", s.window_pages_idle},
                                                         {"prefix_query_tokens", s.prefix_query_tokens},
                                                         {"prefix_hit_tokens", s.prefix_hit_tokens},
                                                         {"retractions", s.retractions},
                                                         {"evicted_pages", s.evicted_pages},
                                                         {"steps", s.steps},
                                                         {"step_tokens", s.step_tokens},
                                                         {"hit_tokens_device", s.hit_tokens_device},
                                                         {"hit_tokens_host", s.hit_tokens_host},
                                                         {"hit_tokens_storage", s.hit_tokens_storage},
                                                         {"host_pages_total", s.host_pages_total},
                                                         {"host_pages_free", s.host_pages_free},
                                                         {"host_pages_cached", s.host_pages_cached},
                                                         {"host_pages_pinned", s.host_pages_pinned},
                                                         {"host_evicted_pages", s.host_evicted_pages},
                                                         {"queue_age_steps", s.queue_age_steps},
                                                         {"decode_skips", s.decode_skips},
                                                         {"decode_stall_tokens", s.decode_stall_tokens},
                                                         {"write_back_in_flight", s.transfers[0]},
                                                         {"write_back_pages", s.moved_pages[0]},
                                                         {"write_back_missing_pages", s.missing_pages[0]},
                                                         {"load_back_in_flight", s.transfers[1]},
                                                         {"load_back_pages", s.moved_pages[1]},
                                                         {"load_back_missing_pages", s.missing_pages[1]},
                                                         {"prefetch_in_flight", s.transfers[2]},
                                                         {"prefetch_pages", s.moved_pages[2]},
                                                         {"prefetch_missing_pages", s.missing_pages[2]},
                                                         {"backup_in_flight", s.transfers[3]},
                                                         {"backup_pages", s.moved_pages[3]},
                                                         {"backup_missing_pages", s.missing_pages[3]}};
  static_assert(kTransferKinds == 4);
  constexpr std::size_t kFields = std::size(fields);
  static const auto keys = [&] {
    std::array<PyObject*, kFields> made{};  // never freed: the interpreter may be gone before
    for (std::size_t i = 0; i < kFields; ++i) made[i] = PyUnicode_InternFromString(fields[i].first);
    return made;
  }();
  py::dict dict;
  for (std::size_t i = 0; i < kFields; ++i)
    if (PyDict_SetItem(dict.ptr(), keys[i], py::int_(fields[i].second).ptr()) != 0) throw py::error_already_set();
  return dict;
}

// The scheduler behind its lock.
class Guarded {
 public:
  explicit Guarded(Config config) : scheduler_(std::move(config)) {}

  template <class F>
  auto Call(F&& f) {
    py::gil_scoped_release release;
    std::lock_guard lock(mutex_);
    return f(scheduler_);
  }
  const Config& config() const noexcept { return scheduler_.config(); }

  std::optional<Plan> NextPlan() {
    return Call([&](Scheduler& scheduler) {
      const auto start = Clock::now();
      auto plan = scheduler.NextPlan();
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      plan_seconds_ += seconds;
      plan_seconds_max_ = std::max(plan_seconds_max_, seconds);
      return plan;
    });
  }

  py::dict Stats() {
    double total = 0, most = 0;
    const auto stats = Call([&](Scheduler& scheduler) {
      total = plan_seconds_;
      most = plan_seconds_max_;
      return scheduler.stats();
    });
    py::dict dict = StatsDict(stats);
    dict["plan_seconds"] = total;
    dict["plan_seconds_max"] = most;
    return dict;
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::mutex mutex_;
  Scheduler scheduler_;
  double plan_seconds_ = 0, plan_seconds_max_ = 0;  // in NextPlan, since construction
};

py::dict InfoDict(const RequestInfo& info) {
  using namespace py::literals;
  return py::dict("id"_a = info.id, "state"_a = std::string(info.state), "computed_tokens"_a = info.computed_tokens,
                  "total_tokens"_a = info.total_tokens, "output_tokens"_a = info.output_tokens, "pages"_a = info.pages,
                  "window_pages"_a = info.window_pages, "group"_a = info.group, "in_flight"_a = info.in_flight,
                  "host_pages"_a = info.host_pages, "transfers"_a = info.transfers, "age_steps"_a = info.age_steps);
}

void BindConfig(py::module_& module) {
  using namespace py::literals;
  const Config defaults;
  py::class_<Config>(module, "Config", "Sizes and policy of a scheduler; a value that cannot work raises ValueError.")
      .def(py::init([](int page_size, int num_pages, int max_requests, std::vector<int> token_buckets, int max_seq_len,
                       int dp, int prefill_chunk, bool prefix_cache, int max_queued_requests, int max_queued_tokens,
                       int max_in_flight, int decode_stall_tokens, int ageing_steps, int state_snapshots, int window,
                       int window_pages, int host_pages, bool storage, int storage_min_pages, int write_back_pages,
                       int hash_bits, int kv_events) {
             Config config{page_size,
                           num_pages,
                           max_requests,
                           std::move(token_buckets),
                           max_seq_len,
                           dp,
                           prefill_chunk,
                           prefix_cache,
                           max_queued_requests,
                           max_queued_tokens,
                           max_in_flight,
                           decode_stall_tokens,
                           ageing_steps,
                           state_snapshots,
                           window,
                           window_pages,
                           host_pages,
                           storage,
                           storage_min_pages,
                           write_back_pages,
                           hash_bits,
                           kv_events};
             config.Validate();
             return config;
           }),
           py::kw_only(), "page_size"_a, "num_pages"_a, "max_requests"_a, "token_buckets"_a, "max_seq_len"_a,
           "dp"_a = defaults.dp, "prefill_chunk"_a = defaults.prefill_chunk, "prefix_cache"_a = defaults.prefix_cache,
           "max_queued_requests"_a = defaults.max_queued_requests, "max_queued_tokens"_a = defaults.max_queued_tokens,
           "max_in_flight"_a = defaults.max_in_flight, "decode_stall_tokens"_a = defaults.decode_stall_tokens,
           "ageing_steps"_a = defaults.ageing_steps, "state_snapshots"_a = defaults.state_snapshots,
           "window"_a = defaults.window, "window_pages"_a = defaults.window_pages, "host_pages"_a = defaults.host_pages,
           "storage"_a = defaults.storage, "storage_min_pages"_a = defaults.storage_min_pages,
           "write_back_pages"_a = defaults.write_back_pages, "hash_bits"_a = defaults.hash_bits,
           "kv_events"_a = defaults.kv_events)
      .def_readonly("page_size", &Config::page_size)
      .def_readonly("num_pages", &Config::num_pages)
      .def_readonly("max_requests", &Config::max_requests)
      .def_readonly("token_buckets", &Config::token_buckets)
      .def_readonly("max_seq_len", &Config::max_seq_len)
      .def_readonly("dp", &Config::dp)
      .def_readonly("prefill_chunk", &Config::prefill_chunk)
      .def_readonly("prefix_cache", &Config::prefix_cache)
      .def_readonly("max_queued_requests", &Config::max_queued_requests)
      .def_readonly("max_queued_tokens", &Config::max_queued_tokens)
      .def_readonly("max_in_flight", &Config::max_in_flight)
      .def_readonly("decode_stall_tokens", &Config::decode_stall_tokens)
      .def_readonly("ageing_steps", &Config::ageing_steps)
      .def_readonly("state_snapshots", &Config::state_snapshots)
      .def_readonly("window", &Config::window)
      .def_readonly("window_pages", &Config::window_pages)
      .def_readonly("host_pages", &Config::host_pages)
      .def_readonly("storage", &Config::storage)
      .def_readonly("storage_min_pages", &Config::storage_min_pages)
      .def_readonly("write_back_pages", &Config::write_back_pages)
      .def_readonly("hash_bits", &Config::hash_bits)
      .def_readonly("kv_events", &Config::kv_events);
}

void BindOutput(py::module_& module) {
  py::class_<Output>(module, "Output", "One sampled token.")
      .def_readonly("request_id", &Output::request_id)
      .def_readonly("token", &Output::token)
      .def_property_readonly("cached_tokens", [](const Output& output) { return output.cached.total(); })
      .def_property_readonly("cached_device", [](const Output& output) { return output.cached.device; })
      .def_property_readonly("cached_host", [](const Output& output) { return output.cached.host; })
      .def_property_readonly("cached_storage", [](const Output& output) { return output.cached.storage; })
      .def_readonly("num_output", &Output::num_output)
      .def_property_readonly("finish_reason",
                             [](const Output& output) -> const char* {
                               switch (output.finish_reason) {
                                 case FinishReason::kStop:
                                   return "stop";
                                 case FinishReason::kLength:
                                   return "length";
                                 case FinishReason::kNone:
                                   break;
                               }
                               return nullptr;
                             })
      .def("__repr__", [](const py::object& self) {
        return py::str("Output(request_id={}, token={}, finish_reason={!r}, cached_tokens={}, num_output={})")
            .format(self.attr("request_id"), self.attr("token"), self.attr("finish_reason"), self.attr("cached_tokens"),
                    self.attr("num_output"));
      });
}

void BindPlan(py::module_& module) {
  py::class_<Plan>(module, "Plan", "One step's work as flat arrays; read-only views that keep the plan alive.")
      .def_property_readonly("step", &Plan::step)
      .def_property_readonly("dp", [](const Plan& plan) { return plan.shape().dp; })
      .def_property_readonly("bucket", [](const Plan& plan) { return plan.shape().bucket; })
      .def_property_readonly("rows", [](const Plan& plan) { return plan.shape().rows; })
      .def_property_readonly("width", [](const Plan& plan) { return plan.shape().width; })
      .def_property_readonly("digest", &Plan::digest)
      .def_property_readonly("loads", ArrayOf(&PlanArrays::loads))
      .def_property_readonly("ids", ArrayOf(&PlanArrays::ids))
      .def_property_readonly("pos", ArrayOf(&PlanArrays::pos))
      .def_property_readonly("slot", ArrayOf(&PlanArrays::slot))
      .def_property_readonly("window_slot", ArrayOf(&PlanArrays::window_slot))
      .def_property_readonly("row", ArrayOf(&PlanArrays::row))
      .def_property_readonly("last", ArrayOf(&PlanArrays::last))
      .def_property_readonly("request_ids", ArrayOf(&PlanArrays::request_ids))
      .def_property_readonly("request_slots", ArrayOf(&PlanArrays::request_slots))
      .def_property_readonly("out_pos", ArrayOf(&PlanArrays::out_pos))
      .def_property_readonly("load_state", ArrayOf(&PlanArrays::load_state))
      .def_property_readonly("save_state", ArrayOf(&PlanArrays::save_state))
      .def_property_readonly("num_tokens", ArrayOf(&PlanArrays::num_tokens))
      .def_property_readonly("num_rows", ArrayOf(&PlanArrays::num_rows))
      .def_property_readonly("new_rows", ArrayOf(&PlanArrays::new_rows))
      .def_property_readonly("table",
                             [](const py::object& self) {
                               const auto& plan = self.cast<const Plan&>();
                               return View(self, plan.arrays().table,
                                           {static_cast<py::ssize_t>(plan.shape().requests()), plan.shape().width});
                             })
      .def_property_readonly("window_table",
                             [](const py::object& self) {
                               const auto& plan = self.cast<const Plan&>();
                               const auto rows = static_cast<py::ssize_t>(plan.shape().requests());
                               return View(self, plan.arrays().window_table,
                                           {plan.shape().windows * rows, plan.shape().width});
                             })
      .def_property_readonly("packed_size", &Plan::packed_size)
      .def("pack",
           [](const Plan& plan) {
             auto bytes = py::reinterpret_steal<py::bytes>(
                 PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(plan.packed_size())));
             if (!bytes) throw py::error_already_set();
             plan.Pack({reinterpret_cast<std::byte*>(PyBytes_AS_STRING(bytes.ptr())), plan.packed_size()});
             return bytes;
           })
      .def(
          "pack_into",
          [](const Plan& plan, const py::buffer& buffer) {
            const py::buffer_info info = Contiguous(buffer, true);
            plan.Pack({static_cast<std::byte*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize)});
            return plan.packed_size();
          },
          py::arg("buffer"))
      .def_static(
          "unpack",
          [](const py::buffer& buffer) {
            const py::buffer_info info = Contiguous(buffer, false);
            return Plan::Unpack(BytesOf(info));
          },
          py::arg("buffer"));
}

void BindTransfer(py::module_& module) {
  py::class_<Transfer>(module, "Transfer", "Pages to copy between tiers; read-only views that keep it alive.")
      .def_readonly("ticket", &Transfer::ticket)
      .def_property_readonly("kind", [](const Transfer& transfer) { return std::string(NameOf(transfer.kind)); })
      .def_readonly("group", &Transfer::group)
      .def_readonly("request_id", &Transfer::request)
      .def_property_readonly("device",
                             [](const py::object& self) {
                               return View(self, std::span<const PageId>(self.cast<const Transfer&>().device));
                             })
      .def_property_readonly("window",
                             [](const py::object& self) {
                               return View(self, std::span<const PageId>(self.cast<const Transfer&>().window));
                             })
      .def_property_readonly(
          "host",
          [](const py::object& self) { return View(self, std::span<const PageId>(self.cast<const Transfer&>().host)); })
      .def_property_readonly("keys", [](const py::object& self) {
        const auto& keys = self.cast<const Transfer&>().keys;
        const auto bytes = std::as_bytes(std::span(keys));
        return View(self, std::span(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()),
                    {static_cast<py::ssize_t>(keys.size()), static_cast<py::ssize_t>(sizeof(PageKey))});
      });
}

py::bytes BytesOf(const PageKey& key) { return {reinterpret_cast<const char*>(&key), sizeof(key)}; }

void BindKvEvent(py::module_& module) {
  py::class_<KvEvent>(module, "KvEvent", "A page came to a prefix cache, or left it.")
      .def_readonly("number", &KvEvent::number)
      .def_property_readonly("kind", [](const KvEvent& event) { return std::string(NameOf(event.kind)); })
      .def_property_readonly("tier", [](const KvEvent& event) { return std::string(NameOf(event.tier)); })
      .def_readonly("group", &KvEvent::group)
      .def_property_readonly("key", [](const KvEvent& event) { return BytesOf(event.key); })
      .def_property_readonly("parent", [](const KvEvent& event) { return BytesOf(event.parent); });
}

void BindScheduler(py::module_& module) {
  using namespace py::literals;
  py::class_<Guarded>(module, "Scheduler", "Decides what runs next and owns every KV page. Deterministic; thread safe.")
      .def(py::init<Config>(), "config"_a)
      .def_property_readonly("config", &Guarded::config)
      .def(
          "submit",
          [](Guarded& self, RequestId request_id, const TokenArray& tokens, int max_new_tokens, int min_new_tokens,
             std::vector<Token> stop_token_ids, int priority, const std::string& cache_salt, bool bootstrap) {
            const auto span = SpanOf(tokens, "tokens");
            self.Call([&](Scheduler& s) {
              s.Submit(request_id, span, {max_new_tokens, min_new_tokens, std::move(stop_token_ids)}, priority,
                       cache_salt, bootstrap);
            });
          },
          "request_id"_a, "tokens"_a, "max_new_tokens"_a, py::kw_only(), "min_new_tokens"_a = 0,
          "stop_token_ids"_a = std::vector<Token>(), "priority"_a = 0, "cache_salt"_a = py::bytes(),
          "bootstrap"_a = false)
      .def(
          "abort", [](Guarded& self, RequestId id) { return self.Call([&](Scheduler& s) { return s.Abort(id); }); },
          "request_id"_a)
      .def(
          "finish", [](Guarded& self, RequestId id) { return self.Call([&](Scheduler& s) { return s.Finish(id); }); },
          "request_id"_a)
      .def(
          "retract", [](Guarded& self, RequestId id) { return self.Call([&](Scheduler& s) { return s.Retract(id); }); },
          "request_id"_a)
      .def(
          "bootstrapped",
          [](Guarded& self, RequestId id) { return self.Call([&](Scheduler& s) { return s.Bootstrapped(id); }); },
          "request_id"_a)
      .def(
          "bootstrap_failed",
          [](Guarded& self, RequestId id) { return self.Call([&](Scheduler& s) { return s.BootstrapFailed(id); }); },
          "request_id"_a)
      .def("transfers", [](Guarded& self) { return self.Call([](Scheduler& s) { return s.Transfers(); }); })
      .def(
          "transferred",
          [](Guarded& self, TicketId ticket, int pages) {
            return self.Call([&](Scheduler& s) { return s.Transferred(ticket, pages); });
          },
          "ticket"_a, "pages"_a)
      .def("next_plan", &Guarded::NextPlan)
      .def(
          "advance",
          [](Guarded& self, StepId step, const TokenArray& tokens) {
            const auto span = SpanOf(tokens, "tokens");
            return self.Call([&](Scheduler& s) {
              std::vector<Output> outputs;
              s.Advance(step, span, outputs);
              return outputs;
            });
          },
          "step"_a, "tokens"_a)
      .def(
          "fail", [](Guarded& self, StepId step) { self.Call([&](Scheduler& s) { s.Fail(step); }); }, "step"_a)
      .def(
          "cached_prefix",
          [](Guarded& self, const TokenArray& tokens, const std::string& cache_salt) {
            const auto span = SpanOf(tokens, "tokens");
            return self.Call([&](Scheduler& s) { return s.CachedPrefix(span, cache_salt); });
          },
          "tokens"_a, "cache_salt"_a = py::bytes())
      .def(
          "flush_cache",
          [](Guarded& self, const std::string& tier) {
            const Tier which =
                tier == "all"      ? Tier::kAll
                : tier == "device" ? Tier::kDevice
                : tier == "host"
                    ? Tier::kHost
                    : throw std::invalid_argument("tier is '" + tier + "'; it must be 'all', 'device' or 'host'");
            return self.Call([&](Scheduler& s) { return s.FlushCache(which); });
          },
          "tier"_a = "all")
      .def("stats", &Guarded::Stats)
      .def("kv_events", [](Guarded& self) { return self.Call([](Scheduler& s) { return s.KvEvents(); }); })
      .def("check", [](Guarded& self) { self.Call([](Scheduler& s) { s.Check(); }); })
      .def("snapshot", [](Guarded& self) {
        py::list list;
        for (const RequestInfo& info : self.Call([](Scheduler& s) { return s.Snapshot(); }))
          list.append(InfoDict(info));
        return list;
      });
}

}  // namespace

PYBIND11_MODULE(_scheduler, module) {
  module.doc() = "The control plane: what runs next, and who owns each KV page.";
  py::register_exception<QueueFull>(module, "QueueFull", PyExc_RuntimeError);
  BindConfig(module);
  BindOutput(module);
  BindPlan(module);
  BindTransfer(module);
  BindKvEvent(module);
  BindScheduler(module);
  module.def("states_markdown", &StatesMarkdown, "The documentation page of the event x state table.");
  module.def(
      "page_keys",
      [](const TokenArray& tokens, int page_size, const std::string& cache_salt) {
        if (page_size < 1) throw std::invalid_argument("page_size must be at least 1");
        const TokenSequence sequence(SpanOf(tokens, "tokens"), page_size, RootKey({{KeyTag::kCacheSalt, cache_salt}}),
                                     true);
        std::vector<py::bytes> keys;
        for (const PageKey& key : sequence.keys()) keys.push_back(BytesOf(key));
        return keys;
      },
      py::arg("tokens"), py::arg("page_size"), py::arg("cache_salt") = py::bytes(),
      "The 16-byte keys of the full pages of `tokens`, for routers and storage tiers.");
  module.def(
      "window_pages_for",
      [](int requests, int window, int page_size, int budget, int max_in_flight, int max_seq_len) {
        const Config config{.page_size = page_size,
                            .token_buckets = {budget},
                            .max_seq_len = max_seq_len,
                            .max_in_flight = max_in_flight,
                            .window = window};
        return config.WindowPagesFor(requests);
      },
      py::kw_only(), py::arg("requests"), py::arg("window"), py::arg("page_size"), py::arg("budget"),
      py::arg("max_in_flight"), py::arg("max_seq_len"),
      "Window pages that so many running requests hold at most, whatever steps are in flight.");
  module.attr("PAGE_KEY_VERSION") = kPageKeyVersion;
}

}  // namespace tokenspeed
