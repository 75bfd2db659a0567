/* The functions of the softmax family. */
#ifndef SDPA_PYTHON_SOFTMAX_H
#define SDPA_PYTHON_SOFTMAX_H

#include "binding.h"

/* Adds them to the module; -1 and an exception on failure. */
int sdpa_softmax_add(PyObject *module);

#endif
