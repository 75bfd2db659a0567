# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What grows with $d_k$?
#
# **Question.** Of the mean, the variance, the variance within a row and the shape of the
# distribution of scores: which changes with $d_k$, which with the length $n$, and what does
# dividing by $\sqrt{d_k}$ leave?
#
# **Common misconception.** "In many dimensions two vectors have more in common, so their dot
# product gets large." And: "$q \cdot k/\sqrt{d_k}$ is normal only by the central limit theorem, to
# about $1/\sqrt{d_k}$."

# %% [markdown]
# ## Prediction
#
# For independent components of mean 0 and variance 1,
#
# $$ \operatorname{E} q \cdot k = 0, \qquad
# \operatorname{Var}(q \cdot k) = \sum_{l=1}^{d_k} \operatorname{Var}(q_l k_l) = d_k $$
#
# (Vaswani et al. 2017, section 3.2.1): the scores spread, they do not move. Divided by $\sqrt{d_k}$
# they have variance 1 at every $d_k$ and $n$. Given $q$, a score with a normal $k$ is exactly
# normal with standard deviation $|q|$. So $q \cdot k/\sqrt{d_k}$ is a mixture of normal variables,
# with excess kurtosis $6/d_k$ and Kolmogorov distance $0.1376/d_k$ to $N(0, 1)$. There is no term
# in $1/\sqrt{d_k}$, because the skewness is 0 (docs/theory.md).

# %% [markdown]
# ## In plain NumPy
#
# Scores of many pairs at $d_k = 64$.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
query, key = rng.standard_normal((2, 10_000, 1, 64))
raw = (query * key).sum(axis=-1).ravel()
scaled = raw / np.sqrt(64)
print(f"mean {raw.mean():.2f}, variance {raw.var():.1f}, scaled {scaled.var():.3f}")

stage = {"stage": "scores"}
np.testing.assert_allclose(sdpa.attention_weights(query, key, **stage).ravel(), scaled, atol=1e-13)

# %% [markdown]
# Before you go on, write down a guess: how far is the distribution of $q \cdot k/\sqrt{d_k}$ from
# the standard normal one at $d_k = 64$, as the largest difference of their distribution functions?

# %%
my_guess = None  # the central limit theorem alone suggests about 1/8

# %% [markdown]
# ## Measurement
#
# A draw is a whole $n \times n$ matrix; predictions are the laws above. `shifted` has keys whose
# components have the mean 2. The tables show $n = 64$; `print(table)` has all lengths,
# distributions and columns.

# %%
table = lab.growth()
shifted = lab.growth(mean_key=2.0)
shape = lab.normality()
columns = ("d_k", "mean", "variance", "variance_scaled", "variance_row")
print(table.where(n=64, components="normal").select(*columns), end="\n\n")
print(
    shape.where(n=64, d_k=(2, 8, 32, 64, 128)).select("d_k", "distance", "kolmogorov", "beyond_3")
)

for each in (table, shifted):
    for name in ("mean", "variance", "variance_scaled", "variance_row"):
        low, high = each[f"{name}_low"], each[f"{name}_high"]
        # Twice the interval of 95 %, since there are 96 of them.
        assert (abs(each[name] - each[f"{name}_predicted"]) < high - low).all(), name
long = shape.where(n=64)
assert (abs(long["distance"] - long["distance_predicted"]) < 0.003).all()
assert long["kolmogorov"][-1] * 512 < 0.14

# %% [markdown]
# ## Figure
#
# Variance of the scores over $d_k$ at $n = 64$, with laws (lines); intervals are shorter than the
# marks. Left: it is $d_k$ without the scale, 1 with it, among all scores as within a row. Right:
# keys whose components have the mean 2. What they have in common shifts whole rows and multiplies
# the variance of all scores by 5. Within a row, where softmax looks, it is still 1.

# %%
lab.plot_growth(table, shifted)

# %% [markdown]
# ## Conclusion
#
# The variance grows like $d_k$ and nothing else does: the mean stays 0, and the shape tends to the
# normal one like $1/d_k$; at $d_k = 64$ the eye cannot tell them apart. Dividing by $\sqrt{d_k}$
# makes the variance 1 at every $d_k$ and $n$, and within a row even where the keys have a mean. Two
# vectors do not have more in common; their dot
# product is a longer random walk. What the ledger says of these claims:

# %%
print(bilingual(ledger(["mean-var", "unit-var", "normal"])))

# %% [markdown]
# ## Exercises
#
# 1. Note 002 says that 99.7 % of the scaled scores lie in $[-3, 3]$. Whether that is so depends on
#    $d_k$: from which $d_k$ on is the share beyond 3 within a tenth of the normal one?
#
# <details><summary>Solution</summary>
#
# `theory.outside(3)` is 0.00270 and `theory.outside(3, d_k)` is 0.00494 at $d_k = 16$, 0.00330 at
# 64, 0.00298 at 140 and 0.00296 at 150: from about 145 on.
#
# </details>
#
# 2. Let all components of the keys have mean 2 instead of 0. What happens to the variance of the
#    scores at $d_k = 64$, and what does softmax notice?
#
# <details><summary>Solution</summary>
#
# `theory.score_variance(64, 1 / 8, mean_key=2)` is 5, but `theory.row_variance(64, 1 / 8)` stays 1:
# what the mean adds is the same for all keys of a row, and softmax ignores what a whole row has in
# common. This is why the laboratory always reports the variance within rows.
#
# </details>
#
# 3. In self-attention with $W^Q = W^K$ a token also meets itself. What are the mean and the
#    standard deviation of $q \cdot q/\sqrt{d_k}$?
#
# <details><summary>Solution</summary>
#
# $q \cdot q$ is chi-square with $d_k$ degrees of freedom: mean $d_k$, variance $2 d_k$. Divided by
# $\sqrt{d_k}$ the mean is $\sqrt{d_k}$, 8 at $d_k = 64$, and the standard deviation is $\sqrt 2$.
# Once $q$ and $k$ are correlated it is the mean that grows, like $d_k$, and dividing by
# $\sqrt{d_k}$ does not hold it: notebook 13.
#
# </details>
