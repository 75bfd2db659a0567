"""Stores that misbehave, for tests in processes, which import them from here."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

from zarr.storage import LocalStore


def kill_worker():
    """As happens on a machine that runs out of memory. Never the process of the tests."""
    assert multiprocessing.parent_process() is not None
    os.kill(os.getpid(), signal.SIGKILL)


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
    """Kills a process that reads once two chunks of the result have been written."""

    def __init__(self, inner, flag, result):
        super().__init__(inner, flag)
        self.result = result

    def written(self):
        return [str(path) for path in Path(self.result, "c").glob("*/*/?")]

    def first(self):
        return len(self.written()) >= 2 and super().first()

    def misbehave(self):
        self.flag.write_text(json.dumps(self.written()))
        kill_worker()


class Broken(Store):
    """Fails wherever the last quarter is read."""

    def __getitem__(self, index):
        if (index[-2].stop or 0) > 3 * self.shape[-2] // 4:
            raise OSError("the store is broken")
        return self.inner[index]


class KilledWriting(LocalStore):
    """Kills the first process that writes a chunk, before its file has got its name."""

    @property
    def flag(self):
        return self.root.parent / "killed"

    async def set(self, key, value):
        if key.startswith("c/"):
            try:
                self.flag.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                Path.replace = lambda *_: kill_worker()
        await super().set(key, value)
