/* The inputs of a call of the attention family besides its operands, its results, and running it. */
#ifndef SDPA_RESULTS_H
#define SDPA_RESULTS_H

#include "call.h"

/* For functions on gradients, after begin: reads grad_out, out, lse and grad_lse, and checks that the gradients in
 * `needs` exist. */
int sdpa_call_begin_backward(sdpa_call *call);

/* Points the tangents of the inputs at the arguments that hold them: those of forward mode, name_t, or gradients of
 * gradients, gg_name. Those that are absent stay so. */
int sdpa_call_read_tangents(sdpa_call *call, bool of_gradients);

/* An array with the call's leading axes, then `inner`: new, or `given` (borrowed, may be NULL) after its checks. Points
 * t at it. New reference. */
PyArrayObject *sdpa_call_result(sdpa_call *call, sdpa_tensor *t, int n_inner, const npy_intp *inner, sdpa_dtype dtype,
                                PyArrayObject *given);

/* The results of a forward function: out and, if n is 2, lse. New references; a failure (-1) may leave the first. */
int sdpa_call_make_results(sdpa_call *call, int n, PyArrayObject **results);

/* Points t at an array of the caller's that has the call's leading axes, then n_rows. */
void sdpa_call_output(sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, npy_intp n_rows, sdpa_dtype dtype);

/* Makes the gradients in `needs` of SDPA_DIFFERENTIABLE and sets them in the problem. Those that the driver does not
 * clear itself are zero-filled. New references, NULL where absent; a failure (-1) may leave some. */
int sdpa_call_make_gradients(sdpa_call *call, bool driver_clears, PyArrayObject *gradients[N_GRADIENTS]);

/* The dtype of lse for operands of `dtype`. */
static inline sdpa_dtype sdpa_lse_dtype(sdpa_dtype dtype) { return dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32; }

/* Runs a driver, without the GIL unless the work is short. -1 and an exception if it fails. */
typedef sdpa_status sdpa_driver(const sdpa_problem *problem);
int sdpa_call_run(sdpa_call *call, sdpa_driver *driver);

/* A driver with a second argument, which `more` points at. */
typedef sdpa_status sdpa_driver_with(const sdpa_problem *problem, const void *more);
int sdpa_call_run_with(sdpa_call *call, sdpa_driver_with *driver, const void *more);

/* Drops the references to n arrays, some of which may be NULL, and sets them to NULL. */
void sdpa_drop(int n, PyArrayObject **arrays);

/* A named tuple of n arrays, NO_TYPE: a plain one, with None for NULL. Takes the references. */
PyObject *sdpa_tuple(PyObject *module, enum sdpa_type type, int n, PyArrayObject **arrays);

#endif
