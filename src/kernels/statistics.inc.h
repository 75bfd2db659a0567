/* What can be said of each row of weights without the matrix: streamed like the forward, one product per pair of blocks.
 * With x = s - m and e = exp(x), all but the moments of the scores are sums of e, e x, e^2, e^3; mean and variance of the
 * logits over the visible keys are merged from those of the blocks (Chan, Golub & LeVeque 1983). The logits are as they
 * are, not in log2 units: the rounded factor of those would be in mean and variance alike. */

#define statistics_keys FN(statistics_keys)
#define sum_of_four FN(sum_of_four)
#define add_exactly FN(add_exactly)

/* Per query, as vectors: sums relative to the maximum m + m_low (what rounding took from m, where that is finite); count,
 * mean and sum of squared deviations of the logits, the last two as sums of two. */
typedef struct FN(row_sums) {
    vec m, m_low, l, ex, e2, e3, n, mean, mean_low, m2, m2_low;
} FN(row_sums);

/* Of four sums of tiles in turn: a running sum errs the less, the fewer its terms. */
INLINE vec sum_of_four(const vec *sum) { return (sum[0] + sum[1]) + (sum[2] + sum[3]); }

/* high += x, and what rounding takes from that to low (Knuth's two-sum). */
INLINE void add_exactly(vec *high, vec *low, vec x) {
    const vec sum = *high + x, added = sum - *high;
    *low += (*high - (sum - added)) + (x - added);
    *high = sum;
}

/* Sums over the keys of a block, for four tiles of 8 keys in turn. */
typedef struct FN(block_sums) {
    vec l[4], ex[4], e2[4], e3[4], count, total, total_low;
} FN(block_sums);

/* Those of n logits factor * s, rows s_row apart, reduced by shift + low. `masked`, a constant: leaves out logits of -inf;
 * else they make `total` infinite or NaN. What is not left out has the same bits either way. */
INLINE void FN(sum_logits)(FN(block_sums) * b, const real *s, int64_t s_row, int64_t n, vec shift, vec low, real factor,
                           bool masked) {
    /* log2 e as the sum of two, the first with at most half the bits of a significand. */
    const double c_high = SDPA_REAL == 32 ? 0x1.714p0 : 0x1.715476p0, c_low = M_LOG2E - c_high + 2.0355273740931033e-17,
                 limit = SDPA_REAL == 32 ? 127 : 1023;
    *b = (FN(block_sums)){.count = masked ? (vec){0} : vset1((real)n)};
    for (int64_t tile = 0; tile < n; tile += 8) {
        const int64_t end = tile + 8 < n ? tile + 8 : n, part = tile / 8 % 4;
        vec of_s = {0}, of_e = {0}, of_ex = {0}, of_e2 = {0}, of_e3 = {0};
        for (int64_t j = tile; j < end; j++) {
            const vec x = vload(s + j * s_row), d = vmulsub(vset1(factor), x, shift) - low;
            const vec e = vexp2_product(d, (real)M_LOG2E, (real)c_high, (real)c_low, (real)(-limit / M_LOG2E));
            const ivec hidden = masked ? factor * x == -(real)INFINITY : (ivec){0};
            const vec square = e * e;
            of_e += e;
            of_e2 += square;
            of_e3 += square * e;
            of_ex += e * (masked ? vselect(hidden, (vec){0}, d) : d);
            of_s += factor * (masked ? vselect(hidden, (vec){0}, x) : x);
            if (masked) b->count += vselect(hidden, (vec){0}, vset1(1));
        }
        b->l[part] += of_e;
        b->ex[part] += of_ex;
        b->e2[part] += of_e2;
        b->e3[part] += of_e3;
        add_exactly(&b->total, &b->total_low, of_s);
    }
}

/* The sum of squares of n logits less their mean. */
INLINE vec FN(squares)(const real *s, int64_t s_row, int64_t n, vec mean, real factor, bool masked) {
    vec squares[4] = {{0}};
    for (int64_t tile = 0; tile < n; tile += 8) {
        const int64_t end = tile + 8 < n ? tile + 8 : n;
        vec of_d2 = {0};
        for (int64_t j = tile; j < end; j++) {
            const vec x = vload(s + j * s_row), from_mean = vmulsub(vset1(factor), x, mean);
            const vec d = masked ? vselect(factor * x == -(real)INFINITY, (vec){0}, from_mean) : from_mean;
            of_d2 += d * d;
        }
        squares[tile / 8 % 4] += of_d2;
    }
    return sum_of_four(squares);
}

/* Adds n logits, factor * s of rows s_row apart, the greatest of them factor * most, to the sums of a vector of queries.
 * Inline into its only caller: as a function of its own it is a third slower. */
INLINE void FN(add_logits)(FN(row_sums) * r, const real *s, int64_t s_row, int64_t n, vec most, real factor,
                           bool masked) {
    const vec maximum = factor * most, lost = vmulsub(vset1(factor), most, maximum),
              rest = vselect(lost - lost == 0, lost, (vec){0});
    const vec m = vmax2(maximum, r->m), shift = vselect(m == -(real)INFINITY, (vec){0}, m),
              low = vselect(maximum > r->m, rest, vselect(maximum == r->m, vmax2(rest, r->m_low), r->m_low));
    FN(block_sums) b;
    if (!masked) {
        FN(sum_logits)(&b, s, s_row, n, shift, low, factor, false);
        masked = vany(b.total - b.total != 0);
    }
    if (masked) FN(sum_logits)(&b, s, s_row, n, shift, low, factor, true);
    const vec count = b.count, total = b.total, total_low = b.total_low;
    const vec mean = vselect(count == 0, (vec){0}, total / count),
              lacking = vselect(count == 0, (vec){0}, (total_low - vmulsub(mean, count, total)) / count);
    const vec squares =
        masked ? FN(squares)(s, s_row, n, mean, factor, true) : FN(squares)(s, s_row, n, mean, factor, false);
    const vec m2 = squares - count * lacking * lacking;
    /* The old sums move to the new maximum: e shrinks by a, x grows by `down`. */
    const vec moved = (r->m - shift) + (r->m_low - low), down = vselect(r->m == -(real)INFINITY, (vec){0}, moved),
              a = vexp2((real)M_LOG2E * moved);
    r->ex = a * (r->ex + down * r->l) + sum_of_four(b.ex);
    r->l = a * r->l + sum_of_four(b.l);
    r->e2 = a * a * r->e2 + sum_of_four(b.e2);
    r->e3 = a * a * a * r->e3 + sum_of_four(b.e3);
    r->m_low = low;
    r->m = m;
    const vec all = r->n + count, part = vselect(all == 0, (vec){0}, count / all), d = mean - r->mean,
              d_low = lacking - r->mean_low;
    add_exactly(&r->m2, &r->m2_low, m2);
    r->m2_low += (d + d_low) * (d + d_low) * r->n * part;
    add_exactly(&r->mean, &r->mean_low, d * part);
    r->mean_low += d_low * part;
    r->n = all;
}

/* Adds keys j0 .. j0+n-1 to one panel. */
NOINLINE void statistics_keys(const sdpa_unit *u, const forward_scratch *w, FN(row_sums) * sums, const rows *k,
                              int64_t i, int64_t n_i, int64_t j0, int64_t n) {
    const sdpa_problem *p = u->problem;
    int nv = (int)(round_up(n_i, VL) / VL);
    vec maximum[SCORE_WIDTH];
    for (int x = 0; x < nv; x++) maximum[x] = vset1(-INFINITY);
    scores t = {.x = w->q + i * p->d_k,
                .y = k->p,
                .y_row = k->row,
                .y_tail = k->tail,
                .tail_row = k->tail_row,
                .n = n,
                .depth = p->d_k,
                .s = w->s,
                .s_row = w->panel,
                .extreme = (real *)maximum};
    enum bias_kind bias = bias_block(u, u->i0 + i, n_i, j0, n, 1, w->s, w->panel, w->line);
    if (bias == BIAS_ALL_MASKED) return;
    const real factor = FN(score_products)(&t, nv, p, bias, 1);
    for (int x = 0; x < nv; x++) {
        FN(row_sums) *r = &sums[i / VL + x];
        FN(add_logits)(r, w->s + x * VL, w->panel, n, maximum[x], factor, bias == BIAS_SOME_MASKED);
    }
}

/* lse, entropy, max_weight, sum_p2, sum_p3, score_mean, score_var of the unit's queries, into the columns of u->o. The
 * sink is part of the denominator only. A query without keys: -inf, 0, 0, 0, 0, nan, nan. */
COLD static void FN(statistics)(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    const forward_scratch w = forward_layout(p, 0, &arena);
    FN(row_sums) sums[2 * SDPA_QUERY_BLOCK / VL];
    int64_t j0, j1;
    for (int64_t x = 0; x < w.n_lanes / VL; x++) sums[x] = (FN(row_sums)){.m = vset1(-INFINITY)};
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    pack_panels(w.q, &u->q, u->i0, u->n_i, p->d_k, p->scale < 0 ? -1 : 1, w.line);
    for (int64_t j = j0; j < j1; j += w.block) {
        if (sdpa_run_stopped(u->run)) return;
        int64_t n = j1 - j < w.block ? j1 - j : w.block;
        rows k = pack_rows(&u->k, j, n, p->d_k, 0, w.k, w.k_tail);
        for (int64_t i = 0, n_i; i < u->n_i; i += n_i) {
            n_i = panel_of(u->n_i - i);
            statistics_keys(u, &w, sums, &k, i, n_i, j, n);
        }
    }
    real sink = -(real)INFINITY;
    if (u->sinks.data) FN(load)(&sink, u->sinks.data, 1, 0, u->sinks.dtype, u->sinks.swapped);
    for (int64_t i = 0; i < u->n_i; i++) {
        const FN(row_sums) *r = &sums[i / VL];
        const int64_t x = i % VL;
        /* p = factor e, and log p = x + m - lse. */
        const double m = (double)r->m[x] + r->m_low[x], most = m > sink ? m : sink, n = r->n[x];
        const bool empty = most == -INFINITY, keyless = n == 0;
        const double shift = keyless ? 0 : exp(m - most), l = shift * r->l[x] + (empty ? 0 : exp(sink - most));
        const double factor = keyless ? 0 : shift / l, lse = empty ? -INFINITY : most + log(l);
        real row[7] = {
            (real)lse,
            keyless ? 0 : (real)(-factor * (r->ex[x] + r->l[x] * (m - most - log(l)))),
            (real)factor,
            (real)(factor * factor * r->e2[x]),
            (real)(factor * factor * factor * r->e3[x]),
            keyless ? (real)NAN : r->mean[x] + r->mean_low[x],
            keyless ? (real)NAN : (real)(((double)r->m2[x] + r->m2_low[x]) / n),
        };
        FN(store)(u->o.data + (u->i0 + i) * u->o.row, row, 7, u->o.col, u->o.dtype);
    }
}
