// Recycles plan buffers: a buffer is handed out only while no plan holds it, so a consumer may keep a plan as long as
// it likes. In a steady state two buffers alternate and nothing is allocated.
#pragma once

#include <memory>
#include <vector>

#include "plan.h"

namespace tokenspeed {

class PlanPool {
 public:
  PlanPool(int dp, int max_bucket, int max_rows, int windows)
      : dp_(dp), max_bucket_(max_bucket), max_rows_(max_rows), windows_(windows) {
    buffers_.reserve(4);
  }

  // A buffer that no plan holds, with tables of `width` columns.
  std::shared_ptr<PlanBuffer> Acquire(int width) {
    std::shared_ptr<PlanBuffer>* free = nullptr;
    for (auto& buffer : buffers_) {
      if (buffer->in_use.load(std::memory_order_acquire)) continue;
      if (buffer->width() == width) return buffer;
      free = &buffer;
    }
    auto fresh = std::make_shared<PlanBuffer>(dp_, max_bucket_, max_rows_, width, windows_);
    if (free != nullptr) return *free = std::move(fresh);
    return buffers_.emplace_back(std::move(fresh));
  }

 private:
  int dp_, max_bucket_, max_rows_, windows_;
  std::vector<std::shared_ptr<PlanBuffer>> buffers_;
};

}  // namespace tokenspeed
