#include "config.h"

#include <stdlib.h>

#include "../program.h"
#include "../runtime/isa.h"
#include "../runtime/memory.h"
#include "../runtime/parallel.h"
#include "arrays.h"
#include "docstring.h"
#include "docstrings.h"
#include "parse.h"
#include "values.h"
#include "synonyms.h"
#include "warn.h"

/* Names of the ISAs that were built, or only of those that the machine has, worst first: new reference. */
static PyObject *isa_names(bool available_only) {
    int n;
    const sdpa_isa *isas = sdpa_isa_list(&n);
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < n; i++) {
        if (available_only && !isas[i].available) continue;
        PyObject *name = PyUnicode_FromString(isas[i].name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

/* Switches to an ISA; -1 and `exception`, which lists the ISAs. `source` is where the name came from. */
static int select_isa(const char *source, const char *name, PyObject *exception) {
    if (sdpa_isa_select(name)) return 0;
    PyObject *built = isa_names(false), *available = isa_names(true);
    if (built && available) {
        PyErr_Format(exception, "%s: expected an ISA that this machine has, one of %R (built: %R), got '%s'", source,
                     available, built, name);
    }
    Py_XDECREF(built);
    Py_XDECREF(available);
    return -1;
}

static PyObject *use_isa(PyObject *module, PyObject *name) {
    (void)module;
    const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    if (!text) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "name: expected a string, got %.200R", name);
        return NULL;
    }
    const char *previous = sdpa_isa_get()->name;
    return select_isa("name", text, PyExc_ValueError) < 0 ? NULL : PyUnicode_FromString(previous);
}

static PyObject *isas(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    int n;
    const sdpa_isa *list = sdpa_isa_list(&n);
    PyObject *result = PyDict_New();
    for (int i = 0; result && i < n; i++) {
        if (PyDict_SetItemString(result, list[i].name, list[i].available ? Py_True : Py_False) < 0) Py_CLEAR(result);
    }
    return result;
}

static PyObject *close_pool(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    /* The main interpreter's threads serve all: the end of another must not close them, and one that is never destroyed
     * ends when no thread can take the GIL any more. */
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS;
    sdpa_pool_close();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *alloc_fail_after(PyObject *module, PyObject *value) {
    (void)module;
    long long n;
    if (sdpa_read_integer("n", value, &n) < 0) return NULL;
    sdpa_alloc_fail_after(n);
    Py_RETURN_NONE;
}

static PyObject *options(PyObject *module, PyObject *none) {
    (void)none;
    return sdpa_options_describe(module);
}

static PyObject *operations(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    static const char *const names[] = {
#define TEXT(name) #name,
        SDPA_OPERATIONS(TEXT)
#undef TEXT
    };
    PyObject *result = PyTuple_New(SDPA_N_OPERATIONS);
    for (int i = 0; result && i < SDPA_N_OPERATIONS; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (!name || PyTuple_SetItem(result, i, name) < 0) Py_CLEAR(result);
    }
    return result;
}

/* A list of the arguments as plain arrays: all are converted before any is made plain. */
static PyObject *arrays(PyObject *module, PyObject *const *args, Py_ssize_t n_args, PyObject *names) {
    const Py_ssize_t n = names && n_args == 0 ? PyTuple_Size(names) : 0;
    PyObject *list = PyList_New(0);
    if (n_args) {
        PyErr_SetString(PyExc_TypeError, "expected arguments by keyword");
        Py_CLEAR(list);
    }
    for (Py_ssize_t i = 0; list && i < n; i++) {
        const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, i), NULL);
        PyObject *array = name ? (PyObject *)sdpa_array(module, name, args[i]) : NULL;
        if (!array || PyList_Append(list, array) < 0) Py_CLEAR(list);
        Py_XDECREF(array);
    }
    for (Py_ssize_t i = 0; list && i < n; i++) {
        PyArrayObject *array = (PyArrayObject *)Py_NewRef(PyList_GetItem(list, i));
        if (sdpa_settle(&array, false) < 0) Py_CLEAR(list);
        if (list && PyList_SetItem(list, i, Py_NewRef((PyObject *)array)) < 0) Py_CLEAR(list);
        Py_DECREF((PyObject *)array);
    }
    return list;
}

static PyObject *hint(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *keyword, *names;
    return PyArg_ParseTuple(args, "O!O!:_hint", &PyUnicode_Type, &keyword, &PyList_Type, &names)
               ? sdpa_hint(keyword, names)
               : NULL;
}

static PyObject *get_num_threads(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyLong_FromLong(sdpa_get_num_threads());
}

static PyObject *set_num_threads(SDPA_ARGUMENTS) {
    static const sdpa_signature signature = SDPA_SIGNATURE("set_num_threads", 1, 1, NAME_n);
    PyObject *values[N_NAMES];
    long long n;
    if (sdpa_parse(module, &signature, args, n_args, kwnames, values) < 0) return NULL;
    if (sdpa_read_integer("n", values[NAME_n], &n) < 0) return NULL;
    if (n < 1) {
        PyErr_Format(PyExc_ValueError, "n: expected at least 1, got %.200R", values[NAME_n]);
        return NULL;
    }
    sdpa_set_num_threads(n > SDPA_MAX_THREADS ? SDPA_MAX_THREADS : (int)n);
    Py_RETURN_NONE;
}

static PyObject *describe(void) {
    PyObject *built = isa_names(false), *available = isa_names(true), *result = NULL;
    if (built && available) {
        result =
            Py_BuildValue("{s:s,s:s,s:O,s:O,s:i,s:i,s:s,s:s}", "version", SDPA_VERSION, "isa", sdpa_isa_get()->name,
                          "isas_available", available, "isas_built", built, "threads", sdpa_get_num_threads(), "cpus",
                          sdpa_available_cpus(), "compiler", __VERSION__, "build_flags", SDPA_BUILD_FLAGS);
    }
    Py_XDECREF(built);
    Py_XDECREF(available);
    return result;
}

static PyObject *show_config(SDPA_ARGUMENTS) {
    static const sdpa_signature signature = SDPA_SIGNATURE("show_config", 0, 1, NAME_mode);
    PyObject *values[N_NAMES];
    if (sdpa_parse(module, &signature, args, n_args, kwnames, values) < 0) return NULL;
    PyObject *mode = values[NAME_mode];
    bool print = !mode || (PyUnicode_Check(mode) && PyUnicode_CompareWithASCIIString(mode, "stdout") == 0);
    if (!print && !(PyUnicode_Check(mode) && PyUnicode_CompareWithASCIIString(mode, "dicts") == 0)) {
        PyErr_Format(PyExc_ValueError, "mode: expected 'stdout' or 'dicts', got %.200R", mode);
        return NULL;
    }
    PyObject *config = describe(), *name, *value;
    if (!config || !print) return config;
    for (Py_ssize_t i = 0; PyDict_Next(config, &i, &name, &value);) PySys_FormatStdout("%S: %S\n", name, value);
    Py_DECREF(config);
    Py_RETURN_NONE;
}

/* Warns of a variable that is set, but to no number of threads. `by_omp`: the number that OMP_NUM_THREADS sets, or 0. */
static int warn_of_variable(const char *variable, int by_omp) {
    const char *text = getenv(variable);
    if (!text) return 0;
    PyObject *used =
        by_omp ? PyUnicode_FromFormat("OMP_NUM_THREADS=%d is used", by_omp)
               : PyUnicode_FromFormat("%d threads are used, one for each CPU of this process", sdpa_available_cpus());
    PyObject *message =
        used ? PyUnicode_FromFormat("%s: expected a positive integer, got '%.200s'; %U", variable, text, used) : NULL;
    const int result = message ? sdpa_warn_with(message, PyExc_RuntimeWarning) : -1;
    Py_XDECREF(message);
    Py_XDECREF(used);
    return result;
}

/* Only variables that sdpa_get_num_threads would ask. */
static int check_variables(void) {
    if (sdpa_threads_by("SDPA_NUM_THREADS")) return 0;
    const int by_omp = sdpa_threads_by("OMP_NUM_THREADS");
    if (warn_of_variable("SDPA_NUM_THREADS", by_omp) < 0) return -1;
    return by_omp ? 0 : warn_of_variable("OMP_NUM_THREADS", 0);
}

int sdpa_config_add(PyObject *module) {
    static PyMethodDef methods[] = {
        {"show_config", SDPA_FUNCTION(show_config), SDPA_FLAGS, doc_show_config},
        {"get_num_threads", get_num_threads, METH_NOARGS, doc_get_num_threads},
        {"set_num_threads", SDPA_FUNCTION(set_num_threads), SDPA_FLAGS, doc_set_num_threads},
        {"_use_isa", use_isa, METH_O,
         "_use_isa($module, name, /)\n--\n\nSwitch the kernels; return the previous name."},
        {"_isas", isas, METH_NOARGS,
         "_isas($module)\n--\n\nMap the name of each ISA built to whether this machine has it."},
        {"_alloc_fail_after", alloc_fail_after, METH_O,
         "_alloc_fail_after($module, n, /)\n--\n\nLet n allocations of the core succeed and the next fail; -1 turns "
         "this off."},
        {"_close_pool", close_pool, METH_NOARGS,
         "_close_pool($module)\n--\n\nEnd the threads; later calls run serially."},
        {"_arrays", SDPA_FUNCTION(arrays), SDPA_FLAGS,
         "_arrays($module, **arguments)\n--\n\nConvert arguments to a list of ndarrays like the functions of this "
         "module; errors begin with their names."},
        {"_hint", hint, METH_VARARGS,
         "_hint($module, keyword, names, /)\n--\n\nWhat the error about an unknown keyword adds, where a list of "
         "names may be given."},
        {"_operations", operations, METH_NOARGS,
         "_operations($module)\n--\n\nThe operations of programs, in the order of their numbers."},
        {"_options", options, METH_NOARGS,
         "_options($module)\n--\n\nThe table of options: (name, default, annotation, keyword_only, kind, "
         "functions, axes)."},
        {NULL, NULL, 0, NULL},
    };
    const char *forced = getenv("SDPA_ISA");
    if (forced && *forced && select_isa("SDPA_ISA", forced, PyExc_ImportError) < 0) return -1;
    if (check_variables() < 0) return -1;
    if (PyModule_AddStringConstant(module, "__version__", SDPA_VERSION) < 0) return -1;
    return PyModule_AddFunctions(module, methods);
}
