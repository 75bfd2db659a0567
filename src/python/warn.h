/* Warnings: of arguments that are valid and probably not meant, and of the environment. */
#ifndef SDPA_WARN_H
#define SDPA_WARN_H

#include "options.h"

/* Looks at the converted arguments of a call, the arrays by their names. Runs code of the caller's if it warns. -1 and an
 * exception if a warning is turned into one. */
int sdpa_warn(PyObject *module, const sdpa_options *options, PyArrayObject *const *arrays);

/* A warning of this category at the line that called sdpa, or imports it. -1 and an exception if it is turned into one. */
int sdpa_warn_with(PyObject *message, PyObject *category);

#endif
