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
#define OPS(isa, FORWARD_BF16)                                                                                         \
    __attribute__((visibility("hidden"))) const struct sdpa_ops SDPA_PASTE(sdpa_isa, isa) = {                          \
        .name = STRING(isa),                                                                                           \
        .f32 = KERNELS(f32, forward_f32),                                                                              \
        .f64 = KERNELS(f64, forward_f64),                                                                              \
        .bf16 = KERNELS(f32, FORWARD_BF16),                                                                            \
        .product = product_f64,                                                                                        \
        .exponentials = exponentials_f64,                                                                              \
    };
#ifdef SDPA_WIDE
OPS(ISA, forward_bf16)
#else
OPS(ISA, forward_f32)
#endif
#ifdef SDPA_ISA_AVX512
OPS(avx512bf16, forward_bf16)
#endif
