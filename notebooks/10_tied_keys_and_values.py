# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What does $K = V$ cost?
#
# **Question.** If one projection serves as keys and as values, do its two gradients get in each
# other's way, and what does it cost: loss, or time?
#
# **Common misconception.** "Keys say where to look and values what to pass on; the gradients of the
# two roles conflict, so a shared projection is a bottleneck at any width."

# %% [markdown]
# ## Prediction
#
# With $W^K = W^V = W$ the gradient is the sum of two: $x^T\, \partial L/\partial K$, through the
# weights, and $x^T\, \partial L/\partial V$, through what they mix. A full conflict would be a
# cosine of $-1$. Two unrelated directions in $32\, d_k$ dimensions have a cosine of
# $0 \pm 1/\sqrt{32\, d_k}$: 0.06 at $d_k = 8$, 0.03 at 32. A bottleneck, on the other hand, is a
# matter of room: $W$ has to keep apart 32 symbols, which are matched with what is asked for, and 8
# classes, which $W^O$ reads off. In 8 dimensions the two compete, in 32 hardly. If they compete and
# there is room for both, a shared projection is slower; if there is none, it stays worse however
# long one trains. So the loss has to be compared after more than one number of steps.

# %% [markdown]
# ## In plain NumPy
#
# The two gradients to a key that is its own value, by the formulas and by the routine.

# %%
import numpy as np

import sdpa
from sdpa_lab import training
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
query, key, grad_out = rng.standard_normal((3, 10, 32))

p = np.exp(query @ key.T / 32**0.5)
p /= p.sum(axis=-1, keepdims=True)
by_value = p.T @ grad_out
grad_p = grad_out @ key.T
by_key = (p * (grad_p - (p * grad_p).sum(axis=-1, keepdims=True))).T @ query / 32**0.5

out, lse = sdpa.attention_forward(query, key, key)
grads = sdpa.attention_backward(grad_out, query, key, key, out, lse)
np.testing.assert_allclose(grads.key, by_key)
np.testing.assert_allclose(grads.value, by_value)

# %% [markdown]
# Before you go on, write down a guess: what is the cosine of the two gradients while a model of
# width 8 learns?

# %%
my_guess = None  # -1 is conflict, 0 indifference, 1 agreement

# %% [markdown]
# ## Measurement
#
# Models of the recall task (`sdpa_lab.training.recall`), 16 of each kind: the loss with one
# projection and with two of the same width, each at its best learning rate, after 150 and after
# 1200 steps; and the two gradients of the shared one while it learns, where the width is scarce.

# %%
losses = training.tying((4, 8, 16, 32), steps=(150, 1200))
paths = training.tied_paths(d_k=8, d_v=8, every=10)
for steps in (150, 1200):
    print(losses.where(steps=steps), end="\n\n")
print(paths.where(step=(0, 30, 70, 140)))

added = {}
for width, steps in ((w, s) for w in (4, 8, 32) for s in (150, 1200)):
    two, one = losses.where(width=width, steps=steps)["loss"]
    added[width, steps] = one - two
assert added[8, 150] > 0.2  # nats
assert added[8, 1200] < 0.05 < 1 < added[4, 1200]
assert abs(added[32, 150]) < 0.01
assert (paths["cosine"] > -0.25).all()

# %% [markdown]
# ## Figure
#
# The cosine of the two gradients at width 8, and the loss meanwhile: never far from orthogonal, in
# the very models that the shared projection harms.

# %%
training.plot_tied_paths(paths)

# %% [markdown]
# ## Conclusion
#
# It is a bottleneck only where it is too narrow for both roles, and elsewhere it costs time. At
# width 4 one projection costs 1.64 nats after 150 steps and still 1.24 after 1200: 4 numbers cannot
# hold both what a key is found by and what it says. At width 8 it costs 0.31 nats after 150 steps
# and less than 0.01 after 1200; what looks like a bottleneck at one horizon is slowness. At 16 and
# 32 it costs next to nothing at any. Nor do the two gradients conflict: their cosine at width 8
# falls to $-0.17$ while most is learned, outside the $\pm 0.06$ expected by chance, but an angle of
# 100°, far from the 180° of a real conflict. (At step 0 it is 0.24, since both gradients share $x$
# and $\partial L/\partial \text{out}$.) A step loses at most a sixth of its progress to it
# (exercise 3). The ledger:

# %%
print(bilingual(ledger(["tied-kv", "tied-conflict"])))

# %% [markdown]
# ## Exercises
#
# 1. Two separate projections of width 8 have twice the parameters of a shared one. Is it fairer to
#    compare a shared projection of width 16 with two of width 8? What does the table say after 150
#    steps?
#
# <details><summary>Solution</summary>
#
# Both keep as many numbers per token in a cache. Shared at 16: 0.009 nats; separate at 8: 0.002.
# Both are next to nothing, so for the cache it makes no difference. Nor does it in parameters:
# $16 \cdot 32$ against $2 \cdot 8 \cdot 32$.
#
# </details>
#
# 2. Which of the two gradients is larger, and when?
#
# <details><summary>Solution</summary>
#
# The column `ratio` of `paths`, through the keys over through the values: 0.5 at first, 1 at step
# 40, 1.9 at the end. What to pass on is learned first, then where to look.
#
# </details>
#
# 3. Compared with separate matrices for the two roles, which share of a small step's progress does
#    an angle between the two gradients cost? How much is it where the cosine is least?
#
# <details><summary>Solution</summary>
#
# To first order a step $-r(a + b)$ lowers the loss by
# $r |a + b|^2 = r(|a|^2 + |b|^2 + 2\, a \cdot b)$, and separate matrices by $r(|a|^2 + |b|^2)$.
# With a cosine of $-0.17$ and a ratio of 1.5 the share is
# $2 \cdot 0.17 \cdot 1.5/(1 + 1.5^2) = 0.16$, less at every other step. Beyond first order the room
# that is left counts as well.
#
# </details>
