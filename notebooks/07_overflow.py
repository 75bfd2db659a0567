# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which scores overflow, in which dtype?
#
# **Question.** Which unscaled scores, or exponentials of them, leave the range of float16,
# bfloat16, float32 and float64, with and without the row's maximum subtracted?
#
# **Common misconception.** "At $d_k = 64$ the standard deviation is 8, so softmax may overflow: the
# scale is there for numerical stability."

# %% [markdown]
# ## Prediction
#
# $e^s$ overflows beyond $s = \ln(\text{largest number})$: 11.09 for float16, 88.72 for bfloat16 and
# float32, 709.8 for float64. Scores have standard deviation $\sqrt{d_k}$, so at $d_k = 64$ a share
# of $P(s > 11.09) = 8\,\%$ of them overflows in float16, and in float32 a share of
# $6 \cdot 10^{-20}$. (A normal variable of the same variance has $7 \cdot 10^{-29}$: eleven
# standard deviations of a mixture of widths are not those of a normal variable.) Softmax is the
# same for $s$ and for $s - \max s$, whose exponentials are at most 1: with this shift nothing
# overflows in any dtype, at any $d_k$ (Blanchard, Higham and Higham 2021).

# %% [markdown]
# ## In plain NumPy
#
# One matrix of scores at $d_k = 64$ in float16, without the shift.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
query, key = rng.standard_normal((2, 64, 64))
scores = (query @ key.T).astype(np.float16)
with np.errstate(over="ignore", invalid="ignore"):
    plain = np.exp(scores)
    plain /= plain.sum(axis=-1, keepdims=True)
shifted = np.exp(scores - scores.max(axis=-1, keepdims=True).astype(np.float64))
shifted /= shifted.sum(axis=-1, keepdims=True)
print(f"rows that are not finite without the shift: {(~np.isfinite(plain)).any(axis=-1).sum()}")

assert np.isnan(plain).any()
np.testing.assert_allclose(sdpa.softmax(scores), shifted, rtol=1e-3, atol=6e-8)

# %% [markdown]
# Before you go on, write down a guess: from which $d_k$ on does one unscaled score in a thousand
# overflow in float32, if the maximum is not subtracted?

# %%
my_guess = None  # the notes fear 64

# %% [markdown]
# ## Measurement
#
# A draw is one $n \times n$ matrix of scores. `score`: share of scores beyond the largest number;
# `plain`: share whose exponential is, with the exact tail; `row`: share of rows with such a score;
# `shifted`: share of weights of `sdpa.softmax` that are not finite. Shown are $d_k = 64$ and 1024
# at $n = 64$; `print(table)` has all.

# %%
table = lab.overflow()
print(table.where(d_k=(64, 1024), n=64))

half, single = (table.row(dtype=name, d_k=64, n=64) for name in ("float16", "float32"))
assert half["row"].estimate().low > 0.95
assert single["plain"].estimate().value == 0
assert single["plain"].predicted < 1e-19
assert (table["shifted"] == 0).all()
assert (table["score"] == 0).all()
assert (table.where(dtype="float64")["plain"] == 0).all()

# %% [markdown]
# ## Figure
#
# Share of unscaled scores whose exponential overflows, over $d_k$. Where there is no mark the
# measurement found none. Dashed is the tail of the normal distribution of the same variance, solid
# the exact one, `theory.outside`.

# %%
lab.plot_overflow(table)

# %% [markdown]
# ## Conclusion
#
# Of the dtypes in use only float16 is in danger at $d_k = 64$, and only if the maximum is not
# subtracted; every library subtracts it. Float32 would need a $d_k$ near 820 before one score in a
# thousand overflows, float64 one of 53 000. With the shift nothing overflows anywhere. What the
# scale prevents is saturation (notebook 03), not overflow. The ledger:

# %%
print(bilingual(ledger(["overflow-64", "exp-50", "shift", "numerical-stability"])))

# %% [markdown]
# ## Exercises
#
# 1. Note 004 says that $e^{50}$ may exceed the range of floating-point numbers. Of which dtypes is
#    that true?
#
# <details><summary>Solution</summary>
#
# $e^{50}$ is $5.2 \cdot 10^{21}$: beyond float16 (65504) alone. Float32 and bfloat16 end at
# $3.4 \cdot 10^{38}$.
#
# </details>
#
# 2. With the shift, small exponentials underflow instead. Why is that harmless, and what is lost?
#
# <details><summary>Solution</summary>
#
# In float32 a weight becomes 0 where it should be below $10^{-45}$ of the largest. Its error is
# that small in absolute terms, and so is what it would have added to the output. What is lost is
# its gradient, and order: weights that are 0 are all equal (row `attention-rows` of the ledger).
#
# </details>
#
# 3. Is the shift enough? Sum 100 000 equal weights in float16.
#
# <details><summary>Solution</summary>
#
# `np.exp(np.zeros(100_000, np.float16)).sum(dtype=np.float16)` is inf: the sum of exponentials that
# are all 1 overflows beyond 65504 keys. Sums must be wider than the operands; sdpa adds 16-bit
# operands in float32, and `sdpa.softmax(np.zeros(100_000, np.float16))` is $10^{-5}$ throughout.
#
# </details>
