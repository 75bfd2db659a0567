# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What breaks the symmetry of $W^Q$ and $W^K$?
#
# **Question.** $W^Q$ and $W^K$ are drawn from one distribution and meet in one product. What makes
# them differ, and does training drive them apart?
#
# **Common misconception.** "Their gradients differ, so the difference grows, so the gradients
# differ more: a positive feedback."

# %% [markdown]
# ## Prediction
#
# Scores depend on $A = W^Q (W^K)^T$ alone; exchanging the two transposes it. With queries made of
# $y$ and keys of $x$, and $M = \partial L/\partial A = \text{scale} \cdot y^T (\partial L/\partial
# S)\, x$,
#
# $$ \frac{\partial L}{\partial W^Q} = M W^K, \qquad \frac{\partial L}{\partial W^K} = M^T W^Q. $$
#
# Let $S$ and $N$ be the symmetric and the antisymmetric part of $M$, $D = W^Q - W^K$ and
# $P = W^Q + W^K$. Under gradient flow
#
# $$ \frac{dD}{dt} = S D - N P, \qquad \frac{dP}{dt} = -S P + N D. $$
#
# For given $S$ and $N$ this is linear, so growth can feed on itself: what has grown makes the next
# step larger. But the same $S$ stands before $D$ and $P$ with opposite signs, and $N$ exchanges
# them: nothing prefers the difference to the sum. And $(W^Q)^T W^Q - (W^K)^T W^K$ does not change
# at all (exercise 1), so neither matrix can run away from the other. If queries and keys use the
# same embedding vectors (the symmetric task), $A$ should become symmetric and the difference
# shrink; if $y$ and $x$ are unrelated, $S$ and $N$ are of one size and both norms grow alike. Once
# the loss is small, so are $S$ and $N$, and all growth should end.

# %% [markdown]
# ## In plain NumPy
#
# Both gradients from $M$, and the routines' own.

# %%
import numpy as np

import sdpa
from sdpa_lab import training
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
x, y, value, grad_out = rng.standard_normal((4, 10, 32))
w_q, w_k = rng.standard_normal((2, 32, 16)) / 32**0.5
query, key = y @ w_q, x @ w_k

p = np.exp(query @ key.T / 4)
p /= p.sum(axis=-1, keepdims=True)
grad_p = grad_out @ value.T
m = y.T @ (p * (grad_p - (p * grad_p).sum(axis=-1, keepdims=True))) @ x / 4

grads = sdpa.attention_backward(
    grad_out, query, key, value, *sdpa.attention_forward(query, key, value)
)
np.testing.assert_allclose(y.T @ grads.query, m @ w_k)
np.testing.assert_allclose(x.T @ grads.key, m.T @ w_q)

# %% [markdown]
# Before you go on, write down a guess: by how many per cent does $|W^Q - W^K|$ change in 150 steps
# if queries and keys use the same embedding vectors, and by how many if they are unrelated? Does
# the growth speed up, slow down, or both?

# %%
my_guess = {"same": None, "unrelated": None}

# %% [markdown]
# ## Measurement
#
# Sixteen models of each kind learn to answer which of 16 keys holds the symbol that is asked for
# (`sdpa_lab.training.recall`), by Adam. Norms are in units of $|W^Q - W^K|$ for independent starts;
# `control` is what $|W^Q - W^K|$ would be if its steps had their size but no common direction.

# %%
table = training.divergence(every=5)
end = table.where(step=150)
print(end.select("task", "difference", "sum", "control", "cosine"))

directed, _, symmetric, together = end.rows
for kind in (directed, together):
    assert kind["difference"].estimate().low > kind["control"].estimate().high
assert symmetric["difference"].estimate().high < 0.8 < 1.7 < symmetric["sum"].estimate().low
assert abs(end["difference"][0] - end["sum"][0]) < 0.05
course = table.where(task="directed")
at = {int(row["step"]): row for row in course.rows}
grown = [at[s]["difference"].values for s in (0, 30, 60, 75, 150)]
assert np.mean(grown[2] - 2 * grown[1] + grown[0]) > 0.1  # faster and faster in 60 steps
assert np.mean(grown[4] - 2 * grown[3] + grown[0]) < -0.2  # and slower over 150
assert at[40]["gradient"].values.mean() > 1.5 * at[0]["gradient"].values.mean()

# %% [markdown]
# ## Figure
#
# Left and middle: $|W^Q - W^K|$ (dots) lies on $|W^Q + W^K|$ (squares) where queries and keys use
# unrelated vectors; where they use the same ones the difference falls and the sum grows. Right: the
# difference grows while the loss falls, and no longer.

# %%
training.plot_divergence(table.where(task=("directed", "symmetric")))

# %% [markdown]
# ## Conclusion
#
# There is a phase that reinforces itself, and it is no divergence. In the directed task the growth
# of $|W^Q - W^K|$ is slow at first, fastest at step 43 and over by step 75: the difference of the
# gradients more than doubles while the loss falls, and dies with it. $|W^Q + W^K|$ grows by as much
# (43 %) at the same time, so the two matrices grow; they do not turn away from each other (their
# cosine stays at 0). The task decides, not training as such: where queries and keys share their
# vectors the matrices approach each other, the difference shrinks by 28 % and the cosine rises to
# 0.74. From $W^Q = W^K$ they part even there, far beyond a random walk, since softmax normalises
# rows and not columns, so that $N$ is not 0; but the sum outgrows the difference by far. The
# ledger:

# %%
print(bilingual(ledger(["init-symmetric", "grads-differ", "divergence", "feedback"])))

# %% [markdown]
# ## Exercises
#
# 1. Show that gradient flow does not change $(W^Q)^T W^Q - (W^K)^T W^K$. By how much do steps of
#    finite size change it?
#
# <details><summary>Solution</summary>
#
# $\frac{d}{dt} (W^Q)^T W^Q = -(W^Q)^T M W^K - (W^K)^T M^T W^Q$, and that of $(W^K)^T W^K$ is the
# same. In a step of plain descent with rate $r$ these terms cancel as well, and
# $r^2 ((M W^K)^T M W^K - (M^T W^Q)^T M^T W^Q)$ is left: half the rate over twice the steps halves
# the drift.
#
# </details>
#
# 2. When does $|W^Q - W^K|$ grow fastest in the directed task?
#
# <details><summary>Solution</summary>
#
# `part = training.divergence(["directed"], every=1)`, then `part["step"][part["speed"].argmax()]`:
# step 43 of 150; at the end the speed is 3 % of that.
#
# </details>
#
# 3. Two matrices of one size with cosine 0 have $|D| = |P|$. Which cosine do $|D|$ and $|P|$ of the
#    symmetric task at step 150 imply, if $|W^Q| = |W^K|$? Compare with the column `cosine`.
#
# <details><summary>Solution</summary>
#
# $|P|^2 - |D|^2 = 4\, W^Q \cdot W^K$ and $|P|^2 + |D|^2 = 4 |W^Q|^2$, so the cosine is
# $(|P|^2 - |D|^2)/(|P|^2 + |D|^2) = 0.74$. The column says the same.
#
# </details>
