"""The definition of every routine of the package, in float64 NumPy.

Read these pages first. They are slow and build the whole (Lq, Lk) matrix; the tests compare every
kernel with them.

Pages
-----
=============== ================================================================================
forward.py      attention, its weights, their statistics, the union of sets of keys
derivatives.py  backward, forward mode, double backward
additive.py     additive attention and its backward
logits.py       how options change a score, which keys a query may see, dropout
programs.py     functions of the user on scores and on masks
dual.py         numbers with a tangent, on which such functions give their derivatives
scores.py       attention by cosines and bilinear forms
packed.py       sequences of different lengths, one after the other in one array
positions.py    rotary embedding, T5's relative bias, vectors of relative positions
rows.py         softmax, log_softmax, logsumexp and their gradients
arrays.py       broadcasting, and the sums it becomes in a gradient
=============== ================================================================================

Shapes
------
========= ===================== ==========================================================
query     (..., heads, Lq, d_k) leading axes broadcast as in NumPy; (L, d) alone works too
key       (..., heads, Lk, d_k)
value     (..., heads, Lk, d_v)
attn_mask (..., Lq, Lk)         boolean, True = attend; or floating, added to the scores
sinks     (..., heads)          one more logit of every row
out       (..., heads, Lq, d_v)
lse       (..., heads, Lq)      log of the sum of the exponentials of a row of logits
========= ===================== ==========================================================

Arguments of any real type are converted to float64, and so are the results. Nothing is checked.

Masked pairs
------------
The logit of a pair (query i, key j) that some mask forbids is -inf. The reverse holds too: a logit
of -inf counts as masked, wherever it comes from. A masked pair is left out of every sum, never
multiplied by zero (0 * NaN would be NaN), so the content of a masked key or value has no effect. A
row without any visible key has weights 0, out 0, lse -inf (the sink, if there is one) and passes no
gradient.

Options
-------
The functions on attention take the options of `attention_weights` and of `logits.logits_of`, which
explain them, as `**options`.
"""

from sdpa.reference.additive import (
    AdditiveGradients,
    additive_attention,
    additive_attention_backward,
    additive_attention_forward,
)
from sdpa.reference.derivatives import (
    AttentionGradients,
    AttentionSecondGradients,
    AttentionTangent,
    attention_backward,
    attention_double_backward,
    attention_jvp,
)
from sdpa.reference.forward import (
    AttentionForward,
    AttentionReceived,
    AttentionStatistics,
    attention,
    attention_forward,
    attention_received,
    attention_statistics,
    attention_weights,
    merge_attention,
)
from sdpa.reference.packed import packed
from sdpa.reference.positions import (
    rotary_embedding,
    rotary_embedding_backward,
    shaw_attention_backward,
    shaw_attention_forward,
    t5_bucket,
    t5_relative,
)
from sdpa.reference.rows import (
    log_softmax,
    log_softmax_backward,
    logsumexp,
    logsumexp_backward,
    softmax,
    softmax_backward,
    softmax_jacobian,
    weighted_logsumexp,
    weighted_logsumexp_backward,
)
from sdpa.reference.scores import (
    BilinearGradients,
    CosineGradients,
    bilinear_attention_backward,
    bilinear_attention_forward,
    cosine_attention_backward,
    cosine_attention_forward,
)

__all__ = [
    "AdditiveGradients",
    "AttentionForward",
    "AttentionGradients",
    "AttentionReceived",
    "AttentionSecondGradients",
    "AttentionStatistics",
    "AttentionTangent",
    "BilinearGradients",
    "CosineGradients",
    "additive_attention",
    "additive_attention_backward",
    "additive_attention_forward",
    "attention",
    "attention_backward",
    "attention_double_backward",
    "attention_forward",
    "attention_jvp",
    "attention_received",
    "attention_statistics",
    "attention_weights",
    "bilinear_attention_backward",
    "bilinear_attention_forward",
    "cosine_attention_backward",
    "cosine_attention_forward",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "logsumexp_backward",
    "merge_attention",
    "packed",
    "rotary_embedding",
    "rotary_embedding_backward",
    "shaw_attention_backward",
    "shaw_attention_forward",
    "softmax",
    "softmax_backward",
    "softmax_jacobian",
    "t5_bucket",
    "t5_relative",
    "weighted_logsumexp",
    "weighted_logsumexp_backward",
]


def __dir__() -> list[str]:
    return __all__
