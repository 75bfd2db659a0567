# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does dividing by $\sqrt{d_k}$ suffice when the sequence grows?
#
# **Question.** With $1/\sqrt{d_k}$ the scores have standard deviation 1 at every width. What
# happens to the entropy, the largest weight and the gradient of a row when its length $n$ grows
# from 64 to 16384, and which factor on top of $1/\sqrt{d_k}$ would keep which of them?
#
# **Common misconception.** "With unit variance softmax is in its good region, whatever the input."
# Or, from the other side: "multiply by $\ln n$, and length is solved."

# %% [markdown]
# ## Prediction
#
# A row of $n$ independent normal scores of standard deviation $\sigma$ has, for large $n$, the
# entropy $\ln n - \sigma^2/2$ below the freezing point $\sqrt{2 \ln n}$ (Derrida 1981, the random
# energy model). At $\sigma = 1$ the share $e^{-1/2} = 0.61$ of the keys counts, however many there
# are: their number grows like $n$, while the largest weight and the squared norm of the softmax
# Jacobian fall towards $1/n$.
#
# Keeping a *share* of $\ln n$ needs $\sigma^2 \propto \ln n$. Keeping a *number* of keys needs a
# $\sigma$ that approaches the freezing point. Both grow like $\sqrt{\ln n}$, from different
# heights. A factor of $\ln n$ (Chiang & Cholak 2022, arXiv:2202.12172; Nakanishi 2025,
# arXiv:2501.19399) is for one key that stands out by a fixed gap $\delta$: its weight is 1/2 at the
# inverse temperature $\ln(n - 1)/\delta$. In general that temperature is set by the gaps below the
# largest score (Hayase & Karakida 2026, arXiv:2605.12697).

# %% [markdown]
# ## In plain NumPy
#
# Scores with $1/\sqrt{d_k}$ at two lengths: the share of keys that count stays, their number does
# not.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
for n in (64, 4096):
    query, key = rng.standard_normal((200, 64)), rng.standard_normal((n, 64))
    scores = query @ key.T / np.sqrt(64)
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    entropy = -(weights * np.log(weights)).sum(axis=1)
    print(f"n = {n}: {np.exp(entropy).mean() / n:.2f} of the keys count")
    np.testing.assert_allclose(sdpa.attention_statistics(query, key).entropy, entropy)

# %% [markdown]
# Before you go on, write down a guess: among 64 keys 40 count. How many count among 16384, with the
# same $1/\sqrt{d_k}$?

# %%
my_guess = None  # between 40 and 16384

# %% [markdown]
# ## Measurement
#
# Rules for $\sigma$ that agree at $n = 64$, where it is 1: three fixed ones, and three that keep
# one figure as it is there, by bisection on the exact quadratures of `theory.weights`, which are
# also the predictions. The first table shows $n = 16384$; `print(table)` has all lengths. The
# second has the inverse temperature $\beta$ at which the largest weight is 1/2, for four kinds of
# rows.

# %%
table = lab.scale_over_length(draws=200)
critical = lab.critical(draws=200)
columns = ("rule", "sigma", "entropy", "keys", "max_weight", "jacobian")
print(table.where(n=16384).select(*columns), end="\n\n")
print(critical.where(n=(16, 4096)).select("family", "n", "beta"))

# %%
for name in ("entropy", "max_weight", "jacobian"):
    half = (table[f"{name}_high"] - table[f"{name}_low"]) / 2
    assert (abs(table[name] - table[f"{name}_predicted"]) < 2.5 * half).all()

plain, by_log, keys, gradient = (
    table.where(rule=rule)
    for rule in ("1/sqrt(d_k)", "ln n", "keeps the number of keys", "keeps the gradient")
)
assert 230 < plain["keys"][-1] / plain["keys"][0] < 280  # 256 times as many keys
assert plain["jacobian"][0] / plain["jacobian"][-1] > 180
assert by_log["keys"][-1] / by_log["keys"][0] > 25  # ln n does not keep their number
assert (abs(gradient["jacobian"] / gradient["jacobian"][0] - 1) < 0.2).all()
assert 3.9 < keys["sigma"][-1] < 4.1

beta = {family: critical.where(family=family)["beta"] for family in set(critical["family"])}
assert beta["uniform"][-1] > 150 * beta["uniform"][0]
assert beta["exponential"][-1] < 1.6 * beta["exponential"][0]
np.testing.assert_allclose(beta["one key 3 above the rest"], np.log(critical["n"][:5] - 1) / 3)

# %% [markdown]
# ## Figure
#
# Each rule over the length: the $\sigma$ that it takes, and what becomes of the weights. A
# horizontal line is what a rule keeps; no rule has more than one.

# %%
lab.plot_scale_over_length(table)

# %% [markdown]
# ## Conclusion
#
# $1/\sqrt{d_k}$ does not suffice: it takes care of the width and of nothing else. From 64 to 16384
# keys the number of keys that count grows from 40 to 9900 and the squared Jacobian falls by a
# factor of 205, as the quadrature predicts. Which correction is right depends on what is to be
# kept. For normal scores $\sigma$ must grow from 1 to 2.8 (largest weight), 3.3 (gradient to the
# scores) or 4.0 (number of keys); $\sqrt{\ln n}$ gives 1.5, which keeps the entropy over $\ln n$
# and nothing else, and $\ln n$ gives 2.3, too little for any of the three. It also depends on the
# scores: the temperature at which one key takes half is constant over $n$ for exponential scores,
# and grows like $n$ for uniform ones and like $\ln n$ for one key above equal others. "Unit
# variance" names no good region; the region moves with $n$. The row of the ledger that calls
# $\sqrt{d_k}$ optimal:

# %%
print(bilingual(ledger(["optimal-region"])))

# %% [markdown]
# ## Exercises
#
# 1. With $1/\sqrt{d_k}$, how many of $10^6$ keys count, by the law for large $n$?
#
# <details><summary>Solution</summary>
#
# $e^{\ln n - 1/2} = 0.61\,n$: 607 000.
#
# </details>
#
# 2. Short sequences: at which $\sigma$ would as many of 16 keys count as of 64 at $\sigma = 1$?
#
# <details><summary>Solution</summary>
#
# At none: 64 keys have an entropy of 3.68 there, and 16 keys have at most $\ln 16 = 2.77$, at
# $\sigma = 0$.
#
# </details>
#
# 3. A model learns a gap $\delta$ between the key that it looks for and all others, at scale
#    $1/\sqrt{d_k}$, and gives that key a weight of 1/2 at $n = 512$. What is left at $n = 65536$,
#    and by which factor must the scale grow to have 1/2 again?
#
# <details><summary>Solution</summary>
#
# At $n = 512$ the gap is $\ln 511 = 6.24$. At 65536 the weight is $511/(511 + 65535) = 0.0077$; the
# factor is $\ln 65535/\ln 511 = 1.78$, the ratio of logarithms, which is why $\ln n$ suits this
# kind of row.
#
# </details>
