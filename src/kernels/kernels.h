/* The table of kernels that each ISA provides; the only symbol a kernel object exports. */
#ifndef SDPA_KERNELS_H
#define SDPA_KERNELS_H

#include "../problem.h"
#include "../parallel.h"

#if defined(__x86_64__)
#define SDPA_FOR_EACH_ISA(X) X(generic) X(avx2) X(avx512)
#elif defined(__aarch64__)
#define SDPA_FOR_EACH_ISA(X) X(generic) X(neon)
#else
#define SDPA_FOR_EACH_ISA(X) X(generic)
#endif

/* Part of one (batch, head): query rows i0 .. i0+n_i-1. Matrices start at row 0 of the head. */
typedef struct sdpa_unit {
    const sdpa_problem *problem;
    sdpa_matrix q, k, v, o, mask;
    sdpa_matrix dout, dq, dk, dv, dmask;
    char *lse, *dlse;   /* element of query 0 */
    int64_t i0, n_i;
    int64_t lower, upper; /* visible keys of query i: max(0, i + lower) .. min(key_length - 1, i + upper) */
    int64_t key_length;
    sdpa_run *run;
} sdpa_unit;

/* Kernels of one compute type (float32 or float64). `real` below is that type. */
struct sdpa_kernels {
    int lanes; /* reals in a vector */

    /* n elements at src, `stride` bytes apart, of any float type or BOOL (true = 0, false = -inf: a mask), to real. */
    void (*load)(void *dst, const char *src, int64_t n, int64_t stride, sdpa_dtype dtype, bool swapped);
    /* n reals to native elements of a float type. */
    void (*store)(char *dst, const void *src, int64_t n, int64_t stride, sdpa_dtype dtype);
};

struct sdpa_ops {
    const char *name;
    struct sdpa_kernels f32, f64;
};

#define SDPA_DECLARE_ISA(isa) extern const struct sdpa_ops sdpa_isa_##isa;
SDPA_FOR_EACH_ISA(SDPA_DECLARE_ISA)
#undef SDPA_DECLARE_ISA

#endif
