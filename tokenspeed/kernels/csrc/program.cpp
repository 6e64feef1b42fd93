#include "program.h"

#include <stdexcept>
#include <utility>

namespace ts {
namespace {

thread_local std::shared_ptr<Program> recording;

void run(const Kernels& k, const LinearArgs& a) { k.linear(a); }
void run(const Kernels& k, const LookupArgs& a) { k.lookup(a); }
void run(const Kernels& k, const NormArgs& a) { k.norm(a); }
void run(const Kernels& k, const RopeArgs& a) { k.rope(a); }
void run(const Kernels& k, const PointwiseArgs& a) { k.pointwise(a); }
void run(const Kernels& k, const AppendArgs& a) { k.append(a); }
void run(const Kernels& k, const AttendArgs& a) { k.attend(a); }
void run(const Kernels& k, const ConvArgs& a) { k.conv(a); }
void run(const Kernels& k, const DeltaArgs& a) { k.delta(a); }
void run(const Kernels& k, const DecayArgs& a) { k.decay(a); }
void run(const Kernels& k, const L2NormArgs& a) { k.l2_norm(a); }
void run(const Kernels& k, const GatedNormArgs& a) { k.gated_norm(a); }
void run(const Kernels& k, const LogitsArgs& a) { k.logits(a); }
void run(const Kernels& k, const SampleArgs& a) { k.sample(a); }

}  // namespace

void Program::run() const {
  const Kernels& table = kernels();
  for (const Call& call : calls_) {
    std::visit([&](const auto& args) { ts::run(table, args); }, call);
  }
}

void submit(const Call& call) {
  if (recording != nullptr) {
    recording->add(call);
  } else {
    std::visit([](const auto& args) { ts::run(kernels(), args); }, call);
  }
}

void begin_capture() {
  if (recording != nullptr) throw std::logic_error("this thread is already capturing; end that capture first");
  recording = std::make_shared<Program>();
}

std::shared_ptr<Program> end_capture() {
  if (recording == nullptr) throw std::logic_error("this thread is not capturing");
  return std::exchange(recording, nullptr);
}

}  // namespace ts
