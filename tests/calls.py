"""A call that works, to be changed in one place, and its message when it does not."""

import numpy as np
import pytest

import sdpa

F32 = np.float32


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def operands():
    """Lq = 5, Lk = 7, d_k = 8, d_v = 3; two batch entries, four heads."""
    return {"query": ones(2, 4, 5, 8), "key": ones(2, 4, 7, 8), "value": ones(2, 4, 7, 3)}


def backward_operands():
    x = operands()
    out, lse = sdpa.attention_forward(**x)
    return {"grad_out": ones(2, 4, 5, 3), **x, "out": out, "lse": lse}


def message(exception, function, *args, **kwargs):
    with pytest.raises(exception) as caught:
        function(*args, **kwargs)
    assert caught.type is exception
    return str(caught.value)


FLOATS = "float16, bfloat16, float32 or float64"
