#include "xla.h"

#include "../xla.h"

/* Returns a dict from the names of the handlers to capsules. */
static PyObject *handlers(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    static const struct {
        const char *name;
        union {
            sdpa_xla_handler *function;
            void *pointer;
        };
    } all[] = {
        {"forward", {sdpa_xla_forward}},
        {"tangent", {sdpa_xla_tangent}},
        {"backward", {sdpa_xla_backward}},
        {"second", {sdpa_xla_second}},
    };
    PyObject *result = PyDict_New();
    for (size_t i = 0; result && i < sizeof all / sizeof *all; i++) {
        PyObject *capsule = PyCapsule_New(all[i].pointer, NULL, NULL);
        if (!capsule || PyDict_SetItemString(result, all[i].name, capsule) < 0) Py_CLEAR(result);
        Py_XDECREF(capsule);
    }
    return result;
}

/* Sets result[key] to a value whose reference it takes; clears *result on failure. */
static void put(PyObject **result, const char *key, PyObject *value) {
    if (*result && (!value || PyDict_SetItemString(*result, key, value) < 0)) Py_CLEAR(*result);
    Py_XDECREF(value);
}

#define TEXT(name, ...) #name " "
static PyObject *words(const char *text) {
    PyObject *all = PyUnicode_FromString(text), *list = all ? PyUnicode_Split(all, NULL, -1) : NULL;
    PyObject *result = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    Py_XDECREF(all);
    return result;
}

/* What the handlers are called with, by the lists of src/xla.h. */
static PyObject *arguments(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    static const struct {
        const char *name;
        int n_inner;
    } all[] = {
#define ROW(name, tensor, n_inner) {#name, n_inner},
#define INTEGER_ROW(name, n_inner) {#name, n_inner},
#define TANGENT_ROW(name, tensor, n_inner) {#name "_t", n_inner},
        SDPA_XLA_INPUTS(ROW) SDPA_XLA_INTEGERS(INTEGER_ROW) SDPA_XLA_ROWS(ROW) SDPA_DIFFERENTIABLE(TANGENT_ROW)
#undef TANGENT_ROW
#undef INTEGER_ROW
#undef ROW
    };
    _Static_assert(sizeof all / sizeof *all == SDPA_XLA_N_OPERANDS, "a name for each bit");
    PyObject *operands = PyDict_New(), *result = PyDict_New();
    for (size_t i = 0; operands && i < SDPA_XLA_N_OPERANDS; i++) {
        put(&operands, all[i].name, PyLong_FromLong(all[i].n_inner));
    }
    put(&result, "operands", operands);
    put(&result, "results", words(SDPA_XLA_OUTPUTS(TEXT) SDPA_DIFFERENTIABLE(TEXT)));
    put(&result, "integers", words(SDPA_XLA_ATTRIBUTES(TEXT)));
    put(&result, "numbers", words(SDPA_NUMBERS(TEXT)));
    return result;
}

int sdpa_xla_add(PyObject *module) {
    static PyMethodDef methods[] = {
        {"_xla_handlers", handlers, METH_NOARGS,
         "_xla_handlers($module)\n--\n\nMap names to capsules of handlers for XLA's foreign function interface."},
        {"_xla_arguments", arguments, METH_NOARGS,
         "_xla_arguments($module)\n--\n\nOperands of the handlers with the number of their axes behind the heads, "
         "results and attributes, each in the order of src/xla.h."},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
