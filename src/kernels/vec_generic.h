/* Any machine: plain C on the compiler's vectors. */
#ifndef SDPA_KERNEL_VEC_GENERIC_H
#define SDPA_KERNEL_VEC_GENERIC_H

#ifndef VEC_BYTES
#define VEC_BYTES 16
#endif
#include "vec_plain.h"

INLINE vec vmax2(vec a, vec b) { return vselect(a > b, a, b); }
INLINE vec vmin2(vec a, vec b) { return vselect(a < b, a, b); }
INLINE vec vmuladd(vec a, vec b, vec c) { return a * b + c; }
INLINE vec vmulsub(vec a, vec b, vec c) { return a * b - c; }

#endif
