/* The wording of errors about arrays: "name: expected this, got that", with shapes and dtypes. */
#ifndef SDPA_ERRORS_H
#define SDPA_ERRORS_H

#include "binding.h"

/* Writes "(2, 8, 128)" into text and returns text; `lead` precedes the sizes, as in "(..., 5, 8)". */
enum { SDPA_SHAPE_SIZE = 1400 };
const char *sdpa_shape_text(char text[SDPA_SHAPE_SIZE], const char *lead, const npy_intp *sizes, int n);

/* ValueError and TypeError that end in the array's shape and dtype; `expected` is a format for PyUnicode_FromFormat.
 * Both return -1. */
int sdpa_raise_shape(const char *name, PyArrayObject *got, const char *expected, ...);
int sdpa_raise_dtype(const char *name, PyArrayObject *got, const char *expected, ...);

/* Appends this text, the remedy, to the message of the pending exception. Returns -1. */
int sdpa_add_remedy(const char *remedy, ...);

/* sdpa_raise_shape for an array that should have rows and has fewer than two axes. */
int sdpa_raise_rows(const char *name, PyArrayObject *got, const char *expected);

#endif
