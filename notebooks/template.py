# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does the scale keep rows of weights from saturating?
#
# **Question.** One sentence that a measurement can answer: how much of a row of weights is left
# to the other keys when one key wins, with $1/\sqrt{d_k}$ and without, as $d_k$ grows?
#
# **Common misconception.** One or two sentences, as somebody would say them who believes them:
# "The larger $d_k$ is, the more two vectors have in common, so one key must win."

# %% [markdown]
# ## Prediction
#
# What the law says before anything is measured, with its formula and where it comes from: the
# variance of $q \cdot k$ is $d_k$ (Vaswani et al. 2017, section 3.2.1), so that of the scaled score
# is 1 at every $d_k$ and the weights should not depend on $d_k$ at all. Formulas are LaTeX:
#
# $$ \operatorname{Var}\Bigl(\frac{q \cdot k}{\sqrt{d_k}}\Bigr) = 1 $$

# %% [markdown]
# ## In plain NumPy
#
# The quantity itself in about five lines, and the assertion that the C routines agree.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab

rng = np.random.default_rng(0)
query, key = rng.standard_normal((2, 10, 64))
scores = query @ key.T / np.sqrt(64)
weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
weights /= weights.sum(axis=-1, keepdims=True)

np.testing.assert_allclose(sdpa.attention_weights(query, key), weights, rtol=1e-12)

# %% [markdown]
# Before you go on, write down a guess: without the scale at $d_k = 256$, which share of the rows
# has a weight of more than 0.99? One question whose answer is a number of the measurement.

# %%
my_guess = None  # between 0 and 1; what the misconception would say

# %% [markdown]
# ## Measurement
#
# One call of a function of `sdpa_lab`, which has the seed, the number of independent draws and the
# intervals. A printed table has at most eight rows (`where`, `select`); the rest on demand. Then
# assertions of what the conclusion says, so that the text cannot drift from it.

# %%
rows = lab.scale_effect(lab.normal(200))
scaled, unscaled = ([row for row in rows if (row.scale == 1) == one] for one in (False, True))

assert all(row.saturated.high < 0.02 for row in scaled)
assert all(row.entropy.high < scaled[0].entropy.low for row in unscaled)

# %% [markdown]
# ## Figure
#
# The one figure, by the plot function of the experiment; its caption says what to look at.

# %%
lab.plot_scale_effect(rows)

# %% [markdown]
# ## Conclusion
#
# The answer in two or three sentences with its numbers, what the misconception got wrong, and the
# verdict of the ledger, printed by the ledger itself.

# %%
print(f"saturated rows at d_k = 256: {100 * unscaled[2].saturated.value:.0f} % without the scale")

# %% [markdown]
# ## Exercises
#
# 1. A question whose answer takes a line or two of the code above. What is the largest entropy
#    that a row of $n$ weights can have?
#
# <details><summary>Solution</summary>
#
# $\ln n$, where all weights are equal: `np.log(10)`.
#
# </details>
#
# 2. A question that changes one condition of the measurement.
#
# <details><summary>Solution</summary>
#
# Code or a derivation that was run before it was written down.
#
# </details>
#
# 3. A question that goes one step beyond the notebook.
#
# <details><summary>Solution</summary>
#
# The same.
#
# </details>
