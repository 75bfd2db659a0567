#include "synonyms.h"

/* What other libraries call an argument. A row applies to functions with `parameter` and, unless NULL, not `without`;
 * without `hint` the parameter is what was meant. Additive attention, which has w_query, has no function for weights. */
static const struct {
    const char *words[12], *parameter, *hint, *without;
} table[] = {
    {.words = {"q", "queries", "query_states"}, .parameter = "query"},
    {.words = {"k", "keys", "key_states"}, .parameter = "key"},
    {.words = {"v", "values", "value_states"}, .parameter = "value"},
    {.words = {"mask", "attention_mask", "bias", "attn_bias", "attention_bias"}, .parameter = "attn_mask"},
    {.words = {"key_padding_mask"},
     .parameter = "attn_mask",
     .hint = ". Did you mean 'attn_mask'? There True means ignore, here attend: ~key_padding_mask[:, None, None, :]"},
    {.words = {"mask"}, .parameter = "where"},
    {.words = {"causal", "causal_mask", "use_causal_mask"}, .parameter = "is_causal"},
    {.words = {"dropout", "dropout_rate", "attn_dropout", "attention_dropout"}, .parameter = "dropout_p"},
    {.words = {"softmax_scale", "sm_scale", "qk_scale", "scaling"}, .parameter = "scale"},
    {.words = {"temperature"}, .parameter = "scale", .hint = ". Did you mean 'scale'? The scores are multiplied by it"},
    {.words = {"scale"},
     .parameter = "temperature",
     .hint = ". Did you mean 'temperature'? The scores are divided by it"},
    {.words = {"gqa", "use_gqa"}, .parameter = "enable_gqa"},
    {.words = {"logit_cap", "logits_soft_cap", "attn_logits_soft_cap", "attn_logit_softcapping"},
     .parameter = "softcap"},
    {.words = {"window_size", "sliding_window", "local_window_size"}, .parameter = "window"},
    {.words = {"s_aux", "attention_sinks", "learnable_sink"}, .parameter = "sinks"},
    {.words = {"alibi"}, .parameter = "alibi_slopes"},
    {.words = {"lengths", "seq_lens", "kv_lengths", "kv_lens", "cache_seqlens", "seqused_k", "key_value_seq_lengths",
               "valid_lens"},
     .parameter = "key_lengths"},
    {.words = {"offset", "q_offset", "start_pos", "cache_position"}, .parameter = "query_offset"},
    {.words = {"seed", "generator", "random_state", "dropout_rng"}, .parameter = "rng"},
    {.words = {"threads", "num_threads", "n_threads", "n_jobs", "num_workers", "n_workers", "max_workers"},
     .parameter = "workers"},
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

static int contains(PyObject *names, const char *name) {
    PyObject *text = PyUnicode_FromString(name);
    const int found = text ? PySequence_Contains(names, text) : -1;
    Py_XDECREF(text);
    return found;
}

/* Whether a row of the table applies; -1 and an exception on failure. */
static int applies(int row, PyObject *keyword, PyObject *names) {
    bool is_word = false;
    for (const char *const *word = table[row].words; *word; word++) {
        is_word = is_word || PyUnicode_CompareWithASCIIString(keyword, *word) == 0;
    }
    if (!is_word) return 0;
    const int excluded = table[row].without ? contains(names, table[row].without) : 0;
    return excluded ? excluded < 0 ? -1 : 0 : contains(names, table[row].parameter);
}

PyObject *sdpa_hint(PyObject *keyword, PyObject *names) {
    for (int row = 0; row < (int)(sizeof table / sizeof *table); row++) {
        const int found = applies(row, keyword, names);
        if (found < 0) return NULL;
        if (!found) continue;
        return table[row].hint ? PyUnicode_FromString(table[row].hint)
                               : PyUnicode_FromFormat(". Did you mean '%s'?", table[row].parameter);
    }
    PyObject *difflib = PyImport_ImportModule("difflib"), *hint = NULL;
    PyObject *matches = difflib ? PyObject_CallMethod(difflib, "get_close_matches", "OOi", keyword, names, 1) : NULL;
    if (matches) {
        hint = PyList_Size(matches) ? PyUnicode_FromFormat(". Did you mean '%U'?", PyList_GetItem(matches, 0))
                                    : PyUnicode_FromString("");
    }
    Py_XDECREF(matches);
    Py_XDECREF(difflib);
    return hint;
}
