#include "call.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "../runtime/parallel.h"
#include "../runtime/rounding.h"
#include "../sequences.h"
#include "arrays.h"
#include "errors.h"
#include "gil.h"
#include "packed.h"
#include "values.h"
#include "warn.h"

/* ------------------------------------------------------------------------------------ arguments */

/* Whether an operand may be None: an absent tangent counts as zero, an absent bias as none. */
static bool may_be_none(enum sdpa_name name) {
#define TANGENTS(name, ...) [NAME_##name##_t] = true, [NAME_gg_##name] = true,
    static const bool may_be[N_NAMES] = {SDPA_DIFFERENTIABLE(TANGENTS)[NAME_bias] = true};
#undef TANGENTS
    return may_be[name];
}

/* Takes the reference; -1 if it is NULL. */
static int hold(sdpa_call *call, enum sdpa_name name, PyArrayObject *array) {
    if (!array) return -1;
    call->arrays[name] = array;
    call->held[call->n_held++] = (unsigned char)name;
    return 0;
}

static int convert(sdpa_call *call, enum sdpa_name name, PyObject *value) {
    return hold(call, name, sdpa_array(call->module, sdpa_name_text(name), value));
}

/* Converts all arguments that are arrays. */
static int convert_all(sdpa_call *call, const sdpa_signature *signature, PyObject *const values[N_NAMES]) {
    for (int i = 0; i < signature->n_required; i++) {
        const enum sdpa_name name = signature->names[i];
        if (values[name] == Py_None && may_be_none(name)) continue;
        if (convert(call, name, values[name]) < 0) return -1;
    }
    for (int i = 0; i < call->options.n_given; i++) {
        const sdpa_option *row = &sdpa_option_table[call->options.given[i]];
        PyObject *value = values[row->name];
        if (!row->array) continue;
        const int is_array = row->read ? sdpa_is_array(value) : 1;
        if (is_array < 0 || (is_array && convert(call, row->name, value) < 0)) return -1;
    }
    return 0;
}

/* A scale that is a number becomes an array without axes where its derivative is asked for. */
static int convert_number(sdpa_call *call, PyObject *value) {
    const bool moved = call->arrays[NAME_scale_t] || call->arrays[NAME_gg_scale];
    if (!call->options.has_scale || !(moved || call->options.needs & NEEDS(scale))) return 0;
    if (PyArray_IsScalar(value, Generic)) {
        PyArrayObject *own = (PyArrayObject *)PyArray_FromScalar(value, NULL);
        if (!own || sdpa_is_float(sdpa_dtype_of(call->module, own))) return hold(call, NAME_scale, own);
        Py_DECREF((PyObject *)own); /* of a type without gradients, which float64 stands for */
    }
    PyArrayObject *wide = (PyArrayObject *)PyArray_SimpleNew(0, NULL, NPY_DOUBLE);
    if (wide) *(double *)PyArray_DATA(wide) = call->options.scale;
    return hold(call, NAME_scale, wide);
}

static int settle_all(sdpa_call *call) {
    for (int i = 0; i < call->n_held; i++) {
        if (sdpa_settle(&call->arrays[call->held[i]], call->options.out != NULL) < 0) return -1;
    }
    return 0;
}

/* ------------------------------------------------------------------------------------ tensors */

void sdpa_call_view(const sdpa_call *call, sdpa_tensor *t, int64_t *batch, PyArrayObject *a, sdpa_dtype dtype,
                    int n_inner, const npy_intp *inner, bool heads) {
    const npy_intp *sizes = PyArray_DIMS(a), *strides = PyArray_STRIDES(a);
    const sdpa_problem *p = &call->problem;
    npy_intp swapped[2][3];
    if (call->packed && n_inner == 2) {
        const int order[] = {1, 0, 2};
        for (int i = 0; i < 3; i++) {
            swapped[0][i] = sizes[order[i]];
            swapped[1][i] = strides[order[i]];
        }
        sizes = swapped[0];
        strides = swapped[1];
        inner = sizes + 1;
    }
    int axis = PyArray_NDIM(a) - 1; /* the next axis, counting down from the last */
    int64_t inner_strides[2] = {0, 0};
    for (int i = n_inner - 1; i >= 0; i--, axis--) {
        if (axis >= 0 && (sizes[axis] != 1 || inner[i] == 1)) inner_strides[i] = strides[axis];
    }
    t->data = sdpa_data(a);
    t->row = inner_strides[0];
    t->col = inner_strides[1];
    t->dtype = dtype;
    t->swapped = sdpa_is_swapped(a);
    t->head = 0;
    t->group = 1;
    if (heads) {
        if (axis >= 0 && sizes[axis] == p->n_head) {
            t->head = strides[axis];
        } else if (axis >= 0 && sizes[axis] > 1) {
            t->head = strides[axis];
            t->group = p->n_head ? p->n_head / sizes[axis] : 1;
        }
        axis--;
    }
    int first = call->n_batch_axes - 1 - axis; /* the output's axis that corresponds to the first axis of `a` */
    for (int i = 0; i < p->n_axes; i++) {
        int own = call->axis[i] - first;
        batch[i] = own >= 0 && sizes[own] != 1 ? strides[own] : 0;
    }
    t->batch = batch;
}

/* Adds a tensor to those that are set, and returns the place of its strides. A tensor is set once in a call, so there is
 * room for all. */
static int64_t *add_present(sdpa_call *call, sdpa_tensor *t) {
    if (call->n_present == N_TENSORS) Py_FatalError("sdpa: a tensor was set twice");
    call->present[call->n_present] = t;
    return call->batch + call->problem.n_axes * call->n_present++;
}

void sdpa_call_set(sdpa_call *call, sdpa_tensor *t, PyArrayObject *a, sdpa_dtype dtype, int n_inner,
                   const npy_intp *inner, bool heads) {
    sdpa_call_view(call, t, add_present(call, t), a, dtype, n_inner, inner, heads);
}

/* Points t at one integer per batch entry or sequence. */
static void set_integers(sdpa_call *call, sdpa_tensor *t, PyArrayObject *array, int64_t *value) {
    if (array) {
        sdpa_call_set(call, t, array, SDPA_I64, 0, NULL, false);
        if (call->packed && PyArray_SIZE(array) > 1) t->row = sizeof(int64_t);
        return;
    }
    t->data = (char *)value;
    t->dtype = SDPA_I64;
    t->group = 1;
    int64_t *batch = add_present(call, t);
    for (int i = 0; i < call->problem.n_axes; i++) batch[i] = 0;
    t->batch = batch;
}

/* ------------------------------------------------------------------------------------ operands */

/* The dtype of an operand of the call; -1 and an exception if no kernel computes with it. */
static int operand_dtype(const sdpa_call *call, const char *name, PyArrayObject *a) {
    const int dtype = sdpa_dtype_of(call->module, a);
    if (sdpa_is_float(dtype)) return dtype;
    sdpa_raise_dtype(name, a, "float16, bfloat16, float32 or float64");
    return sdpa_suggest_type(call->module, name, a, PyArray_ISFLOAT(a) ? "np.float64" : "np.float32");
}

/* Sets the dtypes of queries, keys and values: one for all three, or a 16-bit one of keys and values beside float32. */
static int set_dtypes(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    PyArrayObject *const *a = call->arrays;
    const int q = operand_dtype(call, "query", a[NAME_query]), k = q < 0 ? -1 : operand_dtype(call, "key", a[NAME_key]),
              v = k < 0 || !a[NAME_value] ? k : operand_dtype(call, "value", a[NAME_value]);
    if (v < 0) return -1;
    p->dtype = (sdpa_dtype)q;
    p->k.dtype = p->v.dtype = (sdpa_dtype)k;
    const bool may_differ = q == SDPA_F32 && !(call->options.where & IN_ADDITIVES);
    if (k != q && !(may_differ && sdpa_is_narrow(p->k.dtype))) {
        sdpa_raise_dtype("key", a[NAME_key], may_differ ? "query's dtype %S, float16 or bfloat16" : "query's dtype %S",
                         PyArray_DESCR(a[NAME_query]));
        return sdpa_suggest_common_type("key", a[NAME_key], "query", a[NAME_query]);
    }
    if (v == k) return 0;
    sdpa_raise_dtype("value", a[NAME_value], "key's dtype %S", PyArray_DESCR(a[NAME_key]));
    return sdpa_suggest_common_type("value", a[NAME_value], "key", a[NAME_key]);
}

static npy_intp size_from_end(PyArrayObject *a, int i) {
    return PyArray_NDIM(a) >= i ? PyArray_DIM(a, PyArray_NDIM(a) - i) : 1;
}

/* A remedy for operands of three axes or more whose heads may stand after the rows: then the axis read as rows has as
 * many entries in both, or groups of them. */
static const char *layout_hint(const sdpa_call *call) {
    const sdpa_problem *p = &call->problem;
    const bool deep = PyArray_NDIM(call->arrays[NAME_query]) > 2 && PyArray_NDIM(call->arrays[NAME_key]) > 2;
    return deep && p->n_k && p->n_q % p->n_k == 0 ? "; write x.swapaxes(-3, -2) if the axes are (..., L, heads, d)"
                                                  : "";
}

/* Broadcasts the leading axes of `a` with those of the output, except heads if `but_heads` (they are grouped). */
static int broadcast_lead(sdpa_call *call, const char *name, PyArrayObject *a, bool but_heads) {
    int nd = PyArray_NDIM(a);
    for (int i = 0; i < nd - 2; i++) {
        int axis = call->nd - nd + i;
        if (but_heads && axis == call->nd - 3) continue;
        npy_intp size = PyArray_DIM(a, i), *common = &call->shape[axis];
        if (*common == 1) {
            *common = size;
        } else if (size != 1 && size != *common) {
            char expected[SDPA_SHAPE_SIZE], got[SDPA_SHAPE_SIZE];
            const bool is_head = axis == call->nd - 3 && size, groups = is_head && *common % size == 0;
            PyErr_Format(PyExc_ValueError, "%s: expected leading axes that broadcast with %s, got %s%s%s", name,
                         sdpa_shape_text(expected, "", call->shape, call->nd - 2),
                         sdpa_shape_text(got, "", PyArray_DIMS(a), nd - 2),
                         groups ? "; enable_gqa=True lets groups of query heads share a key head" : "",
                         is_head ? layout_hint(call) : "");
            return -1;
        }
    }
    return 0;
}

static int check_heads(sdpa_call *call) {
    PyArrayObject *k = call->arrays[NAME_key], *v = call->arrays[NAME_value];
    npy_intp n_q = size_from_end(call->arrays[NAME_query], 3), n_k = size_from_end(k, 3);
    if (n_k ? n_q % n_k : n_q) {
        char got[SDPA_SHAPE_SIZE];
        PyErr_Format(PyExc_ValueError, "key: expected a number of heads that divides query's %lld, got %s%s",
                     (long long)n_q, sdpa_shape_text(got, "", PyArray_DIMS(k), PyArray_NDIM(k)), layout_hint(call));
        return -1;
    }
    if (v && size_from_end(v, 3) != n_k) {
        return sdpa_raise_shape("value", v, "key's number of heads, %lld", (long long)n_k);
    }
    if (call->nd > 2) call->shape[call->nd - 3] = n_q;
    return 0;
}

int sdpa_call_set_axes(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    p->n_head = call->nd > 2 ? call->shape[call->nd - 3] : 1;
    call->n_batch_axes = call->nd > 3 ? call->nd - 3 : 0;
    p->n_batch = 1;
    p->axis = call->sizes;
    p->n_axes = 0;
    for (int i = 0; i < call->n_batch_axes; i++) {
        /* May wrap around, but then no result can be allocated. */
        p->n_batch = (int64_t)((uint64_t)p->n_batch * (uint64_t)call->shape[i]);
        if (call->shape[i] == 1) continue;
        call->axis[p->n_axes] = i;
        call->sizes[p->n_axes++] = call->shape[i];
    }
    if (p->n_axes <= FEW_AXES) return 0;
    call->batch = PyMem_Malloc(N_TENSORS * (size_t)p->n_axes * sizeof *call->batch);
    if (call->batch) return 0;
    PyErr_NoMemory();
    return -1;
}

/* Sizes of the problem and of the output. */
static int set_sizes(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    PyArrayObject *q = call->arrays[NAME_query], *k = call->arrays[NAME_key], *v = call->arrays[NAME_value];
    if (PyArray_NDIM(q) < 2) return sdpa_raise_rows("query", q, "at least two axes, (..., Lq, d_k)");
    if (PyArray_NDIM(k) < 2) return sdpa_raise_rows("key", k, "at least two axes, (..., Lk, d_k)");
    if (v && PyArray_NDIM(v) < 2) return sdpa_raise_rows("value", v, "at least two axes, (..., Lk, d_v)");
    p->n_q = size_from_end(q, 2);
    p->d_k = size_from_end(q, 1);
    p->n_k = size_from_end(k, 2);
    p->d_v = v ? size_from_end(v, 1) : 0;
    const bool additive = call->options.where & IN_ADDITIVES; /* its weights project q and k to the same width */
    const struct {
        const char *name, *to_match;
        PyArrayObject *a;
        npy_intp sizes[2];
        bool wrong;
    } inner[] = {
        {"key", "query's last axis", k, {p->n_k, p->d_k}, !additive && size_from_end(k, 1) != p->d_k},
        {"value", "key's rows", v, {p->n_k, p->d_v}, v && size_from_end(v, 2) != p->n_k},
    };
    for (int i = 0; i < 2; i++) {
        if (!inner[i].wrong) continue;
        char expected[SDPA_SHAPE_SIZE], got[SDPA_SHAPE_SIZE];
        PyErr_Format(PyExc_ValueError, "%s: expected %s to match %s %lld, got %s", inner[i].name,
                     sdpa_shape_text(expected, "..., ", inner[i].sizes, 2), inner[i].to_match,
                     (long long)inner[i].sizes[i == 0],
                     sdpa_shape_text(got, "..., ", PyArray_DIMS(inner[i].a) + PyArray_NDIM(inner[i].a) - 2, 2));
        return -1;
    }

    call->nd = PyArray_NDIM(q);
    if (PyArray_NDIM(k) > call->nd) call->nd = PyArray_NDIM(k);
    if (v && PyArray_NDIM(v) > call->nd) call->nd = PyArray_NDIM(v);
    for (int i = 0; i < call->nd - 2; i++) call->shape[i] = 1;
    bool gqa = call->options.enable_gqa;
    if (gqa && check_heads(call) < 0) return -1;
    if (broadcast_lead(call, "query", q, gqa) < 0 || broadcast_lead(call, "key", k, gqa) < 0 ||
        (v && broadcast_lead(call, "value", v, gqa) < 0)) {
        return -1;
    }
    call->shape[call->nd - 2] = p->n_q;
    call->shape[call->nd - 1] = p->d_v;
    return sdpa_call_set_axes(call);
}

/* set_sizes for packed arrays, (total, heads, d). */
static int set_packed_sizes(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    PyArrayObject *const operands[] = {call->arrays[NAME_query], call->arrays[NAME_key], call->arrays[NAME_value]};
    if (sdpa_packed_set_sizes(p, &call->options, operands) < 0) return -1;
    call->nd = 3;
    call->shape[0] = p->n_head;
    call->shape[1] = p->n_q;
    call->shape[2] = p->d_v;
    return sdpa_call_set_axes(call);
}

/* ------------------------------------------------------------------------------------ masks */

/* Points t at an argument that broadcasts to (..., heads, Lq, Lk). */
static int set_pairs(sdpa_call *call, sdpa_tensor *t, const char *name, PyArrayObject *a, sdpa_dtype dtype) {
    if (call->packed) {
        sdpa_raise_shape(name, a, "None with cu_seqlens_q");
        return sdpa_add_remedy("; use mask_mod or score_mod");
    }
    npy_intp shape[NPY_MAXDIMS];
    memcpy(shape, call->shape, sizeof *shape * (size_t)call->nd);
    shape[call->nd - 1] = call->problem.n_k;
    if (!sdpa_broadcasts_to(a, shape, call->nd)) {
        char text[SDPA_SHAPE_SIZE];
        sdpa_raise_shape(name, a, "a shape that broadcasts to %s", sdpa_shape_text(text, "", shape, call->nd));
        const bool of_keys = sdpa_suggest_axes(name, a, shape, call->nd) == PyArray_NDIM(a) - 1 && PyArray_NDIM(a) > 1;
        if (!of_keys || !call->n_batch_axes || call->options.where & IN(TORCH)) return -1;
        return sdpa_add_remedy(", or key_lengths= for keys that are padded at the end");
    }
    sdpa_call_set(call, t, a, dtype, 2, shape + call->nd - 2, true);
    return 0;
}

/* A lone `where` is a boolean mask. */
static int set_where(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    PyArrayObject *where = call->arrays[NAME_where];
    if (!where) return 0;
    if (sdpa_dtype_of(call->module, where) != SDPA_BOOL) {
        sdpa_raise_dtype("where", where, "bool (True = attend)");
        return sdpa_is_real(call->module, where) ? sdpa_add_remedy("; write where != 0") : -1;
    }
    return set_pairs(call, p->mask.data ? &p->where : &p->mask, "where", where, SDPA_BOOL);
}

static int set_mask(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    PyArrayObject *mask = call->arrays[NAME_attn_mask];
    if (!mask) return 0;
    const int dtype = sdpa_dtype_of(call->module, mask);
    if (dtype != SDPA_BOOL && !sdpa_is_float(dtype)) {
        sdpa_raise_dtype("attn_mask", mask,
                         "bool (True = attend) or, to be added to the scores, float16, bfloat16, float32 or float64");
        if (!PyArray_ISINTEGER(mask)) return -1;
        return sdpa_add_remedy("; write attn_mask != 0 for a mask of ones and zeros, attn_mask.astype(query.dtype) for "
                               "a bias");
    }
    return set_pairs(call, &p->mask, "attn_mask", mask, (sdpa_dtype)dtype);
}

/* ------------------------------------------------------------------------------------ ranges */

static bool computes_in_f64(const sdpa_call *call) { return call->problem.dtype == SDPA_F64; }

static int raise_range(const sdpa_call *call, const char *name, const char *expected, double limit, double got) {
    PyObject *bound = PyFloat_FromDouble(limit), *value = PyFloat_FromDouble(got);
    if (bound && value) {
        PyErr_Format(PyExc_ValueError, "%s: expected %s %R, the range of %s arithmetic, got %R", name, expected, bound,
                     computes_in_f64(call) ? "float64" : "float32", value);
    }
    Py_XDECREF(bound);
    Py_XDECREF(value);
    return -1;
}

/* Sets scale and softcap, after dtype and d_k. A cap beyond the range is none. */
static int set_factors(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    const sdpa_options *options = &call->options;
    const double most = sdpa_largest(p->dtype), least = computes_in_f64(call) ? DBL_MIN : FLT_MIN;
    const bool unscaled = !p->d_k || options->where & IN_ADDITIVES;
    const sdpa_rounding mode = sdpa_round_to_nearest();
    p->scale = options->has_scale ? options->scale : unscaled ? 1 : 1 / sqrt((double)p->d_k);
    sdpa_rounding_restore(mode);
    if (fabs(p->scale) > most) return raise_range(call, "scale", "a magnitude up to", most, p->scale);
    if (options->softcap > 0 && options->softcap < least) {
        return raise_range(call, "softcap", "at least", least, options->softcap);
    }
    p->softcap = options->softcap > most ? 0 : options->softcap;
    return 0;
}

/* Refuses numbers that the arithmetic cannot hold; sinks are taken in float64. NaN and Inf are refused as a scale only. */
static int check_range(const sdpa_call *call, enum sdpa_name argument, PyArrayObject *a) {
    const bool is_wide = argument == NAME_sinks && !computes_in_f64(call), is_factor = argument == NAME_scale;
    const double most = is_wide ? FLT_MAX : sdpa_largest(call->problem.dtype);
    if (!is_factor && PyArray_TYPE(a) != NPY_DOUBLE && PyArray_TYPE(a) != NPY_FLOAT) return 0;
    PyArrayObject *copy = (PyArrayObject *)PyArray_FromArray(a, PyArray_DescrFromType(NPY_DOUBLE), NPY_ARRAY_CARRAY);
    if (!copy) return -1;
    const double *x = PyArray_DATA(copy);
    int failed = 0;
    for (npy_intp i = 0; i < PyArray_SIZE(copy) && !failed; i++) {
        if (isfinite(x[i]) ? fabs(x[i]) > most : is_factor) {
            failed = raise_range(call, sdpa_name_text(argument), "magnitudes up to", most, x[i]);
        }
    }
    Py_DECREF((PyObject *)copy);
    return failed;
}

/* One number per head: sinks, alibi_slopes, scale. */
static int set_per_head(sdpa_call *call, sdpa_tensor *t, enum sdpa_name argument) {
    PyArrayObject *a = call->arrays[argument];
    if (!a) return 0;
    const char *name = sdpa_name_text(argument);
    const int dtype = operand_dtype(call, name, a);
    if (dtype < 0) return -1;
    const npy_intp one_head[] = {1}, *shape = call->nd > 2 ? call->shape : one_head;
    int n = call->nd > 2 ? call->nd - 2 : 1;
    if (!sdpa_broadcasts_to(a, shape, n)) {
        char text[SDPA_SHAPE_SIZE];
        sdpa_raise_shape(name, a, "a shape that broadcasts to (..., heads), %s", sdpa_shape_text(text, "", shape, n));
        const int nd = PyArray_NDIM(a) - 2;
        const bool of_pairs = nd > 0 && size_from_end(a, 1) * size_from_end(a, 2) == 1 &&
                              sdpa_broadcast_behind(PyArray_DIMS(a), nd, 0, shape, n);
        if (of_pairs) return sdpa_add_remedy("; write %s[..., 0, 0]", name);
        sdpa_suggest_axes(name, a, shape, n);
        return -1;
    }
    if (check_range(call, argument, a) < 0) return -1;
    sdpa_call_set(call, t, a, (sdpa_dtype)dtype, 0, NULL, true);
    return 0;
}

static int check_integers(sdpa_call *call, const char *name, const sdpa_integers *integers) {
    const npy_intp n_sequences = call->problem.n_sequences, *shape = call->packed ? &n_sequences : call->shape;
    const int n = call->packed ? 1 : call->n_batch_axes;
    if (!integers->array || sdpa_broadcasts_to(integers->array, shape, n)) return 0;
    char text[SDPA_SHAPE_SIZE];
    sdpa_raise_shape(name, integers->array, "one integer, or a shape that broadcasts to the %s, %s",
                     call->packed ? "sequences" : "axes before heads", sdpa_shape_text(text, "", shape, n));
    if (call->packed || call->nd != 3 || !sdpa_broadcasts_to(integers->array, call->shape, 1)) return -1;
    return sdpa_add_remedy("; of three axes the first is heads, so a batch of one head is x[:, None]");
}

static int check_lengths(const sdpa_call *call) {
    const sdpa_integers *lengths = &call->options.key_lengths;
    const int64_t *data = lengths->array ? PyArray_DATA(lengths->array) : &lengths->value, n_k = call->problem.n_k;
    for (npy_intp i = 0, n = lengths->array ? PyArray_SIZE(lengths->array) : 1; i < n; i++) {
        if (data[i] >= 0 && data[i] <= n_k) continue;
        PyErr_Format(PyExc_ValueError, "key_lengths: expected integers from 0 to Lk = %lld, got %lld", (long long)n_k,
                     (long long)data[i]);
        return -1;
    }
    return 0;
}

/* Sets the offsets of is_causal="lower_right", with which none are given. */
static int set_lower_right(sdpa_call *call) {
    const sdpa_problem *p = &call->problem;
    const sdpa_integers *lengths = &call->options.key_lengths;
    sdpa_integers *offset = &call->options.query_offset;
    offset->value = (lengths->given ? lengths->value : p->n_k) - p->n_q;
    if (call->packed) {
        offset->array = sdpa_packed_lower_right(p, lengths);
    } else if (lengths->array) {
        offset->array = (PyArrayObject *)PyArray_NewCopy(lengths->array, NPY_CORDER);
        int64_t *data = offset->array ? PyArray_DATA(offset->array) : NULL;
        for (npy_intp i = 0; data && i < PyArray_SIZE(offset->array); i++) data[i] -= p->n_q;
    } else {
        return 0;
    }
    return hold(call, NAME_query_offset, offset->array); /* options release what was given */
}

/* Sets the keys that a query may see apart from the mask: key_lengths, query_offset, is_causal and window. */
static int set_band(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    const sdpa_options *options = &call->options;
    const sdpa_integers *lengths = &options->key_lengths, *offset = &options->query_offset;
    if (check_integers(call, "key_lengths", lengths) < 0 || check_integers(call, "query_offset", offset) < 0) return -1;
    if (lengths->given) {
        if ((call->packed ? sdpa_packed_check_lengths(p, lengths) : check_lengths(call)) < 0) return -1;
        call->key_length = lengths->value;
        set_integers(call, &p->key_length, lengths->array, &call->key_length);
    }

    p->has_upper = options->causal || options->has_right;
    p->has_lower = options->has_left;
    p->upper = options->causal ? 0 : options->right;
    p->lower = -options->left;
    const bool placed = call->arrays[NAME_alibi_slopes] || call->functions;
    if (!p->has_upper && !p->has_lower && !placed) return 0;
    if (options->lower_right && set_lower_right(call) < 0) return -1;
    call->offset = offset->value;
    if (offset->array || call->offset) set_integers(call, &p->offset, offset->array, &call->offset);
    return 0;
}

/* ------------------------------------------------------------------------------------ the call */

void sdpa_call_empty(sdpa_call *call, PyObject *module) {
    sdpa_problem *p = &call->problem;
    *p = (sdpa_problem){0};
    p->n_workers = sdpa_get_num_threads();
    p->interrupted = sdpa_interrupted;
    call->module = module;
    call->n_present = call->n_held = 0;
    call->functions = NULL;
    call->batch = call->few;
    memset(call->arrays, 0, sizeof call->arrays);
    call->packed = call->joins_axes = false;
    call->work = 0;
    memset(&call->options, 0, sizeof call->options);
}

/* Refuses sizes that zero strides allow and no memory could serve; see SDPA_LARGEST_AXIS. */
static int check_sizes(const sdpa_call *call) {
    const sdpa_problem *p = &call->problem;
    double heads = 1; /* n_batch may have wrapped around */
    for (int i = 0; i < call->nd - 2; i++) heads *= (double)call->shape[i];
    const int64_t n = p->n_q > p->n_k ? p->n_q : p->n_k, d = p->d_k > p->d_v ? p->d_k : p->d_v;
    if (heads == 0 || p->n_q == 0) return 0;
    if (n <= SDPA_LARGEST_AXIS && d <= SDPA_LARGEST_AXIS && heads * (double)n <= (double)SDPA_MOST_ROWS) return 0;
    PyErr_Format(PyExc_MemoryError, "no memory for attention of Lq = %lld, Lk = %lld, d_k = %lld, d_v = %lld",
                 (long long)p->n_q, (long long)p->n_k, (long long)p->d_k, (long long)p->d_v);
    return -1;
}

static int check_lse_dtype(const sdpa_call *call) {
    const sdpa_options *options = &call->options;
    if (!options->has_lse_dtype || options->lse_dtype == SDPA_F64 || call->problem.dtype != SDPA_F64) return 0;
    PyErr_SetString(PyExc_TypeError, "lse_dtype: expected float64 to match query's dtype float64, got float32; "
                                     "write lse_dtype=None");
    return -1;
}

/* Sets dtypes, sizes and numbers of the problem. */
static int set_operands(sdpa_call *call) {
    sdpa_problem *p = &call->problem;
    PyArrayObject *q = call->arrays[NAME_query], *k = call->arrays[NAME_key], *v = call->arrays[NAME_value];
    call->packed = call->options.cu_seqlens_q.given || call->options.cu_seqlens_k.given;
    if (set_dtypes(call) < 0 || (call->packed ? set_packed_sizes(call) : set_sizes(call)) < 0 ||
        check_sizes(call) < 0 || set_factors(call) < 0 || check_lse_dtype(call) < 0) {
        return -1;
    }
    const double pairs = (double)p->n_batch * (double)p->n_head * ((double)p->n_q + 1) * ((double)p->n_k + 1);
    call->work = sdpa_pass_work(p, SDPA_PASS_FORWARD, call->packed ? sdpa_sequences_pairs(p) : pairs);
    p->dropout_p = call->options.dropout_p;
    p->seed = call->options.seed;
    p->invariant = call->options.invariant;
    p->stage = call->options.stage;
    sdpa_call_set(call, &p->q, q, p->dtype, 2, sdpa_last_axes(q), true);
    sdpa_call_set(call, &p->k, k, p->k.dtype, 2, sdpa_last_axes(k), true);
    if (v) sdpa_call_set(call, &p->v, v, p->v.dtype, 2, sdpa_last_axes(v), true);
    return 0;
}

int sdpa_call_begin(sdpa_call *call, PyObject *module, unsigned where, const sdpa_signature *signature,
                    PyObject *const values[N_NAMES], bool has_options) {
    sdpa_problem *p = &call->problem;
    sdpa_call_empty(call, module);
    call->joins_axes = true;
    call->options.where = where;
    if (has_options) sdpa_options_find(&call->options, signature, values);
    if (convert_all(call, signature, values) < 0 ||
        sdpa_options_read(module, &call->options, where, values, call->arrays) < 0 ||
        convert_number(call, values[NAME_scale]) < 0 ||
        (has_options && sdpa_functions_prepare(&call->functions, &call->options) < 0)) {
        return -1;
    }
    if (sdpa_warn(call->module, &call->options, call->arrays) < 0 || settle_all(call) < 0 ||
        sdpa_functions_settle(call->functions) < 0) {
        return -1;
    }

    if (call->options.n_workers) p->n_workers = call->options.n_workers;
    if (set_operands(call) < 0 || set_mask(call) < 0 || set_where(call) < 0) return -1;
    if (set_per_head(call, &p->sinks, NAME_sinks) < 0 || set_per_head(call, &p->scales, NAME_scale) < 0 ||
        set_per_head(call, &p->alibi_slopes, NAME_alibi_slopes) < 0 || set_band(call) < 0) {
        return -1;
    }
    const sdpa_integers *offset = &call->options.query_offset;
    PyArrayObject *offsets = offset->array ? offset->array : call->arrays[NAME_query_offset];
    if (call->functions && sdpa_functions_set(call->functions, p, offsets, call->offset) < 0) return -1;
#ifdef SDPA_DUMMY_OPTION
    if (set_per_head(call, &p->dummy, NAME_dummy) < 0) return -1;
#endif
    p->features = sdpa_problem_features(p);
    return 0;
}

void sdpa_call_end(sdpa_call *call) {
    for (int i = 0; i < call->n_held; i++) Py_DECREF((PyObject *)call->arrays[call->held[i]]);
    if (call->batch != call->few) PyMem_Free(call->batch);
    sdpa_functions_release(call->functions);
    sdpa_options_release(&call->options);
}
