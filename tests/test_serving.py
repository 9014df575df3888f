"""A serving loop: requests join and leave, their caches grow over page boundaries; every step must be what decode gives from scratch."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from mla_rt import decode, open_device, plan
from mla_rt.cache import PagedKVCache
from mla_rt.device import Device
from mla_rt.page_allocator import PageAllocator, PagedSequences
from tolerance import assert_same_bits

NUM_SLOTS, NUM_HEADS, PAGE_SIZE, NUM_PAGES, MAX_KV_LEN = 3, 2, 4, 16, 20
SM_SCALE = 0.05


class Requests:
    """NUM_SLOTS places in the batch; a place without a request is a sequence without tokens. Seeded: each loop sees the same traffic."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.sequences = PagedSequences(PageAllocator(NUM_PAGES), PAGE_SIZE)
        self.places = [self.sequences.add() for _ in range(NUM_SLOTS)]
        self.left = [0] * NUM_SLOTS  # tokens that each request will still make
        self.joined = self.finished = self.pages_begun = 0

    def step(self) -> tuple[np.ndarray, np.ndarray]:
        """(new rows [n, 576] float32, their slots [n]): a prompt for each request that joins, a token for each that goes on."""
        counts = []
        for place, left in enumerate(self.left):
            if left == 0 and self.rng.random() < 0.4:  # joins
                counts.append(int(self.rng.integers(1, 8)))
                self.left[place] = int(self.rng.integers(1, MAX_KV_LEN - counts[-1] + 1))
                self.joined += 1
            else:
                counts.append(min(left, 1))
                self.left[place] -= counts[-1]
        slots = self.sequences.append(self.places, counts)
        self.pages_begun += int((slots % PAGE_SIZE == 0).sum())
        return self.rng.standard_normal((len(slots), 576), np.float32), slots

    def leave(self) -> None:
        """Those that have made their last token, after the step that used it."""
        for place, left in enumerate(self.left):
            if left == 0 and self.sequences.lengths([self.places[place]])[0]:
                self.sequences.release(self.places[place])
                self.places[place] = self.sequences.add()
                self.finished += 1

    def tables(self) -> dict[str, np.ndarray]:
        return self.sequences.tables(self.places)._asdict()

    def queries(self) -> np.ndarray:
        return self.rng.standard_normal((NUM_SLOTS, NUM_HEADS, 576), np.float32).astype(ml_dtypes.bfloat16)


@pytest.fixture
def cache(hip_device: Device, kv_format: str) -> Iterator[PagedKVCache]:
    with PagedKVCache(hip_device, NUM_PAGES, PAGE_SIZE, kv_format) as cache:
        cache.rows.fill(0xFF)
        yield cache


@pytest.fixture(scope="module")
def plain_emulator() -> Iterator[Device]:
    """Without strict checks, which take most of the time and are for other tests."""
    with open_device("emulator") as device:
        yield device


def download(out, lse, stream, total_q=NUM_SLOTS):
    bits = out.download((total_q, NUM_HEADS, 512), np.uint16, stream)
    return bits.view(ml_dtypes.bfloat16), lse.download((total_q, NUM_HEADS), np.float32, stream)


@pytest.mark.parametrize(("kv_format", "steps"), [("bf16", 64), ("mxfp4", 6)])
def test_a_graph_decodes_every_step_as_decode_would(cache, steps, hip_device, plain_emulator):
    """One captured run, replayed after each step's lengths, tokens and queries were written on its stream."""
    requests = Requests(seed=0)
    options = {"page_size": PAGE_SIZE, "sm_scale": SM_SCALE, "num_splits": 1}
    with (
        plan(hip_device, None, **requests.tables(), num_heads=NUM_HEADS, kv_format=cache.kv_format, max_kv_len=MAX_KV_LEN, **options) as a_plan,
        hip_device.stream() as stream,
        hip_device.allocate(NUM_SLOTS * NUM_HEADS * 1152) as q,
        hip_device.allocate(NUM_SLOTS * NUM_HEADS * 1024) as out,
        hip_device.allocate(NUM_SLOTS * NUM_HEADS * 4) as lse,
    ):
        with hip_device.capture(stream) as graph:
            a_plan.run(q, cache, out=out, lse=lse, stream=stream)
        with graph:
            for _ in range(steps):
                new_rows, slots = requests.step()
                queries, tables = requests.queries(), requests.tables()
                cache.append(new_rows, slots, stream)
                a_plan.update(None, **tables, stream=stream)
                q.upload(queries, stream)
                for buffer in (out, lse):
                    buffer.fill(0xFF, stream)
                graph.launch(stream)
                result = download(out, lse, stream)
                assert_same_bits(result, decode(queries, cache.to_numpy(), **tables, **options, device=plain_emulator))
                requests.leave()
    if steps == 64:
        assert min(requests.joined, requests.finished) >= 8 and requests.pages_begun > requests.joined + 8


@pytest.mark.parametrize("kv_format", ["fp8_e4m3fn"])
def test_a_plan_made_anew_each_step_decodes_as_decode_would(cache, hip_device, plain_emulator):
    """Only the requests that have tokens are in the batch, and the work list changes with their lengths."""
    requests = Requests(seed=1)
    options = {"page_size": PAGE_SIZE, "sm_scale": SM_SCALE, "num_splits": 2}
    sizes = set()
    with plan(hip_device, [0], [0], num_heads=NUM_HEADS, kv_format=cache.kv_format, **options) as a_plan, hip_device.stream() as stream:
        for _ in range(8):
            new_rows, slots = requests.step()
            cache.append(new_rows, slots, stream)
            active = [place for place in requests.places if requests.sequences.lengths([place])[0]]
            tables, queries = requests.sequences.tables(active)._asdict(), requests.queries()[: len(active)]
            sizes.add(len(active))
            a_plan.update(None, **tables, stream=stream)
            rows = len(active) * NUM_HEADS
            with hip_device.to_device(queries) as q, hip_device.allocate(rows * 1024) as out, hip_device.allocate(rows * 4) as lse:
                a_plan.run(q, cache, out=out, lse=lse, stream=stream)
                result = download(out, lse, stream, len(active))
            assert_same_bits(result, decode(queries, cache.to_numpy(), **tables, **options, device=plain_emulator))
            requests.leave()
    assert len(sizes) > 2
