/* Which kernels run: chosen once from CPU and OS state, or forced by SDPA_ISA. */
#ifndef SDPA_ISA_H
#define SDPA_ISA_H

#include <stdbool.h>

struct sdpa_ops;

typedef struct sdpa_isa {
    const char *name;
    const struct sdpa_ops *ops;
    bool available; /* the CPU has the instructions and the OS saves the registers */
} sdpa_isa;

/* All compiled ISAs, worst first; *n is their number. */
const sdpa_isa *sdpa_isa_list(int *n);

/* The table in use. Before the first select it is the best available one. */
const struct sdpa_ops *sdpa_ops_get(void);
const char *sdpa_isa_name(void);

/* False (and no change) if the name is unknown or the machine lacks it. */
bool sdpa_isa_select(const char *name);

#endif
