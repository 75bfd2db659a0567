#define ISA generic
#define SDPA_ISA_GENERIC
#include "isa.inc.h"
