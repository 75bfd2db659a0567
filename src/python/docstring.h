/* Signatures and docstrings composed from the table of options, and the functions that bear them. */
#ifndef SDPA_DOCSTRING_H
#define SDPA_DOCSTRING_H

#include "entry.h"

/* Fills in the signatures of these functions and adds the functions to the module; -1 and an exception on failure. The
 * entries must be static. */
int sdpa_entries_add(PyObject *module, const sdpa_entry *entries, int n);

/* The table for Python: a tuple of (name, default, annotation, keyword_only, kind, names of the functions that take it,
 * axes or None). New reference. */
PyObject *sdpa_options_describe(PyObject *module);

#endif
