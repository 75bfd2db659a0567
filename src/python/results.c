#include "results.h"

#include <string.h>

#include "../runtime/rounding.h"
#include "arrays.h"
#include "errors.h"
#include "gil.h"
#include "values.h"

/* ------------------------------------------------------------------------------------ further inputs, results */

/* Writes the shape that the caller sees, the call's leading axes and then `inner`; returns the number of axes. */
static int full_shape(const sdpa_call *call, npy_intp *shape, int n_inner, const npy_intp *inner) {
    int lead = call->nd - 2;
    memcpy(shape, call->shape, sizeof *shape * (size_t)lead);
    memcpy(shape + lead, inner, sizeof *shape * (size_t)n_inner);
    if (call->packed && n_inner == 2) {
        shape[1] = shape[0];
        shape[0] = inner[0];
    }
    return lead + n_inner;
}

/* Points t at an input of this dtype with the call's leading axes, then `inner` (n_inner sizes). `types` are all that the
 * argument may have. */
static int set_input(sdpa_call *call, sdpa_tensor *t, enum sdpa_name argument, int n_inner, const npy_intp *inner,
                     sdpa_dtype dtype, const char *types) {
    PyArrayObject *a = call->arrays[argument];
    const char *name = sdpa_name_text(argument);
    if (sdpa_dtype_of(call->module, a) != (int)dtype) {
        sdpa_raise_dtype(name, a, "%s", types);
        return sdpa_suggest_type(call->module, name, a, dtype == call->problem.dtype ? "query.dtype" : "np.float32");
    }
    npy_intp shape[NPY_MAXDIMS];
    int n = full_shape(call, shape, n_inner, inner);
    if (PyArray_NDIM(a) != n || !PyArray_CompareLists(shape, PyArray_DIMS(a), n)) {
        char text[SDPA_SHAPE_SIZE];
        return sdpa_raise_shape(name, a, "%s", sdpa_shape_text(text, "", shape, n));
    }
    sdpa_call_set(call, t, a, dtype, n_inner, inner, true);
    return 0;
}

/* Points t at an input of one number per query, which may have more digits than the arithmetic. */
static int set_numbers(sdpa_call *call, sdpa_tensor *t, enum sdpa_name argument) {
    const npy_intp sizes[] = {call->problem.n_q};
    const sdpa_dtype least = sdpa_lse_dtype(call->problem.dtype);
    const bool is_wide = sdpa_dtype_of(call->module, call->arrays[argument]) == SDPA_F64;
    return set_input(call, t, argument, 1, sizes, is_wide ? SDPA_F64 : least,
                     least == SDPA_F64 ? "float64" : "float32 or float64");
}

/* An input with a gradient; the members are offsets in the problem. */
typedef struct input {
    size_t tensor, gradient, tangent;
    enum sdpa_name name, tangent_name, gg_name;
    int n_inner;
} input;

static const input inputs[N_GRADIENTS] = {
#define INPUT(name, tensor, n_inner)                                                                                   \
    {offsetof(sdpa_problem, tensor),                                                                                   \
     offsetof(sdpa_problem, d##tensor),                                                                                \
     offsetof(sdpa_problem, tensor##_t),                                                                               \
     NAME_##name,                                                                                                      \
     NAME_##name##_t,                                                                                                  \
     NAME_gg_##name,                                                                                                   \
     n_inner},
    SDPA_DIFFERENTIABLE(INPUT)
#undef INPUT
};

static sdpa_tensor *tensor_at(sdpa_call *call, size_t offset) {
    return (sdpa_tensor *)((char *)&call->problem + offset);
}

/* Points t, a tangent or a gradient, at an array of its argument's shape. */
static void set_like(sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, const input *in, sdpa_dtype dtype) {
    const sdpa_problem *p = &call->problem;
    const npy_intp pairs[] = {p->n_q, p->n_k}; /* the axes of a mask may be broadcast */
    const bool broadcasts = in->n_inner == 0 || in->name == NAME_attn_mask;
    sdpa_call_set(call, t, a, dtype, in->n_inner, broadcasts ? pairs : sdpa_last_axes(a), true);
}

static int set_tangent(sdpa_call *call, const input *in, enum sdpa_name tangent) {
    PyArrayObject *a = call->arrays[tangent], *argument = call->arrays[in->name];
    const char *name = sdpa_name_text(tangent), *argument_name = sdpa_name_text(in->name);
    const sdpa_dtype dtype = tensor_at(call, in->tensor)->dtype;
    if (!argument || dtype == SDPA_BOOL) {
        PyErr_Format(PyExc_ValueError, "%s: expected None, since %s %s", name, argument_name,
                     argument ? "is boolean" : "is not given");
        return -1;
    }
    if (sdpa_dtype_of(call->module, a) != (int)dtype) {
        sdpa_raise_dtype(name, a, "%s's dtype %S", argument_name, PyArray_DESCR(argument));
        return sdpa_is_real(call->module, a) ? sdpa_add_remedy("; write %s.astype(%s.dtype)", name, argument_name) : -1;
    }
    int n = PyArray_NDIM(argument);
    if (PyArray_NDIM(a) != n || !PyArray_CompareLists(PyArray_DIMS(argument), PyArray_DIMS(a), n)) {
        char text[SDPA_SHAPE_SIZE];
        return sdpa_raise_shape(name, a, "%s's shape %s", argument_name,
                                sdpa_shape_text(text, "", PyArray_DIMS(argument), n));
    }
    set_like(call, tensor_at(call, in->tangent), a, in, dtype);
    return 0;
}

int sdpa_call_read_tangents(sdpa_call *call, bool of_gradients) {
    for (int i = 0; i < N_GRADIENTS; i++) {
        const enum sdpa_name name = of_gradients ? inputs[i].gg_name : inputs[i].tangent_name;
        if (call->arrays[name] && set_tangent(call, &inputs[i], name) < 0) return -1;
    }
    return sdpa_functions_read_tangents(call->functions, &call->options);
}

PyArrayObject *sdpa_call_result(sdpa_call *call, sdpa_tensor *t, int n_inner, const npy_intp *inner, sdpa_dtype dtype,
                                PyArrayObject *given) {
    npy_intp shape[NPY_MAXDIMS];
    int n = full_shape(call, shape, n_inner, inner), number = sdpa_type_number(call->module, dtype);
    if (!given) {
        PyObject *result = PyArray_New(&PyArray_Type, n, shape, number, NULL, NULL, 0, 0, NULL);
        if (result) sdpa_call_set(call, t, (PyArrayObject *)result, dtype, n_inner, inner, true);
        return (PyArrayObject *)result;
    }
    PyArrayObject *plain = (PyArrayObject *)Py_NewRef((PyObject *)given);
    bool failed = sdpa_settle(&plain, true) < 0 || sdpa_check_out(plain, shape, n, number) < 0;
    for (int i = 0; i < call->n_held && !failed; i++) {
        const enum sdpa_name name = call->held[i];
        failed = sdpa_check_overlap(call->module, plain, sdpa_name_text(name), call->arrays[name]) < 0;
    }
    failed = failed || sdpa_options_check_overlap(&call->options, plain) < 0 ||
             sdpa_functions_check_overlap(call->functions, call->module, plain) < 0;
    if (!failed) sdpa_call_set(call, t, plain, dtype, n_inner, inner, true);
    Py_DECREF((PyObject *)plain); /* its memory is that of `given` */
    return failed ? NULL : (PyArrayObject *)Py_NewRef((PyObject *)given);
}

void sdpa_call_output(sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, npy_intp n_rows, sdpa_dtype dtype) {
    const npy_intp inner[] = {n_rows};
    sdpa_call_set(call, t, a, dtype, 1, inner, true);
}

int sdpa_call_make_results(sdpa_call *call, int n, PyArrayObject **results) {
    sdpa_problem *p = &call->problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    results[0] = sdpa_call_result(call, &p->o, 2, sizes, p->dtype, call->options.out);
    if (!results[0]) return -1;
    const sdpa_dtype lse_dtype = call->options.has_lse_dtype ? call->options.lse_dtype : sdpa_lse_dtype(p->dtype);
    if (n > 1) results[1] = sdpa_call_result(call, &p->lse, 1, sizes, lse_dtype, NULL);
    return results[n - 1] ? 0 : -1;
}

int sdpa_call_make_gradients(sdpa_call *call, bool driver_clears, PyArrayObject *gradients[N_GRADIENTS]) {
    for (int i = 0; i < N_GRADIENTS; i++) {
        if (!(call->options.needs & 1u << i)) continue;
        PyArrayObject *argument = call->arrays[inputs[i].name];
        sdpa_tensor *t = tensor_at(call, inputs[i].gradient);
        const sdpa_dtype dtype = tensor_at(call, inputs[i].tensor)->dtype;
        const int n = PyArray_NDIM(argument), number = sdpa_type_number(call->module, dtype);
        const bool cleared = driver_clears && sdpa_clears(&call->problem, t);
        gradients[i] = (PyArrayObject *)(cleared ? PyArray_EMPTY(n, PyArray_DIMS(argument), number, 0)
                                                 : PyArray_ZEROS(n, PyArray_DIMS(argument), number, 0));
        if (!gradients[i]) return -1;
        set_like(call, t, gradients[i], &inputs[i], dtype);
    }
    return 0;
}

/* Checks that the gradient of an input in `needs` exists. */
static int check_need(sdpa_call *call, const input *in) {
    const char *name = sdpa_name_text(in->name);
    if (!call->arrays[in->name]) {
        PyErr_Format(PyExc_ValueError, "needs: '%s' has a gradient only where it is given, got None", name);
        return -1;
    }
    if (tensor_at(call, in->tensor)->dtype != SDPA_BOOL) return 0;
    PyErr_Format(PyExc_ValueError, "needs: '%s' has a gradient only where it is added to the scores, got a boolean one",
                 name);
    return -1;
}

/* The dtype of `out` in a backward call: query's or, where arithmetic is float32, any other that it can be rounded to. */
static sdpa_dtype out_dtype(const sdpa_call *call) {
    const int dtype = sdpa_dtype_of(call->module, call->arrays[NAME_out]);
    const sdpa_dtype wanted = call->problem.dtype;
    return wanted != SDPA_F64 && (dtype == SDPA_F32 || sdpa_is_narrow((sdpa_dtype)dtype)) ? (sdpa_dtype)dtype : wanted;
}

int sdpa_call_begin_backward(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    const sdpa_dtype o_dtype = out_dtype(call);
    if (set_input(call, &p->dout, NAME_grad_out, 2, sizes, p->dtype, sdpa_dtype_text(p->dtype)) < 0 ||
        set_input(call, &p->o, NAME_out, 2, sizes, o_dtype, sdpa_dtype_text(o_dtype)) < 0 ||
        set_numbers(call, &p->lse, NAME_lse) < 0 ||
        (call->arrays[NAME_grad_lse] && set_numbers(call, &p->dlse, NAME_grad_lse) < 0)) {
        return -1;
    }
    for (int i = 0; i < N_GRADIENTS; i++) {
        if (call->options.needs & 1u << i && check_need(call, &inputs[i]) < 0) return -1;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------ running it */

/* Joins neighbouring axes that every tensor steps through as if they were one; axes of size 1 have already been
 * removed. */
static void join_axes(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    const int n_axes = p->n_axes;
    int last = 0; /* the axes before it are final; others may still join it */
    for (int i = 1; i < n_axes; i++) {
        bool joined = true;
        for (int t = 0; t < call->n_present && joined; t++) {
            const int64_t *batch = call->batch + t * n_axes;
            joined = batch[last] == batch[i] * call->sizes[i];
        }
        last += !joined;
        call->sizes[last] = joined ? call->sizes[last] * call->sizes[i] : call->sizes[i];
        for (int t = 0; t < call->n_present; t++) call->batch[t * n_axes + last] = call->batch[t * n_axes + i];
    }
    if (n_axes) p->n_axes = last + 1;
}

int sdpa_call_run_with(sdpa_call *call, sdpa_driver_with *driver, const void *more) {
    if (call->joins_axes) join_axes(call);
    sdpa_gil_release(call->work);
    const sdpa_rounding mode = sdpa_round_to_nearest();
    const sdpa_status status = driver(&call->problem, more);
    sdpa_rounding_restore(mode);
    return sdpa_gil_finish(status) < 0 ? -1 : sdpa_functions_finish(call->functions);
}

static sdpa_status run_plain(const sdpa_problem *problem, const void *driver) {
    return sdpa_compact(problem, *(sdpa_driver *const *)driver);
}

int sdpa_call_run(sdpa_call *call, sdpa_driver *driver) { return sdpa_call_run_with(call, run_plain, &driver); }

void sdpa_drop(int n, PyArrayObject **arrays) {
    for (int i = 0; i < n; i++) Py_CLEAR(arrays[i]);
}

PyObject *sdpa_tuple(PyObject *module, enum sdpa_type type, int n, PyArrayObject **arrays) {
    PyObject *fields = PyTuple_New(n), *result = NULL;
    for (int i = 0; fields && i < n; i++) {
        PyTuple_SetItem(fields, i, Py_NewRef(arrays[i] ? (PyObject *)arrays[i] : Py_None));
    }
    if (type == NO_TYPE) {
        result = Py_XNewRef(fields);
    } else if (fields) {
        result = PyObject_Call(sdpa_state_of(module)->types[type], fields, NULL);
    }
    Py_XDECREF(fields);
    sdpa_drop(n, arrays);
    return result;
}
