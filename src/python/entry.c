#include "entry.h"

#include "parse.h"

/* Takes the references in results. */
static PyObject *returned(PyObject *module, const sdpa_entry *entry, PyArrayObject **results) {
    const int n = entry->n_results;
    if (entry->type != NO_TYPE || n > 1) return sdpa_tuple(module, entry->type, n, results);
    PyObject *only = n ? (PyObject *)results[0] : Py_NewRef(Py_None);
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
    const bool has_options = kwnames || n_args > signature->n_required;
    if (sdpa_call_begin(&call, module, entry->where, signature, values, has_options) == 0 &&
        entry->prepare(&call, results) == 0 && (!entry->run || entry->run(&call) == 0)) {
        result = returned(module, entry, results);
    }
    sdpa_drop(entry->n_results, results);
    sdpa_call_end(&call);
    return result;
}
