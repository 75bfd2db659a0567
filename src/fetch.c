#include "unit.h"

/* GCC takes a function that only prefetches for one without effects and drops its calls: hence the empty assembly. */
static void fetch_rows(const char *row, int64_t stride, int64_t n_rows, int64_t bytes) {
    for (int64_t r = 0; r < n_rows; r++, row += stride) {
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
    __asm__ volatile("");
}

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
        const int64_t next = p->n_head > 1 || p->n_axes == 0 ? t->head : t->batch[p->n_axes - 1];
        const int64_t n_rows = tensors[what][i].n_rows, row = n_rows * first / of, end = n_rows * (first + n) / of;
        const char *head = t->data + sdpa_offset(p, t, u->batch - p->first_batch, u->head) + next;
        fetch_rows(head + row * t->row, t->row, end - row, tensors[what][i].n_cols * t->col);
    }
}
