#include "values.h"

#include <limits.h>
#include <math.h>

#include "../runtime/parallel.h"

static const char *const names[N_NAMES] = {
#define TEXT(name) #name,
    SDPA_NAMES(TEXT)
#undef TEXT
};

const char *sdpa_name_text(int name) { return names[name]; }

int sdpa_read_bool(const char *name, PyObject *value, bool *result) {
    if (PyBool_Check(value)) {
        *result = value == Py_True;
        return 0;
    }
    if (PyArray_IsScalar(value, Bool)) {
        *result = PyObject_IsTrue(value) == 1;
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s: expected True or False, got %.200R", name, value);
    return -1;
}

/* Whether float() would read the text of NumPy's value, also of its bytes, or drop its imaginary part. */
static bool is_text_or_complex(PyObject *value) {
    PyArrayObject *a = PyArray_Check(value) ? (PyArrayObject *)value : NULL;
    return (a && (PyArray_ISFLEXIBLE(a) || PyArray_DESCR(a)->kind == 'T')) || PyArray_IsScalar(value, Flexible) ||
           PyArray_IsScalar(value, ComplexFloating);
}

int sdpa_read_finite(const char *name, PyObject *value, double *result) {
    if (is_text_or_complex(value)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a finite number, got %.200R", name, value);
        return -1;
    }
    *result = PyFloat_AsDouble(value);
    if (*result == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "%s: expected a finite number, got an integer beyond float64", name);
        } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s: expected a finite number, got %.200R", name, value);
        }
        return -1;
    }
    if (isfinite(*result)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected a finite number, got %.200R", name, value);
    return -1;
}

int sdpa_read_integer(const char *name, PyObject *value, long long *result) {
    PyObject *integer = PyNumber_Index(value);
    if (!integer) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s: expected an integer, got %.200R", name, value);
        }
        return -1;
    }
    int overflow;
    *result = PyLong_AsLongLongAndOverflow(integer, &overflow);
    if (overflow) *result = overflow < 0 ? LLONG_MIN : LLONG_MAX;
    Py_DECREF(integer);
    return 0;
}

int sdpa_read_workers(PyObject *value, int *result) {
    long long n;
    if (sdpa_read_integer("workers", value, &n) < 0) return -1;
    if (n == 0 || n < -1) {
        PyErr_Format(PyExc_ValueError, "workers: expected None, -1 (all CPUs) or at least 1, got %.200R", value);
        return -1;
    }
    if (n == -1) n = sdpa_available_cpus();
    *result = n > SDPA_MAX_THREADS ? SDPA_MAX_THREADS : (int)n;
    return 0;
}
