#include "parse.h"

#include <string.h>

#include "synonyms.h"
#include "values.h"

/* ------------------------------------------------------------------------------------ errors of a call */

static void raise_unexpected(const sdpa_state *state, const sdpa_signature *s, PyObject *keyword) {
    PyObject *known = PyList_New(0);
    for (int i = 0; known && i < s->n; i++) {
        if (PyList_Append(known, state->names[s->names[i]]) < 0) Py_CLEAR(known);
    }
    PyObject *hint = known ? sdpa_hint(keyword, known) : NULL;
    if (hint) {
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'%U", s->function, keyword, hint);
    }
    Py_XDECREF(hint);
    Py_XDECREF(known);
}

/* Every function takes an argument by position, so n_given is at least 2. */
static void raise_too_many(const sdpa_signature *s, Py_ssize_t n_given, PyObject *const values[N_NAMES]) {
    char takes[60], keywords[80] = "";
    int n_keywords = 0;
    for (int i = s->n_positional; i < s->n; i++) n_keywords += values[s->names[i]] != NULL;
    if (s->n_required == s->n_positional) {
        PyOS_snprintf(takes, sizeof takes, "%d positional argument%s", s->n_positional,
                      s->n_positional == 1 ? "" : "s");
    } else {
        PyOS_snprintf(takes, sizeof takes, "from %d to %d positional arguments", s->n_required, s->n_positional);
    }
    if (n_keywords) {
        PyOS_snprintf(keywords, sizeof keywords, " positional arguments (and %d keyword-only argument%s)", n_keywords,
                      n_keywords == 1 ? "" : "s");
    }
    PyErr_Format(PyExc_TypeError, "%s() takes %s but %zd%s were given%s", s->function, takes, n_given, keywords,
                 s->hint ? s->hint : "");
}

static void raise_missing(const sdpa_signature *s, PyObject *const values[N_NAMES]) {
    char list[400] = "";
    int n_missing = 0, n_listed = 0;
    for (int i = 0; i < s->n_required; i++) n_missing += !values[s->names[i]];
    for (int i = 0; i < s->n_required; i++) {
        if (values[s->names[i]]) continue;
        const bool last = ++n_listed == n_missing;
        const char *separator = n_listed == 1 ? "" : !last ? ", " : n_missing == 2 ? " and " : ", and ";
        const size_t used = strlen(list);
        PyOS_snprintf(list + used, sizeof list - used, "%s'%s'", separator, sdpa_name_text(s->names[i]));
    }
    PyErr_Format(PyExc_TypeError, "%s() missing %d required positional argument%s: %s", s->function, n_missing,
                 n_missing == 1 ? "" : "s", list);
}

/* ------------------------------------------------------------------------------------ the call */

/* The name of a keyword, or -1. Compares addresses first: keywords in calling code are interned, like ours. */
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
    const bool too_many = n_args > s->n_positional;
    for (Py_ssize_t i = 0; i < (too_many ? s->n_positional : n_args); i++) values[s->names[i]] = args[i];
    Py_ssize_t n_keywords = kwnames ? PyTuple_Size(kwnames) : 0;
    for (Py_ssize_t i = 0; i < n_keywords; i++) {
        PyObject *keyword = PyTuple_GetItem(kwnames, i);
        int name = find_name(state, s, keyword);
        if (name < 0) {
            if (!PyErr_Occurred()) raise_unexpected(state, s, keyword);
            return -1;
        }
        if (values[name]) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%U'", s->function, keyword);
            return -1;
        }
        values[name] = args[n_args + i];
    }
    if (too_many) {
        raise_too_many(s, n_args, values);
        return -1;
    }
    for (int i = 0; i < s->n_required; i++) {
        if (values[s->names[i]]) continue;
        raise_missing(s, values);
        return -1;
    }
    return 0;
}
