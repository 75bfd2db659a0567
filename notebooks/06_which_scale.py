# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which scale is best, and by which criterion?
#
# **Question.** Before training, at which standard deviation $\sigma$ of the scores is the gradient
# to the scores $S$, to $Q$, $K$, $V$ and to $W^Q$ largest, by root mean square and by median? How
# far from it is $1/\sqrt{d_k}$, which is $\sigma = 1$? And what does another divisor cost a model
# that is trained with it?
#
# **Common misconception.** "$d_k$ is too much, $\ln d_k$ too little, $\sqrt{d_k}$ is optimal: unit
# variance is where gradients are largest, and any other divisor makes a worse model."

# %% [markdown]
# ## A picture first
#
# Models of the recall task (`sdpa_lab.training.recall`) are trained with six divisors: 1,
# $\ln d_k$, $\sqrt{d_k}$, $2\sqrt{d_k}$, $4\sqrt{d_k}$ and $d_k$, each at the best of four learning
# rates. To the left of $\sqrt{d_k}$ learning is slow; to the right nothing is lost.

# %%
from sdpa_lab import training

trained = training.divisors(seeds=4)
training.plot_divisors(trained)

# %% [markdown]
# ## Prediction
#
# For values and upstream gradients of unit variance
#
# $$ \operatorname{E} \Bigl|\frac{\partial L}{\partial s}\Bigr|^2 = d_v |J|^2, \qquad
# |J|^2 = \sum p^2 - 2 \sum p^3 + \Bigl(\sum p^2\Bigr)^2 $$
#
# with the Jacobian $J$ of softmax. This is about $1/n$ for equal weights, 0 for one weight of 1,
# and largest in between: at `theory.best_sigma(n)`, the exact argmax, which is 0.6 times the
# freezing point $\sqrt{2 \ln n}$ for 8 keys, 1.4 times for 512, and tends to twice the freezing
# point. $\partial L/\partial Q$ carries the scale as a factor, so its root mean square goes on
# growing with $\sigma$ (a few rows with huge gradients), while its median turns and falls. So the
# answers must differ by target, by statistic and by $n$; $d_k$ enters only through the spread of
# $|q|$ and should hardly matter.
#
# *Trained models.* Too large a divisor makes rows even at the start, with a gradient that is small
# but the same in all rows; training can enlarge $q \cdot k$ as far as the task asks. Too small a
# one makes most rows choose a key at random, which training has to undo first (notebook 11). So the
# two sides should not be alike: too small should cost more than too large.

# %% [markdown]
# ## In plain NumPy
#
# The gradient that reaches the scores, from the weights alone.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab import theory
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
query, key = rng.standard_normal((2, 64, 64))
for sigma in (0.5, 1, 4, 16):
    p = np.exp(query @ key.T * sigma / 8)
    p /= p.sum(axis=1, keepdims=True)
    jacobian = (p**2).sum(1) - 2 * (p**3).sum(1) + (p**2).sum(1) ** 2
    law = theory.attention(64, 64, sigma / 8).grad_score
    print(f"sigma {sigma}: rms {np.sqrt(jacobian.mean()):.3f}, law {law:.3f}")
    full = sdpa.softmax_jacobian(sdpa.attention_weights(query, key, scale=sigma / 8))
    np.testing.assert_allclose((full**2).sum(axis=(1, 2)), jacobian, atol=1e-12)

# %% [markdown]
# Before you go on, write down two guesses: for 512 keys, how many times $1/\sqrt{d_k}$ is the scale
# with the largest gradient to the scores? And which costs a trained model more at $d_k = 64$: to
# divide by 64 or by $\ln 64 = 4.2$?

# %%
my_guess = {"times": None, "costs more": None}  # 1 if sqrt(d_k) is optimal

# %% [markdown]
# ## Measurement
#
# One head per draw, with projections and input of its own; $\sigma$ from 1/4 to 32. `grows` is the
# share of bootstrap samples in which the gradient still increases at $\sigma = 32$, the end of the
# grid. Shown is $d_k = 64$ at 8 and 512 keys for $S$ and $Q$; `print(table)` has all 45 rows. Then
# the same for the scores with queries and keys that correlate ($W^K = \rho\, W^Q + \ldots$), as
# training makes them.

# %%
table = lab.best_sigma(draws=12)
tied = lab.best_sigma(n=[64], d_k=[64], rho=[0.0, 0.5, 1.0], draws=12)
print(table.where(d_k=64, n=(8, 512), target=("S", "Q")), end="\n\n")
print(tied.where(target="S").select("rho", "by_rms", "by_median"))

scores, queries = (table.where(target=target) for target in "SQ")
assert (queries["grows_rms"] > 0.5).all()  # by rms: no best scale up to 32
assert (table.where(target="W")["grows_rms"] > 0.5).all()
long = scores["n"] >= 32
assert (scores["by_rms_low"][long] > 2).all()  # far above 1/sqrt(d_k)
assert (queries["by_median_low"] > 2).all()
assert np.ptp(scores["by_rms"][scores["n"] == 512]) < 0.6  # over d_k = 16, 64, 256
free, half, equal = (tied.where(target="S", rho=rho)["by_rms"][0] for rho in (0.0, 0.5, 1.0))
assert free > 3 > half > 1 > equal

# %% [markdown]
# And the models of the picture: the loss after 600 steps, or after 150 where the task was solved by
# then.

# %%
for width in (64, 256):
    print(trained.where(d_k=width, steps=600).select("d_k", "rule", "loss"), end="\n\n")

loss = {(row["d_k"], row["rule"], row["steps"]): row["loss"].estimate() for row in trained.rows}
for width in (64, 256):
    assert loss[width, "1", 150].low > 0.3
    assert all(loss[width, f"{c} sqrt d_k", 150].value < 0.01 for c in (2, 4))
    assert loss[width, "d_k", 150].value < 0.01  # too large does no harm
assert loss[256, "log d_k", 150].value > 0.05 > 0.01 > loss[256, "log d_k", 600].value

# %% [markdown]
# ## Figure
#
# The $\sigma$ of the largest gradient over the length, before training: by root mean square (left)
# and by median (right). The grey line is $1/\sqrt{d_k}$, the other without marks the exact argmax
# for the scores. Targets that are not shown still grow at $\sigma = 32$.

# %%
lab.plot_best_sigma(table)

# %% [markdown]
# ## Conclusion
#
# *Before training* no scale is best by all criteria, and by none of those measured is
# $1/\sqrt{d_k}$ best at every length. The gradient to the scores is largest at 1.2 times that scale
# for 8 keys, 2.8 times for 32 and 5.1 times for 512, by the exact law for independent queries and
# keys (`lab.best_scale(n, d_k)`); the heads measured here, whose queries and keys share their
# tokens, have 5.5 at 512, on a coarse grid. $d_k$ hardly matters. By the median of
# $\partial L/\partial Q$ the best scale is 3 to 7 times $1/\sqrt{d_k}$; by the root mean square of
# $\partial L/\partial Q$ and $\partial L/\partial W^Q$ it is 32 times that or more. With queries
# and keys that correlate by 0.5, as training makes them, the best $\sigma$ falls from 3.7 to 1.2
# ($n = 64$), with $W^K = W^Q$ to 0.5: $1/\sqrt{d_k}$ leaves room for that. MiniLM's heads
# (notebook 14) pass on average 0.88 of the largest gradient that they would pass at any scale.
#
# *Trained*, a divisor of $2\sqrt{d_k}$, $4\sqrt{d_k}$ or $d_k$ costs nothing in loss, though with
# $d_k$ the weights stay more even (0.73 on the key that is asked for, 0.96 with $\sqrt{d_k}$, after
# 150 steps). One that is too small makes learning slow: without a scale the loss is 1.1 nats at
# $d_k = 64$ and 1.8 at 256 after 150 steps, 0.2 and 0.8 after 600, where $\sqrt{d_k}$ is done.
#
# **Then which?** $1/\sqrt{d_k}$: it is the same at every width, saturates no row at any length
# before training, and is what every trained model expects. If in doubt take a smaller scale,
# not a larger one: with Adam and a learning rate that is kept while $d_k$ grows, $1/d_k$ (notebook
# 17); where training is unstable, QK-norm (notebook 19); for sequences much longer than in
# training, a factor that grows with $\ln n$ (notebook 04). The ledger:

# %%
print(bilingual(ledger(["sqrt-optimal", "optimal-region", "dk-selectivity", "two-sqrt-harm"])))

# %% [markdown]
# ## Exercises
#
# 1. With $n = 2$ the row's gradient is a function of one difference. Where is
#    $\operatorname{E} |J|^2$ largest?
#
# <details><summary>Solution</summary>
#
# $|J|^2 = 4 p^2 (1 - p)^2$, largest at $p = 1/2$, so at $\sigma = 0$:
# `theory.weights(2, 0).jacobian` is 1/4 and falls from there.
#
# </details>
#
# 2. The share of rows without gradient (below 0.01 of the upstream gradient) is a criterion as
#    well. From which $\sigma$ on are more than a tenth of the rows of $\partial L/\partial Q$ dead
#    at $n = 128$?
#
# <details><summary>Solution</summary>
#
# `t = lab.gradients_over_sigma(n=[128], draws=10).where(target="Q")`, then `t["dead"]` over
# `t["sigma"]`: it is below 0.01 up to $\sigma = 4$ and above a tenth from 11.3 on (0.15); at 32 it
# is 0.47.
#
# </details>
#
# 3. Gradients to $Q$ can be small with the scale on. Which part of that is averaging?
#
# <details><summary>Solution</summary>
#
# `lab.averaging()`: with independent tokens the root mean square of $\partial L/\partial Q$ falls
# from 0.38 at $n = 8$ to 0.13 at 2048, and it is about $1 - c$ times that where any two tokens
# correlate by $c$ (0.012 for 0.9 at 2048). No weight is saturated there.
#
# </details>
