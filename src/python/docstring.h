/* Signatures and docstrings composed from the table of options. */
#ifndef SDPA_DOCSTRING_H
#define SDPA_DOCSTRING_H

#include "entry.h"

/* The docstring of a function, which begins with its signature, and *signature: new reference. NULL and an exception on
 * failure. */
PyObject *sdpa_docstring(const sdpa_entry *entry, sdpa_signature *signature);

#endif
