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

int sdpa_xla_add(PyObject *module) {
    static PyMethodDef methods[] = {
        {"_xla_handlers", handlers, METH_NOARGS,
         "_xla_handlers($module)\n--\n\nMap names to capsules of handlers for XLA's foreign function interface."},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
