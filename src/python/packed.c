#include "packed.h"

#include "errors.h"

/* Axes of a packed array. */
enum { TOTAL, HEADS, COLUMNS };

/* ------------------------------------------------------------------------------------ cu_seqlens */

static int check_cu_seqlens(const char *name, const sdpa_integers *cu, const char *operand, npy_intp total) {
    PyArrayObject *a = cu->array;
    if (!cu->given) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected an array, since cu_seqlens_q and cu_seqlens_k go together, got None", name);
        return -1;
    }
    if (!a) {
        PyErr_Format(PyExc_ValueError, "%s: expected shape (sequences + 1,), got the number %lld", name,
                     (long long)cu->value);
        return -1;
    }
    if (PyArray_NDIM(a) != 1 || PyArray_SIZE(a) == 0) return sdpa_raise_shape(name, a, "shape (sequences + 1,)");
    const int64_t *data = PyArray_DATA(a);
    const npy_intp n = PyArray_SIZE(a);
    if (data[0] != 0) {
        PyErr_Format(PyExc_ValueError, "%s: expected 0 as its first element, got %lld", name, (long long)data[0]);
        return -1;
    }
    for (npy_intp i = 1; i < n; i++) {
        if (data[i] >= data[i - 1]) continue;
        PyErr_Format(PyExc_ValueError, "%s: expected elements that do not decrease, got %lld after %lld", name,
                     (long long)data[i], (long long)data[i - 1]);
        return -1;
    }
    if (data[n - 1] <= total) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected at most %s's number of rows, %lld, as its last element, got %lld",
                 name, operand, (long long)total, (long long)data[n - 1]);
    return -1;
}

static int set_sequences(sdpa_problem *p, const sdpa_integers *q, const sdpa_integers *k) {
    if (check_cu_seqlens("cu_seqlens_q", q, "query", p->n_q) < 0) return -1;
    if (check_cu_seqlens("cu_seqlens_k", k, "key", p->n_k) < 0) return -1;
    if (PyArray_SIZE(k->array) != PyArray_SIZE(q->array)) {
        return sdpa_raise_shape("cu_seqlens_k", k->array, "cu_seqlens_q's shape (%lld,)",
                                (long long)PyArray_SIZE(q->array));
    }
    p->cu_q = PyArray_DATA(q->array);
    p->cu_k = PyArray_DATA(k->array);
    p->n_sequences = PyArray_SIZE(q->array) - 1;
    return 0;
}

/* ------------------------------------------------------------------------------------ operands */

/* The query heads that the three have in common, or -1 and an exception. */
static npy_intp common_heads(PyArrayObject *const operands[3], bool enable_gqa) {
    static const char *const names[] = {"query", "key", "value"};
    PyArrayObject *k = operands[1], *v = operands[2];
    const npy_intp n_q = PyArray_DIM(operands[0], HEADS), n_k = PyArray_DIM(k, HEADS);
    if (enable_gqa) {
        if (n_k ? n_q % n_k : n_q) {
            return sdpa_raise_shape("key", k, "a number of heads that divides query's %lld", (long long)n_q);
        }
        if (v && PyArray_DIM(v, HEADS) != n_k) {
            return sdpa_raise_shape("value", v, "key's number of heads, %lld", (long long)n_k);
        }
        return n_q;
    }
    npy_intp common = n_q;
    for (int i = 1; i < 3 && operands[i]; i++) {
        const npy_intp n = PyArray_DIM(operands[i], HEADS);
        if (common == 1) common = n;
        if (n == 1 || n == common) continue;
        return sdpa_raise_shape(names[i], operands[i], "1 or %lld heads%s", (long long)common,
                                n && common % n == 0 ? ", or enable_gqa=True for groups of query heads" : "");
    }
    return common;
}

/* ValueError for an operand without three axes: one head may have been left out, or a batch of one put before. */
static int raise_axes(const char *name, PyArrayObject *a, const char *expected) {
    sdpa_raise_shape(name, a, "%s", expected);
    if (PyArray_NDIM(a) == 2) return sdpa_add_remedy("; write %s[:, None]", name);
    if (PyArray_NDIM(a) == 4 && PyArray_DIM(a, 0) == 1) return sdpa_add_remedy("; write %s[0]", name);
    return -1;
}

int sdpa_packed_set_sizes(sdpa_problem *p, const sdpa_options *options, PyArrayObject *const operands[3]) {
    PyArrayObject *q = operands[0], *k = operands[1], *v = operands[2];
    if (PyArray_NDIM(q) != 3) return raise_axes("query", q, "(total_q, heads, d_k) with cu_seqlens_q");
    if (PyArray_NDIM(k) != 3) return raise_axes("key", k, "(total_k, heads, d_k) with cu_seqlens_k");
    if (v && PyArray_NDIM(v) != 3) return raise_axes("value", v, "(total_k, heads, d_v) with cu_seqlens_k");
    p->n_q = PyArray_DIM(q, TOTAL);
    p->n_k = PyArray_DIM(k, TOTAL);
    p->d_k = PyArray_DIM(q, COLUMNS);
    p->d_v = v ? PyArray_DIM(v, COLUMNS) : 0;
    if (PyArray_DIM(k, COLUMNS) != p->d_k) {
        return sdpa_raise_shape("key", k, "(..., %lld) to match query's last axis", (long long)p->d_k);
    }
    if (v && PyArray_DIM(v, TOTAL) != p->n_k) {
        return sdpa_raise_shape("value", v, "(%lld, ...) to match key's rows", (long long)p->n_k);
    }
    p->n_head = common_heads(operands, options->enable_gqa);
    return p->n_head < 0 ? -1 : set_sequences(p, &options->cu_seqlens_q, &options->cu_seqlens_k);
}

/* ------------------------------------------------------------------------------------ lengths and offsets */

static int64_t keys_of(const sdpa_problem *p, int64_t s) { return p->cu_k[s + 1] - p->cu_k[s]; }

/* The value of sequence s. */
static int64_t value_of(const sdpa_integers *x, int64_t s) {
    if (!x->array) return x->value;
    return ((const int64_t *)PyArray_DATA(x->array))[PyArray_SIZE(x->array) == 1 ? 0 : s];
}

int sdpa_packed_check_lengths(const sdpa_problem *p, const sdpa_integers *lengths) {
    for (int64_t s = 0; s < p->n_sequences; s++) {
        const int64_t length = value_of(lengths, s);
        if (length >= 0 && length <= keys_of(p, s)) continue;
        PyErr_Format(PyExc_ValueError,
                     "key_lengths: expected integers from 0 to Lk, which is %lld in sequence %lld, got %lld",
                     (long long)keys_of(p, s), (long long)s, (long long)length);
        return -1;
    }
    return 0;
}

PyArrayObject *sdpa_packed_lower_right(const sdpa_problem *p, const sdpa_integers *lengths) {
    const npy_intp n = p->n_sequences;
    PyArrayObject *offsets = (PyArrayObject *)PyArray_SimpleNew(1, &n, NPY_INT64);
    int64_t *data = offsets ? PyArray_DATA(offsets) : NULL;
    for (npy_intp s = 0; offsets && s < n; s++) {
        data[s] = (lengths->given ? value_of(lengths, s) : keys_of(p, s)) - (p->cu_q[s + 1] - p->cu_q[s]);
    }
    return offsets;
}
