"""Refusals of functions of the user, when they are traced: what it is, and what it does."""

import numpy as np

import sdpa


def branching(*args):
    return args[0] if args[0] > 0 else 1


def whole(*args):
    return args[0] + args[-1]


def sorting(*args):
    return np.sort(args[0])


def rows(argument, own, arrays):
    """Those of score_program or mask_program, whose functions have parameters `own`."""
    first = own.partition(",")[0]
    text = f"{first} > 0.0" if first == "score" else f"{first} > 0"
    return {
        "no function": (
            TypeError,
            f"{argument}: expected a function of ({own}, *args), got 3",
            {argument: 3},
        ),
        "no tuple": (
            TypeError,
            f"{arrays}: expected a tuple of arrays, got 3; put it in a tuple",
            {arrays: 3},
        ),
        "too few parameters": (
            TypeError,
            f"{argument}: expected a function of ({own}) and of the 1 arrays in {arrays}, got "
            f"<lambda>(b); pass an array in {arrays} for each further parameter",
            {argument: lambda b: b},
        ),
        "a branch": (
            TypeError,
            f"{argument}: expected one expression for all pairs in branching, got the truth of "
            f"{text}; write np.where(condition, a, b) for if, & | ~ for and, or, not, (a < b) & "
            "(b < c) for a < b < c, np.maximum and np.minimum for max and min",
            {argument: branching},
        ),
        "a whole array": (
            TypeError,
            f"{argument}: expected one value per pair in whole, got args[{own.count(',') + 1}]; "
            "give an index for each of its axes",
            {argument: whole},
        ),
        "an unknown function": (
            TypeError,
            f"{argument}: expected functions of NumPy that programs have in sorting, got "
            f"np.sort({first}); see help(sdpa.score_program) for their list",
            {argument: sorting},
        ),
    }


TABLE = [
    (sdpa.score_program, rows("score_mod", "score, b, h, q, k", "score_args")),
    (
        sdpa.score_program,
        {
            "a boolean": (
                TypeError,
                "score_mod: expected a score per pair as result in <lambda>, got q > k; write "
                "np.where(mask, score, -np.inf)",
                {"score_mod": lambda score, b, h, q, k, table: q > k},
            )
        },
    ),
    (sdpa.mask_program, rows("mask_mod", "b, h, q, k", "mask_args")),
    (
        sdpa.mask_program,
        {
            "an integer": (
                TypeError,
                "mask_mod: expected a boolean per pair as result in <lambda>, got q - k; "
                "write != 0",
                {"mask_mod": lambda b, h, q, k, table: q - k},
            )
        },
    ),
]
