# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What does attention cost in time and memory, and what does the scale cost?
#
# **Question.** How much memory does one call add as the sequence grows, how fast is it compared
# with the formula in NumPy, and is the factor $1/\sqrt{d_k}$ worth saving?
#
# **Common misconception.** "Attention needs $O(n^2)$ memory, so long sequences are a matter of RAM;
# and the division is an obvious thing to optimise away."

# %% [markdown]
# ## Prediction
#
# The formula holds the $n \times n$ matrix of scores: $4 n^2$ bytes in float32. Nothing forces it
# to: output and log-sum-exp of a row can be updated block of keys by block of keys (Rabe and Staats
# 2021; Dao et al. 2022), so that only one block per thread has to exist, whatever $n$ is.
#
# The two matrix products take $4 n^2 d$ operations. The scale takes $n^2$ if the scores are
# multiplied, a share of $1/(4 d)$ of them, 0.4 % at $d = 64$. A pass of its own over the scores
# costs more than its operations suggest: it is bound by memory.

# %% [markdown]
# ## In plain NumPy
#
# The formula, and the C routine, which never has `weights` as a whole.

# %%
import numpy as np

import sdpa
import sdpa_lab as lab
from sdpa_lab.claims import ledger
from sdpa_lab.claims.chinese import bilingual

rng = np.random.default_rng(0)
query, key, value = rng.standard_normal((3, 512, 64))
scores = query @ key.T / np.sqrt(64)
weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
out = weights / weights.sum(axis=-1, keepdims=True) @ value

np.testing.assert_allclose(sdpa.attention(query, key, value), out, rtol=0, atol=1e-13)

# %% [markdown]
# Before you go on, write down a guess: at $n = 4096$ the matrix of scores has 64 MiB. How much
# memory does a call need that gives the same result without it?

# %%
my_guess = None  # MiB

# %% [markdown]
# ## Measurement
#
# Memory: how far the resident size grows during one call, in bytes, in a separate process that
# gives what is free back to the system before each call. The result of $256\, n$ bytes is part of
# it. At $n = 4096$ the matrix has 64 MiB, in the last row 256.

# %%
memory = lab.memory()
print(memory)

longest = memory.rows[-1]
assert longest["numpy"] > 0.9 * longest["matrix"]
assert longest["sdpa"] < 0.05 * longest["matrix"]
assert all(row["sdpa"] >= 256 * row["n"] for row in memory.rows)

# %% [markdown]
# Time: NumPy and sdpa alternate within the same minute, and the shortest call of each counts.
# Below 1 NumPy is faster, as it may be where many sequences have 8 rows each. Both give the same
# result to the rounding of float32. How much faster one is depends on the machine and on what else
# it does, so only the agreement is asserted. Other programs on the machine slow NumPy's threaded
# products more than sdpa.

# %%
speed = lab.speed(seconds=1.0)
for row in speed:
    print(f"{row.shape!s:>14} {row.direction:8} {row.ratio:5.1f} times as fast as NumPy")

assert all(row.difference < 1e-4 for row in speed)

# %% [markdown]
# ## Figure
#
# The formula follows the size of its matrix. The kernel needs its result and a few blocks.

# %%
lab.plot_memory(memory)

# %% [markdown]
# ## Conclusion
#
# $O(n^2)$ memory is a property of the formula written as three array operations, not of attention.
# The scale costs nothing where a kernel multiplies as it takes the exponential; as a pass of its
# own over the scores, as programs in a framework have it, it can be noticed. The verdicts of the
# ledger, measured in this run:

# %%
print(bilingual(ledger(["memory", "memory-needed", "scale-cost", "scale-pass"])))

# %% [markdown]
# ## Exercises
#
# 1. How large is the matrix of scores of 12 heads and 32768 positions in float32, and how much does
#    the result of attention with $d_v = 64$ take?
#
# <details><summary>Solution</summary>
#
# `12 * 32768**2 * 4 / 2**30` is 48 GiB; `12 * 32768 * 64 * 4 / 2**20` is 96 MiB.
#
# </details>
#
# 2. The entropy of the weights seems to need the weights. Get it for 65536 keys without them.
#
# <details><summary>Solution</summary>
#
# `sdpa.attention_statistics(query, key).entropy`: one number per row, in the memory of a block. It
# rests on $H = \text{lse} - \text{scale} \cdot q \cdot \sum_j p_j k_j$, an attention whose values
# are the keys.
#
# </details>
#
# 3. Where could the factor $1/\sqrt{d_k}$ be applied so that it costs $n d$ instead of $n^2$
#    operations, and what would that change in the last digits?
#
# <details><summary>Solution</summary>
#
# `sdpa.attention(query * 0.125, key, value, scale=1.0)`. For $d_k = 64$ the factor is a power of
# two, so nothing is rounded differently; for $d_k = 32$ each component of the query would be
# rounded once more.
#
# </details>
