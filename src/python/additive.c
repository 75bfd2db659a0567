/* additive_attention: a call of attention with weights beside its operands. */
#include <stdio.h>

#include "call.h"

#define ARGUMENTS PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames

enum { W_QUERY, W_KEY, W_SCORE, BIAS, N_WEIGHTS };

typedef struct additive_call {
    sdpa_call call;
    sdpa_additive additive;
    PyArrayObject *weights[N_WEIGHTS]; /* held by the call */
} additive_call;

static sdpa_matrix matrix_of(PyArrayObject *a, sdpa_dtype dtype) {
    const int n = PyArray_NDIM(a);
    return (sdpa_matrix){sdpa_data(a), n > 1 ? PyArray_STRIDE(a, 0) : 0, PyArray_STRIDE(a, n - 1), dtype,
                         sdpa_is_swapped(a)};
}

/* The weights, held against the operands; h is what w_query has columns. */
static int read_weights(additive_call *c, PyObject *const values[N_NAMES]) {
    static const int names[] = {NAME_w_query, NAME_w_key, NAME_w_score, NAME_bias};
    sdpa_call *call = &c->call;
    sdpa_problem *p = &call->problem;
    sdpa_additive *a = &c->additive;
    a->d_q = p->d_k;
    p->d_k = PyArray_DIM(call->k, PyArray_NDIM(call->k) - 1);
    const int64_t d_k[] = {a->d_q, p->d_k};
    sdpa_matrix *matrices[] = {&a->w_query, &a->w_key, &a->w_score, &a->bias};
    for (int i = 0; i < N_WEIGHTS; i++) {
        PyObject *value = values[names[i]];
        const char *name = sdpa_name_text(names[i]);
        if (i == BIAS && (!value || value == Py_None)) continue;
        PyArrayObject *w = c->weights[i] = sdpa_call_hold(call, name, value);
        if (!w) return -1;
        if (sdpa_dtype_of(call->module, w) != (int)p->dtype) {
            PyErr_Format(PyExc_TypeError, "%s: expected query's dtype %S, got %S", name, PyArray_DESCR(call->q),
                         PyArray_DESCR(w));
            return -1;
        }
        const int n = i < W_SCORE ? 2 : 1;
        const bool fits = PyArray_NDIM(w) == n && (i >= W_SCORE || PyArray_DIM(w, 0) == d_k[i]) &&
                          (i == W_QUERY || PyArray_DIM(w, n - 1) == a->n_hidden);
        if (!fits) {
            char expected[100], got[SDPA_SHAPE_SIZE];
            sdpa_shape_text(got, "", PyArray_DIMS(w), PyArray_NDIM(w));
            if (i == W_QUERY) {
                snprintf(expected, sizeof expected, "(%lld, h) to match query's last axis %lld", (long long)d_k[i],
                         (long long)d_k[i]);
            } else if (i == W_KEY) {
                snprintf(expected, sizeof expected, "(%lld, %lld) to match key's last axis and w_query's",
                         (long long)d_k[i], (long long)a->n_hidden);
            } else {
                snprintf(expected, sizeof expected, "(%lld,) to match w_query's last axis %lld", (long long)a->n_hidden,
                         (long long)a->n_hidden);
            }
            PyErr_Format(PyExc_ValueError, "%s: expected %s, got %s", name, expected, got);
            return -1;
        }
        if (i == W_QUERY) a->n_hidden = PyArray_DIM(w, 1);
        *matrices[i] = matrix_of(w, p->dtype);
    }
    return 0;
}

/* sdpa_call_end in any case. */
static int begin(additive_call *c, PyObject *module, unsigned where, PyObject *const values[N_NAMES]) {
    c->additive = (sdpa_additive){0};
    for (int i = 0; i < N_WEIGHTS; i++) c->weights[i] = NULL;
    if (sdpa_call_begin(&c->call, module, where, values) < 0) return -1;
    return read_weights(c, values);
}

/* The output, new reference; with lse, another, where that is not NULL. */
static PyArrayObject *forward(PyObject *module, unsigned where, PyObject *const values[N_NAMES], PyArrayObject **lse) {
    additive_call c;
    PyArrayObject *out = NULL;
    if (begin(&c, module, where, values) < 0) goto done;
    sdpa_problem *p = &c.call.problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    out = sdpa_call_result(&c.call, &p->o, 2, sizes, p->dtype, c.call.options.out);
    if (out && lse) {
        *lse = sdpa_call_result(&c.call, &p->lse, 1, sizes, sdpa_lse_dtype(p->dtype), NULL);
        if (!*lse) Py_CLEAR(out);
    }
    if (!out) goto done;
    sdpa_status status;
    sdpa_call_merge_axes(&c.call);
    Py_BEGIN_ALLOW_THREADS;
    status = sdpa_additive_forward(p, &c.additive);
    Py_END_ALLOW_THREADS;
    if (sdpa_raise(status) < 0) Py_CLEAR(out);
done:
    sdpa_call_end(&c.call);
    return out;
}

PyObject *sdpa_additive_attention(ARGUMENTS) {
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, sdpa_signature_of(module, ADDITIVE), args, n_args, kwnames, values) < 0) return NULL;
    return (PyObject *)forward(module, IN_ADDITIVE, values, NULL);
}

PyObject *sdpa_additive_attention_forward(ARGUMENTS) {
    PyObject *values[N_NAMES];
    PyArrayObject *lse = NULL;
    if (sdpa_parse(module, sdpa_signature_of(module, ADDITIVE_FORWARD), args, n_args, kwnames, values) < 0) return NULL;
    PyArrayObject *out = forward(module, IN_ADDITIVE_FORWARD, values, &lse);
    return sdpa_pair(module, FORWARD_TYPE, out, lse);
}

/* Gradients of the weights that are asked for, zeroed. New references, NULL where absent. */
static int make_weight_gradients(additive_call *c, PyArrayObject *gradients[N_WEIGHTS]) {
    sdpa_additive *a = &c->additive;
    sdpa_matrix *matrices[] = {&a->dw_query, &a->dw_key, &a->dw_score, &a->dbias};
    const sdpa_dtype dtype = c->call.problem.dtype;
    for (int i = 0; i < N_WEIGHTS; i++) {
        PyArrayObject *w = c->weights[i];
        if (!w || !(c->call.options.needs & NEEDS_W_QUERY << i)) continue;
        gradients[i] = (PyArrayObject *)PyArray_ZEROS(PyArray_NDIM(w), PyArray_DIMS(w),
                                                      sdpa_type_number(c->call.module, dtype), 0);
        if (!gradients[i]) return -1;
        *matrices[i] = matrix_of(gradients[i], dtype);
    }
    return 0;
}

PyObject *sdpa_additive_attention_backward(ARGUMENTS) {
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *g[N_GRADIENTS] = {NULL}, *w[N_WEIGHTS] = {NULL};
    additive_call c;
    if (sdpa_parse(module, sdpa_signature_of(module, ADDITIVE_BACKWARD), args, n_args, kwnames, values) < 0) {
        return NULL;
    }
    if (begin(&c, module, IN_ADDITIVE_BACKWARD, values) < 0 || sdpa_call_begin_backward(&c.call, values) < 0 ||
        sdpa_call_make_gradients(&c.call, g) < 0 || make_weight_gradients(&c, w) < 0) {
        goto done;
    }
    sdpa_status status;
    sdpa_call_merge_axes(&c.call);
    Py_BEGIN_ALLOW_THREADS;
    status = sdpa_additive_backward(&c.call.problem, &c.additive);
    Py_END_ALLOW_THREADS;
    if (sdpa_raise(status) < 0) goto done;
    result = PyObject_CallFunctionObjArgs(sdpa_state_of(module)->types[ADDITIVE_TYPE], sdpa_or_none(g[0]),
                                          sdpa_or_none(g[1]), sdpa_or_none(g[2]), sdpa_or_none(w[W_QUERY]),
                                          sdpa_or_none(w[W_KEY]), sdpa_or_none(w[W_SCORE]), sdpa_or_none(w[BIAS]),
                                          sdpa_or_none(g[3]), sdpa_or_none(g[4]), NULL);
done:
    for (int i = 0; i < N_GRADIENTS; i++) Py_XDECREF((PyObject *)g[i]);
    for (int i = 0; i < N_WEIGHTS; i++) Py_XDECREF((PyObject *)w[i]);
    sdpa_call_end(&c.call);
    return result;
}
