/* Forward mode and second order. With tangents a, b, c, e of q, k, v and the mask:
 *   T  = slope * scale (a K^T + Q b^T) + e        tangent of the logits (slope: of the softcap)
 *   mu = rowsum(P * T), and O_t = (P * (T - mu)) V + P c.
 * <a, dQ> + <b, dK> + <c, dV> + <e, dMask>, the double backward's function of the gradients, is <dO, O_t> (plus
 * <dlse, mu>): differentiating that once more, with G = dO V^T, C = dO c^T, D = rowsum(dO * O) - dlse,
 *   dS  = P * (G - D)                             what T is multiplied with
 *   dS' = P * ((T - mu) * (G - D) + C - rowsum(dO * O_t))
 * and the derivatives are dS' K + dS b for q, dS'^T Q + dS^T a for k (times scale and slope), (P * (T - mu))^T dO for v,
 * dS' for the mask, O_t for dO. A softcap adds slope' * T_0 * dS to what reaches the scores, T_0 = T before slope and e.
 * Dropout multiplies P by R wherever it meets a value: in O_t, G, C and v's derivative.
 * Products per pair of blocks: 6 in forward mode, 6 + 10 in the double backward. */

#define tangent_scratch FN(tangent_scratch)
#define tangent_layout FN(tangent_layout)
#define tangent_keys FN(tangent_keys)
#define tangent_pass FN(tangent_pass)
#define tangent_scores FN(tangent_scores)
#define double_keys FN(double_keys)

typedef struct tangent_scratch {
    real *q, *q_t, *dout;    /* pack_panels of d_k, d_k, d_v */
    real *o, *o_t;           /* (n_lanes, v_row) */
    real *m, *l, *mu;        /* per query: maximum, sum, and mean of T */
    real *s, *t, *h, *r;     /* (block, n_lanes): scores, their tangent, tanh of a softcap, dropout's factors */
    real *e;                 /* (block, n_lanes): tangent of the mask */
    real *g, *c;             /* (block, n_lanes): G and C, then what is multiplied with K and with b */
    real *k, *k_t, *v, *v_t; /* packed rows */
    real *k_tail, *k_t_tail, *v_tail, *v_t_tail;
    real *line;
    /* double backward only */
    real *q_rows, *q_t_rows, *dout_rows;
    real *delta, *cross; /* per query: D, rowsum(dO * O_t) */
    real *dq, *dmask;
    int64_t n_lanes, k_row, v_row, block;
} tangent_scratch;

NOINLINE tangent_scratch tangent_layout(const sdpa_problem *p, bool twice, sdpa_arena *a) {
    tangent_scratch w;
    const size_t size = sizeof(real);
    w.block = p->n_k < sdpa_key_block(p) ? round_up(p->n_k, SCORE_ROWS) : sdpa_key_block(p);
    w.n_lanes = round_up(p->n_q < sdpa_query_block(p) ? p->n_q : sdpa_query_block(p), VL);
    w.k_row = round_up(p->d_k, VL);
    w.v_row = round_up(p->d_v, VL);
    int64_t line = w.k_row > w.v_row ? w.k_row : w.v_row;
    if (line < w.block) line = round_up(w.block, VL);
    const size_t transposed_k = size * (size_t)(p->d_k * w.n_lanes), rows_v = size * (size_t)(w.n_lanes * w.v_row);
    const size_t block = size * (size_t)((w.block + MAX_TILE_ROWS) * w.n_lanes), lanes = size * (size_t)w.n_lanes;
    const size_t keys = size * (size_t)(round_up(w.block, SCORE_ROWS) * packed_row(p->d_k));
    const size_t values = size * (size_t)(round_up(w.block, SCORE_ROWS) * packed_row(p->d_v));
    w.q = sdpa_take(a, transposed_k);
    w.q_t = sdpa_take(a, transposed_k);
    w.o = sdpa_take(a, rows_v);
    w.o_t = sdpa_take(a, rows_v);
    w.m = sdpa_take(a, lanes);
    w.l = sdpa_take(a, lanes);
    w.mu = sdpa_take(a, lanes);
    w.s = sdpa_take(a, block);
    w.t = sdpa_take(a, block);
    w.h = p->softcap > 0 ? sdpa_take(a, block) : NULL;
    w.r = p->dropout_p > 0 ? sdpa_take(a, block) : NULL;
    w.e = p->mask_t.data ? sdpa_take(a, block) : NULL;
    w.k = sdpa_take(a, keys);
    w.k_t = sdpa_take(a, keys);
    w.v = sdpa_take(a, values);
    w.v_t = sdpa_take(a, values);
    w.k_tail = sdpa_take(a, size * (size_t)(SCORE_ROWS * p->d_k));
    w.k_t_tail = sdpa_take(a, size * (size_t)(SCORE_ROWS * p->d_k));
    w.line = sdpa_take(a, size * (size_t)(VL * line));
    if (!twice) return w;
    w.v_tail = sdpa_take(a, size * (size_t)(SCORE_ROWS * p->d_v));
    w.v_t_tail = sdpa_take(a, size * (size_t)(SCORE_ROWS * p->d_v));
    w.dout = sdpa_take(a, size * (size_t)(p->d_v * w.n_lanes));
    w.g = sdpa_take(a, block);
    w.c = sdpa_take(a, block);
    w.q_rows = sdpa_take(a, size * (size_t)(w.n_lanes * packed_row(p->d_k)));
    w.q_t_rows = sdpa_take(a, size * (size_t)(w.n_lanes * packed_row(p->d_k)));
    w.dout_rows = sdpa_take(a, size * (size_t)(w.n_lanes * packed_row(p->d_v)));
    w.delta = sdpa_take(a, lanes);
    w.cross = sdpa_take(a, lanes);
    w.dq = sdpa_take(a, size * (size_t)(w.n_lanes * w.k_row));
    w.dmask = sdpa_take(a, lanes);
    return w;
}

static size_t FN(tangent_bytes)(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    tangent_layout(p, false, &arena);
    return arena.used;
}

static size_t FN(double_backward_bytes)(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    tangent_layout(p, true, &arena);
    return arena.used;
}

/* For the panel of queries i .. i+n_i-1 and keys j0 .. j0+n-1: logits s in log2 units, their maximum over keys, T_0 =
 * scale (a K^T + Q b^T) in t, and h. Returns false, computing nothing, if all pairs are masked. */
NOINLINE bool tangent_scores(const sdpa_unit *u, const tangent_scratch *w, const rows *k, const rows *k_t, int64_t i,
                             int64_t n_i, int64_t j0, int64_t n, real *maximum) {
    const sdpa_problem *p = u->problem;
    int nv = (int)(round_up(n_i, VL) / VL);
    scores t = {.x = w->q + i * p->d_k,
                .y = k->p,
                .y_row = k->row,
                .y_tail = k->tail,
                .tail_row = k->tail_row,
                .n = n,
                .depth = p->d_k,
                .s = w->s + i,
                .s_row = w->n_lanes,
                .ds = w->h ? w->h + i : NULL,
                .extreme = maximum};
    enum bias_kind bias = bias_block(u, u->i0 + i, n_i, j0, n, (real)M_LOG2E, t.s, t.s_row, w->line);
    if (bias == BIAS_ALL_MASKED) return false;
    FN(score_logits)(&t, nv, p, bias, M_LOG2E);

    vec unused[SCORE_WIDTH] = {{0}};
    t.extreme = (real *)unused;
    t.s = w->t + i;
    t.x = w->q_t + i * p->d_k;
    FN(score)(&t, nv, SCORE_RAW);
    if (k_t->p) {
        t.x = w->q + i * p->d_k;
        t.y = k_t->p;
        t.y_row = k_t->row;
        t.y_tail = k_t->tail;
        t.tail_row = k_t->tail_row;
        FN(score)(&t, nv, SCORE_ADDED);
    }
    const real scale = (real)fabs(p->scale);
    for (int64_t j = 0; j < n; j++) {
        for (int x = 0; x < nv; x++) vstore(t.s + j * t.s_row + x * VL, scale * vload(t.s + j * t.s_row + x * VL));
    }
    return true;
}

/* e of the block, transposed, in `to`; false if there is no tangent of a mask. */
INLINE bool FN(tangent_mask)(const sdpa_unit *u, const tangent_scratch *w, int64_t i, int64_t n_i, int64_t j0,
                             int64_t n, real *to) {
    return u->mask_t.data && mask_block(&u->mask_t, u->i0 + i, n_i, j0, n, 1, to + i, w->n_lanes, w->line) != BIAS_NONE;
}

/* Adds keys j0 .. j0+n-1 to o, o_t, l and mu of the panel of queries i .. i+n_i-1. */
NOINLINE void tangent_keys(const sdpa_unit *u, const tangent_scratch *w, const rows *k, const rows *k_t, rows *v,
                           rows *v_t, int64_t i, int64_t n_i, int64_t j0, int64_t n) {
    const sdpa_problem *p = u->problem;
    int nv = (int)(round_up(n_i, VL) / VL);
    vec alpha[SCORE_WIDTH], maximum[SCORE_WIDTH], moved[SCORE_WIDTH];
    ivec any_masked = {0};
    for (int x = 0; x < nv; x++) maximum[x] = vset1(-INFINITY);
    if (!tangent_scores(u, w, k, k_t, i, n_i, j0, n, (real *)maximum)) return;
    const bool biased = FN(tangent_mask)(u, w, i, n_i, j0, n, w->e);
    if (p->dropout_p > 0) dropout_block(u, u->i0 + i, nv * VL, j0, n, w->r + i, w->n_lanes);

    for (int x = 0; x < nv; x++) {
        const int64_t lane = i + x * VL;
        vec old = vload(w->m + lane), m = vmax2(maximum[x], old), sums[4] = {{0}}, sums_t[4] = {{0}};
        vstore(w->m + lane, m);
        m = vselect(m == -(real)INFINITY, (vec){0}, m);
        alpha[x] = vexp2(old - m);
        for (int64_t tile = 0; tile < n; tile += 8) {
            const int64_t end = tile + 8 < n ? tile + 8 : n;
            vec part = {0}, part_t = {0};
            for (int64_t j = tile; j < end; j++) {
                const int64_t at = j * w->n_lanes + lane;
                vec s = vload(w->s + at), t = vload(w->t + at), probability = vexp2(s - m);
                ivec hidden = s == -(real)INFINITY;
                if (w->h) t *= 1 - vload(w->h + at) * vload(w->h + at);
                if (biased) t += vload(w->e + at);
                part += probability;
                part_t += vselect(hidden, (vec){0}, probability * t);
                any_masked |= hidden;
                vstore(w->s + at, vselect(hidden, vset1(-0.0), probability));
                vstore(w->t + at, t);
            }
            sums[tile / 8 % 4] += part;
            sums_t[tile / 8 % 4] += part_t;
        }
        /* T is taken from its mean so far, and what was summed before moves to the new one: subtracted at the end, mu
         * would cost the digits that mu O and P T V have in common. */
        const vec sum = sum_of_four(sums), sum_t = sum_of_four(sums_t);
        vec l = alpha[x] * vload(w->l + lane), mu = vload(w->mu + lane);
        vec mean = vselect(l + sum == 0, (vec){0}, (l * mu + sum_t) / (l + sum));
        vstore(w->l + lane, l + sum);
        vstore(w->mu + lane, mean);
        moved[x] = mean - mu;
        for (int64_t j = 0; j < n; j++) {
            const int64_t at = j * w->n_lanes + lane;
            vec probability = vload(w->s + at);
            ivec hidden = (ivec)probability == SIGN_BIT;
            if (p->dropout_p > 0) probability *= vload(w->r + at);
            vstore(w->s + at, probability);
            vstore(w->t + at, vselect(hidden, probability, probability * (vload(w->t + at) - mean)));
        }
    }
    for (int64_t r = 0; r < n_i; r++) {
        const real *o = w->o + (i + r) * w->v_row;
        real *o_t = w->o_t + (i + r) * w->v_row;
        const vec move = vset1(((const real *)moved)[r]);
        for (int64_t x = 0; x < w->v_row; x += VL) vstore(o_t + x, vload(o_t + x) - move * vload(o + x));
    }

    const bool masked = vany(any_masked);
    const bool finite = !masked || (FN(rows_finite)(v, p->d_v) && (!v_t->p || FN(rows_finite)(v_t, p->d_v)));
    gemm g = {.c = w->o_t + i * w->v_row,
              .c_row = w->v_row,
              .a = w->t + i,
              .a_stride = w->n_lanes,
              .b = v->p,
              .b_row = v->row,
              .m = n_i,
              .n = finite ? w->v_row : p->d_v,
              .depth = n,
              .row_scale = (const real *)alpha,
              .alpha = 1};
    FN(multiply)(&g, true, finite);
    g.a = w->s + i;
    g.c = w->o + i * w->v_row;
    FN(multiply)(&g, true, finite);
    if (v_t->p) {
        g.c = w->o_t + i * w->v_row;
        g.b = v_t->p;
        g.b_row = v_t->row;
        g.row_scale = NULL;
        FN(multiply)(&g, true, finite);
    }
}

/* A block of keys or values and of their tangents (p = NULL where there is none). */
INLINE rows FN(tangent_rows)(const sdpa_matrix *m, int64_t j, int64_t n, int64_t d, int64_t n_reads, real *packed,
                             real *tail) {
    if (!m->data) return (rows){0};
    return pack_rows(m, j, n, d, n_reads, packed, tail);
}

/* Packs the unit's queries and streams all visible keys: fills m, l (with the sink), mu, o and o_t. False if
 * interrupted. */
NOINLINE bool tangent_pass(const sdpa_unit *u, const tangent_scratch *w, int64_t j0, int64_t j1) {
    const sdpa_problem *p = u->problem;
    const real sign = p->scale < 0 ? -1 : 1;
    pack_panels(w->q, &u->q, u->i0, u->n_i, p->d_k, sign, w->line);
    if (u->q_t.data) {
        pack_panels(w->q_t, &u->q_t, u->i0, u->n_i, p->d_k, sign, w->line);
    } else {
        memset(w->q_t, 0, sizeof(real) * (size_t)(p->d_k * w->n_lanes));
    }
    memset(w->o, 0, sizeof(real) * (size_t)(w->n_lanes * w->v_row));
    memset(w->o_t, 0, sizeof(real) * (size_t)(w->n_lanes * w->v_row));
    for (int64_t i = 0; i < w->n_lanes; i++) {
        w->m[i] = -(real)INFINITY;
        w->l[i] = w->mu[i] = 0;
    }
    for (int64_t j = j0; j < j1; j += w->block) {
        if (sdpa_run_stopped(u->run)) return false;
        int64_t n = j1 - j < w->block ? j1 - j : w->block;
        rows k = FN(tangent_rows)(&u->k, j, n, p->d_k, 0, w->k, w->k_tail);
        rows k_t = FN(tangent_rows)(&u->k_t, j, n, p->d_k, 0, w->k_t, w->k_t_tail);
        rows v = FN(tangent_rows)(&u->v, j, n, p->d_v, u->n_i, w->v, NULL);
        rows v_t = FN(tangent_rows)(&u->v_t, j, n, p->d_v, u->n_i, w->v_t, NULL);
        for (int64_t i = 0, n_i; i < u->n_i; i += n_i) {
            n_i = panel_of(u->n_i - i);
            tangent_keys(u, w, &k, &k_t, &v, &v_t, i, n_i, j, n);
        }
    }
    const double sink = FN(sink_of)(u);
    real sink_t = 0;
    if (u->sinks_t.data) FN(load)(&sink_t, u->sinks_t.data, 1, 0, u->sinks_t.dtype, u->sinks_t.swapped);
    for (int64_t i = 0; i < u->n_i; i++) {
        real factor = FN(add_sink)(sink, &w->m[i], &w->l[i]), *o = w->o + i * w->v_row, *o_t = w->o_t + i * w->v_row;
        real inverse = w->l[i] == 0 ? 0 : 1 / w->l[i], move = 0;
        if (sink != -INFINITY) move = (real)exp2(sink - w->m[i]) * inverse * (sink_t - w->mu[i]);
        w->mu[i] += move;
        for (int64_t x = 0; x < w->v_row; x += VL) {
            const vec mean = factor * inverse * vload(o + x);
            vstore(o + x, mean);
            vstore(o_t + x, factor * inverse * vload(o_t + x) - move * mean);
        }
    }
    return true;
}

/* o and o_t of the unit. */
COLD static void FN(tangent)(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    const tangent_scratch w = tangent_layout(p, false, &arena);
    int64_t j0, j1;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    if (!tangent_pass(u, &w, j0, j1)) return;
    for (int64_t i = 0; i < u->n_i; i++) {
        FN(store)(u->o.data + (u->i0 + i) * u->o.row, w.o + i * w.v_row, p->d_v, u->o.col, u->o.dtype);
        FN(store)(u->o_t.data + (u->i0 + i) * u->o_t.row, w.o_t + i * w.v_row, p->d_v, u->o_t.col, u->o_t.dtype);
    }
}
