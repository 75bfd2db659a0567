#include "errors.h"

#include <stdio.h>

const char *sdpa_shape_text(char text[SDPA_SHAPE_SIZE], const char *lead, const npy_intp *sizes, int n) {
    int used = snprintf(text, SDPA_SHAPE_SIZE, "(%s", lead);
    for (int i = 0; i < n; i++) {
        used += snprintf(text + used, SDPA_SHAPE_SIZE - (size_t)used, "%s%lld", i ? ", " : "", (long long)sizes[i]);
    }
    snprintf(text + used, SDPA_SHAPE_SIZE - (size_t)used, n == 1 ? ",)" : ")");
    return text;
}

int sdpa_raise_shape(const char *name, PyArrayObject *got, const char *expected, ...) {
    va_list values;
    va_start(values, expected);
    PyObject *wanted = PyUnicode_FromFormatV(expected, values);
    va_end(values);
    char text[SDPA_SHAPE_SIZE];
    sdpa_shape_text(text, "", PyArray_DIMS(got), PyArray_NDIM(got));
    if (wanted) PyErr_Format(PyExc_ValueError, "%s: expected %U, got %s", name, wanted, text);
    Py_XDECREF(wanted);
    return -1;
}

int sdpa_raise_dtype(const char *name, PyArrayObject *got, const char *expected, ...) {
    va_list values;
    va_start(values, expected);
    PyObject *wanted = PyUnicode_FromFormatV(expected, values);
    va_end(values);
    if (wanted) PyErr_Format(PyExc_TypeError, "%s: expected %U, got %S", name, wanted, PyArray_DESCR(got));
    Py_XDECREF(wanted);
    return -1;
}

int sdpa_add_remedy(const char *remedy, ...) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    va_list values;
    va_start(values, remedy);
    PyObject *text = PyUnicode_FromFormatV(remedy, values);
    va_end(values);
    if (text && value) {
        PyErr_Format(type, "%S%U", value, text);
    } else if (text) {
        PyErr_SetNone(type);
    }
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

int sdpa_raise_rows(const char *name, PyArrayObject *got, const char *expected) {
    sdpa_raise_shape(name, got, "%s", expected);
    return PyArray_NDIM(got) == 1 ? sdpa_add_remedy("; write %s[None]", name) : -1;
}
