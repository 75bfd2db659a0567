"""Functions of the user on scores and masks, traced into programs that the core runs.

=================== ============================================================================
_operations.py      the core's operations: kinds, NumPy functions
_graph.py           expressions, in which equal ones are one node
_functions.py       NumPy's functions, with its rules for mixed kinds
_values.py          what the function sees: a value per pair, arrays to index
_closures.py        arrays that the function captures
_trace.py           from the function to its graph
_derivatives.py     derivatives of expressions
_lowering.py        expressions in the core's operations only
_codes.py           from expressions to bytes: order, registers
_variants.py        what the core computes in each pass
_text.py            how a program shows itself
_program.py         programs, their cache, what the core asks for
_composed.py        expressions by the functions of another library
_places.py          functions on a part of a call
=================== ============================================================================
"""

from sdpa._programs._closures import FOREIGN, Foreign
from sdpa._programs._composed import Library, composed_score
from sdpa._programs._places import beyond_keys, of_part
from sdpa._programs._program import (
    Program,
    given_arrays,
    lifted,
    mask_program,
    score_program,
)
from sdpa._programs._program import prepare as _prepare

__all__ = [
    "FOREIGN",
    "Foreign",
    "Library",
    "Program",
    "_prepare",
    "beyond_keys",
    "composed_score",
    "given_arrays",
    "lifted",
    "mask_program",
    "of_part",
    "score_program",
]
