/* What the files of the binding share. Every function of the extension has one shape: sdpa_parse, convert, check,
 * allocate, release the GIL around the driver, one exit. Nothing here runs without the GIL unless it says so. */
#ifndef SDPA_MODULE_H
#define SDPA_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PY_ARRAY_UNIQUE_SYMBOL sdpa_numpy_api
#ifndef SDPA_IMPORTS_NUMPY /* module.c alone */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "../problem.h"

/* Every name that a parameter of any function has. */
/* clang-format off */
#define SDPA_NAMES(X)                                                                                                  \
    X(query) X(key) X(value) X(attn_mask) X(dropout_p) X(is_causal) X(scale) X(enable_gqa) X(softcap) X(window)        \
    X(sinks) X(alibi_slopes) X(key_lengths) X(query_offset) X(rng) X(workers) X(out) X(grad_out) X(lse) X(grad_lse)    \
    X(needs) X(stage) X(query_t) X(key_t) X(value_t) X(attn_mask_t) X(sinks_t) X(gg_query) X(gg_key) X(gg_value)       \
    X(gg_attn_mask) X(gg_sinks) X(outs) X(lses) X(x) X(axis) X(temperature) X(where) X(keepdims) X(grad) X(weights)    \
    X(log_weights) X(w_query) X(w_key) X(w_score) X(bias) X(mode) X(n) X(name)
/* clang-format on */

enum sdpa_name {
#define SDPA_NAME(name) NAME_##name,
    SDPA_NAMES(SDPA_NAME)
#undef SDPA_NAME
        N_NAMES
};

/* The parameters of one function, in order: the first n_required have no default, those after the first n_positional
 * are keyword-only. */
typedef struct sdpa_signature {
    const char *function;
    unsigned char n, n_required, n_positional;
    unsigned char names[32];
} sdpa_signature;

/* The named tuples that functions return; see module.c. */
enum sdpa_type { FORWARD_TYPE, GRADIENTS_TYPE, TANGENT_TYPE, DOUBLE_TYPE, STATISTICS_TYPE, ADDITIVE_TYPE, N_TYPES };

/* Per module object. */
typedef struct sdpa_state {
    PyObject *names[N_NAMES];              /* interned */
    PyObject *types[N_TYPES];              /* of the results */
    PyObject *from_dlpack, *shares_memory; /* NumPy's */
    _Atomic int bf16;                      /* NumPy's type number of bfloat16 once seen, else -1 */
    struct sdpa_family *attention;         /* attention.c: signatures, definitions, docstrings */
} sdpa_state;

static inline sdpa_state *sdpa_state_of(PyObject *module) { return PyModule_GetState(module); }

const char *sdpa_name_text(int name);

/* Fills values[NAME_...] with borrowed references, NULL where an argument is absent; -1 and TypeError if the call does
 * not fit the signature. */
int sdpa_parse(PyObject *module, const sdpa_signature *signature, PyObject *const *args, Py_ssize_t n_args,
               PyObject *kwnames, PyObject *values[N_NAMES]);

/* One argument; `name` is for the message. -1 and an exception that names it. */
int sdpa_read_bool(const char *name, PyObject *value, bool *result);         /* bool or numpy.bool, nothing else */
int sdpa_read_finite(const char *name, PyObject *value, double *result);     /* any real number but NaN and Inf */
int sdpa_read_workers(PyObject *value, int *result);                         /* value may be NULL or None */
int sdpa_read_integer(const char *name, PyObject *value, long long *result); /* clamped to long long */

/* Anything NumPy can take, as an array of any dtype and layout, without a copy where possible: new reference. Arrays,
 * __array__, buffers, nested sequences; __dlpack__ where that is all an object has. */
PyArrayObject *sdpa_array(PyObject *module, const char *name, PyObject *value);

/* dtype of an array: bool, the four float types, int64; -1 for any other (no exception). */
int sdpa_dtype_of(PyObject *module, PyArrayObject *a);
/* NumPy's type number of `dtype`. BF16: as seen by sdpa_dtype_of before. */
int sdpa_type_number(PyObject *module, sdpa_dtype dtype);
static inline bool sdpa_is_swapped(PyArrayObject *a) { return !PyArray_ISNOTSWAPPED(a); }
/* First element; never NULL, not even for an empty array. */
char *sdpa_data(PyArrayObject *a);

/* "(2, 8, 128)" into text, which it returns; `lead`: put before the sizes, such as "..., ". */
enum { SDPA_SHAPE_SIZE = 1400 };
const char *sdpa_shape_text(char text[SDPA_SHAPE_SIZE], const char *lead, const npy_intp *sizes, int n);

/* Checks an `out` argument: an ndarray of this shape and type number, native byte order, aligned, writable, whose
 * elements do not overlap one another. -1 and an exception otherwise. */
int sdpa_check_out(PyObject *value, const npy_intp *sizes, int n, int type_number);
/* -1 and ValueError if `out` shares memory with `input` (exact; disjoint interleaved views pass). */
int sdpa_check_overlap(PyObject *module, PyArrayObject *out, const char *name, PyArrayObject *input);

/* For problem.interrupted: takes the GIL, runs the signal handlers; non-zero if one raised. */
int sdpa_interrupted(void);
/* 0 for SDPA_OK; else -1 and the exception that it stands for. */
int sdpa_raise(sdpa_status status);

/* Add the functions of one family to the module; -1 and an exception on failure. */
int sdpa_attention_add(PyObject *module);
int sdpa_softmax_add(PyObject *module);
int sdpa_config_add(PyObject *module);
void sdpa_attention_free(sdpa_state *state);

#endif
