#include "unit.h"

/* Asks for rows first .. end-1 of the head after that of m, a matrix of t. Wrong between batch entries that do not follow
 * each other in memory, which costs requests and nothing else. Inlined: see sdpa_fetch_row. */
__attribute__((always_inline)) static inline void fetch_rows(const sdpa_problem *p, const sdpa_tensor *t,
                                                             const sdpa_matrix *m, int64_t first, int64_t end,
                                                             int64_t n_columns) {
    if (!m->data || m->dtype != t->dtype) return; /* sums of another type stay where they are */
    const int64_t next = p->n_head > 1 ? t->head : t->batch[p->n_axes - 1]; /* there is another head */
    for (int64_t row = first; row < end; row++) sdpa_fetch_row(m->data + next + row * m->row, n_columns * m->col);
}

void sdpa_fetch_half(const sdpa_unit *u, sdpa_fetched what, int half) {
    const sdpa_problem *p = u->problem;
    const int64_t i0 = p->n_q * half / 2, i1 = p->n_q * (half + 1) / 2;
    const int64_t j0 = p->n_k * half / 2, j1 = p->n_k * (half + 1) / 2;
    switch (what) {
    case SDPA_FETCH_QK:
        fetch_rows(p, &p->q, &u->q, i0, i1, p->d_k);
        fetch_rows(p, &p->k, &u->k, j0, j1, p->d_k);
        break;
    case SDPA_FETCH_DOUT_V:
        fetch_rows(p, &p->dout, &u->dout, i0, i1, p->d_v);
        fetch_rows(p, &p->v, &u->v, j0, j1, p->d_v);
        break;
    case SDPA_FETCH_O_DV:
        fetch_rows(p, &p->o, &u->o, i0, i1, p->d_v);
        fetch_rows(p, &p->dv, &u->dv, j0, j1, p->d_v);
        break;
    case SDPA_FETCH_DQ_DK:
        fetch_rows(p, &p->dq, &u->dq, i0, i1, p->d_k);
        fetch_rows(p, &p->dk, &u->dk, j0, j1, p->d_k);
        break;
    }
    /* For a compiler that sees the calls: see sdpa_fetch_row. */
    __asm__ volatile("");
}
