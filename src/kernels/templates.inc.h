/* The templates of one compute type, in order of dependence. */
#include "vmath.inc.h"

#ifndef KERNELS
#define KERNELS(T)                                                                                                     \
    { .lanes = VL_##T, .load = load_##T, .store = store_##T, }
#endif
