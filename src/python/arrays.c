/* Python objects to NumPy arrays, and what is asked of those. */
#include "module.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* Whether NumPy knows how to take it by itself, so that DLPack is not needed. */
static bool has_array_protocol(PyObject *value) {
    return PyObject_HasAttrString(value, "__array__") || PyObject_CheckBuffer(value) ||
           PyObject_HasAttrString(value, "__array_interface__") || PyObject_HasAttrString(value, "__array_struct__");
}

/* Turns the exception of a failed conversion into a TypeError that names the argument, the first as its cause. */
static void raise_not_an_array(const char *name, PyObject *value) {
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) return;
    PyObject *type, *cause, *traceback;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback) PyException_SetTraceback(cause, traceback);
    PyErr_Format(PyExc_TypeError, "%s: expected an array, got %R, which NumPy cannot take: %S", name, Py_TYPE(value),
                 cause);
    PyObject *new_type, *new_value, *new_traceback;
    PyErr_Fetch(&new_type, &new_value, &new_traceback);
    PyErr_NormalizeException(&new_type, &new_value, &new_traceback);
    PyException_SetCause(new_value, cause); /* takes the reference */
    PyErr_Restore(new_type, new_value, new_traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
}

PyArrayObject *sdpa_array(PyObject *module, const char *name, PyObject *value) {
    if (PyArray_Check(value)) {
        Py_INCREF(value);
        return (PyArrayObject *)value;
    }
    PyObject *array;
    if (!has_array_protocol(value) && PyObject_HasAttrString(value, "__dlpack__")) {
        array = PyObject_CallFunctionObjArgs(sdpa_state_of(module)->from_dlpack, value, NULL);
    } else {
        array = PyArray_FromAny(value, NULL, 0, 0, 0, NULL);
    }
    if (!array) raise_not_an_array(name, value);
    return (PyArrayObject *)array;
}

/* ml_dtypes registers bfloat16 with NumPy under a number that differs from process to process. */
static bool is_bfloat16(sdpa_state *state, PyArray_Descr *descr) {
    int known = atomic_load_explicit(&state->bf16, memory_order_relaxed);
    if (known >= 0 || !PyTypeNum_ISUSERDEF(descr->type_num)) return descr->type_num == known;
    if (PyDataType_ELSIZE(descr) != 2) return false;
    PyObject *name = PyType_GetName(descr->typeobj);
    if (!name) {
        PyErr_Clear();
        return false;
    }
    bool same = PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
    Py_DECREF(name);
    if (same) atomic_store_explicit(&state->bf16, descr->type_num, memory_order_relaxed);
    return same;
}

int sdpa_dtype_of(PyObject *module, PyArrayObject *a) {
    int number = PyArray_TYPE(a);
    switch (number) {
    case NPY_FLOAT:
        return SDPA_F32;
    case NPY_DOUBLE:
        return SDPA_F64;
    case NPY_HALF:
        return SDPA_F16;
    case NPY_BOOL:
        return SDPA_BOOL;
    default:
        if (number == NPY_INT64) return SDPA_I64;
        return is_bfloat16(sdpa_state_of(module), PyArray_DESCR(a)) ? SDPA_BF16 : -1;
    }
}

int sdpa_type_number(PyObject *module, sdpa_dtype dtype) {
    switch (dtype) {
    case SDPA_BOOL:
        return NPY_BOOL;
    case SDPA_F16:
        return NPY_HALF;
    case SDPA_F32:
        return NPY_FLOAT;
    case SDPA_F64:
        return NPY_DOUBLE;
    case SDPA_I64:
        return NPY_INT64;
    case SDPA_BF16:
        break;
    }
    return atomic_load_explicit(&sdpa_state_of(module)->bf16, memory_order_relaxed);
}

char *sdpa_data(PyArrayObject *a) {
    static double nothing; /* never read or written */
    char *data = PyArray_DATA(a);
    return data ? data : (char *)&nothing;
}

const char *sdpa_shape_text(char text[SDPA_SHAPE_SIZE], const char *lead, const npy_intp *sizes, int n) {
    int used = snprintf(text, SDPA_SHAPE_SIZE, "(%s", lead);
    for (int i = 0; i < n; i++) {
        used += snprintf(text + used, SDPA_SHAPE_SIZE - (size_t)used, "%s%lld", i ? ", " : "", (long long)sizes[i]);
    }
    snprintf(text + used, SDPA_SHAPE_SIZE - (size_t)used, n == 1 && !*lead ? ",)" : ")");
    return text;
}

/* True if no two elements share memory: sorted by stride, each axis steps over all that the smaller ones span. Holds
 * for every view made by slicing, transposing, reshaping or taking a diagonal or a field. */
static bool is_injective(PyArrayObject *a) {
    if (PyArray_SIZE(a) == 0) return true;
    npy_intp span = PyArray_ITEMSIZE(a);
    bool done[NPY_MAXDIMS] = {false};
    for (int round = 0; round < PyArray_NDIM(a); round++) {
        int next = -1;
        npy_intp least = 0;
        for (int i = 0; i < PyArray_NDIM(a); i++) {
            npy_intp stride = PyArray_STRIDE(a, i) < 0 ? -PyArray_STRIDE(a, i) : PyArray_STRIDE(a, i);
            if (done[i] || PyArray_DIM(a, i) == 1 || (next >= 0 && stride >= least)) continue;
            next = i;
            least = stride;
        }
        if (next < 0) break;
        if (least < span) return false;
        done[next] = true;
        span += (PyArray_DIM(a, next) - 1) * least;
    }
    return true;
}

int sdpa_check_out(PyObject *value, const npy_intp *sizes, int n, int type_number) {
    if (!PyArray_Check(value)) {
        PyErr_Format(PyExc_TypeError, "out: expected a numpy.ndarray, got %R", Py_TYPE(value));
        return -1;
    }
    PyArrayObject *out = (PyArrayObject *)value;
    char expected[SDPA_SHAPE_SIZE], got[SDPA_SHAPE_SIZE];
    if (PyArray_NDIM(out) != n || !PyArray_CompareLists(PyArray_DIMS(out), sizes, n)) {
        PyErr_Format(PyExc_ValueError, "out: expected shape %s, got %s", sdpa_shape_text(expected, "", sizes, n),
                     sdpa_shape_text(got, "", PyArray_DIMS(out), PyArray_NDIM(out)));
        return -1;
    }
    if (PyArray_TYPE(out) != type_number || sdpa_is_swapped(out)) {
        PyArray_Descr *descr = PyArray_DescrFromType(type_number);
        if (!descr) return -1;
        PyErr_Format(PyExc_ValueError, "out: expected dtype %S in native byte order, got %S", descr,
                     PyArray_DESCR(out));
        Py_DECREF(descr);
        return -1;
    }
    if (!PyArray_ISWRITEABLE(out)) {
        PyErr_SetString(PyExc_ValueError, "out: expected a writable array, got a read-only one");
        return -1;
    }
    if (!PyArray_ISALIGNED(out)) {
        PyErr_SetString(PyExc_ValueError, "out: expected an aligned array, got an unaligned one");
        return -1;
    }
    if (!is_injective(out)) {
        PyErr_Format(PyExc_ValueError, "out: expected elements that do not share memory, got strides %s for shape %s",
                     sdpa_shape_text(expected, "", PyArray_STRIDES(out), n), sdpa_shape_text(got, "", sizes, n));
        return -1;
    }
    return 0;
}

/* *low <= address of every byte < *high. */
static void find_bounds(PyArrayObject *a, const char **low, const char **high) {
    *low = *high = PyArray_DATA(a);
    for (int i = 0; i < PyArray_NDIM(a); i++) {
        npy_intp span = (PyArray_DIM(a, i) - 1) * PyArray_STRIDE(a, i);
        if (PyArray_DIM(a, i) == 0) return;
        if (span < 0) *low += span;
        if (span > 0) *high += span;
    }
    *high += PyArray_ITEMSIZE(a);
}

int sdpa_check_overlap(PyObject *module, PyArrayObject *out, const char *name, PyArrayObject *input) {
    const char *low, *high, *input_low, *input_high;
    if (PyArray_SIZE(out) == 0 || PyArray_SIZE(input) == 0) return 0;
    find_bounds(out, &low, &high);
    find_bounds(input, &input_low, &input_high);
    if (high <= input_low || input_high <= low) return 0;

    /* The bounds overlap, as those of interleaved views do: whether any element does is NumPy's to solve. A problem
     * too hard within this many steps is taken for an overlap. */
    PyObject *answer = PyObject_CallFunction(sdpa_state_of(module)->shares_memory, "OOi", out, input, 100000);
    bool shares = true;
    if (answer) {
        shares = PyObject_IsTrue(answer) != 0;
        Py_DECREF(answer);
    } else {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1; /* TooHardError is one */
        PyErr_Clear();
    }
    if (!shares) return 0;
    PyErr_Format(PyExc_ValueError, "out: expected memory of its own, got an array that overlaps %s", name);
    return -1;
}
