#include "docstring.h"

#include <string.h>

#include "options.h"
#include "values.h"

/* Appends a part, whose reference it takes; NULL is a failure. On failure *text becomes NULL, with an exception, and
 * stays NULL. */
static void add_object(PyObject **text, PyObject *part) {
    if (part && *text) {
        PyUnicode_Append(text, part);
    } else {
        Py_CLEAR(*text);
    }
    Py_XDECREF(part);
}

static void add(PyObject **text, const char *more, size_t n) {
    if (*text) add_object(text, PyUnicode_FromStringAndSize(more, (Py_ssize_t)n));
}

static void add_text(PyObject **text, const char *more) { add(text, more, strlen(more)); }

/* `row`: in the table of options, if it is one. */
static void add_parameter(PyObject **text, sdpa_signature *signature, enum sdpa_name name, int row) {
    if (signature->n == N_NAMES) {
        if (*text) PyErr_Format(PyExc_SystemError, "%s: a parameter stands twice", signature->function);
        Py_CLEAR(*text);
        return;
    }
    signature->rows[signature->n] = (unsigned char)row;
    signature->names[signature->n++] = (unsigned char)name;
    add_text(text, ", ");
    add_text(text, sdpa_name_text(name));
}

/* A value that is given to these functions would otherwise be taken for a mask. */
static const char *hint_of(const sdpa_entry *entry) {
    return entry->where & IN_WHOLE_ROWS ? "; value is no argument, since weights do not depend on it, and options are "
                                          "given by keyword, such as attn_mask="
                                        : NULL;
}

/* "name($module, query, ..., *, scale=None)": the first line of a docstring, from which CPython makes
 * __text_signature__. */
static void add_signature(PyObject **text, const sdpa_entry *entry, sdpa_signature *signature) {
    *signature = (sdpa_signature){.function = entry->name, .hint = hint_of(entry), .n_required = entry->n_operands};
    add_text(text, entry->name);
    add_text(text, "($module");
    for (int i = 0; i < entry->n_operands; i++) add_parameter(text, signature, entry->operands[i], 0);
    bool keyword_only = false;
    for (int i = 0; i < sdpa_n_options; i++) {
        const sdpa_option *row = &sdpa_option_table[i];
        if (!(row->where & entry->where)) continue;
        const bool by_keyword = row->keyword_only || (entry->where & IN_KEYWORDS && row->name != NAME_bias);
        if (by_keyword && !keyword_only) {
            keyword_only = true;
            signature->n_positional = signature->n;
            add_text(text, ", *");
        }
        add_parameter(text, signature, row->name, i);
        add_text(text, "=");
        add_text(text, row->default_);
    }
    if (!keyword_only) signature->n_positional = signature->n;
    add_text(text, ")\n--\n\n");
}

static void add_filled(PyObject **text, const sdpa_entry *entry, PyObject *type, const char *doc);

static void add_options(PyObject **text, const sdpa_entry *entry, PyObject *type) {
    for (int i = 0; i < sdpa_n_options; i++) {
        const sdpa_option *row = &sdpa_option_table[i];
        if (row->where & entry->where) add_filled(text, entry, type, row->doc);
    }
}

static void add_needs(PyObject **text, const sdpa_entry *entry, PyObject *type) {
    char names[SDPA_INPUTS_SIZE];
    (void)type;
    sdpa_options_inputs(entry->where, '"', names, sizeof names);
    add_text(text, names);
}

static void add_fields(PyObject **text, const sdpa_entry *entry, PyObject *type) {
    (void)entry;
    if (!*text) return;
    PyObject *fields = PyObject_GetAttrString(type, "_fields"), *comma = PyUnicode_FromString(", ");
    add_object(text, fields && comma ? PyUnicode_Join(comma, fields) : NULL);
    Py_XDECREF(comma);
    Py_XDECREF(fields);
}

static const struct {
    const char *marker;
    void (*add)(PyObject **text, const sdpa_entry *entry, PyObject *type);
} lists[] = {{"{OPTIONS}\n", add_options}, {"{NEEDS}", add_needs}, {"{FIELDS}", add_fields}};
enum { N_LISTS = sizeof lists / sizeof *lists };

/* Appends `doc` with the lists that its markers stand for. */
static void add_filled(PyObject **text, const sdpa_entry *entry, PyObject *type, const char *doc) {
    const char *start = doc; /* of what is not yet appended */
    for (const char *brace = strchr(doc, '{'); brace; brace = strchr(brace + 1, '{')) {
        for (int i = 0; i < N_LISTS; i++) {
            const size_t n = strlen(lists[i].marker);
            if (strncmp(brace, lists[i].marker, n) != 0) continue;
            add(text, start, (size_t)(brace - start));
            lists[i].add(text, entry, type);
            start = brace + n;
        }
    }
    add_text(text, start);
}

/* The docstring of a function, which begins with its signature, and *signature: new reference. NULL and an exception on
 * failure. */
static PyObject *docstring_of(PyObject *module, const sdpa_entry *entry, sdpa_signature *signature) {
    PyObject *text = PyUnicode_FromString("");
    add_signature(&text, entry, signature);
    add_filled(&text, entry, entry->type == NO_TYPE ? NULL : sdpa_state_of(module)->types[entry->type], entry->doc);
    return text;
}

static int add_function(PyObject *module, PyObject *module_name, const sdpa_entry *entry) {
    sdpa_state *state = sdpa_state_of(module);
    if (entry->n_results > MOST_RESULTS) {
        PyErr_Format(PyExc_SystemError, "%s: more than %d results", entry->name, MOST_RESULTS);
        return -1;
    }
    state->entries[entry->id] = entry;
    PyObject **doc = &state->docs[entry->id];
    *doc = docstring_of(module, entry, &state->signatures[entry->id]);
    const char *text = *doc ? PyUnicode_AsUTF8AndSize(*doc, NULL) : NULL;
    PyMethodDef *definition = &state->definitions[entry->id];
    *definition = (PyMethodDef){entry->name, entry->function, SDPA_FLAGS, text};
    PyObject *function = text ? PyCFunction_NewEx(definition, module, module_name) : NULL;
    const int failed = function ? PyModule_AddObjectRef(module, entry->name, function) : -1;
    Py_XDECREF(function);
    return failed;
}

int sdpa_entries_add(PyObject *module, const sdpa_entry *entries, int n) {
    PyObject *name = PyModule_GetNameObject(module);
    int failed = name ? 0 : -1;
    for (int i = 0; i < n && !failed; i++) failed = add_function(module, name, &entries[i]);
    Py_XDECREF(name);
    return failed;
}

/* The names of the functions whose bits are in `where`: new reference. */
static PyObject *names_of(PyObject *module, unsigned where) {
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < N_FUNCTIONS; i++) {
        if (!(where & IN(i))) continue;
        PyObject *name = PyUnicode_FromString(sdpa_state_of(module)->entries[i]->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    PyObject *result = names ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    return result;
}

PyObject *sdpa_options_describe(PyObject *module) {
    PyObject *table = PyTuple_New(sdpa_n_options);
    for (int i = 0; table && i < sdpa_n_options; i++) {
        const sdpa_option *row = &sdpa_option_table[i];
        PyObject *item =
            Py_BuildValue("(sssNsNz)", sdpa_name_text(row->name), row->default_, row->annotation,
                          PyBool_FromLong(row->keyword_only), row->kind, names_of(module, row->where), row->axes);
        if (!item || PyTuple_SetItem(table, i, item) < 0) Py_CLEAR(table);
    }
    return table;
}
