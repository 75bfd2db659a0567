/* Packed sequences: a problem whose rows belong to one sequence after the other. Each is computed as a problem of its own, so
 * that the bits are those of a call with that sequence alone; the units of all of them are dealt to the threads together. */
#ifndef SDPA_SEQUENCES_H
#define SDPA_SEQUENCES_H

#include "problem.h"

/* Makes *one the problem of a sequence of p, without cu_q and cu_k. `one` may be p itself. */
void sdpa_sequence_set(const sdpa_problem *p, int64_t sequence, sdpa_problem *one);

/* Multiply-adds of all sequences, roughly. */
double sdpa_sequences_work(const sdpa_problem *p);

/* A sequence's part of a run over the units of all. */
typedef struct sdpa_share {
    int64_t sequence;
    int64_t n_units, first; /* it has units first .. first+n_units-1 of the run */
    double cost;            /* of a unit, in any measure */
    bool wavefront;         /* backward.c: units are blocks of queries, else groups */
    int64_t turns;          /* the first of its own, if so */
    size_t memory;          /* where the bytes of its own begin, in the driver's memory for all sequences */
} sdpa_share;

/* Sorts n shares, so that the units that cost most come first, and sets `first`. Returns the units of the run. */
int64_t sdpa_shares_deal(sdpa_share *shares, int64_t n);

/* The share that a unit of the run belongs to. */
const sdpa_share *sdpa_share_of(const sdpa_share *shares, int64_t n, int64_t unit);

#endif
