/* Which kernels run: chosen once from CPU and OS state, or forced by SDPA_ISA. */
#ifndef SDPA_ISA_H
#define SDPA_ISA_H

#include <stdbool.h>

struct sdpa_kernels;

typedef struct sdpa_isa {
    const char *name;
    bool (*has)(void);                           /* the CPU has the instructions and the OS saves the registers */
    const struct sdpa_kernels *f32, *f64, *bf16; /* bf16: the forward of bfloat16, in float32 */
    bool available;
} sdpa_isa;

/* All compiled instruction sets, the most basic first; *n is their number. */
const sdpa_isa *sdpa_isa_list(int *n);

/* The instruction set in use. Before the first select it is the best available one. */
const sdpa_isa *sdpa_isa_get(void);

/* False, changing nothing, if the name is unknown or the machine lacks it. */
bool sdpa_isa_select(const char *name);

#endif
