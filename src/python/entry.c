#include "entry.h"

#include "docstring.h"
#include "parse.h"

enum { MOST_RESULTS = 16 };

/* Takes the references in results. */
static PyObject *returned(PyObject *module, const sdpa_entry *entry, PyArrayObject **results) {
    if (entry->type != NO_TYPE) return sdpa_tuple(module, entry->type, entry->n_results, results);
    PyObject *only = entry->n_results ? (PyObject *)results[0] : Py_NewRef(Py_None);
    results[0] = NULL;
    return only;
}

PyObject *sdpa_call_entry(enum sdpa_function id, SDPA_ARGUMENTS) {
    const sdpa_entry *entry = sdpa_state_of(module)->entries[id];
    const sdpa_signature *signature = sdpa_signature_of(module, id);
    PyObject *values[N_NAMES], *result = NULL;
    PyArrayObject *results[MOST_RESULTS] = {NULL};
    sdpa_call call;
    if (sdpa_parse(module, signature, args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_call_begin(&call, module, entry->where, signature, values) == 0 && entry->prepare(&call, results) == 0 &&
        (!entry->run || entry->run(&call) == 0)) {
        result = returned(module, entry, results);
    }
    sdpa_drop(entry->n_results, results);
    sdpa_call_end(&call);
    return result;
}

static int add(PyObject *module, PyObject *module_name, const sdpa_entry *entry) {
    sdpa_state *state = sdpa_state_of(module);
    if (entry->n_results > MOST_RESULTS) {
        PyErr_Format(PyExc_SystemError, "%s: more than %d results", entry->name, MOST_RESULTS);
        return -1;
    }
    state->entries[entry->id] = entry;
    PyObject **doc = &state->docs[entry->id];
    *doc = sdpa_docstring(entry, &state->signatures[entry->id]);
    const char *text = *doc ? PyUnicode_AsUTF8AndSize(*doc, NULL) : NULL;
    PyMethodDef *definition = &state->definitions[entry->id];
    *definition = (PyMethodDef){entry->name, entry->function, SDPA_FLAGS, text};
    PyObject *function = text ? PyCFunction_NewEx(definition, module, module_name) : NULL;
    const int failed = function ? PyModule_AddObjectRef(module, entry->name, function) : -1;
    Py_XDECREF(function);
    return failed;
}

int sdpa_entries_add(PyObject *module, const sdpa_entry *entries, int n) {
    PyObject *name = PyModule_GetNameObject(module);
    int failed = name ? 0 : -1;
    for (int i = 0; i < n && !failed; i++) failed = add(module, name, &entries[i]);
    Py_XDECREF(name);
    return failed;
}
