#include "additive.h"

#include <string.h>

#include "arrays.h"
#include "docstring.h"
#include "docstrings.h"
#include "errors.h"
#include "values.h"

/* The weights from which the scores are computed. */
enum { W_QUERY, W_KEY, W_SCORE, BIAS, N_WEIGHTS };
static const unsigned char weight_names[N_WEIGHTS] = {NAME_w_query, NAME_w_key, NAME_w_score, NAME_bias};

static sdpa_matrix matrix_of(PyArrayObject *a, sdpa_dtype dtype) {
    const int n = PyArray_NDIM(a);
    return (sdpa_matrix){sdpa_data(a), n > 1 ? PyArray_STRIDE(a, 0) : 0, PyArray_STRIDE(a, n - 1), dtype,
                         sdpa_is_swapped(a)};
}

/* Checks the dtype and shape of weight i: (d_k, h) for w_query and w_key, (h,) for w_score and bias. w_query determines
 * h. */
static int check_weight(const sdpa_call *call, int i, int64_t d_k) {
    PyArrayObject *w = call->arrays[weight_names[i]];
    const char *name = sdpa_name_text(weight_names[i]);
    const long long h = call->additive.n_hidden, n_rows = d_k;
    if (sdpa_dtype_of(call->module, w) != (int)call->problem.dtype) {
        sdpa_raise_dtype(name, w, "query's dtype %S", PyArray_DESCR(call->arrays[NAME_query]));
        return sdpa_suggest_type(call->module, name, w, "query.dtype");
    }
    const int n = i < W_SCORE ? 2 : 1;
    const bool fits = PyArray_NDIM(w) == n && (i >= W_SCORE || PyArray_DIM(w, 0) == d_k) &&
                      (i == W_QUERY || PyArray_DIM(w, n - 1) == h);
    if (fits) return 0;
    if (i == W_QUERY) return sdpa_raise_shape(name, w, "(%lld, h) to match query's last axis %lld", n_rows, n_rows);
    if (i == W_KEY) return sdpa_raise_shape(name, w, "(%lld, %lld) to match key's last axis and w_query's", n_rows, h);
    return sdpa_raise_shape(name, w, "(%lld,) to match w_query's last axis %lld", h, h);
}

static int set_weights(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    sdpa_additive *a = &call->additive;
    *a = (sdpa_additive){.d_q = p->d_k};
    p->d_k = sdpa_last_axes(call->arrays[NAME_key])[1];
    sdpa_matrix *matrices[] = {&a->w_query, &a->w_key, &a->w_score, &a->bias};
    for (int i = 0; i < N_WEIGHTS; i++) {
        PyArrayObject *w = call->arrays[weight_names[i]];
        if (!w) continue; /* the bias */
        if (check_weight(call, i, i == W_QUERY ? a->d_q : p->d_k) < 0) return -1;
        if (i == W_QUERY) a->n_hidden = PyArray_DIM(w, 1);
        if (a->n_hidden > SDPA_LARGEST_AXIS || p->d_k > SDPA_LARGEST_AXIS) {
            PyErr_Format(PyExc_MemoryError, "no memory for additive attention of h = %lld, d_k = %lld",
                         (long long)a->n_hidden, (long long)p->d_k);
            return -1;
        }
        *matrices[i] = matrix_of(w, p->dtype);
    }
    call->work *= (double)a->n_hidden + 1; /* one tanh per pair and hidden unit */
    return 0;
}

static int make_out(sdpa_call *call, PyArrayObject **results) {
    return set_weights(call) < 0 ? -1 : sdpa_call_make_results(call, 1, results);
}

static int make_out_and_lse(sdpa_call *call, PyArrayObject **results) {
    return set_weights(call) < 0 ? -1 : sdpa_call_make_results(call, 2, results);
}

static sdpa_status forward(const sdpa_problem *problem, const void *additive) {
    return sdpa_additive_forward(problem, additive);
}

static int run_forward(sdpa_call *call) { return sdpa_call_run_with(call, forward, &call->additive); }

static int check_bias_need(const sdpa_call *call) {
    if (call->arrays[NAME_bias] || !(call->options.needs & NEEDS(bias))) return 0;
    PyErr_SetString(PyExc_ValueError, "needs: 'bias' has a gradient only where it is given, got None");
    return -1;
}

/* The gradients of weights in `needs`, zero-filled. New references, NULL where absent; -1 may leave some. */
static int make_weight_gradients(sdpa_call *call, PyArrayObject **results) {
    sdpa_additive *a = &call->additive;
    sdpa_matrix *matrices[] = {&a->dw_query, &a->dw_key, &a->dw_score, &a->dbias};
    const sdpa_dtype dtype = call->problem.dtype;
    for (int i = 0; i < N_WEIGHTS; i++) {
        if (!(call->options.needs & NEEDS(w_query) << i)) continue;
        PyArrayObject *w = call->arrays[weight_names[i]];
        results[i] =
            (PyArrayObject *)PyArray_ZEROS(PyArray_NDIM(w), PyArray_DIMS(w), sdpa_type_number(call->module, dtype), 0);
        if (!results[i]) return -1;
        *matrices[i] = matrix_of(results[i], dtype);
    }
    return 0;
}

enum { N_OPERANDS = INPUT_value + 1, N_OPTIONS = N_COMMON_GRADIENTS - N_OPERANDS };

/* The fields are the gradients of the operands, of the weights, and of the options. */
static int make_gradients(sdpa_call *call, PyArrayObject **results) {
    PyArrayObject *g[N_GRADIENTS] = {NULL};
    const int failed = set_weights(call) < 0 || sdpa_call_begin_backward(call) < 0 || check_bias_need(call) < 0 ||
                       sdpa_call_make_gradients(call, false, g) < 0 ||
                       make_weight_gradients(call, results + N_OPERANDS) < 0;
    memcpy(results, g, N_OPERANDS * sizeof *g);
    memcpy(results + N_OPERANDS + N_WEIGHTS, g + N_OPERANDS, N_OPTIONS * sizeof *g);
    return failed ? -1 : 0;
}

static sdpa_status backward(const sdpa_problem *problem, const void *additive) {
    return sdpa_additive_backward(problem, additive);
}

static int run_backward(sdpa_call *call) { return sdpa_call_run_with(call, backward, &call->additive); }

SDPA_DEFINE(ADDITIVE, additive_attention)
SDPA_DEFINE(ADDITIVE_FORWARD, additive_attention_forward)
SDPA_DEFINE(ADDITIVE_BACKWARD, additive_attention_backward)

#define OPERANDS NAME_query, NAME_key, NAME_value, NAME_w_query, NAME_w_key, NAME_w_score
#define NAMED(name) #name, SDPA_FUNCTION(name)

int sdpa_additive_add(PyObject *module) {
    /* clang-format off */
    static const sdpa_entry entries[] = {
        {ADDITIVE, NAMED(additive_attention), IN(ADDITIVE), 6, {OPERANDS}, doc_additive_attention,
         NO_TYPE, 1, make_out, run_forward},
        {ADDITIVE_FORWARD, NAMED(additive_attention_forward), IN(ADDITIVE_FORWARD), 6, {OPERANDS},
         doc_additive_attention_forward,
         FORWARD_TYPE, 2, make_out_and_lse, run_forward},
        {ADDITIVE_BACKWARD, NAMED(additive_attention_backward), IN(ADDITIVE_BACKWARD), 10,
         {NAME_grad_out, OPERANDS, NAME_bias, NAME_out, NAME_lse}, doc_additive_attention_backward,
         ADDITIVE_TYPE, N_COMMON_GRADIENTS + N_WEIGHTS, make_gradients, run_backward},
    };
    /* clang-format on */
    return sdpa_entries_add(module, entries, sizeof entries / sizeof *entries);
}
