/* Functions that show and set the ISA and the threads, and helpers of the package and its tests. */
#ifndef SDPA_CONFIG_H
#define SDPA_CONFIG_H

#include "binding.h"

/* Adds them to the module, after it has switched to the ISA that SDPA_ISA names; -1 and an exception on failure. */
int sdpa_config_add(PyObject *module);

#endif
