# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How can attention be exact when nobody holds its weights?
#
# **Question.** The kernel reads the keys block by block and forgets each block's scores. Why is the
# result the softmax over all keys, and how can the backward pass use weights that were thrown away?
#
# **Common misconception.** "Tiled attention is an approximation: a softmax needs the whole row
# before it can normalise it."

# %% [markdown]
# ## Prediction
#
# With $m = \max_j s_j$ and $l = \sum_j e^{s_j - m}$, two sets of keys with $(m, l, \text{out})$
# give those of the union as
#
# $$ m' = \max(m_1, m_2), \qquad l' = l_1 e^{m_1 - m'} + l_2 e^{m_2 - m'}, $$
#
# $$ \text{out}' = \frac{l_1 e^{m_1 - m'}\, \text{out}_1 + l_2 e^{m_2 - m'}\, \text{out}_2}{l'} $$
#
# (Milakov and Gimelshein 2018). With $\text{lse} = m + \ln l$ this is a mean with the weights
# $e^{\text{lse}_i - \text{lse}'}$, associative and commutative, so the blocks may come one by one.
# Apart from rounding nothing is lost. The backward pass computes a block's weights again from the
# scores: $p = e^{s - \text{lse}}$ (Dao et al. 2022, section 3.1).

# %% [markdown]
# ## In plain NumPy
#
# Two halves of the keys, merged by hand and by the C routine.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((n, 64)) for n in (1, 2048, 2048))
out_1, lse_1 = sdpa.attention_forward(query, key[:1024], value[:1024])
out_2, lse_2 = sdpa.attention_forward(query, key[1024:], value[1024:])
lse = np.logaddexp(lse_1, lse_2)
out = np.exp(lse_1 - lse)[:, None] * out_1 + np.exp(lse_2 - lse)[:, None] * out_2

whole = sdpa.attention_forward(query, key, value)
np.testing.assert_allclose(out, whole.out, rtol=0, atol=1e-14)
np.testing.assert_allclose(lse, whole.lse, rtol=1e-14)

# %% [markdown]
# Before you go on, write down a guess: values are standard normal, and the final output has
# components of about 0.03. After half of the keys, how large is the largest difference of a
# component from the final one?

# %%
my_guess = None  # 0 if it is there already

# %% [markdown]
# ## Measurement
#
# One query meets 2048 keys, 128 at a time. `kept` is the factor by which what was there before is
# multiplied when a block comes: near 1 at the end, when a block changes little. `share` is the
# weight that the keys so far will have in the end. Every second block is shown up to the middle,
# then the last ones; `print(steps)` has all.

# %%
steps = lab.online(query, key, value)
print(steps.where(keys=(128, 256, 512, 1024, 1536, 1792, 1920, 2048)))

assert steps["difference"][-1] < 1e-14
assert (np.diff(steps["lse"]) > 0).all()
assert (np.diff(steps["largest"]) >= 0).all()

# %% [markdown]
# The backward pass has no weights either. These are computed again from lse, and lead to the same
# gradient of the values, $p^T g$, as the C routine's.

# %%
grad_out = rng.standard_normal((1, 64))
gradients = sdpa.attention_backward(grad_out, query, key, value, *whole)
again = np.exp(query @ key.T / 8 - whole.lse[:, None])

np.testing.assert_allclose(again.T @ grad_out, gradients.value, rtol=1e-12)

# %% [markdown]
# ## Figure
#
# Left: with a causal mask most tiles are skipped or need no look at single pairs; only the diagonal
# is masked pair by pair. `sdpa.plot.pattern` asks the kernels; the size of a tile is that of the
# processor that ran the notebook. Middle: the log-sum-exp rises with each block, the largest score
# by records. Right: after each block the output is exact attention over the keys seen so far; it
# need not approach the final output steadily, and equals it once all keys are in.

# %%
lab.plot_online(steps, (768, 1024), is_causal=True)

# %% [markdown]
# ## Conclusion
#
# Tiling is a different order of summation, so it differs by rounding alone. The verdicts of the
# ledger on what it rests on (the shift by the maximum) and on what it saves:

# %%
print(bilingual(ledger(["shift", "memory"])))

# %% [markdown]
# ## Exercises
#
# 1. How many of the tiles of a square causal matrix of $n$ blocks by $n$ blocks are skipped?
#
# <details><summary>Solution</summary>
#
# $n(n - 1)/2$ of $n^2$: for square tiles `np.triu(np.ones((8, 8)), 1).sum()` is 28 of 64. With
# tiles of more keys than queries, `sdpa.plot.pattern((768, 768), is_causal=True)` has its share.
#
# </details>
#
# 2. Merge the blocks in another order. Which digits change?
#
# <details><summary>Solution</summary>
#
# Only those that rounding touches: `sdpa.merge_attention` of the parts in reverse order differs
# from the whole by some $10^{-16}$ in float64. The kernel fixes the order by the shapes alone, so
# its own result is the same bits for any number of threads.
#
# </details>
#
# 3. The softmax could do without the maximum: $l = \sum_j e^{s_j}$. For which scores does that fail
#    in float32?
#
# <details><summary>Solution</summary>
#
# Where one $s$ exceeds 88.72, the logarithm of the largest float32: `np.exp(np.float32(89))` is
# inf, and the row becomes NaN. Unscaled scores of standard deviation 22.6 ($d_k = 512$) reach it:
# it is four standard deviations.
#
# </details>
