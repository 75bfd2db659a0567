/* Names of arguments as text, and single values to C types. */
#ifndef SDPA_VALUES_H
#define SDPA_VALUES_H

#include "binding.h"

const char *sdpa_name_text(int name);

/* Read one argument; -1 and an exception that begins with its name. */
int sdpa_read_bool(const char *name, PyObject *value, bool *result);         /* bool or numpy.bool, nothing else */
int sdpa_read_finite(const char *name, PyObject *value, double *result);     /* any real number but NaN and Inf */
int sdpa_read_integer(const char *name, PyObject *value, long long *result); /* clamped to the range of long long */
int sdpa_read_workers(PyObject *value, int *result);

#endif
