#include "merge.h"

#include <stdio.h>

#include "arrays.h"
#include "docstring.h"
#include "docstrings.h"
#include "errors.h"
#include "parse.h"

enum { LABEL_SIZE = 40 }; /* of "outs[0]" */

/* Reads the parts of one argument as a tuple of arrays: new reference. */
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
        char label[LABEL_SIZE];
        snprintf(label, sizeof label, "%s[%zd]", name, i);
        PyArrayObject *array = sdpa_array(module, label, PyTuple_GetItem(parts, i));
        if (!array || PyTuple_SetItem(arrays, i, (PyObject *)array) < 0) Py_CLEAR(arrays);
    }
    Py_DECREF(parts);
    return arrays;
}

/* Makes the parts plain arrays, once all arguments have been read. */
static int settle_parts(PyObject *arrays) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(arrays); i++) {
        PyArrayObject *array = (PyArrayObject *)Py_NewRef(PyTuple_GetItem(arrays, i));
        if (sdpa_settle(&array, false) < 0) {
            Py_DECREF((PyObject *)array);
            return -1;
        }
        if (PyTuple_SetItem(arrays, i, (PyObject *)array) < 0) return -1;
    }
    return 0;
}

static PyArrayObject *part(PyObject *arrays, Py_ssize_t i) { return (PyArrayObject *)PyTuple_GetItem(arrays, i); }

/* Checks that every part has this dtype, which the caller writes as `own`, or float64 if it may be wide, and that it has
 * the first n axes of `shape`. */
static int check_parts(PyObject *module, const char *name, PyObject *arrays, sdpa_dtype dtype, bool may_be_wide,
                       const char *own, const npy_intp *shape, int n) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(arrays); i++) {
        PyArrayObject *a = part(arrays, i);
        char label[LABEL_SIZE], text[SDPA_SHAPE_SIZE];
        snprintf(label, sizeof label, "%s[%zd]", name, i);
        const int got = sdpa_dtype_of(module, a);
        if (got != (int)dtype && !(may_be_wide && got == SDPA_F64)) {
            sdpa_raise_dtype(label, a, may_be_wide ? "%s or float64" : "%s", sdpa_dtype_text(dtype));
            return sdpa_suggest_type(module, label, a, own);
        }
        if (PyArray_NDIM(a) != n || !PyArray_CompareLists(PyArray_DIMS(a), shape, n)) {
            return sdpa_raise_shape(label, a, "%s to match outs[0]", sdpa_shape_text(text, "", shape, n));
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
    if (!sdpa_is_float(dtype)) return sdpa_raise_dtype("outs[0]", first, "float16, bfloat16, float32 or float64");
    if (nd < 2) return sdpa_raise_rows("outs[0]", first, "at least two axes, (..., Lq, d_v)");
    const npy_intp *shape = PyArray_DIMS(first);
    if (check_parts(module, "outs", outs, (sdpa_dtype)dtype, false, "outs[0].dtype", shape, nd) < 0) return -1;
    const sdpa_dtype wide = sdpa_lse_dtype((sdpa_dtype)dtype);
    const bool is_widest = wide == SDPA_F64;
    return check_parts(module, "lses", lses, wide, !is_widest, is_widest ? "np.float64" : "np.float32", shape, nd - 1);
}

typedef struct parts {
    Py_ssize_t n;
    sdpa_tensor *outs, *lses;
} parts;

static sdpa_status run_merge(const sdpa_problem *problem, const void *more) {
    const parts *all = more;
    return sdpa_attention_merge(problem, all->n, all->outs, all->lses);
}

/* Describes the parts: `batch` takes their strides. The result has as many digits as the widest lse. */
static void set_parts(sdpa_call *call, const parts *all, int64_t *batch, PyObject *outs, PyObject *lses) {
    const sdpa_problem *p = &call->problem;
    const npy_intp sizes[] = {p->n_q, p->d_v};
    call->options.has_lse_dtype = true;
    call->options.lse_dtype = SDPA_F32;
    for (Py_ssize_t t = 0; t < all->n; t++, batch += 2 * p->n_axes) {
        const sdpa_dtype lse_dtype = (sdpa_dtype)sdpa_dtype_of(call->module, part(lses, t));
        if (lse_dtype == SDPA_F64) call->options.lse_dtype = SDPA_F64;
        sdpa_call_view(call, &all->outs[t], batch, part(outs, t), p->dtype, 2, sizes, true);
        sdpa_call_view(call, &all->lses[t], batch + p->n_axes, part(lses, t), lse_dtype, 1, sizes, true);
    }
}

/* Computes out and lse, new references, from parts that have been checked; -1 may leave either. */
static int merge(PyObject *module, PyObject *outs, PyObject *lses, PyArrayObject *results[2]) {
    const Py_ssize_t n = PyTuple_Size(outs);
    PyArrayObject *first = part(outs, 0);
    sdpa_call call;
    sdpa_call_empty(&call, module);
    sdpa_problem *p = &call.problem;
    p->dtype = (sdpa_dtype)sdpa_dtype_of(module, first);
    call.nd = PyArray_NDIM(first);
    for (int i = 0; i < call.nd; i++) call.shape[i] = PyArray_DIM(first, i);
    p->n_q = call.shape[call.nd - 2];
    p->d_v = call.shape[call.nd - 1];
    int failed = sdpa_call_set_axes(&call);
    sdpa_tensor *tensors = PyMem_Malloc(2 * (size_t)n * sizeof *tensors);
    int64_t *batch = PyMem_Malloc(2 * (size_t)n * (size_t)p->n_axes * sizeof *batch);
    if (!tensors || !batch) {
        PyErr_NoMemory();
        failed = -1;
    }
    if (!failed) {
        const parts all = {n, tensors, tensors + n};
        set_parts(&call, &all, batch, outs, lses);
        call.work = (double)n * ((double)PyArray_SIZE(first) + 16 * (double)PyArray_SIZE(part(lses, 0)));
        failed = sdpa_call_make_results(&call, 2, results) < 0 || sdpa_call_run_with(&call, run_merge, &all) < 0;
    }
    PyMem_Free(tensors);
    PyMem_Free(batch);
    sdpa_call_end(&call);
    return failed ? -1 : 0;
}

static PyObject *merge_attention(SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *results[2] = {NULL};
    if (sdpa_parse(module, sdpa_signature_of(module, MERGE), args, n_args, kwnames, values) < 0) return NULL;
    PyObject *outs = read_parts(module, "outs", values[NAME_outs]);
    PyObject *lses = outs ? read_parts(module, "lses", values[NAME_lses]) : NULL;
    if (lses && settle_parts(outs) == 0 && settle_parts(lses) == 0 && check_all(module, outs, lses) == 0 &&
        merge(module, outs, lses, results) == 0) {
        result = sdpa_tuple(module, FORWARD_TYPE, 2, results);
    }
    sdpa_drop(2, results);
    Py_XDECREF(outs);
    Py_XDECREF(lses);
    return result;
}

int sdpa_merge_add(PyObject *module) {
    static const sdpa_entry entry = {
        MERGE,
        "merge_attention",
        SDPA_FUNCTION(merge_attention),
        0,
        2,
        {NAME_outs, NAME_lses},
        doc_merge_attention,
        .type = NO_TYPE,
    };
    return sdpa_entries_add(module, &entry, 1);
}
