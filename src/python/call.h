/* One call of the attention family: from Python objects to the problem descriptor and back. */
#ifndef SDPA_CALL_H
#define SDPA_CALL_H

#include "binding.h"
#include "options.h"
#include "programs.h"

enum {
#define SDPA_COUNT(name, rows, columns) TENSOR_##name,
    SDPA_TENSORS(SDPA_COUNT)
#undef SDPA_COUNT
        N_TENSORS
};
enum { FEW_AXES = 4 }; /* batch axes of almost every call */

typedef struct sdpa_call {
    PyObject *module;
    sdpa_options options;
    sdpa_problem problem;

    /* Shape of the output: leading axes, then n_q and d_v. The first n_batch_axes precede the heads; problem.axis[i] is
     * the size of axis axis[i], the others have size 1. */
    int nd, n_batch_axes;
    bool packed; /* operands are (total, heads, d); `shape` describes them as (heads, total, d) */
    npy_intp shape[NPY_MAXDIMS];
    int axis[SDPA_MAX_AXES];
    int64_t sizes[SDPA_MAX_AXES]; /* problem.axis */

    PyArrayObject *arrays[N_NAMES]; /* owned: the arguments that are arrays; NULL where absent */
    unsigned char held[N_NAMES];    /* their names */
    int n_held;
    sdpa_tensor *present[N_TENSORS]; /* the problem's tensors that are set, */
    int64_t *batch;                  /* and the strides of their batch axes, (N_TENSORS, n_axes): `few`, or owned */
    int64_t few[N_TENSORS * FEW_AXES];
    int n_present;
    bool joins_axes;           /* no other tensor is set, so axes may be joined before the call runs */
    int64_t key_length;        /* of all batch entries, where key_lengths is a number */
    int64_t offset;            /* of the diagonal, of all batch entries, where query_offset is a number */
    sdpa_functions *functions; /* owned: score_mod and mask_mod; NULL: neither */
    sdpa_additive additive;    /* of additive attention alone; set by it */
    double work;               /* a rough upper bound of the multiply-adds; decides whether the GIL is released */
} sdpa_call;

/* Reads and checks options and operands, and fills in sizes, dtype, scale, q, k, mask and band of the problem, and v if
 * the function has it. Afterwards code of the caller's may run only where `out` is looked at, and arrays are views then.
 * -1 and an exception on failure. The caller must call sdpa_call_end, also after a failure.
 *
 * `where` is the bit of the function whose options these are, `signature` that of the function called. has_options:
 * whether more arguments are given than it requires. */
int sdpa_call_begin(sdpa_call *call, PyObject *module, unsigned where, const sdpa_signature *signature,
                    PyObject *const values[N_NAMES], bool has_options);
void sdpa_call_end(sdpa_call *call);

/* Replaces begin in functions whose operands are not query, key and value: makes a call without options and tensors.
 * The caller sets nd, the leading axes of shape, and problem.dtype; set_axes then finds heads and batch axes, or returns -1
 * with an exception. The caller must call sdpa_call_end. */
void sdpa_call_empty(sdpa_call *call, PyObject *module);
int sdpa_call_set_axes(sdpa_call *call);

/* Points t at `a`, whose shape has been checked; axes along which it is broadcast get stride 0. Its last n_inner axes,
 * at most two, are rows and columns of the sizes `inner`; `heads` says that the axis before them is heads. The strides
 * of the problem's batch axes are written to `batch`, which t keeps. */
void sdpa_call_view(const sdpa_call *call, sdpa_tensor *t, int64_t *batch, PyArrayObject *a, sdpa_dtype dtype,
                    int n_inner, const npy_intp *inner, bool heads);

/* sdpa_call_view for a tensor of the problem, which is added to `present`. */
void sdpa_call_set(sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, sdpa_dtype dtype, int n_inner,
                   const npy_intp *inner, bool heads);

/* The sizes of rows and columns. */
static inline const npy_intp *sdpa_last_axes(PyArrayObject *a) { return PyArray_DIMS(a) + PyArray_NDIM(a) - 2; }

#endif
