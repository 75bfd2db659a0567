/* The module: its state, made once per import, and its families of functions. */
#define SDPA_IMPORTS_NUMPY
#include "binding.h"

#include <stdatomic.h>

#include "additive.h"
#include "attention.h"
#include "config.h"
#include "dlpack.h"
#include "merge.h"
#include "values.h"
#include "softmax.h"
#include "xla.h"

/* What a result shows of itself, by a function of sdpa._repr, which `import sdpa` does not load. */
static PyObject *shown(PyObject *result, const char *function) {
    PyObject *module = PyImport_ImportModule("sdpa._repr");
    PyObject *text = module ? PyObject_CallMethod(module, function, "(O)", result) : NULL;
    Py_XDECREF(module);
    return text;
}

static PyObject *result_text(PyObject *result, PyObject *nothing) {
    (void)nothing;
    return shown(result, "result_text");
}

static PyObject *result_html(PyObject *result, PyObject *nothing) {
    (void)nothing;
    return shown(result, "result_html");
}

static int add_methods(PyObject *type) {
    static PyMethodDef methods[] = {{"__repr__", result_text, METH_NOARGS, NULL},
                                    {"_repr_html_", result_html, METH_NOARGS, NULL}};
    int failed = 0;
    for (int i = 0; i < 2 && !failed; i++) {
        PyObject *method = PyDescr_NewMethod((PyTypeObject *)type, &methods[i]);
        failed = method ? PyObject_SetAttrString(type, methods[i].ml_name, method) : -1;
        Py_XDECREF(method);
    }
    return failed;
}

/* A named tuple class that sdpa exports: new reference. */
static PyObject *named_tuple_type(PyObject *module, const char *name, const char *fields, const char *doc) {
    PyObject *collections = PyImport_ImportModule("collections"), *type = NULL, *text = NULL;
    PyObject *make = collections ? PyObject_GetAttrString(collections, "namedtuple") : NULL;
    PyObject *args = Py_BuildValue("(ss)", name, fields), *keywords = Py_BuildValue("{s:s}", "module", "sdpa");
    if (make && args && keywords) type = PyObject_Call(make, args, keywords);
    if (type) text = PyUnicode_FromString(doc);
    if (!text || PyObject_SetAttrString(type, "__doc__", text) < 0 || add_methods(type) < 0 ||
        PyModule_AddObjectRef(module, name, type) < 0) {
        Py_CLEAR(type);
    }
    Py_XDECREF(text);
    Py_XDECREF(keywords);
    Py_XDECREF(args);
    Py_XDECREF(make);
    Py_XDECREF(collections);
    return type;
}

/* Fields, each followed by a space. */
#define FIELD(name, ...) #name " "
#define OPERAND_FIELDS SDPA_OPERANDS(FIELD)
#define COMMON_FIELDS SDPA_COMMON_OPTIONS(FIELD)
#define OPTION_FIELDS SDPA_DIFFERENTIABLE_OPTIONS(FIELD)

static const struct {
    const char *name, *fields, *doc;
} types[N_TYPES] = {
    [FORWARD_TYPE] = {"AttentionForward", "out lse",
                      "Output of attention (..., heads, Lq, d_v) and log-sum-exp of each row of scores (..., heads, "
                      "Lq)."},
    [GRADIENTS_TYPE] =
        {"AttentionGradients", OPERAND_FIELDS OPTION_FIELDS "score_args",
         "Gradients of attention, each with the shape and dtype of its argument; None where not in needs."},
    [TANGENT_TYPE] = {"AttentionTangent", "out out_t",
                      "Output of attention and its derivative along the tangents, (..., heads, Lq, d_v)."},
    [SECOND_TYPE] = {"AttentionSecondGradients", "grad_out " OPERAND_FIELDS OPTION_FIELDS "score_args",
                     "Derivatives of <gg, attention_backward(...)>, each with the shape and dtype of its argument; "
                     "None where not in needs."},
    [STATISTICS_TYPE] = {"AttentionStatistics", "lse entropy max_weight sum_p2 sum_p3 score_mean score_var",
                         "Summary statistics of each row of weights, (..., heads, Lq)."},
    [RECEIVED_TYPE] = {"AttentionReceived", "total largest",
                       "Sum and maximum of the weights that each key receives, (..., heads, Lk)."},
    [ADDITIVE_TYPE] = {"AdditiveGradients", OPERAND_FIELDS "w_query w_key w_score bias " COMMON_FIELDS,
                       "Gradients of additive attention, each with the shape and dtype of its argument; None where not "
                       "in needs."},
    [LOGSUMEXP_TYPE] = {"LogsumexpForward", "lse sign",
                        "Logarithm of the absolute value of a weighted sum of exponentials, and the sign of the sum."},
    [LOGSUMEXP_GRADIENTS_TYPE] = {"LogsumexpGradients", "x b",
                                  "Gradients of a weighted logsumexp, each with the shape and dtype of its argument."},
};

static int fill_state(PyObject *module, sdpa_state *state) {
    atomic_init(&state->bf16, -1);
    for (int i = 0; i < N_NAMES; i++) {
        state->names[i] = PyUnicode_InternFromString(sdpa_name_text(i));
        if (!state->names[i]) return -1;
    }
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (!numpy) return -1;
    state->from_dlpack = PyObject_GetAttrString(numpy, "from_dlpack");
    state->shares_memory = state->from_dlpack ? PyObject_GetAttrString(numpy, "shares_memory") : NULL;
    PyObject *exceptions = state->shares_memory ? PyObject_GetAttrString(numpy, "exceptions") : NULL;
    if (exceptions) state->too_hard = PyObject_GetAttrString(exceptions, "TooHardError");
    Py_XDECREF(exceptions);
    Py_DECREF(numpy);
    if (!state->too_hard) return -1;
    for (int i = 0; i < N_TYPES; i++) {
        state->types[i] = named_tuple_type(module, types[i].name, types[i].fields, types[i].doc);
        if (!state->types[i]) return -1;
    }
    return 0;
}

static int execute(PyObject *module) {
    import_array1(-1);
    sdpa_state *state = sdpa_state_of(module);
    if (fill_state(module, state) < 0 || sdpa_config_add(module) < 0 || sdpa_attention_add(module) < 0) return -1;
    if (sdpa_additive_add(module) < 0 || sdpa_merge_add(module) < 0 || sdpa_softmax_add(module) < 0) return -1;
    return sdpa_dlpack_add(module) < 0 ? -1 : sdpa_xla_add(module);
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    sdpa_state *state = sdpa_state_of(module);
    for (int i = 0; i < N_TYPES; i++) Py_VISIT(state->types[i]);
    Py_VISIT(state->from_dlpack);
    Py_VISIT(state->shares_memory);
    Py_VISIT(state->too_hard);
    return 0;
}

static int clear(PyObject *module) {
    sdpa_state *state = sdpa_state_of(module);
    for (int i = 0; i < N_TYPES; i++) Py_CLEAR(state->types[i]);
    Py_CLEAR(state->from_dlpack);
    Py_CLEAR(state->shares_memory);
    Py_CLEAR(state->too_hard);
    return 0;
}

/* Names and docstrings are freed last: functions may be called until the module is gone. */
static void release(void *module) {
    sdpa_state *state = sdpa_state_of(module);
    clear(module);
    for (int i = 0; i < N_NAMES; i++) Py_CLEAR(state->names[i]);
    for (int i = 0; i < N_FUNCTIONS; i++) Py_CLEAR(state->docs[i]);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* nor does NumPy */
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "sdpa._core",
    .m_doc = "Attention, softmax and their gradients in C; see sdpa.",
    .m_size = sizeof(sdpa_state),
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = release,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
