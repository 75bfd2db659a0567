/* Packed sequences: a problem whose rows are those of several sequences, one after the other. Each sequence is computed
 * as a separate problem, so its bits are those of a call with that sequence alone. The units of all sequences form one
 * run, which the threads share. */
#ifndef SDPA_SEQUENCES_H
#define SDPA_SEQUENCES_H

#include "problem.h"

/* Sets *one to the problem of a single sequence of p, without cu_q and cu_k. `one` may be p itself. */
void sdpa_sequence_set(const sdpa_problem *p, int64_t sequence, sdpa_problem *one);

/* Writes the results of a pass, gradients included, in the rows of padding behind the last sequence: those of a row
 * without keys and without a sink. Nothing is read there. */
void sdpa_sequences_pad(const sdpa_problem *p, sdpa_pass pass);

/* Pairs of a query and a key in all sequences and heads. */
double sdpa_sequences_pairs(const sdpa_problem *p);

/* The part of one sequence in a run over the units of all sequences. */
typedef struct sdpa_share {
    int64_t sequence;
    int64_t n_units, first; /* it has units first .. first+n_units-1 of the run */
    double cost;            /* of a unit, in any measure */
    size_t memory;          /* offset of its bytes in the memory that the driver takes for all sequences */
} sdpa_share;

/* Sorts n shares by falling cost of a unit and sets `first`. Returns the number of units in the run. */
int64_t sdpa_shares_deal(sdpa_share *shares, int64_t n);

/* The share that a unit of the run belongs to. */
const sdpa_share *sdpa_share_of(const sdpa_share *shares, int64_t n, int64_t unit);

#endif
