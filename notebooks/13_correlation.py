# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # When is $1/d_k$ the right scale, and not $1/\sqrt{d_k}$?
#
# **Question.** With which power of $d_k$ does the standard deviation of $q \cdot k$ grow when
# queries and keys are no longer independent, and what has to be true of them for that power to
# become 1? Where do the heads of a real model stand?
#
# **Common misconception.** "$\operatorname{Var}(q \cdot k) = d_k$, so divide by $\sqrt{d_k}$", say
# some. "After training queries and keys are correlated, so divide by $d_k$", say others, as if
# correlation alone decided.

# %% [markdown]
# ## Prediction
#
# Take tokens that span $R$ directions, and projections that share a part,
# $W^K = \rho\, W^Q + \sqrt{1 - \rho^2}\, W'$. Between different tokens
# $q \cdot k = x^T W^Q (W^K)^T y$ has mean 0 and, by the moments of a Wishart matrix (docstring of
# `sdpa_lab.experiments.correlation`),
#
# $$ \operatorname{Var}(q \cdot k) = d_k + \frac{\rho^2 d_k (d_k + 1)}{R} $$
#
# so the standard deviation grows like $\sqrt{d_k}$ up to $d_k = R/\rho^2$ and like $d_k$ beyond.
# The footnote of Vaswani et al. 2017 is $\rho = 0$; the $1/d_k$ of muP (Yang, Hu et al. 2022) is
# the other end. Correlation is not enough: the tokens must also span fewer than $\rho^2 d_k$
# directions. A token with itself has the mean $\rho\, d_k$ as well, which calls for $1/d_k$ at any
# rank.

# %% [markdown]
# ## In plain NumPy
#
# Tied projections, tokens that span 8 of many directions: from $d_k = 64$ to 256 the standard
# deviation grows four times, not twice.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual
from sdpa_lab.experiments import correlation

rng = np.random.default_rng(0)
x = rng.standard_normal((100, 32, 8))
off = ~np.eye(32, dtype=bool)
for d_k in (64, 256):
    w = rng.standard_normal((100, 8, d_k)) / np.sqrt(8)
    query = key = x @ w
    scores = query @ key.swapaxes(1, 2)
    law = correlation.score_std(d_k, 1.0, 8)
    print(f"d_k = {d_k}: std {np.sqrt((scores[:, off] ** 2).mean()):.1f}, law {law:.1f}")
    ours = sdpa.attention_weights(query, key, scale=1.0, stage="scores")
    np.testing.assert_allclose(ours, scores, atol=1e-9)

# %% [markdown]
# Before you go on, write down a guess: queries and keys that correlate by $\rho = 1/2$, tokens that
# span 512 directions. With which power of $d_k$ does the standard deviation grow at $d_k = 512$?

# %%
my_guess = None  # between 1/2 and 1

# %% [markdown]
# ## Measurement
#
# The law over $d_k$, $\rho$ and the rank, at two lengths, which make no difference. The table has
# the exponents at $d_k = 512$; `print(table)` has all.

# %%
table = lab.correlated_growth()
half = (table["std_high"] - table["std_low"]) / 2
assert (abs(table["std"] - table["std_predicted"]) < 2.5 * half).all()
exponent = {
    (rank, rho): table.row(n=32, rank=rank, rho=rho, d_k=512)["exponent"]
    for rank in (8, 512)
    for rho in (0.0, 0.5, 1.0)
}
print(table.where(n=32, d_k=512, rho=(0.0, 0.5, 1.0)).select("rank", "rho", "std", "exponent"))
np.testing.assert_allclose([exponent[8, 0.0], exponent[512, 0.0]], 0.5)
assert exponent[8, 1.0] > 0.95
assert exponent[512, 0.5] < 0.6  # correlated, and still sqrt(d_k)

# %% [markdown]
# The heads of all-MiniLM-L6-v2 where it is installed (`make models`): their queries and keys in
# $d_k$ of their 32 dimensions, as exact means over random directions. The exponent is that of the
# standard deviation within rows from $d_k/2$ to $d_k$; the table shows the full width.

# %%
try:
    heads = lab.trained_growth(draws=24).where(head="all")
except ImportError as error:
    heads = None
    print(error)
else:
    full = heads.where(d_k=32)
    print(full)
    assert (full["exponent_low"] > 0.65).all()
    assert (full["exponent_high"] < 0.85).all()
    assert (full["cosine_high"] < 0.5).all()

# %% [markdown]
# ## Figure
#
# Marks are measured, lines are the law; dashed are the powers 1/2 and 1. Left: tokens in 8
# directions; then in 512; then the power by which the standard deviation of the trained heads grows
# from $d_k/2$ to $d_k$, a line per layer.

# %%
lab.plot_correlated_growth(table, heads)

# %% [markdown]
# ## Conclusion
#
# $1/d_k$ is right from $d_k = R/\rho^2$ on, where $R$ counts the directions that the tokens span:
# at $\rho = 1/2$ from $d_k = 32$ with 8 directions, from 2048 with 512 (exponent 0.58 at
# $d_k = 512$). In the trained heads of MiniLM the standard deviation grows at the full width with
# the powers 0.70 to 0.80, though the cosine of a token's query with its key is only 0.11 to 0.35.
# What raises the power is that $(q \cdot k)^2$ is larger than unrelated directions would make it
# (exercise 3). These are random projections of heads that were trained at one width. What training
# does to models of different widths, which is the question of muP, is measured in notebook 17.
#
# **What to take away.** Divide by $\sqrt{d_k}$ where queries and keys start independent, which is
# what every usual initialiser gives. $1/d_k$ has two uses. One is a model whose products add up
# from the start: tied projections, tokens that span fewer than $\rho^2 d_k$ directions, or
# attention of a token to itself. The other is muP, which wants the *step* of Adam to change scores
# alike at every width (notebook 17). That keys and queries are correlated after training is no
# reason by itself. The claim for independent components in the ledger:

# %%
print(bilingual(ledger(["mean-var"])))

# %% [markdown]
# ## Exercises
#
# 1. From which $d_k$ on is $1/d_k$ better than $1/\sqrt{d_k}$ for tokens of rank 64 and
#    $\rho = 0.5$?
#
# <details><summary>Solution</summary>
#
# $d_k = 64/0.25 = 256$: there both terms of the variance are equal, and the local exponent is about
# 3/4.
#
# </details>
#
# 2. `score_std` is a law for independent tokens. What does the mean of $q \cdot k$ of a token with
#    itself do, and what does that mean for the diagonal of the weights at $\rho = 1$ with the scale
#    $1/\sqrt{d_k}$?
#
# <details><summary>Solution</summary>
#
# It is $\rho\, d_k$ (column `diagonal` of the table, over $d_k$), and $\sqrt{d_k}$ after scaling:
# at $d_k = 64$ the diagonal stands 8 above the rest, at 512 it stands 22.6 above. Every token
# attends to itself alone; with $1/d_k$ it would stand 1 above.
#
# </details>
#
# 3. Why can the heads' exponent exceed 1/2 although queries and keys of a token are nearly
#    orthogonal?
#
# <details><summary>Solution</summary>
#
# `projected` (in `sdpa_lab.experiments.heads`): the variance in $d_k$ of $D$ random directions is a
# sum of two terms, $(a + b) \operatorname{E} (q \cdot k)^2$ and $b \operatorname{E} |q|^2 |k|^2$.
# It is $d_k/D$ times the whole, exponent 1/2, if
# $\operatorname{E} (q \cdot k)^2 = \operatorname{E} |q|^2 |k|^2/D$, as for directions that have
# nothing to do with each other. Any excess of $(q \cdot k)^2$ over that, of either sign of
# $q \cdot k$ and between any tokens, raises the exponent; the cosine of a token with itself does
# not matter.
#
# </details>
