#include "unit.h"

void sdpa_fetch_share(const sdpa_unit *u, sdpa_fetched what, int64_t first, int64_t n, int64_t of) {
    const sdpa_problem *p = u->problem;
    const struct {
        const sdpa_tensor *t;
        int64_t n_rows, n_cols;
    } tensors[SDPA_N_FETCH][2] = {
        {{&p->q, p->n_q, p->d_k}, {&p->k, p->n_k, p->d_k}},
        {{&p->dout, p->n_q, p->d_v}, {&p->v, p->n_k, p->d_v}},
        {{&p->o, p->n_q, p->d_v}, {&p->dv, p->n_k, p->d_v}},
        {{&p->dq, p->n_q, p->d_k}, {&p->dk, p->n_k, p->d_k}},
    };
    for (int i = 0; i < 2; i++) {
        const sdpa_tensor *t = tensors[what][i].t;
        if (!t->data) continue;
        /* Wrong between batch entries that do not follow each other in memory, which costs requests and nothing else. */
        const int64_t next = p->n_head > 1 ? t->head : t->batch[p->n_axes - 1]; /* there is another head */
        const char *head = t->data + sdpa_offset(p, t, u->batch - p->first_batch, u->head) + next;
        const int64_t n_rows = tensors[what][i].n_rows, end = n_rows * (first + n) / of;
        for (int64_t row = n_rows * first / of; row < end; row++) {
            sdpa_fetch_row(head + row * t->row, tensors[what][i].n_cols * t->col);
        }
    }
    /* For a compiler that sees the calls: see sdpa_fetch_row. */
    __asm__ volatile("");
}
