/* One call of the attention family: from Python objects to the problem descriptor and back. */
#ifndef SDPA_CALL_H
#define SDPA_CALL_H

#include "options.h"

typedef struct sdpa_call {
    PyObject *module;
    sdpa_options options;
    sdpa_problem problem;

    /* Shape of the output: leading axes, then n_q and d_v. `batch` of them come before heads; problem.axis[i] is the
     * size of axis axis[i], the others have size 1. */
    int nd, n_batch_axes;
    npy_intp shape[NPY_MAXDIMS];
    int axis[SDPA_MAX_AXES];

    PyArrayObject *q, *k, *v, *mask, *sinks; /* of the options or among those held */
    struct {
        PyArrayObject *array; /* owned */
        const char *name;
    } held[24];
    int n_held;
    sdpa_tensor *present[32]; /* the problem's tensors that are set */
    int n_present;
    int64_t key_length; /* of all entries, where key_lengths is a number */
    int64_t offset;     /* the same of the diagonal */
} sdpa_call;

/* Reads options and operands, checks all of them, and fills sizes, dtype, scale, q, k, v (unless value is absent from
 * `values`), mask and band of the problem. -1 and an exception. sdpa_call_end in any case. */
int sdpa_call_begin(sdpa_call *call, PyObject *module, unsigned where, PyObject *const values[N_NAMES]);
void sdpa_call_end(sdpa_call *call);

/* Converts an argument and keeps it until the call ends: borrowed reference. */
PyArrayObject *sdpa_call_hold(sdpa_call *call, const char *name, PyObject *value);

/* For what does not begin with query, key and value: a call without options and tensors. Once nd, the leading axes of
 * shape and problem.dtype are set, set_axes finds heads and batch axes. */
void sdpa_call_empty(sdpa_call *call, PyObject *module);
void sdpa_call_set_axes(sdpa_call *call);

/* Points t at `a`, checked before: stride 0 on axes along which it is broadcast. `inner`: its last axes, none to two,
 * are rows and columns of these sizes; `heads`: the one before them is heads. */
void sdpa_call_view(const sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, sdpa_dtype dtype, int n_inner,
                    const npy_intp *inner, bool heads);

/* Points t at an input that has the call's leading axes, then `inner` (n_inner sizes), and this dtype. */
int sdpa_call_input(sdpa_call *call, sdpa_tensor *t, const char *name, PyObject *value, int n_inner,
                    const npy_intp *inner, sdpa_dtype dtype);

/* Points t at a tangent of the argument `of`, whose tensor is `like`: of its shape and dtype. */
int sdpa_call_tangent(sdpa_call *call, sdpa_tensor *t, const char *name, PyObject *value, const char *of_name,
                      PyArrayObject *of, const sdpa_tensor *like);

/* The call's leading axes, then `inner`: a new array, or `given` (borrowed, may be NULL) once it has been checked. t
 * points at it. New reference. */
PyArrayObject *sdpa_call_result(sdpa_call *call, sdpa_tensor *t, int n_inner, const npy_intp *inner, sdpa_dtype dtype,
                                PyObject *given);

/* Points t at the call's own array, which has its leading axes and then one of n_q. */
void sdpa_call_output(sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, sdpa_dtype dtype);

/* A new array of zeros like `input`, its gradient; t points at it. New reference. */
PyArrayObject *sdpa_call_gradient(sdpa_call *call, sdpa_tensor *t, PyArrayObject *input);

/* lse's type for operands of this one. */
static inline sdpa_dtype sdpa_lse_dtype(sdpa_dtype dtype) { return dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32; }

/* Axes of size 1 are left out from the start; this joins neighbours that every tensor steps through as if
 * they were one. */
void sdpa_call_merge_axes(sdpa_call *call);

/* Gives up the interpreter's lock for the time of the work, unless that is so short that others would rather have the
 * caller done with it: NULL then. To take it back: resume. */
PyThreadState *sdpa_call_release(const sdpa_call *call);
void sdpa_call_resume(PyThreadState *released);

/* A named tuple of two arrays; takes the references, either of which may be NULL after a failure. */
PyObject *sdpa_pair(PyObject *module, enum sdpa_type type, PyArrayObject *first, PyArrayObject *second);

/* What every function on gradients takes: grad_out, out, lse, grad_lse; and that the gradients asked for exist. */
int sdpa_call_begin_backward(sdpa_call *call, PyObject *const values[N_NAMES]);

/* The gradients that are asked for, zeroed and set in the problem: query, key, value, attn_mask, sinks. New references,
 * NULL where absent. */
enum { N_GRADIENTS = 5 };
int sdpa_call_make_gradients(sdpa_call *call, PyArrayObject *gradients[N_GRADIENTS]);

static inline PyObject *sdpa_or_none(PyArrayObject *a) { return a ? (PyObject *)a : Py_None; }

/* The functions of the family, those of merge.c and additive.c included; their signatures are in the module's state. */
enum sdpa_function {
    ATTENTION,
    TORCH,
    FORWARD,
    BACKWARD,
    JVP,
    DOUBLE_BACKWARD,
    WEIGHTS,
    STATISTICS,
    MERGE,
    CHECK,
    CHECK_BACKWARD,
    ADDITIVE,
    ADDITIVE_FORWARD,
    ADDITIVE_BACKWARD,
    N_FUNCTIONS
};
const sdpa_signature *sdpa_signature_of(PyObject *module, enum sdpa_function function);
PyObject *sdpa_merge_attention(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames);
PyObject *sdpa_additive_attention(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames);
PyObject *sdpa_additive_attention_forward(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
                                          PyObject *kwnames);
PyObject *sdpa_additive_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args,
                                           PyObject *kwnames);

/* "float32", for messages: new reference. */
PyObject *sdpa_dtype_text(PyObject *module, sdpa_dtype dtype);

#endif
