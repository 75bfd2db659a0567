/* Double backward: the derivatives of tangent.inc.h's <dO, O_t>. One unit is a block of queries: a forward-mode pass for
 * the row quantities, then a pass over the key blocks like the backward's, with its turns. */

/* What keys j0 .. j0+n-1 add to dq, dk, dv, dmask. */
NOINLINE void double_keys(const sdpa_unit *u, const tangent_scratch *w, const rows *q, const rows *q_t,
                          const rows *dout, int64_t j0, int64_t n, bool queries_finite) {
    const sdpa_problem *p = u->problem;
    rows k = FN(tangent_rows)(&u->k, j0, n, p->d_k, u->n_i, w->k, w->k_tail);
    rows k_t = FN(tangent_rows)(&u->k_t, j0, n, p->d_k, u->n_i, w->k_t, w->k_t_tail);
    rows v = FN(tangent_rows)(&u->v, j0, n, p->d_v, 0, w->v, w->v_tail);
    rows v_t = FN(tangent_rows)(&u->v_t, j0, n, p->d_v, 0, w->v_t, w->v_t_tail);
    const real bend = p->softcap > 0 ? (real)(-2 / p->softcap) : 0;
    /* What reaches v needs neither G nor C. */
    const bool through = u->dq.data || u->dk.data || u->dmask.data;
    bool masked = false, any = false;
    for (int64_t i = 0, n_i; i < u->n_i; i += n_i) {
        n_i = panel_of(u->n_i - i);
        int nv = (int)(round_up(n_i, VL) / VL);
        vec unused[SCORE_WIDTH] = {{0}};
        const bool seen = tangent_scores(u, w, &k, &k_t, i, n_i, j0, n, (real *)unused);
        const bool biased = seen && FN(tangent_mask)(u, w, i, n_i, j0, n, w->e);
        any |= seen;
        if (seen && through) {
            scores t = {.x = w->dout + i * p->d_v,
                        .y = v.p,
                        .y_row = v.row,
                        .y_tail = v.tail,
                        .tail_row = v.tail_row,
                        .n = n,
                        .depth = p->d_v,
                        .s = w->g + i,
                        .s_row = w->n_lanes,
                        .extreme = (real *)unused};
            FN(score)(&t, nv, SCORE_RAW);
            if (v_t.p) {
                t.y = v_t.p;
                t.y_row = v_t.row;
                t.y_tail = v_t.tail;
                t.tail_row = v_t.tail_row;
                t.s = w->c + i;
                FN(score)(&t, nv, SCORE_RAW);
            }
        }
        if (seen && p->dropout_p > 0) dropout_block(u, u->i0 + i, nv * VL, j0, n, w->r + i, w->n_lanes);
        ivec any_masked = {0};
        for (int x = 0; x < nv; x++) {
            const int64_t lane = i + x * VL;
            const vec m = vload(w->m + lane), inverse = vload(w->l + lane), mu = vload(w->mu + lane);
            const vec delta = vload(w->delta + lane), cross = vload(w->cross + lane);
            for (int64_t j = 0; j < n; j++) {
                const int64_t at = j * w->n_lanes + lane;
                vec s = seen ? vload(w->s + at) : vset1(-INFINITY);
                ivec hidden = s == -(real)INFINITY;
                vec t0 = vload(w->t + at), slope = vset1(1), h = {0}, r = vset1(1), c = {0};
                if (w->h) {
                    h = vload(w->h + at);
                    slope = 1 - h * h;
                }
                vec t = slope * t0;
                if (biased) t += vload(w->e + at);
                if (w->r) r = vload(w->r + at);
                vec probability = vexp2(s - m) * inverse;
                const vec mark = vset1(-0.0);
                vstore(w->s + at, vselect(hidden, mark, r * probability * (t - mu)));
                any_masked |= hidden;
                if (!through) continue;
                if (v_t.p) c = r * vload(w->c + at);
                vec g = r * vload(w->g + at) - delta, ds = probability * g;
                vec second = probability * ((t - mu) * g + c - cross);
                vec to_k = slope * (second + bend * h * t0 * ds);
                vstore(w->t + at, vselect(hidden, mark, second));
                vstore(w->g + at, vselect(hidden, mark, to_k));
                vstore(w->c + at, vselect(hidden, mark, slope * ds));
            }
        }
        masked |= vany(any_masked);
    }
    if (!any) return;

    if (u->dmask.data) add_mask_gradient(u, w->t, w->n_lanes, w->dmask, j0, n);
    const bool exact = !masked || queries_finite;
    if (u->dv.data) {
        gemm g = {.c = (real *)(u->dv.data + j0 * u->dv.row),
                  .c_row = u->dv.row / (int64_t)sizeof(real),
                  .a = w->s,
                  .a_stride = w->n_lanes,
                  .b = dout->p,
                  .b_row = dout->row,
                  .m = n,
                  .n = p->d_v,
                  .depth = u->n_i,
                  .alpha = 1};
        FN(multiply)(&g, false, exact);
    }
    if (u->dk.data) {
        gemm g = {.c = (real *)(u->dk.data + j0 * u->dk.row),
                  .c_row = u->dk.row / (int64_t)sizeof(real),
                  .a = w->g,
                  .a_stride = w->n_lanes,
                  .b = q->p,
                  .b_row = q->row,
                  .m = n,
                  .n = p->d_k,
                  .depth = u->n_i,
                  .alpha = (real)p->scale};
        FN(multiply)(&g, false, exact);
        g.a = w->c;
        g.b = q_t->p;
        g.b_row = q_t->row;
        if (q_t->p) FN(multiply)(&g, false, exact);
    }
    if (u->dq.data) {
        const bool keys_exact =
            !masked || (all_finite(k.p, k.row, n, p->d_k) && (!k_t.p || all_finite(k_t.p, k_t.row, n, p->d_k)));
        gemm g = {.c = w->dq,
                  .c_row = w->k_row,
                  .a = w->g,
                  .a_stride = w->n_lanes,
                  .b = k.p,
                  .b_row = k.row,
                  .m = u->n_i,
                  .n = p->d_k,
                  .depth = n,
                  .alpha = (real)p->scale};
        FN(multiply)(&g, true, keys_exact);
        g.a = w->c;
        g.b = k_t.p;
        g.b_row = k_t.row;
        if (k_t.p) FN(multiply)(&g, true, keys_exact);
    }
}

/* dq of the unit and its share of dk, dv, dmask, dsinks; o_t. */
COLD static void FN(double_backward)(const sdpa_unit *u, void *scratch) {
    const sdpa_problem *p = u->problem;
    sdpa_arena arena = {scratch, 0};
    const tangent_scratch w = tangent_layout(p, true, &arena);
    int64_t j0, j1;
    sdpa_visible_keys(u, u->i0, u->n_i, &j0, &j1);
    if (!tangent_pass(u, &w, j0, j1)) return;

    rows q = pack_rows(&u->q, u->i0, u->n_i, p->d_k, j1 - j0, w.q_rows, NULL);
    rows q_t = FN(tangent_rows)(&u->q_t, u->i0, u->n_i, p->d_k, j1 - j0, w.q_t_rows, NULL);
    rows dout = pack_rows(&u->dout, u->i0, u->n_i, p->d_v, 1 + j1 - j0, w.dout_rows, NULL);
    pack_panels(w.dout, &u->dout, u->i0, u->n_i, p->d_v, 1, w.line);
    const bool finite = all_finite(q.p, q.row, u->n_i, p->d_k) && all_finite(dout.p, dout.row, u->n_i, p->d_v) &&
                        (!q_t.p || all_finite(q_t.p, q_t.row, u->n_i, p->d_k));
    memset(w.dq, 0, sizeof(real) * (size_t)(w.n_lanes * w.k_row));
    for (int64_t i = 0; i < w.n_lanes; i++) {
        w.delta[i] = w.cross[i] = w.dmask[i] = 0;
        if (i >= u->n_i || w.l[i] == 0) {
            w.m[i] = w.l[i] = 0; /* P = 0 */
            continue;
        }
        w.l[i] = 1 / w.l[i]; /* P = 2^(s - m) / l: with s - lse in the exponent its rounding would weigh more */
        if (u->dlse) {
            FN(load)(&w.delta[i], u->dlse + (u->i0 + i) * p->dlse.row, 1, 0, p->dlse.dtype, p->dlse.swapped);
        }
        vec delta = {0}, cross = {0};
        for (int64_t x = 0; x < w.v_row; x += VL) {
            delta += vload(dout.p + i * dout.row + x) * vload(w.o + i * w.v_row + x);
            cross += vload(dout.p + i * dout.row + x) * vload(w.o_t + i * w.v_row + x);
        }
        w.delta[i] = vreduce_add(delta) - w.delta[i];
        w.cross[i] = vreduce_add(cross);
    }
    const int64_t block = sdpa_key_block(p);
    if (!u->dq.data && !u->dk.data && !u->dv.data && !u->dmask.data) j1 = j0;
    for (int64_t b = j0 / block; j0 < j1 && b * block < j1; b++) {
        if (!sdpa_turn_wait(u, b)) return;
        double_keys(u, &w, &q, &q_t, &dout, b * block, j1 - b * block < block ? j1 - b * block : block, finite);
        sdpa_turn_pass(u, b);
    }
    if (!sdpa_turn_wait_last(u)) return;
    const double sink = FN(sink_of)(u);
    double dsink = 0;
    real sink_t = 0;
    if (u->sinks_t.data) FN(load)(&sink_t, u->sinks_t.data, 1, 0, u->sinks_t.dtype, u->sinks_t.swapped);
    for (int64_t i = 0; i < u->n_i; i++) {
        if (u->dq.data) {
            FN(add_row)
            (u->dq.data + (u->i0 + i) * u->dq.row, u->dq.col, u->dq.dtype, w.dq + i * w.k_row, p->d_k, w.line);
        }
        if (u->dmask.data && u->dmask.col == 0) {
            FN(add_row)(u->dmask.data + (u->i0 + i) * u->dmask.row, 0, u->dmask.dtype, w.dmask + i, 1, w.line);
        }
        if (u->o_t.data) {
            FN(store)(u->o_t.data + (u->i0 + i) * u->o_t.row, w.o_t + i * w.v_row, p->d_v, u->o_t.col, u->o_t.dtype);
        }
        /* The sink has no value: its G and C are 0. */
        dsink -= exp2(sink - w.m[i]) * w.l[i] * ((sink_t - w.mu[i]) * w.delta[i] + w.cross[i]);
    }
    if (u->dsinks.data) {
        real sum = (real)dsink;
        FN(add_row)(u->dsinks.data, 0, u->dsinks.dtype, &sum, 1, w.line);
    }
    sdpa_turn_end(u);
}
