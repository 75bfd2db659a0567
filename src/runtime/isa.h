/* Which kernels run: chosen once from CPU and OS state, or forced by SDPA_ISA. */
#ifndef SDPA_ISA_H
#define SDPA_ISA_H

#include <stdbool.h>
#include <stdint.h>

struct sdpa_kernels;

/* What a CPU says of itself; tests make CPUs up. */
typedef struct sdpa_cpu {
#ifdef __aarch64__
    bool (*bf16)(void); /* it has products of bfloat16 */
#else
    /* CPUID: registers a to d, or false if there is no such leaf. */
    bool (*leaf)(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]);
    /* XGETBV: the register states that the operating system saves. Only where CPUID says that it exists. */
    uint32_t (*saved)(void);
#endif
} sdpa_cpu;

/* The one that this runs on. */
extern const sdpa_cpu sdpa_this_cpu;

typedef struct sdpa_isa {
    const char *name;
    bool (*has)(const sdpa_cpu *);  /* the CPU has the instructions and the OS saves the registers */
    bool (*pays)(const sdpa_cpu *); /* and, where it has, runs them faster than those of the sets before */
    const struct sdpa_kernels *f32, *f64;
    const struct sdpa_kernels *own; /* f32, or kernels of the forward alone */
    bool available;
} sdpa_isa;

/* All compiled instruction sets, the most basic first; *n is their number. */
const sdpa_isa *sdpa_isa_list(int *n);

/* The fastest instruction set of a CPU. */
const sdpa_isa *sdpa_isa_best(const sdpa_cpu *cpu);

/* The instruction set in use. Before the first select it is the fastest one. */
const sdpa_isa *sdpa_isa_get(void);

/* Whether the process may use the registers of AMX: asks the system for permission at the first call. It refuses where a
 * thread's stack for signals is too small to save them. */
bool sdpa_amx_permitted(void);

/* False, changing nothing, if the name is unknown or the machine lacks it. */
bool sdpa_isa_select(const char *name);

#endif
