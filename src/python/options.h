/* The options of attention. One table (options.c) says which functions take an option, its default, type and
 * documentation, and how it is read; signatures, docstrings and the stub come from it. To add an option: a name in
 * binding.h, a row in the table, a block in doc/options.txt, a field here, and its meaning in call.c. */
#ifndef SDPA_OPTIONS_H
#define SDPA_OPTIONS_H

#include "binding.h" /* Python.h goes before the system's headers */

#include "../drivers.h"

/* Sets of functions; bits of sdpa_option.where. */
#define IN(function) (1u << (function))
enum {
    IN_WHOLE_ROWS = IN(WEIGHTS) | IN(STATISTICS) | IN(RECEIVED), /* their operands are query and key */
    IN_PACKED =
        IN(ATTENTION) | IN(FORWARD) | IN(BACKWARD) | IN(JVP) | IN(DOUBLE_BACKWARD) | IN_WHOLE_ROWS, /* cu_seqlens */
    IN_DOT = IN_PACKED | IN(TORCH),
    IN_ADDITIVES = IN(ADDITIVE) | IN(ADDITIVE_FORWARD) | IN(ADDITIVE_BACKWARD),
    IN_ALL = IN_DOT | IN_ADDITIVES,
    IN_KEYWORDS = IN_WHOLE_ROWS | IN_ADDITIVES, /* options but bias by keyword only */
    IN_FORWARDS = IN(FORWARD) | IN(ADDITIVE_FORWARD),
    IN_BACKWARDS = IN(BACKWARD) | IN(DOUBLE_BACKWARD) | IN(ADDITIVE_BACKWARD),
    IN_GENERATOR = IN(ATTENTION) | IN(ADDITIVE),      /* rng may be a numpy.random.Generator */
    IN_SEEDED = IN_FORWARDS | IN_BACKWARDS | IN(JVP), /* dropout needs a seed, which other calls repeat */
};

/* The gradients that `needs` may name: those of SDPA_DIFFERENTIABLE, then these. */
enum {
    INPUT_score_args = N_GRADIENTS,
    INPUT_grad_out,
    INPUT_w_query,
    INPUT_w_key,
    INPUT_w_score,
    INPUT_bias,
    N_INPUTS,
    SDPA_INPUTS_SIZE = 512 /* of their names in one text */
};
#define NEEDS(name) (1u << INPUT_##name)

/* An int, or an array of one integer per batch entry. */
typedef struct sdpa_integers {
    bool given;
    int64_t value;        /* for all entries if array is NULL */
    PyArrayObject *array; /* int64, a private copy */
    PyArrayObject *own;   /* the caller's array, or NULL */
} sdpa_integers;

/* Chosen indices of an axis, not yet checked against its length. */
typedef struct sdpa_indices {
    bool given;
    PyArrayObject *array; /* int64, one axis, a private copy; NULL: a slice */
    Py_ssize_t start, stop, step;
} sdpa_indices;

/* The options of one call that are not arrays, not yet checked against the shapes of its operands. */
typedef struct sdpa_options {
    PyObject *module;
    int n_given;
    unsigned char given[N_NAMES]; /* rows of the table */
    sdpa_integers key_lengths, query_offset, cu_seqlens_q, cu_seqlens_k;
    sdpa_indices heads, queries;
    PyArrayObject *out; /* owned, may be NULL */
    bool has_lse_dtype;
    sdpa_dtype lse_dtype;
#define SDPA_DECLARE(name) double name;
    SDPA_NUMBERS(SDPA_DECLARE)
#undef SDPA_DECLARE
    uint64_t seed; /* of dropout */
    bool has_seed;
    unsigned where; /* the function's bit */
    bool has_scale, causal, lower_right, enable_gqa, invariant;
    bool is_named; /* the alignment of the causal mask was named */
    bool has_left, has_right;
    int64_t left, right; /* of the window; 0 .. 2^62 */
    int n_workers;       /* 0: default */
    unsigned needs;
    sdpa_stage stage;
    PyObject *score_mod, *score_args, *mask_mod, *mask_args; /* borrowed from the arguments, or NULL */
    PyObject *score_args_t;                                  /* or gg_score_args */
    bool has_sequence;
    int64_t sequence; /* the sequence whose weights are wanted */
} sdpa_options;

enum { SDPA_MOST_WORDS = 8 };

/* One row of the table. Each is an array, or has `read`, `integers` or `indices`. One that is an array and has `read` may
 * also be a number, which is read. */
typedef struct sdpa_option {
    enum sdpa_name name;
    /* For users of _options(): "operand" (has a gradient), "position" (masks, or adds a number that depends only on the
     * positions of query and key), "packing", "score", "weight", "call", "derivative" or "program". */
    const char *kind;
    unsigned where;
    bool keyword_only; /* in functions that are not IN_KEYWORDS */
    bool has_none;     /* None is the default and means absent */
    const char *default_;
    const char *words[SDPA_MOST_WORDS]; /* what other libraries call it */
    const char *annotation;             /* in the stub */
    const char *doc;                    /* numpydoc */
    bool array;                         /* kept by the call */
    /* Of an array that belongs to rows of the call, for users of _options(): its own axes, the last ones, as letters of
     * "hqk", heads, rows of query and of key; "" for one integer per batch entry; "s" for the bounds of sequences. An
     * annotation with `float` says that a number may stand for the array. */
    const char *axes;
    int (*read)(sdpa_options *options, PyObject *value); /* sets its fields */
    size_t integers, indices;                            /* offset of the field, or 0 */
} sdpa_option;

extern const sdpa_option sdpa_option_table[];
extern const int sdpa_n_options;

/* Lists the options that are given, in *options, which is all zero. */
void sdpa_options_find(sdpa_options *options, const sdpa_signature *signature, PyObject *const values[N_NAMES]);

/* Reads the listed options of a function, but those in `arrays`. -1 and an exception on failure; the caller releases
 * *options whatever the result. */
int sdpa_options_read(PyObject *module, sdpa_options *options, unsigned where, PyObject *const values[N_NAMES],
                      PyArrayObject *const arrays[N_NAMES]);
/* ValueError and -1 if `out` shares memory with an array of integers, as sdpa_check_overlap. */
int sdpa_options_check_overlap(sdpa_options *options, PyArrayObject *out);
void sdpa_options_release(sdpa_options *options);

/* Writes the names that `needs` may hold in the functions of `where`, each in quotes, with commas between. */
void sdpa_options_inputs(unsigned where, char quote, char *text, size_t size);

#endif
