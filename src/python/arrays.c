#include "arrays.h"

#include <stdatomic.h>
#include <stdio.h>

#include "errors.h"

int sdpa_has_attribute(PyObject *value, const char *name) {
    PyObject *attribute = PyObject_GetAttrString(value, name);
    if (attribute) {
        Py_DECREF(attribute);
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
}

/* Whether NumPy can convert the object without DLPack; -1 as sdpa_has_attribute. */
static int has_array_protocol(PyObject *value) {
    static const char *const names[] = {"__array__", "__array_interface__", "__array_struct__"};
    int has = PyObject_CheckBuffer(value);
    for (int i = 0; i < 3 && !has; i++) has = sdpa_has_attribute(value, names[i]);
    return has;
}

int sdpa_is_array(PyObject *value) {
    if (PyFloat_Check(value) || PyLong_Check(value) || PyUnicode_Check(value) || PyArray_IsScalar(value, Generic)) {
        return 0;
    }
    if (PyArray_Check(value) || PySequence_Check(value)) return 1;
    const int has = has_array_protocol(value);
    return has ? has : sdpa_has_attribute(value, "__dlpack__");
}

/* Whether the pending exception says that a conversion failed; an interruption or lack of memory passes unchanged. */
static bool is_failure(void) {
    return PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError);
}

/* DLPack's device types whose memory NumPy can read. */
enum { DEVICE_CPU = 1, DEVICE_CUDA_HOST = 3, DEVICE_ROCM_HOST = 11, DEVICE_CUDA_MANAGED = 13 };

/* The names of the other device types, by number. */
static const char *const DEVICES[] = {
    [2] = "cuda",     [4] = "opencl",  [7] = "vulkan",  [8] = "metal",    [9] = "vpi",   [10] = "rocm",
    [12] = "ext_dev", [14] = "oneapi", [15] = "webgpu", [16] = "hexagon", [17] = "maia", [18] = "trainium",
};
enum { N_DEVICES = sizeof DEVICES / sizeof DEVICES[0] };

/* Returns -1 with a TypeError if the object says that its memory is on another device, and 0 if it names the CPU or no
 * device. */
static int check_device(const char *name, PyObject *value) {
    const int has = sdpa_has_attribute(value, "__dlpack_device__");
    if (has < 1) return has;
    PyObject *pair = PyObject_CallMethod(value, "__dlpack_device__", NULL);
    long device, index;
    bool known = pair && PyTuple_Check(pair) && PyArg_ParseTuple(pair, "ll", &device, &index);
    Py_XDECREF(pair);
    if (!known) {
        if (PyErr_Occurred() && !is_failure()) return -1;
        PyErr_Clear();
        return 0;
    }
    if (device == DEVICE_CPU || device == DEVICE_CUDA_HOST || device == DEVICE_ROCM_HOST ||
        device == DEVICE_CUDA_MANAGED) {
        return 0;
    }
    const char *text = device > 0 && device < N_DEVICES ? DEVICES[device] : NULL;
    char number[48];
    if (!text) {
        snprintf(number, sizeof number, "device type %ld", device);
        text = number;
    }
    PyErr_Format(PyExc_TypeError, "%s: expected an array on the CPU, got %R on %s:%ld", name, Py_TYPE(value), text,
                 index);
    return -1;
}

/* Returns -1 with a TypeError for a bfloat16 tensor of PyTorch, which neither __array__ nor DLPack can pass to
 * NumPy. */
static int check_bfloat16(const char *name, PyObject *value) {
    PyObject *dtype = PyObject_GetAttrString(value, "dtype");
    PyObject *text = dtype ? PyObject_Str(dtype) : NULL;
    bool is_torch = text && PyUnicode_CompareWithASCIIString(text, "torch.bfloat16") == 0;
    Py_XDECREF(dtype);
    Py_XDECREF(text);
    if (PyErr_Occurred() && !is_failure()) return -1;
    PyErr_Clear();
    if (!is_torch) return 0;
    PyErr_Format(
        PyExc_TypeError,
        "%s: expected a dtype that NumPy takes, got %R of torch.bfloat16; sdpa.interop.torch takes its tensors", name,
        Py_TYPE(value));
    return -1;
}

/* Replaces the exception of a failed conversion with a TypeError that names the argument and has that exception as its
 * cause. */
static void raise_not_an_array(const char *name, PyObject *value) {
    if (!is_failure()) return;
    PyObject *type, *cause, *traceback;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback) PyException_SetTraceback(cause, traceback);
    if (check_bfloat16(name, value) == 0) {
        PyErr_Format(PyExc_TypeError, "%s: expected an array, got %R, which NumPy cannot take: %S", name,
                     Py_TYPE(value), cause);
    }
    PyObject *new_type, *new_value, *new_traceback;
    PyErr_Fetch(&new_type, &new_value, &new_traceback);
    PyErr_NormalizeException(&new_type, &new_value, &new_traceback);
    PyException_SetCause(new_value, cause); /* takes the reference */
    PyErr_Restore(new_type, new_value, new_traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
}

#define UNIT "unit"
#define MASK "mask"
#define BY_MASK "its data, and the mask by where= or as a boolean attn_mask"

/* Classes of arrays that are more than their numbers, with the package that defines each. */
static const struct {
    const char *package, *class, *more, *remedy;
} RICHER[] = {
    {"numpy.ma", "MaskedArray", MASK, BY_MASK},
    {"astropy.utils.masked", "Masked", MASK, BY_MASK},
    {"astropy.units", "Quantity", UNIT, "x.to_value('')"},
    {"unyt", "unyt_array", UNIT, "x.to_value('')"},
    {"pint", "PlainQuantity", UNIT, "x.m_as('')"},
    {"quantities", "Quantity", UNIT, "x.rescale('').magnitude"},
};
enum { N_RICHER = sizeof RICHER / sizeof *RICHER };

/* The row of RICHER that describes this class, or -1. Leaves an exception where the class has no name. */
static int find_richer(PyObject *class) {
    PyObject *module = PyObject_GetAttrString(class, "__module__");
    PyObject *own = module ? PyObject_GetAttrString(class, "__name__") : NULL;
    int found = -1;
    for (int i = 0; i < N_RICHER && own && PyUnicode_Check(own) && PyUnicode_Check(module) && found < 0; i++) {
        if (PyUnicode_CompareWithASCIIString(own, RICHER[i].class) != 0) continue;
        PyObject *package = PyUnicode_FromString(RICHER[i].package);
        if (package && PyUnicode_Tailmatch(module, package, 0, PY_SSIZE_T_MAX, -1) == 1) found = i;
        Py_XDECREF(package);
    }
    Py_XDECREF(own);
    Py_XDECREF(module);
    return found;
}

int sdpa_check_plain(const char *name, PyObject *value) {
    if (PyArray_CheckExact(value)) return 0;
    PyObject *bases = PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__mro__");
    int found = -1;
    for (Py_ssize_t i = 0; bases && PyTuple_Check(bases) && i < PyTuple_Size(bases) && found < 0; i++) {
        found = find_richer(PyTuple_GetItem(bases, i));
        if (found < 0 && PyErr_Occurred()) break;
    }
    Py_XDECREF(bases);
    if (PyErr_Occurred() && !is_failure()) return -1;
    PyErr_Clear();
    if (found < 0) return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected a plain array, got %R, whose %s would be dropped; pass %s", name,
                 Py_TYPE(value), RICHER[found].more, RICHER[found].remedy);
    return -1;
}

/* The array of an object that is none. */
static PyObject *converted(PyObject *module, PyObject *value) {
    const int has_protocol = has_array_protocol(value);
    const int has_dlpack = has_protocol ? 0 : sdpa_has_attribute(value, "__dlpack__");
    if (has_protocol < 0 || has_dlpack < 0) return NULL;
    return has_dlpack ? PyObject_CallFunctionObjArgs(sdpa_state_of(module)->from_dlpack, value, NULL)
                      : PyArray_FromAny(value, NULL, 0, 0, 0, NULL);
}

PyArrayObject *sdpa_array(PyObject *module, const char *name, PyObject *value) {
    if (PyArray_CheckExact(value)) return (PyArrayObject *)Py_NewRef(value);
    if (sdpa_check_plain(name, value) < 0) return NULL;
    if (PyArray_Check(value)) return (PyArrayObject *)Py_NewRef(value);
    if (check_device(name, value) < 0) return NULL;
    PyObject *array = converted(module, value);
    if (!array) {
        raise_not_an_array(name, value);
    } else if (sdpa_check_plain(name, array) < 0) {
        Py_CLEAR(array);
    }
    return (PyArrayObject *)array;
}

int sdpa_settle(PyArrayObject **array, bool view) {
    if (!*array || (!view && PyArray_CheckExact(*array))) return 0;
    PyArrayObject *plain = (PyArrayObject *)PyArray_View(*array, NULL, &PyArray_Type);
    if (!plain) return -1;
    Py_DECREF((PyObject *)*array);
    *array = plain;
    return 0;
}

/* ml_dtypes registers bfloat16 with NumPy under a number that differs between processes. Dtypes of NumPy's newer way
 * have no number: all of them have -1. */
static bool is_bfloat16(sdpa_state *state, PyArray_Descr *descr) {
    if (!PyTypeNum_ISUSERDEF(descr->type_num)) return false;
    int known = atomic_load_explicit(&state->bf16, memory_order_relaxed);
    if (known >= 0) return descr->type_num == known;
    if (PyDataType_ELSIZE(descr) != 2) return false;
    PyObject *name = PyType_GetName(descr->typeobj);
    if (!name) {
        PyErr_Clear();
        return false;
    }
    bool same = PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
    Py_DECREF(name);
    if (same) atomic_store_explicit(&state->bf16, descr->type_num, memory_order_relaxed);
    return same;
}

int sdpa_dtype_of(PyObject *module, PyArrayObject *a) {
    int number = PyArray_TYPE(a);
    switch (number) {
    case NPY_FLOAT:
        return SDPA_F32;
    case NPY_DOUBLE:
        return SDPA_F64;
    case NPY_HALF:
        return SDPA_F16;
    case NPY_BOOL:
        return SDPA_BOOL;
    default:
        if (number == NPY_INT64) return SDPA_I64;
        return is_bfloat16(sdpa_state_of(module), PyArray_DESCR(a)) ? SDPA_BF16 : -1;
    }
}

bool sdpa_is_real(PyObject *module, PyArrayObject *a) {
    return PyArray_ISINTEGER(a) || PyArray_ISFLOAT(a) || sdpa_dtype_of(module, a) == SDPA_BF16;
}

int sdpa_suggest_type(PyObject *module, const char *name, PyArrayObject *a, const char *type) {
    return sdpa_is_real(module, a) ? sdpa_add_remedy("; write %s.astype(%s)", name, type) : -1;
}

int sdpa_suggest_common_type(const char *name, PyArrayObject *a, const char *other_name, PyArrayObject *other) {
    const bool is_other = PyArray_TYPE(other) == NPY_DOUBLE, is_wide = is_other || PyArray_TYPE(a) == NPY_DOUBLE;
    const char *wide = is_other ? other_name : name;
    sdpa_add_remedy("; write %s.astype(%s.dtype)", wide, is_other ? name : other_name);
    return is_wide
               ? sdpa_add_remedy(" if np.sqrt(d), which is applied already, a table or np.zeros made %s float64", wide)
               : -1;
}

const char *sdpa_dtype_text(sdpa_dtype dtype) {
    static const char *const names[] = {
        [SDPA_BOOL] = "bool",   [SDPA_F16] = "float16", [SDPA_BF16] = "bfloat16",
        [SDPA_F32] = "float32", [SDPA_F64] = "float64", [SDPA_I64] = "int64",
    };
    return names[dtype];
}

int sdpa_type_number(PyObject *module, sdpa_dtype dtype) {
    switch (dtype) {
    case SDPA_BOOL:
        return NPY_BOOL;
    case SDPA_F16:
        return NPY_HALF;
    case SDPA_F32:
        return NPY_FLOAT;
    case SDPA_F64:
        return NPY_DOUBLE;
    case SDPA_I64:
        return NPY_INT64;
    case SDPA_BF16:
        break;
    }
    return atomic_load_explicit(&sdpa_state_of(module)->bf16, memory_order_relaxed);
}

bool sdpa_broadcast_behind(const npy_intp *sizes, int n_sizes, int lead, const npy_intp *shape, int n) {
    const int added = n - n_sizes;
    for (int i = 0; i < n_sizes && added >= 0; i++) {
        if (sizes[i] != 1 && sizes[i] != shape[i < lead ? i : i + added]) return false;
    }
    return added >= 0;
}

int sdpa_suggest_axes(const char *name, PyArrayObject *a, const npy_intp *shape, int n) {
    const int nd = PyArray_NDIM(a);
    int lead = 1;
    while (lead <= nd && !sdpa_broadcast_behind(PyArray_DIMS(a), nd, lead, shape, n)) lead++;
    if (nd >= n || lead > nd) return 0;
    char index[8 * NPY_MAXDIMS] = ":";
    size_t used = 1;
    for (int i = 1; i < n; i++) {
        const bool own = i < lead || i >= lead + n - nd;
        used += (size_t)PyOS_snprintf(index + used, sizeof index - used, own ? ", :" : ", None");
    }
    sdpa_add_remedy("; write %s[%s]", name, index);
    return lead;
}

char *sdpa_data(PyArrayObject *a) {
    static double nothing; /* never read or written */
    char *data = PyArray_DATA(a);
    return data ? data : (char *)&nothing;
}

/* True only if no two elements share memory. The test: in order of stride, each axis steps over all bytes that the axes
 * before it span. Every view made by slicing, transposing, reshaping, or taking a diagonal or a field passes it. */
static bool is_injective(PyArrayObject *a) {
    if (PyArray_SIZE(a) == 0) return true;
    npy_intp span = PyArray_ITEMSIZE(a);
    bool done[NPY_MAXDIMS] = {false};
    for (int round = 0; round < PyArray_NDIM(a); round++) {
        int next = -1;
        npy_intp least = 0;
        for (int i = 0; i < PyArray_NDIM(a); i++) {
            npy_intp stride = PyArray_STRIDE(a, i) < 0 ? -PyArray_STRIDE(a, i) : PyArray_STRIDE(a, i);
            if (done[i] || PyArray_DIM(a, i) == 1 || (next >= 0 && stride >= least)) continue;
            next = i;
            least = stride;
        }
        if (next < 0) break;
        if (least < span) return false;
        done[next] = true;
        span += (PyArray_DIM(a, next) - 1) * least;
    }
    return true;
}

int sdpa_read_out(PyObject *value, PyArrayObject **out) {
    *out = NULL;
    if (!value || value == Py_None) return 0;
    if (!PyArray_Check(value)) {
        PyErr_Format(PyExc_TypeError, "out: expected a numpy.ndarray, got %R", Py_TYPE(value));
        return -1;
    }
    if (sdpa_check_plain("out", value) < 0) return -1;
    *out = (PyArrayObject *)Py_NewRef(value);
    return 0;
}

int sdpa_check_out(PyArrayObject *out, const npy_intp *sizes, int n, int type_number) {
    char strides[SDPA_SHAPE_SIZE], shape[SDPA_SHAPE_SIZE];
    sdpa_shape_text(shape, "", sizes, n);
    if (PyArray_NDIM(out) != n || !PyArray_CompareLists(PyArray_DIMS(out), sizes, n)) {
        return sdpa_raise_shape("out", out, "shape %s", shape);
    }
    if (PyArray_TYPE(out) != type_number || sdpa_is_swapped(out)) {
        PyArray_Descr *descr = PyArray_DescrFromType(type_number);
        if (!descr) return -1;
        PyErr_Format(PyExc_ValueError, "out: expected dtype %S in native byte order, got %S", descr,
                     PyArray_DESCR(out));
        Py_DECREF(descr);
        return -1;
    }
    if (!PyArray_ISWRITEABLE(out)) {
        PyErr_SetString(PyExc_ValueError, "out: expected a writable array, got a read-only one");
        return -1;
    }
    if (!PyArray_ISALIGNED(out)) {
        PyErr_SetString(PyExc_ValueError, "out: expected an aligned array, got an unaligned one");
        return -1;
    }
    if (!is_injective(out)) {
        PyErr_Format(PyExc_ValueError, "out: expected elements that do not share memory, got strides %s for shape %s",
                     sdpa_shape_text(strides, "", PyArray_STRIDES(out), n), shape);
        return -1;
    }
    return 0;
}

/* Finds the range of addresses of all bytes, of which there are some: at least *low, below *high. */
static void find_bounds(PyArrayObject *a, const char **low, const char **high) {
    *low = *high = PyArray_DATA(a);
    for (int i = 0; i < PyArray_NDIM(a); i++) {
        npy_intp span = (PyArray_DIM(a, i) - 1) * PyArray_STRIDE(a, i);
        if (span < 0) *low += span;
        if (span > 0) *high += span;
    }
    *high += PyArray_ITEMSIZE(a);
}

int sdpa_check_overlap(PyObject *module, PyArrayObject *out, const char *name, PyArrayObject *input) {
    const char *low, *high, *input_low, *input_high;
    if (PyArray_SIZE(out) == 0 || PyArray_SIZE(input) == 0) return 0;
    find_bounds(out, &low, &high);
    find_bounds(input, &input_low, &input_high);
    if (high <= input_low || input_high <= low) return 0;

    /* The bounds of interleaved views overlap although no elements do, so NumPy searches for shared elements. A problem
     * that it cannot solve in this many steps counts as an overlap. */
    PyObject *answer = PyObject_CallFunction(sdpa_state_of(module)->shares_memory, "OOi", out, input, 100000);
    bool shares = true;
    if (answer) {
        shares = PyObject_IsTrue(answer) != 0;
        Py_DECREF(answer);
    } else {
        if (!PyErr_ExceptionMatches(sdpa_state_of(module)->too_hard)) return -1;
        PyErr_Clear();
    }
    if (!shares) return 0;
    PyErr_Format(PyExc_ValueError, "out: expected memory not shared with an input, got an array that overlaps %s",
                 name);
    return -1;
}
