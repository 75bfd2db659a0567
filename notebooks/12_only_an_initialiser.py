# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is the scale only an initialiser?
#
# **Question.** If $W^Q$ is multiplied by $1/\sqrt{d_k}$ once, before training, does the kernel
# still have to divide? What is left of the scale after training?
#
# **Common misconception.** "The scale normalises scores as batch normalisation does, so that their
# variance is always 1; scaling the initial weights instead is equivalent."

# %% [markdown]
# ## Prediction
#
# $c\, x W^Q (W^K)^T y$ is the same function whether $c$ stands in the kernel or in $W^Q$, so a
# folded model starts at the same point. But it does not move in the same way. Let $W' = c\, W^Q$;
# then
#
# $$ \frac{\partial L}{\partial W'} = \frac{1}{c}\, \frac{\partial L}{\partial W^Q}. $$
#
# With a learning rate $r$, plain descent should move $W'$ by $c$ times the step of $W^Q$ but moves
# it by $1/c$ times that step: the rate has to be $c^2 r$. Adam's steps do not depend on the size of
# gradients: the rate has to be $c\, r$. With that rate the folded model makes the same steps, so
# the scale is an initialiser together with a learning rate. With one rate for all, the folded $W^Q$
# moves $1/c = 8$ times as far per step as it should at $d_k = 64$, relative to its size, and wants
# a smaller rate. And a constant cannot keep a variance: training is free to grow $W^Q$ and $W^K$,
# and a query that has to find one key among 16 needs scores that stand out.

# %% [markdown]
# ## In plain NumPy
#
# The same output and, with $W' = c\, W^Q$, a gradient that is larger by $1/c$.

# %%
import numpy as np

import sdpa
from sdpa_lab import training
from sdpa_lab.claims import ledger

rng = np.random.default_rng(0)
x, key, value, grad_out = rng.standard_normal((4, 10, 64))
w_q, c = rng.standard_normal((64, 64)) / 8, 64**-0.5


def forward_and_gradient(w, scale):
    out, lse = sdpa.attention_forward(x @ w, key, value, scale=scale)
    grads = sdpa.attention_backward(grad_out, x @ w, key, value, out, lse, scale=scale)
    return out, x.T @ grads.query


p = np.exp(c * (x @ w_q @ key.T))
p /= p.sum(axis=-1, keepdims=True)
(out, grad), (out_folded, grad_folded) = (
    forward_and_gradient(w_q, c),
    forward_and_gradient(c * w_q, 1.0),
)
np.testing.assert_allclose(out, p @ value)
np.testing.assert_allclose(out_folded, out)
np.testing.assert_allclose(grad_folded, grad / c)

# %% [markdown]
# Before you go on, write down a guess: the scaled scores of an untrained model have variance 1.
# What variance do they have after 150 steps at $d_k = 64$?

# %%
my_guess = None  # 1 if the scale normalises

# %% [markdown]
# ## Measurement
#
# The recall task (`sdpa_lab.training.recall`) at $d_k = 64$ under Adam: every rule in the kernel,
# folded at the start, and folded with the rate of $W^Q$ times $c$, at four learning rates, of which
# the table shows the best; then what scores become.

# %%
table = training.scale_rules(
    [64], rules=["1", "sqrt d_k", "d_k"], rates=(1e-3, 3e-3, 1e-2, 3e-2), seeds=8
)
scores = training.trained_scores((4, 32, 64))
print(table.where(chosen=1).select("rule", "fold", "rate", "loss"), scores, sep="\n\n")

best = {(row["rule"], row["fold"]): row for row in table.where(chosen=1).rows}
kernel, initial, compensated = (
    best["sqrt d_k", fold] for fold in ("none", "initial", "compensated")
)
assert initial["rate"] < kernel["rate"] == compensated["rate"]
for row in (kernel, initial, compensated):
    assert row["loss"].estimate().high < 0.1 < best["1", "none"]["loss"].estimate().low
assert (scores["after_low"] > 2).all()

# %% [markdown]
# ## Figure
#
# Test loss over the learning rate, with intervals in its logarithm. The right panel repeats the
# left one, up to rounding, which large rates amplify. In the middle one the rules differ from it by
# a shift to smaller rates.

# %%
training.plot_scale_rules(table)

# %% [markdown]
# ## Conclusion
#
# The scale is an initialiser and a learning rate, nothing else. With both in $W^Q$ the loss is the
# same; with the initialiser alone a smaller rate makes up for all but 0.005 nats, where a model
# without a scale anywhere is left with 1.2. It is no normalisation: it divides by a constant, and
# the variance of trained scores is 48, 10 and 12 at $d_k = 4$, 32 and 64. These models, whose
# answer is one key, can do without it once trained: at scale 1 they answer as well as before.
# MiniLM cannot: its embeddings turn. The ledger judges the sentences one by one: that the input of
# softmax always stays in range, the likeness to batch normalisation in form, the weights scaled
# instead (one step at the same rate), and a model that is run without its scale.

# %%
from sdpa_lab.claims.chinese import bilingual

print(bilingual(ledger(["always-in-range", "batchnorm-form", "fold-step", "infer-unscaled"])))

# %% [markdown]
# ## Exercises
#
# 1. Why does the rate of $W^Q$ need $c$ under Adam and $c^2$ under plain descent?
#
# <details><summary>Solution</summary>
#
# $W' = c\, W^Q$ should change by $c$ times the change of $W^Q$. Its gradient is $1/c$ times that of
# $W^Q$. Plain descent: $r' \cdot \text{grad}/c = c\, r \cdot \text{grad}$, so $r' = c^2 r$. Adam's
# step does not see the factor $1/c$: $r' = c\, r$.
#
# </details>
#
# 2. And under Adam with weight decay, as AdamW has it (`w -= rate * decay * w`)?
#
# <details><summary>Solution</summary>
#
# The decay of $W'$ must stay what it was relative to $W'$, but $r' = c\, r$ weakens it by $c$: the
# decay of $W'$ has to be divided by $c$. Keeping the scale in the kernel spares us this third
# adjustment.
#
# </details>
#
# 3. Is it the same if the scale is learned, starting at $1/\sqrt{d_k}$?
#
# <details><summary>Solution</summary>
#
# Nearly: `training.scale_rules([64], rules=["learned"], folds=["none"], seeds=8)` ends at 0.001
# nats, compared with 0.0002, at the same rate.
#
# </details>
