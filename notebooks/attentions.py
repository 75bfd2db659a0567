# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Ten attentions in three lines each
#
# Each is a Python function of one pair of a query and a key. Here it stands beside its formula in
# NumPy, with a picture of what its mask lets the kernels skip and with its time beside the dense
# call. Then two of them are trained, on a CPU, where [PyTorch's FlexAttention refuses
# gradients](../docs/pytorch.md#flexattention-with-gradients). [Your own
# attention](../docs/programs.md) has the rules, and the same functions on sequences that fit a
# page.

# %% [markdown]
# ## The comparison
#
# `attend` is the formula, with all pairs in memory: four heads of $48^2 = 2304$ positions.
# `compare` asserts that the function gives the same, to $10^{-12}$ in float64 and to $10^{-5}$ in
# float32, prints the times of its forward and its backward, in float32, with the gradients of
# arguments, and returns the picture.

# %%
import time

import numpy as np

import sdpa
import sdpa.plot
from sdpa_lab import style
from sdpa_lab.tools.clock import sample

rng = np.random.default_rng(0)
heads, n, d = 4, 48 * 48, 64
query, key, value, grad = rng.standard_normal((4, heads, n, d))
scores = query @ key.swapaxes(1, 2) / np.sqrt(d)
h, q, k = np.ogrid[:heads, :n, :n]
causal = q >= k


def attend(scores, mask=True):
    weights = np.where(mask, np.exp(scores), 0)
    return weights / weights.sum(axis=-1, keepdims=True) @ value


# %% [markdown]
# Times are those of the processor, on one thread, of calls in turns; the shortest of each counts.


# %%
def calls(grad, *x, **options):
    out, lse = sdpa.attention_forward(*x, **options)
    needs = ("query", "key", "value") + ("score_args",) * ("score_args" in options)
    return (
        lambda: sdpa.attention_forward(*x, **options),
        lambda: sdpa.attention_backward(grad, *x, out, lse, needs=needs, **options),
    )


def beside_dense(*x, **options):
    both = calls(*x, **options, workers=1) + calls(*x, workers=1)
    samples = [[sample(call, 1, time.process_time) for call in both] for _ in range(5)]
    *ours, forward, backward = np.min(samples, axis=0)
    for name, mine, dense in zip(("forward", "backward"), ours, (forward, backward), strict=True):
        print(f"{name:8} {1e3 * mine:5.1f} ms, {mine / dense:.2f} of the dense call's")


def compare(expected, first=0, **options):
    """Of the queries from `first` on."""
    x = query[:, first:], key, value
    np.testing.assert_allclose(sdpa.attention(*x, **options), expected, rtol=0, atol=1e-12)
    grad_out, *x = (a.astype(np.float32) for a in (grad[:, first:], *x))
    np.testing.assert_allclose(sdpa.attention(*x, **options), expected, rtol=0, atol=1e-5)
    beside_dense(grad_out, *x, **options)
    return sdpa.plot.pattern((n - first, n), **options)


# %% [markdown]
# ## Causal documents
#
# Documents one after the other in one sequence, each for itself. The array has a number per
# position; which tiles nobody sees is known without an array of all pairs.

# %%
document = np.repeat(np.arange(6), [700, 500, 100, 404, 400, 200])


def own(b, h, q, k, document):
    return (document[q] == document[k]) & (q >= k)


mask = (document[:, None] == document) & np.tri(n, dtype=bool)
compare(attend(scores, mask), mask_mod=own, mask_args=(document,))

# %% [markdown]
# ## Prefix LM
#
# All see the prefix, what follows is causal (Raffel et al. 2020).


# %%
def prefix_lm(b, h, q, k):
    return (k < 576) | (q >= k)


mask = np.tri(n, dtype=bool)
mask[:, :576] = True
compare(attend(scores, mask), mask_mod=prefix_lm)

# %% [markdown]
# ## Neighbourhoods of an image
#
# A pixel sees a square of 13 x 13 around it, which stays inside the image of 48 x 48 (Hassani et
# al. 2023). That is one pair in fourteen; of the tiles it is more, because a tile has whole rows of
# pixels, the far ends too.


# %%
def neighbours(b, h, q, k, side=48, reach=6):
    row, column = (np.clip(x, reach, side - 1 - reach) for x in (q // side, q % side))
    return (abs(row - k // side) <= reach) & (abs(column - k % side) <= reach)


mask = np.zeros((48, 48, 48, 48), bool)
for i, j in np.ndindex(48, 48):
    top, left = (min(max(x - 6, 0), 35) for x in (i, j))
    mask[i, j, top : top + 13, left : left + 13] = True
compare(attend(scores, mask.reshape(n, n)), mask_mod=neighbours)

# %% [markdown]
# ## Block diffusion
#
# A noisy copy of a text stands before the text itself (Arriola et al. 2025). A noisy token sees its
# own block, and the clean blocks before; a clean one sees clean blocks up to its own.


# %%
def diffusion(b, h, q, k, half=n // 2, size=36):
    block, other, noisy = q % half // size, k % half // size, k < half
    of_noisy = np.where(noisy, block == other, block > other)
    return np.where(q < half, of_noisy, ~noisy & (block >= other))


same, none = np.eye(32, dtype=bool), np.zeros((32, 32), bool)
before = np.tri(32, k=-1, dtype=bool)
mask = np.kron(np.block([[same, before], [none, same | before]]), np.ones((36, 36), bool))
compare(attend(scores, mask), mask_mod=diffusion)

# %% [markdown]
# ## A T5 bias that is trained
#
# T5's bias is a table by head and by a range of distances (Raffel et al. 2020). It hides nothing,
# so every tile is computed. `ranges` is captured, a constant; the table is trained below.

# %%
ranges = np.minimum(np.log2(1 + abs(np.arange(1 - n, n))), 8).astype(int)


def t5(score, b, h, q, k, table):
    return score + table[h, ranges[k - q + n - 1]]


table = rng.standard_normal((heads, 9))
bias = table[:, ranges[np.arange(n) - np.arange(n)[:, None] + n - 1]]
compare(attend(scores + bias), score_mod=t5, score_args=(table,))

# %% [markdown]
# ## A temperature of log n
#
# Scores times a learned multiple of the logarithm of the number of keys keep weights from spreading
# as the sequence grows (Nakanishi 2025). A causal query at position $q$ has $q + 1$ keys.

# %%
factor = np.array([0.1, 0.15, 0.2, 0.25])


def scalable(score, b, h, q, k, factor):
    return score * factor[h] * np.log(q + 1)


expected = attend(scores * factor[:, None, None] * np.log(q + 1), causal)
compare(expected, score_mod=scalable, score_args=(factor,), is_causal=True)

# %% [markdown]
# ## Softcap and ALiBi
#
# Both are options, `softcap` and `alibi_slopes`, and faster as such. As one function they can be
# changed, and slopes have a gradient.

# %%
slopes = sdpa.bias.alibi(heads)


def capped(score, b, h, q, k, slopes):
    return 20 * np.tanh(score / 20) - slopes[h] * (q - k)


expected = attend(20 * np.tanh(scores / 20) - slopes[:, None, None] * (q - k), causal)
compare(expected, score_mod=capped, score_args=(slopes,), is_causal=True)

# %% [markdown]
# ## A bias of a graph
#
# Nodes see each other with a bias learned for each length of a shortest path (Ying et al. 2021);
# nodes without a path do not attend. Here are 24 rings of 96 nodes, one after the other. An array
# that is read at $(q, k)$ can hold anything, so every tile is computed and asked pair by pair.

# %%
ring = np.arange(96)
around = np.minimum((ring - ring[:, None]) % 96, (ring[:, None] - ring) % 96)
steps = np.full((n, n), -1)
for i in range(0, n, 96):
    steps[i : i + 96, i : i + 96] = around
table = rng.standard_normal((heads, 49))


def by_path(score, b, h, q, k, table, steps):
    return score + table[h, steps[q, k]]


def joined(b, h, q, k, steps):
    return steps[q, k] >= 0


options = {"score_mod": by_path, "score_args": (table, steps)}
expected = attend(scores + table[:, steps], steps >= 0)
compare(expected, mask_mod=joined, mask_args=(steps,), **options)

# %% [markdown]
# The same graph with the number of each node's ring: an array with a number per position, as of
# documents, is known for whole tiles. The function of the score stays as it is.

# %%
number = np.arange(n) // 96


def same_ring(b, h, q, k, number):
    return number[q] == number[k]


compare(expected, mask_mod=same_ring, mask_args=(number,), **options)

# %% [markdown]
# ## Tree decoding
#
# Several continuations of one text are drafts in a tree. A draft sees the text and its own branch,
# so one call judges them all (Miao et al. 2024). The 64 queries begin behind the text; the dense
# call has as many.

# %%
branch = np.eye(64, dtype=bool)
for i in range(1, 64):
    branch[i] |= branch[(i - 1) // 2]


def tree(b, h, q, k, branch):
    return (k < 2240) | branch[q - 2240, np.maximum(k - 2240, 0)]


mask = np.concatenate([np.ones((64, 2240), bool), branch], axis=1)
expected = attend(scores[:, 2240:], mask)
compare(expected, first=2240, mask_mod=tree, mask_args=(branch,), query_offset=2240)

# %% [markdown]
# ## Relu attention
#
# $e^{\log x}$ is $x$, so the logarithm of any positive function of the score replaces softmax's
# exponential. The logarithm of 0 masks: half of the pairs, none of which is known before its score.


# %%
def relu(score, b, h, q, k):
    return np.log(np.maximum(score, 0))


positive = np.maximum(scores, 0)
expected = positive @ value / positive.sum(axis=-1, keepdims=True)
compare(expected, score_mod=relu)

# %% [markdown]
# ## Training a T5 bias
#
# `needs` asks for the table's gradient. Its formula here is a central difference along one
# direction.

# %%
x = query[:, :512], key[:, :512], value[:, :512]
wanted, table = rng.standard_normal((heads, 9)), np.zeros((heads, 9))
target = sdpa.attention(*x, score_mod=t5, score_args=(wanted,))


def loss(table):
    out = sdpa.attention(*x, score_mod=t5, score_args=(table,))
    return ((out - target) ** 2).sum() / 2


def gradient(table):
    options = {"score_mod": t5, "score_args": (table,)}
    out, lse = sdpa.attention_forward(*x, **options)
    error = out - target
    found = sdpa.attention_backward(error, *x, out, lse, needs=("score_args",), **options)
    return found.score_args[0]


step = 1e-5 * rng.standard_normal(table.shape)
numeric = (loss(step) - loss(-step)) / 2
np.testing.assert_allclose((gradient(table) * step).sum(), numeric, rtol=1e-6)

# %% [markdown]
# What attention takes of a step:

# %%
beside_dense(
    *(a[:, :512].astype(np.float32) for a in (grad, query, key, value)),
    score_mod=t5,
    score_args=(table,),
)

# %% [markdown]
# A table is learned from outputs alone. A constant per head cancels in softmax, so the tables agree
# but for that.

# %%
from sdpa_lab.training import Adam

adam, losses = Adam(0.2), [loss(table)]
for _ in range(200):
    adam.step({"table": table}, {"table": gradient(table)})
    losses.append(loss(table))
off = table - wanted
off -= off.mean(axis=1, keepdims=True)
print(f"loss {losses[0]:.1f}, then {losses[-1]:.1e}; the table is off by {abs(off).max():.1e}")

assert losses[-1] < 1e-3 * losses[0]
assert abs(off).max() < 0.05

# %% [markdown]
# ## Training neighbourhoods
#
# Pixels of noisy images attend to their neighbours, and the mean of these should be the clean
# pixel. Queries and keys are learned maps of the 5 x 5 pixels around each, and a learned table has
# a bias for each offset, as in Hassani et al. (2023). An index is checked at the pairs that the
# mask lets through, and nowhere else, so offsets beyond the table do no harm.

# %%
side = 48


def images(count):
    """Of six half planes each; their patches, the noisy pixels and the clean ones."""
    normal, offset, height = (rng.standard_normal((count, 6, m, 1, 1)) for m in (2, 1, 1))
    planes = (normal * (np.mgrid[:side, :side] / side - 0.5)).sum(axis=2)
    clean = ((planes > 0.3 * offset[:, :, 0]) * height[:, :, 0]).sum(axis=1)
    clean = (clean - clean.mean(axis=(1, 2), keepdims=True)) / clean.std(axis=(1, 2), keepdims=True)
    noisy = clean + 0.5 * rng.standard_normal(clean.shape)
    padded = np.pad(noisy, ((0, 0), (2, 2), (2, 2)), mode="reflect")
    patches = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), axis=(1, 2))
    shapes = zip((patches, noisy, clean), (25, 1, 1), strict=True)
    return [a.reshape(count, n, m).astype(np.float32) for a, m in shapes]


def placed(score, b, h, q, k, table, reach=6):
    return score + table[k // side - q // side + 2 * reach, k % side - q % side + 2 * reach]


def options_of(parameters):
    score = {"score_mod": placed, "score_args": (parameters["table"],)}
    return score | {"mask_mod": neighbours, "scale": 1.0}


# %% [markdown]
# One step: forward, backward, and the gradients of the maps.


# %%
def denoise(parameters, patches, noisy):
    x = patches @ parameters["query"], patches @ parameters["key"], noisy
    return x, sdpa.attention_forward(*x, **options_of(parameters))


def gradients(parameters, patches, noisy, clean):
    x, (out, lse) = denoise(parameters, patches, noisy)
    error = 2 * (out - clean) / clean.size
    needs = ("query", "key", "score_args")
    found = sdpa.attention_backward(error, *x, out, lse, needs=needs, **options_of(parameters))
    by = {name: np.einsum("bni,bnj->ij", patches, getattr(found, name)) for name in needs[:2]}
    return by | {"table": found.score_args[0]}


start = 0.05 * rng.standard_normal((25, 16)).astype(np.float32)
parameters = {"query": start, "key": start.copy(), "table": np.zeros((25, 25), np.float32)}
adam = Adam({"query": 0.003, "key": 0.003, "table": 0.1})
for _ in range(100):
    adam.step(parameters, gradients(parameters, *images(1)))

# %% [markdown]
# New images, beside the best of several Gaussian filters.

# %%
from scipy.ndimage import gaussian_filter

patches, noisy, clean = images(8)
_, (found, _) = denoise(parameters, patches, noisy)
grids = noisy.reshape(-1, side, side)
blurred = [
    gaussian_filter(grids, (0, width, width)).reshape(noisy.shape)
    for width in np.arange(0.6, 2, 0.1)
]
errors = [((a - clean) ** 2).mean() for a in (noisy, found, *blurred)]
print(
    f"mean square error: noisy {errors[0]:.3f}, denoised {errors[1]:.3f}, "
    f"best filter {min(errors[2:]):.3f}"
)

assert errors[1] < 0.8 * min(errors[2:]) < 0.2 * errors[0]

# %%
figure, axes = style.subplots(1, 4, size=(2.6, 2.6))
titles = "noisy", "denoised", "clean", "exp(table), by offset"
bump = np.exp(parameters["table"][6:19, 6:19])
shown = [a[0].reshape(side, side) for a in (noisy, found, clean)]
for ax, image, title in zip(axes, [*shown, bump], titles, strict=True):
    low, high = (0, None) if image is bump else (clean[0].min(), clean[0].max())
    ax.imshow(image, cmap="cividis", vmin=low, vmax=high)
    ax.set(title=title, xticks=[], yticks=[])
    ax.grid(False)
figure

# %% [markdown]
# What attention takes of a step. The dense call has no bias, and only 16 columns: beside so short
# products the reading of the table counts.

# %%
x, (found, _) = denoise(parameters, patches, noisy)
beside_dense(found - clean, *x, **options_of(parameters))
