#include "sequences.h"

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
