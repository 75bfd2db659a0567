/* One call of the attention family: from Python objects to the problem descriptor and back. */
#ifndef SDPA_CALL_H
#define SDPA_CALL_H

#include "binding.h"
#include "options.h"

typedef struct sdpa_call {
    PyObject *module;
    sdpa_options options;
    sdpa_problem problem;

    /* Shape of the output: leading axes, then n_q and d_v. The first n_batch_axes precede the heads; problem.axis[i] is
     * the size of axis axis[i], the others have size 1. */
    int nd, n_batch_axes;
    bool packed; /* arrays of rows are (total, heads, d), here (heads, total, d) */
    npy_intp shape[NPY_MAXDIMS];
    int axis[SDPA_MAX_AXES];

    PyArrayObject *q, *k, *v, *mask, *sinks; /* owned by the options or among those held */
    struct {
        PyArrayObject *array; /* owned */
        const char *name;
    } held[24];
    int n_held;
    sdpa_tensor *present[32]; /* the problem's tensors that are set */
    int n_present;
    bool joins_axes;    /* no other tensor is set, so axes may be joined before the call runs */
    int64_t key_length; /* of all batch entries, where key_lengths is a number */
    int64_t offset;     /* likewise, of the diagonal */
    double work;        /* multiply-adds, roughly, rather too many than too few; decides whether the GIL is released */
} sdpa_call;

/* Reads and checks options and operands, and fills in sizes, dtype, scale, q, k, mask and band of the problem, and v if
 * `values` has it. -1 and an exception on failure. The caller calls sdpa_call_end whatever the result. */
int sdpa_call_begin(sdpa_call *call, PyObject *module, unsigned where, PyObject *const values[N_NAMES]);
void sdpa_call_end(sdpa_call *call);

/* To be called after begin by functions that let heads and queries be chosen: sets problem.heads and problem.queries.
 * The call's axis of heads becomes that of the chosen ones, as in results; own_heads is then called on each result. */
int sdpa_call_choose(sdpa_call *call);
static inline void sdpa_call_own_heads(sdpa_tensor *t) { t->group = 1; }

/* To be called after begin by functions on gradients: reads grad_out, out, lse and grad_lse, and checks that the
 * gradients in `needs` exist. */
int sdpa_call_begin_backward(sdpa_call *call, PyObject *const values[N_NAMES]);

/* Instead of begin, for functions whose operands are not query, key and value: a call without options and tensors. The
 * caller sets nd, the leading axes of shape, and problem.dtype; set_axes then finds heads and batch axes. */
void sdpa_call_empty(sdpa_call *call, PyObject *module);
void sdpa_call_set_axes(sdpa_call *call);

/* Converts an argument and keeps it until the call ends: borrowed reference. */
PyArrayObject *sdpa_call_hold(sdpa_call *call, const char *name, PyObject *value);

/* Points t at `a`, whose shape has been checked; axes along which it is broadcast get stride 0. Its last n_inner axes,
 * at most two, are rows and columns of the sizes `inner`; `heads` says that the axis before them is heads. */
void sdpa_call_view(const sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, sdpa_dtype dtype, int n_inner,
                    const npy_intp *inner, bool heads);

/* Points t at an input of this dtype with the call's leading axes, then `inner` (n_inner sizes). */
int sdpa_call_input(sdpa_call *call, sdpa_tensor *t, const char *name, PyObject *value, int n_inner,
                    const npy_intp *inner, sdpa_dtype dtype);

/* Points t at a tangent of `argument`, whose tensor is `like` and whose shape and dtype the tangent must have. */
int sdpa_call_tangent(sdpa_call *call, sdpa_tensor *t, const char *name, PyObject *value, const char *argument_name,
                      PyArrayObject *argument, const sdpa_tensor *like);

/* An array with the call's leading axes, then `inner`: new, or `given` (borrowed, may be NULL) after its checks. Points
 * t at it. New reference. */
PyArrayObject *sdpa_call_result(sdpa_call *call, sdpa_tensor *t, int n_inner, const npy_intp *inner, sdpa_dtype dtype,
                                PyObject *given);

/* The results of a forward function: out, and lse where it has one (n = 2). New references; -1 may leave the first. */
int sdpa_call_make_results(sdpa_call *call, int n, PyArrayObject **results);

/* Points t at an array of the caller's that has the call's leading axes, then n_rows. */
void sdpa_call_output(sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, npy_intp n_rows, sdpa_dtype dtype);

/* The gradients in `needs`, zero-filled, and set in the problem: query, key, value, attn_mask, sinks. New references,
 * NULL where absent; -1 may leave some. */
enum { N_GRADIENTS = 5 };
int sdpa_call_make_gradients(sdpa_call *call, PyArrayObject *gradients[N_GRADIENTS]);

/* The dtype of lse for operands of `dtype`. */
static inline sdpa_dtype sdpa_lse_dtype(sdpa_dtype dtype) { return dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32; }

/* Runs a driver, without the GIL unless the work is short. -1 and an exception if it fails. */
typedef sdpa_status sdpa_driver(const sdpa_problem *problem);
int sdpa_call_run(sdpa_call *call, sdpa_driver *driver);

/* For drivers that take more than the problem, which `more` points at. */
typedef sdpa_status sdpa_driver_with(const sdpa_problem *problem, const void *more);
int sdpa_call_run_with(sdpa_call *call, sdpa_driver_with *driver, const void *more);

/* Drops the references to n arrays, some of which may be NULL, and sets them to NULL. */
void sdpa_drop(int n, PyArrayObject **arrays);

/* A named tuple of n arrays, with None for NULL. Takes the references. */
PyObject *sdpa_tuple(PyObject *module, enum sdpa_type type, int n, PyArrayObject **arrays);

#endif
