/* How threads share groups of units whose order in each group matters.
 *
 * A thread opens a group and takes its units, a few at a time, so that what they add to stays in its caches. Once all
 * groups are open, a thread without units helps where most are left. Units of a group are taken in order. They may run
 * concurrently as a wavefront: unit t works on a key block only after every earlier unit that sees the block has done
 * so. Each sum therefore has the serial order for any number of threads. */
#ifndef SDPA_DEAL_H
#define SDPA_DEAL_H

#include "kernels/kernels.h"

/* How far a unit of a group is. */
struct sdpa_turn {
    _Alignas(64) _Atomic int64_t next; /* the unit has finished its key blocks below `next`; INT64_MAX: it has ended */
    int64_t first, last;               /* the unit sees key blocks first .. last-1 */
};

/* An open group. */
typedef struct sdpa_slot {
    _Alignas(64) _Atomic int64_t left; /* the last units, which no thread has taken */
    _Atomic int64_t unfinished;
    int64_t group, n_units;
    int64_t index; /* of the slot */
} sdpa_slot;

typedef struct sdpa_deal {
    int64_t n_groups;
    int64_t most; /* units that are taken at a time */
    int n_workers;
    sdpa_slot *slots; /* sdpa_deal_slots, uninitialised */
    void *context;
    /* Prepares a group before its units run, and returns their number. */
    int64_t (*open)(void *context, int64_t group, int64_t slot);
    /* Runs units t .. t+n-1. */
    void (*run)(void *context, const sdpa_slot *slot, int64_t t, int64_t n, int worker, sdpa_run *run);
    /* After all units of the group. */
    void (*close)(void *context, const sdpa_slot *slot);
    _Atomic int64_t next_group, n_open;
} sdpa_deal;

/* The number of groups that may be open at a time. */
static inline int64_t sdpa_deal_slots(int64_t n_groups, int n_workers) {
    return n_groups < n_workers ? n_groups : n_workers;
}

/* Runs the units of all groups. */
sdpa_status sdpa_deal_run(sdpa_deal *d, int (*interrupted)(void));

#endif
