#include "sequences.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Points a tensor with one element per sequence at the element of this sequence. */
static void skip_sequences(sdpa_tensor *t, int64_t sequence) {
    if (t->data) t->data += sequence * t->row;
    t->row = 0;
}

/* Points all other tensors at the first row of the sequence. Here p->n_q and p->n_k count the rows before it. A tensor
 * of one row has stride 0 and does not move. */
static void skip_rows(sdpa_problem *p) {
#define SKIP(name, rows, columns)                                                                                      \
    if (p->name.data) p->name.data += (rows)*p->name.row;
    SDPA_TENSORS(SKIP)
#undef SKIP
}

void sdpa_sequence_set(const sdpa_problem *p, int64_t sequence, sdpa_problem *one) {
    const int64_t q = p->cu_q[sequence], n_q = p->cu_q[sequence + 1] - q;
    const int64_t k = p->cu_k[sequence], n_k = p->cu_k[sequence + 1] - k;
    if (one != p) *one = *p;
#define SKIP(name, rows, columns) skip_sequences(&one->name, sequence);
    SDPA_INTEGERS(SKIP)
    SDPA_HEAD_GRADIENTS(SKIP)
#undef SKIP
    one->n_q = q;
    one->n_k = k;
    skip_rows(one);
    /* A call with this sequence alone would have no offset, and fast paths ask whether there is one. */
    if (one->offset.data) {
        int64_t offset;
        memcpy(&offset, one->offset.data, sizeof offset);
        if (offset == 0) one->offset.data = NULL;
    }
    one->n_q = n_q;
    one->n_k = n_k;
    one->first_batch = sequence;
    one->cu_q = one->cu_k = NULL;
    one->features = sdpa_problem_features(one);
}

/* Rows first .. end-1 of the n_heads heads of t become `value`, which is 0 or t has the compute type. */
static void fill_rows(const sdpa_tensor *t, int64_t n_heads, int64_t first, int64_t end, int64_t n_cols, double value) {
    const float narrow = (float)value;
    const void *element = t->dtype == SDPA_F64 ? (const void *)&value : &narrow; /* 0 has the same bytes in all types */
    const size_t size = (size_t)sdpa_size_of(t->dtype);
    if (!t->data) return;
    for (int64_t h = 0; h < n_heads; h += t->head ? t->group : n_heads) {
        for (int64_t i = first; i < end; i++) {
            char *row = t->data + h / t->group * t->head + i * t->row;
            for (int64_t c = 0; c < n_cols; c++) memcpy(row + c * t->col, element, size);
        }
    }
}

void sdpa_sequences_pad(const sdpa_problem *p, sdpa_pass pass) {
    static const double statistics[SDPA_N_STATISTICS] = {-INFINITY, 0, 0, 0, 0, NAN, NAN};
    const int64_t q = p->cu_q[p->n_sequences], k = p->cu_k[p->n_sequences];
    switch (pass) {
    case SDPA_PASS_FORWARD:
    case SDPA_PASS_TANGENT:
        fill_rows(&p->o, p->n_head, q, p->n_q, p->d_v, 0);
        fill_rows(&p->o_t, p->n_head, q, p->n_q, p->d_v, 0);
        fill_rows(&p->lse, p->n_head, q, p->n_q, 1, -INFINITY);
        break;
    case SDPA_PASS_STATISTICS:
        for (int c = 0; c < SDPA_N_STATISTICS; c++) {
            sdpa_tensor column = p->o;
            column.data += c * column.col;
            fill_rows(&column, p->n_head, q, p->n_q, 1, statistics[c]);
        }
        break;
    case SDPA_PASS_RECEIVED:
        fill_rows(&p->o, p->heads.index ? p->heads.n : p->n_head, k, p->n_k, SDPA_N_RECEIVED, 0);
        break;
    default: /* the backward and the second one */
        fill_rows(&p->o_t, p->n_head, q, p->n_q, p->d_v, 0);
        fill_rows(&p->dq, p->n_head, q, p->n_q, p->d_k, 0);
        fill_rows(&p->dk, p->n_head, k, p->n_k, p->d_k, 0);
        fill_rows(&p->dv, p->n_head, k, p->n_k, p->d_v, 0);
    }
}

double sdpa_sequences_pairs(const sdpa_problem *p) {
    double pairs = 0;
    for (int64_t s = 0; s < p->n_sequences; s++) {
        pairs += (double)(p->cu_q[s + 1] - p->cu_q[s]) * (double)(p->cu_k[s + 1] - p->cu_k[s]);
    }
    return pairs * (double)p->n_head;
}

static int compare(const void *x, const void *y) {
    const sdpa_share *a = x, *b = y;
    if (a->cost != b->cost) return a->cost > b->cost ? -1 : 1;
    return (a->sequence > b->sequence) - (a->sequence < b->sequence);
}

int64_t sdpa_shares_deal(sdpa_share *shares, int64_t n) {
    int64_t n_units = 0;
    qsort(shares, (size_t)n, sizeof *shares, compare);
    for (int64_t i = 0; i < n; i++) {
        shares[i].first = n_units;
        n_units += shares[i].n_units;
    }
    return n_units;
}

const sdpa_share *sdpa_share_of(const sdpa_share *shares, int64_t n, int64_t unit) {
    int64_t low = 0, high = n; /* low starts at or before the unit, high after it */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (shares[middle].first <= unit) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return &shares[low];
}
