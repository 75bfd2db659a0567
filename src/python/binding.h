/* The base of the binding: Python, NumPy, the module's state, names and signatures. It includes no other header of the
 * binding. Every function of the extension has the same shape: parse, convert, check, allocate, run the driver without
 * the GIL, one exit. Functions here need the GIL unless they say otherwise. */
#ifndef SDPA_BINDING_H
#define SDPA_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PY_ARRAY_UNIQUE_SYMBOL sdpa_numpy_api
#ifndef SDPA_IMPORTS_NUMPY /* module.c alone */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "../problem.h"

/* The names of the parameters of all functions. */
/* clang-format off */
#define SDPA_NAMES(X)                                                                                                  \
    SDPA_NUMBERS(X) X(query) X(key) X(value) X(attn_mask) X(is_causal) X(enable_gqa) X(window) X(sinks)                \
    X(alibi_slopes) X(key_lengths) X(query_offset) X(rng) X(workers) X(out) X(grad_out) X(lse) X(grad_lse) X(needs)    \
    X(stage) X(query_t) X(key_t) X(value_t) X(attn_mask_t) X(sinks_t) X(scale_t) X(gg_query) X(gg_key) X(gg_value)     \
    X(gg_attn_mask) X(gg_sinks) X(gg_scale) X(outs) X(lses) X(x) X(axis) X(temperature) X(where) X(keepdims) X(grad)   \
    X(weights) X(log_weights) X(cu_seqlens_q) X(cu_seqlens_k) X(sequence) X(w_query) X(w_key) X(w_score) X(bias)       \
    X(mode) X(n) X(name) X(heads) X(queries) X(invariant) X(lse_dtype) X(b) X(return_sign) X(sign) X(score_mod) X(score_args)\
    X(mask_mod) X(mask_args) X(score_args_t) X(gg_score_args) SDPA_DUMMY(X, dummy)             \
    SDPA_DUMMY(X, dummy_t) SDPA_DUMMY(X, gg_dummy)
/* clang-format on */

enum sdpa_name {
#define SDPA_NAME(name) NAME_##name,
    SDPA_NAMES(SDPA_NAME)
#undef SDPA_NAME
        N_NAMES
};
_Static_assert(N_NAMES <= UINT8_MAX, "signatures keep names in bytes");

/* The arguments with gradients. The arguments with their tangents are name_t and gg_name. The named tuples have a field
 * for each. */
enum {
#define SDPA_COUNT(name, ...) INPUT_##name,
    SDPA_DIFFERENTIABLE(SDPA_COUNT)
#undef SDPA_COUNT
        N_GRADIENTS,
#define SDPA_COUNT(name, ...) -1
    N_COMMON_GRADIENTS =
        N_GRADIENTS SDPA_DOT_OPTIONS(SDPA_COUNT) /* those that additive attention has, too; the first */
#undef SDPA_COUNT
};

/* The parameters of one function, in order: the first n_required have no default, those after the first n_positional
 * are keyword-only. */
typedef struct sdpa_signature {
    const char *function;
    const char *hint; /* NULL, or what the error for too many positional arguments adds */
    unsigned char n, n_required, n_positional;
    unsigned char names[N_NAMES];
    unsigned char rows[N_NAMES]; /* in the table of options, of those names that are options */
} sdpa_signature;

/* A signature that is not composed from the table of options: SDPA_SIGNATURE("name", n_required, n_positional, names). */
#define SDPA_SIGNATURE(text, required, positional, ...)                                                                \
    {                                                                                                                  \
        .function = text, .n_required = required, .n_positional = positional,                                          \
        .n = sizeof((unsigned char[]){__VA_ARGS__}), .names = {                                                        \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }

/* The parameters and the PyMethodDef entries of functions that take keywords. */
#define SDPA_ARGUMENTS PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames
#define SDPA_FUNCTION(function) (PyCFunction)(void (*)(void))(function)
#define SDPA_FLAGS (METH_FASTCALL | METH_KEYWORDS)

/* The named tuples that functions return; see module.c. */
enum sdpa_type {
    NO_TYPE = -1,
    FORWARD_TYPE,
    GRADIENTS_TYPE,
    TANGENT_TYPE,
    SECOND_TYPE,
    STATISTICS_TYPE,
    RECEIVED_TYPE,
    ADDITIVE_TYPE,
    LOGSUMEXP_TYPE,
    LOGSUMEXP_GRADIENTS_TYPE,
    N_TYPES
};

/* The functions whose signatures and docstrings are composed from the table of options; see docstring.c. */
enum sdpa_function {
    ATTENTION,
    TORCH,
    FORWARD,
    BACKWARD,
    JVP,
    DOUBLE_BACKWARD,
    WEIGHTS,
    STATISTICS,
    RECEIVED,
    CHECK,
    CHECK_BACKWARD,
    PATTERN,
    MERGE,
    ADDITIVE,
    ADDITIVE_FORWARD,
    ADDITIVE_BACKWARD,
    N_FUNCTIONS
};

/* Per module object. */
typedef struct sdpa_state {
    PyObject *names[N_NAMES];                         /* interned */
    PyObject *types[N_TYPES];                         /* of the results */
    PyObject *from_dlpack, *shares_memory, *too_hard; /* NumPy's */
    _Atomic int bf16;                                 /* NumPy's type number of bfloat16 once seen, else -1 */
    const struct sdpa_entry *entries[N_FUNCTIONS];    /* see entry.h */
    sdpa_signature signatures[N_FUNCTIONS];
    PyMethodDef definitions[N_FUNCTIONS]; /* their docstrings point into docs */
    PyObject *docs[N_FUNCTIONS];
} sdpa_state;

static inline sdpa_state *sdpa_state_of(PyObject *module) { return PyModule_GetState(module); }

static inline const sdpa_signature *sdpa_signature_of(PyObject *module, enum sdpa_function function) {
    return &sdpa_state_of(module)->signatures[function];
}

#endif
