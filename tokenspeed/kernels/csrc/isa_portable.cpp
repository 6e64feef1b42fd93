#define TS_ISA_NAMESPACE isa_portable
#define TS_ISA_NAME "portable"
#include "kernels.h"
