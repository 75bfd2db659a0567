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
#include "values.h"

/* An array argument: `given`, and `array`, which is the same object or a float64 copy of integers. */
typedef struct operand {
    const char *name;
    bool is_number; /* a Python number */
    PyArrayObject *given, *array;
    sdpa_dtype dtype;
} operand;

/* The argument `axis`: all axes, or those listed. */
typedef struct axis_list {
    bool all;
    int n;
    long long axis[NPY_MAXDIMS + 1];  /* one more than an array can have, so that too many are noticed */
    PyObject *given[NPY_MAXDIMS + 1]; /* borrowed from the argument */
} axis_list;

/* The axes of an array along which rows run (reduced) and the others (kept), both in ascending order. */
typedef struct row_axes {
    int n_kept, n_reduced;
    int kept[NPY_MAXDIMS], reduced[NPY_MAXDIMS];
} row_axes;

/* Everything that one call owns. */
typedef struct call {
    PyObject *module;
    operand x, grad, lse, where;
    PyArrayObject *given_out, *out;
    axis_list listed;
    bool keepdims;
    row_axes axes;
    sdpa_softmax_problem problem;
} call;

/* Leaves the problem uncleared, because clearing its several kilobytes would take longer than a small call. */
static void own_nothing(call *c, PyObject *module) {
    c->module = module;
    c->x.given = c->x.array = c->grad.given = c->grad.array = c->given_out = c->out = NULL;
    c->lse.given = c->lse.array = c->where.given = c->where.array = NULL;
}

enum { N_OPERANDS = 4 };
#define OPERANDS(c)                                                                                                    \
    { &(c)->x, &(c)->grad, &(c)->lse, &(c)->where }

static void release(call *c) {
    operand *operands[N_OPERANDS] = OPERANDS(c);
    for (int i = 0; i < N_OPERANDS; i++) {
        Py_XDECREF((PyObject *)operands[i]->given);
        Py_XDECREF((PyObject *)operands[i]->array);
    }
    Py_XDECREF((PyObject *)c->given_out);
    Py_XDECREF((PyObject *)c->out);
}

/* ------------------------------------------------------------------------------------ reading, which runs any code */

static int read_array(call *c, operand *o, enum sdpa_name name, PyObject *const *values) {
    PyObject *value = values[name];
    o->name = sdpa_name_text(name);
    if (!value || (o == &c->where && value == Py_None)) return 0;
    o->is_number = PyFloat_Check(value) || PyLong_Check(value);
    o->given = sdpa_array(c->module, o->name, value);
    return o->given ? 0 : -1;
}

static int read_axis(call *c, PyObject *value) {
    axis_list *listed = &c->listed;
    if (!PyIndex_Check(value) || PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "axis: expected an integer, a tuple of integers or None, got %.200R", value);
        return -1;
    }
    if (listed->n > NPY_MAXDIMS) {
        PyErr_SetString(PyExc_ValueError, "axis: expected each axis once, got more than an array can have");
        return -1;
    }
    listed->given[listed->n] = value;
    return sdpa_read_integer("axis", value, &listed->axis[listed->n++]);
}

/* `value` is an int, a tuple of int, None for all axes, or NULL for the last. */
static int read_axes(call *c, PyObject *value) {
    c->listed.all = value == Py_None;
    c->listed.n = 0;
    if (!value) c->listed.axis[c->listed.n++] = -1;
    if (!value || value == Py_None) return 0;
    if (!PyTuple_Check(value)) return read_axis(c, value);
    for (Py_ssize_t i = 0; i < PyTuple_Size(value); i++) {
        if (read_axis(c, PyTuple_GetItem(value, i)) < 0) return -1;
    }
    return 0;
}

static int read_temperature(call *c, PyObject *value) {
    double *t = &c->problem.temperature;
    *t = 1;
    if (!value) return 0;
    if (sdpa_read_finite("temperature", value, t) < 0) return -1;
    if (*t > 0) return 0;
    PyErr_Format(PyExc_ValueError, "temperature: expected a number above 0, got %.200R", value);
    return -1;
}

/* Reads all arguments, `x` being the name of the first operand, and makes arrays plain: from then on no code of the
 * caller's runs before the result is there. */
static int read_all(call *c, enum sdpa_name x, PyObject *const *values) {
    operand *operands[N_OPERANDS] = OPERANDS(c);
    if (read_array(c, &c->x, x, values) < 0 || read_array(c, &c->grad, NAME_grad, values) < 0 ||
        read_array(c, &c->lse, NAME_lse, values) < 0 || read_array(c, &c->where, NAME_where, values) < 0) {
        return -1;
    }
    c->keepdims = false;
    if (values[NAME_keepdims] && sdpa_read_bool("keepdims", values[NAME_keepdims], &c->keepdims) < 0) return -1;
    if (read_axes(c, values[NAME_axis]) < 0 || read_temperature(c, values[NAME_temperature]) < 0) return -1;
    if (sdpa_read_out(values[NAME_out], &c->given_out) < 0) return -1;
    for (int i = 0; i < N_OPERANDS; i++) {
        if (sdpa_settle(&operands[i]->given, c->given_out != NULL) < 0) return -1;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------ dtypes, axes */

/* Sets o->array and o->dtype. */
static int set_floats(call *c, operand *o) {
    int type = PyArray_TYPE(o->given);
    if (PyTypeNum_ISINTEGER(type) || PyTypeNum_ISBOOL(type)) {
        o->array = (PyArrayObject *)PyArray_CastToType(o->given, PyArray_DescrFromType(NPY_DOUBLE), 0);
        o->dtype = SDPA_F64;
        return o->array ? 0 : -1;
    }
    int dtype = sdpa_dtype_of(c->module, o->given);
    if (dtype < 0) {
        return sdpa_raise_dtype(o->name, o->given, "float16, bfloat16, float32, float64, an integer type or bool");
    }
    o->dtype = (sdpa_dtype)dtype;
    o->array = (PyArrayObject *)Py_NewRef((PyObject *)o->given);
    return 0;
}

/* Marks one of the listed axes of x. */
static int mark_axis(const call *c, int i, bool *marked, bool *scalar) {
    const long long axis = c->listed.axis[i];
    const int ndim = PyArray_NDIM(c->x.array);
    char shape[SDPA_SHAPE_SIZE];
    /* Like NumPy, this lets a scalar have the axes 0 and -1, with one element. */
    const int n = ndim ? ndim : 1;
    if (axis < -n || axis >= n) {
        PyErr_Format(PyExc_ValueError, "axis: expected -%d to %d for %s of shape %s, got %.200R", n, n - 1, c->x.name,
                     sdpa_shape_text(shape, "", PyArray_DIMS(c->x.array), ndim), c->listed.given[i]);
        return -1;
    }
    bool *mark = ndim ? &marked[axis < 0 ? axis + n : axis] : scalar;
    if (*mark) {
        PyErr_Format(PyExc_ValueError, "axis: expected each axis once, got %.200R twice", c->listed.given[i]);
        return -1;
    }
    *mark = true;
    return 0;
}

static int set_axes(call *c) {
    const int ndim = PyArray_NDIM(c->x.array);
    const axis_list *listed = &c->listed;
    row_axes *axes = &c->axes;
    bool marked[NPY_MAXDIMS] = {false}, scalar = false;
    if (listed->all) memset(marked, true, sizeof marked);
    for (int i = 0; i < listed->n; i++) {
        if (mark_axis(c, i, marked, &scalar) < 0) return -1;
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

/* Whether the temperature is within the range of the arithmetic; raises. */
static int check_temperature(const sdpa_softmax_problem *p) {
    const int reach = sdpa_temperature_reach(p->dtype);
    if (p->temperature >= ldexp(1, -reach) && p->temperature <= ldexp(1, reach)) return 0;
    PyObject *value = PyFloat_FromDouble(p->temperature);
    if (!value) return -1;
    PyErr_Format(
        PyExc_ValueError,
        "temperature: expected 2^-%d to 2^%d, the range of %s arithmetic, got %R; divide the array and it by the "
        "same number",
        reach, reach, p->dtype == SDPA_F64 ? "float64" : "float32", value);
    Py_DECREF(value);
    return -1;
}

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

/* Fills in what the problem takes from x. */
static int describe(call *c, sdpa_softmax_op op) {
    sdpa_softmax_problem *p = &c->problem;
    if (set_floats(c, &c->x) < 0 || set_axes(c) < 0) return -1;
    p->op = op;
    p->dtype = c->x.dtype;
    if (check_temperature(p) < 0) return -1;
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

static int set_where(call *c) {
    PyArrayObject *where = c->where.given;
    if (!where) return 0;
    if (PyArray_TYPE(where) != NPY_BOOL) {
        sdpa_raise_dtype("where", where, "bool");
        return sdpa_is_real(c->module, where) ? sdpa_add_remedy("; write where != 0") : -1;
    }
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
        sdpa_raise_shape("where", where, "a shape that broadcasts to %s of x",
                         sdpa_shape_text(shape, "", PyArray_DIMS(c->x.array), ndim));
        sdpa_suggest_axes("where", where, PyArray_DIMS(c->x.array), ndim);
        return -1;
    }
    sdpa_softmax_view *view = set_buffer(c, SDPA_SOFTMAX_WHERE, where, SDPA_BOOL);
    for (int i = 0; i < c->axes.n_kept; i++) view->stride[i] = stride[c->axes.kept[i]];
    for (int i = 0; i < c->axes.n_reduced; i++) view->stride[c->axes.n_kept + i] = stride[c->axes.reduced[i]];
    return 0;
}

/* Sets c->out to the `out` argument after its checks, or to a new array of `shape`; `like_x` gives it the memory order
 * of x, as NumPy does. */
static int make_out(call *c, const npy_intp *shape, int ndim, bool like_x) {
    const int type = sdpa_type_number(c->module, c->problem.dtype);
    if (c->given_out) {
        const operand *inputs[] = {&c->x, &c->where};
        c->out = (PyArrayObject *)Py_NewRef((PyObject *)c->given_out);
        if (sdpa_settle(&c->out, true) < 0 || sdpa_check_out(c->out, shape, ndim, type) < 0) return -1;
        for (int i = 0; i < 2; i++) {
            if (!inputs[i]->given) continue;
            if (sdpa_check_overlap(c->module, c->out, inputs[i]->name, inputs[i]->given) < 0) return -1;
        }
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

/* Computes and returns out: the argument itself if there is one, otherwise a new array, which becomes a scalar if it has
 * no axes. */
static PyObject *run(call *c) {
    sdpa_gil_release(work_of(&c->problem));
    const sdpa_rounding mode = sdpa_round_to_nearest();
    const sdpa_status status = sdpa_softmax_run(&c->problem);
    sdpa_rounding_restore(mode);
    if (sdpa_gil_finish(status) < 0) return NULL;
    if (c->given_out) return Py_NewRef((PyObject *)c->given_out);
    PyArrayObject *out = c->out;
    c->out = NULL;
    return PyArray_Return(out);
}

/* The steps of a function after its arguments have been read. */
typedef int steps(call *c, sdpa_softmax_op op);

/* Computes from the parsed arguments, of which the first operand is named `x`. */
static PyObject *compute(enum sdpa_name x, steps *prepare, sdpa_softmax_op op, PyObject *module,
                         PyObject *const *values) {
    PyObject *result = NULL;
    call c;
    own_nothing(&c, module);
    if (read_all(&c, x, values) == 0 && prepare(&c, op) == 0) result = run(&c);
    release(&c);
    return result;
}

static PyObject *call_with(const sdpa_signature *signature, enum sdpa_name x, steps *prepare, sdpa_softmax_op op,
                           SDPA_ARGUMENTS) {
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, signature, args, n_args, kwnames, values) < 0) return NULL;
    return compute(x, prepare, op, module, values);
}

/* The result of the function of the same name in sdpa._weighted. */
static PyObject *call_weighted(const sdpa_signature *s, PyObject *module, PyObject *const *values) {
    PyObject *none = PyTuple_New(0), *given = PyDict_New(), *function = NULL, *result = NULL;
    bool failed = !none || !given;
    for (int i = 0; !failed && i < s->n; i++) {
        PyObject *value = values[s->names[i]];
        failed = value && PyDict_SetItem(given, sdpa_state_of(module)->names[s->names[i]], value) < 0;
    }
    PyObject *python = failed ? NULL : PyImport_ImportModule("sdpa._weighted");
    if (python) function = PyObject_GetAttrString(python, s->function);
    if (function) result = PyObject_Call(function, none, given);
    Py_XDECREF(function);
    Py_XDECREF(python);
    Py_XDECREF(given);
    Py_XDECREF(none);
    return result;
}

static bool is_given(PyObject *value) { return value && value != Py_None; }

/* ------------------------------------------------------------------------------------ forward */

static int prepare_forward(call *c, sdpa_softmax_op op) {
    const bool rows = op == SDPA_LOGSUMEXP;
    npy_intp row_sizes[NPY_MAXDIMS];
    if (describe(c, op) < 0 || set_where(c) < 0) return -1;
    const npy_intp *shape = rows ? row_sizes : PyArray_DIMS(c->x.array);
    const int ndim = rows ? row_shape(c, c->keepdims, row_sizes) : PyArray_NDIM(c->x.array);
    if (make_out(c, shape, ndim, !rows) < 0) return -1;
    (rows ? set_row_view : set_view)(c, SDPA_SOFTMAX_OUT, c->out, c->x.dtype);
    return 0;
}

#define FORWARD_CALL(op) call_with(&signature, NAME_x, prepare_forward, op, module, args, n_args, kwnames)

static PyObject *softmax(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SDPA_SIGNATURE("softmax", 1, 2, NAME_x, NAME_axis, NAME_temperature, NAME_where, NAME_out);
    return FORWARD_CALL(SDPA_SOFTMAX);
}

static PyObject *log_softmax(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SDPA_SIGNATURE("log_softmax", 1, 2, NAME_x, NAME_axis, NAME_temperature, NAME_where, NAME_out);
    return FORWARD_CALL(SDPA_LOG_SOFTMAX);
}

static PyObject *logsumexp(SDPA_ARGUMENTS) {
    static const sdpa_signature signature = SDPA_SIGNATURE("logsumexp", 1, 2, NAME_x, NAME_axis, NAME_b,
                                                           NAME_return_sign, NAME_where, NAME_keepdims, NAME_out);
    PyObject *values[N_NAMES], *return_sign;
    bool has_sign = false;
    if (sdpa_parse(module, &signature, args, n_args, kwnames, values) < 0) return NULL;
    return_sign = values[NAME_return_sign];
    if (return_sign && sdpa_read_bool("return_sign", return_sign, &has_sign) < 0) return NULL;
    if (has_sign || is_given(values[NAME_b])) return call_weighted(&signature, module, values);
    return compute(NAME_x, prepare_forward, SDPA_LOGSUMEXP, module, values);
}

/* ------------------------------------------------------------------------------------ backward */

/* Adds to the pending error how to give an operand the dtype of x: integers are used as float64. */
static int suggest_dtype_of_x(const call *c, const operand *o) {
    if (c->x.array != c->x.given) return sdpa_add_remedy("; write %s.astype(np.float64)", o->name);
    return sdpa_add_remedy("; write %s.astype(%s.dtype)", o->name, c->x.name);
}

/* Sets grad, which must have the shape and dtype of x. */
static int set_grad(call *c) {
    if (set_floats(c, &c->grad) < 0) return -1;
    PyArrayObject *x = c->x.array, *grad = c->grad.array;
    const int ndim = PyArray_NDIM(x);
    if (PyArray_NDIM(grad) != ndim || !PyArray_CompareLists(PyArray_DIMS(grad), PyArray_DIMS(x), ndim)) {
        char shape[SDPA_SHAPE_SIZE];
        return sdpa_raise_shape("grad", grad, "shape %s of %s", sdpa_shape_text(shape, "", PyArray_DIMS(x), ndim),
                                c->x.name);
    }
    if (c->grad.dtype != c->x.dtype) {
        sdpa_raise_dtype("grad", grad, "dtype %S of %s", PyArray_DESCR(x), c->x.name);
        return suggest_dtype_of_x(c, &c->grad);
    }
    set_view(c, SDPA_SOFTMAX_G, grad, c->grad.dtype);
    return 0;
}

/* Sets one value per row, whose reduced axes have size 1 or are absent. Its dtype must be that of x or of the arithmetic
 * on x, like the lse of attention; a Python number may be any. */
static int set_row_values(call *c, operand *o, int v) {
    char without[SDPA_SHAPE_SIZE], with[SDPA_SHAPE_SIZE];
    npy_intp sizes[2][NPY_MAXDIMS];
    if (set_floats(c, o) < 0) return -1;
    int ndim[2];
    bool fits = false;
    for (int keepdims = 0; keepdims < 2; keepdims++) {
        ndim[keepdims] = row_shape(c, keepdims, sizes[keepdims]);
        fits |= PyArray_NDIM(o->array) == ndim[keepdims] &&
                PyArray_CompareLists(PyArray_DIMS(o->array), sizes[keepdims], ndim[keepdims]);
    }
    if (!fits) {
        return sdpa_raise_shape(o->name, o->array, "shape %s or %s, one value per row of x",
                                sdpa_shape_text(without, "", sizes[0], ndim[0]),
                                sdpa_shape_text(with, "", sizes[1], ndim[1]));
    }
    sdpa_dtype arithmetic = c->x.dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32;
    if (!o->is_number && o->dtype != c->x.dtype && o->dtype != arithmetic) {
        sdpa_raise_dtype(o->name, o->array, "dtype %S of x or %s", PyArray_DESCR(c->x.array),
                         sdpa_dtype_text(arithmetic));
        return suggest_dtype_of_x(c, o);
    }
    set_row_view(c, v, o->array, o->dtype);
    return 0;
}

static int prepare_backward(call *c, sdpa_softmax_op op) {
    if (describe(c, op) < 0) return -1;
    const int failed = op != SDPA_LOGSUMEXP_BACKWARD ? set_grad(c)
                                                     : set_row_values(c, &c->grad, SDPA_SOFTMAX_G) < 0 ||
                                                           set_row_values(c, &c->lse, SDPA_SOFTMAX_S) < 0;
    if (failed || make_out(c, NULL, 0, true) < 0) return -1;
    set_view(c, SDPA_SOFTMAX_OUT, c->out, c->x.dtype);
    return 0;
}

#define BACKWARD_CALL(x, op) call_with(&signature, x, prepare_backward, op, module, args, n_args, kwnames)

static PyObject *softmax_backward(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SDPA_SIGNATURE("softmax_backward", 2, 3, NAME_grad, NAME_weights, NAME_axis, NAME_temperature);
    return BACKWARD_CALL(NAME_weights, SDPA_SOFTMAX_BACKWARD);
}

static PyObject *log_softmax_backward(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SDPA_SIGNATURE("log_softmax_backward", 2, 3, NAME_grad, NAME_log_weights, NAME_axis, NAME_temperature);
    return BACKWARD_CALL(NAME_log_weights, SDPA_LOG_SOFTMAX_BACKWARD);
}

static PyObject *logsumexp_backward(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SDPA_SIGNATURE("logsumexp_backward", 3, 4, NAME_grad, NAME_x, NAME_lse, NAME_axis, NAME_b, NAME_sign);
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, &signature, args, n_args, kwnames, values) < 0) return NULL;
    if (is_given(values[NAME_b])) return call_weighted(&signature, module, values);
    return compute(NAME_x, prepare_backward, SDPA_LOGSUMEXP_BACKWARD, module, values);
}

/* ------------------------------------------------------------------------------------ jacobian */

/* The axes of out are the kept axes of weights, then the reduced ones twice, for i and for j; a row runs along j. */
static int prepare_jacobian(call *c, sdpa_softmax_op op) {
    sdpa_softmax_problem *p = &c->problem;
    if (describe(c, op) < 0) return -1;
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
    if (make_out(c, shape, ndim, false) < 0) return -1;
    set_buffer(c, SDPA_SOFTMAX_OUT, c->out, c->x.dtype);
    for (int i = 0; i < ndim; i++) out->stride[i] = PyArray_STRIDE(c->out, i);
    return 0;
}

static PyObject *softmax_jacobian(SDPA_ARGUMENTS) {
    static const sdpa_signature signature =
        SDPA_SIGNATURE("softmax_jacobian", 1, 2, NAME_weights, NAME_axis, NAME_temperature);
    return call_with(&signature, NAME_weights, prepare_jacobian, SDPA_SOFTMAX_JACOBIAN, module, args, n_args, kwnames);
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
