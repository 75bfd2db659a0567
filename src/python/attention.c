/* The functions on attention. */
#include <string.h>

#include "additive_doc.h"
#include "attention_doc.h"
#include "call.h"

#define ARGUMENTS PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames

/* Composed when the module is made. The docstrings keep the text that the definitions point to. */
struct sdpa_family {
    sdpa_signature signatures[N_FUNCTIONS];
    PyMethodDef definitions[N_FUNCTIONS];
    PyObject *docs[N_FUNCTIONS];
};

const sdpa_signature *sdpa_signature_of(PyObject *module, enum sdpa_function function) {
    return &sdpa_state_of(module)->attention->signatures[function];
}

/* attention (lse NULL) and attention_forward: the output, new reference. */
static PyArrayObject *forward(PyObject *module, unsigned where, PyObject *const values[N_NAMES], PyArrayObject **lse) {
    sdpa_call call;
    PyArrayObject *out = NULL;
    if (sdpa_call_begin(&call, module, where, values) < 0) goto done;
    sdpa_problem *p = &call.problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    out = sdpa_call_result(&call, &p->o, 2, sizes, p->dtype, call.options.out);
    if (!out) goto done;
    if (lse) {
        *lse = sdpa_call_result(&call, &p->lse, 1, sizes, sdpa_lse_dtype(p->dtype), NULL);
        if (!*lse) Py_CLEAR(out);
    }
    if (out) {
        sdpa_status status;
        sdpa_call_merge_axes(&call);
        PyThreadState *released = sdpa_call_release(&call);
        status = sdpa_attention_forward(p);
        sdpa_call_resume(released);
        if (sdpa_raise(status) < 0) Py_CLEAR(out);
    }
done:
    sdpa_call_end(&call);
    return out;
}

static PyObject *attention(ARGUMENTS) {
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, sdpa_signature_of(module, ATTENTION), args, n_args, kwnames, values) < 0) return NULL;
    return (PyObject *)forward(module, IN_ATTENTION, values, NULL);
}

static PyObject *scaled_dot_product_attention(ARGUMENTS) {
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, sdpa_signature_of(module, TORCH), args, n_args, kwnames, values) < 0) return NULL;
    return (PyObject *)forward(module, IN_TORCH, values, NULL);
}

static PyObject *attention_forward(ARGUMENTS) {
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, sdpa_signature_of(module, FORWARD), args, n_args, kwnames, values) < 0) return NULL;
    PyArrayObject *lse = NULL, *out = forward(module, IN_FORWARD, values, &lse);
    return sdpa_pair(module, FORWARD_TYPE, out, lse);
}

static PyObject *attention_weights(ARGUMENTS) {
    PyObject *values[N_NAMES];
    sdpa_call call;
    PyArrayObject *weights = NULL;
    if (sdpa_parse(module, sdpa_signature_of(module, WEIGHTS), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_WEIGHTS, values) < 0) goto done;
    sdpa_problem *p = &call.problem;
    const npy_intp sizes[] = {p->n_q, p->n_k};
    weights = sdpa_call_result(&call, &p->o, 2, sizes, p->dtype, NULL);
    if (!weights) goto done;
    sdpa_status status;
    sdpa_call_merge_axes(&call);
    PyThreadState *released = sdpa_call_release(&call);
    status = sdpa_attention_weights(p, call.options.stage);
    sdpa_call_resume(released);
    if (sdpa_raise(status) < 0) Py_CLEAR(weights);
done:
    sdpa_call_end(&call);
    return (PyObject *)weights;
}

static PyObject *attention_statistics(ARGUMENTS) {
    enum { N = 7 };
    PyObject *values[N_NAMES], *result = NULL, *fields[N] = {NULL};
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, STATISTICS), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_STATISTICS, values) < 0) goto done;
    /* One array for all: the driver sees them as the columns of a matrix. */
    sdpa_problem *p = &call.problem;
    const sdpa_dtype dtype = sdpa_lse_dtype(p->dtype);
    const int nd = call.nd - 1;
    npy_intp sizes[NPY_MAXDIMS] = {N};
    memcpy(sizes + 1, call.shape, sizeof *sizes * (size_t)nd);
    PyArrayObject *all = (PyArrayObject *)PyArray_EMPTY(nd + 1, sizes, sdpa_type_number(module, dtype), 0);
    if (!all) goto done;
    bool failed = false;
    for (int i = 0; i < N && !failed; i++) {
        PyObject *index = PyLong_FromLong(i);
        fields[i] = index ? PyObject_GetItem((PyObject *)all, index) : NULL;
        failed = !fields[i];
        Py_XDECREF(index);
    }
    if (!failed) {
        /* Lq 1-element rows, then the step from one statistic to the next as the column's. */
        sdpa_call_output(&call, &p->o, (PyArrayObject *)fields[0], dtype);
        p->o.col = PyArray_STRIDE(all, 0);
        sdpa_status status;
        sdpa_call_merge_axes(&call);
        PyThreadState *released = sdpa_call_release(&call);
        status = sdpa_attention_statistics(p);
        sdpa_call_resume(released);
        if (sdpa_raise(status) == 0) {
            result = PyObject_CallFunctionObjArgs(sdpa_state_of(module)->types[STATISTICS_TYPE], fields[0], fields[1],
                                                  fields[2], fields[3], fields[4], fields[5], fields[6], NULL);
        }
    }
    Py_DECREF(all);
done:
    for (int i = 0; i < N; i++) Py_XDECREF(fields[i]);
    sdpa_call_end(&call);
    return result;
}

int sdpa_call_begin_backward(sdpa_call *call, PyObject *const values[N_NAMES]) {
    sdpa_problem *p = &call->problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    const sdpa_dtype lse_dtype = sdpa_lse_dtype(p->dtype);
    PyObject *grad_lse = (PyObject *)call->options.grad_lse;
    if (sdpa_call_input(call, &p->dout, "grad_out", values[NAME_grad_out], 2, sizes, p->dtype) < 0 ||
        sdpa_call_input(call, &p->o, "out", values[NAME_out], 2, sizes, p->dtype) < 0 ||
        sdpa_call_input(call, &p->lse, "lse", values[NAME_lse], 1, sizes, lse_dtype) < 0 ||
        (grad_lse && sdpa_call_input(call, &p->dlse, "grad_lse", grad_lse, 1, sizes, lse_dtype) < 0)) {
        return -1;
    }
    if ((call->options.needs & NEEDS_MASK) && !(call->mask && p->mask.dtype != SDPA_BOOL)) {
        PyErr_Format(PyExc_ValueError, "needs: 'attn_mask' has a gradient only where it is added to the scores, got %s",
                     call->mask ? "a boolean one" : "None");
        return -1;
    }
    if ((call->options.needs & NEEDS_SINKS) && !call->sinks) {
        PyErr_SetString(PyExc_ValueError, "needs: 'sinks' has a gradient only where sinks are given, got None");
        return -1;
    }
    return 0;
}

int sdpa_call_make_gradients(sdpa_call *call, PyArrayObject *gradients[N_GRADIENTS]) {
    sdpa_problem *p = &call->problem;
    sdpa_tensor *tensors[] = {&p->dq, &p->dk, &p->dv, &p->dmask, &p->dsinks};
    PyArrayObject *inputs[] = {call->q, call->k, call->v, call->mask, call->sinks};
    for (int i = 0; i < N_GRADIENTS; i++) {
        if (!(call->options.needs & 1u << i)) continue;
        gradients[i] = sdpa_call_gradient(call, tensors[i], inputs[i]);
        if (!gradients[i]) return -1;
    }
    return 0;
}

static PyObject *attention_backward(ARGUMENTS) {
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *g[N_GRADIENTS] = {NULL};
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, BACKWARD), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_BACKWARD, values) < 0 || sdpa_call_begin_backward(&call, values) < 0 ||
        sdpa_call_make_gradients(&call, g) < 0) {
        goto done;
    }
    sdpa_status status;
    sdpa_call_merge_axes(&call);
    PyThreadState *released = sdpa_call_release(&call);
    status = sdpa_attention_backward(&call.problem);
    sdpa_call_resume(released);
    if (sdpa_raise(status) < 0) goto done;
    result = PyObject_CallFunctionObjArgs(sdpa_state_of(module)->types[GRADIENTS_TYPE], sdpa_or_none(g[0]),
                                          sdpa_or_none(g[1]), sdpa_or_none(g[2]), sdpa_or_none(g[3]),
                                          sdpa_or_none(g[4]), NULL);
done:
    for (int i = 0; i < N_GRADIENTS; i++) Py_XDECREF((PyObject *)g[i]);
    sdpa_call_end(&call);
    return result;
}

/* Tangents of forward mode, or gradients of gradients: names[0..2] for query, key, value, each of which may be None;
 * names[3], names[4] for mask and sinks, read as options. */
static int read_tangents(sdpa_call *call, PyObject *const values[N_NAMES], const int names[5]) {
    sdpa_problem *p = &call->problem;
    const sdpa_options *options = &call->options;
    const struct {
        sdpa_tensor *t;
        const char *of_name;
        PyArrayObject *of;
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
        if (sdpa_call_tangent(call, tangents[i].t, sdpa_name_text(names[i]), tangents[i].value, tangents[i].of_name,
                              tangents[i].of, tangents[i].like) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *attention_jvp(ARGUMENTS) {
    static const int names[] = {NAME_query_t, NAME_key_t, NAME_value_t, NAME_attn_mask_t, NAME_sinks_t};
    PyObject *values[N_NAMES];
    PyArrayObject *out = NULL, *out_t = NULL;
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, JVP), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_JVP, values) < 0 || read_tangents(&call, values, names) < 0) goto done;
    sdpa_problem *p = &call.problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    out = sdpa_call_result(&call, &p->o, 2, sizes, p->dtype, NULL);
    out_t = out ? sdpa_call_result(&call, &p->o_t, 2, sizes, p->dtype, NULL) : NULL;
    if (!out_t) goto done;
    sdpa_status status;
    sdpa_call_merge_axes(&call);
    PyThreadState *released = sdpa_call_release(&call);
    status = sdpa_attention_tangent(p);
    sdpa_call_resume(released);
    if (sdpa_raise(status) < 0) Py_CLEAR(out);
done:
    sdpa_call_end(&call);
    return sdpa_pair(module, TANGENT_TYPE, out, out_t);
}

static PyObject *attention_double_backward(ARGUMENTS) {
    static const int names[] = {NAME_gg_query, NAME_gg_key, NAME_gg_value, NAME_gg_attn_mask, NAME_gg_sinks};
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *g[N_GRADIENTS] = {NULL}, *grad_out = NULL;
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, DOUBLE_BACKWARD), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_DOUBLE, values) < 0 || sdpa_call_begin_backward(&call, values) < 0 ||
        read_tangents(&call, values, names) < 0 || sdpa_call_make_gradients(&call, g) < 0) {
        goto done;
    }
    sdpa_problem *p = &call.problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    if (call.options.needs & NEEDS_GRAD_OUT) {
        grad_out = sdpa_call_result(&call, &p->o_t, 2, sizes, p->dtype, NULL);
        if (!grad_out) goto done;
    }
    sdpa_status status;
    sdpa_call_merge_axes(&call);
    PyThreadState *released = sdpa_call_release(&call);
    status = sdpa_attention_double_backward(p);
    sdpa_call_resume(released);
    if (sdpa_raise(status) < 0) goto done;
    result = PyObject_CallFunctionObjArgs(sdpa_state_of(module)->types[DOUBLE_TYPE], sdpa_or_none(grad_out),
                                          sdpa_or_none(g[0]), sdpa_or_none(g[1]), sdpa_or_none(g[2]),
                                          sdpa_or_none(g[3]), sdpa_or_none(g[4]), NULL);
done:
    Py_XDECREF((PyObject *)grad_out);
    for (int i = 0; i < N_GRADIENTS; i++) Py_XDECREF((PyObject *)g[i]);
    sdpa_call_end(&call);
    return result;
}

/* What attention_forward and attention_backward refuse, without computing: for functions that are composed in Python and
 * must refuse it before they prepare operands. */
static PyObject *check_attention(ARGUMENTS) {
    PyObject *values[N_NAMES];
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, CHECK), args, n_args, kwnames, values) < 0) return NULL;
    const int failed = sdpa_call_begin(&call, module, IN_FORWARD, values);
    sdpa_call_end(&call);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *check_attention_backward(ARGUMENTS) {
    PyObject *values[N_NAMES];
    sdpa_call call;
    if (sdpa_parse(module, sdpa_signature_of(module, CHECK_BACKWARD), args, n_args, kwnames, values) < 0) return NULL;
    const int failed =
        sdpa_call_begin(&call, module, IN_BACKWARD, values) < 0 || sdpa_call_begin_backward(&call, values) < 0;
    sdpa_call_end(&call);
    return failed ? NULL : Py_NewRef(Py_None);
}

static const sdpa_entry entries[N_FUNCTIONS] = {
    [ATTENTION] = {"attention",
                   (PyCFunction)(void (*)(void))attention,
                   IN_ATTENTION,
                   3,
                   {NAME_query, NAME_key, NAME_value},
                   "Exact scaled dot-product attention.",
                   attention_formula,
                   attention_operands,
                   attention_results,
                   attention_example},
    [TORCH] = {"scaled_dot_product_attention",
               (PyCFunction)(void (*)(void))scaled_dot_product_attention,
               IN_TORCH,
               3,
               {NAME_query, NAME_key, NAME_value},
               "Exact scaled dot-product attention, called as PyTorch's.",
               torch_formula,
               attention_operands,
               attention_results,
               torch_example},
    [FORWARD] = {"attention_forward",
                 (PyCFunction)(void (*)(void))attention_forward,
                 IN_FORWARD,
                 3,
                 {NAME_query, NAME_key, NAME_value},
                 "Attention and the log-sum-exp of each row of scores.",
                 attention_formula,
                 attention_operands,
                 forward_results,
                 forward_example},
    [BACKWARD] = {"attention_backward",
                  (PyCFunction)(void (*)(void))attention_backward,
                  IN_BACKWARD,
                  6,
                  {NAME_grad_out, NAME_query, NAME_key, NAME_value, NAME_out, NAME_lse},
                  "Gradients of attention.",
                  backward_formula,
                  backward_operands,
                  backward_results,
                  backward_example},
    [JVP] = {"attention_jvp",
             (PyCFunction)(void (*)(void))attention_jvp,
             IN_JVP,
             6,
             {NAME_query, NAME_key, NAME_value, NAME_query_t, NAME_key_t, NAME_value_t},
             "Attention and its derivative along tangents of its arguments (forward mode).",
             jvp_formula,
             jvp_operands,
             jvp_results,
             jvp_example},
    [DOUBLE_BACKWARD] = {"attention_double_backward",
                         (PyCFunction)(void (*)(void))attention_double_backward,
                         IN_DOUBLE,
                         9,
                         {NAME_gg_query, NAME_gg_key, NAME_gg_value, NAME_grad_out, NAME_query, NAME_key, NAME_value,
                          NAME_out, NAME_lse},
                         "Derivatives of the gradients of attention.",
                         double_formula,
                         double_operands,
                         double_results,
                         double_example},
    [WEIGHTS] = {"attention_weights",
                 (PyCFunction)(void (*)(void))attention_weights,
                 IN_WEIGHTS,
                 2,
                 {NAME_query, NAME_key},
                 "The matrix of attention weights, or of scores.",
                 weights_formula,
                 weights_operands,
                 weights_results,
                 weights_example},
    [STATISTICS] = {"attention_statistics",
                    (PyCFunction)(void (*)(void))attention_statistics,
                    IN_STATISTICS,
                    2,
                    {NAME_query, NAME_key},
                    "What can be said of each row of attention weights, at any length, without the matrix.",
                    statistics_formula,
                    weights_operands,
                    statistics_results,
                    statistics_example},
    [MERGE] = {"merge_attention",
               (PyCFunction)(void (*)(void))sdpa_merge_attention,
               0,
               2,
               {NAME_outs, NAME_lses},
               "Attention from its results over parts of the keys.",
               merge_formula,
               merge_operands,
               forward_results,
               merge_example},
    [CHECK] = {"_check_attention",
               (PyCFunction)(void (*)(void))check_attention,
               IN_FORWARD,
               3,
               {NAME_query, NAME_key, NAME_value},
               "Raise what attention_forward would.",
               attention_formula,
               attention_operands,
               "None\n",
               ""},
    [CHECK_BACKWARD] = {"_check_attention_backward",
                        (PyCFunction)(void (*)(void))check_attention_backward,
                        IN_BACKWARD,
                        6,
                        {NAME_grad_out, NAME_query, NAME_key, NAME_value, NAME_out, NAME_lse},
                        "Raise what attention_backward would.",
                        backward_formula,
                        backward_operands,
                        "None\n",
                        ""},
    [ADDITIVE] = {"additive_attention",
                  (PyCFunction)(void (*)(void))sdpa_additive_attention,
                  IN_ADDITIVE,
                  6,
                  {NAME_query, NAME_key, NAME_value, NAME_w_query, NAME_w_key, NAME_w_score},
                  "Additive attention.",
                  additive_formula,
                  additive_operands,
                  attention_results,
                  additive_example},
    [ADDITIVE_FORWARD] = {"additive_attention_forward",
                          (PyCFunction)(void (*)(void))sdpa_additive_attention_forward,
                          IN_ADDITIVE_FORWARD,
                          6,
                          {NAME_query, NAME_key, NAME_value, NAME_w_query, NAME_w_key, NAME_w_score},
                          "Additive attention and the log-sum-exp of each row of scores.",
                          additive_formula,
                          additive_operands,
                          forward_results,
                          additive_forward_example},
    [ADDITIVE_BACKWARD] = {"additive_attention_backward",
                           (PyCFunction)(void (*)(void))sdpa_additive_attention_backward,
                           IN_ADDITIVE_BACKWARD,
                           10,
                           {NAME_grad_out, NAME_query, NAME_key, NAME_value, NAME_w_query, NAME_w_key, NAME_w_score,
                            NAME_bias, NAME_out, NAME_lse},
                           "Gradients of additive attention.",
                           additive_backward_formula,
                           additive_backward_operands,
                           additive_backward_results,
                           additive_backward_example},
};

int sdpa_attention_add(PyObject *module) {
    sdpa_state *state = sdpa_state_of(module);
    struct sdpa_family *family = state->attention = PyMem_Calloc(1, sizeof *family);
    if (!family) {
        PyErr_NoMemory();
        return -1;
    }
    PyObject *name = PyModule_GetNameObject(module);
    int failed = !name;
    for (int i = 0; i < N_FUNCTIONS && !failed; i++) {
        family->docs[i] = sdpa_entry_compose(&entries[i], &family->signatures[i]);
        const char *doc = family->docs[i] ? PyUnicode_AsUTF8AndSize(family->docs[i], NULL) : NULL;
        family->definitions[i] =
            (PyMethodDef){entries[i].name, entries[i].function, METH_FASTCALL | METH_KEYWORDS, doc};
        PyObject *function = doc ? PyCFunction_NewEx(&family->definitions[i], module, name) : NULL;
        failed = !function || PyModule_AddObjectRef(module, entries[i].name, function) < 0;
        Py_XDECREF(function);
    }
    Py_XDECREF(name);
    return failed ? -1 : 0;
}

void sdpa_attention_free(sdpa_state *state) {
    for (int i = 0; i < N_FUNCTIONS && state->attention; i++) Py_XDECREF(state->attention->docs[i]);
    PyMem_Free(state->attention);
    state->attention = NULL;
}
