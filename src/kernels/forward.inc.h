/* Forward: one unit is a block of queries against all its visible keys, streamed in blocks (online softmax, Dao et al.
 * 2022; Milakov & Gimelshein 2018). Scores are kept in units of log2: p = 2^(c s - m), c = scale * log2(e).
 *
 * The first key block finds the true maximum m of each query; later blocks keep it and take exp2 on the accumulators
 * without looking for a maximum. A query whose scores then exceed m by STALE_LIMIT gets a new one: the block is redone
 * with a pass for the maximum and one for exp2, and so are those that follow (spread-out scores), but m moves by the
 * same rule, query by query, so that no row's bits depend on another row. Should the result overflow because m was
 * stale, the unit is redone with the true maximum of the queries concerned. Few queries (few.inc.h) keep no maximum. */

#define forward_scratch FN(forward_scratch)
#define forward_layout FN(forward_layout)
#define forward_keys FN(forward_keys)
#define forward_few FN(forward_few)
#define forward_values FN(forward_values)
#define forward_sweep FN(forward_sweep)
#define forward_finish FN(forward_finish)

typedef struct forward_scratch {
    real *q;      /* pack_panels of d_k, signed so that c >= 0 */
    real *few;    /* few_queries, where they are few */
    real *o;      /* (n_lanes, d_v rounded up to VL) */
    real *m, *l;  /* per query: maximum in log2 units, and the sum of 2^(c s - m - low) */
    real *low;    /* per query: what rounding took from m, where it is huge; else 0 */
    real *exact;  /* per query: not 0 if m must be the true maximum */
    real *s;      /* (block, panel): scores, then P^T */
    real *given;  /* scores that are not products of tiles: additive ones (block, panel), few_scores of a block */
    real *r;      /* (block, panel): dropout's factors, where there is dropout */
    real *k, *v;  /* packed rows */
    real *k_tail; /* (SCORE_ROWS, d_k) */
    real *line;   /* VL rows of queries or of masks */
    int64_t n_lanes, panel, d_v, o_row, block;
    int period;      /* of few_scores; 0: not so few */
    bool pairs;      /* bfloat16 is multiplied as it is: q, k, v and P^T are pairs, of d or of keys */
    real *l_rounded; /* per query, where `pairs`: the sum of the weights as they are multiplied; l is for lse */
} forward_scratch;

/* d_v = 0: scores only. */
NOINLINE forward_scratch forward_layout(const sdpa_problem *p, int64_t d_v, sdpa_arena *a) {
    forward_scratch w;
    const int64_t most_few = p->n_q == 1 ? 1 : FN(few_period)(FEW_QUERIES);
    int64_t block = sdpa_key_block(p);
    const bool runs = p->n_q == 1 && !p->w_score;
    while (runs && block < RUN_KEYS && block * (p->d_k + d_v) * (int64_t)sizeof(real) < RUN_BYTES) block *= 2;
    w.block = p->n_k < block ? round_up(p->n_k, SCORE_ROWS) : block;
    w.d_v = d_v;
    w.n_lanes = round_up(p->n_q < sdpa_forward_block(p) ? p->n_q : sdpa_forward_block(p), VL);
    w.panel = w.n_lanes < SCORE_WIDTH * VL ? w.n_lanes : SCORE_WIDTH * VL;
    w.o_row = round_up(d_v, VL);
    int64_t d_k = round_up(p->d_k, VL);
    int64_t line = d_k > w.block ? d_k : round_up(w.block, VL);
    w.q = sdpa_take(a, sizeof(real) * (size_t)(p->d_k * w.n_lanes));
    w.few = sdpa_take(a, sizeof(real) * (size_t)(most_few * d_k));
    w.period = 0;
    w.pairs = false;
    w.o = sdpa_take(a, sizeof(real) * (size_t)(w.n_lanes * w.o_row));
    w.m = sdpa_take(a, sizeof(real) * (size_t)w.n_lanes);
    w.low = sdpa_take(a, sizeof(real) * (size_t)w.n_lanes);
    w.exact = sdpa_take(a, sizeof(real) * (size_t)w.n_lanes);
    w.l = sdpa_take(a, sizeof(real) * (size_t)w.n_lanes);
    w.l_rounded = sdpa_take(a, PAIRS ? sizeof(real) * (size_t)w.n_lanes : 0);
    w.s = sdpa_take(a, sizeof(real) * (size_t)(w.block * w.panel + MAX_TILE_ROWS));
    w.given = sdpa_take(a, sizeof(real) * (size_t)(p->w_score ? w.block * w.panel
                                                              : round_up(w.block * most_few, SCORE_ROWS * VL) + VL));
    w.r = sdpa_take(a, p->dropout_p > 0 ? sizeof(real) * (size_t)(w.block * w.panel) : 0);
    w.k = sdpa_take(a, sizeof(real) * (size_t)(w.block * packed_row(p->d_k)));
    w.v = sdpa_take(a, sizeof(real) * (size_t)(w.block * packed_row(d_v)));
    w.k_tail = sdpa_take(a, sizeof(real) * (size_t)(SCORE_ROWS * p->d_k));
    w.line = sdpa_take(a, sizeof(real) * (size_t)(VL * line));
    return w;
}

static size_t FN(forward_bytes)(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    forward_layout(p, p->d_v, &arena);
    return arena.used;
}

/* After a pass for the maxima `sum` of the block: moves m and low, and sets alpha = 2^(old m - new m) and shift = m. */
INLINE void FN(move_maximum)(const forward_scratch *w, int64_t i, int nv, bool by_rule, real c, vec *sum, vec *alpha,
                             vec *shift) {
    const vec factor = vset1(c);
    for (int x = 0; x < nv; x++) {
        real *m = w->m + i + x * VL, *low = w->low + i + x * VL;
        vec old = vload(m), old_low = vload(low), most = factor * sum[x];
        ivec moves = (old == -(real)INFINITY) | (vload(w->exact + i + x * VL) != 0) |
                     (vmulsub(factor, sum[x], old) > STALE_LIMIT);
        if (!by_rule) moves = ~(ivec){0};
        moves &= most > old;
        vec new = vselect(moves, most, old);
        /* 2^(c s - m) of the maximum itself is 2^(what rounding took from m): harmless, and the same in all blocks,
         * unless m is so large that it overflows. */
        ivec huge = (most > HUGE_SCORE) | (most < -HUGE_SCORE);
        vec rest = vselect(huge, vmulsub(factor, sum[x], most), (vec){0});
        vec new_low = vselect(moves, vselect(rest - rest == 0, rest, (vec){0}), old_low);
        vstore(m, new);
        vstore(low, new_low);
        /* A query that has seen no key yet has m = -inf: shift by 0, so that 2^(-inf - 0) = 0. */
        shift[x] = vselect(new == -(real)INFINITY, (vec){0}, new);
        alpha[x] = vexp2((old - shift[x]) + (old_low - new_low));
        sum[x] = (vec){0};
    }
}

/* After a pass over the first keys alone, whose maxima are `most`: makes them m, unless scores so spread out that m would
 * soon move. A row's own scores decide, so that its bits do not depend on other rows. */
INLINE void FN(first_maximum)(const forward_scratch *w, real *m, int nv, real c, const vec *most) {
    for (int x = 0; x < nv; x++) {
        vec least = most[x];
        for (int j = 0; j < FIRST_KEYS; j++) least = vmin2(least, vload(w->s + j * w->panel + x * VL));
        const vec old = vload(m + x * VL), new = most[x] * c, lowest = vset1(c) * least, huge = vset1(HUGE_SCORE);
        const ivec taken = (old == -(real)INFINITY) & (new - lowest <= FIRST_SPREAD) & (new < huge) & (new > -huge);
        vstore(m + x * VL, vselect(taken, new, old));
    }
}

/* What the unit will read after key j; strided columns of K or V are not worth the lines. Returns whether it is too much for
 * the caches. */
INLINE bool FN(rows_ahead)(const sdpa_unit *u, int64_t j, ahead *a) {
    const sdpa_problem *p = u->problem;
    const sdpa_matrix *m[2] = {&u->k, &u->v};
    const int64_t size = p->dtype == SDPA_F64 ? 8 : p->dtype == SDPA_F32 ? 4 : 2, d[2] = {p->d_k, p->d_v};
    a->n = u->key_length - j;
    for (int x = 0; x < 2; x++) {
        a->p[x] = m[x]->data + j * m[x]->row;
        a->row[x] = m[x]->row;
        a->bytes[x] = m[x]->col == size ? d[x] * size : 0;
    }
    return u->key_length * (a->bytes[0] + a->bytes[1]) >= FETCH_BYTES;
}

/* o of queries i .. i+n_i-1 (of the unit) = alpha o + P V for keys j0 .. j0+n-1, with dropout. P^T (n, stride) stands in
 * w->s; `masked`: a -0 there marks a pair that must not be multiplied. */
NOINLINE void forward_values(const sdpa_unit *u, const forward_scratch *w, rows *v, int64_t i, int64_t n_i, int64_t j0,
                             int64_t n, int64_t stride, const vec *alpha, bool masked) {
    const sdpa_problem *p = u->problem;
    const int64_t first = j0 - v->j0;
    if (p->dropout_p > 0) {
        dropout_block(u, u->i0 + i, round_up(n_i, VL), j0, n, w->r, w->period ? VL : w->panel);
        if (w->period) few_pack(w->r, w->period, n, 0);
        for (int64_t x = 0; x < n * stride; x += VL) vstore(w->s + x, vload(w->r + x) * vload(w->s + x));
    }
    gemm g = {.c = w->o + i * w->o_row,
              .c_row = w->o_row,
              .a = w->s,
              .a_stride = stride,
              .b = v->p + (w->pairs ? first / 2 : first) * v->row,
              .b_row = v->row,
              .m = n_i,
              .n = w->o_row,
              .depth = n,
              .seen = FN(keys_seen)(u, u->i0 + i, j0),
              .row_scale = (const real *)alpha,
              .alpha = 1};
    const bool exact = !masked || FN(rows_finite)(v, w->d_v);
    if (!exact) g.n = w->d_v;
#if PAIRS
    if (w->pairs) {
        if (p->dropout_p > 0) FN(pair_rows)(w->s, w->panel, n, round_up(n_i, VL), NULL);
        g.depth = (n + 1) / 2;
        g.pairs = true;
    }
#endif
    /* Runs of a single query are longer than a block; their sums are not to be. */
    const int64_t block = sdpa_key_block(p);
    for (int64_t k = 0; k < n; k += block) {
        gemm part = g;
        if (n > block) part.depth = n - k < block ? n - k : block;
        part.a += k * stride;
        part.b += k * v->row;
        if (k > 0) part.row_scale = NULL;
        FN(multiply)(&part, true, exact);
    }
}

/* Adds keys j0 .. j0+n-1 of a block k, v to the few queries of the unit. Each block moves their maxima: looking for them
 * costs little where a vector holds several keys. */
NOINLINE void forward_few(const sdpa_unit *u, const forward_scratch *w, const rows *k, rows *v, int64_t j0, int64_t n) {
    const sdpa_problem *p = u->problem;
    const int period = w->period;
    vec most = vset1(-INFINITY), sum, alpha, shift;
    ahead next;
    const bool far = period > 1 && FN(rows_ahead)(u, j0 + n, &next);
    enum bias_kind bias = bias_block(u, u->i0, u->n_i, j0, n, (real)M_LOG2E, w->s, VL, w->line);
    if (bias == BIAS_ALL_MASKED) return;
    if (bias != BIAS_NONE) {
        few_pack(w->s, period, n, -(real)INFINITY);
    } else if (p->softcap > 0) { /* tanh would make scores of what few_scores fills up */
        memset(w->s, 0, sizeof(real) * (size_t)(n * period));
        few_fill(w->s, period, n, -(real)INFINITY);
        bias = BIAS_FINITE;
    }
    scores t = {.y = k->p,
                .given = bias == BIAS_NONE ? w->s : w->given,
                .n = (n * period + VL - 1) / VL,
                .s = w->s,
                .s_row = VL,
                .extreme = (real *)&most};
    few_scores((real *)t.given, w->few, period, k->p, k->row, n, p->d_k, far ? &next : NULL);
    const real factor = FN(score_products)(&t, 1, p, bias, M_LOG2E);
    most = few_fold(most, period, true);
    FN(move_maximum)(w, 0, 1, false, factor, &most, &alpha, &shift);
    sum = (vec){0};
    const bool masked = FN(exponentiate)(w->s, VL, t.n, 1, factor, (const real *)&shift, w->low, (real *)&sum,
                                         bias == BIAS_SOME_MASKED);
    vstore(w->l, alpha * vload(w->l) + few_fold(sum, period, false));
    forward_values(u, w, v, 0, u->n_i, j0, n, period, &alpha, masked);
}

/* Adds keys j0 .. j0+n-1 of a block k, v to the panel of queries i .. i+n_i-1 (of the unit). `two_passes`: do not try to do
 * without the maximum; this is about speed only. Returns whether the next block should not try either. */
NOINLINE bool forward_keys(const sdpa_unit *u, const forward_scratch *w, const rows *k, rows *v, int64_t i, int64_t n_i,
                           int64_t j0, int64_t n, real c, bool two_passes) {
    const sdpa_problem *p = u->problem;
    int nv = (int)(round_up(n_i, VL) / VL);
    const int64_t first_k = j0 - k->j0;
    real *m = w->m + i, *l = w->l + i, *low = w->low + i;
    vec sum[SCORE_WIDTH], alpha[SCORE_WIDTH], shift[SCORE_WIDTH];
    bool masked = false;
    scores t = {.x = w->q + i * p->d_k,
                .y = k->p + first_k * k->row,
                .y_row = k->row,
                .y_tail = k->tail,
                .tail_row = k->tail_row,
                .n = n,
                .depth = w->pairs ? (p->d_k + 1) / 2 : p->d_k,
                .pairs = w->pairs,
                .s = w->s,
                .s_row = w->panel,
                .shift = m,
                .extreme = (real *)sum,
                .c = c};

    ahead next;
    if (u->n_i <= VL && FN(rows_ahead)(u, j0 + n, &next)) t.next = &next;
    enum bias_kind bias = bias_block(u, u->i0 + i, n_i, j0, n, (real)M_LOG2E, w->s, w->panel, w->line);
    if (bias == BIAS_ALL_MASKED) return two_passes;
    const bool plain = bias == BIAS_NONE && p->softcap == 0;
    if (bias == BIAS_SOME_MASKED) t.seen = FN(keys_seen)(u, u->i0 + i, j0);
    if (p->w_score) {
        real *given = plain ? w->s : w->given; /* s holds what is to be added */
        additive_scores(p, t.x, nv, k, n, given, w->panel);
        t.given = given;
        two_passes = true;
    }
    const bool by_rule = p->softcap == 0; /* m moves by the rule above, not in every block */
    bool fused = by_rule && !two_passes, first = false;
    for (int x = 0; x < nv && fused && plain; x++) first |= vany(vload(m + x * VL) == -(real)INFINITY);
    first &= n >= 4 * FIRST_KEYS;
    vec most[SCORE_WIDTH];
    if (first) {
        scores some = FN(part_of)(&t, 0, FIRST_KEYS);
        some.extreme = (real *)most;
        for (int x = 0; x < nv; x++) most[x] = vset1(-INFINITY);
        FN(score)(&some, nv, SCORE_RAW);
        FN(first_maximum)(w, m, nv, c, most);
    }
    for (int x = 0; x < nv && fused; x++) {
        fused = !vany((vload(m + x * VL) == -(real)INFINITY) | (vload(low + x * VL) != 0) |
                      (vload(w->exact + i + x * VL) != 0));
    }
    if (fused) {
        for (int x = 0; x < nv; x++) {
            sum[x] = (vec){0};
            alpha[x] = vset1(1);
        }
        const int64_t done = first ? FIRST_KEYS : 0;
        if (first) FN(exponentiate)(w->s, w->panel, done, nv, c, m, low, (real *)sum, false);
        const scores rest = FN(part_of)(&t, done, n - done);
        FN(score)(&rest, nv, plain ? SCORE_SUMMED : SCORE_BIASED_SUMMED);
        masked = bias == BIAS_SOME_MASKED;
        for (int x = 0; x < nv; x++) two_passes |= vany(~(sum[x] <= STALE_SUM));
    }
    if (!fused || two_passes) {
        for (int x = 0; x < nv; x++) sum[x] = vset1(-INFINITY);
        if (fused) bias = bias_block(u, u->i0 + i, n_i, j0, n, (real)M_LOG2E, w->s, w->panel, w->line);
        const real factor = FN(score_products)(&t, nv, p, bias, M_LOG2E);
        FN(move_maximum)(w, i, nv, by_rule, factor, sum, alpha, shift);
        masked = FN(exponentiate)(w->s, w->panel, n, nv, factor, (const real *)shift, low, (real *)sum,
                                  bias == BIAS_SOME_MASKED);
    }
    for (int x = 0; x < nv; x++) vstore(l + x * VL, alpha[x] * vload(l + x * VL) + sum[x]);
#if PAIRS
    if (w->pairs) {
        if (p->dropout_p == 0) {
            for (int x = 0; x < nv; x++) sum[x] = (vec){0};
            FN(pair_rows)(w->s, w->panel, n, nv * VL, sum);
        }
        real *rounded = w->l_rounded + i;
        for (int x = 0; x < nv; x++) vstore(rounded + x * VL, alpha[x] * vload(rounded + x * VL) + sum[x]);
    }
#endif

    forward_values(u, w, v, i, n_i, j0, n, w->panel, alpha, masked);
    return two_passes;
}

/* The unit's sink in log2 units, or -inf: not rounded, as it is a part of lse. */
INLINE double FN(sink_of)(const sdpa_unit *u) {
    real sink = -(real)INFINITY;
    if (u->sinks.data) FN(load)(&sink, u->sinks.data, 1, 0, u->sinks.dtype, u->sinks.swapped);
    return (double)sink * FN(log2_e)(u->problem);
}

/* Adds the sink, a logit without a value, to a query's maximum and sum; all in log2 units. Returns the factor by which
 * what was weighted with 2^(s - m) shrinks. */
INLINE real FN(add_sink)(double sink, real *m, real *l) {
    if (sink == -INFINITY) return 1;
    real most = sink > *m ? (real)sink : *m, factor = (real)exp2(*m - most);
    *l = *l * factor + (real)exp2(sink - most);
    *m = most;
    return factor;
}

/* o, m and l of the unit's queries over the keys that it sees, in scratch; o is not divided by l yet. False if interrupted. */
NOINLINE bool forward_sweep(const sdpa_unit *u, forward_scratch *scratch) {
    const sdpa_problem *p = u->problem;
    forward_scratch w = *scratch;
    const real c = (real)(fabs(p->scale) * M_LOG2E);
    int64_t j0, j1;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    if (u->n_i <= FEW_QUERIES && !p->w_score && c > 0) {
        w.period = FN(few_period)(u->n_i);
        few_queries(w.few, w.period, u, w.line);
    } else {
        pack_panels(w.q, &u->q, u->i0, u->n_i, p->d_k, p->scale < 0 ? -1 : 1, w.line);
    }
#if PAIRS
    for (int64_t i = 0, n_i; i < u->n_i && w.pairs; i += n_i) {
        n_i = panel_of(u->n_i - i);
        FN(pair_rows)(w.q + i * p->d_k, round_up(n_i, VL), p->d_k, n_i, NULL);
    }
#endif

    memset(w.exact, 0, sizeof(real) * (size_t)w.n_lanes);
    for (int attempt = 0; attempt < 2; attempt++) {
        bool two_passes[2 * SDPA_QUERY_BLOCK / VL] = {false};
        for (int64_t i = 0; i < w.n_lanes; i++) {
            w.m[i] = -(real)INFINITY;
            w.l[i] = w.low[i] = 0;
            if (PAIRS) w.l_rounded[i] = 0;
        }
        memset(w.o, 0, sizeof(real) * (size_t)(w.n_lanes * w.o_row));
        for (int64_t j = j0; j < j1; j += w.block) {
            if (sdpa_run_stopped(u->run)) return false;
            int64_t n = j1 - j < w.block ? j1 - j : w.block;
            rows k, v;
            if (!PAIRS || !w.pairs) {
                k = pack_rows(&u->k, j, n, p->d_k, 0, w.k, w.k_tail);
                v = pack_rows(&u->v, j, n, p->d_v, u->n_i, w.v, NULL);
            }
#if PAIRS
            else {
                k = FN(pack_pairs)(&u->k, j, n, p->d_k, w.k, w.k_tail, w.line);
                v = FN(pack_row_pairs)(&u->v, j, n, p->d_v, w.v, FN(may_mask)(u));
            }
#endif
            if (w.period) {
                forward_few(u, &w, &k, &v, j, n);
                continue;
            }
            for (int64_t i = 0, n_i; i < u->n_i; i += n_i) {
                int64_t first, last;
                n_i = panel_of(u->n_i - i);
                bool *panel = &two_passes[i / VL];
                sdpa_visible_keys(u, u->i0 + i, n_i, &first, &last);
                if (first >= j + n || last <= j) continue;
                /* Whole tiles, so that only the block's own last tile reads k.tail; the masks hide what is too much. */
                int64_t visible = round_up(last - j, SCORE_ROWS);
                if (visible > n) visible = n;
                const int64_t open = p->w_score ? 0 : FN(open_keys)(u, u->i0 + i, j, visible);
                for (int64_t at = 0, end = open > 0 ? open : visible; at < visible; at = end, end = visible) {
                    *panel = forward_keys(u, &w, &k, &v, i, n_i, j + at, end - at, c, *panel);
                }
            }
        }
        /* With the true maximum, weights are at most 1; a stale one may have made P V overflow. */
        bool again = false;
        for (int64_t i = 0; i < u->n_i && j1 - j0 > w.block && attempt == 0 && !w.period; i++) {
            if (w.l[i] - w.l[i] == 0 && all_finite(w.o + i * w.o_row, w.o_row, 1, p->d_v)) continue;
            w.exact[i] = 1;
            again = true;
        }
        if (!again) break;
    }
    return true;
}

/* Divides by l, with the sink, and stores o and lse. */
NOINLINE void forward_finish(const sdpa_unit *u, const forward_scratch *scratch) {
    const sdpa_problem *p = u->problem;
    const forward_scratch w = *scratch;
    const double sink = FN(sink_of)(u);
    const double log2_e = FN(log2_e)(p);
    const bool direct = u->o.data && is_direct(&u->o) && p->d_v == w.o_row;
    for (int64_t i = 0; i < u->n_i; i++) {
        real *o = w.o + i * w.o_row, l = w.l[i], m = w.m[i], factor = FN(add_sink)(sink, &m, &l);
        real sum = l;
        if (PAIRS && w.pairs) sum = factor * w.l_rounded[i] + (l - factor * w.l[i]); /* the latter is the sink's */
        factor = l == 0 ? 0 : factor / sum;
        char *to = u->o.data + (u->i0 + i) * u->o.row;
        real *result = direct ? (real *)to : o;
        for (int64_t x = 0; x < w.o_row; x += VL) vstore(result + x, factor * vload(o + x));
        if (!direct && u->o.data) FN(store)(to, o, p->d_v, u->o.col, u->o.dtype);
        if (u->lse) {
            real lse = l == 0 ? -(real)INFINITY : (real)(m / log2_e + log(l));
            if (m == -REAL_MAX) lse = m; /* saturated: see mask_block */
            memcpy(u->lse + (u->i0 + i) * p->lse.row, &lse, sizeof lse);
        }
    }
}

#if SMALL
static bool FN(forward_small)(const sdpa_unit *u, const forward_scratch *w);
#endif

/* o and lse of queries i0 .. i0+n_i-1. */
NOINLINE void FN(forward_whole)(const sdpa_unit *u, void *scratch, bool pairs) {
    sdpa_arena arena = {scratch, 0};
    forward_scratch w = forward_layout(u->problem, u->problem->d_v, &arena);
#if SMALL
    if (FN(forward_small)(u, &w)) return;
#endif
    w.pairs = pairs;
    if (forward_sweep(u, &w)) forward_finish(u, &w);
}

static void FN(forward)(const sdpa_unit *u, void *scratch) { FN(forward_whole)(u, scratch, false); }

#if PAIRS
/* The same of bfloat16 operands, whose weights are rounded to bfloat16, too. */
static void forward_bf16(const sdpa_unit *u, void *scratch) {
    FN(forward_whole)(u, scratch, u->n_i > FEW_QUERIES && !u->problem->w_score);
}
#endif

/* What a unit finds in a part of its keys: per query o, m, l and low. */
static size_t FN(forward_part_bytes)(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    const forward_scratch w = forward_layout(p, p->d_v, &arena);
    return sizeof(real) * (size_t)(w.n_lanes * (w.o_row + 3));
}

COLD static void FN(forward_part)(const sdpa_unit *u, void *scratch, void *part) {
    sdpa_arena arena = {scratch, 0};
    forward_scratch w = forward_layout(u->problem, u->problem->d_v, &arena);
    if (!forward_sweep(u, &w)) return;
    real *to = part;
    for (int64_t i = 0; i < u->n_i; i++, to += w.o_row + 3) {
        memcpy(to, w.o + i * w.o_row, sizeof(real) * (size_t)w.o_row);
        to[w.o_row] = w.m[i];
        to[w.o_row + 1] = w.l[i];
        to[w.o_row + 2] = w.low[i];
    }
}

/* o and lse from n_parts adjacent parts. */
COLD static void FN(forward_join)(const sdpa_unit *u, void *scratch, const void *parts, int64_t n_parts) {
    sdpa_arena arena = {scratch, 0};
    const forward_scratch w = forward_layout(u->problem, u->problem->d_v, &arena);
    const int64_t part = w.n_lanes * (w.o_row + 3);
    for (int64_t i = 0; i < u->n_i; i++) {
        const real *first = (const real *)parts + i * (w.o_row + 3), *highest = first;
        for (int64_t x = 1; x < n_parts; x++) {
            if (first[x * part + w.o_row] > highest[w.o_row]) highest = first + x * part;
        }
        /* A part that has seen no key has m = -inf. Nothing is skipped: 0 times NaN is as NaN as in one sweep. */
        const real m = highest[w.o_row] == -(real)INFINITY ? 0 : highest[w.o_row], low = highest[w.o_row + 2];
        real *o = w.o + i * w.o_row;
        memset(o, 0, sizeof(real) * (size_t)w.o_row);
        w.m[i] = highest[w.o_row];
        w.l[i] = 0;
        for (int64_t x = 0; x < n_parts; x++) {
            const real *from = first + x * part;
            const real factor = (real)exp2((from[w.o_row] - m) + (from[w.o_row + 2] - low));
            for (int64_t y = 0; y < w.o_row; y += VL) vstore(o + y, vload(o + y) + factor * vload(from + y));
            w.l[i] += factor * from[w.o_row + 1];
        }
    }
    forward_finish(u, &w);
}
