/* The options of attention. One table (options.c) says for each who takes it, its default, its type, its documentation
 * and how it is read; signatures, docstrings and the check of the stub come from there. To add an option: a name in
 * module.h, a row in the table, a field here, and what it means in call.c. */
#ifndef SDPA_OPTIONS_H
#define SDPA_OPTIONS_H

#include "../drivers.h"
#include "module.h"

/* The functions that take options; bits of sdpa_option.where. */
enum {
    IN_ATTENTION = 1,
    IN_TORCH = 2, /* scaled_dot_product_attention */
    IN_FORWARD = 4,
    IN_BACKWARD = 8,
    IN_WEIGHTS = 16,
    IN_STATISTICS = 32,
    IN_JVP = 64,
    IN_DOUBLE = 128,
    IN_DOT = 255, /* all of these */
    IN_ADDITIVE = 256,
    IN_ADDITIVE_FORWARD = 512,
    IN_ADDITIVE_BACKWARD = 1024,
    IN_ADDITIVES = IN_ADDITIVE | IN_ADDITIVE_FORWARD | IN_ADDITIVE_BACKWARD,
    IN_ALL = IN_DOT | IN_ADDITIVES
};

/* In the order of the fields of the results. */
enum {
    NEEDS_QUERY = 1,
    NEEDS_KEY = 2,
    NEEDS_VALUE = 4,
    NEEDS_MASK = 8,
    NEEDS_SINKS = 16,
    NEEDS_GRAD_OUT = 32,
    NEEDS_W_QUERY = 64,
    NEEDS_W_KEY = 128,
    NEEDS_W_SCORE = 256,
    NEEDS_BIAS = 512,
};

/* int, or an integer array; absent: array NULL and given false. */
typedef struct sdpa_integers {
    bool given;
    int64_t value;        /* of all entries, where array is NULL */
    PyArrayObject *array; /* int64, a copy of our own */
} sdpa_integers;

/* The options of one call, not yet held against the shapes of its operands. */
typedef struct sdpa_options {
    PyArrayObject *mask, *grad_lse, *sinks, *alibi_slopes; /* owned, NULL where absent; of any dtype and shape */
    PyArrayObject *mask_t, *sinks_t;                       /* the same: tangents, or gradients of gradients */
    sdpa_integers key_lengths, query_offset;
    PyObject *out;                    /* borrowed */
    double scale, softcap, dropout_p; /* softcap 0: none */
    uint64_t seed;                    /* of dropout */
    bool has_seed;
    unsigned where; /* the function */
    bool has_scale, causal, lower_right, enable_gqa;
    bool has_left, has_right;
    int64_t left, right; /* of the window; 0 .. 2^62 */
    int n_workers;       /* 0: default */
    unsigned needs;
    sdpa_stage stage;
} sdpa_options;

typedef struct sdpa_option {
    enum sdpa_name name;
    unsigned where;
    bool keyword_only; /* additive attention takes all but its bias by keyword only */
    bool has_none;     /* None is the default and means: absent */
    const char *default_;
    const char *annotation; /* in the stub */
    const char *doc;        /* "type\ntext": numpydoc without name and indentation */
    int (*read)(PyObject *module, sdpa_options *options, PyObject *value);
} sdpa_option;

extern const sdpa_option sdpa_option_table[];
extern const int sdpa_n_options;

/* Reads the options of `where` that are given into *options, which is all zero; -1 and an exception. Release in any
 * case. */
int sdpa_options_read(PyObject *module, sdpa_options *options, unsigned where, PyObject *const values[N_NAMES]);
void sdpa_options_release(sdpa_options *options);

/* One function of the family, as written down in attention.c. */
typedef struct sdpa_entry {
    const char *name;
    PyCFunction function;
    unsigned where;
    unsigned char n_operands, operands[12]; /* positional, without default, before the options */
    const char *summary;                    /* the docstring's first line */
    const char *formula;                    /* what it computes, and the source */
    const char *operands_doc;               /* numpydoc of the operands */
    const char *results_doc;                /* Returns */
    const char *example;
} sdpa_entry;

/* Fills *signature; returns the docstring with its text signature: new reference. */
PyObject *sdpa_entry_compose(const sdpa_entry *entry, sdpa_signature *signature);

/* The table for tests: a tuple of (name, default, annotation, keyword_only, where). */
PyObject *sdpa_options_describe(void);

#endif
