/* From the arguments of a call to values by name. Names are compared by address first: those in calling code are
 * interned, as ours are. */
#include "module.h"

#include <limits.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "../parallel.h"

/* Number of insertions, deletions and replacements that turn a into b; both shorter than LONGEST. */
enum { LONGEST = 40 };
static int edit_distance(const char *a, const char *b) {
    int n = (int)strlen(b), row[LONGEST + 1];
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n];
}

static const char *const names[N_NAMES] = {
#define TEXT(name) #name,
    SDPA_NAMES(TEXT)
#undef TEXT
};

const char *sdpa_name_text(int name) { return names[name]; }

/* The known name that `unknown` was most likely meant to be; NULL if none is near. */
static const char *nearest_name(const sdpa_signature *s, const char *unknown) {
    const char *nearest = NULL;
    int least = LONGEST;
    if (strlen(unknown) >= LONGEST) return NULL;
    for (int i = 0; i < s->n; i++) {
        const char *known = names[s->names[i]];
        int longer = (int)(strlen(known) > strlen(unknown) ? strlen(known) : strlen(unknown));
        int distance = edit_distance(unknown, known);
        /* A part of a name is near, however much is missing: mask, lengths. */
        if (strlen(unknown) >= 3 && (strstr(known, unknown) || strstr(unknown, known))) distance = 1;
        if (2 * distance <= longer && distance < least) {
            least = distance;
            nearest = known;
        }
    }
    return nearest;
}

static void raise_unknown(const sdpa_signature *s, PyObject *unknown) {
    const char *text = PyUnicode_AsUTF8AndSize(unknown, NULL);
    if (!text) return;
    const char *nearest = nearest_name(s, text);
    if (nearest) {
        PyErr_Format(PyExc_TypeError, "%s() got an unknown argument '%U'; did you mean '%s'?", s->function, unknown,
                     nearest);
        return;
    }
    char list[600] = "";
    for (int i = 0; i < s->n; i++) {
        strcat(list, i ? ", " : "");
        strcat(list, names[s->names[i]]);
    }
    PyErr_Format(PyExc_TypeError, "%s() got an unknown argument '%U'; known are: %s", s->function, unknown, list);
}

/* Index in names[] of a keyword, or -1. */
static int find_name(const sdpa_state *state, const sdpa_signature *s, PyObject *keyword) {
    for (int i = 0; i < s->n; i++) {
        if (state->names[s->names[i]] == keyword) return s->names[i];
    }
    for (int i = 0; i < s->n; i++) {
        if (PyUnicode_Compare(state->names[s->names[i]], keyword) == 0) return s->names[i];
    }
    return -1;
}

int sdpa_parse(PyObject *module, const sdpa_signature *s, PyObject *const *args, Py_ssize_t n_args, PyObject *kwnames,
               PyObject *values[N_NAMES]) {
    const sdpa_state *state = sdpa_state_of(module);
    memset(values, 0, N_NAMES * sizeof *values);
    if (n_args > s->n_positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments by position, got %zd", s->function,
                     s->n_positional, n_args);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n_args; i++) values[s->names[i]] = args[i];
    Py_ssize_t n_keywords = kwnames ? PyTuple_Size(kwnames) : 0;
    for (Py_ssize_t i = 0; i < n_keywords; i++) {
        PyObject *keyword = PyTuple_GetItem(kwnames, i);
        int name = find_name(state, s, keyword);
        if (name < 0) {
            if (!PyErr_Occurred()) raise_unknown(s, keyword);
            return -1;
        }
        if (values[name]) {
            PyErr_Format(PyExc_TypeError, "%s() got '%U' both by position and by name", s->function, keyword);
            return -1;
        }
        values[name] = args[n_args + i];
    }
    for (int i = 0; i < s->n_required; i++) {
        if (values[s->names[i]]) continue;
        PyErr_Format(PyExc_TypeError, "%s() misses its argument '%s'", s->function, names[s->names[i]]);
        return -1;
    }
    return 0;
}

int sdpa_read_bool(const char *name, PyObject *value, bool *result) {
    if (PyBool_Check(value)) {
        *result = value == Py_True;
        return 0;
    }
    if (PyArray_IsScalar(value, Bool)) {
        int truth = PyObject_IsTrue(value);
        *result = truth > 0;
        return truth < 0 ? -1 : 0;
    }
    PyErr_Format(PyExc_TypeError, "%s: expected True or False, got %.200R", name, value);
    return -1;
}

int sdpa_read_finite(const char *name, PyObject *value, double *result) {
    *result = PyFloat_AsDouble(value);
    if (*result == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "%s: expected a finite number, got an integer beyond float64", name);
        } else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s: expected a finite number, got %.200R", name, value);
        }
        return -1;
    }
    if (isfinite(*result)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected a finite number, got %.200R", name, value);
    return -1;
}

/* Any integer, clamped to what a long long holds. */
int sdpa_read_integer(const char *name, PyObject *value, long long *result) {
    PyObject *integer = PyNumber_Index(value);
    if (!integer) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s: expected an integer, got %.200R", name, value);
        }
        return -1;
    }
    int overflow;
    *result = PyLong_AsLongLongAndOverflow(integer, &overflow);
    if (overflow) *result = overflow < 0 ? LLONG_MIN : LLONG_MAX;
    Py_DECREF(integer);
    return 0;
}

int sdpa_read_workers(PyObject *value, int *result) {
    if (!value || value == Py_None) {
        *result = sdpa_get_num_threads();
        return 0;
    }
    long long n;
    if (sdpa_read_integer("workers", value, &n) < 0) return -1;
    if (n == 0 || n < -1) {
        PyErr_Format(PyExc_ValueError, "workers: expected None, -1 (all CPUs) or at least 1, got %.200R", value);
        return -1;
    }
    if (n == -1) n = sdpa_available_cpus();
    *result = n > SDPA_MAX_THREADS ? SDPA_MAX_THREADS : (int)n;
    return 0;
}

int sdpa_interrupted(void) {
    PyGILState_STATE gil = PyGILState_Ensure();
    int raised = PyErr_CheckSignals();
    PyGILState_Release(gil);
    return raised;
}

int sdpa_raise(sdpa_status status) {
    if (status == SDPA_OK) return 0;
    if (status == SDPA_NO_MEMORY) {
        PyErr_NoMemory();
    } else if (!PyErr_Occurred()) {
        /* This thread will not get the interpreter again once that has begun to end, which takes a moment. Before, it
         * would print a traceback after the program's last word. */
        Py_BEGIN_ALLOW_THREADS;
        sleep(10);
        Py_END_ALLOW_THREADS;
        PyErr_SetString(PyExc_RuntimeError, "the call was ended because its threads were, at the end of the process");
    }
    return -1;
}
