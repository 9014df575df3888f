"""Decode on CuPy's arrays, without a copy and in order with CuPy's streams. Needs a gfx950 GPU, and CuPy for its ROCm.

pip install cupy-rocm-7-0 && python examples/cupy_decode.py
"""

import cupy as cp
import ml_dtypes
import numpy as np

import mla_rt

NUM_HEADS, SM_SCALE = 16, 576**-0.5
BF16 = np.dtype(ml_dtypes.bfloat16)
kv_lens = np.array([60, 7])  # tokens of two requests, page by page of one token

rng = np.random.default_rng(0)
host_q = rng.standard_normal((2, NUM_HEADS, 576), np.float32).astype(BF16)
host_kv = rng.standard_normal((kv_lens.sum(), 1, 576), np.float32).astype(BF16)


class Cache:
    """What `Plan.run` asks of a cache, over an array of CuPy."""

    kv_format, page_size, num_pages, scales, kv_scale = "bf16", 1, len(host_kv), None, 1

    def __init__(self, device, rows):
        self.device, self.rows = device, rows


with (
    mla_rt.open_device("hip") as device,
    mla_rt.plan(device, None, np.concatenate([[0], np.cumsum(kv_lens)]), num_heads=NUM_HEADS, kv_format="bf16", sm_scale=SM_SCALE) as plan,
    device.stream() as stream,
):
    # As bits, which CuPy has in any release: here they are said to be bfloat16. Each is taken behind what CuPy has queued for it.
    q, kv, out = cp.asarray(host_q.view(np.uint16)), cp.asarray(host_kv.view(np.uint16)), cp.empty((2, NUM_HEADS, 512), np.uint16)
    lse = cp.empty((2, NUM_HEADS), np.float32)
    q_bf16, kv_bf16, out_bf16 = (mla_rt.as_array(x, dtype=BF16, device=device, stream=stream) for x in (q, kv, out))
    plan.run(q_bf16, Cache(device, kv_bf16), out=out_bf16, lse=lse, stream=stream)

    # Given back, so that CuPy's stream goes on behind the run. These are the same memory as `out` and `lse`.
    result = cp.from_dlpack(mla_rt.as_array(out_bf16, dtype=np.uint16))
    assert result.data.ptr == out.data.ptr
    values = cp.asnumpy(result).view(BF16)
    expected, _ = mla_rt.decode(host_q, host_kv, kv_indptr=np.concatenate([[0], np.cumsum(kv_lens)]), sm_scale=SM_SCALE, device=device)
    difference = np.abs(values.astype(np.float32) - expected.astype(np.float32)).max()
    print(f"bfloat16{list(values.shape)} on {device.name}, differs from decode by at most {difference:.4f}")
    assert difference == 0
