#include "additive.h"

#include "arrays.h"
#include "docstring.h"
#include "docstrings.h"
#include "errors.h"
#include "parse.h"
#include "results.h"

enum { W_QUERY, W_KEY, W_SCORE, BIAS, N_WEIGHTS };

/* A call of attention, and the weights from which its scores are computed. */
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

/* Checks the dtype and shape of one weight: (d_k, h) for w_query and w_key, (h,) for w_score and bias. w_query
 * determines h. */
static int check_weight(const additive_call *c, int i, const char *name, PyArrayObject *w, int64_t d_k) {
    const sdpa_call *call = &c->call;
    const long long h = c->additive.n_hidden, n_rows = d_k;
    if (sdpa_dtype_of(call->module, w) != (int)call->problem.dtype) {
        return sdpa_raise_dtype(name, w, "query's dtype %S", PyArray_DESCR(call->q));
    }
    const int n = i < W_SCORE ? 2 : 1;
    const bool fits = PyArray_NDIM(w) == n && (i >= W_SCORE || PyArray_DIM(w, 0) == d_k) &&
                      (i == W_QUERY || PyArray_DIM(w, n - 1) == h);
    if (fits) return 0;
    if (i == W_QUERY) return sdpa_raise_shape(name, w, "(%lld, h) to match query's last axis %lld", n_rows, n_rows);
    if (i == W_KEY) return sdpa_raise_shape(name, w, "(%lld, %lld) to match key's last axis and w_query's", n_rows, h);
    return sdpa_raise_shape(name, w, "(%lld,) to match w_query's last axis %lld", h, h);
}

static int read_weights(additive_call *c, PyObject *const values[N_NAMES]) {
    static const int names[] = {NAME_w_query, NAME_w_key, NAME_w_score, NAME_bias};
    sdpa_call *call = &c->call;
    sdpa_problem *p = &call->problem;
    sdpa_additive *a = &c->additive;
    a->d_q = p->d_k;
    p->d_k = PyArray_DIM(call->k, PyArray_NDIM(call->k) - 1);
    sdpa_matrix *matrices[] = {&a->w_query, &a->w_key, &a->w_score, &a->bias};
    for (int i = 0; i < N_WEIGHTS; i++) {
        PyObject *value = values[names[i]];
        const char *name = sdpa_name_text(names[i]);
        if (i == BIAS && (!value || value == Py_None)) continue;
        PyArrayObject *w = c->weights[i] = sdpa_call_hold(call, name, value);
        if (!w || check_weight(c, i, name, w, i == W_QUERY ? a->d_q : p->d_k) < 0) return -1;
        if (i == W_QUERY) a->n_hidden = PyArray_DIM(w, 1);
        *matrices[i] = matrix_of(w, p->dtype);
    }
    call->work *= (double)a->n_hidden + 1; /* one tanh per pair and hidden unit */
    return 0;
}

/* Begins the call. The caller must call sdpa_call_end, also after a failure. */
static int begin(additive_call *c, PyObject *module, unsigned where, PyObject *const values[N_NAMES]) {
    c->additive = (sdpa_additive){0};
    for (int i = 0; i < N_WEIGHTS; i++) c->weights[i] = NULL;
    if (sdpa_call_begin(&c->call, module, where, values) < 0) return -1;
    return read_weights(c, values);
}

static sdpa_status run_forward(const sdpa_problem *problem, const void *additive) {
    return sdpa_additive_forward(problem, additive);
}

/* Computes out and, if n is 2, lse: new references, NULL after a failure. */
static int forward(PyObject *module, unsigned where, PyObject *const values[N_NAMES], int n, PyArrayObject **results) {
    additive_call c;
    const int failed = begin(&c, module, where, values) < 0 || sdpa_call_make_results(&c.call, n, results) < 0 ||
                       sdpa_call_run_with(&c.call, run_forward, &c.additive) < 0;
    if (failed) sdpa_drop(n, results);
    sdpa_call_end(&c.call);
    return failed ? -1 : 0;
}

static PyObject *additive_attention(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES];
    PyArrayObject *out = NULL;
    if (sdpa_parse(module, sdpa_signature_of(module, ADDITIVE), args, n_args, kwnames, values) < 0) return NULL;
    forward(module, IN_ADDITIVE, values, 1, &out);
    return (PyObject *)out;
}

static PyObject *additive_attention_forward(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES];
    PyArrayObject *results[2] = {NULL};
    if (sdpa_parse(module, sdpa_signature_of(module, ADDITIVE_FORWARD), args, n_args, kwnames, values) < 0) return NULL;
    if (forward(module, IN_ADDITIVE_FORWARD, values, 2, results) < 0) return NULL;
    return sdpa_tuple(module, FORWARD_TYPE, 2, results);
}

/* The gradients of weights in `needs`, zero-filled. New references, NULL where absent; -1 may leave some. */
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

static sdpa_status run_backward(const sdpa_problem *problem, const void *additive) {
    return sdpa_additive_backward(problem, additive);
}

static PyObject *additive_attention_backward(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *g[N_GRADIENTS] = {NULL}, *w[N_WEIGHTS] = {NULL};
    additive_call c;
    if (sdpa_parse(module, sdpa_signature_of(module, ADDITIVE_BACKWARD), args, n_args, kwnames, values) < 0) {
        return NULL;
    }
    if (begin(&c, module, IN_ADDITIVE_BACKWARD, values) == 0 && sdpa_call_begin_backward(&c.call, values) == 0 &&
        sdpa_call_make_gradients(&c.call, false, g) == 0 && make_weight_gradients(&c, w) == 0 &&
        sdpa_call_run_with(&c.call, run_backward, &c.additive) == 0) {
        PyArrayObject *all[] = {g[0], g[1], g[2], w[W_QUERY], w[W_KEY], w[W_SCORE], w[BIAS], g[3], g[4]};
        result = sdpa_tuple(module, ADDITIVE_TYPE, N_GRADIENTS + N_WEIGHTS, all);
    } else {
        sdpa_drop(N_GRADIENTS, g);
        sdpa_drop(N_WEIGHTS, w);
    }
    sdpa_call_end(&c.call);
    return result;
}

#define OPERANDS NAME_query, NAME_key, NAME_value, NAME_w_query, NAME_w_key, NAME_w_score

int sdpa_additive_add(PyObject *module) {
    static const sdpa_entry entries[] = {
        SDPA_ENTRY(ADDITIVE, additive_attention, IN_ADDITIVE, 6, {OPERANDS}),
        SDPA_ENTRY(ADDITIVE_FORWARD, additive_attention_forward, IN_ADDITIVE_FORWARD, 6, {OPERANDS}),
        SDPA_ENTRY(ADDITIVE_BACKWARD, additive_attention_backward, IN_ADDITIVE_BACKWARD, 10,
                   {NAME_grad_out, OPERANDS, NAME_bias, NAME_out, NAME_lse}),
    };
    return sdpa_entries_add(module, entries, sizeof entries / sizeof *entries);
}
