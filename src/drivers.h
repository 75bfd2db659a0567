/* The Python-free entry points: schedules over blocks and threads. Each fills the outputs named in the problem. */
#ifndef SDPA_DRIVERS_H
#define SDPA_DRIVERS_H

#include "problem.h"

/* o (may be absent) and lse (may be absent). Extra memory: one block per worker. */
sdpa_status sdpa_attention_forward(const sdpa_problem *p);

/* dq, dk, dv, dmask, each where present, from dout, dlse, q, k, v, o, lse. */
sdpa_status sdpa_attention_backward(const sdpa_problem *p);

/* Forward mode: o, and its derivative o_t along the tangents q_t, k_t, v_t, mask_t, sinks_t. */
sdpa_status sdpa_attention_tangent(const sdpa_problem *p);

/* The derivatives dq, dk, dv, dmask, dsinks and o_t (with respect to dout), each where present, of the sum of the
 * tangents times what sdpa_attention_backward computes from q, k, v, o, dout, dlse. */
sdpa_status sdpa_attention_double_backward(const sdpa_problem *p);

/* The stages of the (n_q, n_k) matrix, written to p->o, whose columns are keys here: o is (n_q, n_k) of dtype p->dtype. */
typedef enum sdpa_stage { SDPA_SCORES, SDPA_CAPPED, SDPA_BIASED, SDPA_WEIGHTS } sdpa_stage;
sdpa_status sdpa_attention_weights(const sdpa_problem *p, sdpa_stage stage);

/* Of each row of weights: lse, entropy, max_weight, sum_p2, sum_p3, score_mean, score_var, the columns of o (n_q, 7) of
 * the compute type. Extra memory as the forward. */
sdpa_status sdpa_attention_statistics(const sdpa_problem *p);

/* Attention over the union of disjoint sets of keys from the results over each: lse = log sum_t exp(lses[t]),
 * o = sum_t exp(lses[t] - lse) outs[t]. Uses the axes, n_head, n_q, d_v, dtype, o and lse of p. */
sdpa_status sdpa_attention_merge(const sdpa_problem *p, int64_t n_parts, const sdpa_tensor *outs,
                                 const sdpa_tensor *lses);

#endif
