# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sequences got longer: what should I multiply with?
#
# **Question.** With $1/\sqrt{d_k}$ the scores have standard deviation 1 at every width. What
# happens to the entropy, the largest weight and the gradient of a row when its length $n$ grows
# from 64 to 16384? And which factor on top of $1/\sqrt{d_k}$ serves a trained head best on 4 and 16
# times as many keys as it was trained on?
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
# Jacobian fall towards $1/n$ (Veličković et al. 2024 prove it for any bounded scores).
#
# Keeping a *share* of $\ln n$ needs $\sigma^2 \propto \ln n$. Keeping a *number* of keys needs a
# $\sigma$ that approaches the freezing point. Both grow like $\sqrt{\ln n}$, from different
# heights. A factor of $\ln n$ was proposed by Su (2021), who wanted the entropy to depend less on
# $n$, then by Chiang & Cholak (2022) and, with a learned multiple, by Nakanishi (2025, SSMax). It
# is exact for one key that stands out by a fixed gap $\delta$: its weight is 1/2 at the inverse
# temperature $\ln(n - 1)/\delta$. In general that temperature is set by the gaps below the largest
# score (Hayase & Karakida 2026), and there is a transition at an inverse temperature of the order
# of $\ln n$ (Chen et al. 2025).
#
# In use for $s$ times the trained length is YaRN's $0.1 \ln s + 1$ (Peng et al. 2023). It
# multiplies the query *and* the key, so that scores get its square, which DeepSeek's code calls
# mscale² and multiplies the scale with. The papers are in [the references](../docs/references.md).

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
# First random rows. Rules for $\sigma$ that agree at $n = 64$, where it is 1: three fixed ones, and
# three that keep one figure as it is there, by bisection on the exact quadratures of
# `theory.weights`, which are also the predictions. The first table shows $n = 16384$;
# `print(table)` has all lengths. The second has the inverse temperature $\beta$ at which the
# largest weight is 1/2, for four kinds of rows.

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
# Then a head that has learned something: to find, among 32 keys of 512 symbols, the one that a
# query asks for (`lab.longer`). On 128 and 512 keys its weights stay as trained, and its scores are
# multiplied with each factor. `key` is the weight on the right key, `gap` the height of its score
# above the mean of the others, `spread` their standard deviation.

# %%
trained = lab.longer()
rules = ("as trained", "0.1 ln s + 1", "sqrt(ln n)", "YaRN", "ln n", "SSMax", "best")
print(trained.where(n=512, rule=rules))

loss = {(row["n"], row["rule"]): row["loss"].estimate() for row in trained.where(rule=rules).rows}
assert loss[512, "as trained"].low > 1.4 > 1.35 > loss[512, "ln n"].high
for n in (128, 512):
    order = [loss[n, rule].value for rule in ("as trained", "0.1 ln s + 1", "YaRN", "ln n")]
    assert order == sorted(order, reverse=True)
    assert loss[n, "ln n"].value - loss[n, "best"].value < 0.01
assert loss[512, "best"].low > 1.8 * loss[32, "best"].high  # what no factor gives back
unchanged = trained.where(rule="as trained")
assert (abs(unchanged["gap"] / unchanged["gap"][0] - 1) < 0.05).all()
assert (abs(unchanged["spread"] / unchanged["spread"][0] - 1) < 0.05).all()

# %% [markdown]
# ## Figure
#
# Left: how many random keys count, by what $1/\sqrt{d_k}$ is multiplied with; only a steeper rule
# than $\ln n$ keeps their number. Right: the loss of the trained head over the factor of its
# scores, a curve per length with its interval; each mark is a rule. At 512 keys $\ln n$ lies on the
# minimum.

# %%
lab.plot_longer(trained, table)

# %% [markdown]
# ## Conclusion
#
# **What to multiply with.** $1/\sqrt{d_k}$ takes care of the width and of nothing else. For a head
# that looks for one key, multiply by $\ln n/\ln n_0$ beyond the trained length $n_0$. At 16 times
# the length the loss falls from 1.54 to 1.26 nats, within 0.01 of the best constant factor. YaRN's
# factor comes within 0.02 of that, since it acts on queries and keys and so on scores by its
# square; applied once it gets 60 % of the way. SSMax, trained with a learned multiple of $\ln n$ on
# one length, does as well as $\ln n$. No factor brings back the 0.57 nats of the trained length:
# the gap of the right key stays at 6.2 and the spread of the others at 2.7, but the largest of more
# others is higher.
#
# How long the head was trained matters, too. After `lab.longer(steps=600)` and `steps=5000` the
# best factor for 512 keys is 1.8 and 2.5, where $\ln n$ has 1.8; the latter leaves 0.08 nats of the
# possible 0.58 unused.
#
# Random rows say why there is no one answer. From 64 to 16384 keys the number of keys that count
# grows from 40 to 9900 and the squared Jacobian falls by a factor of 205, as the quadrature
# predicts. To keep the largest weight $\sigma$ must grow from 1 to 2.8, to keep the gradient to
# 3.3, the number of keys to 4.0; $\sqrt{\ln n}$ gives 1.5, which keeps the entropy over $\ln n$ and
# nothing else, and $\ln n$ gives 2.3, too little for any of the three. The temperature at which one
# key takes half is constant over $n$ for exponential scores, and grows like $n$ for uniform ones
# and like $\ln n$ for one key above equal others. "Unit variance" names no good region; the region
# moves with $n$. The row of the ledger that calls $\sqrt{d_k}$ optimal, and two on sequences longer
# than in training, after 600, 2000 and 5000 steps of it:

# %%
print(bilingual(ledger(["optimal-region", "longer-log-n", "longer-solved"])))

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
