"""Threads, forks, interrupts, and ends while work is queued: what the docstrings promise of each (`device.py`, `open_device`, `Plan`)."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

import mla_rt
from conftest import ROOT
from decode_cases import Case, make, run
from mla_rt import open_device, plan
from mla_rt.arrays import DeviceArray, as_array
from mla_rt.cache import PagedKVCache
from mla_rt.emulator.observer import Observer
from mla_rt.errors import DeviceError
from plan_cases import Arrays, options_of, table_of
from tolerance import assert_decoded, assert_same_bits

SMALL = Case((3, 5), num_heads=1, page_size=4, num_splits=2)
LARGER = Case((20,) * 6, num_heads=1, page_size=4, num_splits=2)


HOST_CODE = {str(ROOT / "mla_rt" / f"{name}.py") for name in ("plan", "resources", "device", "hip_device", "operands", "graph")}
EMULATOR = {str(ROOT / "mla_rt" / f"{name}.py") for name in ("emulator_device", "emulator/memory")}


def planned(device, made, **options):
    return plan(device, **table_of(made), **{**options_of(made), **options})


def take_turns(frame, event, argument):
    """A trace function of threads, which lets another one go on at every line of our host code, so that what is not whole shows."""
    if frame.f_code.co_filename not in HOST_CODE | EMULATOR:
        return None
    time.sleep(0)
    return take_turns


def in_threads(*works, at_each_line=True):
    """Run each in a thread, at once; raise what the first that fails raises. at_each_line: whether they take turns so, which is slow in a decode."""
    barrier, errors = threading.Barrier(len(works)), []

    def start(work):
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(work,)) for work in works]
    switch_interval = sys.getswitchinterval()
    threading.settrace(take_turns if at_each_line else None)
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.settrace(None)
        sys.setswitchinterval(switch_interval)
    if errors:
        raise errors[0]


# ---- threads ----


def test_plans_on_streams_of_their_own_are_used_by_threads_of_their_own(device):
    """Runs, updates and copies interleave as they come."""
    batches = [[make(SMALL.but(kv_lens=kv_lens, seed=seed)) for kv_lens in ((3, 5), (9, 14))] for seed in (1, 2)]
    expected = [[run(made, device) for made in batch] for batch in batches]

    def serve(batch, results):
        with device.stream() as stream, planned(device, batch[0]) as a_plan:
            for _ in range(2):
                for made, (out, lse) in zip(batch, results, strict=True):
                    with Arrays(device, made) as arrays:
                        device.synchronize()
                        with planned(device, made) as its_own:
                            arrays.run(its_own, stream)
                            assert_same_bits(arrays.results(stream), (out, lse))
                        a_plan.update(**table_of(made), stream=stream)
            assert a_plan.num_requests == 2

    before = len(device._resources)
    in_threads(*(lambda i=i: serve(batches[i], expected[i]) for i in (0, 1)), at_each_line=False)
    assert len(device._resources) == before


def test_buffers_of_one_device_are_used_by_many_threads(device, sample):
    """Each on a stream of its own: the allocator, launches and pinned blocks are shared."""
    with device.load(sample) as module:
        reverse = module.kernel("reverse")

        def work(number):
            with device.stream() as stream:
                for step in range(4):
                    values = np.arange(256, dtype=np.float32) + 1000 * number + step
                    with device.to_device(values - 1) as x, device.allocate(1024) as out:
                        x.upload(values, stream)
                        device.launch(reverse, 1, stream=stream, x=x, out=out)
                        assert np.array_equal(out.download(256, np.float32, stream), values[::-1])

        in_threads(*(lambda number=number: work(number) for number in range(4)))


def test_one_stream_is_used_by_many_threads(hip_device):
    """A pinned block may be taken for another copy only once the copy that reads it is done, whichever thread waited."""
    with hip_device.stream() as stream:

        def work(number):
            with hip_device.allocate(256) as buffer:
                for step in range(50):
                    buffer.upload(np.full(256, 16 * number + step % 16, np.uint8), stream)
                    assert (buffer.download(256, np.uint8, stream) == 16 * number + step % 16).all()

        in_threads(*(lambda number=number: work(number) for number in range(4)))


def test_a_pinned_block_is_taken_again_only_after_its_copy(hip_device, monkeypatch):
    """Another thread waits for the stream, and copies on it, just as a copy is about to be queued."""
    call = hip_device._call
    with hip_device.stream() as stream, hip_device.allocate(256) as buffer, hip_device.allocate(256) as another:

        def meanwhile(name, *arguments):
            if name == "hipMemcpyAsync":
                monkeypatch.undo()
                stream.synchronize()
                another.upload(np.full(256, 2, np.uint8), stream)
            return call(name, *arguments)

        monkeypatch.setattr(hip_device, "_call", meanwhile)
        buffer.upload(np.full(256, 1, np.uint8), stream)
        assert (buffer.download(256, np.uint8, stream) == 1).all() and (another.download(256, np.uint8, stream) == 2).all()


@pytest.mark.parametrize("kind", ["emulator", "hip"])
def test_devices_are_opened_and_closed_by_many_threads(kind, shim, emulator_device):
    batches = [make(SMALL.but(seed=seed)) for seed in range(3)]
    expected = [run(made, emulator_device) for made in batches]

    def work(made, results):
        for _ in range(2):
            with open_device(kind) as device, planned(device, made) as a_plan, Arrays(device, made) as arrays:
                assert_same_bits(arrays.run_for_results(a_plan), results)

    with shim.one_gpu() if kind == "hip" else nullcontext():
        in_threads(*(lambda i=i: work(batches[i], expected[i]) for i in range(3)), at_each_line=False)


@pytest.mark.parametrize("kind", ["emulator", "hip"])
def test_of_many_threads_that_close_one_thing_one_does(kind, shim):
    for _ in range(10):
        with shim.one_gpu() if kind == "hip" else nullcontext():
            device = open_device(kind)
        buffers = [device.to_device(np.arange(64)) for _ in range(4)]
        for buffer in buffers:
            buffer.upload(np.arange(64), device.stream())
        in_threads(*[buffers[0].free] * 4)
        in_threads(*[device.close] * 4)
        assert device.closed and not device._resources


# ---- queued work, and who still has a reference ----


def test_what_queued_work_uses_outlives_every_reference_to_it(shim):
    """The device's too: nothing is released but by closing."""
    made = make(SMALL)

    def queue(device):
        arrays, a_plan, stream = Arrays(device, made), planned(device, made), device.stream()
        q = arrays.upload(made.arguments["q"])
        q.fill(0xFF)
        device.synchronize()
        queries = made.arguments["q"].copy()
        q.upload(queries, stream)
        queries[:] = np.nan
        a_plan.run(as_array(q, dtype="bfloat16", shape=queries.shape), arrays.cache, out=arrays.out, lse=arrays.lse, stream=stream)
        with device.capture(stream) as graph:
            arrays.q.fill(0, stream)
        graph.launch(stream)
        return [weakref.ref(device), weakref.ref(a_plan)], arrays.out.address, arrays.lse.address, arrays.shape

    with shim.one_gpu():
        references, out, lse, shape = queue(open_device("hip"))
    released = {name: shim.count(name) for name in ("hipFree", "hipModuleUnload", "hipStreamDestroy", "hipGraphExecDestroy", "hipHostFree")}
    waiting = shim.pending()
    gc.collect()
    assert not any(reference() for reference in references)
    assert {name: shim.count(name) for name in released} == released and shim.pending() == waiting >= 3
    with shim.one_gpu(), open_device("hip") as another, another.allocate(1 << 20) as other_memory:
        other_memory.fill(0xFF)
        another.synchronize()
    memory = shim.emulator.memory
    results = memory.bytes_at(out, shape[0] * shape[1] * 1024).view("bfloat16").reshape(*shape, 512), memory.bytes_at(lse, shape[0] * shape[1] * 4)
    assert_decoded(results[0], results[1].view(np.float32).reshape(shape), *made.exact())


ENDS = """
import threading, time
import numpy as np
import mla_rt
from decode_cases import Case, make
from plan_cases import Arrays, options_of, table_of

made = make(Case((3, 5), num_heads=1, page_size=4, num_splits=2))
large = make(Case((4000,) * 8, num_heads=16, page_size=64))
device = mla_rt.open_device({kind!r})
arrays, stream, event = Arrays(device, made), device.stream(), device.event()
a_plan = mla_rt.plan(device, **table_of(made), **options_of(made))
arrays.run(a_plan, stream)
with device.capture(stream) as graph:
    arrays.run(a_plan, stream)
graph.launch(stream)
event.record(stream)
capsule = mla_rt.as_array(arrays.out).__dlpack__(max_version=(1, 0))

def decode_for_long():
    of_large = Arrays(another, large)
    with mla_rt.plan(another, **table_of(large), **options_of(large)) as of_thread:
        under_way.set()
        of_large.run_for_results(of_thread)

another, under_way = mla_rt.open_device({kind!r}), threading.Event()
threading.Thread(target=decode_for_long, daemon=True).start()
under_way.wait()
time.sleep(0.3)
print("end")
"""


@pytest.mark.parametrize("kind", ["emulator", "hip"])
def test_the_interpreter_exits_while_work_is_queued(kind, tmp_path):
    """On HIP a run and a graph wait in a stream; on both a daemon thread is in a launch that takes far longer, which has worker processes."""
    program = tmp_path / "ends.py"
    program.write_text(ENDS.format(kind=kind))
    command = [sys.executable, *(["tests/run_on_shim.py"] if kind == "hip" else []), str(program)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=60)  # waits for workers, too
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# ---- forks ----


def in_child(work):
    """The text that work() returns in a forked process, which has 30 seconds. In its output, so that a failure there fails here."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = work()
        except BaseException:
            text = traceback.format_exc()
        try:
            os.write(writer, str(text).encode())
        finally:
            os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], 30)
    if not ready:
        os.kill(child, signal.SIGKILL)
    text = b"".join(iter(lambda: os.read(reader, 4096), b"")).decode()
    os.close(reader)
    _, status = os.waitpid(child, 0)
    assert ready, "the child hung"
    assert status == 0, f"the child ended with {status}: {text}"
    return text


def refusals(*calls):
    """One line for each call: the DeviceError that it raises."""
    lines = []
    for call in calls:
        try:
            lines.append(f"done: {call()!r}")
        except DeviceError as error:
            lines.append(str(error))
    return "\n".join(lines)


def decode_text(made, kind="emulator"):
    with open_device(kind) as device:
        out, lse = run(made, device)
        return out.tobytes().hex() + lse.tobytes().hex()


def test_a_child_opens_devices_of_its_own(emulator_device):
    made = make(SMALL)
    expected = decode_text(made)
    before = len(emulator_device._resources)
    assert in_child(lambda: decode_text(made)) == expected
    assert len(emulator_device._resources) == before and not emulator_device.closed


def test_a_device_stays_with_the_process_that_opened_it(device):
    made = make(SMALL)
    with (
        device.stream() as stream,
        device.event() as event,
        Arrays(device, made) as arrays,
        planned(device, made) as a_plan,
        PagedKVCache(device, 1, 4, "bf16") as cache,
    ):
        expected = arrays.run_for_results(a_plan)
        array, buffer = DeviceArray(arrays.lse.address, arrays.shape, "f4", device), arrays.out
        with device.capture(stream) as graph:
            buffer.fill(7, stream)

        def child():
            text = refusals(
                lambda: device.allocate(4),
                device.stream,
                lambda: device.stream_at(0),
                lambda: buffer.address,
                lambda: buffer.fill(0),
                lambda: arrays.run(a_plan),
                lambda: a_plan.update(**table_of(made)),
                lambda: cache.append(np.zeros((1, 576), np.float32), [0]),
                lambda: graph.launch(),
                lambda: event.record(stream),
                stream.synchronize,
                array.require_open,
            )
            for each in (graph, a_plan, arrays, cache, buffer, stream, event, device):  # as `with` blocks do that the child leaves
                each.close()
            return text

        with graph:
            refused = in_child(child).splitlines()
            names = ["device"] * 3 + ["Buffer"] * 2 + ["Plan"] * 2 + ["Module", "Graph", "Event", "Stream", "DeviceArray"]
            assert len(refused) == len(names)
            for name, text in zip(names, refused, strict=True):
                assert text.startswith(name) and text.endswith("was left to the parent process by a fork; open another one here"), text
            graph.launch(stream)
            assert (buffer.download(buffer.nbytes, np.uint8, stream) == 7).all()
        assert_same_bits(arrays.run_for_results(a_plan), expected)


def test_hip_does_not_survive_a_fork(shim, hip_device):
    """The shim ends a child that calls it."""
    made = make(SMALL)
    lost = "HIP was in use when this process was forked, which it does not survive: open GPUs in the child alone, or start it by 'spawn'"
    with shim.one_gpu():
        assert in_child(lambda: refusals(lambda: open_device("hip"), open_device, lambda: mla_rt.decode(**made.arguments))) == "\n".join([lost] * 3)
        assert in_child(lambda: in_child(lambda: refusals(open_device))) == lost
        expected = decode_text(made)
        assert in_child(lambda: decode_text(made)) == expected
        assert decode_text(made, "hip") == expected


def test_a_child_of_a_process_that_opened_no_gpu_is_free():
    """`auto` found none there: the child may look again."""
    program = """
import os, mla_rt
with mla_rt.open_device("auto") as device:
    assert device.kind == "emulator"
child = os.fork()
if child == 0:
    with mla_rt.open_device("auto") as device, device.allocate(4):
        print(device.reason, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(device.reason)
"""
    environment = {name: value for name, value in os.environ.items() if name != "ROCM_PATH"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second and "no GPU" in first


def test_a_child_does_not_wait_for_threads_that_are_gone(emulator_device, monkeypatch):
    """The fork comes while another thread is in a run, and holds the plan's lock and the device's."""
    made = make(SMALL)
    inside, go_on = threading.Event(), threading.Event()
    with planned(emulator_device, made) as a_plan, Arrays(emulator_device, made) as arrays:
        expected = arrays.run_for_results(a_plan)

        def hold(dispatch):
            inside.set()
            go_on.wait()
            return ()

        monkeypatch.setattr(emulator_device, "observe", hold)
        thread = threading.Thread(target=arrays.run, args=(a_plan,))
        thread.start()
        inside.wait()
        try:
            calls = (lambda: arrays.run(a_plan), lambda: a_plan.update(**table_of(made)), a_plan.close, emulator_device.close)
            lines = in_child(lambda: refusals(*calls)).splitlines()
            assert lines[:2] == ["Plan used after its device was left to the parent process by a fork; open another one here"] * 2
            assert lines[2:] == ["done: None"] * 2
            assert len(in_child(lambda: decode_text(made))) > 100
        finally:
            go_on.set()
            thread.join()
        assert_same_bits(arrays.results(), expected)


# ---- interrupts ----


def interrupted(call, after):
    """Let call() meet a KeyboardInterrupt where Python could raise it: as a function of our host code begins, or behind one of C that it called.

    after: how many such places are passed before. Whether it came that far.
    """
    left = after

    def profile(frame, event, argument):
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename in HOST_CODE:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupt_anywhere_in_a_run_leaves_the_plan_usable(hip_device, shim):
    """The next run launches what it would have launched, with another scale than the one before the interrupt."""
    made = make(SMALL.but(kv_format="fp8_e4m3fn", fp8_scale=0.5))
    hip_device.synchronize()
    with hip_device.stream() as stream, planned(hip_device, made) as a_plan, Arrays(hip_device, made) as arrays:
        expected = arrays.run_for_results(a_plan)
        packed = bytes(a_plan._launch._packed)
        cache = arrays.cache
        for place in range(1000):
            cache.kv_scale = np.float32(3)
            arrays.run(a_plan, stream)
            cache.kv_scale = np.float32(0.5)
            was_interrupted = interrupted(lambda: arrays.run(a_plan, stream), place)
            arrays.run(a_plan, stream)
            assert bytes(a_plan._launch._packed) == packed, place
            if not was_interrupted:
                break
        assert 20 < place < 300
        shim.reset()  # of the many launches, one is enough
        assert_same_bits(arrays.run_for_results(a_plan, stream), expected)


def test_an_interrupt_anywhere_in_an_update_leaves_a_plan_that_can_be_updated(hip_device, shim):
    made, larger = make(SMALL), make(LARGER)
    larger.arguments["sm_scale"] = made.arguments["sm_scale"]
    with Arrays(hip_device, larger) as arrays, planned(hip_device, larger) as a_plan:
        expected = arrays.run_for_results(a_plan)
        before, refused = {id(resource) for resource in hip_device._resources.values()}, 0
        for place in range(0, 5000, 2):
            with planned(hip_device, made) as a_plan:
                was_interrupted = interrupted(lambda: a_plan.update(**table_of(larger)), place)
                if a_plan._usable:
                    assert_launches_what_it_has(a_plan)
                else:
                    refused += 1
                    with pytest.raises(DeviceError, match="Plan used after an update that failed midway; update it again"):
                        arrays.run(a_plan)
                a_plan.update(**table_of(larger))
                assert_launches_what_it_has(a_plan)
                if not was_interrupted:
                    assert_same_bits(arrays.run_for_results(a_plan), expected)
                    break
        assert place > 100 and refused > 10
        # What an interrupt leaves behind is released with the device.
        for resource in [resource for resource in hip_device._resources.values() if id(resource) not in before]:
            resource.close()


def assert_launches_what_it_has(a_plan):
    launch = a_plan._launch
    for name, buffer in a_plan._buffers.items():
        assert launch._words[launch._word_of[name]] == buffer.address, name  # and it is open
    requests = a_plan._requests
    for name in ("kv_indptr", "kv_indices", "kv_last_page_len"):
        stored, given = a_plan._buffers[name], getattr(requests, name)
        assert stored.download(stored.nbytes, np.uint8)[: given.nbytes].tobytes() == given.tobytes(), name


class CtrlC(Observer):
    """Comes when workgroups have counted themselves as arrived, by an atomic, and before the last of a row tile puts the count back to 0."""

    def __init__(self):
        self.arrived = False

    def memory(self, group, address, mask, nbytes, access):
        if self.arrived:
            signal.raise_signal(signal.SIGINT)
        self.arrived = access == "atomic"


@pytest.mark.parametrize("num_processes", [1, 4])
def test_ctrl_c_in_a_launch_leaves_the_plan_usable(num_processes):
    made = make(LARGER)
    with open_device("emulator") as device, planned(device, made) as a_plan, Arrays(device, made) as arrays:
        expected = arrays.run_for_results(a_plan)
        if num_processes == 1:
            device.observe = lambda dispatch: (CtrlC(),)
        else:  # the first of them to end has run three workgroups: one row tile, and half of another
            device.num_processes = num_processes
            device.progress = lambda done, total: signal.raise_signal(signal.SIGINT) if 0 < done < total else None
        with pytest.raises(KeyboardInterrupt):
            arrays.run(a_plan)
        device.observe = device.progress = None
        assert_same_bits(arrays.run_for_results(a_plan), expected)
