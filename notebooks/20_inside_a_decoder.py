# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What do the heads of a language model do with a thousand keys?
#
# **Question.** SmolLM2-135M is a decoder of 30 layers that divides by $\sqrt{64}$. On texts of 1024
# tokens, what is the variance of its scaled scores, where does the weight go, what changes with the
# scale removed, and have $W^Q$ and $W^K$ become one projection or two?
#
# **Common misconception.** "The scale keeps the variance at 1." And, of the projections: "training
# drives $W^Q$ and $W^K$ apart."

# %% [markdown]
# ## Prediction
#
# The variance is 1 at the start and nothing holds it there (notebook 14 has an encoder). The
# largest gradient to the scores of 1000 keys passes at $\sigma = 5.5$ (`theory.best_sigma(1000)`),
# a variance of 30.
#
# A causal head that has nothing to say must put its weight somewhere, and models learn to put it on
# the first token, the attention sink (Xiao et al. 2023). Its score stands out, so a larger scale
# should give it more, not less.
#
# Scores are $x^\top A\, y$ with $A = W^Q (W^K)^\top$. The symmetric share
#
# $$ \frac{|(A + A^\top)/2|^2}{|A|^2} $$
#
# is 1/2 for independent projections, 1 for equal ones, 0 if scores change sign when query and key
# change places. Projections that training drives apart would end below 1/2. Saponati et al. (2025)
# derive that an encoder, which predicts in both directions, becomes more symmetric, and that a
# decoder need not. The papers are in [the references](../docs/references.md).

# %% [markdown]
# ## In plain NumPy
#
# The symmetric share of one head from its matrix, and from products of width $d_k$ alone. The wheel
# (`make models`) is read, not imported, and only if its file has the known sha256.

# %%
import numpy as np

import sdpa_lab as lab
from sdpa_lab import smollm2, theory
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual
from sdpa_lab.experiments import symmetry

model = smollm2.SmolLM2.load()
weights = np.float64(model.layers[14].qkv).reshape(15, 64, 576)
w_query, w_key = weights[3].T, weights[9 + 1].T  # query heads 3, 4, 5 share key head 1
a = w_query @ w_key.T
share = np.square((a + a.T) / 2).sum() / np.square(a).sum()
chance = symmetry.random_share(576, 64)
print(f"layer 14, head 3: {share:.3f}; at random {chance.mean():.3f}±{chance.std():.3f}")
np.testing.assert_allclose(symmetry.share(w_query, w_key), share)

# %% [markdown]
# Before you go on, write down two guesses: how much of a row's weight goes to the first of a
# thousand tokens in the upper half of the layers, and is the symmetric share of an average head
# below or above 1/2?

# %%
my_guess = {"first token": None, "symmetric share": None}

# %% [markdown]
# ## Measurement
#
# Four texts, docstrings of modules of the standard library, each an independent draw. Figures are
# those of the last 256 queries, which see 769 to 1024 keys. Queries and keys stay those of the
# trained model when the scale is removed. `kept` is the gradient that reaches the scores over the
# largest that any factor of the scale would let through, `factor` that factor.

# %%
table = lab.decoder_heads(draws=4, model=model)
shares = lab.symmetric_share(model=model)
means, by_layer = table.where(head="all"), shares.where(head="all")
columns = ("layer", "variance", "max_weight", "first", "first_removed", "kept", "factor")
print(means.where(layer=(0, 1, 5, 11, 12, 18, 25, 29)).select(*columns))

upper = means["layer"] >= 12
assert (means["variance_low"] > 1.5).all()  # not 1, in any layer
assert (means["first_low"][upper] > 0.1).all()
assert (means["first"][~upper] < 0.1).all()
assert (means["first_removed"][upper] > means["first"][upper] + 0.1).all()
assert (means["kept"][upper] > 0.8).all()
assert means["kept"][0] < 0.5
print(f"\nthe largest gradient of 1000 normal scores: sigma = {theory.best_sigma(1000):.1f}")

heads = shares["share"][shares["head"] != "all"]
print(f"symmetric share: mean {heads.mean():.3f}, {heads.min():.2f} to {heads.max():.2f}")
assert 0.52 < heads.mean() < 0.55
assert (by_layer["share"] > 0.49).all()
assert (abs(by_layer["crossed"][1:] - 0.5) < 0.01).all()

# %% [markdown]
# ## Figure
#
# Left: the variance is nowhere 1 (grey). Middle: from layer 12 on the first token takes a quarter
# to two thirds of the weight, and more with the scale removed. Right: the symmetric share; crosses
# pair a query projection with the key projection of another head, and lie at 1/2.

# %%
lab.plot_decoder_layers(table, shares)

# %% [markdown]
# ## Conclusion
#
# A trained decoder does what the encoder of notebook 14 does, on ten times as many keys. The scaled
# variance is 2.0 in layer 0 and 5 to 25 in all others: the scale is where training starts, not what
# it keeps. From layer 12 on 0.25 to 0.64 of the weight lies on the first token. Removing the scale
# deepens the sink where it was learned, to 0.46 to 0.88. In these layers the trained scale lets
# through 0.85 and more of the largest gradient that any scale would; in layer 0 it is 0.32, and six
# times the scale would pass more.
#
# $W^Q$ and $W^K$ have not parted. A head that pairs with its own key head has a symmetric share of
# 0.53 on average, above the 0.50 of other pairs (except in layer 0, where those have 0.54), and 18
# of 270 heads lie below 0.49. What divides the models is the direction of training, as Saponati et
# al. found: the means by layer of MiniLM, which reads both ways, are 0.54 to 0.61; those of SmolLM2
# 0.50 to 0.63, most of them below 0.54.
#
# **What to take away.** Judge a head by the spread of its *trained* scores, and count the sink
# before you read a map of weights. The ledger:

# %%
print(bilingual(ledger(["always-in-range", "unscaled-position", "symmetric-share"])))

# %% [markdown]
# ## Exercises
#
# 1. Which head is the most symmetric, and what are $W^Q$ and $W^K$ to each other there?
#
# <details><summary>Solution</summary>
#
# `shares["share"][shares["head"] != "all"].argmax()` is 129: layer 14, head 3, with 0.88. The
# cosine of its two matrices is 0.65 (column `cosine`). It need not be that high: the share is 1 for
# every $W^K = W^Q S$ with a symmetric $S$, which may have trace 0, so that orthonormal columns give
# a cosine of 0.
#
# </details>
#
# 2. What is the symmetric share of a head with $W^K = W^Q R$, where $R$ rotates pairs of columns by
#    the angle $\varphi$, as rotary positions do for two tokens at some distance?
#
# <details><summary>Solution</summary>
#
# $A = W^Q R^\top (W^Q)^\top$, whose symmetric part has $\cos\varphi$ times the identity in place of
# $R$: for columns that are orthonormal the share is $\cos^2\varphi$. Rotary positions make the
# scores of a symmetric head antisymmetric at a quarter turn, so shares are given for two tokens at
# the same place.
#
# </details>
#
# 3. In layer 25, how much weight is left for all tokens but the first? Which option of
#    `sdpa.attention` gives a head a place for unused weight that is no token?
#
# <details><summary>Solution</summary>
#
# `1 - means["first"][25]` is 0.36, for a thousand keys. `sinks` adds a learned number to the
# denominator of softmax, so that the weights of a row may sum to less than 1, as gpt-oss has it.
#
# </details>
