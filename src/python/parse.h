/* From the arguments of a call to values by name, and single values to C types. */
#ifndef SDPA_PARSE_H
#define SDPA_PARSE_H

#include "binding.h"

const char *sdpa_name_text(int name);

/* Fills values[NAME_...] with borrowed references, NULL for absent arguments. -1 and a TypeError, worded like CPython's
 * for a Python function, if the call does not fit the signature. */
int sdpa_parse(PyObject *module, const sdpa_signature *signature, PyObject *const *args, Py_ssize_t n_args,
               PyObject *kwnames, PyObject *values[N_NAMES]);

/* Read one argument; -1 and an exception that begins with its name. */
int sdpa_read_bool(const char *name, PyObject *value, bool *result);         /* bool or numpy.bool, nothing else */
int sdpa_read_finite(const char *name, PyObject *value, double *result);     /* any real number but NaN and Inf */
int sdpa_read_integer(const char *name, PyObject *value, long long *result); /* clamped to the range of long long */
int sdpa_read_workers(PyObject *value, int *result);

#endif
