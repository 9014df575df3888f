"""Launches on several cores: worker processes, forked for one launch, that take its batches of workgroups in turn.

Threads would gain nothing, since the interpreter's lock is held between numpy calls of some microseconds each. Device memory is a shared mapping:
what one worker stores there, the others and the parent see. All else, registers, LDS and decoded code, is each worker's own.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait

from ..errors import DeviceError
from .memory import Memory

TICK_SECONDS = 0.2


class Origin(Exception):
    """The traceback, as text, of an exception in a worker: the cause of the same exception in the parent."""


def num_cores() -> int:
    """Cores that this process may use; 1 where processes cannot be forked as needed here (other systems than Linux)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


class _Shared:
    """What the workers of a launch share besides device memory: a lock, as a context manager, and the number of the next batch.

    Both are of one file without a name, so that the system releases the lock of a worker that dies.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("launch")

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def take(self) -> int:
        """The number of the next batch, which is the caller's from now on."""
        with self:
            batch = int.from_bytes(os.pread(self._file, 8, 0), "little")
            os.pwrite(self._file, (batch + 1).to_bytes(8, "little"), 0)
        return batch

    def go_to(self, batch: int) -> None:
        with self:
            os.pwrite(self._file, batch.to_bytes(8, "little"), 0)

    def close(self) -> None:
        os.close(self._file)


def run_batches(memory: Memory, num_batches: int, num_processes: int, run_batch: Callable[[int], int], tick: Callable[[int], None] | None) -> int:
    """The sum of run_batch(0) to run_batch(num_batches - 1), each called in one of the workers.

    Within a worker `memory.exclusive` excludes the others. tick(batches finished) is called here with each batch and about five times a second.
    Raises what run_batch raised, of several batches that of the first; DeviceError if a worker died. No worker outlives the call.
    """
    workers: dict[Connection, int] = {}
    total = finished = 0
    failures: dict[int, BaseException] = {}
    shared = _Shared()
    try:
        for _ in range(min(num_processes, num_batches)):
            _fork(workers, lambda results: _work(results, memory, shared, num_batches, run_batch))
        while workers:
            for results in wait(list(workers), None if tick is None else TICK_SECONDS):
                assert isinstance(results, Connection)
                try:
                    batch, outcome, origin = results.recv()
                except (EOFError, OSError):  # it has ended, be it within a message
                    _reap(workers, results)
                    continue
                if isinstance(outcome, BaseException):
                    failures[batch] = outcome
                    outcome.__cause__ = Origin(origin)
                else:
                    total, finished = total + outcome, finished + 1
            if tick is not None:
                tick(finished)
    finally:
        for results, worker in workers.items():
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            results.close()
        shared.close()
    if failures:
        raise failures[min(failures)]
    return total


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until a worker and the note that it exists have come, or gone, together."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(workers: dict[Connection, int], work: Callable[[Connection], None]) -> None:
    """Start a worker, which ends when `work` returns. It never sees Ctrl-C: the parent ends it then."""
    with _uninterrupted(), warnings.catch_warnings():
        # Python warns of a fork while there are other threads, because of the locks they may hold. A worker calls nothing but numpy and this
        # package, and libraries of numpy that have threads of their own know of forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        results, sender = Pipe(duplex=False)
        try:
            worker = os.fork()
            if worker == 0:
                status = 1
                try:
                    for other in (results, *workers):
                        other.close()
                    work(sender)
                    status = 0
                finally:
                    os._exit(status)  # at once: what the parent has buffered and registered is not for the worker to write or undo
        except OSError:
            results.close()
            raise
        finally:
            sender.close()
        workers[results] = worker


def _reap(workers: dict[Connection, int], results: Connection) -> None:
    with _uninterrupted():
        _, status = os.waitpid(workers.pop(results), 0)
        results.close()
    if os.WIFSIGNALED(status):
        raise DeviceError(f"a worker process of the emulator was ended by {signal.Signals(os.WTERMSIG(status)).name}")
    if status:
        raise DeviceError(f"a worker process of the emulator ended with status {os.WEXITSTATUS(status)}")


def _work(results: Connection, memory: Memory, shared: _Shared, num_batches: int, run_batch: Callable[[int], int]) -> None:
    """Batches are taken in order and the workers stop at the first failure, so that every batch before a failed one is run by somebody."""
    memory.exclusive = shared
    while (batch := shared.take()) < num_batches:
        try:
            message = (batch, run_batch(batch), "")
        except BaseException as error:
            shared.go_to(num_batches)
            results.send((batch, _portable(error), "".join(traceback.format_exception(error))))
            return
        results.send(message)


def _portable(error: BaseException) -> BaseException:
    """The exception, or where it cannot be pickled a RuntimeError with its type and text."""
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return copy
