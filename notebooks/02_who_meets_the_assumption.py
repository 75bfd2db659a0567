# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Who meets the assumption of unit variance?
#
# **Question.** The argument for $\sqrt{d_k}$ assumes that the components of $q$ and $k$ have
# variance 1. Which of the initialisers in use provide that, and what variance do the scaled scores
# start from with the others?
#
# **Common misconception.** "Glorot initialisation keeps variances, so the components of $q$ and $k$
# have variance 1, and so do the scaled scores."

# %% [markdown]
# ## Prediction
#
# With $q = x W^Q$, components of $x$ of variance 1 and elements of $W^Q$ of variance $w$, a
# component of $q$ has variance $d_{\text{model}}\, w$: only the fan-in counts. Glorot and Bengio
# (2010) take $w = 2/(\text{fan-in} + \text{fan-out})$, which is $1/d_{\text{model}}$ only if
# $d_k = d_{\text{model}}$. A score multiplies $q$ by $k$, so
#
# $$ \operatorname{Var}\Bigl(\frac{q \cdot k}{\sqrt{d_k}}\Bigr) =
# (d_{\text{model}}\, w)^2 \Bigl(1 + \frac{2}{n\, d_{\text{model}}}\Bigr) $$
#
# where the second term is due to the diagonal, on which $x_i$ meets itself.

# %% [markdown]
# ## In plain NumPy
#
# One head of the base Transformer, $d_{\text{model}} = 512$ and $d_k = 64$, by Glorot's rule.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
x = rng.standard_normal((64, 512))
w_query, w_key = rng.normal(0, np.sqrt(2 / (512 + 64)), (2, 512, 64))
query, key = x @ w_query, x @ w_key
scores = query @ key.T / np.sqrt(64)
print(f"variance of a component of q {query.var():.2f}, of a scaled score {scores.var():.2f}")

np.testing.assert_allclose(
    sdpa.attention_weights(query, key, stage="scores"), scores, rtol=1e-9, atol=1e-12
)
layer = sdpa.MultiHeadAttention(512, 1, d_k=64, init="xavier_normal", rng=0)
assert abs(layer.parameters["w_query"].var() * (512 + 64) / 2 - 1) < 0.05

# %% [markdown]
# Before you go on, write down a guess: PyTorch's `Linear` draws its weights uniformly with a bound
# of $1/\sqrt{\text{fan-in}}$. What variance do scaled scores have if $W^Q$ and $W^K$ are two such
# layers?

# %%
my_guess = None  # 1 would meet the assumption

# %% [markdown]
# ## Measurement
#
# A draw is one input with projections of its own. "Glorot" takes the matrix of one head as the
# layer, "all heads" the $d_{\text{model}} \times d_{\text{model}}$ matrix of all of them. Shown are
# $d_k = 64$ and $n = 64$; `print(table)` has all.

# %%
table = lab.initialisers(draws=40)
print(table.where(d_k=64, n=64).select("initialiser", "components", "scores"))

assert (abs(table["components"] / table["components_predicted"] - 1) < 0.1).all()
glorot, unit = (
    table.where(initialiser=name, d_k=64, n=64)["scores"][0] for name in ("Glorot", "1/d_model")
)
assert 3.0 < glorot < 3.3
assert 0.95 < unit < 1.05

# %% [markdown]
# ## Figure
#
# Variance of the scaled scores over $d_k$, by initialiser, at $n = 64$. The dotted line is the
# assumption.

# %%
lab.plot_initialisers(table)

# %% [markdown]
# ## Conclusion
#
# Only two of the seven initialisers meet the assumption: variance $1/d_{\text{model}}$, and
# Glorot's rule where it is applied to the matrix of all heads. Applied to one head of $d_k = 64$
# Glorot's rule gives scores of variance 3.2. PyTorch's `Linear` gives 0.11, its
# `MultiheadAttention` 0.25, and BERT's 0.02 gives 0.04 at $d_{\text{model}} = 512$. Dividing by
# $\sqrt{d_k}$ removes the dependence on $d_k$, except for Glorot's rule per head (3.8, 3.2 and 1.8
# at $d_k = 16$, 64 and 256), but it does not make the variance 1. The ledger:

# %%
print(bilingual(ledger(["glorot-unit-var", "init-var", "sigma-law"])))

# %% [markdown]
# ## Exercises
#
# 1. Which variance $w$ of the elements of $W^Q$ and $W^K$ makes the variance of the *unscaled*
#    scores 1?
#
# <details><summary>Solution</summary>
#
# $d_k (d_{\text{model}}\, w)^2 = 1$, so $w = 1/(d_{\text{model}} \sqrt{d_k})$: components of
# variance $1/\sqrt{d_k}$, which is what note 003 means by $N(0, 1/\sqrt{\text{dim}})$. T5 puts the
# whole factor into $W^Q$ instead.
#
# </details>
#
# 2. By which factor would PyTorch's `MultiheadAttention` have to multiply $q \cdot k$ to get scores
#    of variance 1 at its initialisation?
#
# <details><summary>Solution</summary>
#
# The components have variance 1/2 each, so $q \cdot k$ has variance $d_k/4$: the factor is
# $2/\sqrt{d_k}$.
#
# </details>
#
# 3. How different are the weights that these initialisers start from, at $n = 64$?
#
# <details><summary>Solution</summary>
#
# `theory.weights(64, sigma).entropy` is 4.10 of $\ln 64 = 4.16$ for PyTorch's `Linear`
# ($\sigma = 1/3$), 4.04 for `MultiheadAttention` (1/2), 3.68 for variance 1, and 2.87 for Glorot on
# one head (1.78): from nearly equal weights to about 18 keys, $e^{2.87}$.
#
# </details>
