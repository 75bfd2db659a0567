# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does training need the scale?
#
# **Question.** How much worse do models train without $1/\sqrt{d_k}$, each at a learning rate that
# suits it: in the end, or only at first? And what goes wrong?
#
# **Common misconception.** "Without the scale softmax saturates, so the gradients vanish and
# nothing is learned."

# %% [markdown]
# ## Prediction
#
# Unscaled scores start with variance $d_k$ (Vaswani et al. 2017, section 3.2.1): at $d_k = 64$ a
# row of 16 weights is nearly one-hot, at a key that chance chose. That does not make the expected
# gradient vanish:
#
# $$ \frac{\partial L}{\partial q} = \text{scale} \sum_j p_j (a_j - \bar a)\, k_j $$
#
# no longer has the factor $1/\sqrt{d_k}$, so that where a row is not saturated it is 8 times as
# large, and the gradient to $V$, $p^T\, \partial L/\partial O$, never depended on the scale. What
# is lost is its direction: a query hears from the few keys that it already looks at and from no
# others. Training should be slow, not impossible, so the verdict should depend on how long one
# trains; and $d_k = 4$, with scores of variance 4, should hardly mind.

# %% [markdown]
# ## In plain NumPy
#
# Through how many keys does the gradient of one query come? The participation ratio of
# $\partial L/\partial S$ along a row, with the scale and without. It is 2 where only a winner and
# its runner-up count, since a row of $\partial L/\partial S$ sums to 0.

# %%
import numpy as np

import sdpa
from sdpa_lab import training
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
query, key, value, grad_out = rng.standard_normal((4, 200, 16, 64))
heard = []
for scale in (64**-0.5, 1.0):
    p = np.exp(scale * (query @ key.swapaxes(-1, -2)))
    p /= p.sum(axis=-1, keepdims=True)
    grad_p = grad_out @ value.swapaxes(-1, -2)
    grad_s = p * (grad_p - (p * grad_p).sum(axis=-1, keepdims=True))
    out, lse = sdpa.attention_forward(query, key, value, scale=scale)
    grads = sdpa.attention_backward(grad_out, query, key, value, out, lse, scale=scale)
    np.testing.assert_allclose(grads.query, scale * grad_s @ key, atol=1e-10)
    heard.append(np.median((grad_s**2).sum(-1) ** 2 / (grad_s**4).sum(-1)))
print("keys that the gradient of a query comes through: {:.1f} scaled, {:.1f} not".format(*heard))

# %% [markdown]
# Before you go on, write down a guess: at the first step, how large is the gradient to $W^Q$
# without the scale at $d_k = 64$, compared with that of a model that has the scale?

# %%
my_guess = None  # below 1 if it vanishes

# %% [markdown]
# ## Measurement
#
# Models of the recall task (`sdpa_lab.training.recall`) while they learn: eight of each rule, one
# learning rate. It is the best rate for none of them; the ledger below tries several. Shown are the
# first and the last step; `print(table)` has all.

# %%
table = training.curves(64, every=10, seeds=8, steps=151)
columns = ("rule", "step", "loss", "grad W^Q", "grad W^V", "entropy", "score std")
print(table.where(step=(0, 150)).select(*columns))

first, last = ({row["rule"]: row for row in table.where(step=step).rows} for step in (0, 150))
grads = {rule: row["grad W^Q"].estimate() for rule, row in first.items()}
assert grads["1"].low > 2 * grads["sqrt d_k"].high  # nothing vanishes
losses = {rule: row["loss"].estimate() for rule, row in last.items()}
assert losses["sqrt d_k"].high < 0.1 < 0.5 < losses["1"].low
assert losses["1"].high < first["1"]["loss"].estimate().low  # slow, not stuck

# %% [markdown]
# ## Figure
#
# Loss, gradient and entropy of a row for three divisors. Unscaled models (divided by 1) start with
# rows of 0.5 nats and the largest gradient of all. Divided by $d_k$, rows start flat and the
# gradient is small. Both learn slowly, from opposite sides.

# %%
training.plot_curves(table)

# %% [markdown]
# ## Conclusion
#
# Models need the scale, or an equivalent start (notebook 12), to learn soon; they do not need it to
# learn. At $d_k = 64$ those without it take about twelve times as many steps, each at its best
# learning rate, and after 1200 steps little is left of the difference, at $d_k = 32$ and over the
# length nothing; at $d_k = 4$ there hardly is one. So who stops after 150 steps finds that the
# scale is indispensable, and who stops after 1200 that it is a matter of patience. The reason is
# not a vanishing gradient: that of unscaled models is six times as large at the start and at no
# time much smaller. It reaches each query through only two keys, and must reorder scores whose
# standard deviation is 8. Notebook 19 asks what it costs in stability. The ledger:

# %%
judged = ledger(["no-scale-training", "no-scale-length", "dk-independence", "stop-learning"])
print(bilingual(judged))

# %% [markdown]
# ## Exercises
#
# 1. Dividing by $d_k$ instead of $\sqrt{d_k}$ makes all rows flat at the start. Is that harmful at
#    a learning rate of its own?
#
# <details><summary>Solution</summary>
#
# No. At $d_k = 64$ and the best of four rates, 0.01 for both, the loss is 0.0005 nats, compared
# with 0.0002. At the rate of the figure, 0.003, it is 0.7 against 0.005: comparing at one rate
# compares rates.
#
# </details>
#
# 2. Can a learning rate make up for the missing scale at $d_k = 64$, given 600 steps?
#
# <details><summary>Solution</summary>
#
# Not quite. `training.scale_rules([64], rules=["1"], folds=["none"], rates=(1e-3, 3e-3, 1e-2),
# seeds=8, steps=600)` has 0.6, 0.2 and 0.4 nats; with the scale 150 steps are enough for 0.0002.
# Given 1200 steps it is 0.05.
#
# </details>
#
# 3. Models with additive scores have no scale. Do they need one at $d_k = 32$?
#
# <details><summary>Solution</summary>
#
# No: `ledger(["additive-no-scale"])` has 0.0001 nats without and 0.004 with $1/\sqrt{32}$. But not
# because their scores lie in $[-1, 1]$: they reach 9.
#
# </details>
