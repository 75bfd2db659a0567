"""Works of softmax and its relatives, which read and write more than they compute."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

import sdpa
from benchmarks.contenders import Contender, Contenders, Setting, Work, check

FAMILY: dict[str, Callable[..., Any]] = {
    "softmax": sdpa.softmax,
    "log_softmax": sdpa.log_softmax,
    "logsumexp": sdpa.logsumexp,
    "softmax_backward": sdpa.softmax_backward,
}
CLASSES = ((1, 3, 65536), (1, 21, 65536), (1, 150, 4096))
"""Shapes whose second axis is reduced: few and many classes of the pixels of an image."""


def softmax(setting: Setting) -> Iterator[Work]:
    """Softmax of long, short and single rows, its relatives on long ones, all along axis 1."""
    for shape in ((1000, 1000), (64, 8192), (1000000,), (100000, 10), (10,)):
        yield Work("softmax", str(shape), lambda s=shape: _along(setting, "softmax", s, -1))
    for name, shape in product(
        [name for name in FAMILY if name != "softmax"], [(1000, 1000), (64, 8192)]
    ):
        yield Work("softmax", f"{name} {shape}", lambda n=name, s=shape: _along(setting, n, s, -1))
    for name, shape in product(FAMILY, CLASSES):
        title = f"axis 1, {name} {shape}"
        yield Work("softmax", title, lambda n=name, s=shape: _along(setting, n, s, 1))


def _along(setting: Setting, name: str, shape: tuple[int, ...], axis: int) -> Contenders:
    """One of FAMILY beside a copy of one array, each with the bytes that it moves."""
    a, grad = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    arrays = (grad, sdpa.softmax(a, axis=axis)) if name == "softmax_backward" else (a,)
    function = FAMILY[name]
    expected = function(*arrays, axis=axis)
    moved = float(sum(each.nbytes for each in arrays) + expected.nbytes)
    mine = Contender(lambda: function(*arrays, axis=axis), bytes=moved)
    found = {"sdpa": mine, "copy": Contender(a.copy, bytes=2.0 * a.nbytes)}
    for peer in setting.peers:
        call = (
            peer.softmax(a, axis) if name == "softmax" else peer.relative(name, *arrays, axis=axis)
        )
        if call is not None:
            check(peer.name, peer.result(call), expected)
            found[peer.name] = mine._replace(call=call)
    return found
