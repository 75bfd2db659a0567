# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Is attention kernel regression, and how far does that hold in floating point?
#
# **Question.** Can sums over a Gaussian kernel (densities, smoothing, transport, clustering,
# memory, registration) be calls of attention, and how many digits are left when the points lie many
# bandwidths from their mean?
#
# **Common misconception.** "Dot products are no distances: a Gaussian kernel needs the matrix of
# distances." And, from those who know better: "they are the same, so float32 has its seven digits."

# %% [markdown]
# ## Prediction
#
# With $q = x / h$ and $k = y / h$
#
# $$ e^{-|x - y|^2 / 2 h^2} = e^{q \cdot k - |k|^2 / 2} \; e^{-|q|^2 / 2} . $$
#
# The last factor is the same for a row and leaves softmax as it is; $|k|^2 / 2$ is one more column
# of the keys beside a 1 in the queries. So `out` is the mean of Nadaraya (1964) and Watson (1964),
# and lse the logarithm of a density but for constants. Read backwards, the scale of attention is
# $1 / h^2$: a bandwidth.
#
# The three terms are as large as $r^2$, where $r$ is the distance from the origin in bandwidths,
# and their sum is small. Each is rounded by at most $u = 2^{-53}$ (float64) or $2^{-24}$ (float32)
# of itself, so the logarithm of a density is off by about $u r^2$.

# %% [markdown]
# ## In plain NumPy
#
# **Smoothing**: the mean of values weighted by the kernel.

# %%
import numpy as np
from scipy.special import logsumexp, softmax

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual
from sdpa_lab.experiments.kernel_regression import operands

rng = np.random.default_rng(0)
x, y = rng.standard_normal((200, 2)), rng.standard_normal((300, 2))
values, h = np.sin(3 * y[:, :1]), 0.4
scores = -((x[:, None] - y) ** 2).sum(axis=-1) / (2 * h**2)
expected = softmax(scores, axis=1) @ values

query, key, square = operands(x, y, h)  # centred, divided by h, with the column
out, lse = sdpa.attention_forward(query, key, values, scale=1.0)
np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)

# %% [markdown]
# Its **gradients**, here the slope of the smoothed surface at each $x$ and its derivative by the
# bandwidth, beside central differences.

# %%
grads = sdpa.attention_backward(np.ones_like(out), query, key, values, out, lse, scale=1.0)
q, k = query[:, :-1], key[:, :-1]
by_q = grads.query[:, :-1]
by_k = grads.key[:, :-1] - grads.key[:, -1:] * k  # the last column is -|k|^2 / 2
by_h = -((by_q * q).sum() + (by_k * k).sum()) / h


def total(x, h):
    return (softmax(-((x[:, None] - y) ** 2).sum(axis=-1) / (2 * h**2), axis=1) @ values).sum()


step = np.array([1e-5, 0])
numeric = (total(x, h + 1e-5) - total(x, h - 1e-5)) / 2e-5
np.testing.assert_allclose(by_h, numeric, rtol=1e-6)
numeric = (total(x + step, h) - total(x - step, h)) / 2e-5
np.testing.assert_allclose(by_q[:, 0].sum() / h, numeric, rtol=1e-6)

# %% [markdown]
# **Log density**, beside scikit-learn and SciPy, whose bandwidth is a matrix.

# %%
from scipy.stats import gaussian_kde
from sklearn.neighbors import KernelDensity

density = lse - square - np.log(len(y) * 2 * np.pi * h**2)
theirs = KernelDensity(bandwidth=h, rtol=0).fit(y).score_samples(x)
np.testing.assert_allclose(density, theirs, rtol=0, atol=1e-9)

estimate = gaussian_kde(y.T)
axes = np.linalg.inv(np.linalg.cholesky(estimate.covariance)).T
white_query, white_key, white_square = operands(x @ axes, y @ axes, 1.0)
found = sdpa.attention_forward(white_query, white_key, white_key[:, :0], scale=1.0).lse
found += np.linalg.slogdet(axes)[1] - white_square - np.log(len(y) * 2 * np.pi)
np.testing.assert_allclose(found, estimate.logpdf(x.T), rtol=0, atol=1e-9)

# %% [markdown]
# **Sinkhorn**'s iterations between uniform weights (Cuturi 2013): without the squares of either
# side each half is one lse, which replaces a column.

# %%
a, b = np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y))
from_x, to_x = query, np.column_stack([q, -square])
from_y, to_y = np.column_stack([k, np.ones(len(k))]), key.copy()
log_u, log_v = np.zeros(len(x)), np.zeros(len(y))
for _ in range(30):
    to_y[:, -1] = np.log(b) - sdpa.attention_forward(from_y, to_x, q[:, :0], scale=1.0).lse
    to_x[:, -1] = np.log(a) - sdpa.attention_forward(from_x, to_y, k[:, :0], scale=1.0).lse
    log_v = np.log(b) - logsumexp(scores + log_u[:, None], axis=0)
    log_u = np.log(a) - logsumexp(scores + log_v, axis=1)
np.testing.assert_allclose(to_x[:, -1] + square, log_u, rtol=0, atol=1e-10)

# %% [markdown]
# **Mean shift** (Cheng 1995) is attention whose values are its keys, again and again. The kernel of
# scikit-learn's `MeanShift` is flat, so only the clusters are compared.

# %%
from sklearn.cluster import MeanShift
from sklearn.metrics import adjusted_rand_score

places = np.array([[-4.0, 0.0], [4.0, 0.0], [0.0, 5.0]])
points = np.repeat(places, 100, axis=0) + 0.7 * rng.standard_normal((300, 2))
ends = points
for _ in range(50):
    moving, fixed, _ = operands(ends, points, 1.0)
    ends = sdpa.attention_forward(moving, fixed, points, scale=1.0).out
modes, cluster = np.unique(ends.round(6), axis=0, return_inverse=True)

assert len(modes) == 3
assert adjusted_rand_score(cluster, MeanShift(bandwidth=2).fit(points).labels_) == 1

# %% [markdown]
# **Retrieval from a Hopfield network** (Ramsauer et al. 2021) is attention as it stands, without
# the squares, and lowers an energy. The lower halves of 100 images are covered.

# %%
from sklearn.datasets import load_digits

patterns = load_digits().data[:100]
patterns = patterns - patterns.mean(axis=0)
patterns /= np.linalg.norm(patterns, axis=1, keepdims=True)
state = patterns * (np.arange(64) < 32)
energies = []
for _ in range(5):
    moved, log_sum = sdpa.attention_forward(state, patterns, patterns, scale=32.0)
    energies.append((state**2).sum(axis=1) / 2 - log_sum / 32)
    state = moved
nearest = ((state[:, None] - patterns) ** 2).sum(axis=-1).argmin(axis=1)

assert (np.diff(energies, axis=0) < 1e-9).all()
print(f"{(nearest == np.arange(100)).sum()} of 100 images come back")

# %% [markdown]
# **The E-step of coherent point drift** (Myronenko and Song 2010): a constant for outliers in each
# denominator goes into lse. The backward computes the weights again from lse, and its gradient of
# the values is their transpose times what is given as gradient of the output: here the points
# themselves, and a 1 for the sums.

# %%
outliers = 0.1
constant = 2 * np.pi * h**2 * outliers / (1 - outliers) * len(y) / len(x)
with_outliers = np.logaddexp(lse, np.log(constant) + square)
given = np.column_stack([x, np.ones(len(x))])
unused = [np.broadcast_to(0.0, (n, 3)) for n in (len(y), len(x))]
sums = sdpa.attention_backward(
    given, query, key, *unused, with_outliers, scale=1.0, needs=("value",)
).value

weights = np.exp(scores) / (np.exp(scores).sum(axis=1, keepdims=True) + constant)
np.testing.assert_allclose(sums, weights.T @ given, rtol=0, atol=1e-11)
np.testing.assert_allclose(np.exp(lse - with_outliers), weights.sum(axis=1), rtol=1e-11)

# %% [markdown]
# Before you go on, write down a guess. Points lie around 5000, the bandwidth is 0.1, and nobody
# subtracts the mean. By how much is the logarithm of a density off in float32?

# %%
my_guess = None  # 1e-7 if float32 keeps its seven digits

# %% [markdown]
# ## Measurement
#
# Two clusters of unit variance lie $r$ bandwidths on either side of their mean; errors are those
# beside distances from differences. `predicted` is $u r^2$.

# %%
rounding = lab.kernel_rounding()
for dtype in ("float32", "float64"):
    print(rounding.where(dtype=dtype), "\n")

far = rounding["distance"] >= 10
ratio = rounding["density"] / rounding["density_predicted"]
assert ((ratio[far] > 0.5) & (ratio[far] < 5)).all()
assert rounding.where(dtype="float64", distance=100000)["density"][0] < 1e-5
assert rounding.where(dtype="float32", distance=1000)["density"][0] > 0.01

# %% [markdown]
# The question of the guess: 50000 bandwidths from the origin, and then centred.

# %%
x, y = 5000 + rng.uniform(-2, 2, (100, 1)), 5000 + rng.uniform(-2, 2, (2000, 1))
log_sums = logsumexp(-((x - y.T) ** 2) / (2 * 0.1**2), axis=1)
error = {}
for centre in (0, 5000):
    query, key, square = operands(x, y, 0.1, centre)
    query, key = query.astype(np.float32), key.astype(np.float32)
    lse = sdpa.attention_forward(query, key, key[:, :0], scale=1.0).lse
    error[centre] = abs(lse - square - log_sums).max()
    print(f"float32, {centre} subtracted: off by {error[centre]:.1e}")

assert error[0] > 100
assert error[5000] < 1e-4

# %% [markdown]
# ## Figure
#
# Left: a mean with too small a bandwidth repeats the noise, with too large a one it averages the
# curve away. Right: each tenfold distance from the mean costs two digits.

# %%
lab.plot_kernel_regression(lab.kernel_smoothing(), rounding)

# %% [markdown]
# ## Conclusion
#
# Six methods are calls of attention, to rounding, without a matrix of all pairs. It is not the
# number type alone that decides on the digits but the distance from the origin: centre first, and
# count on an error of $u r^2$. In float64 that leaves 6 digits of a log density at $r = 100000$, in
# float32 3 at $r = 100$. That $|q|^2 / 2$ may be left out is the law of the ledger on shifts:

# %%
print(bilingual(ledger(["shift"])))

# %% [markdown]
# ## Exercises
#
# 1. Keys have the length $\sqrt{d_k}$, as after a normalisation of rows. Which bandwidth is the
#    scale $1 / \sqrt{d_k}$?
#
# <details><summary>Solution</summary>
#
# $h = \sqrt[4]{d_k}$, since the scale is $1 / h^2$: 2.8 at $d_k = 64$, while two random keys are
# $\sqrt{2 d_k} = 11$ apart. $|k|^2$ is the same for all keys and cancels like $|q|^2$.
#
# </details>
#
# 2. Two clusters lie $10^4$ bandwidths on either side of their mean. Get seven digits in float32.
#
# <details><summary>Solution</summary>
#
# One call for each cluster of queries, centred there:
# `operands(x[part], y, h, x[part].mean(axis=0))`. The keys of the other cluster have wrong scores
# near $-2 \cdot 10^8$, whose weights are 0 all the same.
#
# </details>
#
# 3. Give the points of a density weights $w_j$. What changes?
#
# <details><summary>Solution</summary>
#
# The last column of the keys: `key[:, -1] += np.log(w)`, and `- np.log(w.sum())` takes the place of
# `- np.log(len(y))`. A weight of 0 is -inf there, which hides the point.
#
# </details>
