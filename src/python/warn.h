/* Warnings of arguments that are valid and probably not meant. */
#ifndef SDPA_WARN_H
#define SDPA_WARN_H

#include "options.h"

/* Looks at the converted arguments of a call, the arrays by their names. Runs code of the caller's if it warns. -1 and an
 * exception if a warning is turned into one. */
int sdpa_warn(PyObject *module, const sdpa_options *options, PyArrayObject *const *arrays);

#endif
