/* Functions whose signature and docstring are composed from the table of options. */
#ifndef SDPA_DOCSTRING_H
#define SDPA_DOCSTRING_H

#include "binding.h"

typedef struct sdpa_entry {
    enum sdpa_function id;
    const char *name;
    PyCFunction function;
    unsigned where;                         /* its bit in the options that it takes; see options.h */
    unsigned char n_operands, operands[12]; /* positional, without default, before the options */
    const char *doc;                        /* a block of doc/, with a line {OPTIONS} */
} sdpa_entry;

/* The entry of a function of the same name in Python and C; the rest is `where`, n_operands and operands. */
#define SDPA_ENTRY(id, name, ...)                                                                                      \
    { id, #name, SDPA_FUNCTION(name), __VA_ARGS__, doc_##name }

/* Fills in the signatures of these functions and adds the functions to the module; -1 and an exception on failure. */
int sdpa_entries_add(PyObject *module, const sdpa_entry *entries, int n);

#endif
