"""plan() and Plan: right results, the same bits as decode, workspaces that are used again, fixed work lists, streams, threads and graphs."""

from __future__ import annotations

import gc
import importlib
import threading
from functools import partial
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import bench_host
from decode_cases import Case, make
from mla_rt import KernelFault, decode, open_device, plan
from mla_rt.arrays import DeviceArray, as_array
from mla_rt.errors import DeviceError
from plan_cases import Arrays, options_of, table_of
from tolerance import assert_decoded, assert_same_bits

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("bf16", "fp8_e4m3fn", "mxfp4")
SMALL = Case((5, 0, 70, 17), (1, 2, 1, 3), num_heads=3, page_size=16, num_splits=2)
CASES = [
    *(SMALL.but(kv_format=kv_format) for kv_format in FORMATS),
    SMALL.but(kv_format="fp8_e4m3fn", fp8_scale=0.01, page_size=1, num_splits=None),
    Case((33, 129), (2, 1), "mxfp4", num_heads=16, page_size=2, num_splits=3, causal=False),
    Case((1,), num_heads=1),
]


def planned(device, made, **options):
    return plan(device, **table_of(made), **{**options_of(made), **options})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_decodes_as_decode_does(case, device, emulator_device):
    made = make(case)
    with Arrays(device, made) as arrays, planned(device, made) as a_plan:
        result = arrays.run_for_results(a_plan)
        assert_decoded(*result, *made.exact())
        assert_same_bits(arrays.run_for_results(a_plan), result)
    assert_same_bits(decode(**made.arguments, device=emulator_device), result)


@pytest.mark.parametrize(
    ("kind", "protocol"), [("emulator", "view"), ("emulator", "dlpack"), ("hip", "view"), ("hip", "dlpack"), ("hip", "cuda_array_interface")]
)
def test_arrays_of_others_are_taken_where_they_are(kind, protocol, request):
    """Views at an offset into one large buffer, as our own, or as another library shows them."""
    device = request.getfixturevalue(f"{kind}_device")
    made = make(SMALL)
    with planned(device, made) as a_plan, Arrays(device, made) as arrays:
        expected = arrays.run_for_results(a_plan)
        large = arrays.allocate(1 << 16)
        large.fill(0xFF)
        large.upload(made.arguments["q"], offset=256)
        shapes = {"q": ((7, 3, 576), BF16, 256), "out": ((7, 3, 512), BF16, 32768), "lse": ((7, 3), np.float32, 60004)}
        views = {name: DeviceArray(large.address + offset, shape, dtype, device, owner=large) for name, (shape, dtype, offset) in shapes.items()}
        given = {name: _as_another_library(view, protocol) for name, view in views.items()}
        rows = _as_another_library(as_array(arrays.cache.rows), protocol)
        a_plan.run(given["q"], SimpleNamespace(**{**vars(arrays.cache), "rows": rows}), out=given["out"], lse=given["lse"])
        memory = large.download(1 << 16, np.uint8)
        out, lse = (memory[shapes[name][2] :][: views[name].nbytes].view(shapes[name][1]).reshape(shapes[name][0]) for name in ("out", "lse"))
        assert_same_bits((out, lse), expected)
        memory[32768:][: out.nbytes] = memory[60004:][: lse.nbytes] = memory[256:][: views["q"].nbytes] = 0xFF
        assert (memory == 0xFF).all()


def _as_another_library(view, protocol):
    if protocol == "view":
        return view
    if protocol == "dlpack":
        return SimpleNamespace(__dlpack__=view.__dlpack__, __dlpack_device__=view.__dlpack_device__)
    if view.dtype == BF16:  # which the protocol cannot carry: its bits, and what they are
        bits = SimpleNamespace(__cuda_array_interface__=as_array(view, dtype="u2").__cuda_array_interface__)
        return as_array(bits, dtype=BF16, device=view.device)
    return SimpleNamespace(__cuda_array_interface__=view.__cuda_array_interface__)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_one_plan_runs_many_layers(kv_format, emulator_device):
    """Other queries and caches of the same lengths, each FP8 cache with a scale of its own."""
    layers = [make(SMALL.but(kv_format=kv_format, seed=seed, fp8_scale=scale)) for seed, scale in enumerate((0.02, 0.5, 0.02))]
    tables = table_of(layers[0])
    for made in layers:  # pages are drawn from the seed: bring all into the places of the first
        _move_pages(made, tables)
    with planned(emulator_device, layers[0], sm_scale=0.05) as a_plan:
        for made in layers:
            made.arguments["sm_scale"] = 0.05
            with Arrays(emulator_device, made) as arrays:
                assert_decoded(*arrays.run_for_results(a_plan), *made.exact())


def _move_pages(made, tables):
    kv = made.arguments["kv"]
    parts = [getattr(kv, name) for name in ("codes", "scales") if hasattr(kv, name)] or [kv]
    for part in parts:
        pages = part[made.arguments["kv_indices"]].copy()
        part[tables["kv_indices"]] = pages
    made.arguments.update(tables)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_an_update_plans_anew_in_the_same_workspaces(kv_format, hip_device, shim, emulator_device):
    case = SMALL.but(kv_format=kv_format, fp8_scale=0.03)
    large, small = make(case), make(case.but(kv_lens=(3, 40), q_lens=(1, 1), seed=1))
    with planned(hip_device, large) as a_plan, Arrays(hip_device, large) as of_large, Arrays(hip_device, small) as of_small:
        nbytes, before = a_plan.nbytes, shim.count("hipMalloc")
        for made, arrays in ((small, of_small), (large, of_large)):
            a_plan.update(**table_of(made))
            assert (a_plan.num_requests, a_plan.total_q) == (len(made.case.kv_lens), len(made.arguments["q"]))
            scratch = {**made.arguments, "sm_scale": large.arguments["sm_scale"]}
            assert_same_bits(arrays.run_for_results(a_plan), decode(**scratch, device=emulator_device))
        assert (a_plan.nbytes, shim.count("hipMalloc")) == (nbytes, before)


def test_an_update_grows_the_workspaces(emulator_device):
    small, large = make(Case((3,), num_heads=3, page_size=16, num_splits=2)), make(SMALL)
    with planned(emulator_device, small, sm_scale=large.arguments["sm_scale"]) as a_plan, Arrays(emulator_device, large) as arrays:
        before, resources = a_plan.nbytes, len(emulator_device._resources)
        a_plan.update(**table_of(large))
        assert a_plan.nbytes > before and len(emulator_device._resources) == resources
        assert_same_bits(arrays.run_for_results(a_plan), decode(**large.arguments, device=emulator_device))


def test_an_update_without_room_leaves_the_plan_as_it_was(emulator_device, monkeypatch):
    small, large = make(Case((3, 40), num_heads=3, page_size=16, num_splits=2)), make(SMALL)
    with planned(emulator_device, small) as a_plan, Arrays(emulator_device, small) as arrays:
        expected = arrays.run_for_results(a_plan)
        allocate, resources = emulator_device._allocate, len(emulator_device._resources)

        def little_room(nbytes, *name):
            if nbytes > 10_000:
                raise DeviceError(f"allocate({nbytes}): made to fail")
            return allocate(nbytes, *name)

        monkeypatch.setattr(emulator_device, "_allocate", little_room)
        with pytest.raises(DeviceError, match="made to fail"):
            a_plan.update(**table_of(large))
        monkeypatch.undo()
        assert len(emulator_device._resources) == resources
        assert_same_bits(arrays.run_for_results(a_plan), expected)


def test_after_an_update_that_failed_midway_a_plan_wants_another(emulator_device, monkeypatch):
    made = make(SMALL)
    with planned(emulator_device, made) as a_plan, Arrays(emulator_device, made) as arrays:
        upload = emulator_device._upload

        def fail(address, *rest):
            if address == a_plan.kv_indices.address:
                raise DeviceError("upload: made to fail")
            upload(address, *rest)

        monkeypatch.setattr(emulator_device, "_upload", fail)
        with pytest.raises(DeviceError, match="made to fail"):
            a_plan.update(**table_of(made))
        with pytest.raises(DeviceError, match="an update that failed midway"):
            arrays.run(a_plan)
        monkeypatch.undo()
        a_plan.update(**table_of(made))
        assert_decoded(*arrays.run_for_results(a_plan), *made.exact())


def test_a_run_only_launches(hip_device, shim):
    """No allocation, copy, fill or wait."""
    made = make(SMALL)
    with planned(hip_device, made) as a_plan, Arrays(hip_device, made) as arrays, hip_device.stream() as stream:
        hip_device.synchronize()
        others = ("Malloc", "Free", "HostMalloc", "Memcpy", "MemcpyAsync", "MemsetAsync", "StreamSynchronize", "EventRecord", "DeviceSynchronize")
        before = {name: shim.count(f"hip{name}") for name in (*others, "ModuleLaunchKernel")}
        arrays.run(a_plan, stream)
        assert {name: shim.count(f"hip{name}") - count for name, count in before.items()} == {**dict.fromkeys(others, 0), "ModuleLaunchKernel": 1}
        assert shim.pending() == 1
        assert_decoded(*arrays.results(stream), *made.exact())


def test_a_run_costs_the_host_little_and_no_memory(hip_device, shim):
    """Times are far above those of an idle machine (some 14 us and 1 ms), to catch what grows with the batch."""
    costs = bench_host.measure(hip_device, shim, repetitions=4)
    for cost in costs.runs:
        assert cost.kept_bytes == 0 and cost.peak_bytes < 4096
        assert {name: count for name, count in cost.calls.items() if count} == {"hipModuleLaunchKernel": 1}
        assert cost.us < 300
    assert max(costs.plan_us, costs.update_us) < 30_000 and 0 < costs.bare_us < 300


def test_runs_are_ordered_with_the_work_of_their_stream(hip_device, shim):
    """The queries come late on the stream, and a reader follows on it: on any other stream the run would come too early or too late."""
    made = make(SMALL)
    with planned(hip_device, made) as a_plan, Arrays(hip_device, made) as arrays, hip_device.stream() as stream:
        arrays.q.fill(0xFF)
        hip_device.synchronize()
        arrays.q.upload(made.arguments["q"], stream)
        arrays.run(a_plan, stream)
        arrays.q.fill(0xFF, stream)
        assert shim.pending() == 3
        assert_decoded(*arrays.results(stream), *made.exact())


def test_a_run_is_given_to_its_stream_alone(hip_device, shim):
    """The default stream would be waited for by the work of others."""
    made = make(SMALL)
    with planned(hip_device, made) as a_plan, Arrays(hip_device, made) as arrays, hip_device.stream() as stream, hip_device.stream() as other:
        hip_device.synchronize()
        arrays.run(a_plan, stream)
        arrays.allocate(4).fill(0, other)
        other.synchronize()
        assert shim.pending() == 1
        assert_decoded(*arrays.results(stream), *made.exact())


def test_plans_on_two_streams_do_not_disturb_each_other(hip_device, shim):
    batches = [make(SMALL), make(SMALL.but(kv_lens=(40, 9, 33, 64), seed=1))]
    with hip_device.stream() as one, hip_device.stream() as other:
        streams = (one, other)
        plans = [planned(hip_device, made) for made in batches]
        arrays = [Arrays(hip_device, made) for made in batches]
        hip_device.synchronize()
        for _ in range(2):
            for a_plan, of_batch, stream in zip(plans, arrays, streams, strict=True):
                of_batch.run(a_plan, stream)
        assert shim.pending() == 4
        for made, of_batch, stream in reversed(list(zip(batches, arrays, streams, strict=True))):
            assert_decoded(*of_batch.results(stream), *made.exact())
        for resource in (*plans, *arrays):
            resource.close()


def test_updates_on_a_stream_come_between_its_runs(hip_device, shim):
    """What was queued before decodes the lengths of before."""
    batches = [make(SMALL), make(SMALL.but(kv_lens=(40, 9, 33, 64), seed=1))]
    batches[1].arguments["sm_scale"] = batches[0].arguments["sm_scale"]
    with (
        planned(hip_device, batches[0]) as a_plan,
        Arrays(hip_device, batches[0]) as first,
        Arrays(hip_device, batches[1]) as then,
        hip_device.stream() as stream,
    ):
        first.run(a_plan, stream)
        a_plan.update(**table_of(batches[1]), stream=stream)
        then.run(a_plan, stream)
        assert shim.pending() > 2
        assert_decoded(*first.results(stream), *batches[0].exact())
        assert_decoded(*then.results(stream), *batches[1].exact())


def test_a_plan_is_used_from_several_threads(device):
    """Each with arrays of its own: no thread's launch gets another's arguments."""
    batches = [make(Case((5, 17), num_heads=2, num_splits=2, seed=seed)) for seed in range(4)]
    tables = table_of(batches[0])
    for made in batches:
        _move_pages(made, tables)
        made.arguments["sm_scale"] = batches[0].arguments["sm_scale"]
    with planned(device, batches[0]) as a_plan:
        arrays = [Arrays(device, made) for made in batches]
        barrier, errors = threading.Barrier(len(batches)), []

        def work(own):
            try:
                barrier.wait()
                for _ in range(3):
                    own.run(a_plan)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(own,)) for own in arrays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        for made, own in zip(batches, arrays, strict=True):
            assert_decoded(*own.results(), *made.exact())
            own.close()


def test_a_graph_keeps_its_plan(device):
    """Whatever is done to the plan meanwhile, and to the memory of others: the graph finds what it was captured with."""
    made, other = make(SMALL), make(SMALL.but(seed=1))
    a_plan, arrays = planned(device, made), Arrays(device, made)
    with device.stream() as stream, device.capture(stream) as graph:
        lse = as_array(arrays.lse, dtype=np.float32, shape=arrays.shape)
        a_plan.run(arrays.q, arrays.cache, out=arrays.out, lse=lse, stream=stream)
    for call, message in (
        (a_plan.close, "Plan closed while a graph uses it; close the graph first"),
        (partial(a_plan.update, **table_of(other)), "Plan updated while a graph uses it; close the graph first; a plan with max_kv_len can be"),
        *((buffer.close, "Buffer closed while a graph uses it") for buffer in (arrays.q, arrays.cache.rows, arrays.out, arrays.lse)),
    ):
        with pytest.raises(DeviceError, match=message):
            call()
    buffers = list(a_plan._buffers.values())
    del a_plan
    gc.collect()
    with planned(device, other) as another, Arrays(device, other) as of_other:
        of_other.run(another)
        for _ in range(2):
            arrays.poison()
            graph.launch()
            assert_decoded(*arrays.results(), *made.exact())
    graph.close()
    for resource in (arrays, *buffers):
        resource.close()


def test_a_fault_leaves_the_plan_usable(monkeypatch):
    """The emulator stops in the middle of a launch: some of a row tile's workgroups were counted as arrived, and the others never come."""
    made = make(SMALL)
    with open_device("emulator") as device, planned(device, made) as a_plan, Arrays(device, made) as arrays:
        expected = arrays.run_for_results(a_plan)

        def stop_midway(*arguments, **options):
            a_plan._buffers["arrivals"].upload(np.full(a_plan.work_list.num_counters, 7, np.uint32))
            raise KernelFault("made to stop")

        monkeypatch.setattr(importlib.import_module("mla_rt.emulator_device"), "run", stop_midway)
        with pytest.raises(KernelFault, match="made to stop"):
            arrays.run(a_plan)
        monkeypatch.undo()
        assert_same_bits(arrays.run_for_results(a_plan), expected)


def test_a_closed_plan_gives_back_what_it_owned(device):
    made = make(SMALL)
    planned(device, made).close()  # the code object stays loaded
    before = len(device._resources)
    with planned(device, made) as a_plan:
        assert len(device._resources) > before
    assert len(device._resources) == before
    a_plan.close()
    with pytest.raises(DeviceError, match="Plan used after it was closed"):
        a_plan.update(**table_of(made))


def test_a_plan_that_fails_gives_back_what_it_took(device, monkeypatch):
    made = make(SMALL)
    planned(device, made).close()
    before = len(device._resources)
    monkeypatch.setattr(device, "_upload", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        planned(device, made)
    assert len(device._resources) == before


def test_without_query_tokens_there_is_nothing_to_launch(emulator_device):
    reports = len(emulator_device.reports)
    made = make(Case((5, 3), (0, 0), num_heads=2))
    with planned(emulator_device, made) as a_plan, Arrays(emulator_device, made) as arrays:
        arrays.run(a_plan)
        assert a_plan.total_q == 0 and len(emulator_device.reports) == reports
        a_plan.update(**table_of(make(Case((5,), (1,), num_heads=2))))
        assert a_plan.total_q == 1


def test_partials_of_automatic_splits_are_bounded(emulator_device):
    """One request that could fill the device alone, and many that nearly fill it."""
    for kv_lens in ([1_000_000], [20_000] * 300):
        made = make(Case((1,) * len(kv_lens), num_heads=16))
        pages = np.array(kv_lens)
        tables = {"qo_indptr": None, "kv_indptr": np.concatenate([[0], np.cumsum(pages)])}
        with plan(emulator_device, **tables, **options_of(made)) as a_plan:
            assert a_plan.work_list.num_partials <= 32 * emulator_device.num_compute_units
            assert a_plan.nbytes < 2**28 + 8 * pages.sum()
