#include "options.h"

#include <string.h>

#include "arrays.h"
#include "docstrings.h"
#include "values.h"

/* A bound of the window this large excludes nothing. Up to these limits offset + bound + index fits in int64. */
#define WIDEST (INT64_C(1) << 62)

static int read_dropout(sdpa_options *options, PyObject *value) {
    double *p = &options->dropout_p;
    if (sdpa_read_finite("dropout_p", value, p) < 0) return -1;
    if (*p >= 0 && *p <= 1) return 0;
    PyErr_Format(PyExc_ValueError, "dropout_p: expected a probability from 0 to 1, got %.200R", value);
    return -1;
}

static int read_softcap(sdpa_options *options, PyObject *value) {
    if (sdpa_read_finite("softcap", value, &options->softcap) < 0) return -1;
    if (options->softcap > 0) return 0;
    PyErr_Format(PyExc_ValueError, "softcap: expected a number above 0, or None for no cap, got %.200R", value);
    return -1;
}

/* An int is the seed. A Generator draws a seed of 64 bits; functions whose derivatives need the seed refuse one. */
static int read_rng(sdpa_options *options, PyObject *value) {
    options->has_seed = true;
    const bool takes_generator = options->where & IN_GENERATOR;
    /* The module numpy.random also has the attributes of a Generator. */
    const int generates = takes_generator && !PyModule_Check(value) ? sdpa_has_attribute(value, "bit_generator") : 0;
    if (generates < 0) return -1;
    PyObject *bytes = generates ? PyObject_CallMethod(value, "bytes", "i", (int)sizeof options->seed) : NULL;
    if (bytes) {
        const bool fits = PyBytes_Check(bytes) && PyBytes_Size(bytes) == sizeof options->seed;
        if (fits)
            memcpy(&options->seed, PyBytes_AsString(bytes), sizeof options->seed);
        else
            PyErr_Format(PyExc_TypeError, "rng: expected its method bytes(8) to return 8 bytes, got %.200R", bytes);
        Py_DECREF(bytes);
        return fits ? 0 : -1;
    }
    if (PyErr_Occurred()) return -1;
    PyObject *index = PyBool_Check(value) ? NULL : PyNumber_Index(value);
    if (!index) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "rng: expected an int from 0 to 2^64 - 1%s, got %.200R",
                     takes_generator ? ", a numpy.random.Generator or None" : " or None", value);
        return -1;
    }
    options->seed = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (!PyErr_Occurred()) return 0;
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return -1;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "rng: expected an int from 0 to 2^64 - 1, got %.200R", value);
    return -1;
}

static int read_causal(sdpa_options *options, PyObject *value) {
    options->is_named = PyUnicode_Check(value);
    if (!options->is_named) {
        if (PyBool_Check(value) || PyArray_IsScalar(value, Bool)) {
            return sdpa_read_bool("is_causal", value, &options->causal);
        }
    } else if (PyUnicode_CompareWithASCIIString(value, "upper_left") == 0) {
        options->causal = true;
        return 0;
    } else if (PyUnicode_CompareWithASCIIString(value, "lower_right") == 0) {
        options->causal = options->lower_right = true;
        return 0;
    }
    PyErr_Format(options->is_named ? PyExc_ValueError : PyExc_TypeError,
                 "is_causal: expected False, True, 'upper_left' or 'lower_right', got %.200R", value);
    return -1;
}

static int read_scale(sdpa_options *options, PyObject *value) {
    options->has_scale = true;
    return sdpa_read_finite("scale", value, &options->scale);
}

static int read_gqa(sdpa_options *options, PyObject *value) {
    return sdpa_read_bool("enable_gqa", value, &options->enable_gqa);
}

/* Reads one side of the window; None leaves it unbounded. */
static int read_bound(PyObject *bound, PyObject *window, bool *has, int64_t *result) {
    if (bound == Py_None) return 0;
    long long n;
    if (sdpa_read_integer("window", bound, &n) < 0) return -1;
    if (n < 0) {
        PyErr_Format(PyExc_ValueError, "window: expected bounds of at least 0, or None for no bound, got %.200R",
                     window);
        return -1;
    }
    *has = n < WIDEST;
    *result = n;
    return 0;
}

static int read_window(sdpa_options *options, PyObject *value) {
    const Py_ssize_t size = PyTuple_Check(value) || PyList_Check(value) ? PySequence_Size(value) : 0;
    if (size < 0) return -1;
    if (size != 2) {
        PyErr_Format(PyExc_TypeError, "window: expected a pair (left, right), got %.200R", value);
        return -1;
    }
    PyObject *left = PySequence_GetItem(value, 0), *right = left ? PySequence_GetItem(value, 1) : NULL;
    int failed = !right || read_bound(left, value, &options->has_left, &options->left) < 0 ||
                 read_bound(right, value, &options->has_right, &options->right) < 0;
    Py_XDECREF(left);
    Py_XDECREF(right);
    return failed ? -1 : 0;
}

static int read_integers(PyObject *module, const char *name, PyObject *value, sdpa_integers *result) {
    result->given = true;
    if (PyLong_Check(value) && !PyBool_Check(value)) {
        long long n;
        if (sdpa_read_integer(name, value, &n) < 0) return -1;
        result->value = n;
        return 0;
    }
    PyArrayObject *array = sdpa_array(module, name, value);
    if (!array) return -1;
    /* An empty list, which NumPy makes an array of float64, counts as integers. */
    if (PyArray_SIZE(array) && !PyArray_ISINTEGER(array)) {
        PyErr_Format(PyExc_TypeError, "%s: expected integers, got %S", name, PyArray_DESCR(array));
    } else {
        /* This is a copy, because it is checked here and used later, while other Python threads may write to the
         * original. Unsigned values that do not fit wrap around to negative ones. */
        bool is_unsigned = PyArray_ISUNSIGNED(array);
        const int flags = NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY | NPY_ARRAY_ENSUREARRAY | NPY_ARRAY_FORCECAST;
        result->array = (PyArrayObject *)PyArray_FromArray(array, PyArray_DescrFromType(NPY_INT64), flags);
        if (result->array && is_unsigned) {
            const int64_t *data = PyArray_DATA(result->array);
            for (npy_intp i = 0; i < PyArray_SIZE(result->array); i++) {
                if (data[i] >= 0) continue;
                PyErr_Format(PyExc_ValueError, "%s: expected integers below 2^63, got %llu", name,
                             (unsigned long long)data[i]);
                break;
            }
        }
    }
    result->own = array;
    if (PyErr_Occurred() || sdpa_settle(&result->own, true) < 0) return -1;
    if (PyArray_NDIM(result->array) == 0) {
        result->value = *(const int64_t *)PyArray_DATA(result->array);
        Py_DECREF(result->array);
        result->array = NULL;
    }
    return 0;
}

static int check_offset(const sdpa_integers *offset) {
    const int64_t *data = offset->array ? PyArray_DATA(offset->array) : &offset->value;
    for (npy_intp i = 0, n = offset->array ? PyArray_SIZE(offset->array) : 1; i < n; i++) {
        if (data[i] >= -SDPA_LARGEST_OFFSET && data[i] <= SDPA_LARGEST_OFFSET) continue;
        PyErr_Format(PyExc_ValueError, "query_offset: expected integers from -2^60 to 2^60, got %lld",
                     (long long)data[i]);
        return -1;
    }
    return 0;
}

static int read_sequence(sdpa_options *options, PyObject *value) {
    long long n;
    if (sdpa_read_integer("sequence", value, &n) < 0) return -1;
    options->has_sequence = true;
    options->sequence = n;
    return 0;
}

/* Reads a slice, or an array of integers with one axis. */
static int read_indices(PyObject *module, const char *name, PyObject *value, sdpa_indices *result) {
    result->given = true;
    if (PySlice_Check(value)) {
        if (PySlice_Unpack(value, &result->start, &result->stop, &result->step) == 0) return 0;
        if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) return -1;
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: expected a slice of integers with a step that is not 0, got %R", name,
                     value);
        return -1;
    }
    sdpa_integers integers = {0};
    const int failed = read_integers(module, name, value, &integers);
    result->array = integers.array;
    Py_XDECREF((PyObject *)integers.own);
    if (failed) return -1;
    if (integers.array && PyArray_NDIM(integers.array) == 1) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected a slice or integers along one axis, got %.200R", name, value);
    return -1;
}

static int read_invariant(sdpa_options *options, PyObject *value) {
    return sdpa_read_bool("invariant", value, &options->invariant);
}

static int read_workers(sdpa_options *options, PyObject *value) {
    return sdpa_read_workers(value, &options->n_workers);
}

static int read_out(sdpa_options *options, PyObject *value) { return sdpa_read_out(value, &options->out); }

static int read_lse_dtype(sdpa_options *options, PyObject *value) {
    PyArray_Descr *type = NULL;
    const bool known = PyArray_DescrConverter(value, &type) == NPY_SUCCEED;
    const int number = known && PyArray_ISNBO(type->byteorder) ? type->type_num : NPY_NOTYPE;
    Py_XDECREF((PyObject *)type);
    /* Of text that is no dtype NumPy says so by any of these. */
    if (!known && !PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError) &&
        !PyErr_ExceptionMatches(PyExc_SyntaxError)) {
        return -1;
    }
    PyErr_Clear();
    options->has_lse_dtype = true;
    options->lse_dtype = number == NPY_DOUBLE ? SDPA_F64 : SDPA_F32;
    if (number == NPY_DOUBLE || number == NPY_FLOAT) return 0;
    PyErr_Format(PyExc_TypeError, "lse_dtype: expected np.float32, np.float64 or None, got %.200R", value);
    return -1;
}

/* The functions whose gradients include that of input i. */
static unsigned functions_of_input(int i) {
    if (i < N_COMMON_GRADIENTS) return IN_BACKWARDS;
    if (i < N_GRADIENTS || i == INPUT_score_args) return IN_BACKWARDS & IN_DOT;
    return i == INPUT_grad_out ? IN(DOUBLE_BACKWARD) : IN(ADDITIVE_BACKWARD);
}

_Static_assert(N_INPUTS * 32 <= SDPA_INPUTS_SIZE, "a name takes less than 32 characters");
static const char *const input_names[N_INPUTS] = {
#define TEXT(name, ...) #name,
    SDPA_DIFFERENTIABLE(TEXT)
#undef TEXT
        "score_args",
    "grad_out",
    "w_query",
    "w_key",
    "w_score",
    "bias",
};

void sdpa_options_inputs(unsigned where, char quote, char *text, size_t size) {
    size_t used = 0;
    for (int i = 0; i < N_INPUTS; i++) {
        if (!(functions_of_input(i) & where)) continue;
        used +=
            (size_t)PyOS_snprintf(text + used, size - used, "%s%c%s%c", i ? ", " : "", quote, input_names[i], quote);
    }
}

static void raise_no_input(const sdpa_options *options, PyObject *name) {
    char known[SDPA_INPUTS_SIZE];
    sdpa_options_inputs(options->where, '\'', known, sizeof known);
    PyErr_Format(PyExc_ValueError, "needs: expected names among %s, got %.200R", known, name);
}

static int read_needs(sdpa_options *options, PyObject *value) {
    options->needs = 0;
    PyObject *names = PyUnicode_Check(value) ? NULL : PySequence_Tuple(value);
    if (!names) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Format(PyExc_TypeError, "needs: expected a sequence of names such as ('query', 'key'), got %.200R",
                     value);
        return -1;
    }
    for (Py_ssize_t k = 0, n = PyTuple_Size(names); k < n; k++) {
        PyObject *name = PyTuple_GetItem(names, k);
        unsigned found = 0;
        for (int i = 0; i < N_INPUTS && PyUnicode_Check(name); i++) {
            if (!(functions_of_input(i) & options->where)) continue;
            if (PyUnicode_CompareWithASCIIString(name, input_names[i]) == 0) found = 1u << i;
        }
        if (!found) {
            raise_no_input(options, name);
            Py_DECREF(names);
            return -1;
        }
        options->needs |= found;
    }
    Py_DECREF(names);
    return 0;
}

static int read_stage(sdpa_options *options, PyObject *value) {
    static const char *const stages[] = {
        [SDPA_SCORES] = "scores", [SDPA_CAPPED] = "capped", [SDPA_BIASED] = "biased", [SDPA_WEIGHTS] = "weights"};
    for (int i = 0; i < 4 && PyUnicode_Check(value); i++) {
        if (PyUnicode_CompareWithASCIIString(value, stages[i]) != 0) continue;
        options->stage = (sdpa_stage)i;
        return 0;
    }
    PyErr_Format(PyUnicode_Check(value) ? PyExc_ValueError : PyExc_TypeError,
                 "stage: expected 'scores', 'capped', 'biased' or 'weights', got %.200R", value);
    return -1;
}

/* Functions are traced, and their arguments converted, together (programs.h). */
#define KEEP(name)                                                                                                     \
    static int read_##name(sdpa_options *options, PyObject *value) {                                                   \
        options->name = value;                                                                                         \
        return 0;                                                                                                      \
    }
KEEP(score_mod)
KEEP(score_args)
KEEP(mask_mod)
KEEP(mask_args)
KEEP(score_args_t)
#undef KEEP

#define FUNCTION "Callable[..., Any] | None"
#define ARGUMENTS "Sequence[ArrayLike] | None"
#define TANGENTS "Sequence[ArrayLike | None] | None"
#define INTEGERS "int | ArrayLike | None"
#define INDICES "slice | ArrayLike | None"
#define OFFSET(kind, field) .kind = offsetof(sdpa_options, field)
const sdpa_option sdpa_option_table[] = {
#define TANGENT(name, ...)                                                                                             \
    {NAME_##name##_t,                                                                                                  \
     "derivative",                                                                                                     \
     IN(JVP),                                                                                                          \
     .has_none = true,                                                                                                 \
     .default_ = "None",                                                                                               \
     .annotation = "ArrayLike | None",                                                                                 \
     .doc = doc_option_##name##_t,                                                                                     \
     .array = true},
    SDPA_OPERANDS(TANGENT)
#undef TANGENT
        {NAME_bias, "operand", IN(ADDITIVE) | IN(ADDITIVE_FORWARD), .has_none = true, .default_ = "None",
         .annotation = "ArrayLike | None", .doc = doc_option_bias, .array = true},
    {NAME_attn_mask, "operand", IN_ALL, .has_none = true, .default_ = "None", .annotation = "ArrayLike | None",
     .doc = doc_option_attn_mask, .array = true, .axes = "hqk",
     .words = {"mask", "attention_mask", "bias", "attn_bias", "attention_bias"}},
    {NAME_dropout_p, "weight", IN_ALL & ~IN(STATISTICS), .default_ = "0.0", .annotation = "float",
     .doc = doc_option_dropout_p, .read = read_dropout,
     .words = {"dropout", "dropout_rate", "attn_dropout", "attention_dropout"}},
    {NAME_dropout_p, "weight", IN(STATISTICS), .default_ = "0.0", .annotation = "float",
     .doc = doc_option_dropout_p_statistics, .read = read_dropout},
    {NAME_is_causal, "position", IN_ALL, .default_ = "False",
     .annotation = "bool | Literal['upper_left', 'lower_right']", .doc = doc_option_is_causal, .read = read_causal,
     .words = {"causal", "causal_mask", "use_causal_mask"}},
    {NAME_where, "position", IN_ALL & ~IN(TORCH), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_where, .array = true, .axes = "hqk", .words = {"mask"}},
    {NAME_scale, "score", IN_DOT, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "float | ArrayLike | None", .doc = doc_option_scale, .array = true, .axes = "h", .read = read_scale,
     .words = {"softmax_scale", "sm_scale", "qk_scale", "scaling"}},
    {NAME_scale, "score", IN_ADDITIVES, .keyword_only = true, .has_none = true, .default_ = "1.0",
     .annotation = "float | None", .doc = doc_option_scale_additive, .read = read_scale},
    {NAME_enable_gqa, "call", IN_ALL, .keyword_only = true, .default_ = "False", .annotation = "bool",
     .doc = doc_option_enable_gqa, .read = read_gqa, .words = {"gqa", "use_gqa"}},
    {NAME_softcap, "score", IN_ALL & ~IN(TORCH), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "float | None", .doc = doc_option_softcap, .read = read_softcap,
     .words = {"logit_cap", "logits_soft_cap", "attn_logits_soft_cap", "attn_logit_softcapping"}},
    {NAME_window, "position", IN_ALL & ~IN(TORCH), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "tuple[int | None, int | None] | None", .doc = doc_option_window, .read = read_window,
     .words = {"window_size", "sliding_window", "local_window_size"}},
    {NAME_sinks, "operand", IN_ALL & ~IN(TORCH), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_sinks, .array = true, .axes = "h",
     .words = {"s_aux", "attention_sinks", "learnable_sink"}},
    {NAME_alibi_slopes, "position", IN_ALL & ~IN(TORCH), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_alibi_slopes, .array = true, .axes = "h", .words = {"alibi"}},
    {NAME_key_lengths, "position", IN_ALL & ~IN(TORCH), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = INTEGERS, .doc = doc_option_key_lengths, .axes = "", OFFSET(integers, key_lengths),
     .words = {"lengths", "seq_lens", "kv_lengths", "kv_lens", "cache_seqlens", "seqused_k", "key_value_seq_lengths",
               "valid_lens"}},
    {NAME_query_offset, "position", IN_ALL & ~IN(TORCH), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = INTEGERS, .doc = doc_option_query_offset, .axes = "", OFFSET(integers, query_offset),
     .words = {"offset", "q_offset", "start_pos", "cache_position"}},
    {NAME_cu_seqlens_q, "packing", IN_PACKED, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_cu_seqlens_q, .axes = "s", OFFSET(integers, cu_seqlens_q)},
    {NAME_cu_seqlens_k, "packing", IN_PACKED, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_cu_seqlens_k, .axes = "s", OFFSET(integers, cu_seqlens_k)},
    {NAME_sequence, "packing", IN(WEIGHTS), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "int | None", .doc = doc_option_sequence, .read = read_sequence},
    {NAME_score_mod, "program", IN_PACKED, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = FUNCTION, .doc = doc_option_score_mod, .read = read_score_mod, .words = {"score_function"}},
    {NAME_score_args, "program", IN_PACKED, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = ARGUMENTS, .doc = doc_option_score_args, .read = read_score_args},
    {NAME_mask_mod, "program", IN_PACKED, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = FUNCTION, .doc = doc_option_mask_mod, .read = read_mask_mod,
     .words = {"block_mask", "mask_function"}},
    {NAME_mask_args, "program", IN_PACKED, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = ARGUMENTS, .doc = doc_option_mask_args, .read = read_mask_args},
    {NAME_rng, "weight", IN_GENERATOR, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "int | np.random.Generator | None", .doc = doc_option_rng, .read = read_rng,
     .words = {"seed", "generator", "random_state", "dropout_rng"}},
    {NAME_rng, "weight", IN(WEIGHTS) | IN(RECEIVED), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "int | None", .doc = doc_option_rng_seed, .read = read_rng},
    {NAME_rng, "weight", IN_SEEDED, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "int | None", .doc = doc_option_rng_required, .read = read_rng},
    {NAME_rng, "weight", IN(STATISTICS), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "int | None", .doc = doc_option_rng_statistics, .read = read_rng},
    {NAME_invariant, "call", IN_DOT & ~IN(TORCH), .keyword_only = true, .default_ = "False", .annotation = "bool",
     .doc = doc_option_invariant, .read = read_invariant},
    {NAME_workers, "call", IN_ALL & ~IN(TORCH), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "int | None", .doc = doc_option_workers, .read = read_workers,
     .words = {"threads", "num_threads", "n_threads", "n_jobs", "num_workers", "n_workers", "max_workers"}},
    {NAME_out, "call", IN(ATTENTION) | IN(ADDITIVE) | IN_FORWARDS, .keyword_only = true, .has_none = true,
     .default_ = "None", .annotation = "NDArray[Any] | None", .doc = doc_option_out, .read = read_out},
    {NAME_lse_dtype, "call", IN(FORWARD), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "DTypeLike | None", .doc = doc_option_lse_dtype, .read = read_lse_dtype},
    {NAME_stage, "call", IN(WEIGHTS), .keyword_only = true, .default_ = "\"weights\"",
     .annotation = "Literal['scores', 'capped', 'biased', 'weights']", .doc = doc_option_stage, .read = read_stage},
    {NAME_heads, "call", IN(WEIGHTS) | IN(RECEIVED), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = INDICES, .doc = doc_option_heads, OFFSET(indices, heads)},
    {NAME_queries, "call", IN(WEIGHTS) | IN(RECEIVED), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = INDICES, .doc = doc_option_queries, OFFSET(indices, queries)},
    {NAME_attn_mask_t, "derivative", IN(JVP), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_attn_mask_t, .array = true},
    {NAME_sinks_t, "derivative", IN(JVP), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_sinks_t, .array = true},
    {NAME_scale_t, "derivative", IN(JVP), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_scale_t, .array = true},
    {NAME_gg_attn_mask, "derivative", IN(DOUBLE_BACKWARD), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_gg_attn_mask, .array = true},
    {NAME_gg_sinks, "derivative", IN(DOUBLE_BACKWARD), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_gg_sinks, .array = true},
    {NAME_gg_scale, "derivative", IN(DOUBLE_BACKWARD), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_gg_scale, .array = true},
    {NAME_score_args_t, "derivative", IN(JVP), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = TANGENTS, .doc = doc_option_score_args_t, .read = read_score_args_t},
    {NAME_gg_score_args, "derivative", IN(DOUBLE_BACKWARD), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = TANGENTS, .doc = doc_option_gg_score_args, .read = read_score_args_t},
    {NAME_grad_lse, "derivative", IN_BACKWARDS, .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = doc_option_grad_lse, .array = true},
    {NAME_needs, "derivative", IN(BACKWARD), .keyword_only = true, .default_ = "(\"query\", \"key\", \"value\")",
     .annotation = "Iterable[str]", .doc = doc_option_needs, .read = read_needs},
    {NAME_needs, "derivative", IN(DOUBLE_BACKWARD), .keyword_only = true,
     .default_ = "(\"grad_out\", \"query\", \"key\", \"value\")", .annotation = "Iterable[str]",
     .doc = doc_option_needs, .read = read_needs},
    {NAME_needs, "derivative", IN(ADDITIVE_BACKWARD), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "Iterable[str] | None", .doc = doc_option_needs_additive, .read = read_needs},
#ifdef SDPA_DUMMY_OPTION
    {NAME_dummy, "operand", IN_ALL & ~IN(TORCH), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "float | ArrayLike | None",
     .doc = "dummy : float or array_like, (..., heads), optional\n    Ignored.\n", .array = true, .axes = "h"},
    {NAME_dummy_t, "derivative", IN(JVP), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = "dummy_t : array_like, optional\n    Ignored.\n", .array = true},
    {NAME_gg_dummy, "derivative", IN(DOUBLE_BACKWARD), .keyword_only = true, .has_none = true, .default_ = "None",
     .annotation = "ArrayLike | None", .doc = "gg_dummy : array_like, optional\n    Ignored.\n", .array = true},
#endif
};
#undef OFFSET
#undef FUNCTION
#undef ARGUMENTS
#undef TANGENTS
#undef INDICES
#undef INTEGERS
const int sdpa_n_options = sizeof sdpa_option_table / sizeof *sdpa_option_table;

/* A seed from the system's entropy, by Python, which finds it on every system. */
static int draw_seed(uint64_t *seed) {
    PyObject *os = PyImport_ImportModule("os");
    PyObject *bytes = os ? PyObject_CallMethod(os, "urandom", "i", (int)sizeof *seed) : NULL;
    const char *data = bytes ? PyBytes_AsString(bytes) : NULL;
    if (data) memcpy(seed, data, sizeof *seed);
    Py_XDECREF(bytes);
    Py_XDECREF(os);
    return data ? 0 : -1;
}

static sdpa_integers *integers_of(sdpa_options *options, const sdpa_option *row) {
    return row->integers ? (sdpa_integers *)((char *)options + row->integers) : NULL;
}

static sdpa_indices *indices_of(sdpa_options *options, const sdpa_option *row) {
    return row->indices ? (sdpa_indices *)((char *)options + row->indices) : NULL;
}

static int read_option(sdpa_options *options, const sdpa_option *row, PyObject *value) {
    const char *name = sdpa_name_text(row->name);
    if (row->read) return row->read(options, value);
    if (row->integers && read_integers(options->module, name, value, integers_of(options, row)) < 0) return -1;
    if (row->name == NAME_query_offset) return check_offset(&options->query_offset);
    return row->indices ? read_indices(options->module, name, value, indices_of(options, row)) : 0;
}

/* Dropout needs a seed. Functions that draw one return out alone: nothing that is computed from it needs the seed. */
static int check_seed(sdpa_options *options) {
    if (options->dropout_p == 0) return 0;
    if (options->where == IN(STATISTICS)) {
        PyErr_SetString(PyExc_ValueError,
                        "dropout_p: expected 0, since statistics describe the weights before dropout");
        return -1;
    }
    if (options->has_seed) return 0;
    if (options->where & IN_SEEDED) {
        PyErr_SetString(PyExc_ValueError,
                        "rng: expected an int from 0 to 2^64 - 1, the same forward and backward, since "
                        "dropout_p is not 0, got None");
        return -1;
    }
    return draw_seed(&options->seed);
}

void sdpa_options_find(sdpa_options *options, const sdpa_signature *signature, PyObject *const values[N_NAMES]) {
    for (int i = signature->n_required; i < signature->n; i++) {
        PyObject *value = values[signature->names[i]];
        if (!value || (value == Py_None && sdpa_option_table[signature->rows[i]].has_none)) continue;
        options->given[options->n_given++] = signature->rows[i];
    }
}

int sdpa_options_read(PyObject *module, sdpa_options *options, unsigned where, PyObject *const values[N_NAMES],
                      PyArrayObject *const arrays[N_NAMES]) {
    options->needs = NEEDS(query) | NEEDS(key) | NEEDS(value);
    if (where == IN(DOUBLE_BACKWARD)) options->needs |= NEEDS(grad_out);
    if (where == IN(ADDITIVE_BACKWARD)) {
        options->needs |= NEEDS(w_query) | NEEDS(w_key) | NEEDS(w_score) | (arrays[NAME_bias] ? NEEDS(bias) : 0);
    }
    options->module = module;
    options->where = where;
    for (int i = 0; i < options->n_given; i++) {
        const sdpa_option *row = &sdpa_option_table[options->given[i]];
        if (!arrays[row->name] && read_option(options, row, values[row->name]) < 0) return -1;
    }
    if (options->lower_right && options->query_offset.given) {
        PyErr_SetString(PyExc_ValueError, "query_offset: expected None with is_causal='lower_right', which sets the "
                                          "offset itself");
        return -1;
    }
    return check_seed(options);
}

int sdpa_options_check_overlap(sdpa_options *options, PyArrayObject *out) {
    for (int i = 0; i < options->n_given; i++) {
        const sdpa_option *row = &sdpa_option_table[options->given[i]];
        const sdpa_integers *integers = integers_of(options, row);
        if (!integers || !integers->own) continue;
        if (sdpa_check_overlap(options->module, out, sdpa_name_text(row->name), integers->own) < 0) return -1;
    }
    return 0;
}

void sdpa_options_release(sdpa_options *options) {
    Py_CLEAR(options->out);
    for (int i = 0; i < options->n_given; i++) {
        const sdpa_option *row = &sdpa_option_table[options->given[i]];
        sdpa_integers *integers = integers_of(options, row);
        sdpa_indices *indices = indices_of(options, row);
        if (integers) {
            Py_CLEAR(integers->array);
            Py_CLEAR(integers->own);
        }
        if (indices) Py_CLEAR(indices->array);
    }
}
