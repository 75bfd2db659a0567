/* Compiles the templates for float32, then float64, and defines the table. ISA is the name, set by the including file. */
#include <float.h>
#include <math.h>
#include <stdbool.h>

#include "../memory.h"
#include "kernels.h"
#include "tiles.h"
#include "vec.h"

#define TYPE f32
#define SDPA_REAL 32
#include "templates.inc.h"
#undef SDPA_REAL
#undef TYPE

#define TYPE f64
#define SDPA_REAL 64
#include "templates.inc.h"
#undef SDPA_REAL
#undef TYPE

#define STRING_(x) #x
#define STRING(x) STRING_(x)
__attribute__((visibility("hidden"))) const struct sdpa_ops SDPA_PASTE(sdpa_isa, ISA) = {
    .name = STRING(ISA),
    .f32 = KERNELS(f32),
    .f64 = KERNELS(f64),
    .product = product_f64,
    .exponentials = exponentials_f64,
};
