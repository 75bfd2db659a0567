/* Python objects to NumPy arrays, dtypes, and the checks of an `out` argument. */
#ifndef SDPA_ARRAYS_H
#define SDPA_ARRAYS_H

#include "binding.h"

/* Anything that NumPy accepts, as an array of any dtype and layout, without a copy where possible: arrays, __array__,
 * buffers, nested sequences; __dlpack__ for objects that have nothing else. New reference. TypeError for anything else,
 * including arrays on other devices and arrays whose mask or unit would be dropped.
 *
 * This may run code of the caller's, which may change the shape or the memory of any array, also of those converted
 * before. So a function converts all its arguments, then calls sdpa_settle on each array, and only then looks at one. The look
 * for shared memory of `out` runs Python, too. */
PyArrayObject *sdpa_array(PyObject *module, const char *name, PyObject *value);

/* Whether the object has this attribute; -1 and the exception of a lookup that fails otherwise. */
int sdpa_has_attribute(PyObject *value, const char *name);

/* Whether an argument that may be a number or an array is an array; -1 and an exception if its own code raises. */
int sdpa_is_array(PyObject *value);

/* TypeError and -1 for an array whose mask or unit would be dropped. This may run code of the caller's. */
int sdpa_check_plain(const char *name, PyObject *value);

/* Replaces an instance of a subclass, whose methods Python code may override, by a plain view; with `view` any array,
 * since code of the caller's may still run before its shape and strides are read. Runs no such code. *array may be NULL.
 * -1 and an exception on failure, which leaves it. */
int sdpa_settle(PyArrayObject **array, bool view);

/* dtype of an array: bool, the four float types, int64; -1 for any other, without an exception. */
int sdpa_dtype_of(PyObject *module, PyArrayObject *a);
/* Whether sdpa_dtype_of found a dtype that attention computes in. */
static inline bool sdpa_is_float(int dtype) { return dtype >= SDPA_F16 && dtype <= SDPA_F64; }
/* Whether its elements are integers or floating numbers, of any size. */
bool sdpa_is_real(PyObject *module, PyArrayObject *a);
/* For an array of another dtype than is wanted: appends the conversion to `type`, an expression, if it holds real
 * numbers. Returns -1. */
int sdpa_suggest_type(PyObject *module, const char *name, PyArrayObject *a, const char *type);
/* For arrays that should have one dtype: appends the conversion, which is that of a float64 array. Returns -1. */
int sdpa_suggest_common_type(const char *name, PyArrayObject *a, const char *other_name, PyArrayObject *other);
const char *sdpa_dtype_text(sdpa_dtype dtype);
/* NumPy's type number of `dtype`. SDPA_BF16 has one only after sdpa_dtype_of has returned it. */
int sdpa_type_number(PyObject *module, sdpa_dtype dtype);
static inline bool sdpa_is_swapped(PyArrayObject *a) { return !PyArray_ISNOTSWAPPED(a); }
/* Whether these sizes, with as many of 1 behind the first `lead` that there are n, broadcast to `shape`. */
bool sdpa_broadcast_behind(const npy_intp *sizes, int n_sizes, int lead, const npy_intp *shape, int n);
/* Whether `a` broadcasts to `shape`, which has n axes. */
static inline bool sdpa_broadcasts_to(PyArrayObject *a, const npy_intp *shape, int n) {
    return sdpa_broadcast_behind(PyArray_DIMS(a), PyArray_NDIM(a), 0, shape, n);
}
/* For an array that does not broadcast to `shape`: appends the index that adds axes behind its first ones, if it then
 * does. Returns the number of those first axes, or 0 if nothing helps. */
int sdpa_suggest_axes(const char *name, PyArrayObject *a, const npy_intp *shape, int n);
/* First element; never NULL, not even for an empty array. */
char *sdpa_data(PyArrayObject *a);

/* Reads an `out` argument: new reference in *out, or NULL for None and an absent one. -1 and an exception for what is no
 * array. To be called while arguments are converted. */
int sdpa_read_out(PyObject *value, PyArrayObject **out);
/* Checks `out` after all arguments have been converted: an aligned, writable array of this shape and type number in
 * native byte order, no two of whose elements overlap. -1 and an exception otherwise. */
int sdpa_check_out(PyArrayObject *out, const npy_intp *sizes, int n, int type_number);
/* -1 and ValueError if `out` shares memory with `input`. Exact: interleaved views that share no element pass. */
int sdpa_check_overlap(PyObject *module, PyArrayObject *out, const char *name, PyArrayObject *input);

#endif
