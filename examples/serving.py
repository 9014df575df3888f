"""A serving loop: requests join, grow over page boundaries and leave; each step is one append and one launch of a captured graph.

python examples/serving.py

A model would have a cache for each layer, and capture the runs of all its layers in one graph. The batch has a fixed number of places; a place
without a request is a sequence without tokens, whose results are 0.
"""

import ml_dtypes
import numpy as np

import mla_rt

PLACES, NUM_HEADS, PAGE_SIZE, NUM_PAGES, MAX_KV_LEN, STEPS = 3, 4, 4, 12, 16, 10
SM_SCALE = 576**-0.5
BF16 = ml_dtypes.bfloat16

rng = np.random.default_rng(0)
pages = mla_rt.PageAllocator(NUM_PAGES)
sequences = mla_rt.PagedSequences(pages, PAGE_SIZE)
batch = [sequences.add() for _ in range(PLACES)]
left = [0] * PLACES  # tokens that the request of each place will still make


def new_tokens():
    """How many tokens each place gets in this step: a prompt where a request joins, one where one goes on."""
    counts = []
    for place in range(PLACES):
        joins = left[place] == 0 and rng.random() < 0.5
        counts.append(int(rng.integers(1, 9)) if joins else min(left[place], 1))
        left[place] = int(rng.integers(1, MAX_KV_LEN - counts[-1] + 1)) if joins else left[place] - counts[-1]
    return counts


def release_finished():
    for place in range(PLACES):
        if left[place] == 0:
            sequences.release(batch[place])
            batch[place] = sequences.add()


with (
    mla_rt.open_device("auto") as device,
    mla_rt.PagedKVCache(device, NUM_PAGES, PAGE_SIZE, "fp8_e4m3fn", scale=1 / 64) as cache,
    # max_kv_len: the work is cut once for requests of that length, so that the graph holds for every length up to it.
    mla_rt.plan(
        device,
        None,
        **sequences.tables(batch)._asdict(),
        num_heads=NUM_HEADS,
        page_size=PAGE_SIZE,
        kv_format=cache.kv_format,
        sm_scale=SM_SCALE,
        max_kv_len=MAX_KV_LEN,
    ) as plan,
    device.stream() as stream,
):
    q = device.allocate(PLACES * NUM_HEADS * 576 * 2)
    out = device.allocate(PLACES * NUM_HEADS * 512 * 2)
    lse = device.allocate(PLACES * NUM_HEADS * 4)
    with device.capture(stream) as graph:
        plan.run(q, cache, out=out, lse=lse, stream=stream)

    for step in range(STEPS):
        # What the model makes for the new tokens: here, noise.
        counts = new_tokens()
        rows = rng.standard_normal((sum(counts), 576), np.float32)
        queries = rng.standard_normal((PLACES, NUM_HEADS, 576), np.float32).astype(BF16)

        cache.append(rows, sequences.append(batch, counts), stream)  # quantized on the device
        tables = sequences.tables(batch)
        plan.update(None, *tables, stream=stream)  # the lengths on the device; nothing is allocated
        q.upload(queries, stream)
        graph.launch(stream)
        result = out.download((PLACES, NUM_HEADS, 512), BF16, stream)

        expected, _ = mla_rt.decode(
            queries, cache.to_numpy(stream), **tables._asdict(), page_size=PAGE_SIZE, sm_scale=SM_SCALE, num_splits=1, device=device
        )
        difference = np.abs(result.astype(np.float32) - expected.astype(np.float32)).max()
        print(f"step {step}: {sequences.lengths(batch)} tokens, {pages.num_free} pages free, differs from decode by at most {difference:.4f}")
        assert difference < 0.02
        release_finished()
    graph.close()
