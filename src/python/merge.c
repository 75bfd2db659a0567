/* merge_attention. Its parts are any number of arrays of one shape, so it fills the axes of the problem itself. */
#include <stdio.h>

#include "call.h"

/* The parts of one argument as a tuple of arrays: new reference. */
static PyObject *read_parts(PyObject *module, const char *name, PyObject *value) {
    PyObject *parts = PySequence_Tuple(value);
    if (!parts) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s: expected a sequence of arrays, got %.200R", name, value);
        }
        return NULL;
    }
    PyObject *arrays = PyTuple_New(PyTuple_Size(parts));
    for (Py_ssize_t i = 0; arrays && i < PyTuple_Size(parts); i++) {
        char label[40];
        snprintf(label, sizeof label, "%s[%zd]", name, i);
        PyArrayObject *array = sdpa_array(module, label, PyTuple_GetItem(parts, i));
        if (!array || PyTuple_SetItem(arrays, i, (PyObject *)array) < 0) Py_CLEAR(arrays);
    }
    Py_DECREF(parts);
    return arrays;
}

static PyArrayObject *part(PyObject *arrays, Py_ssize_t i) { return (PyArrayObject *)PyTuple_GetItem(arrays, i); }

/* Every part has this dtype, and the first n axes of `shape`. */
static int check_parts(PyObject *module, const char *name, PyObject *arrays, sdpa_dtype dtype, const npy_intp *shape,
                       int n) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(arrays); i++) {
        PyArrayObject *a = part(arrays, i);
        if (sdpa_dtype_of(module, a) != (int)dtype) {
            PyObject *expected = sdpa_dtype_text(module, dtype);
            if (!expected) return -1;
            PyErr_Format(PyExc_TypeError, "%s[%zd]: expected %U, got %S", name, i, expected, PyArray_DESCR(a));
            Py_DECREF(expected);
            return -1;
        }
        if (PyArray_NDIM(a) != n || !PyArray_CompareLists(PyArray_DIMS(a), shape, n)) {
            char expected[SDPA_SHAPE_SIZE], got[SDPA_SHAPE_SIZE];
            PyErr_Format(PyExc_ValueError, "%s[%zd]: expected %s to match outs[0], got %s", name, i,
                         sdpa_shape_text(expected, "", shape, n),
                         sdpa_shape_text(got, "", PyArray_DIMS(a), PyArray_NDIM(a)));
            return -1;
        }
    }
    return 0;
}

static int check_all(PyObject *module, PyObject *outs, PyObject *lses) {
    if (PyTuple_Size(outs) == 0) {
        PyErr_SetString(PyExc_ValueError, "outs: expected at least one part, got none");
        return -1;
    }
    if (PyTuple_Size(outs) != PyTuple_Size(lses)) {
        PyErr_Format(PyExc_ValueError, "lses: expected as many parts as outs, %zd, got %zd", PyTuple_Size(outs),
                     PyTuple_Size(lses));
        return -1;
    }
    PyArrayObject *first = part(outs, 0);
    int nd = PyArray_NDIM(first), dtype = sdpa_dtype_of(module, first);
    if (dtype < SDPA_F16 || dtype > SDPA_F64) {
        PyErr_Format(PyExc_TypeError, "outs[0]: expected float16, bfloat16, float32 or float64, got %S",
                     PyArray_DESCR(first));
        return -1;
    }
    if (nd < 2) {
        char got[SDPA_SHAPE_SIZE];
        PyErr_Format(PyExc_ValueError, "outs[0]: expected at least two axes, (..., Lq, d_v), got %s",
                     sdpa_shape_text(got, "", PyArray_DIMS(first), nd));
        return -1;
    }
    const npy_intp *shape = PyArray_DIMS(first);
    if (check_parts(module, "outs", outs, (sdpa_dtype)dtype, shape, nd) < 0) return -1;
    return check_parts(module, "lses", lses, sdpa_lse_dtype((sdpa_dtype)dtype), shape, nd - 1);
}

/* Both results, new references, from parts that have been checked. */
static int merge(PyObject *module, PyObject *outs, PyObject *lses, PyArrayObject **out, PyArrayObject **lse) {
    Py_ssize_t n_parts = PyTuple_Size(outs);
    PyArrayObject *first = part(outs, 0);
    sdpa_tensor *tensors = PyMem_Malloc(2 * (size_t)n_parts * sizeof *tensors);
    if (!tensors) return PyErr_NoMemory(), -1;
    sdpa_call call;
    sdpa_call_empty(&call, module);
    sdpa_problem *p = &call.problem;
    p->dtype = (sdpa_dtype)sdpa_dtype_of(module, first);
    call.nd = PyArray_NDIM(first);
    for (int i = 0; i < call.nd; i++) call.shape[i] = PyArray_DIM(first, i);
    sdpa_call_set_axes(&call);
    const npy_intp sizes[] = {p->n_q = call.shape[call.nd - 2], p->d_v = call.shape[call.nd - 1]};
    for (Py_ssize_t t = 0; t < n_parts; t++) {
        sdpa_call_view(&call, &tensors[t], part(outs, t), p->dtype, 2, sizes, true);
        sdpa_call_view(&call, &tensors[n_parts + t], part(lses, t), sdpa_lse_dtype(p->dtype), 1, sizes, true);
    }
    int failed = -1;
    *out = sdpa_call_result(&call, &p->o, 2, sizes, p->dtype, NULL);
    *lse = *out ? sdpa_call_result(&call, &p->lse, 1, sizes, sdpa_lse_dtype(p->dtype), NULL) : NULL;
    if (*lse) {
        sdpa_status status;
        Py_BEGIN_ALLOW_THREADS;
        status = sdpa_attention_merge(p, n_parts, tensors, tensors + n_parts);
        Py_END_ALLOW_THREADS;
        failed = sdpa_raise(status);
    }
    PyMem_Free(tensors);
    sdpa_call_end(&call);
    return failed;
}

PyObject *sdpa_merge_attention(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames) {
    PyObject *values[N_NAMES], *result = NULL;
    if (sdpa_parse(module, sdpa_signature_of(module, MERGE), args, n_args, kwnames, values) < 0) return NULL;
    PyObject *outs = read_parts(module, "outs", values[NAME_outs]);
    PyObject *lses = outs ? read_parts(module, "lses", values[NAME_lses]) : NULL;
    PyArrayObject *out = NULL, *lse = NULL;
    if (lses && check_all(module, outs, lses) == 0) {
        if (merge(module, outs, lses, &out, &lse) < 0) Py_CLEAR(out);
        result = sdpa_pair(module, FORWARD_TYPE, out, lse);
    }
    Py_XDECREF(outs);
    Py_XDECREF(lses);
    return result;
}
