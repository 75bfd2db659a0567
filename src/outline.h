/* Outlines of boolean masks: which keys they show to all queries of a panel, to some, or to none. An outline is found
 * once in a call, by the first unit that asks, for all heads and batch entries that share the mask. */
#ifndef SDPA_OUTLINE_H
#define SDPA_OUTLINE_H

#include "groups.h"
#include "kernels/kernels.h"
#include "runtime/memory.h"

/* The outlines of one boolean tensor: a row for each unit of a head, with the broadcast axes of the tensor. */
typedef struct sdpa_outlines {
    sdpa_tensor rows; /* data: NULL until there is memory */
    int64_t batch[SDPA_MAX_AXES];
    int64_t block; /* queries of a unit */
    int64_t n_strips, n_stretches;
    size_t bytes; /* of all rows; 0: there are no outlines */
} sdpa_outlines;

/* Those of the problem's mask and of `where`. They take a byte for each panel and SDPA_STRETCH keys, at most a
 * 128th of the mask, and 8 bytes for each unit and SDPA_STRIP keys. */
typedef struct sdpa_all_outlines {
    sdpa_outlines mask, where;
} sdpa_all_outlines;

/* For units of `block` queries. Returns `all`, or NULL if no outline pays. */
sdpa_all_outlines *sdpa_outlines_plan(sdpa_all_outlines *all, const sdpa_problem *p, int64_t block);

/* Takes memory from the arena, and clears it. */
void sdpa_outlines_take(sdpa_all_outlines *all, sdpa_arena *arena);

/* Gives a unit its outlines. */
void sdpa_outlines_set(const sdpa_all_outlines *all, sdpa_unit *u);

#endif
