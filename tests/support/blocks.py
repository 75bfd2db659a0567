"""Stores that note what is read of them, and operands, for the tests of sdpa.blocks."""

import threading

import numpy as np
from support.helpers import normal

N_Q, N_K, D_K, D_V = 37, 53, 8, 5


class Store:
    """An array that is only read by slices, each of which is noted."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.read, self.threads = [], set()

    def __getitem__(self, index):
        assert all(isinstance(part, slice) for part in index)
        assert len(index) == len(self.shape)
        self.read.append(index)
        self.threads.add(threading.get_ident())
        return self.array[index].copy()

    def __array__(self, *args, **kwargs):
        raise AssertionError("a store was read as a whole")

    def rows(self, axis=-2):
        """(start, stop) of all reads that were not empty."""
        parts = [index[axis] for index in self.read]
        return [(part.start, part.stop) for part in parts if part.start != part.stop]


def tensors(rng, dtype=np.float64, lead=(2, 4), key_lead=None):
    key_lead = lead if key_lead is None else key_lead
    return {
        "query": normal(rng, (*lead, N_Q, D_K), dtype),
        "keys": normal(rng, (*key_lead, N_K, D_K), dtype),
        "values": normal(rng, (*key_lead, N_K, D_V), dtype),
    }
