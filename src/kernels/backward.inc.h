/* Backward: one unit is a block of queries against all its visible keys (FlashAttention-2, Dao 2023, algorithm 2, with the
 * loops exchanged). Per pair of blocks five products: S = K Q^T, dP = V dO^T, dV += P^T dO, dK += dS^T Q, dQ += dS K.
 * P is recomputed from lse; dS = P * (dP - delta), delta = rowsum(dO * O) - dlse. With dropout's factors R the value
 * products use R * P and R * dP; a softcap multiplies dS by its slope, 1 - tanh^2, after the mask's gradient is taken.
 *
 * lse and O come rounded to their types. A row of P sums to 1, so summing it as it is computed restores what lse lost:
 * at no cost where P of a few key blocks can be kept until its rows are complete, else by an extra product where it
 * matters, for large lse. 16-bit O is not precise enough for delta, nor is O of additive scores, where dS cancels in dQ:
 * delta is then recomputed with them.
 *
 * dQ stays in scratch until the unit ends. dK, dV (and dMask) are accumulated in memory that units share: before it
 * touches key block j a unit waits for those before it, so every sum has the serial order whatever the number of
 * threads. */

#define backward_scratch FN(backward_scratch)
#define backward_layout FN(backward_layout)
#define backward_keys FN(backward_keys)
#define drop_out FN(drop_out)
#define backward_weights FN(backward_weights)
#define weigh_keys FN(weigh_keys)
#define complete_rows FN(complete_rows)
#define weighted_values FN(weighted_values)
#define add_mask_gradient FN(add_mask_gradient)

typedef struct backward_scratch {
    real *q, *dout;                    /* pack_panels of d_k and d_v */
    real *q_rows, *dout_rows, *o_rows; /* packed rows; of q and o where they cannot be read in place */
    real *lse;                         /* per query: lse in log2 units, rounded down to an integer */
    real *delta, *dlse;                /* per query */
    bool *weighed;                     /* per query: whether delta is of the weights */
    double *factor; /* per query: what P as computed, 2^(c s - lse), is to be multiplied with; dO and delta are */
    real *dq;       /* (n_lanes, d_k rounded up to VL) */
    real *dmask;    /* per query: the gradient of a mask that is broadcast over keys */
    real *p, *ds;   /* (block, n_lanes): P^T, dS^T; n_slots blocks of p */
    real *given;    /* (block, n_lanes): additive scores, where that is what they are */
    real *dq_lanes, *part; /* and then also (d_k, n_lanes): dQ^T; (block, 2, VL + 1): of additive_gradients */
    unsigned char *seen;   /* (2, n_lanes / VL): enum panel_state of both pieces of a block, n_slots times */
    real *r, *tanh; /* (block, n_lanes): dropout's factors; the softcap's tanh, n_slots times; where there are any */
    real *zero;     /* per query */
    real *k, *v, *k_tail, *v_tail;
    real *line;
    int64_t n_lanes, k_row, block;
    int64_t n_slots; /* key blocks whose P is kept while the rows are completed; those beyond share the last slot */
} backward_scratch;

NOINLINE backward_scratch backward_layout(const sdpa_problem *p, sdpa_arena *a) {
    backward_scratch w;
    w.block = p->n_k < sdpa_key_block(p) ? round_up(p->n_k, SCORE_ROWS) : sdpa_key_block(p);
    w.n_lanes = round_up(p->n_q < sdpa_query_block(p) ? p->n_q : sdpa_query_block(p), VL);
    w.k_row = round_up(p->d_k, VL);
    const int64_t v_row = round_up(p->d_v, VL);
    int64_t line = w.k_row > v_row ? w.k_row : v_row;
    if (line < w.block) line = round_up(w.block, VL);
    const size_t size = sizeof(real);
    w.n_slots = (p->n_k + sdpa_key_block(p) - 1) / sdpa_key_block(p);
    if (w.n_slots > KEPT_BLOCKS) w.n_slots = KEPT_BLOCKS;
    const size_t kept = (size_t)w.n_slots;
    w.q = sdpa_take(a, size * (size_t)(p->d_k * w.n_lanes));
    w.dout = sdpa_take(a, size * (size_t)(p->d_v * w.n_lanes));
    w.q_rows = sdpa_take(a, size * (size_t)(w.n_lanes * packed_row(p->d_k)));
    w.dout_rows = sdpa_take(a, size * (size_t)(w.n_lanes * packed_row(p->d_v)));
    w.lse = sdpa_take(a, size * (size_t)w.n_lanes);
    w.o_rows = sdpa_take(a, size * (size_t)(w.n_lanes * packed_row(p->d_v)));
    w.delta = sdpa_take(a, size * (size_t)w.n_lanes);
    w.weighed = sdpa_take(a, (size_t)w.n_lanes);
    w.dlse = sdpa_take(a, size * (size_t)w.n_lanes);
    w.factor = sdpa_take(a, sizeof(double) * (size_t)w.n_lanes);
    w.dq = sdpa_take(a, size * (size_t)(w.n_lanes * w.k_row));
    w.dmask = sdpa_take(a, size * (size_t)w.n_lanes);
    w.p = sdpa_take(a, kept * size * (size_t)((w.block + MAX_TILE_ROWS) * w.n_lanes));
    w.seen = sdpa_take(a, kept * 2 * SDPA_QUERY_BLOCK / VL);
    w.ds = sdpa_take(a, size * (size_t)((w.block + MAX_TILE_ROWS) * w.n_lanes));
    w.given = sdpa_take(a, p->w_score ? size * (size_t)(w.block * w.n_lanes) : 0);
    w.dq_lanes = sdpa_take(a, p->w_score ? size * (size_t)(p->d_k * w.n_lanes) : 0);
    w.part = sdpa_take(a, p->w_score ? size * (size_t)(2 * (VL + 1) * w.block) : 0);
    w.r = sdpa_take(a, p->dropout_p > 0 ? size * (size_t)(w.block * w.n_lanes) : 0);
    w.tanh = p->softcap > 0 ? sdpa_take(a, kept * size * (size_t)(w.block * w.n_lanes)) : NULL;
    w.zero = sdpa_take(a, size * (size_t)w.n_lanes);
    w.k = sdpa_take(a, size * (size_t)(w.block * packed_row(p->d_k)));
    w.v = sdpa_take(a, size * (size_t)(w.block * packed_row(p->d_v)));
    w.k_tail = sdpa_take(a, size * (size_t)(SCORE_ROWS * p->d_k));
    w.v_tail = sdpa_take(a, size * (size_t)(SCORE_ROWS * p->d_v));
    w.line = sdpa_take(a, size * (size_t)(VL * line));
    return w;
}

static size_t FN(backward_bytes)(const sdpa_problem *p) {
    sdpa_arena arena = {NULL, 0};
    backward_layout(p, &arena);
    return arena.used;
}

/* lse in log2 units of the unit's queries. Queries that see no key get lse = +inf and padding lanes, whose scores are 0, a
 * large one: their P is exactly 0. */
COLD NOINLINE void FN(lse_rows)(const sdpa_unit *u, const backward_scratch *w) {
    const sdpa_problem *p = u->problem;
    const double log2_e = FN(log2_e)(p);
    for (int64_t i = 0; i < w->n_lanes; i++) {
        w->lse[i] = i < u->n_i ? (real)INFINITY : HUGE_SCORE;
        w->delta[i] = w->dlse[i] = w->zero[i] = 0;
        w->weighed[i] = false;
        w->factor[i] = 1;
        if (i >= u->n_i) continue;
        real lse;
        FN(load)(&lse, u->lse + (u->i0 + i) * p->lse.row, 1, 0, p->lse.dtype, p->lse.swapped);
        if (u->dlse) {
            FN(load)(&w->dlse[i], u->dlse + (u->i0 + i) * p->dlse.row, 1, 0, p->dlse.dtype, p->dlse.swapped);
        }
        if (lse != -(real)INFINITY) {
            double log2_lse = lse * log2_e;
            if (isfinite(lse)) log2_lse = fmax(-REAL_MAX, fmin(REAL_MAX, log2_lse)); /* see mask_block */
            /* Down: the factor is at most 1, so that dO times it is finite. Beyond integers, where P is as good as lse,
             * it must not become 0 or infinite. */
            w->lse[i] = (real)floor(log2_lse);
            if (isfinite(lse)) w->factor[i] = exp2(fmax(-64, fmin(64, w->lse[i] - log2_lse)));
        }
    }
}

/* d[i, j0 + j] += dS[j, i] for the unit's queries and n keys, by squares of VL x VL. */
NOINLINE void FN(add_transposed)(const sdpa_unit *u, const sdpa_matrix *d, const real *ds, int64_t ds_row, int64_t j0,
                                 int64_t n) {
    const bool direct = is_direct(d);
    for (int64_t i = 0; i < u->n_i; i += VL) {
        for (int64_t j = 0; j < n; j += VL) {
            const int lanes = u->n_i - i < VL ? (int)(u->n_i - i) : VL, keys = n - j < VL ? (int)(n - j) : VL;
            vec r[VL] = {{0}}, old = {0};
            for (int l = 0; l < keys; l++) r[l] = vload(ds + (j + l) * ds_row + i);
            FN(transpose)(r);
            char *to = d->data + (u->i0 + i) * d->row + (j0 + j) * d->col;
            for (int l = 0; l < lanes; l++, to += d->row) {
                if (direct && keys == VL) {
                    vstore((real *)to, vload((const real *)to) + r[l]);
                    continue;
                }
                FN(load)(&old, to, keys, d->col, d->dtype, false);
                old += r[l];
                FN(store)(to, &old, keys, d->col, d->dtype);
            }
        }
    }
}

/* dMask += dS (n, ds_row), summed over the axes on which the mask is broadcast (stride 0); `columns`: per query, where
 * it is broadcast over keys. dMask has the compute type or, where no sum crosses units, any float type. */
NOINLINE void add_mask_gradient(const sdpa_unit *u, const real *ds, int64_t ds_row, real *columns, int64_t j0,
                                int64_t n) {
    const sdpa_matrix *d = &u->dmask;
    if (d->row != 0 && d->col != 0) {
        FN(add_transposed)(u, d, ds, ds_row, j0, n);
        return;
    }
    for (int64_t j = 0; j < n; j++, ds += ds_row) {
        if (d->col == 0) {
            SIMD for (int64_t i = 0; i < u->n_i; i++) columns[i] += ds[i];
            continue;
        }
        char *element = d->data + (j0 + j) * d->col;
        real sum = 0, old;
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < u->n_i; i++) sum += ds[i];
        FN(load)(&old, element, 1, 0, d->dtype, false);
        sum += old;
        FN(store)(element, &sum, 1, 0, d->dtype);
    }
}

/* P^T of keys j0 .. j0+n-1 by the panel of queries i .. i+n_i-1 (of the unit), its row sums added to `sum`, which is
 * zero. Sets *masked if a pair is masked, whose P is then -0; returns false, having written nothing, if all are. */
NOINLINE bool backward_weights(const sdpa_unit *u, const backward_scratch *w, const rows *k, int64_t i, int64_t n_i,
                               int64_t j0, int64_t n, real c, FN(tile_sums) * sum, bool *masked) {
    int nv = (int)(round_up(n_i, VL) / VL);
    scores t = {.x = w->q + i * u->problem->d_k,
                .y = k->p,
                .y_row = k->row,
                .y_tail = k->tail,
                .tail_row = k->tail_row,
                .n = n,
                .depth = u->problem->d_k,
                .s = w->p + i,
                .s_row = w->n_lanes,
                .shift = w->lse + i,
                .extreme = (real *)sum,
                .c = c};
    enum bias_kind bias = bias_block(u, u->i0 + i, n_i, j0, n, (real)M_LOG2E, t.s, t.s_row, w->line);
    if (bias == BIAS_ALL_MASKED) return false;
    if (u->problem->w_score) {
        additive_scores(u->problem, t.x, nv, k, n, w->given, w->n_lanes);
        t.given = w->given;
    }
    vec unused[SCORE_WIDTH] = {{0}};
    real unit = 1;
    if (bias == BIAS_NONE && u->problem->softcap == 0 && !t.given) {
        bool quick = true;
        for (int x = 0; x < nv; x++) quick &= !vany(FN(is_huge)(vload(t.shift + x * VL)));
        if (quick) FN(score)(&t, nv, SCORE_WEIGHTS);
        for (int x = 0; x < nv; x++) {
            const vec all = FN(add_sums)(*sum, x);
            quick &= !vany(all != all);
        }
        if (quick) return true;
        /* NaN, or a score too low for vexp2_quick. */
        memset(*sum, 0, sizeof *sum);
        t.extreme = (real *)unused;
        unit = c;
        FN(score)(&t, nv, SCORE_RAW);
    } else {
        t.extreme = (real *)unused;
        t.ds = w->tanh ? w->tanh + i : NULL;
        if (bias == BIAS_SOME_MASKED && !t.ds) t.seen = FN(keys_seen)(u, u->i0 + i, j0);
        FN(score_logits)(&t, nv, u->problem, bias, M_LOG2E);
    }
    *masked |= FN(exponentiate)(t.s, t.s_row, n, nv, unit, t.shift, NULL, (real *)sum, bias == BIAS_SOME_MASKED);
    return true;
}

/* P of keys j0 .. j0+n-1 by all queries of the unit; row sums are added to `sum`. */
NOINLINE void weigh_keys(const sdpa_unit *u, const backward_scratch *w, const rows *k, int64_t j0, int64_t n, real c,
                         real *sum) {
    for (int64_t i = 0, n_i; i < u->n_i; i += n_i) {
        n_i = panel_of(u->n_i - i);
        FN(tile_sums) part = {{{0}}};
        bool masked = false;
        const bool any = backward_weights(u, w, k, i, n_i, j0, n, c, &part, &masked);
        for (int64_t x = 0; x * VL < n_i; x++) {
            unsigned char *seen = &w->seen[i / VL + x];
            *seen = !any ? PANEL_HIDDEN : masked ? PANEL_MASKED : PANEL_SEEN;
            vstore(sum + i + x * VL, vload(sum + i + x * VL) + FN(add_sums)(part, x));
            for (int64_t j = 0; j < n && *seen == PANEL_HIDDEN; j++) {
                vstore(w->p + j * w->n_lanes + i + x * VL, vset1(-0.0));
                if (w->tanh) vstore(w->tanh + j * w->n_lanes + i + x * VL, (vec){0}); /* dS is multiplied with it */
            }
        }
    }
}

/* dS = P * (dP - shift) of a panel that is not hidden. */
INLINE void FN(panel_gradient)(const sdpa_unit *u, const backward_scratch *w, const rows *v, int64_t i, int64_t n_i,
                               int64_t j0, int64_t n, const real *shift) {
    int nv = (int)(round_up(n_i, VL) / VL);
    scores t = {.x = w->dout + i * u->problem->d_v,
                .y = v->p,
                .y_row = v->row,
                .y_tail = v->tail,
                .tail_row = v->tail_row,
                .n = n,
                .depth = u->problem->d_v,
                .s = w->p + i,
                .ds = w->ds + i,
                .s_row = w->n_lanes,
                .shift = shift + i};
    if (w->seen[i / VL] == PANEL_MASKED) {
        t.seen = FN(keys_seen)(u, u->i0 + i, j0);
        FN(score)(&t, nv, SCORE_GRADIENT_MASKED);
    } else {
        FN(score)(&t, nv, SCORE_GRADIENT);
    }
}

/* Adds rowsum(P * dP) over keys j0 .. j0+n-1 to `sum`, four running sums at a time. */
NOINLINE void weighted_values(const sdpa_unit *u, const backward_scratch *w, int64_t j0, int64_t n, double *sum) {
    rows v = pack_rows(&u->v, j0, n, u->problem->d_v, 0, w->v, w->v_tail);
    for (int64_t i = 0, n_i; i < u->n_i; i += n_i) {
        n_i = panel_of(u->n_i - i);
        if (w->seen[i / VL] == PANEL_HIDDEN) continue;
        FN(panel_gradient)(u, w, &v, i, n_i, j0, n, w->zero);
        for (int64_t l = i; l < i + n_i; l += VL) {
            vec part[4] = {{0}};
            for (int64_t j = 0; j < n; j++) part[j % 4] += vload(w->ds + j * w->n_lanes + l);
            part[0] = (part[0] + part[1]) + (part[2] + part[3]);
            for (int x = 0; x < VL; x++) sum[l + x] += part[0][x];
        }
    }
}

/* Blocks of keys fall into two pieces where causality begins to hide some from the unit's queries: only the second takes
 * masks. Where the piece that begins at j ends, before j1. */
INLINE int64_t FN(piece_end)(const sdpa_unit *u, int64_t j, int64_t j1) {
    const int64_t block = sdpa_key_block(u->problem), next = (j / block + 1) * block, end = next < j1 ? next : j1;
    const int64_t open = FN(open_keys)(u, u->i0, j, end - j);
    return open > 0 ? j + open : end;
}

/* The scratch of the piece that begins at key j, block b0 being the first that the unit sees. */
COLD NOINLINE backward_scratch FN(kept_piece)(const backward_scratch *w, const sdpa_problem *p, int64_t j, int64_t b0) {
    backward_scratch at = *w;
    int64_t slot = j / sdpa_key_block(p) - b0, first = j % sdpa_key_block(p);
    if (slot >= w->n_slots) slot = w->n_slots - 1;
    at.p += (slot * (w->block + MAX_TILE_ROWS) + first) * w->n_lanes;
    at.seen += (2 * slot + (first > 0)) * (SDPA_QUERY_BLOCK / VL);
    if (at.tanh) at.tanh += (slot * w->block + first) * w->n_lanes;
    return at;
}

/* Computes P and sums its rows; they should be 1, but for what rounding took from lse, a relative error of ulp(lse) / 2
 * in the whole row. Taken over only if it is that close; else lse is of a larger set of keys than these,
 * and right as it stands. With it delta, where O is not precise enough. False if interrupted. */
NOINLINE bool complete_rows(const sdpa_unit *u, const backward_scratch *w, int64_t j0, int64_t j1, real c) {
    const sdpa_problem *p = u->problem;
    const real epsilon = SDPA_REAL == 32 ? FLT_EPSILON : DBL_EPSILON;
    const bool coarse = p->dtype == SDPA_F16 || p->dtype == SDPA_BF16 || p->w_score;
    const bool by_weights = coarse && p->dropout_p == 0;
    const int64_t block = sdpa_key_block(p);
    if (by_weights) pack_panels(w->dout, &u->dout, u->i0, u->n_i, p->d_v, 1, w->line);
    real sum[SDPA_QUERY_BLOCK] = {0};
    double delta[SDPA_QUERY_BLOCK] = {0};
    for (int64_t j = j0 / block * block, end; j < j1; j = end) {
        if (sdpa_run_stopped(u->run)) return false;
        end = FN(piece_end)(u, j, j1);
        const backward_scratch at = FN(kept_piece)(w, p, j, j0 / block);
        rows k = pack_rows(&u->k, j, end - j, p->d_k, 0, w->k, w->k_tail);
        weigh_keys(u, &at, &k, j, end - j, c, sum);
        if (by_weights) weighted_values(u, &at, j, end - j, delta);
    }
    const double sink = FN(sink_of)(u);
    const bool sunk = sink != -INFINITY;
    for (int64_t i = 0; i < u->n_i; i++) {
        double total = w->factor[i] * (sum[i] + (sunk ? exp2(sink - w->lse[i]) : 0)), excess = log2(total);
        if (!(total > 0 && fabs(excess) <= 2 * epsilon * (4 + fabs((double)w->lse[i])))) continue;
        if (by_weights) w->delta[i] = (real)(delta[i] * w->factor[i] / total) - w->dlse[i];
        w->weighed[i] = by_weights;
        w->factor[i] /= total;
    }
    return true;
}

/* After ds = P * R-less dP: ds = R * ds - P * delta and P = R * P, masked pairs staying -0. */
NOINLINE void drop_out(const sdpa_unit *u, const backward_scratch *w, int64_t i, int nv, int64_t j0, int64_t n) {
    dropout_block(u, u->i0 + i, nv * VL, j0, n, w->r + i, w->n_lanes);
    for (int64_t j = 0; j < n; j++) {
        for (int x = 0; x < nv; x++) {
            int64_t at = j * w->n_lanes + i + x * VL;
            vec p = vload(w->p + at), r = vload(w->r + at),
                ds = r * vload(w->ds + at) - p * vload(w->delta + i + x * VL);
            vstore(w->ds + at, vselect((ivec)p == SIGN_BIT, p, ds));
            vstore(w->p + at, r * p);
        }
    }
}

/* dO's rows and panels, and delta. factor belongs to P, but stands as well at dO and delta, which P is multiplied with. delta
 * is of the dO so rounded, as dP is, so that its rounding cancels in dS. */
NOINLINE void FN(scale_queries)(const sdpa_unit *u, const backward_scratch *w) {
    const int64_t d_v = u->problem->d_v, row = packed_row(d_v), size = sizeof(real);
    const rows dout = pack_rows(&u->dout, u->i0, u->n_i, d_v, 1, w->dout_rows, NULL),
               o = pack_rows(&u->o, u->i0, u->n_i, d_v, 1, w->o_rows, NULL);
    for (int64_t i = 0; i < u->n_i; i++) {
        const real factor = (real)w->factor[i];
        vec sum[8] = {{0}};
        for (int64_t x = 0; x < d_v; x += VL) {
            const vec scaled = factor * vload(dout.p + i * dout.row + x);
            vstore(w->dout_rows + i * row + x, scaled);
            sum[x / VL % 8] += scaled * vload(o.p + i * o.row + x);
        }
        UNROLL for (int h = 4; h > 0; h /= 2) { UNROLL for (int x = 0; x < h; x++) sum[x] += sum[x + h]; }
        const real product = vreduce_add(sum[0]);
        w->delta[i] = w->weighed[i] ? factor * w->delta[i] : product - factor * w->dlse[i];
    }
    const sdpa_dtype dtype = SDPA_REAL == 32 ? SDPA_F32 : SDPA_F64;
    const sdpa_matrix scaled = {(char *)w->dout_rows, row * size, size, dtype, false};
    pack_panels(w->dout, &scaled, 0, u->n_i, d_v, 1, w->line);
}

/* The products after P for keys j0 .. j0+n-1, or with `anew` P, too; `q`, `dout`: the unit's rows; `c` = |scale| log2(e). */
NOINLINE void backward_keys(const sdpa_unit *u, const backward_scratch *w, const rows *q, const rows *dout, int64_t j0,
                            int64_t n, real c, bool anew, bool queries_finite) {
    const sdpa_problem *p = u->problem;
    rows k = pack_rows(&u->k, j0, n, p->d_k, u->dq.data ? u->n_i : 0, w->k, w->k_tail);
    rows v = pack_rows(&u->v, j0, n, p->d_v, 0, w->v, w->v_tail);
    const bool want_ds = u->dq.data || u->dk.data || u->dmask.data;
    bool masked = false, any = false;
    if (anew) {
        real unused[SDPA_QUERY_BLOCK] = {0};
        weigh_keys(u, w, &k, j0, n, c, unused);
    }
    for (int64_t i = 0, n_i; i < u->n_i; i += n_i) {
        n_i = panel_of(u->n_i - i);
        int nv = (int)(round_up(n_i, VL) / VL);
        const unsigned char seen = w->seen[i / VL];
        masked |= seen != PANEL_SEEN;
        any |= seen != PANEL_HIDDEN;
        if (seen == PANEL_HIDDEN) {
            for (int64_t j = 0; j < n; j++) {
                for (int x = 0; x < nv; x++) vstore(w->ds + j * w->n_lanes + i + x * VL, vset1(-0.0));
            }
        } else if (want_ds || p->dropout_p > 0) {
            FN(panel_gradient)(u, w, &v, i, n_i, j0, n, p->dropout_p > 0 ? w->zero : w->delta);
            if (p->dropout_p > 0) drop_out(u, w, i, nv, j0, n);
        }
    }
    if (!any) return;

    if (u->dmask.data) add_mask_gradient(u, w->ds, w->n_lanes, w->dmask, j0, n);
    if (w->tanh) {
        for (int64_t x = 0; x < n * w->n_lanes; x += VL) {
            vec h = vload(w->tanh + x);
            vstore(w->ds + x, (1 - h * h) * vload(w->ds + x));
        }
    }
    /* Only a masked pair must not meet a NaN or Inf: then its products are skipped, not multiplied by zero. */
    const bool exact = !masked || queries_finite;
    const int64_t seen = FN(keys_seen)(u, u->i0, j0);
    if (u->dv.data) {
        gemm g = {.c = (real *)(u->dv.data + j0 * u->dv.row),
                  .c_row = u->dv.row / (int64_t)sizeof(real),
                  .a = w->p,
                  .a_stride = w->n_lanes,
                  .b = dout->p,
                  .b_row = dout->row,
                  .m = n,
                  .n = p->d_v,
                  .depth = u->n_i,
                  .seen = seen,
                  .alpha = 1};
        FN(multiply)(&g, false, exact);
    }
    if (p->w_score) {
        const additive_block t = {.q = w->q,
                                  .ds = w->ds,
                                  .k = k,
                                  .dq = w->dq_lanes,
                                  .part = w->part,
                                  .lanes = w->given,
                                  .seen = w->seen,
                                  .row = w->n_lanes,
                                  .j0 = j0,
                                  .n = n};
        if (u->dq.data || u->dk.data) additive_gradients(u, &t);
        return;
    }
    if (u->dk.data) {
        gemm g = {.c = (real *)(u->dk.data + j0 * u->dk.row),
                  .c_row = u->dk.row / (int64_t)sizeof(real),
                  .a = w->ds,
                  .a_stride = w->n_lanes,
                  .b = q->p,
                  .b_row = q->row,
                  .m = n,
                  .n = p->d_k,
                  .depth = u->n_i,
                  .seen = seen,
                  .alpha = (real)p->scale};
        FN(multiply)(&g, false, exact);
    }
    if (u->dq.data) {
        gemm g = {.c = w->dq,
                  .c_row = w->k_row,
                  .a = w->ds,
                  .a_stride = w->n_lanes,
                  .b = k.p,
                  .b_row = k.row,
                  .m = u->n_i,
                  .n = p->d_k,
                  .depth = n,
                  .seen = seen,
                  .alpha = (real)p->scale};
        FN(multiply)(&g, true, !masked || all_finite(k.p, k.row, n, p->d_k));
    }
}

/* Adds a row to elements of memory that units may share. */
INLINE void FN(add_row)(char *dst, int64_t stride, sdpa_dtype dtype, const real *row, int64_t n, real *line) {
    FN(load)(line, dst, n, stride, dtype, false);
    SIMD for (int64_t x = 0; x < n; x++) line[x] += row[x];
    FN(store)(dst, line, n, stride, dtype);
}

#if SMALL
NOINLINE bool FN(backward_small)(const sdpa_unit *u, const backward_scratch *w);
#endif

/* dQ of the unit's queries, and its share of dK, dV, dMask. dK and dV have the compute type and unit column stride. */
static void FN(backward)(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    const backward_scratch w = backward_layout(p, &arena);
#if SMALL
    if (FN(backward_small)(u, &w)) return;
#endif
    const real c = (real)(fabs(p->scale) * M_LOG2E);
    int64_t j0, j1;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    FN(lse_rows)(u, &w);
    memset(w.dq, 0, sizeof(real) * (size_t)(w.n_lanes * w.k_row));
    memset(w.dmask, 0, sizeof(real) * (size_t)w.n_lanes);
    if (p->w_score) memset(w.dq_lanes, 0, sizeof(real) * (size_t)(p->d_k * w.n_lanes));
    if (j0 < j1) {
        pack_panels(w.q, &u->q, u->i0, u->n_i, p->d_k, p->scale < 0 ? -1 : 1, w.line);
        if (!complete_rows(u, &w, j0, j1, c)) return;
    }
    FN(scale_queries)(u, &w);
    /* A sink's logit has no value, so its dP is 0: dS = -P delta. */
    const double sink = FN(sink_of)(u);
    double dsink = 0;
    for (int64_t i = 0; u->dsinks.data && i < u->n_i; i++) dsink -= exp2(sink - w.lse[i]) * w.delta[i];
    const rows q = pack_rows(&u->q, u->i0, u->n_i, p->d_k, j1 - j0, w.q_rows, NULL);
    const rows dout = {.p = w.dout_rows, .row = packed_row(p->d_v)};
    const bool finite =
        !FN(may_mask)(u) || (all_finite(q.p, q.row, u->n_i, p->d_k) && all_finite(dout.p, dout.row, u->n_i, p->d_v));
    const int64_t block = sdpa_key_block(p), b0 = j0 / block, b1 = j0 < j1 ? (j1 + block - 1) / block : b0;
    for (int64_t b = b0; b < b1; b++) {
        if (!sdpa_turn_wait(u, b)) return;
        const bool anew = b1 - b0 > w.n_slots && b - b0 >= w.n_slots - 1;
        for (int64_t j = b * block, end; j < j1 && j < (b + 1) * block; j = end) {
            end = FN(piece_end)(u, j, j1);
            const backward_scratch at = FN(kept_piece)(&w, p, j, b0);
            backward_keys(u, &at, &q, &dout, j, end - j, c, anew, finite);
        }
        sdpa_turn_pass(u, b);
    }
    if (!sdpa_turn_wait_last(u)) return;
    for (int64_t i = 0; p->w_score && i < u->n_i; i++) {
        for (int64_t x = 0; x < p->d_k; x++) w.dq[i * w.k_row + x] = w.dq_lanes[x * w.n_lanes + i];
    }
    if (u->dq.data) {
        for (int64_t i = 0; i < u->n_i; i++) {
            FN(add_row)
            (u->dq.data + (u->i0 + i) * u->dq.row, u->dq.col, u->dq.dtype, w.dq + i * w.k_row, p->d_k, w.line);
        }
    }
    if (u->dmask.data && u->dmask.col == 0) {
        for (int64_t i = 0; i < u->n_i; i++) {
            FN(add_row)(u->dmask.data + (u->i0 + i) * u->dmask.row, 0, u->dmask.dtype, w.dmask + i, 1, w.line);
        }
    }
    if (u->dsinks.data) {
        const real sum = (real)dsink;
        FN(add_row)(u->dsinks.data, 0, u->dsinks.dtype, &sum, 1, w.line);
    }
    sdpa_turn_end(u);
}
