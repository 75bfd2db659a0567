# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Do gradients vanish without the scale?
#
# **Question.** How do the gradients that reach $S$, $Q$, $K$, $V$ and $W^Q$ change with $d_k$, with
# $1/\sqrt{d_k}$ and without: their root mean square, their median, and the share of rows that get
# none?
#
# **Common misconception.** "Without the scale softmax saturates, so the gradient to $Q$ vanishes
# like $1/d_k$."

# %% [markdown]
# ## A picture first
#
# Each dot is one query: the norm of its row of $\partial L/\partial Q$, over $d_k$, for ten keys.
# With the scale all rows are alike at every $d_k$. Without it most sink out of sight (norms below
# $10^{-6}$ lie on the lowest line) while a few rise; the root mean square (solid) follows the few,
# the median (dashed) the many.

# %%
import sdpa_lab as lab

lab.plot_gradient_rows(lab.gradients(n=[10], draws=60))

# %% [markdown]
# ## Prediction
#
# With values and upstream gradients of variance 1, a row of weights $p$ has
#
# $$ \operatorname{E} \Bigl|\frac{\partial L}{\partial s}\Bigr|^2 = d_v |J|^2, \qquad
# |J|^2 = \sum p^2 - 2 \sum p^3 + \Bigl(\sum p^2\Bigr)^2 $$
#
# with the Jacobian $J$ of softmax: zero for one-hot rows. When rows freeze (notebook 03) the mean
# of $|J|^2$ falls like $m(1-m)/3$ with $m = \sqrt{2 \ln n/d_k}$, because fewer and fewer rows have
# two weights that compete. But
# $\partial L/\partial q = \text{scale} \sum_j (\partial L/\partial s_j)\, k_j$ multiplies by the
# scale and the keys: with the scale that is a factor of 1, without it a factor of $\sqrt{d_k}$. So
# the root mean square of $\partial L/\partial Q$ does not fall; its growth approaches
# the power 1/4, while most rows get nothing. `theory.attention` has the exact curves.

# %% [markdown]
# ## In plain NumPy
#
# The gradient to $Q$ of one head, by the formula of note 004 with its scale of 1.

# %%
import numpy as np

import sdpa
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
query, key, value, grad_out = rng.standard_normal((4, 10, 256))
weights = sdpa.attention_weights(query, key, scale=1.0)
grad_weights = grad_out @ value.T
centred = grad_weights - (weights * grad_weights).sum(axis=-1, keepdims=True)
grad_query = (weights * centred) @ key
print("norms of rows of dL/dQ:", *(f"{x:.2g}" for x in np.linalg.norm(grad_query, axis=1)))

out, lse = sdpa.attention_forward(query, key, value, scale=1.0)
ours = sdpa.attention_backward(grad_out, query, key, value, out, lse, scale=1.0)
np.testing.assert_allclose(ours.query, grad_query, rtol=1e-7, atol=1e-9)

# %% [markdown]
# Before you go on, write down a guess: without the scale, at $d_k = 1024$ and $n = 10$, what share
# of the rows of $\partial L/\partial Q$ has less than a hundredth of what a row of $\partial
# L/\partial O$ has? And is the root mean square of $\partial L/\partial Q$ there larger or smaller
# than at 16?

# %%
my_guess = {"share": None, "root mean square": None}

# %% [markdown]
# ## Measurement
#
# A draw is one head. A row is dead when its norm is below a hundredth of that of a row of
# $\partial L/\partial O$, $\sqrt{d_v}$, as everywhere in the laboratory. Shown is
# $\partial L/\partial Q$ at $n = 10$; `print(table)` has all targets and lengths.

# %%
table = lab.gradients(draws=60)
names = ("scale", "d_k", "rms_query", "median_query", "dead_query")
print(table.where(n=10, d_k=(16, 64, 256, 1024)).select(*names))

small, large = (table.row(scale="unscaled", d_k=d, n=10) for d in (16, 1024))
rms, median, dead = (
    [row[f"{what}_query"].estimate() for row in (small, large)]
    for what in ("rms", "median", "dead")
)
assert rms[1].low > rms[0].high
assert median[1].high < 0.1 < median[0].low
assert dead[0].high < 0.1
assert dead[1].low > 0.6
assert (table.where(scale="scaled")["dead_query"] == 0).all()
assert (table.where(scale="unscaled", d_k=1024)["dead_value"] < 0.3).all()

# %% [markdown]
# ## Figure
#
# The gradient to $Q$ over $d_k$: root mean square with its law (left), median (middle), share of
# dead rows (right). Three answers to one question.

# %%
lab.plot_gradients(table)

# %% [markdown]
# ## Conclusion
#
# The answer depends on what "vanish" means. Without the scale the typical row of
# $\partial L/\partial Q$ does vanish: at $d_k = 1024$ and $n = 10$ two of three rows are dead, and
# the median is less than a thousandth of what it is with the scale. The root mean square grows all
# the same, because the few rows that still compete get gradients tens of times larger; neither
# falls like $1/d_k$. With the scale nothing depends on $d_k$. $\partial L/\partial V$ grows, though
# a fifth of the values, those that no query picks, get none; $\partial L/\partial W^Q$ sums over
# rows and grows as well, and has dead rows at small $n$ only. The ledger:

# %%
print(bilingual(ledger(["grad-law"])))

# %% [markdown]
# ## Exercises
#
# 1. Judged by their root mean square, which of the gradients to $S$, $Q$, $K$ and $V$ vanish
#    without the scale?
#
# <details><summary>Solution</summary>
#
# `theory.attention(10, d_k, 1.0, d_v=64)` for $d_k = 16, 64, 256, 1024$ has `grad_score` 2.45,
# 1.88, 1.38, 1.00: falling roughly like $d_k^{-1/4}$. `grad_query` and `grad_key` grow (9.5 to
# 31.8), and `grad_value` grows to $\sqrt{d_v} = 8$, where each query takes one value.
#
# </details>
#
# 2. By theory, with which exponent in $d_k$ does the root mean square of $\partial L/\partial Q$
#    grow for large $d_k$?
#
# <details><summary>Solution</summary>
#
# The slope of $\ln$ `grad_query` is 0.281 between $d_k = 64$ and 256 and 0.257 between 1024 and
# 4096; it tends to 1/4, since $\operatorname{E} |\partial L/\partial s|^2$ falls like $m/3$, that
# is $d_k^{-1/2}$, and $|k|^2$ grows like $d_k$.
#
# </details>
#
# 3. Do gradients vanish *with* the scale if $n$ grows instead of $d_k$?
#
# <details><summary>Solution</summary>
#
# `theory.attention(n, 64, d_v=64).grad_query` is 1.48, 0.414 and 0.105 for $n = 64$, 1024, 16384:
# like $n^{-1/2}$, by averaging and not by saturation, and likewise for $V$. The scale does nothing
# about it.
#
# </details>
