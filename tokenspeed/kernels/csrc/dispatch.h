// Which instruction set the kernels run on: the best the processor and the operating system support, or an explicit
// choice (TOKENSPEED_CPU_ISA, set_isa) among the supported ones.
#pragma once
#include <string>
#include <vector>

#include "types.h"

namespace ts {

const Kernels& kernels();
// Names the machine supports, slowest first.
std::vector<std::string> supported_isas();
// Throws std::invalid_argument naming the supported ones where `name` is not among them.
void set_isa(const std::string& name);

}  // namespace ts
