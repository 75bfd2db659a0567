/* Packed sequences: checks of cu_seqlens_q and cu_seqlens_k, of operands (total, heads, d), and of arguments with one
 * value per sequence. On failure all return -1 or NULL, with an exception. */
#ifndef SDPA_PACKED_H
#define SDPA_PACKED_H

#include "options.h"

/* Sets n_q, n_k, d_k, d_v, n_head and the sequences of the problem, from query, key and value (may be NULL). The
 * options own the sequences. */
int sdpa_packed_set_sizes(sdpa_problem *p, const sdpa_options *options, PyArrayObject *const operands[3]);

/* Checks key_lengths: one value, or one per sequence. */
int sdpa_packed_check_lengths(const sdpa_problem *p, const sdpa_integers *lengths);

/* The offsets of is_causal="lower_right", one per sequence: new reference. */
PyArrayObject *sdpa_packed_lower_right(const sdpa_problem *p, const sdpa_integers *lengths);

#endif
