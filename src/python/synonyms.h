/* What the error about an unknown keyword adds. */
#ifndef SDPA_SYNONYMS_H
#define SDPA_SYNONYMS_H

#include "binding.h"

/* ". Did you mean 'scale'?", another remedy, or "": new reference. `names` is a list of the parameters that may be given;
 * words of other libraries come before names that are spelt alike. */
PyObject *sdpa_hint(PyObject *keyword, PyObject *names);

#endif
