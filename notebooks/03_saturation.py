# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # When does a row of weights saturate?
#
# **Question.** How does the entropy of a row of $n$ weights fall as the standard deviation $\sigma$
# of its scores grows, and where does the fall depend on $n$?
#
# **Common misconception.** "Scores beyond some size, say 3 or 10, saturate softmax; divided by
# $\sqrt{d_k}$ they stay in the region where it works best."

# %% [markdown]
# ## A picture first
#
# One row of weights over ten keys whose scores are spread like a normal distribution. Orange: the
# scores as they are, for a width $d_k$ of 16, 64 and 256. Blue: divided by $\sqrt{d_k}$, which
# looks the same at every width. The numbers are the two largest weights.

# %%
import sdpa_lab as lab

lab.plot_ten_weights()

# %% [markdown]
# ## Prediction
#
# A row of $n$ independent normal scores is Derrida's random energy model (1981). For large $n$ its
# entropy is $\ln n - \sigma^2/2$ up to $\sigma_c = \sqrt{2 \ln n}$, where the row freezes: from
# there on a few weights hold everything. At finite $n$ the expectation is a quadrature that
# `theory.weights(n, sigma)` does to seven digits (docs/theory.md). What is too sharp depends on
# $n$: $\sigma_c$ is 2.1 for $n = 10$ and 3.7 for 1024. Unscaled, $\sigma = \sqrt{d_k}$, so a row
# of 1024 keys freezes from $d_k = 2 \ln n = 14$ on.

# %% [markdown]
# ## In plain NumPy
#
# Entropy of one row, and of the same row with eight times the scores.

# %%
import numpy as np

import sdpa
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
key = rng.standard_normal((64, 1))
for sigma in (1.0, 8.0):
    weights = np.exp(sigma * key.ravel())
    weights /= weights.sum()
    entropy = -(weights * np.log(weights)).sum()
    row = sdpa.attention_statistics(np.ones((1, 1)), key, scale=sigma)
    print(f"sigma {sigma:g}: entropy {entropy:.3f}, largest weight {weights.max():.3f}")
    np.testing.assert_allclose([row.entropy[0], row.max_weight[0]], [entropy, weights.max()])

# %% [markdown]
# Before you go on, write down a guess: the picture has ten evenly spread scores. Of ten random ones
# with standard deviation 8, as at $d_k = 64$ without the scale, how large is the largest weight on
# average?

# %%
my_guess = None  # between 0.1, all equal, and 1

# %% [markdown]
# ## Measurement
#
# A draw is one row; predicted is the quadrature, `limit` Derrida's. Then the setting of note 002,
# ten queries and ten keys, of which a draw is a whole tensor. Shown is $n = 64$; `print(table)` has
# all lengths.

# %%
table = lab.freezing()
note = lab.saturation((16, 64, 256), (10,), draws=300)
columns = ("scale", "d_k", "entropy", "max_weight", "tensor_max")
print(table.where(n=64, sigma=(0.5, 1.0, 2.0, 4.0, 8.0, 16.0)), note.select(*columns), sep="\n\n")

half = (table["entropy_high"] - table["entropy_low"]) / 2
assert (abs(table["entropy"] - table["entropy_predicted"]) < 2.5 * half).all()
frozen = table.where(n=1024, sigma=4.0)
assert frozen["limit"][0] == 0
assert frozen["entropy"][0] > 2
scaled, unscaled = (note.where(scale=name) for name in ("scaled", "unscaled"))
assert (scaled["entropy_high"] < 2.0).all()  # the note: 2.3
assert unscaled["entropy_high"][0] < 1.0  # the note: 2.1

# %% [markdown]
# ## Figure
#
# Entropy over $\sigma$ for three lengths: measured, exact (solid) and for large $n$ (dashed), with
# $\sigma_c$ dotted. The grey lines are the question: with the scale every row is at $\sigma = 1$;
# without it at 4, 8 and 16 for $d_k$ = 16, 64 and 256. Finite rows freeze much more gently than the
# limit says.

# %%
lab.plot_freezing(table)

# %% [markdown]
# ## Conclusion
#
# Saturation is gradual. It depends on how $\sigma$ compares with $\sqrt{2 \ln n}$, and not on a
# size that scores must not exceed. With the scale $\sigma$ is 1 at any $d_k$, and the entropy is
# 83 % of $\ln n$ at $n = 10$ and 93 % at 1024. Without it rows of ten keys have 0.75, 0.35 and 0.17
# nats at $d_k = 16$, 64 and 256. The table of note 002 has the right trend and wrong figures: 2.3
# is $\ln 10$, the entropy of equal weights, and no tensor shows an unscaled largest weight of
# 0.342. The ledger:

# %%
print(bilingual(ledger(["entropy-table", "maxweight-table"])))

# %% [markdown]
# ## Exercises
#
# 1. Note 002 prints an entropy of 2.1 for unscaled scores at $d_k = 16$ and $n = 10$. Which
#    $\sigma$ has that entropy?
#
# <details><summary>Solution</summary>
#
# Bisection on `theory.weights(10, sigma).entropy` gives $\sigma = 0.70$: scores even narrower than
# the scaled ones. Unscaled, $\sigma$ is 4 at $d_k = 16$.
#
# </details>
#
# 2. For which $\sigma$ is the entropy of a row half of $\ln n$, for $n = 10$, 64 and 1024? Is it a
#    fixed share of $\sigma_c$?
#
# <details><summary>Solution</summary>
#
# 2.41, 2.62 and 2.97, which is 1.12, 0.91 and 0.80 of $\sigma_c$. In the limit it is
# $\sqrt{\ln n}$, 0.71 of $\sigma_c$: finite $n$ is far from it.
#
# </details>
#
# 3. Without the scale, from which $d_k$ on is a row frozen in the sense of $\sigma > \sigma_c$, for
#    $n = 10$, 64, 1024 and 65536?
#
# <details><summary>Solution</summary>
#
# $d_k > 2 \ln n$: 4.6, 8.3, 13.9 and 22.2. Nearly every $d_k$ in use is above that at any length;
# longer rows help little.
#
# </details>
