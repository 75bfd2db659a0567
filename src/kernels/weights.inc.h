/* The matrix of scores or weights itself: the result is n_q x n_k, the extra memory still a block. Two passes over the
 * keys for the weights: the first finds maximum and sum of each query, the second writes 2^(c s - m) / l. */

#define write_block FN(write_block)

/* out[i0 + i, j0 + j] = factor_i * s[j, i] for i < n_i, j < n; factor NULL: 1. */
NOINLINE void write_block(const sdpa_matrix *out, const real *s, int64_t s_row, int64_t i0, int64_t n_i, int64_t j0,
                          int64_t n, const real *factor, real *lines) {
    int64_t line_row = round_up(n, VL);
    for (int64_t i = 0; i < n_i; i += VL) {
        for (int64_t j = 0; j < n; j += VL) {
            vec r[VL];
            UNROLL for (int l = 0; l < VL; l++) {
                r[l] = (vec){0};
                if (j + l < n) r[l] = vload(s + (j + l) * s_row + i);
                /* A masked pair is 0 in a row of NaN, too. */
                if (factor) r[l] = vselect((ivec)r[l] == SIGN_BIT, (vec){0}, r[l] * vload(factor + i));
            }
            vtranspose(r);
            UNROLL for (int l = 0; l < VL; l++) vstore(lines + l * line_row + j, r[l]);
        }
        for (int64_t l = 0; l < VL && i + l < n_i; l++) {
            FN(store)
            (out->data + (i0 + i + l) * out->row + j0 * out->col, lines + l * line_row, n, out->col, out->dtype);
        }
    }
}

/* The block of queries of one stage, into u->o whose columns are keys. */
COLD static void FN(weights)(const sdpa_unit *u, sdpa_stage stage, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    const forward_scratch w = forward_layout(p, 0, &arena);
    const bool weights = stage == SDPA_WEIGHTS, visible = weights || stage == SDPA_BIASED;
    const real c = (real)(weights ? fabs(p->scale) * M_LOG2E : fabs(p->scale));
    int64_t j0 = 0, j1 = p->n_k;
    if (visible) sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    pack_panels(w.q, &u->q, u->i0, u->n_i, p->d_k, p->scale < 0 ? -1 : 1, w.line);
    for (int64_t i = 0; i < w.n_lanes; i++) {
        w.m[i] = -(real)INFINITY;
        w.l[i] = w.low[i] = 0;
        w.exact[i] = 1;
    }
    for (int64_t j = j0; j < j1 && weights; j += w.block) {
        if (sdpa_run_stopped(u->run)) return;
        int64_t n = j1 - j < w.block ? j1 - j : w.block;
        rows k = pack_rows(&u->k, j, n, p->d_k, 0, w.k, w.k_tail), v = {0};
        for (int64_t i = 0, n_i; i < u->n_i; i += n_i) {
            n_i = panel_of(u->n_i - i);
            forward_keys(u, &w, &k, &v, i, n_i, j, n, c, true);
        }
    }
    const double sink = FN(sink_of)(u);
    for (int64_t i = 0; i < w.n_lanes; i++) {
        FN(add_sink)(sink, &w.m[i], &w.l[i]);
        if (w.m[i] == -(real)INFINITY) w.m[i] = 0;
        w.l[i] = w.l[i] == 0 ? 0 : 1 / w.l[i];
    }

    for (int64_t j = 0; j < p->n_k; j += w.block) {
        if (sdpa_run_stopped(u->run)) return;
        int64_t n = p->n_k - j < w.block ? p->n_k - j : w.block;
        rows k = pack_rows(&u->k, j, n, p->d_k, 0, w.k, w.k_tail);
        for (int64_t i = 0, n_i; i < u->n_i; i += n_i) {
            n_i = panel_of(u->n_i - i);
            int nv = (int)(round_up(n_i, VL) / VL);
            vec extreme[SCORE_WIDTH];
            for (int x = 0; x < nv; x++) extreme[x] = (vec){0};
            scores t = {.x = w.q + i * p->d_k,
                        .y = k.p,
                        .y_row = k.row,
                        .y_tail = k.tail,
                        .tail_row = k.tail_row,
                        .n = n,
                        .depth = p->d_k,
                        .s = w.s,
                        .s_row = w.panel,
                        .extreme = (real *)extreme,
                        .c = c};
            enum bias_kind bias = BIAS_NONE;
            if (visible) bias = bias_block(u, u->i0 + i, n_i, j, n, weights ? (real)M_LOG2E : 1, w.s, w.panel, w.line);
            const bool plain = bias == BIAS_NONE && (p->softcap == 0 || stage == SDPA_SCORES);
            if (plain) {
                FN(score)(&t, nv, SCORE_RAW);
            } else if (bias != BIAS_ALL_MASKED) {
                FN(score_logits)(&t, nv, p, bias, weights ? M_LOG2E : 1);
            }
            if (weights && p->dropout_p > 0) dropout_block(u, u->i0 + i, nv * VL, j, n, w.r, w.panel);
            real unit = plain ? c : 1;
            for (int64_t l = 0; l < n; l++) {
                for (int x = 0; x < nv; x++) {
                    real *s = w.s + l * w.panel + x * VL;
                    vec a = bias == BIAS_ALL_MASKED ? vset1(-INFINITY) : unit * vload(s);
                    if (weights) {
                        vec m = vload(w.m + i + x * VL), low = vload(w.low + i + x * VL);
                        vec e = vexp2(vmulsub(vset1(unit), plain ? vload(s) : a, m) - low);
                        if (p->dropout_p > 0) e *= vload(w.r + l * w.panel + x * VL);
                        a = vselect(a == -(real)INFINITY, vset1(-0.0), e);
                    }
                    vstore(s, a);
                }
            }
            write_block(&u->o, w.s, w.panel, u->i0 + i, n_i, j, n, weights ? w.l + i : NULL, w.line);
        }
    }
}
