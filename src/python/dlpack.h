/* Views of objects of other libraries by DLPack's functions in C. */
#ifndef SDPA_PYTHON_DLPACK_H
#define SDPA_PYTHON_DLPACK_H

#include "binding.h"

int sdpa_dlpack_add(PyObject *module);

#endif
