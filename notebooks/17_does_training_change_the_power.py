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
# **Question.** $\operatorname{Var}(q \cdot k) = d_k$ holds for independent components. With which
# power of $d_k$ does the standard deviation of $q \cdot k$ grow after one step of training, and
# after 150?
#
# **Common misconception.** "The variance of a dot product is $d_k$, so $\sqrt{d_k}$ is the right
# divisor, before training and after it."

# %% [markdown]
# ## Prediction
#
# At the start $q \cdot k = \sum_l q_l k_l$ is a sum of $d_k$ terms of random sign:
# $\operatorname{std} \propto d_k^{1/2}$. A gradient step moves all components of a query and of the
# key that it asks for so that their products grow together. What the step adds is a sum of $d_k$
# terms of one sign: $\propto d_k$. The exponent of the *change* should therefore be near 1 from the
# first step on, and that of the whole should move from 1/2 towards 1 as the change outgrows the
# start. That is why muP divides by $d_k$ (Yang, Hu et al. 2022, arXiv:2203.03466, definition 4.1).

# %% [markdown]
# ## In plain NumPy
#
# Two vectors of independent components, then each moved by a tenth of the other, as a step does
# that raises $q \cdot k$. The change of $q \cdot k$ is $0.1 (|q|^2 + |k|^2)$, to first order.

# %%
import numpy as np

import sdpa
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual
from sdpa_lab.tools.table import Table
from sdpa_lab.training import correlation, plot_correlation

rng = np.random.default_rng(0)
sizes = []
for d_k in (64, 1024):
    q, k = rng.standard_normal((2, 2000, 1, d_k))
    before = (q * k).sum(axis=(1, 2))
    after = sdpa.attention_weights(q + 0.1 * k, k + 0.1 * q, scale=1.0, stage="scores").ravel()
    sizes.append((before.std(), np.sqrt(np.mean((after - before) ** 2))))
start, change = np.log(np.array(sizes[1]) / sizes[0]) / np.log(1024 / 64)
print(f"exponent of std(q.k) {start:.2f}, of its change {change:.2f}")
np.testing.assert_allclose([start, change], [0.5, 1.0], atol=0.03)

# %% [markdown]
# Before you go on, write down a guess: after 150 steps of Adam, what is the exponent of
# $\operatorname{std}(q \cdot k)$ between $d_k = 8$ and 512?

# %%
my_guess = None  # a number between 0.5 and 1

# %% [markdown]
# ## Measurement
#
# Models of `sdpa_lab.training.recall` at $d_k$ = 8, 32, 128 and 512, 16 seeds each, trained with
# $1/\sqrt{d_k}$ and with $1/d_k$ at one learning rate. The exponent is a slope over the four
# widths, seed by seed.

# %%
widths, steps = (8, 32, 128, 512), (0, 1, 5, 20, 50, 100, 150)
tables = {
    rule: correlation(widths, rule=rule, steps=steps, seeds=16) for rule in ("sqrt d_k", "d_k")
}
columns = ("step", "exponent", "exponent of change", "cosine d_k=512")
for rule, table in tables.items():
    rows = [{name: row[name] for name in columns} for row in table.rows[1:]]
    print(Table(f"Scale 1/{rule}", rows), end="\n\n")

mup = tables["d_k"]
assert abs(mup["exponent"][0] - 0.5) < 0.05
assert mup["exponent of change"][1] > 0.8  # after a single step
assert mup["exponent_low"][-1] > 0.85
assert mup["exponent_low"][-1] > tables["sqrt d_k"]["exponent_high"][-1]

# %% [markdown]
# ## Figure
#
# Exponents over the steps under $1/d_k$: of $\operatorname{std}(q \cdot k)$, and of its change
# since the start. Dashed: the powers 1/2 and 1.

# %%
plot_correlation(mup)

# %% [markdown]
# ## Conclusion
#
# The footnote's argument describes the start and nothing after it. Under $1/d_k$ what training adds
# to $q \cdot k$ grows nearly like $d_k$ from the first step on, and after 150 steps so does the
# whole. Under $1/\sqrt{d_k}$ the power rises as well but stops short of 1; why it does is not
# measured here. So the two rules answer two questions: $1/\sqrt{d_k}$ makes the scores of every
# width alike before training, $1/d_k$ makes what training does to them alike. The figures are
# above; the verdict of the ledger:

# %%
print(bilingual(ledger(["trained-exponent"])))

# %% [markdown]
# ## Exercises
#
# 1. How far from orthogonal are a query and its key at the end, on average, and how far would
#    random vectors be?
#
# <details><summary>Solution</summary>
#
# The column `cosine d_k=512`; two random directions have a cosine of $0 \pm 1/\sqrt{512} = 0.04$.
#
# </details>
#
# 2. If $W^Q$ and $W^K$ are the same matrix, which exponent does the score of a token with itself
#    have before any training?
#
# <details><summary>Solution</summary>
#
# 1: $q \cdot q = |q|^2$ is a sum of $d_k$ positive terms.
#
# </details>
#
# 3. Does an exponent of 1 need queries and keys that are nearly parallel?
#
# <details><summary>Solution</summary>
#
# No. $q \cdot k = c\,|q|\,|k|$ with both lengths $\propto \sqrt{d_k}$: the exponent is 1 for any
# cosine $c$ that does not depend on the width. For independent components $c \propto 1/\sqrt{d_k}$.
#
# </details>
