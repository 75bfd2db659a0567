#include "dlpack.h"

/* What DLPack's ABI, in its major version 1, lays down of its table of functions and of a tensor. */
enum { CPU = 1 };             /* DLDeviceType */
enum { FLOAT = 2, BOOL = 6 }; /* DLDataTypeCode */

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* in elements; strides NULL: contiguous */
    uint64_t byte_offset;
} dl_tensor;

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *previous;
    void (*allocate)(void), (*own)(void), (*give)(void); /* of other types, not called here */
    int (*look)(void *object, dl_tensor *out); /* may be NULL; the object keeps the memory of `out`; -1: an exception */
} dl_functions;

/* The functions of this type of objects; NULL with an exception. */
static const dl_functions *functions_of(PyTypeObject *type) {
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    const dl_functions *found = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule); /* the table lives as long as the process */
    if (found && (found->version.major != 1 || !found->look)) {
        PyErr_Format(PyExc_BufferError, "expected version 1 of DLPack with views, got version %u",
                     (unsigned)found->version.major);
        return NULL;
    }
    return found;
}

/* NumPy's number of the type; -1 if it is none that attention takes. */
static int type_number(const dl_tensor *x) {
    if (x->dtype.lanes != 1) return -1;
    if (x->dtype.code == BOOL) return x->dtype.bits == 8 ? NPY_BOOL : -1;
    if (x->dtype.code != FLOAT) return -1;
    return x->dtype.bits == 16 ? NPY_HALF : x->dtype.bits == 32 ? NPY_FLOAT32 : x->dtype.bits == 64 ? NPY_FLOAT64 : -1;
}

/* An array on the memory of the object: new reference. */
static PyObject *view(PyObject *object, const dl_functions *functions) {
    dl_tensor x;
    if (functions->look(object, &x) < 0) return NULL;
    const int number = type_number(&x);
    if (x.device.type != CPU || number < 0 || x.ndim > NPY_MAXDIMS) {
        PyErr_Format(PyExc_BufferError, "expected floating numbers or bools on the CPU, got code %d of %d bits on %d",
                     x.dtype.code, x.dtype.bits, (int)x.device.type);
        return NULL;
    }
    npy_intp shape[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    bool is_empty = false;
    for (int i = 0; i < x.ndim; i++) {
        shape[i] = (npy_intp)x.shape[i];
        if (x.strides) strides[i] = (npy_intp)x.strides[i] * (x.dtype.bits / 8);
        is_empty = is_empty || !shape[i];
    }
    if (is_empty) return PyArray_New(&PyArray_Type, x.ndim, shape, number, NULL, NULL, 0, 0, NULL);
    PyObject *result = PyArray_New(&PyArray_Type, x.ndim, shape, number, x.strides ? strides : NULL,
                                   (char *)x.data + x.byte_offset, 0, NPY_ARRAY_WRITEABLE, NULL);
    if (!result) return NULL;
    PyArray_UpdateFlags((PyArrayObject *)result, NPY_ARRAY_UPDATE_ALL);
    if (PyArray_SetBaseObject((PyArrayObject *)result, Py_NewRef(object)) < 0) Py_CLEAR(result);
    return result;
}

static PyObject *views(PyObject *module, PyObject *const *objects, Py_ssize_t n) {
    (void)module;
    PyTypeObject *type = NULL;
    const dl_functions *functions = NULL;
    PyObject *result = PyTuple_New(n);
    for (Py_ssize_t i = 0; result && i < n; i++) {
        if (Py_TYPE(objects[i]) != type) {
            type = Py_TYPE(objects[i]);
            functions = functions_of(type);
        }
        PyObject *array = functions ? view(objects[i], functions) : NULL;
        if (!array || PyTuple_SetItem(result, i, array) < 0) Py_CLEAR(result);
    }
    return result;
}

int sdpa_dlpack_add(PyObject *module) {
    static PyMethodDef methods[] = {
        {"_views", (PyCFunction)(void (*)(void))views, METH_FASTCALL,
         "_views($module, /, *objects)\n--\n\nArrays on the memory of objects whose types have DLPack's functions in "
         "C."},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
