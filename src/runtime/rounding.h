/* The modes of a thread's floating-point arithmetic. Threads of the pool take those of the caller: they inherit what the
 * thread had that started them, and XLA's flush subnormal numbers to zero.
 *
 * Some libraries leave the rounding mode changed: the kernels must round to nearest, or exponentials
 * of numbers far below 0 are infinite. Whether subnormal numbers are flushed to zero stays as the caller has it. */
#ifndef SDPA_ROUNDING_H
#define SDPA_ROUNDING_H

#ifdef __x86_64__
#include <xmmintrin.h>

typedef unsigned sdpa_rounding, sdpa_modes;

static inline sdpa_modes sdpa_modes_get(void) { return _mm_getcsr() & ~(sdpa_modes)_MM_EXCEPT_MASK; }

static inline void sdpa_modes_set(const sdpa_modes *modes) {
    if (sdpa_modes_get() != *modes) _mm_setcsr(*modes);
}

/* Rounds to nearest from here on; returns what sdpa_rounding_restore takes. fenv.h would see the mode of the x87. */
static inline sdpa_rounding sdpa_round_to_nearest(void) {
    const sdpa_rounding state = _mm_getcsr(), mode = state & _MM_ROUND_MASK;
    if (mode != _MM_ROUND_NEAREST) _mm_setcsr(state & ~(sdpa_rounding)_MM_ROUND_MASK);
    return mode;
}

static inline void sdpa_rounding_restore(sdpa_rounding mode) {
    if (mode != _MM_ROUND_NEAREST) _mm_setcsr(_mm_getcsr() | mode);
}
#else
#include <fenv.h>

typedef int sdpa_rounding;
typedef fenv_t sdpa_modes;

static inline sdpa_modes sdpa_modes_get(void) {
    sdpa_modes modes;
    fegetenv(&modes);
    return modes;
}

static inline void sdpa_modes_set(const sdpa_modes *modes) { fesetenv(modes); }

static inline sdpa_rounding sdpa_round_to_nearest(void) {
    const sdpa_rounding mode = fegetround();
    if (mode != FE_TONEAREST) fesetround(FE_TONEAREST);
    return mode;
}

static inline void sdpa_rounding_restore(sdpa_rounding mode) {
    if (mode != FE_TONEAREST) fesetround(mode);
}
#endif

#endif
