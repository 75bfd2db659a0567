/* The Python-free entry points: schedules over blocks and threads. Each fills the outputs named in the problem. */
#ifndef SDPA_DRIVERS_H
#define SDPA_DRIVERS_H

#include "problem.h"

/* o and lse, each where present. Extra memory: one block per worker. This driver, the statistics and all derivatives
 * also take packed problems (sequences.h); their extra memory is that of the largest sequence. */
sdpa_status sdpa_attention_forward(const sdpa_problem *p);

/* SDPA_GRADIENTS, each where present, from dout, dlse, q, k, v, o, lse. */
sdpa_status sdpa_attention_backward(const sdpa_problem *p);

/* Forward mode: o (may be absent), and its derivative o_t along SDPA_TANGENTS. */
sdpa_status sdpa_attention_tangent(const sdpa_problem *p);

/* The double backward: the gradients, with o_t for that of dout, each where present, of the sum of the tangents times
 * what sdpa_attention_backward computes from q, k, v, o, dout, dlse. */
sdpa_status sdpa_attention_second(const sdpa_problem *p);

/* The problem's stage of the matrix of weights, in o, which is (n_q, n_k) of dtype p->dtype here. If heads or queries are
 * chosen, o has only these heads and rows. */
sdpa_status sdpa_attention_weights(const sdpa_problem *p);

/* What masks leave of the tiles into which the general kernels cut each head, `rows` queries by `columns` keys, in o
 * (tiles, tiles) of dtype p->dtype: 0, no pair, and kernels skip the tile; 1, some; 2, all. A tile of which two options
 * hide all pairs together, but neither alone, is a 1. */
typedef struct sdpa_tile {
    int64_t rows, columns;
} sdpa_tile;
sdpa_tile sdpa_attention_tile(const sdpa_problem *p);
sdpa_status sdpa_attention_pattern(const sdpa_problem *p);

/* Sum and maximum, over the chosen queries, of the weights (after dropout) that each key receives, for the chosen
 * heads: the columns of o (n_k, SDPA_N_RECEIVED), in the compute type. Extra memory: one block per worker, and three
 * numbers per query of the heads in flight. */
sdpa_status sdpa_attention_received(const sdpa_problem *p);

/* Statistics of each row of weights: lse, entropy, max_weight, sum_p2, sum_p3, score_mean and score_var, as the columns
 * of o (n_q, SDPA_N_STATISTICS) of the compute type. Extra memory: one block per worker. */
sdpa_status sdpa_attention_statistics(const sdpa_problem *p);

/* The weights of additive attention, for a problem with q (n_q, d_q) and k (n_k, d_k). The scores are scale * w_score^T
 * tanh(q w_query + k w_key + bias). w_query is (d_q, n_hidden), w_key (d_k, n_hidden); w_score and bias have n_hidden
 * elements, and bias may be absent. All gradients that are present, here and in the problem, are written, or added to
 * zeros. Gradients of the weights have native byte order and are not broadcast. */
typedef struct sdpa_additive {
    int64_t n_hidden, d_q;
    sdpa_matrix w_query, w_key, w_score, bias;
    sdpa_matrix dw_query, dw_key, dw_score, dbias;
} sdpa_additive;

/* Forward and backward of additive attention. Extra memory: one block per worker, 2 n_hidden numbers per token (4 in
 * the backward), and a copy of the weights. */
sdpa_status sdpa_additive_forward(const sdpa_problem *p, const sdpa_additive *a);
sdpa_status sdpa_additive_backward(const sdpa_problem *p, const sdpa_additive *a);

/* Runs a driver of attention on the problem or, where keys or values have gaps between columns and several units would
 * read them, on one with copies that have none. Results have the same bits. Extra memory: at most what k, v, k_t and v_t
 * take without broadcast axes. */
sdpa_status sdpa_compact(const sdpa_problem *p, sdpa_status (*driver)(const sdpa_problem *p));

/* Attention over the union of disjoint sets of keys from the results over each: lse = log sum_t exp(lses[t]),
 * o = sum_t exp(lses[t] - lse) outs[t]. Uses the axes, n_head, n_q, d_v, dtype, o and lse of p. */
sdpa_status sdpa_attention_merge(const sdpa_problem *p, int64_t n_parts, const sdpa_tensor *outs,
                                 const sdpa_tensor *lses);

#endif
