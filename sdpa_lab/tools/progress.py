"""A bar on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A progress bar on stderr, if that is a terminal; yields the function that advances it."""
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        done = 0

        def move(n: int) -> None:
            nonlocal done
            done += n
            print(f"\r{what}: {100 * done // total:3d} %", end="", file=sys.stderr, flush=True)

        yield move
        print("\r" + " " * (len(what) + 7) + "\r", end="", file=sys.stderr, flush=True)
    else:
        with tqdm(total=total, desc=what, leave=False, file=sys.stderr) as bar:
            yield bar.update
