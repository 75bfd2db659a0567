# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What does the scale cost a deep network?
#
# **Question.** With $1/\sqrt{d_k}$ a row of weights is nearly flat, so each output is an average
# over many values. How much smaller than its values is it, and how fast do many such layers make
# all tokens alike?
#
# **Common misconception.** "Unit variance of the scores keeps the signal at unit variance, so a
# deep stack is well behaved with the scale and badly without."

# %% [markdown]
# ## Prediction
#
# *One layer.* The mean of $n$ independent values of variance 1 with weights $p_j$ has variance
# $\sum p_j^2$. For normal scores of standard deviation $\sigma$ well below freezing
# ($\sqrt{2 \ln n}$, notebook 03) its expectation is $e^{\sigma^2}/n$: the output should shrink like
# $e^{\sigma^2/2}/\sqrt n$, which is why u-muP (Blake et al. 2024, arXiv:2407.17465) multiplies it
# by a factor that depends on $n$. `theory.weights(n, sigma).sum_p2` is exact.
#
# *Many layers.* Write a token as $x_i = u + z_i$, where $u$ is common to all and $z_i$ has
# components of variance $r^2$. The part $u W^Q$ of a query gives every row the same scores; only
# $z_i$ makes rows differ, by scores of size $\sigma r^2$. Two outputs then differ by a mean of the
# $z_j$ with weights that differ that much: the residual $r$ becomes about $\sigma r^3$. A third
# power at each layer is doubly exponential (Dong, Cordonnier and Loukas 2021, arXiv:2103.03404).
# A skip connection adds $z_i$ itself again and should stop it.

# %% [markdown]
# ## In plain NumPy
#
# The residual of 32 tokens after three layers of attention alone.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab import theory
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual
from sdpa_lab.tools.table import Table

rng = np.random.default_rng(0)
x = rng.standard_normal((32, 64))
for _layer in range(3):
    w_q, w_k, w_v = rng.standard_normal((3, 64, 64)) / 8
    p = np.exp((x @ w_q) @ (x @ w_k).T / 8)
    p /= p.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(sdpa.attention(x @ w_q, x @ w_k, x @ w_v), p @ x @ w_v, atol=1e-12)
    x = p @ x @ w_v
    print(f"residual {np.linalg.norm(x - x.mean(axis=0)) / np.linalg.norm(x):.1e}")

# %% [markdown]
# Before you go on, write down a guess: after how many layers of attention alone do 32 tokens agree
# to the sixth digit, with the scale and without it at $d_k = 64$?

# %%
my_guess = {"with 1/sqrt(d_k)": None, "without": None}

# %% [markdown]
# ## Measurement
#
# The output of one layer, with the exact law as predicted; the residual layer by layer, the median
# of 64 stacks; and one layer over tokens whose residual is given, against its law,
# `depth.residual_law`.

# %%
output = lab.output_scale()
collapse = lab.rank_collapse()
step = lab.rank_step()
print(Table("Independent values", output.where(common=0.0, sigma=1.0).rows), end="\n\n")

chosen = [
    row
    for row in collapse.rows
    if row["layer"] in (3, 8) and row["stack"] != "attention of normalised tokens"
]
print(Table(collapse.title, chosen), end="\n\n")
print(step.where(scale="1/sqrt(d_k)"))

# %%
left = {
    (stack, scale): collapse.where(stack=stack, scale=scale)
    for stack in ("attention alone", "with skip connections")
    for scale in ("1/sqrt(d_k)", "1")
}
assert left["attention alone", "1/sqrt(d_k)"]["residual_high"][3] < 1e-6
assert left["attention alone", "1"]["residual_low"][3] > 0.7
assert left["attention alone", "1"]["residual_high"][9] < 1e-6
assert left["with skip connections", "1/sqrt(d_k)"]["residual_low"][10] > 0.4
half = (output["std_high"] - output["std_low"]) / 2
assert (abs(output["std"] - output["std_predicted"]) < 2.5 * half).all()
small = step.where(scale="1/sqrt(d_k)")
power = np.polyfit(np.log(small["residual"]), np.log(small["after"]), 1)[0]
print(f"power of the residual: {power:.3f}")
assert abs(power - 3) < 0.02

# %% [markdown]
# ## Figure
#
# Left: standard deviation of one layer's output; lines are exact. Middle and right: what differs
# between the tokens, over the layers; $10^{-15}$ is the rounding of float64.

# %%
lab.plot_depth(output, collapse)

# %% [markdown]
# ## Conclusion
#
# The scale has a price. With it ($\sigma = 1$) the output of a layer has standard deviation 0.197
# at $n = 64$ and 0.026 at 4096: like $\sqrt{e/n}$. Without it ($\sigma = 8$) it hardly shrinks,
# from 0.84 to 0.75. And flat weights average: after three layers of attention alone all tokens
# agree to six digits with the scale, after eight or nine without. The third power is exact: one
# layer turns a residual $r$ into $0.21\,\sigma r^3$. What makes deep attention possible is the skip
# connection, not the scale: with it more than half of the residual is left after ten layers, and
# more without the scale (0.93) than with it (0.53). Note 003 ends by saying that the scale is
# crucial for stable training, "especially in deep models". At the start of training depth speaks
# against it in the outputs, as measured above, and for it in the gradient, which explodes with
# depth without it: so the ledger finds the sentence right. What the scale does for training,
# notebooks 11 and 19 measure on one layer.
# 结论：缩放使每层输出近似为平均值，标准差按 $\sqrt{e/n}$ 减小；
# 没有残差连接时，各词元三层之后即几乎相同；使深层注意力成为可能的是残差连接，而不是缩放；
# 但不缩放时，梯度随深度爆炸。

# %%
spread = theory.weights(64, 1.0).sum_p2 ** 0.5
print(f"n = 64: exact {spread:.3f}, for many keys {np.exp(0.5) / 8:.3f}", end="\n\n")
print(bilingual(ledger(["depth"])))

# %% [markdown]
# ## Exercises
#
# 1. By which factor would you multiply the output so that it has standard deviation 1 at
#    $\sigma = 1$ and $n = 1024$? Does it still have 1 if any two values correlate by 1/2?
#
# <details><summary>Solution</summary>
#
# $1/0.0513 = 19.5$, close to $\sqrt{n/e} = 19.4$. No: correlated values leave with
# $\sqrt{1/2 + 0.0513^2/2} = 0.708$ (`output.where(common=0.5)`), and the factor makes that 13.8. It
# is right for independent tokens alone.
#
# </details>
#
# 2. A causal row $i$ has $i$ keys. How much larger is the output of row 16 than that of row 1024?
#
# <details><summary>Solution</summary>
#
# `theory.weights(16, 1.0).sum_p2` and `theory.weights(1024, 1.0).sum_p2` have the roots 0.364 and
# 0.0513: seven times as large. No single factor makes both 1.
#
# </details>
#
# 3. Normalising each token before a layer keeps the scores from fading with the tokens. Does it
#    prevent the collapse?
#
# <details><summary>Solution</summary>
#
# No: `collapse.where(stack="attention of normalised tokens", scale="1/sqrt(d_k)")` needs one layer
# more to come below $10^{-6}$. The power of the residual is still 3.
#
# </details>
