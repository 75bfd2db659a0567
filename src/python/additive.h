/* The functions on additive attention. */
#ifndef SDPA_ADDITIVE_H
#define SDPA_ADDITIVE_H

#include "binding.h"

/* Adds them to the module; -1 and an exception on failure. */
int sdpa_additive_add(PyObject *module);

#endif
