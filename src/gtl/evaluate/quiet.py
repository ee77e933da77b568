"""Silence for libraries that write to stderr by themselves, in C++ or by progress bars of their own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

__all__ = ["hushed"]


@contextmanager
def hushed() -> Iterator[None]:
    """Nothing that is written to stderr meanwhile is seen; exceptions still are."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
