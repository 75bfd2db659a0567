#include "results.h"

#include <string.h>

#include "../runtime/rounding.h"
#include "arrays.h"
#include "errors.h"
#include "gil.h"

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

int sdpa_call_input(sdpa_call *call, sdpa_tensor *t, const char *name, PyObject *value, int n_inner,
                    const npy_intp *inner, sdpa_dtype dtype) {
    PyArrayObject *a = sdpa_call_hold(call, name, value);
    if (!a) return -1;
    if (sdpa_dtype_of(call->module, a) != (int)dtype) {
        return sdpa_raise_dtype(name, a, "%s", sdpa_dtype_text(dtype));
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

/* Points t, a tangent or a gradient, at an array of its argument's shape. */
static void set_like(sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, sdpa_dtype dtype) {
    const sdpa_problem *p = &call->problem;
    const npy_intp pairs[] = {p->n_q, p->n_k}; /* the axes of a mask may be broadcast */
    const bool mask = t == &p->mask_t || t == &p->dmask, sinks = t == &p->sinks_t || t == &p->dsinks;
    sdpa_call_set(call, t, a, dtype, sinks ? 0 : 2, mask || sinks ? pairs : sdpa_last_axes(a), true);
}

int sdpa_call_tangent(sdpa_call *call, sdpa_tensor *t, const char *name, PyObject *value, const char *argument_name,
                      PyArrayObject *argument, const sdpa_tensor *like) {
    if (!argument || like->dtype == SDPA_BOOL) {
        PyErr_Format(PyExc_ValueError, "%s: expected None, since %s %s", name, argument_name,
                     argument ? "is boolean" : "is not given");
        return -1;
    }
    PyArrayObject *a = sdpa_call_hold(call, name, value);
    if (!a) return -1;
    if (sdpa_dtype_of(call->module, a) != (int)like->dtype) {
        return sdpa_raise_dtype(name, a, "%s's dtype %S", argument_name, PyArray_DESCR(argument));
    }
    int n = PyArray_NDIM(argument);
    if (PyArray_NDIM(a) != n || !PyArray_CompareLists(PyArray_DIMS(argument), PyArray_DIMS(a), n)) {
        char text[SDPA_SHAPE_SIZE];
        return sdpa_raise_shape(name, a, "%s's shape %s", argument_name,
                                sdpa_shape_text(text, "", PyArray_DIMS(argument), n));
    }
    set_like(call, t, a, like->dtype);
    return 0;
}

PyArrayObject *sdpa_call_result(sdpa_call *call, sdpa_tensor *t, int n_inner, const npy_intp *inner, sdpa_dtype dtype,
                                PyObject *given) {
    npy_intp shape[NPY_MAXDIMS];
    int n = full_shape(call, shape, n_inner, inner), number = sdpa_type_number(call->module, dtype);
    PyArrayObject *result = (PyArrayObject *)given;
    if (given) {
        if (sdpa_check_out(given, shape, n, number) < 0) return NULL;
        for (int i = 0; i < call->n_held; i++) {
            if (sdpa_check_overlap(call->module, result, call->held[i].name, call->held[i].array) < 0) return NULL;
        }
        const sdpa_options *o = &call->options;
        if ((o->mask && sdpa_check_overlap(call->module, result, "attn_mask", o->mask) < 0) ||
            (o->sinks && sdpa_check_overlap(call->module, result, "sinks", o->sinks) < 0) ||
            (o->alibi_slopes && sdpa_check_overlap(call->module, result, "alibi_slopes", o->alibi_slopes) < 0)) {
            return NULL;
        }
        Py_INCREF((PyObject *)result);
    } else {
        result = (PyArrayObject *)PyArray_New(&PyArray_Type, n, shape, number, NULL, NULL, 0, 0, NULL);
        if (!result) return NULL;
    }
    sdpa_call_set(call, t, result, dtype, n_inner, inner, true);
    return result;
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
    if (n > 1) results[1] = sdpa_call_result(call, &p->lse, 1, sizes, sdpa_lse_dtype(p->dtype), NULL);
    return results[n - 1] ? 0 : -1;
}

int sdpa_call_make_gradients(sdpa_call *call, bool driver_clears, PyArrayObject *gradients[N_GRADIENTS]) {
    sdpa_problem *p = &call->problem;
    sdpa_tensor *tensors[] = {&p->dq, &p->dk, &p->dv, &p->dmask, &p->dsinks};
    PyArrayObject *inputs[] = {call->q, call->k, call->v, call->mask, call->sinks};
    for (int i = 0; i < N_GRADIENTS; i++) {
        if (!(call->options.needs & 1u << i)) continue;
        const sdpa_dtype dtype = (sdpa_dtype)sdpa_dtype_of(call->module, inputs[i]);
        const int n = PyArray_NDIM(inputs[i]), number = sdpa_type_number(call->module, dtype);
        const bool cleared = driver_clears && sdpa_clears(p, tensors[i]);
        gradients[i] = (PyArrayObject *)(cleared ? PyArray_EMPTY(n, PyArray_DIMS(inputs[i]), number, 0)
                                                 : PyArray_ZEROS(n, PyArray_DIMS(inputs[i]), number, 0));
        if (!gradients[i]) return -1;
        set_like(call, tensors[i], gradients[i], dtype);
    }
    return 0;
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

/* ------------------------------------------------------------------------------------ running it */

/* Joins neighbouring axes that every tensor steps through as if they were one; axes of size 1 have already been
 * removed. */
static void join_axes(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    int last = 0; /* the axes before it are final; others may still join it */
    for (int i = 1; i < p->n_axes; i++) {
        bool joined = true;
        for (int t = 0; t < call->n_present && joined; t++) {
            const int64_t *strides = call->present[t]->batch;
            joined = strides[last] == strides[i] * p->axis[i];
        }
        last += !joined;
        p->axis[last] = joined ? p->axis[last] * p->axis[i] : p->axis[i];
        for (int t = 0; t < call->n_present; t++) call->present[t]->batch[last] = call->present[t]->batch[i];
    }
    if (p->n_axes) p->n_axes = last + 1;
}

int sdpa_call_run_with(sdpa_call *call, sdpa_driver_with *driver, const void *more) {
    if (call->joins_axes) join_axes(call);
    PyThreadState *released = sdpa_gil_release(call->work);
    const sdpa_rounding mode = sdpa_round_to_nearest();
    const sdpa_status status = driver(&call->problem, more);
    sdpa_rounding_restore(mode);
    return sdpa_gil_finish(released, status);
}

static sdpa_status run_plain(const sdpa_problem *problem, const void *driver) {
    return (*(sdpa_driver *const *)driver)(problem);
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
    if (fields) result = PyObject_Call(sdpa_state_of(module)->types[type], fields, NULL);
    Py_XDECREF(fields);
    sdpa_drop(n, arrays);
    return result;
}
