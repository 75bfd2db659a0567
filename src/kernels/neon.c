#define ISA neon
#define SDPA_ISA_NEON
#include "isa.inc.h"
