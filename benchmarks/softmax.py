"""Works of softmax and its relatives, which read and write more than they compute."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

import sdpa
from benchmarks.contenders import Contender, Contenders, Setting, Work, check

RELATIVES: dict[str, Callable[..., Any]] = {
    "log_softmax": sdpa.log_softmax,
    "logsumexp": sdpa.logsumexp,
    "softmax_backward": sdpa.softmax_backward,
}


def softmax(setting: Setting) -> Iterator[Work]:
    """Softmax of long, short and single rows; its relatives on long ones."""
    for shape in ((1000, 1000), (64, 8192), (1000000,), (100000, 10), (10,)):

        def build(shape: tuple[int, ...] = shape) -> Contenders:
            a = np.random.default_rng(0).standard_normal(shape, np.float32)
            mine = Contender(lambda: sdpa.softmax(a), bytes=2.0 * a.nbytes)
            found = {"sdpa": mine, "copy": mine._replace(call=a.copy)}
            for peer in setting.peers:
                call = peer.softmax(a)
                if call is not None:
                    check(peer.name, peer.result(call), sdpa.softmax(a))
                    found[peer.name] = mine._replace(call=call)
            return found

        yield Work("softmax", str(shape), build)
    for name, shape in product(RELATIVES, ((1000, 1000), (64, 8192))):
        yield Work("softmax", f"{name} {shape}", lambda n=name, s=shape: _relative(setting, n, s))


def _relative(setting: Setting, name: str, shape: tuple[int, int]) -> Contenders:
    """One of RELATIVES beside a copy of one array, each with the bytes that it moves."""
    a, grad = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    arrays = (grad, sdpa.softmax(a)) if name == "softmax_backward" else (a,)
    function = RELATIVES[name]
    expected = function(*arrays)
    moved = float(sum(each.nbytes for each in arrays) + expected.nbytes)
    mine = Contender(lambda: function(*arrays), bytes=moved)
    found = {"sdpa": mine, "copy": Contender(a.copy, bytes=2.0 * a.nbytes)}
    for peer in setting.peers:
        call = peer.relative(name, *arrays)
        if call is not None:
            check(peer.name, peer.result(call), expected)
            found[peer.name] = mine._replace(call=call)
    return found
