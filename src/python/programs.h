/* score_mod and mask_mod: from functions of Python, by sdpa._programs, to programs of a problem, their arguments'
 * tangents and gradients. */
#ifndef SDPA_PYTHON_PROGRAMS_H
#define SDPA_PYTHON_PROGRAMS_H

#include "options.h"

typedef struct sdpa_functions sdpa_functions;

/* Traces the functions that the options name, into *functions, which the caller releases whatever the result; NULL if
 * there are none. The caller's code may run. -1 and an exception on failure. */
int sdpa_functions_prepare(sdpa_functions **functions, const sdpa_options *options);
void sdpa_functions_release(sdpa_functions *functions);

/* The others take NULL for no functions. */

/* Makes plain views of the arrays, as sdpa_settle. Runs no code of the caller's. */
int sdpa_functions_settle(sdpa_functions *functions);

/* Sets the programs of a problem that has its sizes and type. `offsets`: query_offset, int64, or NULL for `offset`. */
int sdpa_functions_set(sdpa_functions *functions, sdpa_problem *p, PyArrayObject *offsets, int64_t offset);

/* ValueError and -1 if `out` shares memory with an array that the functions read, as sdpa_check_overlap; after that. */
int sdpa_functions_check_overlap(sdpa_functions *functions, PyObject *module, PyArrayObject *out);

/* Reads score_args_t or gg_score_args, after that. */
int sdpa_functions_read_tangents(sdpa_functions *functions, const sdpa_options *options);

/* The gradients of score_args: a tuple, whose arrays sdpa_functions_finish fills; new reference. NULL with an exception
 * if there are no arguments. */
PyObject *sdpa_functions_gradients(sdpa_functions *functions);

/* After a run: IndexError and -1 for an index out of range; else fills the gradients. */
int sdpa_functions_finish(sdpa_functions *functions);

#endif
