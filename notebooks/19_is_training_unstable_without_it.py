# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is training unstable without the scale?
#
# **Question.** How much does a learning rate that is not the best one cost with $1/\sqrt{d_k}$,
# without it, and with what is used today: $1/d_k$, normalised queries and keys, softcap, QK-clip?
# And is the collapse of entropy what goes wrong?
#
# **Common misconception.** "Without the scale training diverges", and "low entropy of the attention
# weights means that training has failed".

# %% [markdown]
# ## Prediction
#
# Wortsman et al. (2023, arXiv:2309.14322) measure instability as sensitivity to the learning rate:
# with $\ell(\eta)$ the loss after training at rate $\eta$ and $\ell_0$ that before,
#
# $$ \operatorname{mean}_\eta\; \min(\ell(\eta), \ell_0) - \min_\eta \ell(\eta) $$
#
# over some decades of $\eta$. Adam moves $W^Q$ and $W^K$ by steps of size $\eta$ with or without
# the scale, but each step changes the scores by $\sqrt{d_k}$ times as much without it. So the rates
# that work should be fewer and lower.
#
# Four others bound or shrink the scores. $1/d_k$ makes the steps of Adam alike at every width
# (notebook 17). QK-norm divides queries and keys by their lengths and learns one temperature
# instead (Henry et al. 2020, arXiv:2010.04245): a step of any size cannot make scores exceed it.
# Softcap puts scores through $50 \tanh(s/50)$ (Gemma 2, arXiv:2408.00118), QK-clip shrinks $W^Q$
# and $W^K$ whenever a score exceeds 100 (Kimi K2, arXiv:2507.20534). The last two act only where
# scores have become large already: they should mend high rates and leave the others as they are.
#
# A row of $n$ scores whose deviations from their mean have norm $s$ has at least the entropy
#
# $$ \ln(1 + (n-1)\beta) + \frac{s \sqrt{n (n-1)}\, \beta}{1 + (n-1)\beta}, \qquad
# \beta = e^{-s \sqrt{n/(n-1)}} $$
#
# (Zhai et al. 2023, arXiv:2303.06296, theorem 3.1, who bound $s$ by a spectral norm). As
# $W^Q (W^K)^T$ grows this floor falls to 0. It does not say which key the row then looks at.

# %% [markdown]
# ## In plain NumPy
#
# The floor, and the row that attains it: one score above all others, which are equal.

# %%
import numpy as np

import sdpa
from sdpa_lab import training
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual
from sdpa_lab.tools.table import Table
from sdpa_lab.training.stability import VARIANTS, entropy_floor

n, norm = 16, 4.0
scores = norm * (np.eye(n)[0] - 1 / n) / np.sqrt(1 - 1 / n)
beta = np.exp(-norm * np.sqrt(n / (n - 1)))
floor = np.log1p((n - 1) * beta) + norm * np.sqrt(n * (n - 1)) * beta / (1 + (n - 1) * beta)
p = sdpa.softmax(scores)
print(f"entropy {-(p * np.log(p)).sum():.4f}, floor {floor:.4f}")
np.testing.assert_allclose([-(p * np.log(p)).sum(), entropy_floor(norm, n)], floor)

# %% [markdown]
# Before you go on, write down a guess: the learning rates at which a model with the scale ends
# within 0.2 nats of its best loss span two decades. How many do they span without it?

# %%
my_guess = None  # decades

# %% [markdown]
# ## Measurement
#
# Models of the recall task (`sdpa_lab.training.recall`) at $d_k = 64$, six of each kind, at
# 13 learning rates over three decades, for 600 steps. `window` counts decades of rates whose loss
# is within 0.21 nats of the best; `highest` is $\log_{10}$ of the highest rate that still learns.
# Then the entropy while models learn, at a good rate and at one that is ten times too large;
# `found` is the weight on the key that is asked for.

# %%
variants = tuple(VARIANTS)
rates = training.learning_rates((600,), variants=variants, seeds=6)
summary = training.sensitivity((600,), variants=variants, seeds=6)
collapse = training.entropy_collapse(seeds=16)
print(summary, end="\n\n")
columns = ("rule", "rate", "step", "entropy", "logit", "spectral", "found")
ends = [row for row in collapse.rows if row["step"] in (0, 150)]
print(Table(collapse.title, [{name: row[name] for name in columns} for row in ends]))

kinds = {str(row["variant"]): row for row in summary.rows}
cost = {name: row["sensitivity"].estimate() for name, row in kinds.items()}
window = {name: row["window"].estimate() for name, row in kinds.items()}
assert cost["none"].low > cost["1/sqrt(d_k)"].high > cost["1/sqrt(d_k)"].low > cost["QK-norm"].high
assert window["none"].high < 1.2 < 1.8 < window["1/sqrt(d_k)"].low
assert window["QK-norm"].low > window["1/sqrt(d_k)"].high
end = {(row["rule"], row["rate"]): row for row in collapse.where(step=150).rows}
found = {kind: row["found"].estimate() for kind, row in end.items()}
assert found["sqrt d_k", 1e-1].high < 0.2 < 0.9 < found["sqrt d_k", 1e-2].low
assert all(end[rule, 1e-1]["entropy"].estimate().high < 0.05 for rule in ("1", "sqrt d_k"))
assert (collapse["entropy"] > collapse["floor"]).all()

# %% [markdown]
# ## Figure
#
# Left: loss after 600 steps over the learning rate; dotted is guessing. Middle: entropy of a row
# over the steps. Right: weight on the key that is asked for.

# %%
training.plot_stability(rates, collapse)

# %% [markdown]
# ## Conclusion
#
# Yes, in a sense that can be measured: after 600 steps a learning rate from three decades costs 1.0
# nats on average without the scale and 0.59 with it, and the rates that are good span 0.8 decades
# instead of 2.0. But training does not blow up: the highest rate that learns anything is lower by
# about a factor of two. After 150 steps the sensitivity is smaller without the scale, only because
# no rate has got far by then: the verdict depends on the horizon.
#
# What is used today does better than $1/\sqrt{d_k}$ alone. QK-norm has a sensitivity of 0.11 nats
# and 2.8 decades of good rates, without any scale: it does the work of the scale and most of what
# the scale leaves undone. Softcap (0.39) and QK-clip (0.44) mend the high rates, as they should,
# and change nothing elsewhere. $1/d_k$ (0.54) trades: it stands a highest rate that is about three
# times as large, and needs larger ones.
#
# Low entropy is no failure in itself. At a good rate with the scale it falls to 0.2 nats because
# the right key is found (weight 0.96). At a rate of 0.1 it falls to 0.01 in 150 steps, scale or no
# scale, on wrong keys, while the largest score grows into the thousands. Without the scale rows
# *start* at 0.5 nats, before anything is learned. The ledger:

# %%
print(bilingual(ledger(["unstable-training", "qk-norm", "softcap", "qk-clip"])))

# %% [markdown]
# ## Exercises
#
# 1. What is the least entropy of 16 keys at $s = 2$, 4 and 8, and from which $s$ on is it below
#    0.01 nats?
#
# <details><summary>Solution</summary>
#
# `entropy_floor([2, 4, 8], 16)` is 2.42, 1.02 and 0.036; it is below 0.01 from $s = 9.4$ on.
# Unscaled rows at $d_k = 64$ have $s = \sqrt{16 \cdot 64} = 32$ before any training.
#
# </details>
#
# 2. What is the largest score that QK-norm can have while its temperature is what it was at the
#    start, $\sqrt{d_k}$? How much of the work is done by the bound, and how much by what it does to
#    the gradient?
#
# <details><summary>Solution</summary>
#
# $\sqrt{64} = 8$, at parallel vectors. Softcap with the same bound and $1/\sqrt{d_k}$ has the bound
# and not the rest: `training.sensitivity((600,), variants=("softcap 50",), softcap=8.0)` has 0.50
# nats and 2.2 decades, hardly better than the scale alone. So it is the gradient: through a unit
# vector it is divided by $|q|$ and has no part along $q$, and weights which have grown turn less in
# a step of the same size.
#
# </details>
#
# 3. Does the scale have to stand in the kernel, or is it enough to multiply $W^Q$ by it before
#    training?
#
# <details><summary>Solution</summary>
#
# The start alone brings most of it: `training.sensitivity((600,), variants=("1/sqrt(d_k)",),
# fold="initial")` has 0.83 nats and 1.75 decades, with a highest rate of 0.03. With the learning
# rate of $W^Q$ multiplied as well, `fold="compensated"`, the figures are those of the scale in the
# kernel (notebook 12).
#
# </details>
