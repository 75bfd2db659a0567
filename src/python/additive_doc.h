/* The parts of the docstrings of additive attention that are not the options'. */
#ifndef SDPA_ADDITIVE_DOC_H
#define SDPA_ADDITIVE_DOC_H

/* clang-format off */
#define ADDITIVE_OPERANDS                                                                          \
    "query : array_like, (..., heads, Lq, d_q)\n"                                                  \
    "    float16, bfloat16, float32 or float64, of any strides, alignment and byte order; leading\n" \
    "    axes broadcast as in NumPy, and (Lq, d_q) alone works too.\n"                             \
    "key : array_like, (..., heads, Lk, d_k)\n"                                                    \
    "    Of query's dtype, as are all that follow; d_k need not be d_q.\n"                         \
    "value : array_like, (..., heads, Lk, d_v)\n"                                                  \
    "w_query, w_key, w_score : array_like, (d_q, h), (d_k, h), (h,)\n"

static const char additive_operands[] = ADDITIVE_OPERANDS;
static const char additive_formula[] =
    "out = softmax(S) value with S = scale tanh(query w_query + key w_key + bias) w_score for each pair\n"
    "of a query and a key, softmax along the keys: Bahdanau, Cho and Bengio, \"Neural machine\n"
    "translation by jointly learning to align and translate\" (2015), appendix A.1.2. Each token is\n"
    "projected once, in float64, and the pairs are computed in blocks: beyond the result, memory is for\n"
    "2 h numbers per token, and the weights in float64. Every tanh has an absolute error of at most 8\n"
    "times the unit roundoff of float32 (float64 for float64). What a masked pair holds, NaN and Inf\n"
    "included, cannot be felt.\n";
static const char additive_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key, value = np.zeros((1, 2)), np.zeros((3, 4)), np.array([[1.0], [2.0], [6.0]])\n"
    ">>> sdpa.additive_attention(query, key, value, np.ones((2, 8)), np.ones((4, 8)), np.ones(8))\n"
    "array([[3.]])\n";
static const char additive_forward_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key, value = np.zeros((1, 2)), np.zeros((3, 4)), np.ones((3, 1))\n"
    ">>> weights = np.ones((2, 8)), np.ones((4, 8)), np.ones(8)\n"
    ">>> out, lse = sdpa.additive_attention_forward(query, key, value, *weights)\n"
    ">>> np.exp(lse)  # three keys with score 0\n"
    "array([3.])\n";

static const char additive_backward_formula[] =
    "Gradients of <grad_out, out> + <grad_lse, lse>. With T = tanh(query w_query + key w_key + bias) of\n"
    "each pair, P = exp(S - lse) and dS = P * (grad_out value^T - rowsum(grad_out * out) + grad_lse):\n\n"
    "    value: P^T grad_out    w_score: scale sum dS T    attn_mask: dS\n"
    "    G = scale dS w_score (1 - T^2) per pair, summed over keys Gq and over queries Gk:\n"
    "    query: Gq w_query^T    w_query: query^T Gq    bias: sum Gq    key, w_key: likewise, of Gk\n\n"
    "each summed over the axes along which its argument was broadcast. T is computed again, block by\n"
    "block, and deterministically. The options must be those of the forward call.\n";
static const char additive_backward_operands[] =
    "grad_out : array_like, (..., heads, Lq, d_v)\n"
    "    Gradient with respect to out, of query's dtype.\n"
    ADDITIVE_OPERANDS
    "bias : array_like, (h,), or None\n"
    "out : array_like, (..., heads, Lq, d_v)\n"
    "    Of `additive_attention_forward`, as is lse.\n"
    "lse : array_like, (..., heads, Lq)\n"
    "    float32 (float64 for float64).\n";
static const char additive_backward_results[] =
    "AdditiveGradients\n"
    "    Named tuple (query, key, value, w_query, w_key, w_score, bias, attn_mask, sinks), each with the\n"
    "    shape and dtype of its argument, None where not in needs.\n";
static const char additive_backward_example[] =
    ">>> import numpy as np, sdpa\n"
    ">>> query, key, value = np.zeros((1, 2)), np.zeros((2, 2)), np.array([[1.0], [3.0]])\n"
    ">>> weights = np.ones((2, 4)), np.ones((2, 4)), np.ones(4)\n"
    ">>> out, lse = sdpa.additive_attention_forward(query, key, value, *weights)\n"
    ">>> sdpa.additive_attention_backward(\n"
    "...     np.ones((1, 1)), query, key, value, *weights, None, out, lse\n"
    "... ).key\n"
    "array([[-2., -2.],\n"
    "       [ 2.,  2.]])\n";
/* clang-format on */

#undef ADDITIVE_OPERANDS
#endif
