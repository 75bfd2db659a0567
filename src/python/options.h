/* The options of attention. One table (options.c) says which functions take an option, its default, type and
 * documentation, and how it is read; signatures, docstrings and the stub come from it. To add an option: a name in
 * binding.h, a row in the table, a block in doc/options.txt, a field here, and its meaning in call.c. */
#ifndef SDPA_OPTIONS_H
#define SDPA_OPTIONS_H

#include "binding.h" /* Python.h goes before the system's headers */

#include "../drivers.h"

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
    IN_RECEIVED = 2048,
    IN_DOT = 255 | IN_RECEIVED, /* all of the above */
    IN_PACKED = IN_DOT & ~IN_TORCH,
    IN_ADDITIVE = 256,
    IN_ADDITIVE_FORWARD = 512,
    IN_ADDITIVE_BACKWARD = 1024,
    IN_ADDITIVES = IN_ADDITIVE | IN_ADDITIVE_FORWARD | IN_ADDITIVE_BACKWARD,
    IN_ALL = IN_DOT | IN_ADDITIVES
};

/* In the order of the fields of the named tuples. */
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

/* An int, or an array of one integer per batch entry. */
typedef struct sdpa_integers {
    bool given;
    int64_t value;        /* for all entries if array is NULL */
    PyArrayObject *array; /* int64, a private copy */
} sdpa_integers;

/* Chosen indices of an axis, not yet checked against its length. */
typedef struct sdpa_indices {
    bool given;
    PyArrayObject *array; /* int64, one axis, a private copy; NULL: a slice */
    Py_ssize_t start, stop, step;
} sdpa_indices;

/* The options of one call, not yet checked against the shapes of its operands. */
typedef struct sdpa_options {
    PyObject *module;
    PyArrayObject *mask, *grad_lse, *sinks, *alibi_slopes; /* owned, NULL where absent; of any dtype and shape */
    PyArrayObject *mask_t, *sinks_t;                       /* owned or NULL; tangents, or gradients of gradients */
    sdpa_integers key_lengths, query_offset, cu_seqlens_q, cu_seqlens_k;
    sdpa_indices heads, queries;
    PyObject *out;                    /* borrowed */
    double scale, softcap, dropout_p; /* softcap 0: none */
    uint64_t seed;                    /* of dropout */
    bool has_seed;
    unsigned where; /* the function */
    bool has_scale, causal, lower_right, enable_gqa, invariant;
    bool has_left, has_right;
    int64_t left, right; /* of the window; 0 .. 2^62 */
    int n_workers;       /* 0: default */
    unsigned needs;
    sdpa_stage stage;
    bool has_sequence;
    int64_t sequence; /* the sequence whose weights are wanted */
} sdpa_options;

/* One row of the table; each has `read`, or `array`, or is an operand (bias) that the function reads itself. */
typedef struct sdpa_option {
    enum sdpa_name name;
    /* For users of _options(): "operand" (has a gradient), "position" (masks, or adds a number that depends only on the
     * positions of query and key), "packing", "score", "weight", "call" or "derivative". */
    const char *kind;
    unsigned where;
    bool keyword_only; /* additive attention takes every option but bias by keyword only */
    bool has_none;     /* None is the default and means absent */
    const char *default_;
    const char *annotation;                              /* in the stub */
    const char *doc;                                     /* numpydoc */
    int (*read)(sdpa_options *options, PyObject *value); /* sets its fields */
    size_t array;                                        /* offset of the field that holds the argument as an array */
} sdpa_option;

extern const sdpa_option sdpa_option_table[];
extern const int sdpa_n_options;

/* Reads the given options of `where` into *options, which is all zero. -1 and an exception on failure; the caller
 * releases *options whatever the result. */
int sdpa_options_read(PyObject *module, sdpa_options *options, unsigned where, PyObject *const values[N_NAMES]);
void sdpa_options_release(sdpa_options *options);

/* The table for Python: a tuple of (name, default, annotation, keyword_only, kind, where). New reference. */
PyObject *sdpa_options_describe(void);

#endif
