#include "problem.h"

unsigned sdpa_problem_features(const sdpa_problem *p) {
    unsigned features = 0;
    if (p->mask.data) features |= p->mask.dtype == SDPA_BOOL ? SDPA_FEATURE_MASK : SDPA_FEATURE_BIAS;
    if (p->where.data) features |= SDPA_FEATURE_WHERE;
    if (p->has_lower) features |= SDPA_FEATURE_LOWER;
    if (p->has_upper) features |= SDPA_FEATURE_UPPER;
    if (p->offset.data) features |= SDPA_FEATURE_OFFSET;
    if (p->key_length.data) features |= SDPA_FEATURE_LENGTHS;
    if (p->softcap > 0) features |= SDPA_FEATURE_SOFTCAP;
    if (p->dropout_p > 0) features |= SDPA_FEATURE_DROPOUT;
    if (p->sinks.data) features |= SDPA_FEATURE_SINKS;
    if (p->scales.data) features |= SDPA_FEATURE_SCALES;
    if (p->alibi_slopes.data) features |= SDPA_FEATURE_ALIBI;
    if (p->scores == SDPA_ADDITIVE) features |= SDPA_FEATURE_ADDITIVE;
    if (p->score_mod) features |= SDPA_FEATURE_SCORE_MOD;
    if (p->mask_mod) features |= SDPA_FEATURE_MASK_MOD;
    if (p->invariant) features |= SDPA_FEATURE_INVARIANT;
    return features;
}

double sdpa_pass_work(const sdpa_problem *p, sdpa_pass pass, double pairs) {
    /* Products of width d_k, and of width d_v. */
    static const double products[][2] = {
        [SDPA_PASS_FORWARD] = {1, 1},  [SDPA_PASS_WEIGHTS] = {1, 0}, [SDPA_PASS_STATISTICS] = {1, 0},
        [SDPA_PASS_RECEIVED] = {2, 0}, [SDPA_PASS_TANGENT] = {3, 3}, [SDPA_PASS_BACKWARD] = {3, 2},
        [SDPA_PASS_SECOND] = {9, 7},
    };
    return pairs * (products[pass][0] * (double)p->d_k + products[pass][1] * (double)p->d_v + 16);
}

#ifdef SDPA_ASSERT
#undef NDEBUG
#include <assert.h>
#include <math.h>

_Atomic long sdpa_taken[SDPA_N_PATHS];

/* A tensor and the range of bytes, first .. end-1, that its elements occupy; empty if it is absent or has no
 * elements. */
typedef struct extent {
    const sdpa_tensor *t;
    intptr_t first, end;
    bool written;
    bool whole;    /* the elements fill the range */
    bool repeated; /* elements share memory */
} extent;

static void add_axis(extent *e, int64_t size, int64_t stride, int64_t *elements) {
    int64_t span;
    if (size <= 1) {
        if (size == 0) *elements = 0;
        return;
    }
    e->repeated |= stride == 0;
    if (stride == 0) return;
    assert(!__builtin_mul_overflow(stride, size - 1, &span));
    if (span < 0) {
        e->first += span;
    } else {
        e->end += span;
    }
    *elements *= size;
}

static extent extent_of(const sdpa_problem *p, const sdpa_tensor *t, int64_t n_rows, int64_t n_cols) {
    extent e = {.t = t, .first = (intptr_t)t->data, .end = (intptr_t)t->data + sdpa_size_of(t->dtype)};
    if (!t->data) return (extent){.t = t};
    int64_t elements = 1;
    for (int a = 0; a < p->n_axes; a++) add_axis(&e, p->axis[a], t->batch[a], &elements);
    assert(t->group >= 1 && p->n_head % t->group == 0);
    add_axis(&e, p->n_head / t->group, t->head, &elements);
    add_axis(&e, n_rows, t->row, &elements);
    add_axis(&e, n_cols, t->col, &elements);
    if (elements == 0) return (extent){.t = t};
    e.whole = e.end - e.first == elements * sdpa_size_of(t->dtype);
    return e;
}

static int64_t chosen(const sdpa_choice *choice, int64_t n) { return choice->index ? choice->n : n; }

static extent result_extent(const sdpa_problem *p, sdpa_pass pass) {
    const int64_t n_q = chosen(&p->queries, p->n_q);
    sdpa_problem of_heads = *p;
    of_heads.n_head = chosen(&p->heads, p->n_head);
    switch (pass) {
    case SDPA_PASS_WEIGHTS:
        return extent_of(&of_heads, &p->o, n_q, p->n_k);
    case SDPA_PASS_STATISTICS:
        return extent_of(p, &p->o, p->n_q, SDPA_N_STATISTICS);
    case SDPA_PASS_RECEIVED:
        return extent_of(&of_heads, &p->o, p->n_k, SDPA_N_RECEIVED);
    default:
        return extent_of(p, &p->o, p->n_q, p->d_v);
    }
}

static void check_choice(const sdpa_choice *choice, int64_t n) {
    for (int64_t i = 0; choice->index && i < choice->n; i++) assert(choice->index[i] >= 0 && choice->index[i] < n);
}

static bool is_output(const sdpa_problem *p, sdpa_pass pass, const sdpa_tensor *t) {
    const bool backward = pass == SDPA_PASS_BACKWARD || pass == SDPA_PASS_SECOND;
    if (t == &p->o || t == &p->lse) return !backward;
    if (t == &p->o_t) return pass == SDPA_PASS_TANGENT || pass == SDPA_PASS_SECOND;
#define IS(name, rows, columns) || t == &p->name
    return backward && (false SDPA_GRADIENTS(IS));
#undef IS
}

static void check_types(const sdpa_problem *p, sdpa_pass pass) {
    const sdpa_dtype wide = p->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32;
    assert(p->dtype == SDPA_F16 || p->dtype == SDPA_BF16 || p->dtype == SDPA_F32 || p->dtype == SDPA_F64);
    /* In additive attention q and k are projections, stored in the compute type. */
    const bool additive = p->scores == SDPA_ADDITIVE;
    const sdpa_tensor *operands[] = {&p->q, &p->k, &p->v, &p->dout, &p->o_t};
    const bool mixed = p->dtype == SDPA_F32 && !additive && sdpa_is_narrow(p->k.dtype);
    for (int i = 0; i < 5; i++) {
        const sdpa_dtype own = additive && i < 2 ? wide : mixed && (i == 1 || i == 2) ? p->k.dtype : p->dtype;
        assert(!operands[i]->data || operands[i]->dtype == own);
    }
    const bool wide_result = pass == SDPA_PASS_STATISTICS || pass == SDPA_PASS_RECEIVED;
    /* A backward may have rounded O from float32 to another type than that of its operands, or not at all. */
    const bool any = pass == SDPA_PASS_BACKWARD && wide == SDPA_F32;
    assert(!p->o.data || p->o.dtype == (wide_result ? wide : p->dtype) ||
           (any && (p->o.dtype == SDPA_F32 || sdpa_is_narrow(p->o.dtype))));
    assert(!p->lse.data || p->lse.dtype == wide || p->lse.dtype == SDPA_F64);
    assert(!p->dlse.data || p->dlse.dtype == wide || p->dlse.dtype == SDPA_F64);
    assert(!p->mask.data || p->mask.dtype != SDPA_I64);
    assert(!p->where.data || (p->mask.data && p->where.dtype == SDPA_BOOL));
    assert(!p->offset.data || p->offset.dtype == SDPA_I64);
    assert(!p->key_length.data || p->key_length.dtype == SDPA_I64);
}

static void check_outputs(const sdpa_problem *p, sdpa_pass pass) {
#define EXTENT(name, rows, columns) &p->name == &p->o ? result_extent(p, pass) : extent_of(p, &p->name, rows, columns),
    extent all[] = {SDPA_TENSORS(EXTENT)};
#undef EXTENT
    const int n = sizeof all / sizeof *all;
    for (int i = 0; i < n; i++) {
        const sdpa_tensor *t = all[i].t;
        if (!is_output(p, pass, t) || all[i].first == all[i].end) continue;
        assert(!t->swapped && all[i].first % sdpa_size_of(t->dtype) == 0);
        assert(!all[i].repeated || !(t == &p->o || t == &p->lse || t == &p->o_t));
        for (int j = 0; j < n; j++) {
            /* Strided tensors may interleave without sharing a byte. */
            if (j == i || !all[i].whole || !all[j].whole) continue;
            assert(all[i].end <= all[j].first || all[j].end <= all[i].first);
        }
    }
}

/* NumPy gives empty arrays strides of 0. */
static void check_rows(const sdpa_problem *p, const sdpa_tensor *t, int64_t n_cols) {
    const bool empty = p->n_batch == 0 || p->n_head == 0 || p->n_k == 0;
    assert(!t->data || empty || n_cols < 2 || t->col == sdpa_size_of(t->dtype));
}

static void check_sequences(const sdpa_problem *p) {
    if (!p->cu_q) return;
    assert(p->n_axes == 0 && !p->mask.data && p->n_sequences >= 0);
    assert(p->cu_q[0] == 0 && p->cu_k[0] == 0);
    for (int64_t s = 0; s < p->n_sequences; s++) assert(p->cu_q[s] <= p->cu_q[s + 1] && p->cu_k[s] <= p->cu_k[s + 1]);
    assert(p->cu_q[p->n_sequences] <= p->n_q && p->cu_k[p->n_sequences] <= p->n_k);
}

void sdpa_problem_check(const sdpa_problem *p, sdpa_pass pass) {
    int64_t n_batch = 1;
    assert(p->n_axes >= 0 && p->n_axes <= SDPA_MAX_AXES && p->n_workers >= 1);
    for (int a = 0; a < p->n_axes; a++) {
        assert(p->axis[a] >= 0 && !__builtin_mul_overflow(n_batch, p->axis[a], &n_batch));
    }
    assert(p->n_batch == n_batch);
    assert(p->n_head >= 0 && p->n_q >= 0 && p->n_k >= 0 && p->d_k >= 0 && p->d_v >= 0);
    if (sdpa_has_queries(p)) {
        const int64_t n = p->n_q > p->n_k ? p->n_q : p->n_k, d = p->d_k > p->d_v ? p->d_k : p->d_v;
        assert(n <= SDPA_LARGEST_AXIS && d <= 2 * SDPA_LARGEST_AXIS); /* ADDITIVE doubles d_k */
        assert((double)n_batch * (double)p->n_head * (double)n <= (double)SDPA_MOST_ROWS);
    }
    assert(isfinite(p->scale) && p->softcap >= 0 && isfinite(p->softcap) && p->dropout_p >= 0 && p->dropout_p <= 1);
    assert((p->features & ~(unsigned)SDPA_FEATURE_UNKNOWN) == sdpa_problem_features(p));
    if (p->scores == SDPA_ADDITIVE) assert(p->w_score && p->channels % 2 == 0 && p->d_k == 2 * p->channels);
    check_sequences(p);
    check_choice(&p->heads, p->n_head);
    check_choice(&p->queries, p->n_q);
    check_types(p, pass);
    check_outputs(p, pass);
    check_rows(p, &p->dk, p->d_k);
    check_rows(p, &p->dv, p->d_v);
}
#endif
