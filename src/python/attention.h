/* The functions on dot-product attention. */
#ifndef SDPA_ATTENTION_H
#define SDPA_ATTENTION_H

#include "binding.h"

/* Adds them to the module; -1 and an exception on failure. */
int sdpa_attention_add(PyObject *module);

#endif
