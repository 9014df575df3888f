"""Launches that worker processes share: the same bits as in one process, faults, progress, and nothing left behind."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time

import numpy as np
import pytest
from asm import assemble, launch

from decode_cases import FORMATS, Case, make
from mla_rt.decode import decode
from mla_rt.emulator import machine, parallel
from mla_rt.emulator.memory import Memory
from mla_rt.emulator_device import EmulatorDevice
from mla_rt.errors import DeviceError, KernelFault, UnknownInstruction


@pytest.fixture
def memory():
    with_pages = Memory()
    yield with_pages
    with_pages.close()


@pytest.fixture(autouse=True)
def nothing_left():
    """No test may leave a child, dead or alive, or an open file."""
    before = children_of_this(), len(os.listdir("/proc/self/fd"))
    yield
    assert (children_of_this(), len(os.listdir("/proc/self/fd"))) == before


@pytest.fixture
def forks(monkeypatch):
    """The process ids of the workers, as they are forked."""
    found: list[int] = []
    fork = os.fork

    def noted() -> int:
        worker = fork()
        if worker:
            found.append(worker)
        return worker

    monkeypatch.setattr(os, "fork", noted)
    return found


def children_of_this() -> set[str]:
    task = f"/proc/self/task/{threading.get_native_id()}/children"
    with open(task) as children:
        return set(children.read().split())


def run_words(source: str, memory: Memory, workgroups: int, *, words: int = 1, **options) -> tuple[np.ndarray, machine.LaunchReport]:
    """The words behind the one argument, zero before the launch, after it; blocks of 64. s2 is the workgroup, s[6:7] the argument."""
    out = memory.allocate(4 * words)
    memory.bytes_at(out, 4 * words)[:] = 0
    code = assemble("s_load_dwordx2 s[6:7], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n" + source)
    try:
        report = launch(code, struct.pack("<Q", out), memory, grid=(workgroups, 1, 1), **options)
        return memory.bytes_at(out, 4 * words).view(np.uint32).copy(), report
    finally:
        memory.free(out)


COUNT = """
v_mov_b32_e32 v1, 0
v_mov_b32_e32 v2, 1
global_atomic_add v1, v2, s[6:7]
s_endpgm
"""
# The same through a buffer resource of 4 bytes.
COUNT_IN_BUFFER = """
s_mov_b32 s8, s6
s_and_b32 s9, s7, 0xffff
s_mov_b32 s10, 4
s_mov_b32 s11, 0x27000
v_mov_b32_e32 v2, 1
buffer_atomic_add v2, off, s[8:11], 0
s_endpgm
"""
# Each workgroup stores its number in its own word.
NUMBER = """
v_mov_b32_e32 v2, s2
s_lshl_b32 s8, s2, 2
v_mov_b32_e32 v1, s8
global_store_dword v1, v2, s[6:7]
s_endpgm
"""
# Each workgroup takes a ticket and stores its number in the word of that ticket.
TICKET = """
s_mov_b64 exec, 1
v_mov_b32_e32 v1, 0
v_mov_b32_e32 v2, 1
global_atomic_add v3, v1, v2, s[6:7] sc0
s_waitcnt vmcnt(0)
v_lshlrev_b32_e32 v3, 2, v3
v_mov_b32_e32 v2, s2
global_store_dword v3, v2, s[6:7] offset:4
s_endpgm
"""
# Workgroups from number {first} on load from address 0.
FAULTY = """
s_cmp_ge_u32 s2, {first}
s_cbranch_scc1 bad
s_endpgm
bad:
{body}
s_endpgm
"""
NULL_LOAD = "v_mov_b32_e32 v2, 0\nv_mov_b32_e32 v3, 0\nglobal_load_dword v4, v[2:3], off"


@pytest.mark.parametrize("source", [COUNT, COUNT_IN_BUFFER])
def test_atomics_of_all_processes_count(memory, forks, source):
    (count,), report = run_words(source, memory, 3000, num_processes=3, max_resident_waves=2)
    assert count == 3000 * 64 and len(forks) == 3
    assert report.num_instructions == 3000 * (2 + source.count("\n") - 1)


def test_each_ticket_is_drawn_once(memory):
    words, _ = run_words(TICKET, memory, 500, words=501, num_processes=4, max_resident_waves=1)
    assert words[0] == 500 and np.array_equal(np.sort(words[1:]), np.arange(500))


@pytest.mark.parametrize("source", [COUNT, COUNT_IN_BUFFER])
def test_an_atomic_reads_and_writes_under_the_lock(memory, source):
    seen: list[int] = []
    out = memory.allocate(4)

    class Lock:
        def __enter__(self) -> None:
            seen.append(int(memory.bytes_at(out, 4).view(np.int32)[0]))

        def __exit__(self, *_: object) -> None:
            self.__enter__()

    memory.exclusive = Lock()
    code = assemble("s_load_dwordx2 s[6:7], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n" + source)
    launch(code, struct.pack("<Q", out), memory)
    assert seen == [-1, 63]  # memory starts as all ones


def test_the_lock_keeps_processes_apart(memory):
    out = memory.bytes_at(memory.allocate(8), 8).view(np.uint64)
    out[:] = 0

    def add(number: int) -> int:
        with memory.exclusive:
            before = out[0]
            time.sleep(1e-3)
            out[0] = before + np.uint64(number)
        return 1

    assert parallel.run_batches(memory, 100, 3, add, None) == 100
    assert out[0] == 99 * 100 // 2


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_decode_gives_the_same_bits(kv_format, forks):
    """Split requests of different lengths: whichever process runs the last workgroup of a split merges it."""
    made = make(Case(kv_lens=(700, 65, 1, 333, 512), q_lens=(1, 2, 1, 3, 1), kv_format=kv_format, num_heads=32, page_size=16, num_splits=5))
    results, reports = [], []
    for processes in (1, 2, 3):
        with EmulatorDevice(num_processes=processes) as device:
            results.append([array.tobytes() for array in decode(**made.arguments, device=device)])
            reports.append([report.num_instructions for report in device.reports])
    assert len(forks) == 5
    assert results[0] == results[1] == results[2]
    assert reports[0] == reports[1] == reports[2]


def test_the_number_of_processes(memory, forks, monkeypatch):
    """By default a launch of more than one batch takes all cores."""
    monkeypatch.setattr(machine, "num_cores", lambda: 3)
    alone = {"seed": 1}, {"checks": "strict"}, {"timing": "latest"}, {"num_processes": 1}
    for workgroups, options, workers in [(512, {}, 0), (513, {}, 3), (700, {"max_resident_waves": 512}, 3), *((513, one, 0) for one in alone)]:
        forks.clear()
        words, _ = run_words(NUMBER, memory, workgroups, words=workgroups, **options)
        assert np.array_equal(words, np.arange(workgroups)) and len(forks) == workers, (workgroups, options)
    for workgroups, workers in [(1, 0), (2, 2), (7, 7), (100, 8)]:
        forks.clear()
        run_words(NUMBER, memory, workgroups, words=workgroups, num_processes=8)
        assert len(forks) == workers
    monkeypatch.setattr(machine, "num_cores", lambda: 1)
    forks.clear()
    run_words(NUMBER, memory, 600, words=600)
    assert not forks
    with pytest.raises(ValueError, match="num_processes is 0"):
        run_words(NUMBER, memory, 1, num_processes=0)


@pytest.mark.parametrize("body, error, text", [(NULL_LOAD, KernelFault, "outside live memory"), (".long 0xbe807f00", UnknownInstruction, "80 be")])
def test_the_first_fault_is_raised(memory, body, error, text):
    """All workgroups from 37 on fault: the first of them is named, as in one process."""
    source = FAULTY.format(first=37, body=body)
    raised = []
    for processes in (1, 2, 4):
        with pytest.raises(error, match=text) as info:
            run_words(source, memory, 200, num_processes=processes, max_resident_waves=1)
        assert type(info.value) is error
        raised.append(str(info.value))
    assert raised[0] == raised[1] == raised[2]
    assert isinstance(info.value.__cause__, parallel.Origin) and "schedule.py" in str(info.value.__cause__)


def test_other_exceptions_come_with_their_type_and_text(memory):
    class Unportable(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    def fail(number: int) -> int:
        raise {3: Unportable("one", "two"), 1: OSError(5, "five")}.get(number, ArithmeticError(str(number)))

    with pytest.raises(ArithmeticError, match="0"):
        parallel.run_batches(memory, 4, 2, fail, None)
    with pytest.raises(OSError, match="five") as info:
        parallel.run_batches(memory, 4, 2, lambda number: fail(number) if number == 1 else 0, None)
    assert info.value.errno == 5
    with pytest.raises(RuntimeError, match="Unportable: one and two"):
        parallel.run_batches(memory, 4, 2, lambda number: fail(number) if number == 3 else 0, None)


def test_a_worker_that_dies(memory):
    def die(number: int) -> int:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return 0

    started = time.perf_counter()
    with pytest.raises(DeviceError, match="SIGKILL"):
        parallel.run_batches(memory, 4, 2, die, None)
    assert time.perf_counter() - started < 30  # the other one was not waited for
    with pytest.raises(DeviceError, match="status 3"):
        parallel.run_batches(memory, 4, 2, lambda number: os._exit(3), None)


def test_a_worker_that_dies_within_an_atomic_holds_nobody_up(memory):
    def work(number: int) -> int:
        with memory.exclusive:
            if number == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return 1

    with pytest.raises(DeviceError, match="SIGKILL"):
        parallel.run_batches(memory, 100, 2, work, None)


def test_ctrl_c_ends_the_workers(memory, forks):
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        parallel.run_batches(memory, 4, 2, lambda number: time.sleep(60) or 0, None)
    timer.join()
    assert len(forks) == 2
    for worker in forks:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_workers_do_not_see_ctrl_c(memory):
    """A terminal sends it to them too, but it is the parent's."""

    def interrupted(number: int) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return number

    assert parallel.run_batches(memory, 4, 2, interrupted, None) == 6


def test_progress(memory):
    """In this process, with workgroups; also while no batch ends. An exception in it ends the launch."""
    calls: list[tuple[int, int, int]] = []
    run_words(NUMBER, memory, 101, words=101, num_processes=2, max_resident_waves=10, progress=lambda *at: calls.append((os.getpid(), *at)))
    assert calls[-1] == (os.getpid(), 101, 101) and {pid for pid, _, _ in calls} == {os.getpid()}
    done = [done for _, done, _ in calls]
    assert done == sorted(done) and len(set(done)) > 2 and all(0 <= one <= 101 for one in done)

    finished: list[int] = []
    assert parallel.run_batches(memory, 2, 2, lambda number: time.sleep(1) or 1, finished.append) == 2
    assert finished.count(0) >= 2

    def stop(*_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run_words(NUMBER, memory, 100, words=100, num_processes=2, max_resident_waves=1, progress=stop)


def test_a_launch_from_another_thread(memory):
    got: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: got.append(run_words(NUMBER, memory, 40, words=40, num_processes=2)[0]))
    thread.start()
    thread.join(60)
    assert np.array_equal(got[0], np.arange(40))


def test_freed_memory_is_given_back(memory):
    """The mapping is shared, and pages of such are kept by the system until it is told that they are not needed."""
    start = memory.allocate(64 << 20)
    assert memory.bytes_at(start, 64 << 20)[-1] == 0xFF
    with_pages = shared_bytes()
    memory.free(start)
    assert with_pages - shared_bytes() > 48 << 20


def shared_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem:"))
