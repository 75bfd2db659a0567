/* What can be said of each row of weights without the matrix: streamed like the forward, one product per pair of blocks.
 * With x = s - m in log2 units and e = 2^x, all but the moments of the scores are sums of e, e x, e^2, e^3; mean and
 * variance of the logits over the visible keys are merged from those of the blocks (Chan, Golub & LeVeque 1983). */

#define statistics_keys FN(statistics_keys)

/* Per query, as vectors: sums relative to the maximum m, and count, mean and sum of squared deviations of the logits. */
typedef struct FN(row_sums) {
    vec m, l, ex, e2, e3, n, mean, m2;
} FN(row_sums);

/* Adds keys j0 .. j0+n-1 to one panel. */
NOINLINE void statistics_keys(const sdpa_unit *u, const forward_scratch *w, FN(row_sums) * sums, const rows *k,
                              int64_t i, int64_t n_i, int64_t j0, int64_t n) {
    const sdpa_problem *p = u->problem;
    int nv = (int)(round_up(n_i, VL) / VL);
    vec maximum[SCORE_WIDTH];
    for (int x = 0; x < nv; x++) maximum[x] = vset1(-INFINITY);
    scores t = {.x = w->q + i,
                .x_row = w->n_lanes,
                .y = k->p,
                .y_row = k->row,
                .y_tail = k->tail,
                .tail_row = k->tail_row,
                .n = n,
                .depth = p->d_k,
                .s = w->s,
                .s_row = w->panel,
                .extreme = (real *)maximum};
    enum bias_kind bias = bias_block(u, u->i0 + i, n_i, j0, n, (real)M_LOG2E, w->s, w->panel, w->line);
    if (bias == BIAS_ALL_MASKED) return;
    FN(score_logits)(&t, nv, p, bias, (real)M_LOG2E);
    for (int x = 0; x < nv; x++) {
        FN(row_sums) *r = &sums[i / VL + x];
        vec m = vmax2(maximum[x], r->m), shift = vselect(m == -(real)INFINITY, (vec){0}, m);
        vec count = {0}, total = {0}, l = {0}, ex = {0}, e2 = {0}, e3 = {0}, m2 = {0};
        for (int64_t j = 0; j < n; j++) {
            vec s = vload(w->s + j * w->panel + x * VL), d = s - shift, e = vexp2(d);
            ivec hidden = s == -(real)INFINITY;
            l += e;
            ex += vselect(hidden, (vec){0}, e * d);
            e2 += e * e;
            e3 += e * e * e;
            count += vselect(hidden, (vec){0}, vset1(1));
            total += vselect(hidden, (vec){0}, s);
        }
        vec mean = vselect(count == 0, (vec){0}, total / count);
        for (int64_t j = 0; j < n; j++) {
            vec s = vload(w->s + j * w->panel + x * VL), d = s - mean;
            m2 += vselect(s == -(real)INFINITY, (vec){0}, d * d);
        }
        /* The old sums move to the new maximum: e shrinks by a, x grows by `down`. */
        vec down = vselect(r->m == -(real)INFINITY, (vec){0}, r->m - shift), a = vexp2(r->m - shift);
        r->ex = a * (r->ex + down * r->l) + ex;
        r->l = a * r->l + l;
        r->e2 = a * a * r->e2 + e2;
        r->e3 = a * a * a * r->e3 + e3;
        r->m = m;
        vec all = r->n + count, part = vselect(all == 0, (vec){0}, count / all), d = mean - r->mean;
        r->m2 += m2 + d * d * r->n * part;
        r->mean += d * part;
        r->n = all;
    }
}

/* lse, entropy, max_weight, sum_p2, sum_p3, score_mean, score_var of the unit's queries, into the columns of u->o. The
 * sink is part of the denominator only. A query without keys: -inf, 0, 0, 0, 0, nan, nan. */
static void FN(statistics)(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    const forward_scratch w = forward_layout(p, 0, &arena);
    FN(row_sums) sums[SDPA_QUERY_BLOCK / VL];
    int64_t j0, j1;
    for (int64_t x = 0; x < w.n_lanes / VL; x++) sums[x] = (FN(row_sums)){.m = vset1(-INFINITY)};
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    pack_transposed(w.q, w.n_lanes, &u->q, u->i0, u->n_i, p->d_k, p->scale < 0 ? -1 : 1, w.line);
    for (int64_t j = j0; j < j1; j += w.block) {
        if (sdpa_run_stopped(u->run)) return;
        int64_t n = j1 - j < w.block ? j1 - j : w.block;
        rows k = pack_rows(&u->k, j, n, p->d_k, false, w.k, w.k_tail);
        for (int64_t i = 0; i < u->n_i; i += w.panel) {
            statistics_keys(u, &w, sums, &k, i, u->n_i - i < w.panel ? u->n_i - i : w.panel, j, n);
        }
    }
    const real sink = FN(sink_of)(u);
    for (int64_t i = 0; i < u->n_i; i++) {
        const FN(row_sums) *r = &sums[i / VL];
        const int64_t x = i % VL;
        real m = r->m[x], l = r->l[x];
        double shift = FN(add_sink)(sink, &m, &l), n = r->n[x];
        bool empty = l == 0, keyless = r->n[x] == 0;
        /* p = shift * e / l, and log2 p = x + log2(shift / l). */
        double factor = empty ? 0 : shift / l, log2_l = empty ? 0 : log2(l), old = r->m[x];
        real row[7] = {
            empty ? -(real)INFINITY : (real)(M_LN2 * (m + log2_l)),
            keyless ? 0 : (real)(-M_LN2 * (factor * r->ex[x] + factor * r->l[x] * (old - m - log2_l))),
            keyless ? 0 : (real)factor,
            (real)(factor * factor * r->e2[x]),
            (real)(factor * factor * factor * r->e3[x]),
            keyless ? (real)NAN : (real)(M_LN2 * r->mean[x]),
            keyless ? (real)NAN : (real)(M_LN2 * M_LN2 * r->m2[x] / n),
        };
        FN(store)(u->o.data + (u->i0 + i) * u->o.row, row, 7, u->o.col, u->o.dtype);
    }
}
