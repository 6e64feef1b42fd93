// A broken ownership rule inside the control plane is a programming error that would hand one KV page to two
// requests. The process stops at once with the reason; carrying on would serve wrong tokens.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace tokenspeed {

[[noreturn]] inline void Fatal(const char* reason) noexcept {
  std::fprintf(stderr, "tokenspeed scheduler: broken ownership: %s\n", reason);
  std::abort();
}

}  // namespace tokenspeed
