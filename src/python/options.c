#include "options.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Beyond it a bound of the window excludes nothing; offset + bound + index stays within int64. */
#define WIDEST (INT64_C(1) << 62)
#define LARGEST_OFFSET (INT64_C(1) << 60)

static int read_array(PyObject *module, const char *name, PyObject *value, PyArrayObject **result) {
    *result = sdpa_array(module, name, value);
    return *result ? 0 : -1;
}

static int read_mask(PyObject *module, sdpa_options *options, PyObject *value) {
    return read_array(module, "attn_mask", value, &options->mask);
}

static int read_dropout(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    double *p = &options->dropout_p;
    if (sdpa_read_finite("dropout_p", value, p) < 0) return -1;
    if (*p >= 0 && *p <= 1) return 0;
    PyErr_Format(PyExc_ValueError, "dropout_p: expected a probability from 0 to 1, got %.200R", value);
    return -1;
}

static int read_softcap(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    if (sdpa_read_finite("softcap", value, &options->softcap) < 0) return -1;
    if (options->softcap > 0) return 0;
    PyErr_Format(PyExc_ValueError, "softcap: expected a number above 0, or None for no cap, got %.200R", value);
    return -1;
}

static int read_sinks(PyObject *module, sdpa_options *options, PyObject *value) {
    return read_array(module, "sinks", value, &options->sinks);
}

static int read_slopes(PyObject *module, sdpa_options *options, PyObject *value) {
    return read_array(module, "alibi_slopes", value, &options->alibi_slopes);
}

static int read_mask_t(PyObject *module, sdpa_options *options, PyObject *value) {
    return read_array(module, "attn_mask_t", value, &options->mask_t);
}

static int read_sinks_t(PyObject *module, sdpa_options *options, PyObject *value) {
    return read_array(module, "sinks_t", value, &options->sinks_t);
}

static int read_gg_mask(PyObject *module, sdpa_options *options, PyObject *value) {
    return read_array(module, "gg_attn_mask", value, &options->mask_t);
}

static int read_gg_sinks(PyObject *module, sdpa_options *options, PyObject *value) {
    return read_array(module, "gg_sinks", value, &options->sinks_t);
}

/* An int is the seed. A Generator gives one of 64 bits, where nobody needs to know it afterwards. */
static int read_rng(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    options->has_seed = true;
    const bool takes_generator = options->where & (IN_ATTENTION | IN_ADDITIVE);
    /* numpy.random itself has the attributes of a Generator, too. */
    PyObject *bytes = takes_generator && !PyModule_Check(value) && PyObject_HasAttrString(value, "bit_generator")
                          ? PyObject_CallMethod(value, "bytes", "i", (int)sizeof options->seed)
                          : NULL;
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
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "rng: expected an int from 0 to 2^64 - 1%s, got %.200R",
                     takes_generator ? ", a numpy.random.Generator or None" : " or None", value);
        return -1;
    }
    options->seed = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (!PyErr_Occurred()) return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "rng: expected an int from 0 to 2^64 - 1, got %.200R", value);
    return -1;
}

static int read_causal(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    if (!PyUnicode_Check(value)) {
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
    PyErr_Format(PyUnicode_Check(value) ? PyExc_ValueError : PyExc_TypeError,
                 "is_causal: expected False, True, 'upper_left' or 'lower_right', got %.200R", value);
    return -1;
}

static int read_scale(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    options->has_scale = true;
    return sdpa_read_finite("scale", value, &options->scale);
}

static int read_gqa(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    return sdpa_read_bool("enable_gqa", value, &options->enable_gqa);
}

/* One side of the window; None is no bound. */
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

static int read_window(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    if (!(PyTuple_Check(value) || PyList_Check(value)) || PySequence_Size(value) != 2) {
        PyErr_Format(PyExc_TypeError, "window: expected a pair (left, right), got %.200R", value);
        return -1;
    }
    PyObject *left = PySequence_GetItem(value, 0), *right = PySequence_GetItem(value, 1);
    int failed = !left || !right || read_bound(left, value, &options->has_left, &options->left) < 0 ||
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
    if (!PyArray_ISINTEGER(array)) {
        PyErr_Format(PyExc_TypeError, "%s: expected integers, got %S", name, PyArray_DESCR(array));
    } else {
        /* A copy, since it is checked here and used while other threads of Python run. What does not fit wraps around
         * to a negative number. */
        bool is_unsigned = PyArray_ISUNSIGNED(array);
        result->array = (PyArrayObject *)PyArray_FromArray(
            array, PyArray_DescrFromType(NPY_INT64), NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY | NPY_ARRAY_FORCECAST);
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
    Py_DECREF(array);
    if (PyErr_Occurred()) return -1;
    if (PyArray_NDIM(result->array) == 0) {
        result->value = *(const int64_t *)PyArray_DATA(result->array);
        Py_DECREF(result->array);
        result->array = NULL;
    }
    return 0;
}

static int read_lengths(PyObject *module, sdpa_options *options, PyObject *value) {
    return read_integers(module, "key_lengths", value, &options->key_lengths);
}

static int read_offset(PyObject *module, sdpa_options *options, PyObject *value) {
    sdpa_integers *offset = &options->query_offset;
    if (read_integers(module, "query_offset", value, offset) < 0) return -1;
    const int64_t *data = offset->array ? PyArray_DATA(offset->array) : &offset->value;
    for (npy_intp i = 0, n = offset->array ? PyArray_SIZE(offset->array) : 1; i < n; i++) {
        if (data[i] >= -LARGEST_OFFSET && data[i] <= LARGEST_OFFSET) continue;
        PyErr_Format(PyExc_ValueError, "query_offset: expected integers from -2^60 to 2^60, got %lld",
                     (long long)data[i]);
        return -1;
    }
    return 0;
}

static int read_workers(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    return sdpa_read_workers(value, &options->n_workers);
}

static int read_out(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    options->out = value;
    return 0;
}

static int read_grad_lse(PyObject *module, sdpa_options *options, PyObject *value) {
    return read_array(module, "grad_lse", value, &options->grad_lse);
}

static int read_needs(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    static const struct {
        const char *name;
        unsigned bit, where;
    } inputs[] = {
        {"query", NEEDS_QUERY, IN_ALL},           {"key", NEEDS_KEY, IN_ALL},
        {"value", NEEDS_VALUE, IN_ALL},           {"attn_mask", NEEDS_MASK, IN_ALL},
        {"sinks", NEEDS_SINKS, IN_ALL},           {"grad_out", NEEDS_GRAD_OUT, IN_DOUBLE},
        {"w_query", NEEDS_W_QUERY, IN_ADDITIVES}, {"w_key", NEEDS_W_KEY, IN_ADDITIVES},
        {"w_score", NEEDS_W_SCORE, IN_ADDITIVES}, {"bias", NEEDS_BIAS, IN_ADDITIVES},
    };
    enum { N_INPUTS = sizeof inputs / sizeof *inputs };
    options->needs = 0;
    PyObject *fast = PyUnicode_Check(value) ? NULL : PySequence_Tuple(value);
    if (!fast) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Format(PyExc_TypeError, "needs: expected a sequence of names such as ('query', 'key'), got %.200R",
                     value);
        return -1;
    }
    for (Py_ssize_t i = 0, n = PyTuple_Size(fast); i < n; i++) {
        PyObject *name = PyTuple_GetItem(fast, i);
        unsigned found = 0;
        for (int k = 0; k < N_INPUTS && PyUnicode_Check(name); k++) {
            if (!(inputs[k].where & options->where)) continue;
            if (PyUnicode_CompareWithASCIIString(name, inputs[k].name) == 0) found = inputs[k].bit;
        }
        if (!found) {
            PyErr_Format(PyExc_ValueError,
                         "needs: expected names among 'query', 'key', 'value', 'attn_mask', 'sinks'%s, got %.200R",
                         options->where == IN_DOUBLE     ? ", 'grad_out'"
                         : options->where & IN_ADDITIVES ? ", 'w_query', 'w_key', 'w_score', 'bias'"
                                                         : "",
                         name);
            Py_DECREF(fast);
            return -1;
        }
        options->needs |= found;
    }
    Py_DECREF(fast);
    return 0;
}

/* Read with the operands. */
static int read_bias(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
    (void)options;
    (void)value;
    return 0;
}

static int read_stage(PyObject *module, sdpa_options *options, PyObject *value) {
    (void)module;
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

#define INTEGERS "int | ArrayLike | None"
const sdpa_option sdpa_option_table[] = {
    {NAME_bias, IN_ADDITIVE | IN_ADDITIVE_FORWARD, false, true, "None", "ArrayLike | None",
     "array_like, (h,), optional\n"
     "Of query's dtype; None is zero.",
     read_bias},
    {NAME_attn_mask, IN_ALL, false, true, "None", "ArrayLike | None",
     "array_like, broadcastable to (..., heads, Lq, Lk), optional\n"
     "Boolean: True = attend. Of query's dtype or float32: added to the scaled scores, and -inf\n"
     "masks.",
     read_mask},
    {NAME_dropout_p, IN_ALL, false, false, "0.0", "float",
     "float, default 0\n"
     "Probability with which a weight becomes 0; the others are multiplied by 1 / (1 - dropout_p),\n"
     "and 1 makes all 0. Which ones, is a function of rng, batch entry, query head, i and j alone.",
     read_dropout},
    {NAME_is_causal, IN_ALL, false, false, "False", "bool | Literal['upper_left', 'lower_right']",
     "bool or {\"upper_left\", \"lower_right\"}, default False\n"
     "Query i sees the keys j <= i + query_offset. True is \"upper_left\", with offset 0 unless given;\n"
     "\"lower_right\": the last query meets the last key, that is offset Lk - Lq (key_lengths - Lq\n"
     "where those are given).",
     read_causal},
    {NAME_scale, IN_DOT, true, true, "None", "float | None",
     "float, optional\n"
     "Factor of the scores, any finite number; 1 / sqrt(d_k) if None (1 where d_k is 0).",
     read_scale},
    {NAME_scale, IN_ADDITIVES, true, true, "1.0", "float | None",
     "float, default 1\n"
     "Factor of the scores, any finite number; None is 1.",
     read_scale},
    {NAME_enable_gqa, IN_ALL, true, false, "False", "bool",
     "bool, default False\n"
     "Let query have a multiple of the heads of key and value; each of those serves as many\n"
     "consecutive query heads.",
     read_gqa},
    {NAME_softcap, IN_ALL & ~IN_TORCH, true, true, "None", "float | None",
     "float, optional\n"
     "Scaled scores s become softcap * tanh(s / softcap), before anything is added to them; above 0.",
     read_softcap},
    {NAME_window, IN_ALL & ~IN_TORCH, true, true, "None", "tuple[int | None, int | None] | None",
     "(left, right), optional\n"
     "Query i sees the keys i + offset - left <= j <= i + offset + right, offset as for is_causal;\n"
     "None on a side is no bound.",
     read_window},
    {NAME_sinks, IN_ALL & ~IN_TORCH, true, true, "None", "ArrayLike | None",
     "array_like of float, broadcastable to (..., heads), optional\n"
     "One more logit per head in the denominator, as it stands, without a value: weights then sum to\n"
     "less than 1, and lse includes it.",
     read_sinks},
    {NAME_alibi_slopes, IN_ALL & ~IN_TORCH, true, true, "None", "ArrayLike | None",
     "array_like of float, broadcastable to (..., heads), optional\n"
     "-slope * abs(i + offset - j) is added to the scores (Press et al., 2022), offset as for\n"
     "is_causal.",
     read_slopes},
    {NAME_key_lengths, IN_ALL & ~IN_TORCH, true, true, "None", INTEGERS,
     "int or array_like of int, broadcastable to the leading axes without heads, optional\n"
     "Only the first key_lengths of the Lk keys are there.",
     read_lengths},
    {NAME_query_offset, IN_ALL & ~IN_TORCH, true, true, "None", INTEGERS,
     "int or array_like of int, broadcastable to the leading axes without heads, optional\n"
     "Position of query 0 among the keys, for is_causal, window and alibi_slopes; may be negative.",
     read_offset},
    {NAME_rng, IN_ALL & ~IN_TORCH, true, true, "None", "int | np.random.Generator | None",
     "int from 0 to 2^64 - 1, optional\n"
     "Seed of dropout (Philox4x32-10: Salmon et al., 2011). None is fresh entropy, which derivatives\n"
     "cannot repeat and do not take; `attention` takes a numpy.random.Generator, too.",
     read_rng},
    {NAME_workers, IN_ALL & ~IN_TORCH, true, true, "None", "int | None",
     "int, optional\n"
     "Threads to use: None = `get_num_threads()`, -1 = all CPUs this process may use. The result is\n"
     "the same, bit for bit, for any number.",
     read_workers},
    {NAME_out, IN_ATTENTION | IN_FORWARD | IN_ADDITIVE | IN_ADDITIVE_FORWARD, true, true, "None", "NDArray[Any] | None",
     "ndarray, (..., heads, Lq, d_v), optional\n"
     "Where the output is written: of query's dtype, any strides, sharing no memory with an input.",
     read_out},
    {NAME_stage, IN_WEIGHTS, true, false, "\"weights\"", "Literal['scores', 'capped', 'biased', 'weights']",
     "{\"scores\", \"capped\", \"biased\", \"weights\"}, default \"weights\"\n"
     "scale query key^T; that with softcap; that with the additive mask and ALiBi, -inf wherever any\n"
     "mask forbids; its softmax, after dropout.",
     read_stage},
    {NAME_attn_mask_t, IN_JVP, true, true, "None", "ArrayLike | None",
     "array_like, optional\n"
     "Tangent of an additive attn_mask, of its shape and dtype; None is zero.",
     read_mask_t},
    {NAME_sinks_t, IN_JVP, true, true, "None", "ArrayLike | None",
     "array_like, optional\n"
     "Tangent of sinks, of their shape and dtype; None is zero.",
     read_sinks_t},
    {NAME_gg_attn_mask, IN_DOUBLE, true, true, "None", "ArrayLike | None",
     "array_like, optional\n"
     "Gradient with respect to the gradient of attn_mask, of its shape and dtype; None is zero.",
     read_gg_mask},
    {NAME_gg_sinks, IN_DOUBLE, true, true, "None", "ArrayLike | None",
     "array_like, optional\n"
     "Gradient with respect to the gradient of sinks, of their shape and dtype; None is zero.",
     read_gg_sinks},
    {NAME_grad_lse, IN_BACKWARD | IN_DOUBLE | IN_ADDITIVE_BACKWARD, true, true, "None", "ArrayLike | None",
     "array_like, (..., heads, Lq), optional\n"
     "Gradient with respect to lse, of its dtype; None is zero.",
     read_grad_lse},
    {NAME_needs, IN_BACKWARD, true, false, "(\"query\", \"key\", \"value\")", "Iterable[str]",
     "sequence of {\"query\", \"key\", \"value\", \"attn_mask\", \"sinks\"}\n"
     "The gradients to compute; nothing else is computed.",
     read_needs},
    {NAME_needs, IN_DOUBLE, true, false, "(\"grad_out\", \"query\", \"key\", \"value\")", "Iterable[str]",
     "sequence of {\"grad_out\", \"query\", \"key\", \"value\", \"attn_mask\", \"sinks\"}\n"
     "The derivatives to compute.",
     read_needs},
    {NAME_needs, IN_ADDITIVE_BACKWARD, true, false,
     "(\"query\", \"key\", \"value\", \"w_query\", \"w_key\", \"w_score\", \"bias\")", "Iterable[str]",
     "sequence of names of arguments\n"
     "The gradients to compute: those of the default, \"attn_mask\" or \"sinks\"; bias has one where it\n"
     "is given.",
     read_needs},
};
#undef INTEGERS
const int sdpa_n_options = sizeof sdpa_option_table / sizeof *sdpa_option_table;

int sdpa_options_read(PyObject *module, sdpa_options *options, unsigned where, PyObject *const values[N_NAMES]) {
    options->needs = NEEDS_QUERY | NEEDS_KEY | NEEDS_VALUE;
    if (where == IN_DOUBLE) options->needs |= NEEDS_GRAD_OUT;
    if (where == IN_ADDITIVE_BACKWARD) options->needs |= NEEDS_W_QUERY | NEEDS_W_KEY | NEEDS_W_SCORE | NEEDS_BIAS;
    options->where = where;
    options->stage = SDPA_WEIGHTS;
    for (int i = 0; i < sdpa_n_options; i++) {
        const sdpa_option *row = &sdpa_option_table[i];
        PyObject *value = values[row->name];
        if (!value || !(row->where & where) || (row->has_none && value == Py_None)) continue;
        if (row->read(module, options, value) < 0) return -1;
    }
    if (options->lower_right && options->query_offset.given) {
        PyErr_SetString(PyExc_ValueError, "query_offset: expected None with is_causal='lower_right', which sets the "
                                          "offset itself");
        return -1;
    }
    if (options->dropout_p == 0) return 0;
    if (where == IN_STATISTICS) {
        PyErr_SetString(PyExc_ValueError, "dropout_p: expected 0, since statistics are of the weights before dropout");
        return -1;
    }
    if (options->has_seed) return 0;
    if (where & (IN_BACKWARD | IN_JVP | IN_DOUBLE | IN_ADDITIVE_BACKWARD)) {
        PyErr_SetString(PyExc_ValueError,
                        "rng: expected the int of the forward call, since dropout_p is not 0, got None");
        return -1;
    }
    if (getentropy(&options->seed, sizeof options->seed) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    return 0;
}

void sdpa_options_release(sdpa_options *options) {
    Py_XDECREF((PyObject *)options->mask);
    Py_XDECREF((PyObject *)options->grad_lse);
    Py_XDECREF((PyObject *)options->sinks);
    Py_XDECREF((PyObject *)options->alibi_slopes);
    Py_XDECREF((PyObject *)options->mask_t);
    Py_XDECREF((PyObject *)options->sinks_t);
    Py_XDECREF((PyObject *)options->key_lengths.array);
    Py_XDECREF((PyObject *)options->query_offset.array);
}

/* ------------------------------------------------------------------------------------ signatures and docstrings */

/* Text that grows; once memory is short it stays as it is and `failed`. */
typedef struct text {
    char *p;
    size_t used, size;
    bool failed;
} text;

static void add(text *t, const char *s, size_t n) {
    if (t->used + n + 1 > t->size) {
        size_t size = 2 * (t->used + n + 1);
        char *p = PyMem_Realloc(t->p, size);
        if (!p) {
            t->failed = true;
            return;
        }
        t->p = p;
        t->size = size;
    }
    memcpy(t->p + t->used, s, n);
    t->used += n;
    t->p[t->used] = 0;
}

static void add_text(text *t, const char *s) { add(t, s, strlen(s)); }

static void add_indented(text *t, const char *lines) {
    for (const char *end; *lines; lines = *end ? end + 1 : end) {
        end = strchr(lines, '\n');
        if (!end) end = lines + strlen(lines);
        add_text(t, "    ");
        add(t, lines, (size_t)(end - lines));
        add_text(t, "\n");
    }
}

static void add_section(text *t, const char *title, const char *body) {
    add_text(t, "\n");
    add_text(t, title);
    add_text(t, "\n");
    for (size_t i = strlen(title); i > 0; i--) add_text(t, "-");
    add_text(t, "\n");
    add_text(t, body);
}

/* clang-format off */
static const char raises[] =
    "TypeError\n"
    "    An argument of a dtype or type that is not taken, or an unknown one.\n"
    "ValueError\n"
    "    Shapes that do not fit, or a value that is not legal.\n"
    "MemoryError\n"
    "    No memory for the result or for the blocks of the threads.\n"
    "\n"
    "All but the last are raised before anything is computed or written; the message names the argument.\n";
/* clang-format on */

PyObject *sdpa_entry_compose(const sdpa_entry *entry, sdpa_signature *signature) {
    *signature = (sdpa_signature){.function = entry->name, .n_required = entry->n_operands};
    text t = {0};
    add_text(&t, entry->name);
    add_text(&t, "($module");
    for (int i = 0; i < entry->n_operands; i++) {
        signature->names[signature->n++] = entry->operands[i];
        add_text(&t, ", ");
        add_text(&t, sdpa_name_text(entry->operands[i]));
    }
    bool keyword_only = false;
    for (int i = 0; i < sdpa_n_options; i++) {
        const sdpa_option *row = &sdpa_option_table[i];
        if (!(row->where & entry->where)) continue;
        const bool by_keyword =
            row->keyword_only || (row->where & entry->where & IN_ADDITIVES && row->name != NAME_bias);
        if (by_keyword && !keyword_only) {
            keyword_only = true;
            signature->n_positional = signature->n;
            add_text(&t, ", *");
        }
        signature->names[signature->n++] = (unsigned char)row->name;
        add_text(&t, ", ");
        add_text(&t, sdpa_name_text(row->name));
        add_text(&t, "=");
        add_text(&t, row->default_);
    }
    if (!keyword_only) signature->n_positional = signature->n;
    add_text(&t, ")\n--\n\n");
    add_text(&t, entry->summary);
    add_text(&t, "\n\n");
    add_text(&t, entry->formula);
    add_section(&t, "Parameters", entry->operands_doc);
    for (int i = 0; i < sdpa_n_options; i++) {
        const sdpa_option *row = &sdpa_option_table[i];
        if (!(row->where & entry->where)) continue;
        const char *type_end = strchr(row->doc, '\n');
        add_text(&t, sdpa_name_text(row->name));
        add_text(&t, " : ");
        add(&t, row->doc, (size_t)(type_end + 1 - row->doc));
        add_indented(&t, type_end + 1);
    }
    add_section(&t, "Returns", entry->results_doc);
    add_section(&t, "Raises", raises);
    add_section(&t, "Examples", entry->example);
    PyObject *doc = t.failed ? PyErr_NoMemory() : PyUnicode_FromString(t.p);
    PyMem_Free(t.p);
    return doc;
}

PyObject *sdpa_options_describe(void) {
    PyObject *table = PyTuple_New(sdpa_n_options);
    for (int i = 0; table && i < sdpa_n_options; i++) {
        const sdpa_option *row = &sdpa_option_table[i];
        PyObject *item = Py_BuildValue("(sssNI)", sdpa_name_text(row->name), row->default_, row->annotation,
                                       PyBool_FromLong(row->keyword_only), row->where);
        if (!item || PyTuple_SetItem(table, i, item) < 0) Py_CLEAR(table);
    }
    return table;
}
