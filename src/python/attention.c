/* The functions on attention. */
#include <string.h>

#include "attention_doc.h"
#include "call.h"

#define ARGUMENTS PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames

enum { ATTENTION, TORCH, FORWARD, BACKWARD, WEIGHTS, MERGE, N_ENTRIES };

/* Composed when the module is made. The docstrings keep the text that the definitions point to. */
struct sdpa_family {
    sdpa_signature signatures[N_ENTRIES];
    PyMethodDef definitions[N_ENTRIES];
    PyObject *docs[N_ENTRIES];
};

static const sdpa_signature *signature_of(PyObject *module, int entry) {
    return &sdpa_state_of(module)->attention->signatures[entry];
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
        Py_BEGIN_ALLOW_THREADS;
        status = sdpa_attention_forward(p);
        Py_END_ALLOW_THREADS;
        if (sdpa_raise(status) < 0) Py_CLEAR(out);
    }
done:
    sdpa_call_end(&call);
    return out;
}

static PyObject *attention(ARGUMENTS) {
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, signature_of(module, ATTENTION), args, n_args, kwnames, values) < 0) return NULL;
    return (PyObject *)forward(module, IN_ATTENTION, values, NULL);
}

static PyObject *scaled_dot_product_attention(ARGUMENTS) {
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, signature_of(module, TORCH), args, n_args, kwnames, values) < 0) return NULL;
    return (PyObject *)forward(module, IN_TORCH, values, NULL);
}

static PyObject *attention_forward(ARGUMENTS) {
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, signature_of(module, FORWARD), args, n_args, kwnames, values) < 0) return NULL;
    PyArrayObject *lse = NULL, *out = forward(module, IN_FORWARD, values, &lse);
    return sdpa_forward_tuple(module, out, lse);
}

static PyObject *attention_weights(ARGUMENTS) {
    PyObject *values[N_NAMES];
    sdpa_call call;
    PyArrayObject *weights = NULL;
    if (sdpa_parse(module, signature_of(module, WEIGHTS), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_WEIGHTS, values) < 0) goto done;
    sdpa_problem *p = &call.problem;
    const npy_intp sizes[] = {p->n_q, p->n_k};
    weights = sdpa_call_result(&call, &p->o, 2, sizes, p->dtype, NULL);
    if (!weights) goto done;
    sdpa_status status;
    sdpa_call_merge_axes(&call);
    Py_BEGIN_ALLOW_THREADS;
    status = sdpa_attention_weights(p, call.options.stage);
    Py_END_ALLOW_THREADS;
    if (sdpa_raise(status) < 0) Py_CLEAR(weights);
done:
    sdpa_call_end(&call);
    return (PyObject *)weights;
}

/* The mask's gradient is asked for: there must be one. */
static int check_mask_gradient(const sdpa_call *call) {
    if (call->mask && call->problem.mask.dtype != SDPA_BOOL) return 0;
    PyErr_Format(PyExc_ValueError, "needs: 'attn_mask' has a gradient only where it is added to the scores, got %s",
                 call->mask ? "a boolean one" : "None");
    return -1;
}

static PyObject *attention_backward(ARGUMENTS) {
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *gradients[4] = {NULL};
    sdpa_call call;
    if (sdpa_parse(module, signature_of(module, BACKWARD), args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, IN_BACKWARD, values) < 0) goto done;
    sdpa_problem *p = &call.problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    const sdpa_dtype lse_dtype = sdpa_lse_dtype(p->dtype);
    PyObject *grad_lse = (PyObject *)call.options.grad_lse;
    if (sdpa_call_input(&call, &p->dout, "grad_out", values[NAME_grad_out], 2, sizes, p->dtype) < 0 ||
        sdpa_call_input(&call, &p->o, "out", values[NAME_out], 2, sizes, p->dtype) < 0 ||
        sdpa_call_input(&call, &p->lse, "lse", values[NAME_lse], 1, sizes, lse_dtype) < 0 ||
        (grad_lse && sdpa_call_input(&call, &p->dlse, "grad_lse", grad_lse, 1, sizes, lse_dtype) < 0) ||
        ((call.options.needs & NEEDS_MASK) && check_mask_gradient(&call) < 0)) {
        goto done;
    }
    sdpa_tensor *tensors[] = {&p->dq, &p->dk, &p->dv, &p->dmask};
    PyArrayObject *inputs[] = {call.q, call.k, call.v, call.mask};
    for (int i = 0; i < 4; i++) {
        if (!(call.options.needs & 1u << i)) continue;
        gradients[i] = sdpa_call_gradient(&call, tensors[i], inputs[i]);
        if (!gradients[i]) goto done;
    }
    sdpa_status status;
    sdpa_call_merge_axes(&call);
    Py_BEGIN_ALLOW_THREADS;
    status = sdpa_attention_backward(p);
    Py_END_ALLOW_THREADS;
    if (sdpa_raise(status) < 0) goto done;
    PyObject *fields[4];
    for (int i = 0; i < 4; i++) fields[i] = gradients[i] ? (PyObject *)gradients[i] : Py_None;
    result = PyObject_CallFunctionObjArgs(sdpa_state_of(module)->gradients_type, fields[0], fields[1], fields[2],
                                          fields[3], Py_None, NULL);
done:
    for (int i = 0; i < 4; i++) Py_XDECREF((PyObject *)gradients[i]);
    sdpa_call_end(&call);
    return result;
}

static const sdpa_entry entries[N_ENTRIES] = {
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
    for (int i = 0; i < N_ENTRIES && !failed; i++) {
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
    for (int i = 0; i < N_ENTRIES && state->attention; i++) Py_XDECREF(state->attention->docs[i]);
    PyMem_Free(state->attention);
    state->attention = NULL;
}

const sdpa_signature *sdpa_merge_signature(PyObject *module) { return signature_of(module, MERGE); }
