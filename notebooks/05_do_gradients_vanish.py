# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Do gradients vanish without the scale?
#
# **Question.** How do the gradients that reach S, Q, K, V and W^Q change with d_k, with 1/sqrt(d_k)
# and without: their root mean square, their median, and the share of rows without any?
#
# **Common misconception.** "Without the scale softmax saturates, so the gradient of Q vanishes like
# 1/d_k."

# %% [markdown]
# ## Prediction
#
# With values and upstream gradients of variance 1, E |dL/ds|^2 of a row is d_v times the squared
# norm of the Jacobian, sum p^2 - 2 sum p^3 + (sum p^2)^2: zero for one-hot rows. When rows freeze
# (notebook 03) its mean falls like m (1 - m)/3 with m = sqrt(2 ln n / d_k), because fewer and fewer
# rows have two weights that compete. But dL/dq = scale sum ds_j k_j multiplies by scale and keys:
# with the scale the factor is 1, without it sqrt(d_k). So the root mean square of dL/dQ does not
# fall; it grows towards d_k^(1/4), while most rows get nothing. `theory.attention` has the exact
# curves.

# %% [markdown]
# ## In plain NumPy
#
# The gradient to Q of one head, by the formula of note 004 with its scale of 1.

# %%
import numpy as np

import sdpa
from sdpa import lab
from sdpa.lab.claims import ledger

rng = np.random.default_rng(0)
query, key, value, grad_out = rng.standard_normal((4, 10, 256))
weights = sdpa.attention_weights(query, key, scale=1.0)
grad_weights = grad_out @ value.T
centred = grad_weights - (weights * grad_weights).sum(axis=-1, keepdims=True)
grad_query = (weights * centred) @ key
print("norms of rows of dL/dQ:", *(f"{x:.2g}" for x in np.linalg.norm(grad_query, axis=1)))

out, lse = sdpa.attention_forward(query, key, value, scale=1.0)
ours = sdpa.attention_backward(grad_out, query, key, value, out, lse, scale=1.0)
np.testing.assert_allclose(ours.query, grad_query, rtol=1e-7, atol=1e-9)

# %% [markdown]
# ## Measurement
#
# A draw is one head. A row is dead when its norm is below a hundredth of what equal weights would
# give.

# %%
table = lab.gradients(draws=60)
for target in ("score", "query", "value", "weight"):
    names = ["scale", "d_k", "n", *(f"{what}_{target}" for what in ("rms", "median", "dead"))]
    print(lab.Table("", [{name: row[name] for name in names} for row in table.rows]))

small, large = (table.row(scale="unscaled", d_k=d, n=10) for d in (16, 1024))
rms, median, dead = (
    [row[f"{what}_query"].estimate() for row in (small, large)]
    for what in ("rms", "median", "dead")
)
assert rms[1].low > rms[0].high
assert median[1].high < 0.1 < median[0].low
assert dead[0].high < 0.1
assert dead[1].low > 0.6
assert (table.where(scale="scaled")["dead_query"] == 0).all()
assert (table.where(scale="unscaled", d_k=1024)["dead_value"] < 0.3).all()

# %% [markdown]
# ## Figure
#
# The gradient to Q over d_k: root mean square with its law (left), median (middle), share of dead
# rows (right). Three answers to one question.

# %%
lab.plot_gradients(table)

# %% [markdown]
# ## Conclusion
#
# It depends on what "vanish" means. Without the scale the typical row of dL/dQ does vanish: at d_k
# = 1024 and n = 10 two of three rows are dead and the median is less than a thousandth of what it
# is with the scale. The root mean square grows all the same, because the few rows that still
# compete get gradients tens of times larger; neither falls like 1/d_k. With the scale nothing
# depends on d_k. dL/dV grows, though a fifth of the values, those that no query picks, get none;
# dL/dW^Q sums over rows and grows too, with dead rows at small n alone. The ledger:

# %%
print(*ledger(["grad-law"]))

# %% [markdown]
# ## Exercises
#
# 1. Which of the gradients to S, Q, K and V does the mean say vanish without the scale?
#
# <details><summary>Solution</summary>
#
# `theory.attention(10, d_k, 1.0, d_v=64)` for d_k = 16, 64, 256, 1024 has grad_score 2.45, 1.88,
# 1.38, 1.00: falling like d_k^(-1/4) or so. grad_query and grad_key grow (9.5 to 31.8), grad_value
# grows to sqrt(d_v) = 8, where each query takes one value.
#
# </details>
#
# 2. What exponent in d_k has the root mean square of dL/dQ for large d_k, by the theory?
#
# <details><summary>Solution</summary>
#
# The slope of ln grad_query is 0.281 between d_k = 64 and 256 and 0.257 between 1024 and 4096; it
# tends to 1/4, since E |dL/ds|^2 falls like m/3, that is d_k^(-1/2), and |k|^2 grows like d_k.
#
# </details>
#
# 3. Do gradients vanish with the scale, if n grows instead of d_k?
#
# <details><summary>Solution</summary>
#
# `theory.attention(n, 64, d_v=64).grad_query` is 1.48, 0.414 and 0.105 for n = 64, 1024, 16384:
# like n^(-1/2), by averaging and not by saturation, and for V likewise. The scale does nothing
# about it.
#
# </details>
