/* merge_attention. */
#ifndef SDPA_MERGE_H
#define SDPA_MERGE_H

#include "binding.h"

/* Adds it to the module; -1 and an exception on failure. */
int sdpa_merge_add(PyObject *module);

#endif
