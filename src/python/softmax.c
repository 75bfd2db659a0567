#include "softmax.h"

#include <string.h>

#include "../runtime/parallel.h"
#include "../runtime/rounding.h"
#include "../softmax.h"
#include "arrays.h"
#include "docstrings.h"
#include "errors.h"
#include "gil.h"
#include "parse.h"

/* An array argument: `given`, and `array`, which is the same object or a float64 copy of integers. */
typedef struct operand {
    const char *name;
    PyArrayObject *given, *array;
    sdpa_dtype dtype;
} operand;

/* The axes of an array along which rows run (reduced) and the others (kept), both in ascending order. */
typedef struct row_axes {
    int n_kept, n_reduced;
    int kept[NPY_MAXDIMS], reduced[NPY_MAXDIMS];
} row_axes;

/* Everything that one call owns. */
typedef struct call {
    operand x, grad, lse, where;
    PyArrayObject *out;
    row_axes axes;
    sdpa_softmax_problem problem;
} call;

/* Leaves the problem uncleared, because clearing its several kilobytes would take longer than a small call. */
static void own_nothing(call *c) {
    c->x.given = c->x.array = c->grad.given = c->grad.array = c->out = NULL;
    c->lse.given = c->lse.array = c->where.given = c->where.array = NULL;
}

static void release(call *c) {
    operand *operands[] = {&c->x, &c->grad, &c->lse, &c->where};
    for (int i = 0; i < 4; i++) {
        Py_XDECREF((PyObject *)operands[i]->given);
        Py_XDECREF((PyObject *)operands[i]->array);
    }
    Py_XDECREF((PyObject *)c->out);
}

static int read_array(PyObject *module, operand *o, const char *name, PyObject *value) {
    o->name = name;
    o->given = sdpa_array(module, name, value);
    return o->given ? 0 : -1;
}

static int read_floats(PyObject *module, operand *o, const char *name, PyObject *value) {
    if (read_array(module, o, name, value) < 0) return -1;
    int type = PyArray_TYPE(o->given);
    if (PyTypeNum_ISINTEGER(type) || PyTypeNum_ISBOOL(type)) {
        o->array = (PyArrayObject *)PyArray_CastToType(o->given, PyArray_DescrFromType(NPY_DOUBLE), 0);
        o->dtype = SDPA_F64;
        return o->array ? 0 : -1;
    }
    int dtype = sdpa_dtype_of(module, o->given);
    if (dtype < 0) {
        sdpa_raise_dtype(name, o->given, "float16, bfloat16, float32, float64, an integer type or bool");
        return -1;
    }
    o->dtype = (sdpa_dtype)dtype;
    Py_INCREF((PyObject *)o->given);
    o->array = o->given;
    return 0;
}

/* ------------------------------------------------------------------------------------ axes */

static int mark_axis(PyObject *value, int ndim, bool *marked, bool *scalar, const operand *o) {
    long long axis;
    char shape[SDPA_SHAPE_SIZE];
    if (!PyIndex_Check(value) || PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "axis: expected an integer, a tuple of integers or None, got %.200R", value);
        return -1;
    }
    if (sdpa_read_integer("axis", value, &axis) < 0) return -1;
    /* Like NumPy, this lets a scalar have the axes 0 and -1, with one element. */
    int n = ndim ? ndim : 1;
    if (axis < -n || axis >= n) {
        PyErr_Format(PyExc_ValueError, "axis: expected -%d to %d for %s of shape %s, got %.200R", n, n - 1, o->name,
                     sdpa_shape_text(shape, "", PyArray_DIMS(o->array), ndim), value);
        return -1;
    }
    bool *mark = ndim ? &marked[axis < 0 ? axis + n : axis] : scalar;
    if (*mark) {
        PyErr_Format(PyExc_ValueError, "axis: expected each axis once, got %.200R twice", value);
        return -1;
    }
    *mark = true;
    return 0;
}

/* `value` is an int, a tuple of int, None for all axes, or NULL for the last. */
static int read_axes(row_axes *axes, PyObject *value, const operand *o) {
    int ndim = PyArray_NDIM(o->array);
    bool marked[NPY_MAXDIMS] = {false}, scalar = false;
    if (!value) {
        if (ndim) marked[ndim - 1] = true;
    } else if (value == Py_None) {
        memset(marked, true, sizeof marked);
    } else if (PyTuple_Check(value)) {
        for (Py_ssize_t i = 0; i < PyTuple_Size(value); i++) {
            if (mark_axis(PyTuple_GetItem(value, i), ndim, marked, &scalar, o) < 0) return -1;
        }
    } else if (mark_axis(value, ndim, marked, &scalar, o) < 0) {
        return -1;
    }
    axes->n_kept = axes->n_reduced = 0;
    for (int a = 0; a < ndim; a++) {
        if (marked[a]) {
            axes->reduced[axes->n_reduced++] = a;
        } else {
            axes->kept[axes->n_kept++] = a;
        }
    }
    return 0;
}

/* The shape of an array with one value per row; returns the number of its axes. */
static int row_shape(const call *c, bool keepdims, npy_intp *shape) {
    const npy_intp *sizes = PyArray_DIMS(c->x.array);
    if (!keepdims) {
        for (int i = 0; i < c->axes.n_kept; i++) shape[i] = sizes[c->axes.kept[i]];
        return c->axes.n_kept;
    }
    int ndim = PyArray_NDIM(c->x.array);
    if (ndim) memcpy(shape, sizes, (size_t)ndim * sizeof *shape);
    for (int i = 0; i < c->axes.n_reduced; i++) shape[c->axes.reduced[i]] = 1;
    return ndim;
}

/* ------------------------------------------------------------------------------------ the descriptor */

static sdpa_softmax_view *set_buffer(call *c, int v, PyArrayObject *a, sdpa_dtype dtype) {
    sdpa_softmax_view *view = &c->problem.view[v];
    view->data = sdpa_data(a);
    view->dtype = dtype;
    view->swapped = sdpa_is_swapped(a);
    return view;
}

/* Describes an array with the axes of x. */
static void set_view(call *c, int v, PyArrayObject *a, sdpa_dtype dtype) {
    sdpa_softmax_view *view = set_buffer(c, v, a, dtype);
    const row_axes *axes = &c->axes;
    for (int i = 0; i < axes->n_kept; i++) view->stride[i] = PyArray_STRIDE(a, axes->kept[i]);
    for (int i = 0; i < axes->n_reduced; i++) view->stride[axes->n_kept + i] = PyArray_STRIDE(a, axes->reduced[i]);
}

/* Describes an array with one value per row; its reduced axes have size 1 or are absent. */
static void set_row_view(call *c, int v, PyArrayObject *a, sdpa_dtype dtype) {
    sdpa_softmax_view *view = set_buffer(c, v, a, dtype);
    const row_axes *axes = &c->axes;
    bool all_axes = PyArray_NDIM(a) == axes->n_kept + axes->n_reduced;
    for (int i = 0; i < axes->n_kept; i++) view->stride[i] = PyArray_STRIDE(a, all_axes ? axes->kept[i] : i);
    for (int i = 0; i < axes->n_reduced; i++) view->stride[axes->n_kept + i] = 0;
}

/* Fills in what the problem takes from x, which has been read, and from the arguments common to all functions. */
static int describe(call *c, sdpa_softmax_op op, PyObject *const *values) {
    sdpa_softmax_problem *p = &c->problem;
    if (read_axes(&c->axes, values[NAME_axis], &c->x) < 0) return -1;
    p->temperature = 1;
    if (values[NAME_temperature]) {
        if (sdpa_read_finite("temperature", values[NAME_temperature], &p->temperature) < 0) return -1;
        if (p->temperature <= 0) {
            PyErr_Format(PyExc_ValueError, "temperature: expected a number above 0, got %.200R",
                         values[NAME_temperature]);
            return -1;
        }
    }
    p->op = op;
    p->dtype = c->x.dtype;
    p->n_kept = c->axes.n_kept;
    p->n_reduced = c->axes.n_reduced;
    for (int i = 0; i < p->n_kept; i++) p->size[i] = PyArray_DIM(c->x.array, c->axes.kept[i]);
    for (int i = 0; i < p->n_reduced; i++) p->size[p->n_kept + i] = PyArray_DIM(c->x.array, c->axes.reduced[i]);
    for (int v = 0; v < SDPA_SOFTMAX_VIEWS; v++) p->view[v].data = NULL;
    set_view(c, SDPA_SOFTMAX_X, c->x.array, c->x.dtype);
    p->n_workers = sdpa_get_num_threads();
    p->interrupted = sdpa_interrupted;
    return 0;
}

static int read_where(PyObject *module, call *c, PyObject *value) {
    if (!value || value == Py_None) return 0;
    if (read_array(module, &c->where, "where", value) < 0) return -1;
    PyArrayObject *where = c->where.given;
    if (PyArray_TYPE(where) != NPY_BOOL) return sdpa_raise_dtype("where", where, "bool");
    const int ndim = PyArray_NDIM(c->x.array), lead = ndim - PyArray_NDIM(where);
    npy_intp stride[NPY_MAXDIMS];
    bool fits = lead >= 0;
    for (int a = 0; fits && a < ndim; a++) {
        npy_intp size = a < lead ? 1 : PyArray_DIM(where, a - lead);
        stride[a] = size == 1 ? 0 : PyArray_STRIDE(where, a - lead);
        fits = size == 1 || size == PyArray_DIM(c->x.array, a);
    }
    if (!fits) {
        char shape[SDPA_SHAPE_SIZE];
        return sdpa_raise_shape("where", where, "a shape that broadcasts to %s of x",
                                sdpa_shape_text(shape, "", PyArray_DIMS(c->x.array), ndim));
    }
    sdpa_softmax_view *view = set_buffer(c, SDPA_SOFTMAX_WHERE, where, SDPA_BOOL);
    for (int i = 0; i < c->axes.n_kept; i++) view->stride[i] = stride[c->axes.kept[i]];
    for (int i = 0; i < c->axes.n_reduced; i++) view->stride[c->axes.n_kept + i] = stride[c->axes.reduced[i]];
    return 0;
}

/* Sets c->out to the `out` argument after its checks, or to a new array of `shape`; `like_x` gives it the memory order
 * of x, as NumPy does. */
static int make_out(PyObject *module, call *c, PyObject *value, const npy_intp *shape, int ndim, bool like_x) {
    const int type = sdpa_type_number(module, c->problem.dtype);
    if (value && value != Py_None) {
        const operand *inputs[] = {&c->x, &c->where};
        if (sdpa_check_out(value, shape, ndim, type) < 0) return -1;
        for (int i = 0; i < 2; i++) {
            if (!inputs[i]->given) continue;
            if (sdpa_check_overlap(module, (PyArrayObject *)value, inputs[i]->name, inputs[i]->given) < 0) return -1;
        }
        Py_INCREF(value);
        c->out = (PyArrayObject *)value;
        return 0;
    }
    PyArray_Descr *descr = PyArray_DescrFromType(type);
    if (!descr) return -1;
    c->out = like_x ? (PyArrayObject *)PyArray_NewLikeArray(c->x.array, NPY_KEEPORDER, descr, 0)
                    : (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, NULL, NULL, 0, NULL);
    return c->out ? 0 : -1;
}

/* The multiply-adds of the problem, roughly: an exponential costs about 16. */
static double work_of(const sdpa_softmax_problem *p) {
    double work = 16;
    for (int i = 0; i < p->n_kept + p->n_reduced; i++) work *= (double)p->size[i];
    return work;
}

/* Computes and returns out: the argument itself if `given`, otherwise a new array, which becomes a scalar if it has no
 * axes. */
static PyObject *run(call *c, bool given) {
    PyThreadState *released = sdpa_gil_release(work_of(&c->problem));
    const sdpa_rounding mode = sdpa_round_to_nearest();
    const sdpa_status status = sdpa_softmax_run(&c->problem);
    sdpa_rounding_restore(mode);
    if (sdpa_gil_finish(released, status) < 0) return NULL;
    PyArrayObject *out = c->out;
    c->out = NULL;
    return given ? (PyObject *)out : PyArray_Return(out);
}

/* ------------------------------------------------------------------------------------ forward */

static PyObject *forward(PyObject *module, const sdpa_signature *signature, sdpa_softmax_op op, PyObject *const *args,
                         Py_ssize_t n_args, PyObject *kwnames) {
    PyObject *values[N_NAMES], *result = NULL;
    npy_intp row_sizes[NPY_MAXDIMS];
    bool keepdims = false, rows = op == SDPA_LOGSUMEXP;
    call c;
    own_nothing(&c);
    if (sdpa_parse(module, signature, args, n_args, kwnames, values) < 0) return NULL;
    if (read_floats(module, &c.x, "x", values[NAME_x]) < 0) goto done;
    if (values[NAME_keepdims] && sdpa_read_bool("keepdims", values[NAME_keepdims], &keepdims) < 0) goto done;
    if (describe(&c, op, values) < 0 || read_where(module, &c, values[NAME_where]) < 0) goto done;
    const npy_intp *shape = PyArray_DIMS(c.x.array);
    int ndim = PyArray_NDIM(c.x.array);
    if (rows) {
        ndim = row_shape(&c, keepdims, row_sizes);
        shape = row_sizes;
    }
    if (make_out(module, &c, values[NAME_out], shape, ndim, !rows) < 0) goto done;
    if (rows) {
        set_row_view(&c, SDPA_SOFTMAX_OUT, c.out, c.x.dtype);
    } else {
        set_view(&c, SDPA_SOFTMAX_OUT, c.out, c.x.dtype);
    }
    result = run(&c, values[NAME_out] && values[NAME_out] != Py_None);
done:
    release(&c);
    return result;
}

#define SIGNATURE(text, required, positional, ...)                                                                     \
    {                                                                                                                  \
        .function = text, .n_required = required, .n_positional = positional,                                          \
        .n = sizeof((unsigned char[]){__VA_ARGS__}), .names = {                                                        \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }

static PyObject *softmax(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SIGNATURE("softmax", 1, 2, NAME_x, NAME_axis, NAME_temperature, NAME_where, NAME_out);
    return forward(module, &signature, SDPA_SOFTMAX, args, n_args, kwnames);
}

static PyObject *log_softmax(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SIGNATURE("log_softmax", 1, 2, NAME_x, NAME_axis, NAME_temperature, NAME_where, NAME_out);
    return forward(module, &signature, SDPA_LOG_SOFTMAX, args, n_args, kwnames);
}

static PyObject *logsumexp(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SIGNATURE("logsumexp", 1, 2, NAME_x, NAME_axis, NAME_where, NAME_keepdims, NAME_out);
    return forward(module, &signature, SDPA_LOGSUMEXP, args, n_args, kwnames);
}

/* ------------------------------------------------------------------------------------ backward */

/* Reads grad, which must have the shape and dtype of x. */
static int read_grad(PyObject *module, call *c, PyObject *value) {
    if (read_floats(module, &c->grad, "grad", value) < 0) return -1;
    PyArrayObject *x = c->x.array, *grad = c->grad.array;
    const int ndim = PyArray_NDIM(x);
    if (PyArray_NDIM(grad) != ndim || !PyArray_CompareLists(PyArray_DIMS(grad), PyArray_DIMS(x), ndim)) {
        char shape[SDPA_SHAPE_SIZE];
        return sdpa_raise_shape("grad", grad, "shape %s of %s", sdpa_shape_text(shape, "", PyArray_DIMS(x), ndim),
                                c->x.name);
    }
    if (c->grad.dtype != c->x.dtype) {
        return sdpa_raise_dtype("grad", grad, "dtype %S of %s", PyArray_DESCR(x), c->x.name);
    }
    return 0;
}

/* Reads one value per row, whose reduced axes have size 1 or are absent. Its dtype must be that of x or of the
 * arithmetic on x, like the lse of attention; a Python number may be any. */
static int read_row_values(PyObject *module, call *c, operand *o, const char *name, PyObject *value) {
    char without[SDPA_SHAPE_SIZE], with[SDPA_SHAPE_SIZE];
    npy_intp sizes[2][NPY_MAXDIMS];
    bool number = PyFloat_Check(value) || PyLong_Check(value);
    if (read_floats(module, o, name, value) < 0) return -1;
    int ndim[2];
    bool fits = false;
    for (int keepdims = 0; keepdims < 2; keepdims++) {
        ndim[keepdims] = row_shape(c, keepdims, sizes[keepdims]);
        fits |= PyArray_NDIM(o->array) == ndim[keepdims] &&
                PyArray_CompareLists(PyArray_DIMS(o->array), sizes[keepdims], ndim[keepdims]);
    }
    if (!fits) {
        return sdpa_raise_shape(name, o->array, "shape %s or %s, one value per row of x",
                                sdpa_shape_text(without, "", sizes[0], ndim[0]),
                                sdpa_shape_text(with, "", sizes[1], ndim[1]));
    }
    sdpa_dtype arithmetic = c->x.dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32;
    if (!number && o->dtype != c->x.dtype && o->dtype != arithmetic) {
        return sdpa_raise_dtype(name, o->array, "dtype %S of x or %s", PyArray_DESCR(c->x.array),
                                sdpa_dtype_text(arithmetic));
    }
    return 0;
}

static PyObject *backward(PyObject *module, const sdpa_signature *signature, sdpa_softmax_op op, PyObject *const *args,
                          Py_ssize_t n_args, PyObject *kwnames) {
    PyObject *values[N_NAMES], *result = NULL;
    const int name = signature->names[1];
    call c;
    own_nothing(&c);
    if (sdpa_parse(module, signature, args, n_args, kwnames, values) < 0) return NULL;
    if (read_floats(module, &c.x, sdpa_name_text(name), values[name]) < 0) goto done;
    if (describe(&c, op, values) < 0) goto done;
    if (op == SDPA_LOGSUMEXP_BACKWARD) {
        if (read_row_values(module, &c, &c.grad, "grad", values[NAME_grad]) < 0) goto done;
        if (read_row_values(module, &c, &c.lse, "lse", values[NAME_lse]) < 0) goto done;
        set_row_view(&c, SDPA_SOFTMAX_G, c.grad.array, c.grad.dtype);
        set_row_view(&c, SDPA_SOFTMAX_S, c.lse.array, c.lse.dtype);
    } else {
        if (read_grad(module, &c, values[NAME_grad]) < 0) goto done;
        set_view(&c, SDPA_SOFTMAX_G, c.grad.array, c.grad.dtype);
    }
    if (make_out(module, &c, NULL, NULL, 0, true) < 0) goto done;
    set_view(&c, SDPA_SOFTMAX_OUT, c.out, c.x.dtype);
    result = run(&c, false);
done:
    release(&c);
    return result;
}

static PyObject *softmax_backward(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SIGNATURE("softmax_backward", 2, 3, NAME_grad, NAME_weights, NAME_axis, NAME_temperature);
    return backward(module, &signature, SDPA_SOFTMAX_BACKWARD, args, n_args, kwnames);
}

static PyObject *log_softmax_backward(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SIGNATURE("log_softmax_backward", 2, 3, NAME_grad, NAME_log_weights, NAME_axis, NAME_temperature);
    return backward(module, &signature, SDPA_LOG_SOFTMAX_BACKWARD, args, n_args, kwnames);
}

static PyObject *logsumexp_backward(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SIGNATURE("logsumexp_backward", 3, 4, NAME_grad, NAME_x, NAME_lse, NAME_axis);
    return backward(module, &signature, SDPA_LOGSUMEXP_BACKWARD, args, n_args, kwnames);
}

/* ------------------------------------------------------------------------------------ jacobian */

/* The axes of out are the kept axes of weights, then the reduced ones twice, for i and for j; a row runs along j. */
static int describe_jacobian(PyObject *module, call *c) {
    sdpa_softmax_problem *p = &c->problem;
    const int n_kept = p->n_kept, n = p->n_reduced, ndim = n_kept + 2 * n;
    npy_intp shape[NPY_MAXDIMS];
    if (ndim > NPY_MAXDIMS) {
        PyErr_Format(PyExc_ValueError, "axis: expected a Jacobian of at most %d axes, got %d", NPY_MAXDIMS, ndim);
        return -1;
    }
    sdpa_softmax_view *x = &p->view[SDPA_SOFTMAX_X], *s = &p->view[SDPA_SOFTMAX_S], *out = &p->view[SDPA_SOFTMAX_OUT];
    *s = *x;
    for (int i = n_kept; i < n_kept + n; i++) {
        p->size[i + n] = p->size[i];
        x->stride[i + n] = x->stride[i];
        x->stride[i] = 0;
        s->stride[i + n] = 0;
    }
    p->n_kept += n;
    for (int i = 0; i < ndim; i++) shape[i] = p->size[i];
    if (make_out(module, c, NULL, shape, ndim, false) < 0) return -1;
    set_buffer(c, SDPA_SOFTMAX_OUT, c->out, c->x.dtype);
    for (int i = 0; i < ndim; i++) out->stride[i] = PyArray_STRIDE(c->out, i);
    return 0;
}

static PyObject *softmax_jacobian(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SIGNATURE("softmax_jacobian", 1, 2, NAME_weights, NAME_axis, NAME_temperature);
    PyObject *values[N_NAMES], *result = NULL;
    call c;
    own_nothing(&c);
    if (sdpa_parse(module, &signature, args, n_args, kwnames, values) < 0) return NULL;
    if (read_floats(module, &c.x, "weights", values[NAME_weights]) < 0) goto done;
    if (describe(&c, SDPA_SOFTMAX_JACOBIAN, values) < 0 || describe_jacobian(module, &c) < 0) goto done;
    result = run(&c, false);
done:
    release(&c);
    return result;
}

int sdpa_softmax_add(PyObject *module) {
#define METHOD(name)                                                                                                   \
    { #name, SDPA_FUNCTION(name), SDPA_FLAGS, doc_##name }
    static PyMethodDef methods[] = {
        METHOD(softmax),          METHOD(log_softmax),          METHOD(logsumexp),
        METHOD(softmax_backward), METHOD(log_softmax_backward), METHOD(logsumexp_backward),
        METHOD(softmax_jacobian), {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
