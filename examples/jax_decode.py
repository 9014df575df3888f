"""Decode on JAX's arrays: on a GPU with JAX for ROCm without a copy, else on JAX for the CPU and the emulator.

pip install jax && python examples/jax_decode.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import mla_rt

NUM_HEADS, SM_SCALE = 16, 576**-0.5
kv_indptr = np.array([0, 60, 67])  # tokens of two requests, page by page of one token
keys = jax.random.split(jax.random.key(0))
q = jax.random.normal(keys[0], (2, NUM_HEADS, 576), jnp.bfloat16)
kv = jax.random.normal(keys[1], (67, 1, 576), jnp.bfloat16)


class Cache:
    """What `Plan.run` asks of a cache, over an array of JAX."""

    kv_format, page_size, num_pages, scales, kv_scale = "bf16", 1, len(kv), None, 1

    def __init__(self, device, rows):
        self.device, self.rows = device, rows


def on_device(device, array):
    """JAX's own memory where JAX and the device share the GPU; on the emulator, an upload of it."""
    if device.kind == "hip":
        return mla_rt.as_array(array, device=device)
    values = np.asarray(array)
    return mla_rt.as_array(device.to_device(values), dtype=values.dtype, shape=values.shape)


with (
    mla_rt.open_device("hip" if jax.default_backend() == "gpu" else "emulator") as device,
    mla_rt.plan(device, None, kv_indptr, num_heads=NUM_HEADS, kv_format="bf16", sm_scale=SM_SCALE) as plan,
):
    # JAX's arrays may not be written to: results go to memory of ours, which JAX then takes without a copy, behind the run.
    out = mla_rt.as_array(device.allocate(2 * NUM_HEADS * 512 * 2), dtype=q.dtype, shape=(2, NUM_HEADS, 512))
    lse = mla_rt.as_array(device.allocate(2 * NUM_HEADS * 4), dtype="f4", shape=(2, NUM_HEADS))
    plan.run(on_device(device, q), Cache(device, on_device(device, kv)), out=out, lse=lse)
    result = jax.dlpack.from_dlpack(out)

    logits = jnp.einsum("hc,tc->ht", q[0].astype(jnp.float32), kv[:60, 0].astype(jnp.float32)) * SM_SCALE
    expected = jax.nn.softmax(logits) @ kv[:60, 0, :512].astype(jnp.float32)
    difference = float(jnp.abs(result[0].astype(jnp.float32) - expected).max())
    print(f"{result.dtype}{list(result.shape)} on {device.name} and {jax.default_backend()}, differs from JAX by at most {difference:.4f}")
    assert difference < 0.02
