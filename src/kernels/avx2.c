#define ISA avx2
#define SDPA_ISA_AVX2
#include "isa.inc.h"
