#include "attention.h"

#include <string.h>

#include "../sequences.h"
#include "arrays.h"
#include "docstring.h"
#include "docstrings.h"

static int make_out(sdpa_call *call, PyArrayObject **results) { return sdpa_call_make_results(call, 1, results); }

static int make_out_and_lse(sdpa_call *call, PyArrayObject **results) {
    return sdpa_call_make_results(call, 2, results);
}

static int run_forward(sdpa_call *call) { return sdpa_call_run(call, sdpa_attention_forward); }

/* ------------------------------------------------------------------------------------ weights and sums of them */

/* Turns a packed call into an ordinary one for the sequence that is asked for. */
static int choose_sequence(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    const sdpa_options *options = &call->options;
    if (!call->packed) {
        if (!options->has_sequence) return 0;
        PyErr_Format(PyExc_ValueError, "sequence: expected None without cu_seqlens_q, got %lld",
                     (long long)options->sequence);
        return -1;
    }
    if (!options->has_sequence) {
        PyErr_Format(PyExc_ValueError, "sequence: expected one of the %lld sequences of cu_seqlens_q, got None",
                     (long long)p->n_sequences);
        return -1;
    }
    if (options->sequence < 0 || options->sequence >= p->n_sequences) {
        PyErr_Format(PyExc_ValueError,
                     "sequence: expected one of the %lld sequences of cu_seqlens_q, from 0 on, got %lld",
                     (long long)p->n_sequences, (long long)options->sequence);
        return -1;
    }
    sdpa_sequence_set(p, options->sequence, p);
    call->packed = false;
    return 0;
}

/* Sets the chosen indices of an axis of size n; negative ones count from the end. */
static int set_choice(sdpa_choice *choice, const char *name, sdpa_indices *indices, int64_t n) {
    if (!indices->given) return 0;
    if (!indices->array) {
        Py_ssize_t start = indices->start, stop = indices->stop;
        npy_intp size = PySlice_AdjustIndices((Py_ssize_t)n, &start, &stop, indices->step);
        indices->array = (PyArrayObject *)PyArray_EMPTY(1, &size, NPY_INT64, 0);
        if (!indices->array) return -1;
        int64_t *index = PyArray_DATA(indices->array);
        for (npy_intp i = 0; i < size; i++) index[i] = start + i * indices->step;
    }
    int64_t *index = PyArray_DATA(indices->array);
    choice->n = PyArray_SIZE(indices->array);
    choice->index = index;
    for (int64_t i = 0; i < choice->n; i++) {
        if (index[i] < -n || index[i] >= n) {
            PyErr_Format(PyExc_ValueError, "%s: expected integers from %lld to %lld, got %lld", name, (long long)-n,
                         (long long)n - 1, (long long)index[i]);
            return -1;
        }
        if (index[i] < 0) index[i] += n;
    }
    return 0;
}

/* Sets problem.heads and problem.queries. The call's axis of heads then counts the chosen heads only, as results do. */
static int choose(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    sdpa_options *options = &call->options;
    if (set_choice(&p->heads, "heads", &options->heads, p->n_head) < 0) return -1;
    if (set_choice(&p->queries, "queries", &options->queries, p->n_q) < 0) return -1;
    if (!p->heads.index) return 0;
    if (call->nd == 2) {
        PyErr_SetString(PyExc_ValueError, "heads: expected None, since query and key have no axis of heads");
        return -1;
    }
    call->shape[call->nd - 3] = p->heads.n;
    return 0;
}

/* Results have the chosen heads, one for each of the call. */
static void own_heads(sdpa_tensor *t) { t->group = 1; }

static int make_weights(sdpa_call *call, PyArrayObject **results) {
    if (choose_sequence(call) < 0 || choose(call) < 0) return -1;
    sdpa_problem *p = &call->problem;
    const npy_intp sizes[] = {p->queries.index ? p->queries.n : p->n_q, p->n_k};
    results[0] = sdpa_call_result(call, &p->o, 2, sizes, p->dtype, NULL);
    own_heads(&p->o);
    return results[0] ? 0 : -1;
}

static int run_weights(sdpa_call *call) { return sdpa_call_run(call, sdpa_attention_weights); }

/* Makes n vectors of n_rows numbers: views of one array, which the driver sees as a matrix with one column for each. */
static int make_vectors(sdpa_call *call, npy_intp n_rows, int n, PyArrayObject **fields) {
    sdpa_problem *p = &call->problem;
    const sdpa_dtype dtype = sdpa_lse_dtype(p->dtype);
    const int nd = call->nd - 1;
    npy_intp sizes[NPY_MAXDIMS] = {n};
    memcpy(sizes + 1, call->shape, sizeof *sizes * (size_t)(nd - 1));
    sizes[nd] = n_rows;
    PyArrayObject *all = (PyArrayObject *)PyArray_EMPTY(nd + 1, sizes, sdpa_type_number(call->module, dtype), 0);
    bool failed = !all;
    for (int i = 0; i < n && !failed; i++) {
        PyObject *index = PyLong_FromLong(i);
        fields[i] = index ? (PyArrayObject *)PyObject_GetItem((PyObject *)all, index) : NULL;
        failed = !fields[i];
        Py_XDECREF(index);
    }
    if (!failed) {
        sdpa_call_output(call, &p->o, fields[0], n_rows, dtype);
        p->o.col = PyArray_STRIDE(all, 0);
    }
    Py_XDECREF((PyObject *)all);
    return failed ? -1 : 0;
}

static int make_statistics(sdpa_call *call, PyArrayObject **results) {
    return make_vectors(call, call->problem.n_q, SDPA_N_STATISTICS, results);
}

static int run_statistics(sdpa_call *call) { return sdpa_call_run(call, sdpa_attention_statistics); }

static int make_received(sdpa_call *call, PyArrayObject **results) {
    if (choose(call) < 0 || make_vectors(call, call->problem.n_k, SDPA_N_RECEIVED, results) < 0) return -1;
    own_heads(&call->problem.o);
    return 0;
}

static int run_received(sdpa_call *call) { return sdpa_call_run(call, sdpa_attention_received); }

/* The kinds of the tiles, and a tile's rows and columns. */
static int make_pattern(sdpa_call *call, PyArrayObject **results) {
    sdpa_problem *p = &call->problem;
    if (call->packed) {
        PyErr_SetString(PyExc_ValueError, "cu_seqlens_q: expected None, since tiles belong to one sequence");
        return -1;
    }
    const sdpa_tile tile = sdpa_attention_tile(p);
    const npy_intp sizes[] = {(p->n_q + tile.rows - 1) / tile.rows,
                              p->n_k ? (p->n_k + tile.columns - 1) / tile.columns : 0},
                   n = 2;
    results[0] = sdpa_call_result(call, &p->o, 2, sizes, p->dtype, NULL);
    results[1] = (PyArrayObject *)PyArray_EMPTY(1, &n, NPY_INT64, 0);
    if (!results[0] || !results[1]) return -1;
    int64_t *size = PyArray_DATA(results[1]);
    size[0] = tile.rows;
    size[1] = tile.columns;
    return 0;
}

static int run_pattern(sdpa_call *call) { return sdpa_call_run(call, sdpa_attention_pattern); }

/* ------------------------------------------------------------------------------------ derivatives */

/* The gradients of score_args: a tuple. Results are dropped and returned as objects, whatever they are. */
static int make_argument_gradients(sdpa_call *call, PyArrayObject **result) {
    if (!(call->options.needs & NEEDS(score_args))) return 0;
    *result = (PyArrayObject *)sdpa_functions_gradients(call->functions);
    return *result ? 0 : -1;
}

static int make_gradients(sdpa_call *call, PyArrayObject **results) {
    if (sdpa_call_begin_backward(call) < 0 || sdpa_call_make_gradients(call, true, results) < 0) return -1;
    return make_argument_gradients(call, &results[N_GRADIENTS]);
}

static int run_backward(sdpa_call *call) { return sdpa_call_run(call, sdpa_attention_backward); }

/* A result with the shape of out. */
static int make_out_t(sdpa_call *call, PyArrayObject **result) {
    sdpa_problem *p = &call->problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    *result = sdpa_call_result(call, &p->o_t, 2, sizes, p->dtype, NULL);
    return *result ? 0 : -1;
}

static int make_tangent(sdpa_call *call, PyArrayObject **results) {
    if (sdpa_call_read_tangents(call, false) < 0 || make_out(call, results) < 0) return -1;
    return make_out_t(call, results + 1);
}

static int run_tangent(sdpa_call *call) { return sdpa_call_run(call, sdpa_attention_tangent); }

static int make_second_gradients(sdpa_call *call, PyArrayObject **results) {
    if (sdpa_call_begin_backward(call) < 0 || sdpa_call_read_tangents(call, true) < 0) return -1;
    if (call->options.needs & NEEDS(grad_out) && make_out_t(call, results) < 0) return -1;
    if (sdpa_call_make_gradients(call, true, results + 1) < 0) return -1;
    return make_argument_gradients(call, &results[1 + N_GRADIENTS]);
}

static int run_second(sdpa_call *call) { return sdpa_call_run(call, sdpa_attention_second); }

/* ------------------------------------------------------------------------------------ the functions */

static int check_forward(sdpa_call *call, PyArrayObject **results) {
    if (!call->options.out) return 0;
    const int status = make_out(call, results);
    sdpa_drop(1, results);
    return status;
}

static int check_backward(sdpa_call *call, PyArrayObject **results) {
    (void)results;
    return sdpa_call_begin_backward(call);
}

SDPA_DEFINE(ATTENTION, attention)
SDPA_DEFINE(TORCH, scaled_dot_product_attention)
SDPA_DEFINE(FORWARD, attention_forward)
SDPA_DEFINE(BACKWARD, attention_backward)
SDPA_DEFINE(JVP, attention_jvp)
SDPA_DEFINE(DOUBLE_BACKWARD, attention_double_backward)
SDPA_DEFINE(WEIGHTS, attention_weights)
SDPA_DEFINE(RECEIVED, attention_received)
SDPA_DEFINE(STATISTICS, attention_statistics)
SDPA_DEFINE(CHECK, check_attention)
SDPA_DEFINE(CHECK_BACKWARD, check_attention_backward)
SDPA_DEFINE(PATTERN, pattern)

#define OPERANDS NAME_query, NAME_key, NAME_value
#define BACKWARD_OPERANDS NAME_grad_out, OPERANDS, NAME_out, NAME_lse
#define GRADIENTS_OF_GRADIENTS NAME_gg_query, NAME_gg_key, NAME_gg_value
#define NAMED(name) #name, SDPA_FUNCTION(name)

int sdpa_attention_add(PyObject *module) {
    /* clang-format off */
    static const sdpa_entry entries[] = {
        {ATTENTION, NAMED(attention), IN(ATTENTION), 3, {OPERANDS}, doc_attention,
         NO_TYPE, 1, make_out, run_forward},
        {TORCH, NAMED(scaled_dot_product_attention), IN(TORCH), 3, {OPERANDS}, doc_scaled_dot_product_attention,
         NO_TYPE, 1, make_out, run_forward},
        {FORWARD, NAMED(attention_forward), IN(FORWARD), 3, {OPERANDS}, doc_attention_forward,
         FORWARD_TYPE, 2, make_out_and_lse, run_forward},
        {BACKWARD, NAMED(attention_backward), IN(BACKWARD), 6, {BACKWARD_OPERANDS}, doc_attention_backward,
         GRADIENTS_TYPE, N_GRADIENTS + 1, make_gradients, run_backward},
        {JVP, NAMED(attention_jvp), IN(JVP), 3, {OPERANDS}, doc_attention_jvp,
         TANGENT_TYPE, 2, make_tangent, run_tangent},
        {DOUBLE_BACKWARD, NAMED(attention_double_backward), IN(DOUBLE_BACKWARD), 9,
         {GRADIENTS_OF_GRADIENTS, BACKWARD_OPERANDS}, doc_attention_double_backward,
         SECOND_TYPE, 2 + N_GRADIENTS, make_second_gradients, run_second},
        {WEIGHTS, NAMED(attention_weights), IN(WEIGHTS), 2, {NAME_query, NAME_key}, doc_attention_weights,
         NO_TYPE, 1, make_weights, run_weights},
        {RECEIVED, NAMED(attention_received), IN(RECEIVED), 2, {NAME_query, NAME_key}, doc_attention_received,
         RECEIVED_TYPE, SDPA_N_RECEIVED, make_received, run_received},
        {STATISTICS, NAMED(attention_statistics), IN(STATISTICS), 2, {NAME_query, NAME_key}, doc_attention_statistics,
         STATISTICS_TYPE, SDPA_N_STATISTICS, make_statistics, run_statistics},
        /* The checks of attention_forward and attention_backward, for functions written in Python that must refuse
         * their arguments before they prepare operands. */
        {CHECK, "_check_attention", SDPA_FUNCTION(check_attention), IN(FORWARD), 3, {OPERANDS}, doc_check_attention,
         NO_TYPE, 0, check_forward, NULL},
        {CHECK_BACKWARD, "_check_attention_backward", SDPA_FUNCTION(check_attention_backward), IN(BACKWARD), 6,
         {BACKWARD_OPERANDS}, doc_check_attention_backward,
         NO_TYPE, 0, check_backward, NULL},
        /* For sdpa.plot. */
        {PATTERN, "_pattern", SDPA_FUNCTION(pattern), IN(STATISTICS), 2, {NAME_query, NAME_key}, doc_pattern,
         NO_TYPE, 2, make_pattern, run_pattern},
    };
    /* clang-format on */
    return sdpa_entries_add(module, entries, sizeof entries / sizeof *entries);
}
