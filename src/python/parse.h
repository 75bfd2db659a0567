/* From the arguments of a call to values by name. */
#ifndef SDPA_PARSE_H
#define SDPA_PARSE_H

#include "binding.h"

/* Fills values[NAME_...] with borrowed references, NULL for absent arguments. -1 and a TypeError, worded like CPython's
 * for a Python function, if the call does not fit the signature. */
int sdpa_parse(PyObject *module, const sdpa_signature *signature, PyObject *const *args, Py_ssize_t n_args,
               PyObject *kwnames, PyObject *values[N_NAMES]);

#endif
