#define TS_ISA_NAMESPACE isa_avx2
#define TS_ISA_NAME "avx2"
#define TS_ISA_AVX2
#include "kernels.h"
