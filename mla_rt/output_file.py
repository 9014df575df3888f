"""The files that the command line writes: what cannot be written is said before the work, not after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def require_writable(path: Path, *inputs: Path | None) -> None:
    """ValueError, naming the file, if it cannot be written or is one of the inputs (None: there is none)."""
    reason = None
    if path.is_dir():
        reason = "it is a folder"
    elif not path.parent.is_dir():
        reason = f"No such folder as {path.parent}"
    elif not path.exists():
        if not os.access(path.parent, os.W_OK | os.X_OK):
            reason = f"no permission to make files in {path.parent}"
    elif not os.access(path, os.W_OK):
        reason = "no permission"
    elif any(each is not None and each.exists() and path.samefile(each) for each in inputs):
        reason = "it is the input"
    if reason is not None:
        raise ValueError(f"cannot write {path}: {reason}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of writing the file name it: the system's own do so for opening only."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from None
