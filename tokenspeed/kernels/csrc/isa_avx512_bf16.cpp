#define TS_ISA_NAMESPACE isa_avx512_bf16
#define TS_ISA_NAME "avx512_bf16"
#define TS_ISA_AVX512
#include "kernels.h"
