#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace ts {
namespace {

// A ticket is epoch (32) | items (16) | next (16). It carries the item count so that a claim checks `next < items` and
// the epoch in one compare-and-swap: a late worker can never claim an item of a call that is over.
constexpr uint64_t kMaxItems = 0xffff;
constexpr int kSpins = 4000;        // about 40-100 us of pauses before a worker parks
constexpr int kCallerSpins = 2000;  // then the caller blocks: a worker without a processor can have the caller's

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline uint64_t ticket_next(uint64_t ticket) { return ticket & kMaxItems; }
inline uint64_t ticket_items(uint64_t ticket) { return (ticket >> 16) & kMaxItems; }

class Pool {
 public:
  Pool() {
    int threads = 0;
    if (const char* text = std::getenv("TOKENSPEED_NUM_THREADS"); text != nullptr && *text != '\0') {
      char* end = nullptr;
      const long value = std::strtol(text, &end, 10);
      if (*end != '\0' || value < 1 || value > 1024) {
        throw std::invalid_argument("TOKENSPEED_NUM_THREADS must be a number from 1 to 1024, got '" +
                                    std::string(text) + "'");
      }
      threads = static_cast<int>(value);
    }
    threads_ = threads > 0 ? threads : pool_available();
  }

  int threads() const { return threads_.load(std::memory_order_relaxed); }

  void resize(int threads) {
    const std::lock_guard<std::mutex> lock(busy_);
    stop();
    threads_ = threads > 0 ? threads : pool_available();
  }

  void run(int64_t items, TaskFn fn, const void* context) {
    std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
    if (items <= 1 || threads() <= 1 || !lock.try_lock()) {
      for (int64_t i = 0; i < items; ++i) fn(context, i);
      return;
    }
    if (workers_.empty()) start();
    for (int64_t base = 0; base < items; base += static_cast<int64_t>(kMaxItems)) {
      const int64_t left = items - base;
      publish(left < static_cast<int64_t>(kMaxItems) ? left : static_cast<int64_t>(kMaxItems), base, fn, context);
    }
  }

  ~Pool() { stop(); }

 private:
  void publish(int64_t items, int64_t base, TaskFn fn, const void* context) {
    fn_.store(fn, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    base_.store(base, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(epoch << 32 | static_cast<uint64_t>(items) << 16, std::memory_order_seq_cst);
    if (parked_.load(std::memory_order_seq_cst) != 0) ticket_.notify_all();
    drain();
    int32_t done = done_.load(std::memory_order_acquire);
    for (int spins = 0; done != items; ++spins) {
      if (spins < kCallerSpins) {
        relax();
      } else {
        done_.wait(done, std::memory_order_acquire);
      }
      done = done_.load(std::memory_order_acquire);
    }
  }

  // Claims and runs items of the current call until none is left.
  void drain() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket_next(ticket) < ticket_items(ticket)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        continue;
      }
      // The claimed item keeps its call alive, so the fields below belong to it.
      const TaskFn fn = fn_.load(std::memory_order_relaxed);
      fn(context_.load(std::memory_order_relaxed),
         base_.load(std::memory_order_relaxed) + static_cast<int64_t>(ticket_next(ticket)));
      const int32_t done = done_.fetch_add(1, std::memory_order_acq_rel) + 1;
      if (static_cast<uint64_t>(done) == ticket_items(ticket)) done_.notify_one();
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void work() {
    uint64_t seen = 0;
    while (true) {
      int spins = 0;
      uint64_t ticket = ticket_.load(std::memory_order_acquire);
      while (ticket >> 32 == seen && !stopping_.load(std::memory_order_relaxed)) {
        if (++spins < kSpins) {
          relax();
          ticket = ticket_.load(std::memory_order_acquire);
          continue;
        }
        parked_.fetch_add(1, std::memory_order_seq_cst);
        ticket = ticket_.load(std::memory_order_seq_cst);
        if (ticket >> 32 == seen && !stopping_.load()) ticket_.wait(ticket, std::memory_order_acquire);
        parked_.fetch_sub(1, std::memory_order_seq_cst);
        ticket = ticket_.load(std::memory_order_acquire);
        spins = 0;
      }
      if (stopping_.load(std::memory_order_relaxed)) return;
      seen = ticket >> 32;
      drain();
    }
  }

  void start() {
    stopping_ = false;
    for (int i = 1; i < threads(); ++i) workers_.emplace_back([this] { work(); });
  }

  void stop() {
    if (workers_.empty()) return;
    stopping_ = true;
    // An empty call of a new epoch wakes every parked worker.
    ticket_.store(((ticket_.load() >> 32) + 1) << 32, std::memory_order_seq_cst);
    ticket_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  alignas(64) std::atomic<uint64_t> ticket_{1ull << 32};
  alignas(64) std::atomic<int32_t> done_{0};  // a futex word: what the caller blocks on
  alignas(64) std::atomic<TaskFn> fn_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<int64_t> base_{0};
  std::atomic<int> parked_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int> threads_{1};
  std::mutex busy_;
  std::vector<std::thread> workers_;
};

alignas(Pool) unsigned char pool_storage[sizeof(Pool)];

// The pool lives in static storage and is never destroyed at exit (a worker may outlive main's locals). After a fork
// the child has no workers: it builds a fresh pool over the old one, whose thread handles are meaningless there.
Pool& pool() {
  static Pool* const instance = [] {
    Pool* const made = new (pool_storage) Pool();
    pthread_atfork(nullptr, nullptr, [] {
      const int threads = reinterpret_cast<Pool*>(pool_storage)->threads();
      (new (pool_storage) Pool())->resize(threads);
    });
    return made;
  }();
  return *instance;
}

}  // namespace

void pool_run(int64_t items, TaskFn fn, const void* context) { pool().run(items, fn, context); }
int pool_threads() { return pool().threads(); }

void pool_resize(int threads) {
  if (threads < 0 || threads > 1024) {
    throw std::invalid_argument("threads must be 0 (all processors) to 1024, got " + std::to_string(threads));
  }
  pool().resize(threads);
}

int pool_available() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    const int count = CPU_COUNT(&set);
    if (count > 0) return count;
  }
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

}  // namespace ts
