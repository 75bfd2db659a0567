#define ISA avx512
#define SDPA_ISA_AVX512
#include "isa.inc.h"
