/* The handlers that sdpa.interop.jax registers with XLA. */
#ifndef SDPA_PYTHON_XLA_H
#define SDPA_PYTHON_XLA_H

#include "binding.h"

int sdpa_xla_add(PyObject *module);

#endif
