# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does training change the power of $d_k$?
#
# **Question.** $\operatorname{std}(q \cdot k) = \sqrt{d_k}$ holds before training. Which divisor
# makes the first step of training act alike at every $d_k$, with SGD, with Adam and with Muon? And
# which power of $d_k$ does $q \cdot k$ have after 600 steps?
#
# **Common misconception.** "$\sqrt{d_k}$ makes everything independent of $d_k$", and its rival:
# "training aligns $q$ and $k$, so the power moves from 1/2 to 1 and $d_k$ is the right divisor".

# %% [markdown]
# ## Prediction
#
# Let the score be $c\, q \cdot k$ with $c = d_k^{-a}$, and let one step of rate $r$ move $W^Q$. For
# one query the gradient is $c$ times a mean of keys, whose length is about $\sqrt{d_k}$. So the
# scaled score moves by $r$ times
#
# $$ \underbrace{c \cdot c\, d_k}_{\text{SGD}}, \qquad \underbrace{c\, d_k}_{\text{Adam}}, \qquad
# \underbrace{c \sqrt{d_k}}_{\text{Muon}} $$
#
# SGD's step carries the scale, so $c$ stands there twice. Adam moves each of $d_k$ components by
# $r$, whatever $c$ is, and their products with the key have one sign. Muon's step has spectral norm
# $r$ and meets one key. These are constant for $a = 1/2$, 1 and 1/2. That is why muP, which is
# written for Adam, divides by $d_k$ (Yang, Hu et al. 2022, arXiv:2203.03466, definition 4.1).
#
# *After* training the task decides how large scaled scores have to be. If it asks for the same at
# every width, $q \cdot k$ must grow like the divisor: its exponent should be $a$, whatever it was
# at the start.

# %% [markdown]
# ## In plain NumPy
#
# One query and key per draw. The loss is the score itself, so that the gradient to $q$ is $c\, k$;
# both optimisers take a step along it.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab import training
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
moved = {}
for d_k in (64, 1024):
    q, k = rng.standard_normal((2, 2000, 1, d_k))
    for name, c in (("1/sqrt(d_k)", d_k**-0.5), ("1/d_k", 1 / d_k)):
        before = sdpa.attention_weights(q, k, scale=c, stage="scores")
        for optimiser, step in (("SGD", c * k), ("Adam", np.sign(c * k))):
            after = sdpa.attention_weights(q + 0.1 * step, k, scale=c, stage="scores")
            np.testing.assert_allclose(after, c * ((q + 0.1 * step) * k).sum(-1)[..., None])
            moved.setdefault((optimiser, name), []).append((after - before).mean())
for (optimiser, name), (narrow, wide) in moved.items():
    print(f"{optimiser:4} {name:11} exponent {np.log(wide / narrow) / np.log(16):.2f}")

# %% [markdown]
# Before you go on, write down a guess: in one step of Adam with $1/\sqrt{d_k}$, how many times as
# far do the scaled scores move at $d_k = 512$ as at 8?

# %%
my_guess = None  # 1 if sqrt(d_k) makes everything independent of d_k

# %% [markdown]
# ## Measurement
#
# Sixteen models on the task of `sdpa_lab.training.recall` at seven widths from 8 to 512: the
# exponent in $d_k$ of the change of the scaled scores in one step, model by model, beside the law.
# Then models trained by Adam for 600 steps at one learning rate with divisors
# $\sqrt{32}\,(d_k/32)^a$: the exponent of $\operatorname{std}(q \cdot k)$ at the start, of what the
# first step adds, and at the end; `scaled` is that of the scaled scores at the end.

# %%
first = lab.first_step_exponents()
print(first.where(divisor=("sqrt(d_k)", "d_k")), end="\n\n")
trained = training.trained_exponents(seeds=4)
print(trained)

found = {(row["optimiser"], row["divisor"]): row["exponent"].estimate() for row in first.rows}
for constant in (("SGD", "sqrt(d_k)"), ("Adam", "d_k"), ("Muon", "sqrt(d_k)")):
    assert abs(found[constant].value) < 0.15
assert 0.35 < found["Adam", "sqrt(d_k)"].value < 0.5
assert found["SGD", "d_k"].value < -0.9
assert abs(trained["start"] - 0.5).max() < 0.1
late = trained["power"] >= 0.5
assert abs(trained["scaled"][late]).max() < 0.2
assert (np.diff(trained["trained"][late]) > 0.1).all()
assert (trained["loss"][late] < 0.01).all()

# %% [markdown]
# ## Figure
#
# Left: which divisor makes one step act alike at every width, by optimiser; the answer is what lies
# on the dotted line. Right: training moves the exponent of $q \cdot k$ to the power of the divisor,
# in whichever direction that is.

# %%
training.plot_powers(first, trained)

# %% [markdown]
# ## Conclusion
#
# *One step.* Both camps are right, each for its optimiser: the scaled scores move alike at every
# $d_k$ with $1/\sqrt{d_k}$ under SGD (exponent $-0.10$) and Muon (0.00) and with $1/d_k$ under Adam
# ($-0.08$; with $1/\sqrt{d_k}$ 0.41: 5.4 times as far at 512 as at 8). The conditions: $d_k$ alone
# grows at a fixed $d_{\text{model}}$, one learning rate for all $d_k$, components of variance 1,
# the first step. From $d_k = 2 d_{\text{model}}$ on these three exponents are within 0.05 of 0.
#
# *After training* there is no power of $q \cdot k$ as such: the divisor sets it. With
# $1/\sqrt{d_k}$ it is again 0.52 after 600 steps, with $1/d_k$ 0.90, with $d_k^{1.25}$ 1.10, all
# from 0.5 at the start and all at a loss near 0, since the task fixes the size of the scaled
# scores. Only where the divisor grows too slowly ($a$ = 0 and 0.25) does $q \cdot k$ stay larger
# than needed: it starts too large, and training need not shrink it. So no note is wrong about the
# power after training, for none speaks of it. What to choose: notebook 06 asks what each divisor
# costs a model that is trained, and the answer is little, as long as it is not too small. The
# ledger:

# %%
print(bilingual(ledger(["first-step", "trained-power"])))

# %% [markdown]
# ## Exercises
#
# 1. Muon's step is sometimes multiplied by the root of the larger dimension of the matrix, so that
#    its elements are as large as Adam's. Which divisor does it then need, for $d_k$ above
#    $d_{\text{model}}$?
#
# <details><summary>Solution</summary>
#
# $d_k$, as Adam: the factor $\sqrt{d_k}$ makes the change $c\, d_k$.
#
# </details>
#
# 2. With SGD, how would the learning rate have to depend on $d_k$ for $1/d_k$ to act alike at every
#    width?
#
# <details><summary>Solution</summary>
#
# The change is $r\, c^2 d_k = r/d_k$ with $c = 1/d_k$: the rate of $W^Q$ and $W^K$ would have to be
# proportional to $d_k$.
#
# </details>
#
# 3. If $W^Q$ and $W^K$ are the same matrix, which exponent does the score of a token with itself
#    have before any training? Does an exponent of 1 need vectors that are nearly parallel?
#
# <details><summary>Solution</summary>
#
# 1: $q \cdot q = |q|^2$ is a sum of $d_k$ positive terms. And no: $q \cdot k = \gamma\,|q|\,|k|$
# with both lengths $\propto \sqrt{d_k}$ has the exponent 1 for any cosine $\gamma$ that does not
# depend on the width. For independent components $\gamma \propto 1/\sqrt{d_k}$.
#
# </details>
