#include "programs.h"

#include <string.h>

#include "../program.h"
#include "arrays.h"
#include "values.h"

/* A program and what its pointers point at. */
typedef struct function {
    const char *argument, *arrays_argument;
    PyObject *prepared;       /* what sdpa._programs returned */
    PyArrayObject **given;    /* (n), owned or NULL: as the caller has them */
    PyArrayObject **arrays;   /* (n), owned: of the types that the core reads */
    PyObject **tangents;      /* (n), owned or NULL */
    PyArrayObject **sums;     /* (n), owned or NULL: the gradients in float64 */
    PyObject *gradients;      /* a tuple, or NULL */
    sdpa_argument *described; /* (n) */
    int64_t *summaries;
    int n, n_args;
    const char *kinds;
    sdpa_fault fault;
    sdpa_program program;
} function;

struct sdpa_functions {
    function score, mask;
    sdpa_dtype compute; /* float32 or float64 */
    sdpa_box box;       /* of all pairs */
};

/* Fields of sdpa._programs.Prepared. */
enum { CODES, REALS, INTEGERS, ARRAYS, KINDS, N_ARGS, NAMES, NAME, PAIR, N_FIELDS };

static PyObject *field(const function *f, int i) { return PyTuple_GetItem(f->prepared, i); }

/* ------------------------------------------------------------------------------------ tracing */

static int prepare(function *f, bool is_mask, PyObject *value, PyObject *args) {
    PyObject *module = PyImport_ImportModule("sdpa._programs");
    if (!module) return -1;
    f->prepared =
        PyObject_CallMethod(module, "_prepare", "(OOO)", is_mask ? Py_True : Py_False, value, args ? args : Py_None);
    Py_DECREF(module);
    if (!f->prepared) return -1;
    if (!PyTuple_Check(f->prepared) || PyTuple_Size(f->prepared) != N_FIELDS) {
        PyErr_SetString(PyExc_SystemError, "sdpa._programs and the core do not fit");
        return -1;
    }
    f->n = (int)PyTuple_Size(field(f, ARRAYS));
    f->n_args = (int)PyLong_AsLong(field(f, N_ARGS));
    f->kinds = PyUnicode_AsUTF8AndSize(field(f, KINDS), NULL);
    if (!f->kinds) return -1;
    const size_t n = (size_t)f->n + 1; /* not 0 bytes */
    f->given = PyMem_Calloc(n, sizeof *f->given);
    f->arrays = PyMem_Calloc(n, sizeof *f->arrays);
    f->tangents = PyMem_Calloc(n, sizeof *f->tangents);
    f->sums = PyMem_Calloc(n, sizeof *f->sums);
    f->described = PyMem_Calloc(n, sizeof *f->described);
    if (!f->given || !f->arrays || !f->tangents || !f->sums || !f->described) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < f->n; i++) {
        f->arrays[i] = (PyArrayObject *)Py_NewRef(PyTuple_GetItem(field(f, ARRAYS), i));
    }
    return 0;
}

int sdpa_functions_prepare(sdpa_functions **functions, const sdpa_options *options) {
    if (options->score_args && !options->score_mod) {
        PyErr_SetString(PyExc_ValueError, "score_args: expected None without score_mod");
        return -1;
    }
    if (options->mask_args && !options->mask_mod) {
        PyErr_SetString(PyExc_ValueError, "mask_args: expected None without mask_mod");
        return -1;
    }
    if (options->score_args_t && !options->score_mod) {
        PyErr_Format(PyExc_ValueError, "%s: expected None without score_mod",
                     options->where & IN(JVP) ? "score_args_t" : "gg_score_args");
        return -1;
    }
    if (!options->score_mod && !options->mask_mod) return 0;
    sdpa_functions *f = *functions = PyMem_Calloc(1, sizeof **functions);
    if (!f) {
        PyErr_NoMemory();
        return -1;
    }
    f->score.argument = "score_mod";
    f->score.arrays_argument = "score_args";
    f->mask.argument = "mask_mod";
    f->mask.arrays_argument = "mask_args";
    if (options->score_mod && prepare(&f->score, false, options->score_mod, options->score_args) < 0) return -1;
    return options->mask_mod ? prepare(&f->mask, true, options->mask_mod, options->mask_args) : 0;
}

int sdpa_functions_settle(sdpa_functions *functions) {
    if (!functions) return 0;
    function *each[] = {&functions->score, &functions->mask};
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < each[k]->n; i++) {
            if (sdpa_settle(&each[k]->arrays[i], true) < 0) return -1;
        }
    }
    return 0;
}

/* ------------------------------------------------------------------------------------ describing */

static int read_codes(function *f) {
    PyObject *codes = field(f, CODES);
    for (int v = 0; v < PyTuple_Size(codes) && v < SDPA_N_VARIANTS; v++) {
        PyObject *bytes = PyTuple_GetItem(codes, v);
        if (bytes == Py_None) continue;
        const uint16_t *words = (const uint16_t *)PyBytes_AsString(bytes);
        if (!words) return -1;
        sdpa_code *code = &f->program.code[v];
        for (int s = 0; s < SDPA_N_SECTIONS; s++) code->n[s] = words[s];
        code->n_registers = words[SDPA_N_SECTIONS];
        code->first = (const sdpa_instruction *)(words + SDPA_N_SECTIONS + 1);
        const int before = code->n[SDPA_OF_UNIT] + code->n[SDPA_OF_QUERY] + code->n[SDPA_OF_KEY];
        for (int i = 0; i < before + code->n[SDPA_OF_TILE]; i++) {
            const bool is_index = code->first[i].op == SDPA_OP_index;
            code->checks |= is_index;
            code->checks_pairs |= is_index && i >= before;
        }
        if (code->n_registers <= SDPA_MOST_REGISTERS) continue;
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a function that needs at most %d registers, got one of %d; give what "
                     "it computes from one index as an array",
                     f->argument, SDPA_MOST_REGISTERS, code->n_registers);
        return -1;
    }
    return 0;
}

/* The least and the largest of every SDPA_SUMMARY elements. */
static void summarise(const sdpa_argument *a, int64_t *least, int64_t *most) {
    for (int64_t i = 0; i < a->size; i++) {
        const int64_t x = a->kind == 'b' ? ((const uint8_t *)a->data)[i] != 0 : ((const int64_t *)a->data)[i];
        const int64_t at = i / SDPA_SUMMARY;
        if (i % SDPA_SUMMARY == 0 || x < least[at]) least[at] = x;
        if (i % SDPA_SUMMARY == 0 || x > most[at]) most[at] = x;
    }
}

/* A contiguous array of the type that the core reads for this kind; takes the reference. */
static PyArrayObject *converted(PyArrayObject *a, char kind, sdpa_dtype compute) {
    const int type = kind == 'i' ? NPY_INT64 : kind == 'b' ? NPY_BOOL : compute == SDPA_F64 ? NPY_DOUBLE : NPY_FLOAT;
    const int flags = NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_FORCECAST;
    PyArrayObject *result = (PyArrayObject *)PyArray_FromArray(a, PyArray_DescrFromType(type), flags);
    Py_DECREF((PyObject *)a);
    return result;
}

/* ValueError for an integer of array x, read from an unsigned one, that wrapped around. */
static int check_wrapped(const function *f, int x) {
    const int64_t *data = (const int64_t *)sdpa_data(f->arrays[x]);
    for (npy_intp i = 0; i < PyArray_SIZE(f->arrays[x]); i++) {
        if (data[i] >= 0) continue;
        PyObject *name = PyTuple_GetItem(field(f, NAMES), x);
        PyErr_Format(PyExc_ValueError,
                     "%s: expected integers below 2^63 in %S, got %llu; to tell them apart alone, write "
                     "%S.view(np.int64)",
                     f->argument, name, (unsigned long long)data[i], name);
        return -1;
    }
    return 0;
}

/* The bounds of a floating array. */
static void bound(sdpa_argument *a, sdpa_dtype compute) {
    a->low = INFINITY;
    a->high = -INFINITY;
    for (int64_t i = 0; i < a->size; i++) {
        const double x = compute == SDPA_F64 ? ((const double *)a->data)[i] : ((const float *)a->data)[i];
        if (x < a->low) a->low = x;
        if (x > a->high) a->high = x;
    }
}

static int describe_arrays(function *f, sdpa_dtype compute) {
    int64_t n_summaries = 0;
    for (int x = 0; x < f->n; x++) {
        sdpa_argument *a = &f->described[x];
        const bool is_unsigned = PyTypeNum_ISUNSIGNED(PyArray_TYPE(f->arrays[x]));
        f->given[x] = (PyArrayObject *)Py_NewRef((PyObject *)f->arrays[x]);
        f->arrays[x] = converted(f->arrays[x], f->kinds[x], compute);
        if (!f->arrays[x] || (is_unsigned && check_wrapped(f, x) < 0)) return -1;
        a->kind = f->kinds[x];
        a->n_axes = PyArray_NDIM(f->arrays[x]);
        if (a->n_axes > SDPA_MOST_ARRAY_AXES) {
            PyErr_Format(PyExc_ValueError, "%s: expected arrays of at most %d axes, got %d", f->arrays_argument,
                         SDPA_MOST_ARRAY_AXES, a->n_axes);
            return -1;
        }
        a->size = PyArray_SIZE(f->arrays[x]);
        a->data = sdpa_data(f->arrays[x]);
        for (int i = a->n_axes - 1; i >= 0; i--) {
            a->axis[i] = PyArray_DIM(f->arrays[x], i);
            a->stride[i] = i == a->n_axes - 1 ? 1 : a->stride[i + 1] * a->axis[i + 1];
        }
        if (a->kind == 'f') bound(a, compute);
        if (a->kind != 'f') n_summaries += (a->size + SDPA_SUMMARY - 1) / SDPA_SUMMARY;
    }
    f->summaries = n_summaries ? PyMem_Malloc((size_t)n_summaries * 2 * sizeof *f->summaries) : NULL;
    if (n_summaries && !f->summaries) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t *next = f->summaries;
    for (int x = 0; x < f->n; x++) {
        sdpa_argument *a = &f->described[x];
        const int64_t n = (a->size + SDPA_SUMMARY - 1) / SDPA_SUMMARY;
        if (a->kind == 'f' || n == 0) continue;
        summarise(a, next, next + n);
        a->least = next;
        a->most = next + n;
        next += 2 * n;
    }
    return 0;
}

/* The positions of a problem; -1 and an exception if they leave int32. */
static int box_of(const sdpa_problem *p, PyArrayObject *array, int64_t offset, sdpa_box *box) {
    int64_t least = array && PyArray_SIZE(array) ? INT64_MAX : offset, most = array ? INT64_MIN : offset;
    for (npy_intp i = 0; array && i < PyArray_SIZE(array); i++) {
        const int64_t x = ((const int64_t *)PyArray_DATA(array))[i];
        if (x < least) least = x;
        if (x > most) most = x;
    }
    if (most < least) most = least;
    const int64_t n_batch = p->cu_q ? p->n_sequences : p->n_batch;
    *box = (sdpa_box){{0, n_batch ? n_batch - 1 : 0},
                      {0, p->n_head ? p->n_head - 1 : 0},
                      {least, most + (p->n_q ? p->n_q - 1 : 0)},
                      {0, p->n_k ? p->n_k - 1 : 0}};
    if (box->query[0] >= INT32_MIN && box->query[1] <= INT32_MAX && box->key[1] <= INT32_MAX) return 0;
    PyErr_Format(PyExc_ValueError,
                 "query_offset: expected positions from -2^31 to 2^31 - 1 with score_mod or mask_mod, got queries from "
                 "%lld to %lld and keys up to %lld",
                 (long long)box->query[0], (long long)box->query[1], (long long)box->key[1]);
    return -1;
}

static int describe(function *f, const sdpa_box *box, sdpa_dtype compute) {
    sdpa_program *p = &f->program;
    if (!f->prepared) return 0;
    if (read_codes(f) < 0 || describe_arrays(f, compute) < 0) return -1;
    p->reals = (const double *)PyBytes_AsString(field(f, REALS));
    p->integers = (const int64_t *)PyBytes_AsString(field(f, INTEGERS));
    if (!p->reals || !p->integers) return -1;
    p->arrays = f->described;
    p->n_arrays = f->n;
    p->masks = sdpa_program_may_mask(p, compute == SDPA_F64 ? 1e307 : 1e37);
    p->fault = &f->fault;
    p->wide = !sdpa_program_is_narrow(p, box);
    return 0;
}

int sdpa_functions_set(sdpa_functions *f, sdpa_problem *p, PyArrayObject *offsets, int64_t offset) {
    if (!f) return 0;
    f->compute = p->dtype == SDPA_F64 ? SDPA_F64 : SDPA_F32;
    if (box_of(p, offsets, offset, &f->box) < 0 || describe(&f->score, &f->box, f->compute) < 0 ||
        describe(&f->mask, &f->box, f->compute) < 0) {
        return -1;
    }
    if (f->score.prepared) p->score_mod = &f->score.program;
    if (f->mask.prepared) p->mask_mod = &f->mask.program;
    return 0;
}

int sdpa_functions_check_overlap(sdpa_functions *functions, PyObject *module, PyArrayObject *out) {
    if (!functions) return 0;
    const function *each[] = {&functions->score, &functions->mask};
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < each[k]->n; i++) {
            PyObject *own = PyTuple_GetItem(field(each[k], NAMES), i);
            PyObject *name = PyUnicode_FromFormat("%S of %s", own, each[k]->argument);
            const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
            const int failed = text ? sdpa_check_overlap(module, out, text, each[k]->given[i]) : -1;
            Py_XDECREF(name);
            if (failed) return -1;
        }
    }
    return 0;
}

/* ------------------------------------------------------------------------------------ derivatives */

/* One tangent, which must look like the argument it belongs to. */
static int set_tangent(function *f, sdpa_dtype compute, PyObject *module, int i, const char *argument,
                       PyObject *value) {
    PyArrayObject *own = (PyArrayObject *)PyTuple_GetItem(field(f, ARRAYS), i);
    char name[64];
    PyOS_snprintf(name, sizeof name, "%s[%d]", argument, i);
    if (f->kinds[i] != 'f') {
        PyErr_Format(PyExc_ValueError, "%s: expected None, since score_args[%d] holds no floating numbers", name, i);
        return -1;
    }
    PyArrayObject *a = sdpa_array(module, name, value);
    if (!a) return -1;
    const bool fits = PyArray_NDIM(a) == PyArray_NDIM(own) &&
                      PyArray_CompareLists(PyArray_DIMS(a), PyArray_DIMS(own), PyArray_NDIM(a));
    if (!fits || !sdpa_is_float(sdpa_dtype_of(module, a))) {
        PyErr_Format(fits ? PyExc_TypeError : PyExc_ValueError,
                     "%s: expected score_args[%d]'s shape and a floating dtype", name, i);
        Py_DECREF((PyObject *)a);
        return -1;
    }
    f->tangents[i] = (PyObject *)converted(a, 'f', compute);
    if (!f->tangents[i]) return -1;
    f->described[i].tangent = sdpa_data((PyArrayObject *)f->tangents[i]);
    return 0;
}

int sdpa_functions_read_tangents(sdpa_functions *functions, const sdpa_options *options) {
    PyObject *given = options->score_args_t;
    const char *argument = options->where & IN(JVP) ? "score_args_t" : "gg_score_args";
    if (!given) return 0; /* without functions it was refused */
    function *f = &functions->score;
    PyObject *values = PySequence_Tuple(given);
    if (!values || PyTuple_Size(values) != f->n_args) {
        if (values) {
            PyErr_Format(PyExc_ValueError, "%s: expected %d arrays or None, one for each of score_args, got %zd",
                         argument, f->n_args, PyTuple_Size(values));
        } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s: expected a tuple of arrays, got %.200R; put it in a tuple", argument,
                         given);
        }
        Py_XDECREF(values);
        return -1;
    }
    int failed = 0;
    for (int i = 0; i < f->n_args && !failed; i++) {
        PyObject *value = PyTuple_GetItem(values, i);
        if (value != Py_None) failed = set_tangent(f, functions->compute, options->module, i, argument, value);
    }
    Py_DECREF(values);
    return failed;
}

PyObject *sdpa_functions_gradients(sdpa_functions *functions) {
    if (!functions || !functions->score.prepared || functions->score.n_args == 0) {
        PyErr_SetString(PyExc_ValueError, "needs: 'score_args' have gradients only where they are given, got None");
        return NULL;
    }
    function *f = &functions->score;
    f->gradients = PyTuple_New(f->n_args);
    for (int i = 0; f->gradients && i < f->n_args; i++) {
        PyArrayObject *own = (PyArrayObject *)PyTuple_GetItem(field(f, ARRAYS), i);
        const int nd = PyArray_NDIM(own);
        PyObject *result = Py_NewRef(Py_None);
        if (f->kinds[i] == 'f') {
            Py_DECREF(result);
            PyArray_Descr *type = PyArray_DescrNewByteorder(PyArray_DESCR(own), NPY_NATIVE);
            result = type ? PyArray_Zeros(nd, PyArray_DIMS(own), type, 0) : NULL;
            f->sums[i] = result && PyArray_TYPE((PyArrayObject *)result) == NPY_DOUBLE
                             ? (PyArrayObject *)Py_NewRef(result)
                             : (PyArrayObject *)PyArray_ZEROS(nd, PyArray_DIMS(own), NPY_DOUBLE, 0);
            if (f->sums[i]) f->described[i].gradient = PyArray_DATA(f->sums[i]);
        }
        if (!result || PyTuple_SetItem(f->gradients, i, result) < 0 || PyErr_Occurred()) Py_CLEAR(f->gradients);
    }
    sdpa_program_share(&f->program, f->described, &functions->box);
    return Py_XNewRef(f->gradients);
}

/* b, h, q and k of a fault as the user counts them, from Python's function if the call is a part of another. */
static int find_pair(const function *f, long long pair[4]) {
    const sdpa_fault *x = &f->fault;
    const long long own[] = {x->batch, x->head, x->query, x->key};
    memcpy(pair, own, sizeof own);
    if (field(f, PAIR) == Py_None) return 0;
    PyObject *found =
        PyObject_CallFunction(field(f, PAIR), "(OLLLL)", field(f, ARRAYS), own[0], own[1], own[2], own[3]);
    for (int i = 0; found && i < 4; i++) {
        PyObject *number = PySequence_GetItem(found, i);
        pair[i] = number ? PyLong_AsLongLong(number) : 0;
        Py_XDECREF(number);
    }
    Py_XDECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

/* IndexError for the first index that was out of range. */
static int raise_fault(const function *f) {
    const sdpa_fault *x = &f->fault;
    long long pair[4];
    if (!x->found) return 0;
    if (find_pair(f, pair) < 0) return -1;
    char got[32] = "";
    if (x->index != SDPA_UNKNOWN_INDEX) PyOS_snprintf(got, sizeof got, ", got %lld", (long long)x->index);
    PyErr_Format(PyExc_IndexError,
                 "%s: %U reads %S out of range: expected an index from 0 to %lld on axis %d%s at b = %lld, h = %lld, "
                 "q = %lld, k = %lld; mask such pairs, or clip the index",
                 f->argument, field(f, NAME), PyTuple_GetItem(field(f, NAMES), x->array),
                 (long long)f->described[x->array].axis[x->axis] - 1, x->axis, got, pair[0], pair[1], pair[2], pair[3]);
    return -1;
}

int sdpa_functions_finish(sdpa_functions *functions) {
    if (!functions) return 0;
    function *f = &functions->score;
    if (raise_fault(f) < 0 || raise_fault(&functions->mask) < 0) return -1;
    for (int i = 0; f->gradients && i < f->n_args; i++) {
        PyArrayObject *to = (PyArrayObject *)PyTuple_GetItem(f->gradients, i);
        if (f->sums[i] && f->sums[i] != to && PyArray_CopyInto(to, f->sums[i]) < 0) return -1;
    }
    return 0;
}

static void release(function *f) {
    for (int i = 0; i < f->n; i++) {
        if (f->given) Py_XDECREF((PyObject *)f->given[i]);
        if (f->arrays) Py_XDECREF((PyObject *)f->arrays[i]);
        if (f->tangents) Py_XDECREF(f->tangents[i]);
        if (f->sums) Py_XDECREF((PyObject *)f->sums[i]);
    }
    PyMem_Free(f->given);
    PyMem_Free(f->arrays);
    PyMem_Free(f->tangents);
    PyMem_Free(f->sums);
    PyMem_Free(f->described);
    PyMem_Free(f->summaries);
    Py_XDECREF(f->gradients);
    Py_XDECREF(f->prepared);
}

void sdpa_functions_release(sdpa_functions *functions) {
    if (!functions) return;
    release(&functions->score);
    release(&functions->mask);
    PyMem_Free(functions);
}
