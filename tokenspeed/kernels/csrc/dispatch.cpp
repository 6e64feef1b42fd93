#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace ts {

namespace isa_portable {
extern const Kernels kTable;
}
#if defined(__x86_64__)
namespace isa_avx2 {
extern const Kernels kTable;
}
namespace isa_avx512 {
extern const Kernels kTable;
}
namespace isa_avx512_vnni {
extern const Kernels kTable;
}
namespace isa_avx512_bf16 {
extern const Kernels kTable;
}
#endif

namespace {

// Each level requires the ones before it; __builtin_cpu_supports also checks that the system saves the registers.
std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> out = {&isa_portable::kTable};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c") ||
      !__builtin_cpu_supports("bmi2")) {
    return out;
  }
  out.push_back(&isa_avx2::kTable);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return out;
  }
  out.push_back(&isa_avx512::kTable);
  if (!__builtin_cpu_supports("avx512vnni")) return out;
  out.push_back(&isa_avx512_vnni::kTable);
  if (!__builtin_cpu_supports("avx512bf16")) return out;
  out.push_back(&isa_avx512_bf16::kTable);
#endif
  return out;
}

const Kernels* find(const std::string& name) {
  std::string names;
  for (const Kernels* table : supported()) {
    if (table->name == name) return table;
    names += names.empty() ? table->name : std::string(", ") + table->name;
  }
  throw std::invalid_argument("unknown or unsupported instruction set '" + name + "'; this machine supports: " + names);
}

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> table = [] {
    const char* text = std::getenv("TOKENSPEED_CPU_ISA");
    return text != nullptr && *text != '\0' ? find(text) : supported().back();
  }();
  return table;
}

}  // namespace

const Kernels& kernels() { return *active().load(std::memory_order_acquire); }

std::vector<std::string> supported_isas() {
  std::vector<std::string> out;
  for (const Kernels* table : supported()) out.emplace_back(table->name);
  return out;
}

void set_isa(const std::string& name) { active().store(find(name), std::memory_order_release); }

}  // namespace ts
