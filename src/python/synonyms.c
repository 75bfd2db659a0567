#include "synonyms.h"

#include <string.h>

#include "options.h"
#include "values.h"

/* What other libraries call an argument, beside the words of the table of options. A row applies to functions with
 * `parameter` and, unless NULL, not `without`; without `hint` the parameter is what was meant. Additive attention, which
 * has w_query, has no function for weights. */
static const struct {
    const char *words[SDPA_MOST_WORDS], *parameter, *hint, *without;
} table[] = {
    {.words = {"q", "queries", "query_states"}, .parameter = "query"},
    {.words = {"k", "keys", "key_states"}, .parameter = "key"},
    {.words = {"v", "values", "value_states"}, .parameter = "value"},
    {.words = {"key_padding_mask"},
     .parameter = "attn_mask",
     .hint = ". Did you mean 'attn_mask'? There True means ignore, here attend: ~key_padding_mask[:, None, None, :]"},
    {.words = {"temperature"}, .parameter = "scale", .hint = ". Did you mean 'scale'? The scores are multiplied by it"},
    {.words = {"scale"},
     .parameter = "temperature",
     .hint = ". Did you mean 'temperature'? The scores are divided by it"},
    {.words = {"dim"}, .parameter = "axis"},
    {.words = {"grad_output", "dout"}, .parameter = "grad_out"},
    {.words = {"need_weights", "return_weights", "return_attention", "return_attention_weights",
               "return_attention_scores", "return_attn_weights", "return_attn_probs", "output_attentions"},
     .parameter = "value",
     .hint = "; use sdpa.attention_weights for the matrix of weights",
     .without = "w_query"},
    {.words = {"return_lse", "return_residual", "return_softmax_lse"},
     .parameter = "value",
     .hint = "; use sdpa.attention_forward, which returns out and lse",
     .without = "w_query"},
    {.words = {"layout", "batch_first", "qkv_format"},
     .parameter = "query",
     .hint = "; axes are (..., heads, L, d): write x.swapaxes(-3, -2) for (..., L, heads, d)"},
    {.words = {"value"}, .parameter = "invariant", .hint = "; leave it out, since weights do not depend on it"},
};

static bool is_among(PyObject *keyword, const char *const *words) {
    bool found = false;
    for (int i = 0; i < SDPA_MOST_WORDS && words[i] && !found; i++) {
        found = PyUnicode_CompareWithASCIIString(keyword, words[i]) == 0;
    }
    return found;
}

static int contains(PyObject *names, const char *name) {
    PyObject *text = PyUnicode_FromString(name);
    const int found = text ? PySequence_Contains(names, text) : -1;
    Py_XDECREF(text);
    return found;
}

static PyObject *meant(const char *parameter) { return PyUnicode_FromFormat(". Did you mean '%s'?", parameter); }

/* Whether a row of the table above applies; -1 and an exception on failure. */
static int applies(int row, PyObject *keyword, PyObject *names) {
    if (!is_among(keyword, table[row].words)) return 0;
    const int excluded = table[row].without ? contains(names, table[row].without) : 0;
    return excluded ? excluded < 0 ? -1 : 0 : contains(names, table[row].parameter);
}

/* The remedy for an option that some kind of attention does not have, functions of scores and masks, or any where `names`
 * are those of a function of the extension: new reference. NULL without an exception for others. */
static PyObject *hint_of_option(PyObject *keyword, PyObject *names) {
    const int causal = contains(names, "is_causal"), operands = causal > 0 ? contains(names, "query") : 0;
    if (causal < 1 || operands < 0) return NULL;
    for (int i = 0; i < sdpa_n_options; i++) {
        const sdpa_option *option = &sdpa_option_table[i];
        const bool is_meant = operands ? strcmp(option->kind, "call") != 0 : strcmp(option->kind, "program") == 0;
        if (is_meant && option->where & IN(ATTENTION) &&
            PyUnicode_CompareWithASCIIString(keyword, sdpa_name_text(option->name)) == 0) {
            return PyUnicode_FromString("; sdpa.attention has this option");
        }
    }
    return NULL;
}

/* What a word of another library, or another option, stands for: new reference. NULL without an exception if nothing. */
static PyObject *hint_of_word(PyObject *keyword, PyObject *names) {
    for (int row = 0; row < (int)(sizeof table / sizeof *table); row++) {
        const int found = applies(row, keyword, names);
        if (found < 0) return NULL;
        if (found) return table[row].hint ? PyUnicode_FromString(table[row].hint) : meant(table[row].parameter);
    }
    for (int i = 0; i < sdpa_n_options; i++) {
        const char *name = sdpa_name_text(sdpa_option_table[i].name);
        const int found = is_among(keyword, sdpa_option_table[i].words) ? contains(names, name) : 0;
        if (found) return found < 0 ? NULL : meant(name);
    }
    return hint_of_option(keyword, names);
}

PyObject *sdpa_hint(PyObject *keyword, PyObject *names) {
    PyObject *hint = hint_of_word(keyword, names);
    if (hint || PyErr_Occurred()) return hint;
    PyObject *difflib = PyImport_ImportModule("difflib");
    PyObject *matches = difflib ? PyObject_CallMethod(difflib, "get_close_matches", "OOi", keyword, names, 1) : NULL;
    if (matches) {
        hint = PyList_Size(matches) ? PyUnicode_FromFormat(". Did you mean '%U'?", PyList_GetItem(matches, 0))
                                    : PyUnicode_FromString("");
    }
    Py_XDECREF(matches);
    Py_XDECREF(difflib);
    return hint;
}
