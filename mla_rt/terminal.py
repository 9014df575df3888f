"""What the command line shows: standard output that may be a closed pipe, a full disk or ASCII, and progress."""

from __future__ import annotations

import io
import os
import sys
import time

_CLEAR_LINE = "\r\x1b[K"


def tolerate_any_character() -> None:
    """Characters that standard output has no code for are escaped instead of ending the command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Write what was printed, so that failing can still be told. OSError, naming standard output; BrokenPipeError if nobody reads it."""
    if sys.stdout is None:  # closed by whoever started the process
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"cannot write to standard output: {error.strerror}") from None


def drop_what_cannot_be_written() -> None:
    """Flush; where that fails the rest goes nowhere. Else the interpreter would try once more at its end and complain."""
    try:
        flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Progress:
    """One line on the terminal, overwritten by the next (the emulator sends a few a second) and gone at the end of each launch."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if done < total:
            text = f"  emulating: {done} of {total} workgroups done, {time.monotonic() - self.begin:.0f} s"
            print(f"{_CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)
        else:
            self.clear()

    def clear(self) -> None:
        print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
