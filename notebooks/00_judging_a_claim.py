# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How many numbers does one matrix of scores hold?
#
# **Question.** A note prints the variance of one matrix of scores and calls the law confirmed. How
# often does a 95 % interval made from the entries of one matrix cover the true variance, and how
# often does one made from several matrices?
#
# **Common misconception.** "A 64 x 64 matrix has 4096 scores, so its variance is known to about two
# per cent."

# %% [markdown]
# ## Prediction
#
# The entries of a row share a query, and those of a column share a key. For normal components the
# relative variance of the mean square of an $n \times m$ matrix is
#
# $$ \frac{2}{n m} + \frac{2}{n d_k} + \frac{2}{m d_k} + \frac{2}{n m d_k} $$
#
# (`theory.mean_square_spread`, derived in docs/theory.md). Treating the entries as independent
# amounts to assuming a relative variance of $(2 + 6/d_k)/n^2$. If $r$ is the ratio of the two
# standard errors, the assumed over the true, the interval covers with probability
# $2\,\Phi(1.96\,r) - 1$: less and less as $n$ grows.

# %% [markdown]
# ## In plain NumPy
#
# One matrix, the standard error that its entries seem to give, and the true one.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab import theory
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
query, key = rng.standard_normal((2, 64, 16))
square = (query @ key.T) ** 2
seeming = square.std() / np.sqrt(square.size) / 16
true = np.sqrt(theory.mean_square_spread(64, 64, 16))
print(f"variance / d_k {square.mean() / 16:.3f}, seems known to {seeming:.3f}, is to {true:.3f}")

scores = sdpa.attention_weights(query, key, scale=1.0, stage="scores")
np.testing.assert_allclose(scores**2, square, rtol=1e-10, atol=1e-12)
assert true > 2 * seeming

# %% [markdown]
# Before you go on, write down a guess: of intervals made from the 16 384 entries of a
# $128 \times 128$ matrix with $d_k = 16$, how many of a hundred cover the truth?

# %%
my_guess = None  # they claim 95

# %% [markdown]
# ## Measurement
#
# `lab.coverage` makes both intervals many times: from the entries of one matrix, and from the mean
# squares of 20 matrices, which are independent draws. The predictions are the formula above, and
# 0.95.

# %%
table = lab.coverage()
print(table)

longest = table.where(d_k=16, n=128)
assert longest["entries_high"][0] < 0.5
assert (abs(table["entries"] - table["entries_predicted"]) < 0.04).all()
assert ((table["draws_low"] < 0.95) & (table["draws_high"] > 0.9)).all()

# %% [markdown]
# ## Figure
#
# Intervals from entries (orange) get worse as $n$ grows, those from matrices (blue) do not. Lines
# are laws, marks are measured.

# %%
lab.plot_coverage(table)

# %% [markdown]
# ## Conclusion
#
# A larger matrix does not tell us more about the variance in proportion to its entries: at
# $d_k = 16$ and $n = 128$ the interval from 16 384 entries misses the truth more often than it
# covers it. Whole matrices are independent, and intervals made from them hold. So every experiment
# of the laboratory draws whole tensors, seeds or runs, and the ledger compares the interval of such
# draws, at a level that holds for all of its rows together, with a margin that its record
# states. The variances that note 000 prints are right on average; one of them strays by 3 %,
# not by 1.4 %:

# %%
print(bilingual(ledger(["toy-var"])))

# %% [markdown]
# ## Exercises
#
# 1. How many independent scores is one $64 \times 64$ matrix worth at $d_k = 64$, and how many at
#    $d_k = 4$?
#
# <details><summary>Solution</summary>
#
# A single squared score has relative variance $2 + 6/d_k$, so the matrix is worth
# `(2 + 6 / 64) / theory.mean_square_spread(64, 64, 64)` = 1422 of its 4096 entries at $d_k = 64$,
# and 216 at $d_k = 4$. Few components leave little that is independent.
#
# </details>
#
# 2. Note 000 prints the variance of one $100 \times 100$ matrix of scores at $d_k = 64$. How far
#    from 64 would you expect that number to be?
#
# <details><summary>Solution</summary>
#
# `64 * np.sqrt(theory.mean_square_spread(100, 100, 64))` = 1.8: about two of three such printouts
# lie between 62.2 and 65.8. For 10 000 independent scores it would be 0.9.
#
# </details>
#
# 3. The ledger has 99 rows. If each interval were at level 95 % and every claim true, how many rows
#    would one expect to go wrong? How much longer does an interval get if all are to hold together?
#
# <details><summary>Solution</summary>
#
# $0.05 \cdot 99 = 4.95$ rows. Bonferroni's level for each, with one figure per row and two looks,
# is $1 - 0.05/(99 \cdot 2)$; its half width is
# `statistics.NormalDist().inv_cdf(1 - 0.05 / (99 * 2 * 2))` = 3.7 standard errors instead of 1.96.
# The price is a factor of 1.9, or 3.5 times as many draws.
#
# </details>
