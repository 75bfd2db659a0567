/* The elements of score_mod's arrays that a unit of a backward adds to: a worker has sums for as many. */
#ifndef SDPA_REACH_H
#define SDPA_REACH_H

#include "kernels/kernels.h"
#include "program.h"

/* Sets what a unit reaches in the backward or the second pass; returns how many elements. The program has reaches. */
int64_t sdpa_reach_set(const sdpa_unit *u, sdpa_sums *sums);

/* The most elements that a unit of the problem reaches, or all where the program has no reaches; -1: no memory. */
int64_t sdpa_reach_most(const sdpa_problem *p);

#endif
