/* The functions of attention: a table row each, and the one way from a Python call through it. */
#ifndef SDPA_ENTRY_H
#define SDPA_ENTRY_H

#include "results.h"

enum { MOST_RESULTS = 16 };

typedef struct sdpa_entry {
    enum sdpa_function id;
    const char *name;
    PyCFunction function;
    unsigned where;                         /* the bit of the function whose options it takes; see options.h */
    unsigned char n_operands, operands[12]; /* positional, without default, before the options */
    const char *doc;                        /* a block of doc/, see attention.txt */

    /* The rest is for functions that sdpa_call_entry calls. */
    enum sdpa_type type; /* of the named tuple; NO_TYPE: a plain tuple, the only result itself, or None */
    int n_results;
    int (*prepare)(sdpa_call *call, PyArrayObject **results); /* checks what begin leaves, makes the results */
    int (*run)(sdpa_call *call);                              /* NULL: the function only checks */
} sdpa_entry;

/* Parses, checks, makes the results, runs, and returns them. */
PyObject *sdpa_call_entry(enum sdpa_function id, SDPA_ARGUMENTS);

/* Defines the C function of an entry. */
#define SDPA_DEFINE(id, function)                                                                                      \
    static PyObject *function(SDPA_ARGUMENTS) { return sdpa_call_entry(id, module, args, n_args, kwnames); }

#endif
