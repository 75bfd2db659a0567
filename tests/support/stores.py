"""Stores that misbehave, for tests in processes, which import them from here."""

import os
import signal
from pathlib import Path


class Store:
    """Another store, whose first read in any process does something else once."""

    def __init__(self, inner, flag):
        self.inner, self.flag = inner, Path(flag)
        self.shape, self.dtype = inner.shape, inner.dtype

    def __getitem__(self, index):
        if any(part.start != part.stop for part in index) and self.first():
            self.misbehave()
        return self.inner[index]

    def first(self):
        """Whether this is the first call in all processes."""
        try:
            self.flag.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def misbehave(self):
        raise OSError("the store failed")


class Killing(Store):
    """Kills the process that reads first, as a machine that runs out of memory does."""

    def misbehave(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Broken(Store):
    """Fails wherever the last quarter is read."""

    def __getitem__(self, index):
        if (index[-2].stop or 0) > 3 * self.shape[-2] // 4:
            raise OSError("the store is broken")
        return self.inner[index]
