#include "attention.h"

#include <string.h>

#include "../sequences.h"
#include "arrays.h"
#include "docstring.h"
#include "docstrings.h"
#include "parse.h"
#include "results.h"

/* Computes out and, if n is 2, lse: new references, NULL after a failure. */
static int forward(PyObject *module, unsigned where, PyObject *const values[N_NAMES], int n, PyArrayObject **results) {
    sdpa_call call;
    int failed = sdpa_call_begin(&call, module, where, values) < 0 || sdpa_call_make_results(&call, n, results) < 0 ||
                 sdpa_call_run(&call, sdpa_attention_forward) < 0;
    if (failed) sdpa_drop(n, results);
    sdpa_call_end(&call);
    return failed ? -1 : 0;
}

/* A function that returns out alone. */
static PyObject *only_out(enum sdpa_function function, unsigned where, SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES];
    PyArrayObject *out = NULL;
    if (sdpa_parse(module, sdpa_signature_of(module, function), args, n_args, kwnames, values) < 0) return NULL;
    forward(module, where, values, 1, &out);
    return (PyObject *)out;
}

static PyObject *attention(SDPA_ARGUMENTS) { return only_out(ATTENTION, IN_ATTENTION, module, args, n_args, kwnames); }

static PyObject *scaled_dot_product_attention(SDPA_ARGUMENTS) {
    return only_out(TORCH, IN_TORCH, module, args, n_args, kwnames);
}

static PyObject *attention_forward(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES];
    PyArrayObject *results[2] = {NULL};
    if (sdpa_parse(module, sdpa_signature_of(module, FORWARD), args, n_args, kwnames, values) < 0) return NULL;
    if (forward(module, IN_FORWARD, values, 2, results) < 0) return NULL;
    return sdpa_tuple(module, FORWARD_TYPE, 2, results);
}

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

static sdpa_status run_weights(const sdpa_problem *problem, const void *stage) {
    return sdpa_attention_weights(problem, *(const sdpa_stage *)stage);
}

static PyObject *attention_weights(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES];
    sdpa_call call;
    PyArrayObject *weights = NULL;
    if (sdpa_parse(module, sdpa_signature_of(module, WEIGHTS), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_WEIGHTS, values) == 0 && choose_sequence(&call) == 0 &&
        sdpa_call_choose(&call) == 0) {
        sdpa_problem *p = &call.problem;
        const npy_intp sizes[] = {p->queries.index ? p->queries.n : p->n_q, p->n_k};
        weights = sdpa_call_result(&call, &p->o, 2, sizes, p->dtype, NULL);
        sdpa_call_own_heads(&p->o);
    }
    if (weights && sdpa_call_run_with(&call, run_weights, &call.options.stage) < 0) Py_CLEAR(weights);
    sdpa_call_end(&call);
    return (PyObject *)weights;
}

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

static PyObject *attention_statistics(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *fields[SDPA_N_STATISTICS] = {NULL};
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, STATISTICS), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_STATISTICS, values) == 0 &&
        make_vectors(&call, call.problem.n_q, SDPA_N_STATISTICS, fields) == 0 &&
        sdpa_call_run(&call, sdpa_attention_statistics) == 0) {
        result = sdpa_tuple(module, STATISTICS_TYPE, SDPA_N_STATISTICS, fields);
    }
    sdpa_drop(SDPA_N_STATISTICS, fields);
    sdpa_call_end(&call);
    return result;
}

static PyObject *attention_received(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *fields[SDPA_N_RECEIVED] = {NULL};
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, RECEIVED), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_RECEIVED, values) == 0 && sdpa_call_choose(&call) == 0 &&
        make_vectors(&call, call.problem.n_k, SDPA_N_RECEIVED, fields) == 0) {
        sdpa_call_own_heads(&call.problem.o);
        if (sdpa_call_run(&call, sdpa_attention_received) == 0) {
            result = sdpa_tuple(module, RECEIVED_TYPE, SDPA_N_RECEIVED, fields);
        }
    }
    sdpa_drop(SDPA_N_RECEIVED, fields);
    sdpa_call_end(&call);
    return result;
}

static PyObject *attention_backward(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *gradients[N_GRADIENTS] = {NULL};
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, BACKWARD), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_BACKWARD, values) == 0 && sdpa_call_begin_backward(&call, values) == 0 &&
        sdpa_call_make_gradients(&call, true, gradients) == 0 && sdpa_call_run(&call, sdpa_attention_backward) == 0) {
        result = sdpa_tuple(module, GRADIENTS_TYPE, N_GRADIENTS, gradients);
    }
    sdpa_drop(N_GRADIENTS, gradients);
    sdpa_call_end(&call);
    return result;
}

/* Reads the tangents of forward mode, or gradients of gradients: names[0..2] are those of query, key and value, each of
 * which may be None; names[3] and names[4] are those of mask and sinks, which have been read as options. */
static int read_tangents(sdpa_call *call, PyObject *const values[N_NAMES], const int names[5]) {
    sdpa_problem *p = &call->problem;
    const sdpa_options *options = &call->options;
    const struct {
        sdpa_tensor *t;
        const char *argument_name;
        PyArrayObject *argument;
        const sdpa_tensor *like;
        PyObject *value;
    } tangents[] = {
        {&p->q_t, "query", call->q, &p->q, values[names[0]]},
        {&p->k_t, "key", call->k, &p->k, values[names[1]]},
        {&p->v_t, "value", call->v, &p->v, values[names[2]]},
        {&p->mask_t, "attn_mask", call->mask, &p->mask, (PyObject *)options->mask_t},
        {&p->sinks_t, "sinks", call->sinks, &p->sinks, (PyObject *)options->sinks_t},
    };
    for (int i = 0; i < 5; i++) {
        if (!tangents[i].value || tangents[i].value == Py_None) continue;
        if (sdpa_call_tangent(call, tangents[i].t, sdpa_name_text(names[i]), tangents[i].value,
                              tangents[i].argument_name, tangents[i].argument, tangents[i].like) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *attention_jvp(SDPA_ARGUMENTS) {
    static const int names[] = {NAME_query_t, NAME_key_t, NAME_value_t, NAME_attn_mask_t, NAME_sinks_t};
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *results[2] = {NULL};
    sdpa_call call;
    sdpa_problem *p = &call.problem;
    if (sdpa_parse(module, sdpa_signature_of(module, JVP), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_JVP, values) == 0 && read_tangents(&call, values, names) == 0 &&
        sdpa_call_make_results(&call, 1, results) == 0) {
        const npy_intp sizes[] = {p->n_q, p->d_v};
        results[1] = sdpa_call_result(&call, &p->o_t, 2, sizes, p->dtype, NULL);
    }
    if (results[1] && sdpa_call_run(&call, sdpa_attention_tangent) == 0) {
        result = sdpa_tuple(module, TANGENT_TYPE, 2, results);
    }
    sdpa_drop(2, results);
    sdpa_call_end(&call);
    return result;
}

static int make_grad_out(sdpa_call *call, PyArrayObject **grad_out) {
    sdpa_problem *p = &call->problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    if (!(call->options.needs & NEEDS_GRAD_OUT)) return 0;
    *grad_out = sdpa_call_result(call, &p->o_t, 2, sizes, p->dtype, NULL);
    return *grad_out ? 0 : -1;
}

static PyObject *attention_double_backward(SDPA_ARGUMENTS) {
    static const int names[] = {NAME_gg_query, NAME_gg_key, NAME_gg_value, NAME_gg_attn_mask, NAME_gg_sinks};
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *results[1 + N_GRADIENTS] = {NULL};
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, DOUBLE_BACKWARD), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_DOUBLE, values) == 0 && sdpa_call_begin_backward(&call, values) == 0 &&
        read_tangents(&call, values, names) == 0 && make_grad_out(&call, results) == 0 &&
        sdpa_call_make_gradients(&call, true, results + 1) == 0 &&
        sdpa_call_run(&call, sdpa_attention_double_backward) == 0) {
        result = sdpa_tuple(module, DOUBLE_TYPE, 1 + N_GRADIENTS, results);
    }
    sdpa_drop(1 + N_GRADIENTS, results);
    sdpa_call_end(&call);
    return result;
}

/* The checks of attention_forward and attention_backward, for functions written in Python that must refuse their
 * arguments before they prepare operands. */
static PyObject *check_attention(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES];
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, CHECK), args, n_args, kwnames, values) < 0) return NULL;
    const int failed = sdpa_call_begin(&call, module, IN_FORWARD, values);
    sdpa_call_end(&call);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *check_attention_backward(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES];
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, CHECK_BACKWARD), args, n_args, kwnames, values) < 0) return NULL;
    const int failed =
        sdpa_call_begin(&call, module, IN_BACKWARD, values) < 0 || sdpa_call_begin_backward(&call, values) < 0;
    sdpa_call_end(&call);
    return failed ? NULL : Py_NewRef(Py_None);
}

#define OPERANDS NAME_query, NAME_key, NAME_value
#define BACKWARD_OPERANDS NAME_grad_out, OPERANDS, NAME_out, NAME_lse

int sdpa_attention_add(PyObject *module) {
    static const sdpa_entry entries[] = {
        SDPA_ENTRY(ATTENTION, attention, IN_ATTENTION, 3, {OPERANDS}),
        SDPA_ENTRY(TORCH, scaled_dot_product_attention, IN_TORCH, 3, {OPERANDS}),
        SDPA_ENTRY(FORWARD, attention_forward, IN_FORWARD, 3, {OPERANDS}),
        SDPA_ENTRY(BACKWARD, attention_backward, IN_BACKWARD, 6, {BACKWARD_OPERANDS}),
        SDPA_ENTRY(JVP, attention_jvp, IN_JVP, 6, {OPERANDS, NAME_query_t, NAME_key_t, NAME_value_t}),
        SDPA_ENTRY(DOUBLE_BACKWARD, attention_double_backward, IN_DOUBLE, 9,
                   {NAME_gg_query, NAME_gg_key, NAME_gg_value, BACKWARD_OPERANDS}),
        SDPA_ENTRY(WEIGHTS, attention_weights, IN_WEIGHTS, 2, {NAME_query, NAME_key}),
        SDPA_ENTRY(RECEIVED, attention_received, IN_RECEIVED, 2, {NAME_query, NAME_key}),
        SDPA_ENTRY(STATISTICS, attention_statistics, IN_STATISTICS, 2, {NAME_query, NAME_key}),
        {CHECK, "_check_attention", SDPA_FUNCTION(check_attention), IN_FORWARD, 3, {OPERANDS}, doc_check_attention},
        {CHECK_BACKWARD,
         "_check_attention_backward",
         SDPA_FUNCTION(check_attention_backward),
         IN_BACKWARD,
         6,
         {BACKWARD_OPERANDS},
         doc_check_attention_backward},
    };
    return sdpa_entries_add(module, entries, sizeof entries / sizeof *entries);
}
