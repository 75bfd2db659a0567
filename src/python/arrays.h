/* Python objects to NumPy arrays, dtypes, and the checks of an `out` argument. */
#ifndef SDPA_ARRAYS_H
#define SDPA_ARRAYS_H

#include "binding.h"

/* Anything that NumPy accepts, as an array of any dtype and layout, without a copy where possible: arrays, __array__,
 * buffers, nested sequences; __dlpack__ for objects that have nothing else. New reference. TypeError for anything else,
 * including arrays on other devices. */
PyArrayObject *sdpa_array(PyObject *module, const char *name, PyObject *value);

/* dtype of an array: bool, the four float types, int64; -1 for any other, without an exception. */
int sdpa_dtype_of(PyObject *module, PyArrayObject *a);
/* Whether sdpa_dtype_of found a dtype that attention computes in. */
static inline bool sdpa_is_float(int dtype) { return dtype >= SDPA_F16 && dtype <= SDPA_F64; }
const char *sdpa_dtype_text(sdpa_dtype dtype);
/* NumPy's type number of `dtype`. SDPA_BF16 has one only after sdpa_dtype_of has returned it. */
int sdpa_type_number(PyObject *module, sdpa_dtype dtype);
static inline bool sdpa_is_swapped(PyArrayObject *a) { return !PyArray_ISNOTSWAPPED(a); }
/* First element; never NULL, not even for an empty array. */
char *sdpa_data(PyArrayObject *a);

/* Checks an `out` argument: an aligned, writable ndarray of this shape and type number in native byte order, no two of
 * whose elements overlap. -1 and an exception otherwise. */
int sdpa_check_out(PyObject *value, const npy_intp *sizes, int n, int type_number);
/* -1 and ValueError if `out` shares memory with `input`. Exact: interleaved views that share no element pass. */
int sdpa_check_overlap(PyObject *module, PyArrayObject *out, const char *name, PyArrayObject *input);

#endif
