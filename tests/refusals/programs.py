"""Functions of scores and of masks that are no programs, and arguments that do not fit them."""

from types import SimpleNamespace

import numpy as np

import sdpa

ONES = np.ones((4, 9))
HOLDER = SimpleNamespace(table=ONES)
TRUTH = (
    "write np.where(condition, a, b) for if, & | ~ for and, or, not, (a < b) & (b < c) for "
    "a < b < c, np.maximum and np.minimum for max and min"
)
HELP = "see help(sdpa.score_program) for their list"
AXES = "give an index for each of its axes"
FUNCTIONS = "score_mod: expected functions of NumPy that programs have in f, got "
HIDDEN = (
    "score_mod: expected arrays that are arguments, or that the function's closure, globals or "
    "defaults name in f, got h as an index or element of "
)


def named(function):
    """The function under the name that the messages below have."""
    function.__name__ = function.__qualname__ = "f"
    return function


def score(function, text, *args):
    """A row: a function of scores and the message about it."""
    return TypeError, text, {"score_mod": named(function), "score_args": args}


def mask(function, text, *args):
    return TypeError, text, {"mask_mod": named(function), "mask_args": args}


def branch(score, b, h, q, k):
    if q > k:
        return score
    return -score


def loop(score, b, h, q, k):
    for _ in score:
        pass


def local(score, b, h, q, k):
    return score + np.arange(9.0)[h]


def unhashable(score, b, h, q, k):
    return {score: 1}[score]


SCORES = {
    "if": score(
        branch,
        f"score_mod: expected one expression for all pairs in f, got the truth of q > k; {TRUTH}",
    ),
    "or": score(
        lambda score, b, h, q, k: score if (k < 3 or q < k) else 0,
        f"score_mod: expected one expression for all pairs in f, got the truth of k < 3; {TRUTH}",
    ),
    "max": score(
        lambda score, b, h, q, k: max(score, 0.0),
        "score_mod: expected one expression for all pairs in f, got the truth of score < 0.0; "
        + TRUTH,
    ),
    "loop": score(
        loop, "score_mod: expected no loop over a value per pair in f, got iteration over score"
    ),
    "len": score(
        lambda score, b, h, q, k: len(q - k),
        "score_mod: expected a value per pair in f, got len(q - k); take the len of an array",
    ),
    "float": score(
        lambda score, b, h, q, k: float(2 * score),
        "score_mod: expected a value per pair and functions of NumPy in f, got one number made of "
        "2.0 * score; write np.exp for math.exp, .astype(float) for float",
    ),
    "int": score(
        lambda score, b, h, q, k: int(score),
        "score_mod: expected a value per pair in f, got int(score); write .astype(int)",
    ),
    "round": score(
        lambda score, b, h, q, k: round(score),
        "score_mod: expected functions of NumPy in f, got round(score); write np.floor(x + 0.5)",
    ),
    "function": score(
        lambda score, b, h, q, k: np.sin(score + q), f"{FUNCTIONS}np.sin(score + float(q)); {HELP}"
    ),
    "reduction": score(
        lambda score, b, h, q, k: np.add.reduce(score), f"{FUNCTIONS}np.add.reduce(score); {HELP}"
    ),
    "sum": score(lambda score, b, h, q, k: np.sum(score), f"{FUNCTIONS}np.sum(score); {HELP}"),
    "attribute": score(lambda score, b, h, q, k: score.mean(), f"{FUNCTIONS}(score).mean; {HELP}"),
    "operator": score(
        lambda score, b, h, q, k: score @ score,
        "score_mod: expected operators and functions of NumPy on one value per pair in f, got "
        "TypeError: unsupported operand type(s) for @: 'Traced' and 'Traced'",
    ),
    "hash": score(
        unhashable,
        "score_mod: expected operators and functions of NumPy on one value per pair in f, got "
        "TypeError: unhashable type: 'Traced'",
    ),
    "option": score(
        lambda score, b, h, q, k: np.exp(score, dtype=np.float32),
        "score_mod: expected np.exp without options in f, got dtype=<class 'numpy.float32'>",
    ),
    "one condition": score(
        lambda score, b, h, q, k: np.where(q > k),
        "score_mod: expected np.where with three arguments in f, got 1; "
        "write np.where(condition, a, b)",
    ),
    "choices": score(
        lambda score, b, h, q, k: np.select([q > k], [score, 0.0]),
        "score_mod: expected np.select with a choice for each condition in f, got 1 conditions and "
        "2 choices",
    ),
    "type": score(
        lambda score, b, h, q, k: score.astype(complex),
        "score_mod: expected a type of floats, integers or booleans in f, got "
        "(score).astype(<class 'complex'>)",
    ),
    "complex": score(
        lambda score, b, h, q, k: score * 1j,
        "score_mod: expected numbers and values per pair in f, got 1j",
    ),
    "whole array": score(
        lambda score, b, h, q, k: score + ONES,
        f"score_mod: expected one value per pair in f, got ONES; {AXES}",
    ),
    "row": score(
        lambda score, b, h, q, k, table: score * table[h],
        f"score_mod: expected one value per pair in f, got table[h, :]; {AXES}",
        ONES,
    ),
    "row in a function": score(
        lambda score, b, h, q, k, table: np.maximum(table[:, q], score),
        f"score_mod: expected one value per pair in f, got table[:, q] in np.maximum; {AXES}",
        ONES,
    ),
    "array method": score(
        lambda score, b, h, q, k: score - ONES.max(),
        f"score_mod: expected one value per pair in f, got ONES.max; {AXES}",
    ),
    "too many indices": score(
        lambda score, b, h, q, k: ONES[h, q, k],
        "score_mod: expected at most 2 indices of ONES in f, got 3",
    ),
    "index": score(
        lambda score, b, h, q, k: ONES[h, q / 2],
        "score_mod: expected integers as indices in f, got float(q) / 2.0 as an index of ONES; "
        "write .astype(int)",
    ),
    "slice": score(
        lambda score, b, h, q, k: ONES[h, 1:],
        f"score_mod: expected one integer per axis in f, got slice(1, None, None) as an index of "
        f"ONES; {AXES}",
    ),
    "constant index": (
        IndexError,
        "score_mod: expected indices below 9 in f, got 9 as an index of ONES",
        {"score_mod": named(lambda score, b, h, q, k: ONES[h, 9]), "score_args": ()},
    ),
    "array of an object": score(
        lambda score, b, h, q, k: score + HOLDER.table[h, q],
        f"{HIDDEN}HOLDER.table; pass it in score_args",
    ),
    "array of its own": score(local, f"{HIDDEN}another array; pass it in score_args"),
    "division": score(
        lambda score, b, h, q, k: score // 2,
        "score_mod: expected integers around // and % in f, got score // 2; "
        "write np.floor(a / b), a - b * np.floor(a / b)",
    ),
    "bits": score(
        lambda score, b, h, q, k: score * (score & 1),
        "score_mod: expected integers or booleans around &, | and ^ in f, got score & 1; "
        "write parentheses: (a < b) & c",
    ),
    "inverse": score(
        lambda score, b, h, q, k: ~score,
        "score_mod: expected an integer or a boolean behind ~ in f, got score; compare it first",
    ),
    "shift": score(
        lambda score, b, h, q, k: q << 64,
        "score_mod: expected shifts by 0 to 63 in f, got q << 64",
    ),
    "difference of booleans": score(
        lambda score, b, h, q, k: (q > k) - (k > 1),
        "score_mod: expected a number in f, got the boolean q > k; "
        "write ^ or np.where(condition, 1, 0)",
    ),
    "power": score(
        lambda score, b, h, q, k: q**k,
        "score_mod: expected a constant as base (a float above 0, or 2) or exponent of ** in f, "
        "got q ** k; write np.exp(exponent * np.log(base))",
    ),
    "large integer": score(
        lambda score, b, h, q, k: score + 2**70 * q,
        "score_mod: expected integers that fit in 64 bits in f, got 1180591620717411303424",
    ),
    "integer of infinity": score(
        lambda score, b, h, q, k: score + np.where(q < 0, np.inf, np.inf).astype(int),
        "score_mod: expected a finite number to make an integer of in f, got inf",
    ),
    "negative boolean": score(
        lambda score, b, h, q, k: score * -(q > k),
        "score_mod: expected a number behind - in f, got the boolean q > k; write ~",
    ),
    "shifted float": score(
        lambda score, b, h, q, k: score << 1,
        "score_mod: expected integers around << and >> in f, got score << 1",
    ),
    "index of a value": score(
        lambda score, b, h, q, k: (score + q)[0],
        "score_mod: expected an array to index in f, got (score + float(q))[...]; it has one value "
        "per pair",
    ),
    "index of a value by a value": score(
        lambda score, b, h, q, k: score[h],
        "score_mod: expected an array to index in f, got (score)[...]; it has one value per pair",
    ),
    "index of a value by an array": score(
        lambda score, b, h, q, k: score[np.arange(2)],
        "score_mod: expected an array to index in f, got (score)[...]; it has one value per pair",
    ),
    "index of a number": score(
        lambda score, b, h, q, k, slope: score * slope[h],
        "score_mod: expected an array to index in f, got (slope)[...]; it has one value per pair",
        np.ones(()),
    ),
    "function of an array": score(
        lambda score, b, h, q, k, table: score + np.sum(table),
        f"score_mod: expected one value per pair in f, got table in np.sum; {AXES}",
        ONES,
    ),
    "arithmetic of an array": score(
        lambda score, b, h, q, k, table: score + (2 * table)[h, q],
        f"score_mod: expected one value per pair in f, got table in arithmetic; {AXES}",
        ONES,
    ),
    "truth of an array": score(
        lambda score, b, h, q, k, table: score if table else 0,
        f"score_mod: expected one value per pair in f, got the truth of table; {AXES}",
        ONES,
    ),
    "array as a whole": score(
        lambda score, b, h, q, k, table: score + np.asarray(table)[h, q],
        f"score_mod: expected one value per pair in f, got table as a whole; {AXES}",
        ONES,
    ),
    "function of an element": score(
        lambda score, b, h, q, k, table: np.sin(table[h, q] ** 1.5 * score),
        f"{FUNCTIONS}np.sin((table[h, q] ** 1.5) * score); {HELP}",
        ONES,
    ),
    "long expression": score(
        lambda score, b, h, q, k: np.sin(sum(score * n for n in range(2, 40))),
        f"{FUNCTIONS}np.sin(((((((... + ...) + (score * 34.0) ...  (score * 38.0)) + (sc); {HELP}",
    ),
    "option of clip": score(
        lambda score, b, h, q, k: np.clip(score, 0, 1, dtype=float),
        "score_mod: expected np.clip without options in f, got dtype=<class 'float'>",
    ),
    "boolean result": score(
        lambda score, b, h, q, k: q >= k,
        "score_mod: expected a score per pair as result in f, got q >= k; "
        "write np.where(mask, score, -np.inf)",
    ),
    "no result": score(
        lambda score, b, h, q, k: None,
        "score_mod: expected a score per pair as result in f, got None",
    ),
    "parameters": score(
        lambda score, b, h, q: score,
        "score_mod: expected a function of (score, b, h, q, k), got f(score, b, h, q); "
        "pass an array in score_args for each further parameter",
    ),
    "arrays": score(
        lambda score, b, h, q, k, table: score,
        "score_mod: expected a function of (score, b, h, q, k) and of the 2 arrays in score_args, "
        "got f(score, b, h, q, k, table); pass an array in score_args for each further parameter",
        ONES,
        ONES,
    ),
    "type of an array": score(
        lambda score, b, h, q, k, table: score,
        "score_mod: expected arrays of floats, integers or booleans in f, got table of type "
        "complex128",
        ONES * 1j,
    ),
    "no function": (
        TypeError,
        "score_mod: expected a function of (score, b, h, q, k, *args), got 3",
        {"score_mod": 3},
    ),
    "no tuple": (
        TypeError,
        "score_args: expected a tuple of arrays, got 3; put it in a tuple",
        {"score_args": 3},
    ),
}
MASKS = {
    "chain": mask(
        lambda b, h, q, k: 0 < q < k,
        f"mask_mod: expected one expression for all pairs in f, got the truth of q > 0; {TRUTH}",
    ),
    "integer result": mask(
        lambda b, h, q, k: q - k,
        "mask_mod: expected a boolean per pair as result in f, got q - k; write != 0",
    ),
    "no function": (
        TypeError,
        "mask_mod: expected a function of (b, h, q, k, *args), got None",
        {"mask_mod": None},
    ),
}

TABLE = [(sdpa.score_program, SCORES), (sdpa.mask_program, MASKS)]
