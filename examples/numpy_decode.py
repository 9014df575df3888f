"""Decode straight from numpy arrays, in the three cache formats, and joined from two shards of the cache.

python examples/numpy_decode.py
"""

import ml_dtypes
import numpy as np

import mla_rt

NUM_HEADS, SM_SCALE = 16, 576**-0.5

rng = np.random.default_rng(0)
kv_lens = np.array([150, 0, 17])  # tokens of three requests, with one query token each
kv_indptr = np.concatenate([[0], np.cumsum(kv_lens)])
kv = rng.standard_normal((kv_lens.sum(), 576), np.float32)  # 512 latent columns and 64 of rope, of one request after the other
q = rng.standard_normal((len(kv_lens), NUM_HEADS, 576), np.float32).astype(ml_dtypes.bfloat16)

with mla_rt.open_device("auto") as device:
    print(f"on {device.name}: {device.reason}")
    caches = {"bf16": kv.astype(ml_dtypes.bfloat16), "FP8": mla_rt.quantize_fp8(kv), "MXFP4": mla_rt.quantize_mxfp4(kv)}
    for name, cache in caches.items():
        out, lse = mla_rt.decode(q, cache, kv_indptr=kv_indptr, sm_scale=SM_SCALE, device=device)
        stored = cache.dequantize() if name != "bf16" else cache
        exact, _ = mla_rt.reference.mla_decode(q, stored, qo_indptr=range(len(kv_lens) + 1), kv_indptr=kv_indptr, sm_scale=SM_SCALE)
        rms = np.sqrt(np.mean((out.astype(np.float64) - exact) ** 2) / np.mean(exact**2))
        print(f"{name:5} {cache.nbytes:7} bytes of cache, RMS error {rms:.4f} of the result's RMS value")
        assert rms < 0.003  # rounding to bfloat16 alone makes 0.0017
    assert not out[1].any() and np.isneginf(lse[1]).all()  # a request without tokens

    # Shards of one request, as if they lay on two machines: each gives out and lse, and those merge.
    shards = [
        mla_rt.decode(q[:1], caches["bf16"][part], kv_indptr=[0, len(range(*part.indices(150)))], sm_scale=SM_SCALE, device=device)
        for part in (slice(0, 100), slice(100, 150))
    ]
    merged, _ = mla_rt.merge(*zip(*shards, strict=True))
    whole, _ = mla_rt.decode(q[:1], caches["bf16"][:150], kv_indptr=[0, 150], sm_scale=SM_SCALE, device=device)
    difference = np.abs(merged.astype(np.float32) - whole.astype(np.float32)).max()
    print(f"two shards merged differ from the whole by at most {difference:.4f}")
    assert difference < 0.01
