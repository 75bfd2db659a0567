"""Functions of the user for the fuzzer of calls: random expressions, whose results no rounding can
change by much, and seldom ones that are refused."""

import numpy as np

TABLE, TYPES = (3, 7), (11,)
BINARY = [np.add, np.subtract, np.multiply, np.maximum, np.minimum]
WHOLE = [np.add, np.subtract, np.multiply, np.maximum, np.minimum, np.bitwise_and, np.bitwise_xor]
RELATIONS = [np.less, np.less_equal, np.equal, np.not_equal, np.greater]
# Of one value between -1 and 1.
SMOOTH = [
    np.tanh, np.exp, np.square, np.abs, np.negative, np.expm1, lambda x: np.log(1.5 + x),
    lambda x: np.sqrt(1.5 + x), lambda x: x / (1.5 + x), lambda x: x**3,
    lambda x: np.log1p(np.square(x)),
    lambda x: np.clip(x, -0.5, 0.5), lambda x: 1 / (2 + x),
]  # fmt: skip
# Of (b, h, q, k).
PAIR = [lambda *pair, i=i: pair[i] for i in range(4)]


def integer(draw, depth):
    """Return a function of (b, h, q, k, types): a small integer."""
    if depth == 0 or draw.rarely(4):
        if draw.rarely(4):
            number = draw.choice([0, 1, 2, -3, 7, 64])
            return lambda *_: number
        own = draw.choice(PAIR)
        return lambda b, h, q, k, types: own(b, h, q, k)
    one, other = (integer(draw, depth - 1) for _ in range(2))
    match draw.integer(0, 4):
        case 0:
            by = draw.choice([1, 2, 3, 16, -5])
            return lambda *given: one(*given) // by
        case 1:
            return lambda *given: given[4][(one(*given) + other(*given)) % TYPES[0]]
        case 2:
            condition = boolean(draw, depth - 1)
            return lambda *given: np.where(condition(*given), one(*given), other(*given))
        case _:
            f = draw.choice(WHOLE)
            return lambda *given: f(one(*given), other(*given)) % 64


def boolean(draw, depth):
    """Return a function of (b, h, q, k, types): a boolean."""
    if draw.rarely(6):  # a window: of positions, or of what stands there
        one, other, most = integer(draw, 1), integer(draw, 1), draw.choice([0, 1, 5, 40])
        return lambda *given: np.abs(one(*given) - other(*given)) <= most
    if depth == 0 or draw.rarely(2):
        relation, one, other = draw.choice(RELATIONS), integer(draw, 1), integer(draw, 1)
        return lambda *given: relation(one(*given), other(*given))
    one, other = (boolean(draw, depth - 1) for _ in range(2))
    f = draw.choice([np.logical_and, np.logical_or, np.logical_xor])
    return lambda *given: f(one(*given), ~other(*given))


def real(draw, depth):
    """Return a function of (score, b, h, q, k, table, types): a float between -1 and 1."""
    if depth == 0 or draw.rarely(4):
        match draw.integer(0, 3):
            case 0:
                return lambda s, *_: np.tanh(s)
            case 1:
                row, column = integer(draw, 1), integer(draw, 1)
                checked = not draw.rarely(40)  # else seldom in range

                def element(s, b, h, q, k, table, types):
                    at = column(b, h, q, k, types)
                    at = at % TABLE[1] if checked else at
                    return np.tanh(table[row(b, h, q, k, types) % TABLE[0], at])

                return element
            case 2:
                return lambda s, b, h, q, k, table, types: (k - q) / (1 + np.abs(k - q))
            case _:
                number = integer(draw, 1)
                return lambda s, b, h, q, k, table, types: (number(b, h, q, k, types) % 8) / 8
    one, other = (real(draw, depth - 1) for _ in range(2))
    match draw.integer(0, 2):
        case 0:
            f = draw.choice(SMOOTH)
            return lambda *given: np.tanh(f(one(*given)))
        case 1:
            condition = boolean(draw, 1)

            def chosen(s, b, h, q, k, table, types):
                given = s, b, h, q, k, table, types
                return np.where(condition(b, h, q, k, types), one(*given), other(*given))

            return chosen
        case _:
            f = draw.choice(BINARY)
            return lambda *given: np.tanh(f(one(*given), other(*given)))


def score(draw):
    """Return (score_mod, score_args)."""
    change, hides = real(draw, draw.integer(0, 4)), draw.rarely(4)
    hidden = boolean(draw, 1)

    def function(s, b, h, q, k, table, types):
        value = s + change(s, b, h, q, k, table, types)
        return np.where(hidden(b, h, q, k, types), -np.inf, value) if hides else value

    table = draw.array(TABLE, draw.choice([np.float32, np.float64, np.float16]))
    return function, (table, draw.rng.integers(-3, 9, TYPES))


def mask(draw):
    """Return (mask_mod, mask_args)."""
    return boolean(draw, draw.integer(0, 3)), (draw.rng.integers(-3, 9, TYPES),)


def refused(draw):
    """Return a function that no call can run, or something that is none."""
    return draw.choice(
        [
            lambda s, *_: s if s > 0 else -s,
            lambda s, *_: np.sort(s),
            lambda *_: "x",
            lambda: 0,
            lambda s, *_: s + np.ones(3),
            lambda s, *rest: rest[-1],
            3,
            np.tanh,
            object(),
        ]
    )


def options_of(draw):
    """Return score_mod, mask_mod and their arguments, some or none of them."""
    options = {}
    if draw.rarely(4):
        options["score_mod"], options["score_args"] = score(draw)
    if draw.rarely(4):
        options["mask_mod"], options["mask_args"] = mask(draw)
    for name in ("score", "mask"):
        if f"{name}_mod" in options and draw.rarely(20):
            options[f"{name}_mod"] = refused(draw)
        if f"{name}_args" in options and draw.rarely(20):
            wrong = [(), None, 3, [np.ones(2)], (np.ones(TABLE), "x"), (None, None)]
            options[f"{name}_args"] = draw.choice(wrong)
    return options
