/* The parts of the docstrings of attention.c that are not the options'. */
#ifndef SDPA_ATTENTION_DOC_H
#define SDPA_ATTENTION_DOC_H

/* clang-format off */
#define QUERY_KEY_DOC                                                                              \
    "query : array_like, (..., heads, Lq, d_k)\n"                                                  \
    "    float16, bfloat16, float32 or float64, of any strides, alignment and byte order; leading\n" \
    "    axes broadcast as in NumPy, and (Lq, d_k) alone works too.\n"                             \
    "key : array_like, (..., heads, Lk, d_k)\n"                                                    \
    "    Of query's dtype.\n"
#define VALUE_DOC                                                                                  \
    "value : array_like, (..., heads, Lk, d_v)\n"                                                  \
    "    Of query's dtype.\n"
#define OUT_DOC                                                                                    \
    "    Of query's dtype, computed in float32 (float64 for float64). Rows without a visible key are 0.\n"
#define LSE_DOC                                                                                    \
    "    Natural log of the sum of the exponentials of each row of scores; -inf without a visible key.\n" \
    "    float32 (float64 for float64).\n"
#define ATTENTION_FORMULA                                                                          \
    "out = softmax(scale query key^T + attn_mask) value, softmax along the keys: Vaswani et al.,\n" \
    "\"Attention is all you need\" (2017), section 3.2.1. Computed in blocks (Dao et al.,\n"       \
    "\"FlashAttention\", 2022): the memory used beyond the result does not depend on Lq and Lk.\n" \
    "What a masked pair holds, NaN and Inf included, cannot be felt.\n"

static const char attention_operands[] = QUERY_KEY_DOC VALUE_DOC;
static const char attention_formula[] = ATTENTION_FORMULA;
static const char attention_results[] =
    "out : ndarray, (..., heads, Lq, d_v)\n"
    OUT_DOC;
static const char attention_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key = np.zeros((1, 2)), np.zeros((3, 2))  # equal scores: the mean of the values\n"
    ">>> sdpa.attention(query, key, np.array([[1.0], [2.0], [6.0]]))\n"
    "array([[3.]])\n";

static const char torch_formula[] =
    "The signature of torch.nn.functional.scaled_dot_product_attention, word for word; the same as\n"
    "`attention`, which has more options. Unlike there, is_causal and attn_mask may be combined.\n\n"
    ATTENTION_FORMULA;
static const char torch_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key = np.zeros((2, 4)), np.zeros((2, 4))\n"
    ">>> sdpa.scaled_dot_product_attention(query, key, np.array([[1.0], [3.0]]), is_causal=True)\n"
    "array([[1.],\n"
    "       [2.]])\n";

static const char forward_results[] =
    "AttentionForward\n"
    "    Named tuple (out, lse).\n"
    "out : ndarray, (..., heads, Lq, d_v)\n"
    OUT_DOC
    "lse : ndarray, (..., heads, Lq)\n"
    LSE_DOC;
static const char forward_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key = np.zeros((1, 2)), np.zeros((3, 2))\n"
    ">>> out, lse = sdpa.attention_forward(query, key, np.array([[1.0], [2.0], [6.0]]))\n"
    ">>> np.exp(lse)  # three keys with score 0\n"
    "array([3.])\n";

static const char backward_formula[] =
    "Gradients of <grad_out, out> + <grad_lse, lse>. With P = exp(scale query key^T + attn_mask - lse)\n"
    "and dS = P * (grad_out value^T - rowsum(grad_out * out) + grad_lse):\n\n"
    "    value: P^T grad_out    query: scale dS key    key: scale dS^T query    attn_mask: dS\n\n"
    "each summed over the axes along which its argument was broadcast. P is computed again, block by\n"
    "block, as in Dao et al., \"FlashAttention\" (2022), appendix B.4. The options must be those of the\n"
    "forward call.\n";
static const char backward_operands[] =
    "grad_out : array_like, (..., heads, Lq, d_v)\n"
    "    Gradient with respect to out, of query's dtype.\n"
    QUERY_KEY_DOC
    VALUE_DOC
    "out : array_like, (..., heads, Lq, d_v)\n"
    "    Of `attention_forward`, as is lse.\n"
    "lse : array_like, (..., heads, Lq)\n"
    "    float32 (float64 for float64).\n";
static const char backward_results[] =
    "AttentionGradients\n"
    "    Named tuple (query, key, value, attn_mask, sinks), each with the shape and dtype of its\n"
    "    argument, None where not in needs.\n";
static const char backward_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key, value = np.zeros((1, 2)), np.zeros((2, 2)), np.array([[1.0], [3.0]])\n"
    ">>> out, lse = sdpa.attention_forward(query, key, value)\n"
    ">>> sdpa.attention_backward(np.ones((1, 1)), query, key, value, out, lse).value\n"
    "array([[0.5],\n"
    "       [0.5]])\n";

static const char jvp_formula[] =
    "With T = scale (query_t key^T + query key_t^T) + attn_mask_t, the tangent of the logits, and P the\n"
    "weights: out_t = (P * (T - rowsum(P * T))) value + P value_t. Forward-mode differentiation:\n"
    "Griewank and Walther, \"Evaluating derivatives\" (2008), section 3.1. In blocks, as `attention`.\n";
static const char jvp_operands[] =
    QUERY_KEY_DOC
    VALUE_DOC
    "query_t, key_t, value_t : array_like or None\n"
    "    Tangents, each of its argument's shape and dtype; None is zero.\n";
static const char jvp_results[] =
    "AttentionTangent\n"
    "    Named tuple (out, out_t) of two arrays (..., heads, Lq, d_v) of query's dtype.\n";
static const char jvp_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key, value = np.zeros((1, 2)), np.zeros((2, 2)), np.array([[1.0], [3.0]])\n"
    ">>> sdpa.attention_jvp(query, key, value, None, None, np.ones((2, 1))).out_t\n"
    "array([[1.]])\n";

static const char double_formula[] =
    "Derivatives of <gg_query, g.query> + <gg_key, g.key> + <gg_value, g.value> + ... with respect to the\n"
    "arguments of g = attention_backward(grad_out, query, key, value, out, lse), out and lse being\n"
    "functions of query, key and value. That sum is <grad_out, out_t> of `attention_jvp` along the\n"
    "gg's, and is differentiated once more, in blocks (Griewank and Walther, 2008, section 5.1).\n";
static const char double_operands[] =
    "gg_query, gg_key, gg_value : array_like or None\n"
    "    Gradients with respect to the gradients, each of its argument's shape and dtype; None is zero.\n"
    "grad_out : array_like, (..., heads, Lq, d_v)\n"
    "    As of `attention_backward`.\n"
    QUERY_KEY_DOC
    VALUE_DOC
    "out : array_like, (..., heads, Lq, d_v)\n"
    "    Of `attention_forward`, as is lse.\n"
    "lse : array_like, (..., heads, Lq)\n"
    "    float32 (float64 for float64).\n";
static const char double_results[] =
    "AttentionSecondGradients\n"
    "    Named tuple (grad_out, query, key, value, attn_mask, sinks), each with the shape and dtype of\n"
    "    its argument, None where not in needs.\n";
static const char double_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key, value = np.zeros((1, 2)), np.zeros((2, 2)), np.array([[1.0], [3.0]])\n"
    ">>> out, lse = sdpa.attention_forward(query, key, value)\n"
    ">>> sdpa.attention_double_backward(None, None, np.ones((2, 1)), np.ones((1, 1)), query, key, value,\n"
    "...                                out, lse).grad_out\n"
    "array([[1.]])\n";

static const char statistics_formula[] =
    "Of each row p of the weights before dropout, streamed over the keys: log-sum-exp, entropy\n"
    "-sum p ln p, largest weight, sum p^2, sum p^3, and mean and variance of the row's final scores\n"
    "(scaled, capped and biased) over the keys that are not masked. The sums of powers give the squared\n"
    "norm of the softmax Jacobian, sum p^2 - 2 sum p^3 + (sum p^2)^2. Sinks count in lse and in the\n"
    "denominator alone. Online softmax: Milakov and Gimelshein (2018), section 3.1.\n";
static const char statistics_results[] =
    "AttentionStatistics\n"
    "    Named tuple (lse, entropy, max_weight, sum_p2, sum_p3, score_mean, score_var) of arrays\n"
    "    (..., heads, Lq) of float32 (float64 for float64), in nats where that applies. A row without a\n"
    "    visible key: lse -inf (or the sink), mean and variance nan, the others 0.\n";
static const char statistics_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> sdpa.attention_statistics(np.zeros((1, 4)), np.zeros((8, 4))).max_weight\n"
    "array([0.125])\n";

static const char weights_formula[] =
    "softmax(scale query key^T + attn_mask) of Vaswani et al., \"Attention is all you need\" (2017),\n"
    "section 3.2.1, or a stage on the way there.\n";
static const char weights_operands[] = QUERY_KEY_DOC;
static const char weights_results[] =
    "weights : ndarray, (..., heads, Lq, Lk)\n"
    "    Of query's dtype; the one result whose memory grows with Lq Lk.\n";
static const char weights_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> sdpa.attention_weights(np.zeros((2, 4)), np.zeros((2, 4)), is_causal=True)\n"
    "array([[1. , 0. ],\n"
    "       [0.5, 0.5]])\n";

static const char merge_formula[] =
    "Exact attention over the union of disjoint sets of keys, from the results over each of them:\n"
    "lse = log sum_t exp(lses[t]), out = sum_t exp(lses[t] - lse) outs[t], the associative sum of\n"
    "Milakov and Gimelshein, \"Online normalizer calculation for softmax\" (2018), section 3.1. A part\n"
    "whose lse is -inf has seen no key and is left out.\n";
static const char merge_operands[] =
    "outs : sequence of array_like, (..., Lq, d_v)\n"
    "    The outputs of `attention_forward`, or one array with the parts along its first axis.\n"
    "lses : sequence of array_like, (..., Lq)\n"
    "    As many; float32 (float64 for float64).\n";
static const char merge_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key, value = np.zeros((1, 2)), np.zeros((3, 2)), np.array([[1.0], [2.0], [6.0]])\n"
    ">>> parts = [sdpa.attention_forward(query, key[s], value[s]) for s in (slice(2), slice(2, 3))]\n"
    ">>> sdpa.merge_attention(*zip(*parts)).out\n"
    "array([[3.]])\n";
/* clang-format on */

#undef QUERY_KEY_DOC
#undef VALUE_DOC
#undef OUT_DOC
#undef LSE_DOC
#undef ATTENTION_FORMULA
#endif
