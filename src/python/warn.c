#include "warn.h"

#include <string.h>

#include "arrays.h"

int sdpa_warn_with(PyObject *message, PyObject *category) {
    /* The line is found in Python. */
    PyObject *module = PyImport_ImportModule("sdpa._warnings");
    PyObject *result = module ? PyObject_CallMethod(module, "warn", "OO", message, category) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static int warn(const char *text) {
    PyObject *message = PyUnicode_FromString(text);
    const int result = message ? sdpa_warn_with(message, PyExc_UserWarning) : -1;
    Py_XDECREF(message);
    return result;
}

/* ------------------------------------------------------------------------------------ masks of numbers */

/* The bits of 1 in a floating type, in the byte order of the array. */
static uint64_t bits_of_one(sdpa_dtype dtype, bool swapped) {
    static const uint64_t bits[] = {
        [SDPA_F16] = 0x3c00, [SDPA_BF16] = 0x3f80, [SDPA_F32] = 0x3f800000, [SDPA_F64] = 0x3ff0000000000000};
    return swapped ? __builtin_bswap64(bits[dtype]) >> (64 - 8 * sdpa_size_of(dtype)) : bits[dtype];
}

enum { CHUNK = 256 }; /* elements between two looks at what was found */

/* What the elements of an array are. */
typedef struct contents {
    bool zeros, ones, others;
} contents;

/* Adds what is found in a row, up to the chunk with the first other element. `size`: bytes of an element. */
__attribute__((always_inline)) static inline void scan(contents *found, const char *data, npy_intp n, npy_intp stride,
                                                       size_t size, uint64_t one) {
    for (npy_intp i = 0; i < n && !found->others; i += CHUNK) {
        const npy_intp end = n - i < CHUNK ? n : i + CHUNK;
        int zeros = 0, ones = 0, others = 0;
#pragma omp simd reduction(| : zeros, ones, others)
        for (npy_intp j = i; j < end; j++) {
            uint64_t x = 0;
            memcpy(&x, data + j * stride, size); /* to the low bytes */
            zeros |= x == 0;
            ones |= x == one;
            others |= (x != 0) & (x != one);
        }
        found->zeros |= zeros;
        found->ones |= ones;
        found->others |= others;
    }
}

static void scan_row(contents *found, const char *data, npy_intp n, npy_intp stride, sdpa_dtype dtype, uint64_t one) {
    const int64_t size = sdpa_size_of(dtype);
    if (size == 4 && stride == 4) {
        scan(found, data, n, 4, 4, one);
    } else if (size == 4) {
        scan(found, data, n, stride, 4, one);
    } else if (size == 2) {
        scan(found, data, n, stride, 2, one);
    } else {
        scan(found, data, n, stride, 8, one);
    }
}

/* The size of an axis in memory: 1 if broadcasting repeats one element. */
static npy_intp size_in_memory(PyArrayObject *a, int axis) {
    return PyArray_STRIDE(a, axis) ? PyArray_DIM(a, axis) : 1;
}

/* Whether a floating array holds zeros and ones, and nothing else. Ends at the first other element, and reads elements
 * that broadcasting repeats once. */
static bool is_zeros_and_ones(PyArrayObject *a, sdpa_dtype dtype) {
    const uint64_t one = bits_of_one(dtype, sdpa_is_swapped(a));
    const int nd = PyArray_NDIM(a);
    npy_intp index[NPY_MAXDIMS] = {0};
    contents found = {false, false, false};
    const char *data = PyArray_DATA(a);
    if (PyArray_SIZE(a) == 0 || nd == 0) return false;
    for (int axis = nd - 1; axis >= 0;) {
        scan_row(&found, data, size_in_memory(a, nd - 1), PyArray_STRIDE(a, nd - 1), dtype, one);
        if (found.others) return false;
        for (axis = nd - 2; axis >= 0; axis--) {
            data += PyArray_STRIDE(a, axis);
            if (++index[axis] < size_in_memory(a, axis)) break;
            data -= index[axis] * PyArray_STRIDE(a, axis);
            index[axis] = 0;
        }
    }
    return found.zeros && found.ones;
}

/* ------------------------------------------------------------------------------------ causal masks */

/* The number of rows of an operand. */
static npy_intp rows_of(PyArrayObject *a) { return PyArray_NDIM(a) < 2 ? 0 : PyArray_DIM(a, PyArray_NDIM(a) - 2); }

/* The numbers are not checked yet: their difference may wrap. */
static npy_intp sequence_rows(const sdpa_integers *cu, npy_intp s) {
    const int64_t *data = PyArray_DATA(cu->array);
    return (npy_intp)((uint64_t)data[s + 1] - (uint64_t)data[s]);
}

/* Whether key_lengths leave more than one key to an entry of the batch. */
static bool have_keys(const sdpa_integers *lengths) {
    if (!lengths->array) return !lengths->given || lengths->value > 1;
    const int64_t *data = PyArray_DATA(lengths->array);
    for (npy_intp i = 0; i < PyArray_SIZE(lengths->array); i++) {
        if (data[i] > 1) return true;
    }
    return false;
}

/* Whether there is a single query, and more than one key, in the call or in a sequence of it. */
static bool has_one_query(const sdpa_options *options, PyArrayObject *const *arrays) {
    const sdpa_integers *q = &options->cu_seqlens_q, *k = &options->cu_seqlens_k;
    if (!q->given && !k->given) {
        return rows_of(arrays[NAME_query]) == 1 && rows_of(arrays[NAME_key]) > 1 && have_keys(&options->key_lengths);
    }
    const npy_intp n = q->array && k->array ? PyArray_SIZE(q->array) - 1 : 0;
    if (n < 1 || PyArray_SIZE(k->array) != n + 1) return false; /* refused later */
    for (npy_intp s = 0; s < n; s++) {
        if (sequence_rows(q, s) == 1 && sequence_rows(k, s) > 1) return true;
    }
    return false;
}

int sdpa_warn(PyObject *module, const sdpa_options *options, PyArrayObject *const *arrays) {
    PyArrayObject *mask = arrays[NAME_attn_mask];
    if (options->where == IN(TORCH)) return 0; /* PyTorch's signature keeps its meaning */
    const int dtype = mask ? sdpa_dtype_of(module, mask) : -1;
    if (sdpa_is_float(dtype) && is_zeros_and_ones(mask, (sdpa_dtype)dtype) &&
        warn("attn_mask: expected a bias, which is added to the scores, got a floating array of zeros and ones; if 1 "
             "means to attend, pass attn_mask != 0") < 0) {
        return -1;
    }
    const bool may_differ = options->causal && !options->is_named && !options->query_offset.given;
    if (may_differ && has_one_query(options, arrays) &&
        warn("is_causal: True lets one query see key 0 alone, whatever the number of keys; if it is the last position, "
             "pass is_causal=\"lower_right\" or query_offset=; \"upper_left\" means what True does and does not warn") <
            0) {
        return -1;
    }
    return 0;
}
