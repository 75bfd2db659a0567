"""Rows on identities: Jacobian, rows of weights, gradients, symmetry, parameters."""

from typing import NamedTuple

import numpy as np

import sdpa

from ..experiments.growth import Array
from ..tools.estimate import Draws, Estimate, exact
from ..tools.inputs import stream
from .record import Claim, Expect, Measured, draws

STEP = 1e-5
"""Of central differences in float64: their error is of the order of STEP^2 and of eps / STEP."""


def jacobian(seed: int, times: float) -> Measured:
    """`softmax_jacobian` and p_j (delta_jk - p_k) against central differences: largest errors."""
    rng = stream(seed, "jacobian")
    measured: dict[str, Estimate] = {}
    for n, std in ((2, 1.0), (10, 1.0), (10, 8.0), (64, 1.0)):
        z = std * rng.standard_normal((draws(50, times), n))
        weights = sdpa.softmax(z)
        moved = z[:, None, :] + STEP * np.array([1.0, -1])[:, None, None, None] * np.eye(n)
        numeric = (sdpa.softmax(moved[0]) - sdpa.softmax(moved[1])) / (2 * STEP)  # [draw, k, j]
        formula = weights[:, :, None] * (np.eye(n) - weights[:, None, :])
        name = f"n={n} std={std:g}"
        measured[f"formula against differences, {name}"] = exact(abs(formula - numeric).max())
        ours = sdpa.softmax_jacobian(weights)
        measured[f"formula against softmax_jacobian, {name}"] = exact(abs(formula - ours).max())
        diagonal = np.diagonal(ours, axis1=1, axis2=2) - weights * (1 - weights)
        measured[f"diagonal against p(1-p), {name}"] = exact(abs(diagonal).max())
    return measured


def rows_of_weights(seed: int, times: float) -> Measured:
    """Signs, sums and order of weights in float32, scaled and not; a draw is one matrix."""
    rng = stream(seed, "attention-rows")
    count = draws(600, times)
    measured: dict[str, Draws | Estimate] = {}
    for d_k, n in ((64, 10), (64, 64), (1024, 32)):
        query, key = rng.standard_normal((2, count, n, d_k), np.float32)
        for name, scale in (("scaled", None), ("unscaled", 1.0)):
            scores = sdpa.attention_weights(query, key, scale=scale, stage="scores")
            weights = sdpa.attention_weights(query, key, scale=scale)
            order = np.argsort(scores, axis=-1)
            steps = np.diff(np.take_along_axis(weights, order, axis=-1), axis=-1)
            where = f"{name} d_k={d_k} n={n}"
            negative = (weights < 0).mean(axis=(1, 2))
            measured[f"negative weights, {where}"] = Draws(negative, "share")
            sums = weights.sum(axis=-1, dtype=np.float64)
            measured[f"largest error of a sum, {where}"] = exact(abs(sums - 1).max())
            measured[f"pairs out of order, {where}"] = Draws((steps < 0).mean(axis=(1, 2)), "share")
            measured[f"pairs with equal weights, {where}"] = Draws(
                (steps == 0).mean(axis=(1, 2)), "share"
            )
    return measured


def value_width(seed: int, times: float) -> Measured:
    """Attention with d_v other than d_k against p v; a draw is one head."""
    rng = stream(seed, "dv-differs")
    measured: dict[str, Estimate] = {}
    for n, d_k, d_v in ((10, 64, 3), (64, 16, 200), (64, 64, 1)):
        count = draws(30, times)
        query, key = rng.standard_normal((2, count, n, d_k))
        value = rng.standard_normal((count, n, d_v))
        out = sdpa.attention(query, key, value)
        assert out.shape == (count, n, d_v)
        expected = sdpa.attention_weights(query, key) @ value
        error = exact(abs(out - expected).max())
        measured[f"largest error d_k={d_k} d_v={d_v} n={n}"] = error
    return measured


def _loss(query: Array, key: Array, value: Array, grad_out: Array) -> Array:
    out = sdpa.attention(query, key, value, scale=1.0)
    return np.asarray((out * grad_out).sum(axis=(-2, -1)))


def backward(seed: int, times: float) -> Measured:
    """dL/dQ = dL/dS K and dL/dK = (dL/dS)^T Q, S = Q K^T; a draw is one head.

    Against `attention_backward`, and along random directions against central differences of the
    loss.
    """
    rng = stream(seed, "backward")
    measured: dict[str, Draws] = {}
    for n, d_k in ((10, 16), (64, 64)):
        query, key, value, grad_out = rng.standard_normal((4, draws(60, times), n, d_k))
        query /= d_k**0.5  # scores of variance 1
        weights = sdpa.attention_weights(query, key, scale=1.0)
        grad_scores = sdpa.softmax_backward(grad_out @ value.swapaxes(-1, -2), weights)
        formulas = {"dL/dQ": grad_scores @ key, "dL/dK": grad_scores.swapaxes(-1, -2) @ query}
        out, lse = sdpa.attention_forward(query, key, value, scale=1.0)
        ours = sdpa.attention_backward(grad_out, query, key, value, out, lse, scale=1.0)
        for name, target, position in (("dL/dQ", ours.query, 0), ("dL/dK", ours.key, 1)):
            formula = formulas[name]
            assert target is not None
            size = np.linalg.norm(formula, axis=(1, 2))
            error = np.linalg.norm(target - formula, axis=(1, 2)) / size
            measured[f"relative error of {name}, n={n} d_k={d_k}"] = Draws(error)
            direction = rng.standard_normal(query.shape) / (n * d_k) ** 0.5
            losses = []
            for sign in (1, -1):
                operands = [query, key]
                operands[position] = operands[position] + sign * STEP * direction
                losses.append(_loss(operands[0], operands[1], value, grad_out))
            slope = (losses[0] - losses[1]) / (2 * STEP)
            error = abs((formula * direction).sum(axis=(1, 2)) - slope) / size
            measured[f"{name} against differences, n={n} d_k={d_k}"] = Draws(error)
    return measured


def weight_gradient(seed: int, times: float) -> Measured:
    """dL/dW^Q by both expressions against central differences of the loss; a draw is one layer.

    Sizes n = d_model = d_k = 8, the only ones in which dL/dQ X^T exists.
    """
    rng = stream(seed, "weight-grad")
    count, n = draws(40, times), 8
    x, w_query, w_key, value, grad_out = rng.standard_normal((5, count, n, n))
    w_query, w_key = w_query / n, w_key / n**0.5  # x w_query w_key^T x^T of variance 1
    query, key = x @ w_query, x @ w_key
    out, lse = sdpa.attention_forward(query, key, value, scale=1.0)
    grads = sdpa.attention_backward(grad_out, query, key, value, out, lse, scale=1.0)
    assert grads.query is not None
    numeric = np.zeros_like(w_query)
    for i in range(n):
        for j in range(n):
            losses = []
            for sign in (1, -1):
                moved = w_query.copy()
                moved[:, i, j] += sign * STEP
                losses.append(_loss(x @ moved, key, value, grad_out))
            numeric[:, i, j] = (losses[0] - losses[1]) / (2 * STEP)
    size = np.linalg.norm(numeric, axis=(1, 2))
    expressions = {
        "dL/dQ X^T": grads.query @ x.swapaxes(-1, -2),
        "X^T dL/dQ": x.swapaxes(-1, -2) @ grads.query,
    }
    return {
        f"relative error of {name}": Draws(np.linalg.norm(g - numeric, axis=(1, 2)) / size)
        for name, g in expressions.items()
    }


def swap(seed: int, times: float) -> Measured:
    """softmax(K Q^T) against the transpose of softmax(Q K^T); a draw is one pair."""
    rng = stream(seed, "swap")
    measured: dict[str, Draws] = {}
    for n, d_k in ((10, 64), (64, 64), (64, 512)):
        query, key = rng.standard_normal((2, draws(60, times), n, d_k))
        weights = sdpa.attention_weights(query, key)
        swapped = sdpa.attention_weights(key, query)
        difference = np.linalg.norm(swapped - weights.swapaxes(-1, -2), axis=(1, 2))
        measured[f"relative difference, n={n} d_k={d_k}"] = Draws(
            difference / np.linalg.norm(weights, axis=(1, 2))
        )
        measured[f"std of the sums of columns, n={n} d_k={d_k}"] = Draws(
            weights.sum(axis=1).std(axis=1)
        )
        measured[f"difference of mean entropies, n={n} d_k={d_k}"] = Draws(
            sdpa.attention_statistics(query, key).entropy.mean(axis=1)
            - sdpa.attention_statistics(key, query).entropy.mean(axis=1)
        )
    return measured


def noncommute(seed: int, times: float) -> Measured:
    """A = W^Q W^K^T against W^K W^Q^T, for random matrices and for matrices that commute."""
    rng = stream(seed, "noncommute")
    count = draws(200, times)

    def difference(a: Array, b: Array) -> Draws:
        return Draws(np.linalg.norm(a - b, axis=(1, 2)) / np.linalg.norm(a, axis=(1, 2)))

    w_query, w_key = rng.standard_normal((2, count, 64, 16)) / 8
    one, other = w_query @ w_key.swapaxes(1, 2), w_key @ w_query.swapaxes(1, 2)
    # The identity commutes with everything; rotations are not symmetric.
    rotation = np.linalg.qr(rng.standard_normal((count, 16, 16)))[0]
    unit = np.broadcast_to(np.eye(16), rotation.shape)
    # B C^T = D is symmetric, B C is not C B.
    b = rng.standard_normal((count, 16, 16)) + 4 * np.eye(16)
    c = np.linalg.solve(b, np.diag(np.arange(1.0, 17))).swapaxes(1, 2)
    return {
        "relative difference, random": difference(one, other),
        "relative difference of W^K W^Q^T and the transpose": difference(other, one.swapaxes(1, 2)),
        "relative difference, commuting": difference(
            unit @ rotation.swapaxes(1, 2), rotation @ unit
        ),
        "relative difference, not commuting, symmetric product": difference(
            b @ c.swapaxes(1, 2), c @ b.swapaxes(1, 2)
        ),
        "commutator of those, relative": difference(b @ c, c @ b),
    }


def exchange(seed: int, times: float) -> Measured:
    """dL/dK against dL/dQ of the exchanged pair; a draw is one head."""
    rng = stream(seed, "exchange")
    query, key, value, grad_out = rng.standard_normal((4, draws(60, times), 32, 64))
    weights = sdpa.attention_weights(query, key, scale=1 / 8)
    grad = sdpa.softmax_backward(grad_out @ value.swapaxes(-1, -2), weights)

    def for_query(grad: Array, query: Array, key: Array) -> Array:
        return grad @ key

    exchanged = for_query(grad.swapaxes(-1, -2), key, query)
    out, lse = sdpa.attention_forward(query, key, value, scale=1 / 8)
    ours = sdpa.attention_backward(grad_out, query, key, value, out, lse, scale=1 / 8).key
    assert ours is not None
    size = np.linalg.norm(ours, axis=(1, 2))
    columns = np.linalg.norm(grad.sum(axis=1), axis=1) / np.linalg.norm(grad, axis=(1, 2))
    difference = np.linalg.norm(exchanged / 8 - ours, axis=(1, 2)) / size
    return {
        "relative difference after exchange of Q and K": Draws(difference),
        "columns of dL/dS over its size": Draws(columns),
    }


def other_projections(seed: int, times: float) -> Measured:
    """How weights and output change with another W^V, and with another W^K; a draw is a layer."""
    rng = stream(seed, "other projections")
    count = draws(60, times)
    x = rng.standard_normal((count, 32, 64))
    w_query, w_key, w_value, other = rng.standard_normal((4, count, 64, 64)) / 8
    query, key = x @ w_query, x @ w_key
    weights = sdpa.attention_weights(query, key)

    def change(other: Array, one: Array) -> Array:
        return np.asarray(
            np.linalg.norm(other - one, axis=(1, 2)) / np.linalg.norm(one, axis=(1, 2))
        )

    layers = {"W^V": (w_query, w_key, other), "W^K": (w_query, other, w_value)}
    out = sdpa.attention(query, key, x @ w_value)
    measured: dict[str, Draws | Estimate] = {}
    for name, (to_query, to_key, to_value) in layers.items():
        changed = change(sdpa.attention_weights(x @ to_query, x @ to_key), weights)
        # No draw of the values enters the weights: what is exactly 0 is not random.
        figure = f"change of the weights with another {name}"
        measured[figure] = Draws(changed) if changed.any() else exact(0.0)
        changed = change(sdpa.attention(x @ to_query, x @ to_key, x @ to_value), out)
        measured[f"change of the output with another {name}"] = Draws(changed)
    return measured


def parameters(seed: int, times: float) -> Measured:
    """How many numbers each score has gradients for beside queries, keys and values."""
    rng = stream(seed, "dot-no-params")
    measured: dict[str, Estimate] = {}
    for d, h in ((64, 64), (64, 128), (512, 64)):
        query, key, value, grad_out = rng.standard_normal((4, 3, d))
        learned = (rng.standard_normal((d, h)), rng.standard_normal((d, h)), rng.standard_normal(h))
        out, lse = sdpa.attention_forward(query, key, value)
        dot = sdpa.attention_backward(grad_out, query, key, value, out, lse)
        out, lse = sdpa.additive_attention_forward(query, key, value, *learned)
        additive = sdpa.additive_attention_backward(
            grad_out, query, key, value, *learned, None, out, lse
        )
        layer = sdpa.MultiHeadAttention(d, 1, d_k=h, rng=seed).parameters
        projections = layer["w_query"].size + layer["w_key"].size
        where = f"d={d} h={h}"
        measured[f"parameters of the dot product, {where}"] = exact(_beside_operands(dot))
        count = _beside_operands(additive)
        measured[f"parameters of additive attention over 2 d h + h, {where}"] = exact(
            count / (2 * d * h + h)
        )
        # W_a and U_a can stand in the place of W^Q and W^K.
        measured[f"parameters of additive attention beyond W^Q and W^K, {where}"] = exact(
            count - projections
        )
    return measured


def _beside_operands(grads: NamedTuple) -> int:
    found = grads._asdict()
    return sum(
        grad.size
        for name, grad in found.items()
        if grad is not None and name not in ("query", "key", "value")
    )


CLAIMS = (
    Claim(
        id="jacobian",
        claim="The derivative of softmax is dp_j/dz_k = p_j (delta_jk - p_k), with p_j (1 - p_j) "
        "on the diagonal.",
        claim_zh="softmax 的导数为 dp_j/dz_k = p_j (delta_jk - p_k)，对角线上为 p_j (1 - p_j)。",
        expect=tuple(
            Expect(f"{what}, {where}", 0.0, margin)
            for where in ("n=2 std=1", "n=10 std=1", "n=10 std=8", "n=64 std=1")
            for what, margin in (
                ("formula against differences", 1e-8),
                ("formula against softmax_jacobian", 1e-14),
                ("diagonal against p(1-p)", 1e-14),
            )
        ),
        holds="The formula holds at every n and for flat and sharp rows: central differences "
        "agree to {formula against differences, n=10 std=8:.0e}. Note 002 looks only at the "
        "diagonal; the other elements make every row and column sum to 0.",
        law="Differences do not agree with the formula.",
        experiment=jacobian,
    ),
    Claim(
        id="attention-rows",
        claim="Weights are not negative, each row sums to 1, and a larger score has a larger "
        "weight.",
        claim_zh="注意力权重非负，每行之和为 1，且分数越大权重越大。",
        expect=(
            *(
                Expect(f"{what}, {scale} {where}", 0.0, margin)
                for where in ("d_k=64 n=10", "d_k=64 n=64", "d_k=1024 n=32")
                for scale in ("scaled", "unscaled")
                for what, margin in (
                    ("negative weights", (None, 0.05)),
                    ("largest error of a sum", 1e-5),
                    ("pairs out of order", (None, 0.05)),
                )
            ),
        ),
        holds="All three hold in float32. A larger score has a strictly larger weight only as "
        "long as exp does not underflow: without the scale at d_k = 1024, {pairs with equal "
        "weights, unscaled d_k=1024 n=32:.0%} of neighbouring scores have equal weights, nearly "
        "all of them 0.",
        law="One of the three fails.",
        experiment=rows_of_weights,
    ),
    Claim(
        id="dv-differs",
        claim="The width of the values, d_v, may differ from that of queries and keys.",
        claim_zh="值向量的维度 d_v 可以与 d_k 不同。",
        expect=tuple(
            Expect(f"largest error {where}", 0.0, 1e-12)
            for where in ("d_k=64 d_v=3 n=10", "d_k=16 d_v=200 n=64", "d_k=64 d_v=1 n=64")
        ),
        holds="d_v may differ from d_k: outputs of width 1, 3 and 200 agree with the matrix "
        "product to rounding.",
        law="Outputs differ from the matrix product.",
        experiment=value_width,
    ),
    Claim(
        id="backward",
        claim="With S = Q K^T the gradients are dL/dQ = dL/dS K and dL/dK = (dL/dS)^T Q.",
        claim_zh="设 S = Q K^T，则 dL/dQ = dL/dS K，dL/dK = (dL/dS)^T Q。",
        expect=tuple(
            Expect(name.format(target, where), 0.0, margin)
            for where in ("n=10 d_k=16", "n=64 d_k=64")
            for target in ("dL/dQ", "dL/dK")
            for name, margin in (
                ("relative error of {}, {}", 1e-12),
                ("{} against differences, {}", 1e-7),
            )
        ),
        holds="Both formulas hold to rounding; if the score is scale Q K^T, both gain the factor "
        "scale.",
        law="The gradients differ from these formulas.",
        experiment=backward,
    ),
    Claim(
        id="weight-grad",
        claim="With Q = X W^Q the gradient of the projection is dL/dW^Q = dL/dQ X^T.",
        claim_zh="设 Q = X W^Q，则投影矩阵的梯度为 dL/dW^Q = dL/dQ X^T。",
        expect=(
            Expect(
                "relative error of dL/dQ X^T",
                0.0,
                1e-6,
                law=0.0,
                law_figure="relative error of X^T dL/dQ",
            ),
        ),
        holds="dL/dQ X^T is the gradient.",
        law="It is X^T dL/dQ, (d_model, n) times (n, d_k). dL/dQ X^T multiplies (n, d_k) by "
        "(d_model, n), which is defined only if d_k = d_model, and even then has nothing to do "
        "with the gradient (relative error {relative error of dL/dQ X^T}).",
        experiment=weight_gradient,
    ),
    Claim(
        id="swap",
        claim="softmax(K Q^T) is not the transpose of softmax(Q K^T): normalising rows breaks the "
        "symmetry of Q and K.",
        claim_zh="softmax(K Q^T) 不是 softmax(Q K^T) 的转置：按行归一化打破了 Q 与 K 的对称性。",
        # A tenth of the matrix is a difference that nobody would call rounding.
        expect=tuple(
            Expect(f"relative difference, n={n} d_k={d}", 0.1, (0, None))
            for n, d in ((10, 64), (64, 64), (64, 512))
        ),
        holds="The two matrices differ by {relative difference, n=64 d_k=64:.0%} of their size at "
        "n = 64, since the sums of columns scatter around 1 by {std of the sums of columns, n=64 "
        "d_k=64:.2f}. For random Q and K they are alike in distribution (mean entropies differ by "
        "{difference of mean entropies, n=64 d_k=64}).",
        law="The two matrices are equal.",
        experiment=swap,
    ),
    Claim(
        id="instances-differ",
        claim="The matrices W^Q W^K^T and W^K W^Q^T of one initialisation differ.",
        claim_zh="同一次初始化得到的 W^Q W^K^T 与 W^K W^Q^T 不相等。",
        expect=(Expect("relative difference, random", 0.1, (0, None)),),
        holds="They differ by {relative difference, random} of their size: in high dimension "
        "W^Q W^K^T and its transpose are nearly orthogonal.",
        law="They differ by {relative difference, random} of their size.",
        experiment=noncommute,
    ),
    Claim(
        id="noncommute",
        claim="They differ because the product of matrices does not commute.",
        claim_zh="W^Q W^K^T 与 W^K W^Q^T 不同的原因是矩阵乘法不满足交换律。",
        # If commuting were the reason, matrices that commute would give no difference,
        # and matrices that do not would give one.
        expect=(
            Expect("relative difference, commuting", 0.0, 0.1, law=2**0.5, law_margin=0.1),
            Expect(
                "relative difference, not commuting, symmetric product",
                0.1,
                (0, None),
                law=0.0,
                law_margin=1e-9,
            ),
        ),
        holds="They differ only where the factors do not commute.",
        law="One is the transpose of the other, not the product in the other order: they are equal "
        "exactly when W^Q W^K^T is symmetric. The identity and a rotation commute and give a "
        "difference of {relative difference, commuting:.2f}; matrices with a symmetric product "
        "that do not commute give none.",
        experiment=noncommute,
    ),
    Claim(
        id="grads-structure",
        claim="dL/dQ = dL/dS K and dL/dK = (dL/dS)^T Q are completely different in structure.",
        claim_zh="dL/dQ = dL/dS K 与 dL/dK = (dL/dS)^T Q 结构完全不同。",
        expect=(
            Expect(
                "relative difference after exchange of Q and K",
                0.1,
                (0, None),
                law=0.0,
                law_margin=1e-9,
            ),
        ),
        holds="No exchange turns one into the other.",
        law="They are one formula: with Q and K exchanged and dL/dS transposed, the first is the "
        "second to {relative difference after exchange of Q and K:.0e}. What differs is dL/dS "
        "itself, which is not symmetric, because rows are normalised and columns are not: its rows "
        "sum to 0 and its columns to {columns of dL/dS over its size:.2f} of its size.",
        experiment=exchange,
    ),
    Claim(
        id="value-index",
        claim="W^V projects the input into a space of keys and indices.",
        claim_zh="W^V 被训练来将输入投影到“键/索引”空间。",
        # An index takes part in the choice: another W^V would choose otherwise.
        expect=(
            Expect(
                "change of the weights with another W^V", 0.1, (0, None), law=0.0, law_margin=0.01
            ),
        ),
        holds="Another W^V changes the weights.",
        law="It is what the note says of W^K, word by word; a few lines earlier it gives W^V the "
        "content. Values take no part in the choice: with another W^V the output changes by "
        "{change of the output with another W^V:.0%} of its size and the weights by {change of "
        "the weights with another W^V:.0f}. With another W^K they change by {change of the "
        "weights with another W^K:.0%}.",
        experiment=other_projections,
    ),
    Claim(
        id="dot-no-params",
        claim="The dot product is a score without parameters; additive attention brings W_a, U_a "
        "and v_a.",
        claim_zh="点积打分不引入任何参数；加性注意力则要额外学习 W_a、U_a 和 v_a。",
        expect=tuple(
            Expect(f"{what}, {where}", number, 0.0)
            for where in ("d=64 h=64", "d=64 h=128", "d=512 h=64")
            for what, number in (
                ("parameters of the dot product", 0.0),
                ("parameters of additive attention over 2 d h + h", 1.0),
            )
        ),
        holds="Given queries and keys, the dot product has no parameters and additive attention 2 "
        "d h + h, 8256 at d = h = 64. Counted from the input of a layer there is hardly a "
        "difference: W_a and U_a take the place of W^Q and W^K, and additive attention has "
        "{parameters of additive attention beyond W^Q and W^K, d=64 h=64:.0f} more parameters, "
        "those of v_a.",
        law="The counts are {parameters of the dot product, d=64 h=64:.0f} and 2 d h + h.",
        experiment=parameters,
    ),
)
