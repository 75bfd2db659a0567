"""Sums over a Gaussian kernel as calls of attention: density, smoothing, transport and more.

python examples/kernel_regression.py [--points 2000]

exp(-|x - y|^2 / (2 h^2)) is exp(q.k - |k|^2 / 2) exp(-|q|^2 / 2) with q = x / h and k = y / h. So
points x as queries and points y as keys have the kernel as their weights, where the key carries
-|k|^2 / 2 in one more column, beside a 1 in the query. No matrix of all pairs is kept. The
functions take float64 and centre the points first: docs/kernel_regression.md says why.
"""

import argparse

import numpy as np

import sdpa


def queries(q):
    return np.column_stack([q, np.ones(len(q))])


def keys(k):
    return np.column_stack([k, -half_square(k)])


def half_square(q):
    return (q**2).sum(axis=1) / 2


def log_sum(query, key):
    """ln of the sum of exp(query . key) over all keys; values of no width are not summed."""
    return sdpa.attention_forward(query, key, key[:, :0], scale=1.0).lse


def log_density(x, y, h):
    """Logarithm of the kernel density estimate from points y (n, d) at x (m, d)."""
    centre = y.mean(axis=0)
    q, k = (x - centre) / h, (y - centre) / h
    total = log_sum(queries(q), keys(k)) - half_square(q)
    return total - np.log(len(k)) - k.shape[1] * np.log(h * np.sqrt(2 * np.pi))


def smooth(x, y, values, h):
    """Nadaraya and Watson's estimate at x: the mean of values (n, c), weighted by the kernel."""
    centre = y.mean(axis=0)
    q, k = (x - centre) / h, (y - centre) / h
    return sdpa.attention_forward(queries(q), keys(k), values, scale=1.0).out


def smooth_backward(grad_out, x, y, values, h):
    """Gradients of sum(grad_out * smooth(x, y, values, h)) by x, y, values and h."""
    centre = y.mean(axis=0)
    q, k = (x - centre) / h, (y - centre) / h
    operands = queries(q), keys(k), values
    result = sdpa.attention_forward(*operands, scale=1.0)
    grads = sdpa.attention_backward(grad_out, *operands, *result, scale=1.0)
    grad_q = grads.query[:, :-1]
    grad_k = grads.key[:, :-1] - grads.key[:, -1:] * k  # the last column is -|k|^2 / 2
    grad_h = -((grad_q * q).sum() + (grad_k * k).sum()) / h
    return grad_q / h, grad_k / h, grads.value, grad_h


def sinkhorn(x, y, a, b, reg, iterations):
    """log u and log v of the plan u_i exp(-|x_i - y_j|^2 / reg) v_j between weights a and b.

    With |q|^2 / 2 taken off log u, and |k|^2 / 2 off log v, only products are left of distances.
    """
    centre = y.mean(axis=0)
    q, k = (np.sqrt(2 / reg) * (points - centre) for points in (x, y))
    key_q, key_k = keys(q), keys(k)
    for _ in range(iterations):
        key_k[:, -1] = np.log(b) - log_sum(queries(k), key_q)
        key_q[:, -1] = np.log(a) - log_sum(queries(q), key_k)
    return key_q[:, -1] + half_square(q), key_k[:, -1] + half_square(k)


def mean_shift(y, h, steps):
    """Points y after `steps` moves, each to the mean of all points weighted by the kernel."""
    centre = y.mean(axis=0)
    k = (y - centre) / h
    q, key = k, keys(k)
    for _ in range(steps):
        q = sdpa.attention_forward(queries(q), key, k, scale=1.0).out
    return centre + h * q


def retrieve(states, patterns, beta, steps=1):
    """States of a Hopfield network after `steps` updates, and their energies before the last one.

    The energy is |state|^2 / 2 - lse(beta patterns state) / beta, up to a constant.
    """
    for _ in range(steps):
        before = states
        states, lse = sdpa.attention_forward(before, patterns, patterns, scale=beta)
    return states, half_square(before) - lse / beta


def e_step(data, model, variance, outliers):
    """P1, P^T 1 and P X of coherent point drift, for data X (n, d) and `model` points (m, d).

    P[m, n] is the probability that point m made point n. Its denominator has a constant for the
    share of `outliers`, which lse takes in; the backward computes the weights again from lse, and
    its gradient of the values is P times what takes the place of the gradient of the output.
    """
    h, d, centre = np.sqrt(variance), data.shape[1], model.mean(axis=0)
    q, k = (data - centre) / h, (model - centre) / h
    query, key = queries(q), keys(k)
    lse = log_sum(query, key)
    constant = (2 * np.pi * variance) ** (d / 2) * outliers / (1 - outliers) * len(k) / len(q)
    total = np.logaddexp(lse, np.log(constant) + half_square(q))
    summed = queries(data)  # X, and a 1 for the sums of rows
    unused = [np.broadcast_to(0.0, (n, d + 1)) for n in (len(k), len(q))]
    product = sdpa.attention_backward(
        summed, query, key, *unused, total, scale=1.0, needs=("value",)
    ).value
    return product[:, -1], np.exp(lse - total), product[:, :-1]


def main():
    options = parse()
    rng = np.random.default_rng(0)
    n = options.points
    density(rng, n)
    smoothing(rng, n)
    transport(rng, n)
    modes(rng, n)
    memory(rng)
    registration(rng, n)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=2000)
    return parser.parse_args()


def density(rng, n):
    """The estimate is a density: its integral is 1."""
    grid = np.linspace(-8, 8, 4001)[:, None]
    found = np.exp(log_density(grid, rng.standard_normal((n, 1)), 0.3))
    print(f"log density: the estimate integrates to {np.trapezoid(found, grid[:, 0]):.6f}")


def smoothing(rng, n):
    """The bandwidth that fits held-out points best, by the gradient of its logarithm."""
    points = rng.uniform(-3, 3, (n, 1))
    values = np.sin(2 * points) + 0.3 * rng.standard_normal((n, 1))
    y, x, given, wanted = points[::2], points[1::2], values[::2], values[1::2]
    h = 1.0
    for _ in range(60):
        missed = smooth(x, y, given, h) - wanted
        h *= np.exp(-2 * h * smooth_backward(2 * missed / len(x), x, y, given, h)[-1])
    wrong = smooth(x, y, given, h) - np.sin(2 * x)
    print(
        f"smoothing: bandwidth 1 becomes {h:.3f} by its gradient; "
        f"the curve is {np.sqrt((wrong**2).mean()):.3f} off (root mean square)"
    )


def transport(rng, n):
    """Two clouds; the sums of the plan, found by kernel sums once more, are the weights."""
    x, y = rng.standard_normal((n, 2)), 0.5 * rng.standard_normal((n, 2)) + 1
    a = b = np.full(n, 1 / n)
    log_u, log_v = sinkhorn(x, y, a, b, 0.5, 100)
    q, k = (2 * (points - y.mean(axis=0)) for points in (x, y))  # sqrt(2 / 0.5)
    key = np.column_stack([q, log_u - half_square(q)])
    sums = np.exp(log_sum(queries(k), key) + log_v - half_square(k))
    print(
        f"Sinkhorn: after 100 iterations the plan misses its weights by {abs(sums - b).sum():.1e}"
    )


def modes(rng, n):
    """Three clusters end in three points."""
    centres = np.array([[-3.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    y = centres[rng.integers(3, size=n)] + 0.6 * rng.standard_normal((n, 2))
    ends = mean_shift(y, 0.8, 100)
    print(f"mean shift: {len(y)} points end in {len(np.unique(ends.round(3), axis=0))} modes")


def memory(rng):
    """Patterns of signs, of which a third is lost."""
    patterns = rng.choice([-1.0, 1.0], (200, 64))
    states = np.where(rng.random(patterns.shape) < 1 / 3, 0.0, patterns)
    found, _ = retrieve(states, patterns, 1.0, steps=3)
    kept = (np.sign(found) == patterns).all(axis=1)
    print(
        f"Hopfield: {kept.sum()} of {len(kept)} patterns come back from two thirds of their signs"
    )


def registration(rng, n):
    """Rigid coherent point drift: a copy, turned and moved, among outliers."""
    model = rng.uniform(-1, 1, (min(n, 500), 2)) * [2.0, 1.0]
    copy = model @ turned(0.6).T + [0.3, -0.2] + 0.01 * rng.standard_normal(model.shape)
    data = np.concatenate([copy, rng.uniform(-3, 3, (len(model) // 5, 2))])
    moved, variance = model, data.var()
    for _ in range(80):
        p1, pt1, px = e_step(data, moved, variance, 0.1)
        total = p1.sum()
        mean_x, mean_y = px.sum(axis=0) / total, p1 @ model / total
        left, _, right = np.linalg.svd((px - np.outer(p1, mean_x)).T @ (model - mean_y))
        turn = left @ np.diag([1, np.linalg.det(left @ right)]) @ right
        moved = (model - mean_y) @ turn.T + mean_x
        squares = pt1 @ half_square(data) - (px * moved).sum() + p1 @ half_square(moved)
        variance = squares / total  # in two dimensions, and of half squares
    angle = np.arctan2(turn[1, 0], turn[0, 0])
    print(f"point drift: a turn by 0.6 is found as {angle:.4f} among {len(data)} points")


def turned(angle):
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s], [s, c]])


if __name__ == "__main__":
    main()
