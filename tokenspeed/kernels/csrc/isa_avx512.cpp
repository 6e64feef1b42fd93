#define TS_ISA_NAMESPACE isa_avx512
#define TS_ISA_NAME "avx512"
#define TS_ISA_AVX512
#include "kernels.h"
