# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is additive attention slower by an order of growth, or by a factor?
#
# **Question.** How does the time of additive attention grow with the length $n$ and the width $d$,
# compared with that of the dot product at the same $n$ and $d$, and by what factor is it longer?
#
# **Common misconception.** "Additive attention takes $n^2 d^2$, because each of the $n^2$ pairs
# goes through two matrices; its tanh is elementwise and cannot be done in parallel. Therefore a dot
# product is faster by orders of magnitude."

# %% [markdown]
# ## Prediction
#
# The score of a pair is $w \cdot \tanh(W q + U k)$ (Bahdanau, Cho and Bengio 2015, appendix A.1.2).
# $W q$ depends on the query alone and $U k$ on the key alone: projected once per token they cost
# $4 n d^2$ operations, and what is left for each pair is $d$ times an addition, a tanh and a
# product. So the time grows as $n^2 d + n d^2$, which is $n^2 d$ where $n > d$, as for the dot
# product.
#
# A tanh of a sum needs no tanh per pair either. With $A = e^{2a}$ and $B = e^{2b}$, taken once per
# token,
#
# $$ \tanh(a + b) = \frac{A B - 1}{A B + 1}, $$
#
# a few operations and, when two channels share it, half a division. The factor should then be small
# where both are implemented well. Operation by operation, as one writes it in a framework, it
# should be large: not for want of parallelism, as no tanh waits for another, but because $n^2 d$
# numbers go through memory several times where a matrix product keeps its sums in registers.

# %% [markdown]
# ## In plain NumPy
#
# The scores from exponentials of tokens; the C routine computes them in tiles in the same way.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual
from sdpa_lab.experiments.cost import numpy_additive

rng = np.random.default_rng(0)
query, key, value = rng.standard_normal((3, 10, 64))
w_query, w_key = rng.standard_normal((2, 64, 64)) / 8
w_score = rng.standard_normal(64) / 8
product = np.exp(2 * query @ w_query)[:, None] * np.exp(2 * key @ w_key)
weights = sdpa.softmax((product - 1) / (product + 1) @ w_score)

arguments = (query, key, value, w_query, w_key, w_score)
np.testing.assert_allclose(sdpa.additive_attention(*arguments), weights @ value, rtol=1e-10)
np.testing.assert_allclose(numpy_additive(*arguments), weights @ value, rtol=1e-10)

# %% [markdown]
# Before you go on, write down two guesses for $d = 64$: how many times as long does additive
# attention take if both are implemented well, and how many times in eager PyTorch?

# %%
my_guess = None, None  # "orders of magnitude" would be 100

# %% [markdown]
# ## Measurement
#
# `lab.cost` times one call of each on one thread, along $n$ at $d = 64$ and along $d$ at
# $n = 1024$, in turns; a turn is a draw. Both exponents of additive attention must agree with
# $n^2 d$ rather than $n^2 d^2$, and the factor must be below ten.

# %%
table = lab.cost()
exponents = lab.cost_exponents(table)
ratio = lab.cost_ratio(table)
print(exponents, ratio.where(n=(256, 1024), d=(16, 64, 256)), sep="\n\n")

additive = exponents.where(kind="additive")
assert all(1.6 < n < 2.4 for n in additive.where(axis="n")["exponent"])
assert all(0.6 < d < 1.4 for d in additive.where(axis="d")["exponent"])
assert (ratio["ratio_high"] < 10).all()

# %% [markdown]
# Operation by operation, in PyTorch where it is installed and else in NumPy; and with both
# projections of every pair, as the formula reads.

# %%
kinds = ("dot, eager", "additive, eager")
eager = lab.cost_ratio(lab.cost(kinds, lengths=(64, 256), widths=(), turns=5), *kinds[::-1])
sizes = {"lengths": (48, 96), "widths": (64, 128, 256), "n": 96}
per_pair = lab.cost_exponents(lab.cost(["additive, each pair"], **sizes, turns=5)).where(axis="d")
print(eager, per_pair, sep="\n\n")

by_the_routines = ratio.row(axis="n", n=1024)["ratio"].estimate()
assert eager.row(n=256)["ratio"].estimate().low > by_the_routines.high
assert per_pair["exponent"][0] > additive.where(axis="d")["exponent"][0]

# %% [markdown]
# ## Figure
#
# The lines of both kinds are parallel: growth is the same, the distance is the factor.

# %%
lab.plot_cost(table)

# %% [markdown]
# ## Conclusion
#
# By a factor, and by which depends on the program. Projected once per token, additive attention
# grows with $n$ and $d$ as the dot product does; $n^2 d^2$ is the time of a program that projects
# every pair anew. Written in a framework operation by operation, which is what the note compares,
# the dot product is faster by one to two orders of magnitude on a CPU. On a GPU the factor is
# smaller for one short head and as large for many: 1.9 for one head of 256 keys, 22 for one of
# 2048, 39 for 16 heads of 2048 (one NVIDIA H200, PyTorch 2.11; not measured in this run). Where
# tanh follows from exponentials of tokens and no array of $n^2 d$ numbers exists, three to four are
# left.

# %%
at = ratio.row(axis="n", n=1024)["ratio"].estimate()
print(f"additive / dot product, n = 1024, d = 64: {at.value:.1f} ({at.low:.1f} to {at.high:.1f})")
at = eager.row(n=256)["ratio"].estimate()
print(f"operation by operation, n = 256, d = 64: {at.value:.0f}")
print(bilingual(ledger(["additive-time", "additive-speed", "additive-kernels", "tanh-parallel"])))

# %% [markdown]
# ## Exercises
#
# 1. At which width do the projections, $4 n d^2$ operations, outweigh the $n^2 d$ tanh, if a tanh
#    costs as much as ten operations?
#
# <details><summary>Solution</summary>
#
# $4 n d^2 = 10 n^2 d$ at $d = 2.5 n$. For $n = 1024$ that is $d = 2560$, wider than any head.
#
# </details>
#
# 2. $\tanh(a + b)$ is also $(s + t)/(1 + s t)$ with $s = \tanh a$ and $t = \tanh b$, which needs no
#    exponential at all. What goes wrong in float32 at $a = 9$, $b = -8.5$?
#
# <details><summary>Solution</summary>
#
# `s, t = np.tanh(np.float32([9, -8.5])); (s + t) / (1 + s * t)` gives 0.333, and $\tanh 0.5$ is
# 0.462: $s$ and $t$ are within a rounding or two of 1 and -1, so that numerator and denominator are
# made of rounding errors. `a, b = np.exp(2 * np.float32([9, -8.5])); (a * b - 1) / (a * b + 1)`
# gives 0.462.
#
# </details>
#
# 3. Does tanh bound the score, so that no scale is needed?
#
# <details><summary>Solution</summary>
#
# $|s| \le \sum |w_{\text{score}}|$, here `abs(w_score).sum()`, which grows as $\sqrt d$ where the
# variance of `w_score` is $1/d$, as above, and as $d$ where it is 1. What does not grow is the
# standard deviation of the scores: `np.std((product - 1) / (product + 1) @ w_score)`. The scale has
# not gone away; it is in the initialiser of `w_score`.
#
# </details>
