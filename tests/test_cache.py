"""PagedKVCache: what the device appends is what the host's quantizers make, to the bit, and nothing else is touched; loading and reading back.

Every test poisons the cache first. Strict checks but for the million values; both kinds of device where the path differs.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mla_rt import as_array, decode, open_device
from mla_rt.cache import PagedKVCache
from mla_rt.decode_kernel import KV_FORMATS
from mla_rt.device import Device
from mla_rt.elements import SCALE_RULES
from mla_rt.errors import DeviceError
from mla_rt.formats import quantize_fp8, quantize_mxfp4

BF16 = ml_dtypes.bfloat16
POISON = 0xA5
KINDS = [("bf16", "even"), ("fp8_e4m3fn", "even"), *(("mxfp4", rule) for rule in SCALE_RULES)]
FP8_SCALE = np.float32(0.37)  # no power of two: the division rounds


def make_cache(device: Device, num_pages: int, page_size: int, kv_format: str, scale_rule: str = "even") -> PagedKVCache:
    scale = FP8_SCALE if kv_format == "fp8_e4m3fn" else 1.0
    cache = PagedKVCache(device, num_pages, page_size, kv_format, scale=scale, scale_rule=scale_rule)
    for buffer in (cache.rows, cache.scales):
        if buffer is not None:
            buffer.fill(POISON)
    return cache


def stored_bytes(cache: PagedKVCache) -> tuple[np.ndarray, np.ndarray]:
    """(rows, scales) as they lie on the device, uint8 [num_slots, ...]; scales of no columns if there are none."""
    rows = cache.rows.download((cache.num_slots, cache.rows.nbytes // cache.num_slots), np.uint8)
    return rows, np.empty((cache.num_slots, 0), np.uint8) if cache.scales is None else cache.scales.download((cache.num_slots, 18), np.uint8)


def quantized_bytes(cache: PagedKVCache, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same of x [n, 576] by the host."""
    if cache.kv_format == "mxfp4":
        record = quantize_mxfp4(x, cache.scale_rule)
        return record.codes, record.scales
    with np.errstate(invalid="ignore"):  # NaNs to bfloat16
        rows = x.astype(BF16).view(np.uint8) if cache.kv_format == "bf16" else quantize_fp8(x, scale=FP8_SCALE).codes
    return rows, np.empty((len(x), 0), np.uint8)


def assert_holds(cache: PagedKVCache, x: np.ndarray, slots: np.ndarray) -> None:
    """x[i] in slot slots[i] (-1: nowhere), and poison everywhere else."""
    for name, found, codes in zip(("rows", "scales"), stored_bytes(cache), quantized_bytes(cache, x), strict=True):
        wanted = np.full_like(found, POISON)
        wanted[slots[slots >= 0]] = codes[slots >= 0]
        differ = np.argwhere(found != wanted)
        assert not len(differ), f"{name}: {len(differ)} bytes differ, the first in slot {differ[0][0]}, byte {differ[0][1]}"


def hard_values(num_tokens: int, seed: int) -> np.ndarray:
    """float32 [num_tokens, 576] in which every block of 32 has its own magnitude, from subnormal to the largest, and its own kind of hardness."""
    rng = np.random.default_rng(seed)
    blocks = num_tokens * 18
    kind = rng.integers(0, 8, (blocks, 1))
    exponent = np.where(kind % 4 == 3, rng.integers(-150, 127, (blocks, 1)), rng.integers(-12, 12, (blocks, 1)))
    plain = rng.standard_normal((blocks, 32))
    # Midpoints between codes of E2M1 (under power-of-two scales) and of E4M3 (times its scale), among them exact ties.
    e2m1 = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 6.5, 7.0, 0.0], (blocks, 32)) * rng.choice([-1, 1], (blocks, 32))
    e4m3 = (rng.integers(0, 500, (blocks, 32)) / 2 + 0.25) * np.exp2(rng.integers(-10, 1, (blocks, 32)).astype(np.float64))
    chosen = np.where(kind % 4 == 1, e2m1, np.where(kind % 4 == 2, e4m3 * np.float64(FP8_SCALE) * np.exp2(-exponent.astype(np.float64)), plain))
    with np.errstate(over="ignore", under="ignore"):
        x = (chosen * np.exp2(exponent.astype(np.float64))).astype(np.float32)
    # A step of the last place either way: next to a tie, but none.
    x = (x.view(np.int32) + np.where(kind >= 4, rng.integers(-1, 2, x.shape), 0).astype(np.int32)).view(np.float32)
    special = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000001, 0, 0x80000000, 0x7F7FFFFF], np.uint32)
    at = rng.random(x.shape) < np.where(rng.random((blocks, 1)) < 0.1, 0.05, 0)
    x[at] = rng.choice(special, at.sum()).view(np.float32)
    return x.reshape(num_tokens, 576)


def test_the_hard_values_are_hard():
    x = hard_values(400, 0)
    finite = np.abs(x[np.isfinite(x)])
    assert np.isnan(x).any() and np.isinf(x).any() and ((finite > 0) & (finite < 2.0**-126)).sum() > 1000
    record = quantize_mxfp4(x, "even")
    assert len(np.unique(record.scales)) > 200 and len(np.unique(record.codes)) == 256
    scale = np.repeat(np.ldexp(1.0, record.scales.astype(np.int64) - 127), 32, axis=1)
    with np.errstate(invalid="ignore"):
        assert np.isin(np.abs(x / scale), [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).sum() > 10_000  # ties
    codes = quantize_fp8(x, scale=FP8_SCALE).codes
    assert len(np.unique(codes)) == 255  # all but one of the two NaNs
    with np.errstate(all="ignore"):
        quotient = np.abs(x / FP8_SCALE)
    ties = (ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).smallest_subnormal.astype(np.float32) * (np.arange(20) + 0.5)).astype(np.float32)
    assert np.isin(quotient, ties).sum() > 20


# ---- append against the host's quantizers ----


@pytest.mark.parametrize(("kv_format", "scale_rule"), KINDS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_million_values_to_the_bit(kv_format, scale_rule, dtype):
    num_tokens = 1737  # 1 000 512 values
    with np.errstate(invalid="ignore", over="ignore"):
        x = hard_values(num_tokens, 1).astype(dtype)
    assert x.size > 1_000_000
    slots = np.random.default_rng(2).permutation(num_tokens + 55)[:num_tokens]
    with open_device("emulator") as device, make_cache(device, num_tokens + 55, 1, kv_format, scale_rule) as cache:
        cache.append(x, slots)
        if dtype == BF16 and kv_format == "bf16":
            wanted = np.full((cache.num_slots, 1152), POISON, np.uint8)
            wanted[slots] = x.view(np.uint8)  # bit by bit, signalling NaNs too
            np.testing.assert_array_equal(stored_bytes(cache)[0], wanted)
        else:
            assert_holds(cache, x, slots)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("kv_format", "scale_rule"), KINDS)
def test_strictly_on_both_devices(device: Device, kv_format, scale_rule, page_size):
    """Numbers of tokens around those of a workgroup, -1 among the slots, everything else poison."""
    rng = np.random.default_rng(4)
    for num_tokens in (1, 7, 8, 9, 17):
        x = hard_values(num_tokens, num_tokens)
        slots = rng.permutation(32)[:num_tokens]
        slots[num_tokens // 2 :: 5] = -1
        with make_cache(device, 32 // page_size, page_size, kv_format, scale_rule) as cache:
            cache.append(x, slots)
            assert_holds(cache, x, slots)


@pytest.mark.parametrize("timing", ["latest", "hardware"])
@pytest.mark.parametrize(("kv_format", "scale_rule"), [("bf16", "even"), ("fp8_e4m3fn", "even"), ("mxfp4", "ceil")])
def test_whenever_loads_land_and_in_any_order(kv_format, scale_rule, timing):
    x, slots = hard_values(19, 5), np.random.default_rng(6).permutation(24)[:19]
    with open_device("emulator", checks="strict", timing=timing, seed=3) as device, make_cache(device, 3, 8, kv_format, scale_rule) as cache:
        cache.append(x, slots)
        assert_holds(cache, x, slots)
        np.testing.assert_array_equal(cache.gather(slots), values_of(cache)[slots])


def test_nothing_to_append(emulator_device: Device):
    with make_cache(emulator_device, 2, 4, "mxfp4") as cache:
        cache.append(np.empty((0, 576), np.float32), [])
        cache.append(hard_values(3, 0), [-1, -1, -1])
        assert_holds(cache, np.empty((0, 576), np.float32), np.empty(0, np.int64))
        assert cache.gather([]).shape == (0, 576)


# ---- what lies on the device ----


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("kv_format", KV_FORMATS["gfx950"])
def test_device_arrays_without_a_copy(device: Device, kv_format, dtype, slot_dtype):
    """Rows far apart in a wider array; slots outside the cache, which are skipped and cannot be refused."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((11, 576)).astype(dtype)
    limits = np.iinfo(slot_dtype)
    slots = rng.permutation(16)[:11].astype(slot_dtype)
    slots[[1, 4, 6, 9]] = -1, 16, limits.max, limits.min
    wide = np.full((11, 2112), np.nan, dtype)
    wide[:, 1536:] = x
    with make_cache(device, 4, 4, kv_format) as cache, device.to_device(wide) as on_device, device.to_device(slots) as slots_on_device:
        base = as_array(on_device, dtype=dtype, shape=wide.shape)
        allocated = len(device._resources)
        view = type(base)(base.address + 1536 * x.itemsize, (11, 576), dtype, device, strides=(2112, 1), owner=on_device)
        cache.append(view, as_array(slots_on_device, dtype=slot_dtype))
        assert len(device._resources) == allocated
        assert_holds(cache, x, np.where((slots < 0) | (slots >= 16), -1, slots).astype(np.int64))


def test_buffers_count_as_bf16_and_int64(device: Device):
    x, slots = np.random.default_rng(3).standard_normal((5, 576)).astype(BF16), np.array([7, 0, -1, 3, 2])
    with make_cache(device, 8, 1, "bf16") as cache, device.to_device(x) as rows, device.to_device(slots) as mapping:
        cache.append(rows, mapping)
        wanted = np.full((8, 1152), POISON, np.uint8)
        wanted[[7, 0, 3, 2]] = x.view(np.uint8)[[0, 1, 3, 4]]
        np.testing.assert_array_equal(stored_bytes(cache)[0], wanted)
        with device.to_device(x.astype(np.float32)) as singles, pytest.raises(ValueError, match="new_kv has 10 tokens, slot_mapping 5 slots"):
            cache.append(singles, mapping)


def test_appends_on_a_stream_are_in_its_order(hip_device: Device):
    """On the stand-in runtime, work of a stream waits until it is asked for."""
    x = hard_values(4, 9)
    with make_cache(hip_device, 4, 1, "mxfp4") as cache, hip_device.stream() as stream:
        cache.append(x[::-1], np.arange(4), stream)
        cache.append(x, np.arange(4), stream)
        np.testing.assert_array_equal(cache.gather(np.arange(4), stream), quantize_mxfp4(x).dequantize())


def test_a_captured_append_writes_what_lies_there_at_replay(device: Device):
    first, second = hard_values(6, 10), hard_values(6, 11)
    with device.to_device(first) as rows, device.to_device(np.arange(6)) as mapping, device.stream() as stream:
        cache = make_cache(device, 8, 1, "mxfp4")
        array = as_array(rows, dtype=np.float32, shape=first.shape)
        with device.capture(stream) as graph:
            cache.append(array, mapping, stream)
        rows.upload(second)
        mapping.upload(np.array([7, 6, 5, -1, 3, 2]))
        graph.launch(stream)
        stream.synchronize()
        assert_holds(cache, second, np.array([7, 6, 5, -1, 3, 2]))
        for buffer in (rows, mapping):
            with pytest.raises(DeviceError, match="graph"):
                buffer.free()
        with pytest.raises(DeviceError, match="graph"):
            cache.close()
        graph.close()
        cache.close()


# ---- whole caches ----


def values_of(cache: PagedKVCache) -> np.ndarray:
    record = cache.to_numpy()
    values = record.astype(np.float32) if isinstance(record, np.ndarray) else record.dequantize()
    return values.reshape(cache.num_slots, 576)


@pytest.mark.parametrize("kv_format", KV_FORMATS["gfx950"])
def test_load_and_read_back(device: Device, kv_format):
    x = np.random.default_rng(13).standard_normal((24, 576)).astype(np.float32)
    record: Any = {"bf16": x.astype(BF16), "fp8_e4m3fn": quantize_fp8(x, scale=FP8_SCALE), "mxfp4": quantize_mxfp4(x)}[kv_format]
    values = record.astype(np.float32) if kv_format == "bf16" else record.dequantize()
    with PagedKVCache.from_record(device, record, 8) as cache, make_cache(device, 3, 8, kv_format) as other:
        assert (cache.num_pages, cache.page_size, cache.num_slots, cache.kv_format) == (3, 8, 24, kv_format)
        assert cache.nbytes == record.nbytes - (4 if kv_format == "fp8_e4m3fn" else 0)
        assert cache.to_numpy().shape == (3, 8, 576)
        np.testing.assert_array_equal(values_of(cache), values)
        order = np.array([23, 0, 7, 8, 7])
        gathered = cache.gather(order)
        assert gathered.dtype == np.float32
        np.testing.assert_array_equal(gathered, values[order])
        other.load(cache.to_numpy())
        for found, wanted in zip(stored_bytes(other), stored_bytes(cache), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kv_format", KV_FORMATS["gfx950"])
def test_decode_reads_what_append_wrote(emulator_device: Device, kv_format):
    rng = np.random.default_rng(14)
    x, slots = rng.standard_normal((9, 576)).astype(np.float32), np.array([4, 5, 6, 7, 12, 13, 14, 15, 0])
    q = rng.standard_normal((1, 2, 576)).astype(BF16)
    with make_cache(emulator_device, 4, 4, kv_format) as cache:
        cache.append(x, slots)
        paged = {"kv_indptr": [0, 3], "kv_indices": [1, 3, 0], "kv_last_page_len": [1], "page_size": 4}
        found = decode(q, cache.to_numpy(), sm_scale=0.05, device=emulator_device, **paged)
    flat: Any = {"bf16": x.astype(BF16), "fp8_e4m3fn": quantize_fp8(x, scale=FP8_SCALE), "mxfp4": quantize_mxfp4(x)}[kv_format]
    wanted = decode(q, flat, sm_scale=0.05, kv_indptr=[0, 9], device=emulator_device)
    np.testing.assert_array_equal(found[0].view(np.uint16), wanted[0].view(np.uint16))
    np.testing.assert_array_equal(found[1], wanted[1])


# ---- refused ----

X = np.zeros((3, 576), np.float32)
BAD_APPENDS = {
    "slot beyond": (X, [0, 32, 1], ValueError, r"slot_mapping\[1\] is 32; the cache has slots 0 to 31, and -1 to skip a token"),
    "slot below -1": (X, [0, 1, -2], ValueError, r"slot_mapping\[2\] is -2"),
    "slot of 64 bits": (X, np.array([0, 2**63, 1], np.uint64), ValueError, r"slot_mapping\[1\] is 9223372036854775808"),
    "slot twice": (X, [5, -1, 5], ValueError, r"slot_mapping\[0\] and \[2\] are both 5"),
    "slots of floats": (X, [0.0, 1.0, 2.0], TypeError, "slot_mapping has dtype float64"),
    "slots of two axes": (X, [[0, 1, 2]], ValueError, r"slot_mapping has shape \(1, 3\)"),
    "too few slots": (X, [0, 1], ValueError, "new_kv has 3 tokens, slot_mapping 2 slots"),
    "width": (X[:, :512], [0, 1, 2], ValueError, r"new_kv has shape \(3, 512\); \[num_tokens, 576\]"),
    "axes": (X[None], [0, 1, 2], ValueError, r"new_kv has shape \(1, 3, 576\)"),
    "float64": (X.astype(np.float64), [0, 1, 2], TypeError, "new_kv has dtype float64; bfloat16 or float32 is needed"),
    "float16": (X.astype(np.float16), [0, 1, 2], TypeError, "new_kv has dtype float16"),
    "no array": (None, [0, 1, 2], TypeError, "new_kv: a NoneType is no device array"),
}


@pytest.fixture
def cache(emulator_device: Device):
    with make_cache(emulator_device, 2, 16, "mxfp4") as cache:
        yield cache


@pytest.mark.parametrize("case", BAD_APPENDS)
def test_bad_appends_change_nothing(cache: PagedKVCache, case):
    new_kv, slots, error, message = BAD_APPENDS[case]
    with pytest.raises(error, match=message):
        cache.append(new_kv, slots)
    assert_holds(cache, X[:0], np.empty(0, np.int64))


def test_bad_device_arrays(cache: PagedKVCache, emulator_device: Device):
    device = emulator_device
    with device.to_device(np.zeros(4 * 1160, np.uint8)) as buffer, device.to_device(np.arange(2)) as slots, open_device("emulator") as elsewhere:

        def array(offset: int = 0, strides: tuple[int, int] = (576, 1), dtype: Any = BF16, shape: tuple[int, int] = (2, 576)) -> Any:
            return type(base)(base.address + offset, shape, dtype, device, strides=strides, owner=buffer)

        base = as_array(buffer)
        for new_kv, mapping, error, message in (
            (buffer, slots, ValueError, "new_kv: a buffer of 4640 bytes is no bfloat16 array"),
            (array(offset=8), slots, ValueError, "new_kv is at address .*: its rows begin at multiples of 16 bytes"),
            (array(strides=(580, 1)), slots, ValueError, "new_kv has rows 1160 bytes apart: they begin at multiples of 16 bytes"),
            (array(strides=(1, 2)), slots, ValueError, r"new_kv of shape \[2, 576\] has strides \[1, 2\] in elements; the last must be 1"),
            (array(dtype=np.int16), slots, TypeError, "new_kv has dtype int16; bfloat16 or float32 is needed"),
            (array(shape=(2, 288)), slots, ValueError, r"new_kv has shape \[2, 288\]; \[num_tokens, 576\] is needed"),
            (array(), as_array(slots, dtype=np.uint64), TypeError, "slot_mapping has dtype uint64; int32 or int64 is needed"),
            (
                array(),
                type(base)(slots.address, (2,), np.int32, device, strides=(2,), owner=slots),
                ValueError,
                "slot_mapping of shape .* has strides",
            ),
            (array(), elsewhere.to_device(np.arange(2)), ValueError, "slot_mapping: the buffer is on another device"),
        ):
            with pytest.raises(error, match=message):
                cache.append(new_kv, mapping)
        cache.append(array(), slots)


BAD_CACHES = {
    "kv_format": ({"kv_format": "fp8_e4m3fnuz"}, ValueError, "kv_format is 'fp8_e4m3fnuz'; it is one of bf16, fp8_e4m3fn, mxfp4"),
    "no str": ({"kv_format": 4}, TypeError, "kv_format is 4; a str is needed"),
    "page_size": ({"page_size": 48}, ValueError, "page_size is 48"),
    "num_pages": ({"num_pages": 0}, ValueError, "num_pages is 0"),
    "scale_rule": ({"scale_rule": "round"}, ValueError, "scale_rule is 'round'; it is one of floor, even, ceil"),
    "scale": ({"kv_format": "fp8_e4m3fn", "scale": -1.0}, ValueError, "scale is -1.0"),
    "scale of another format": ({"scale": 2.0}, ValueError, "scale is 2.0; a cache of mxfp4 has none"),
    "device": ({"device": "emulator"}, TypeError, "device is a str"),
}


@pytest.mark.parametrize("case", BAD_CACHES)
def test_bad_caches(emulator_device: Device, case):
    changes, error, message = BAD_CACHES[case]
    allocated = len(emulator_device._resources)
    with pytest.raises(error, match=message):
        PagedKVCache(**{"device": emulator_device, "num_pages": 2, "page_size": 16, "kv_format": "mxfp4", **changes})
    assert len(emulator_device._resources) == allocated


def test_records_that_do_not_fit(emulator_device: Device):
    rows = np.ones((32, 576), np.float32)
    with make_cache(emulator_device, 2, 16, "fp8_e4m3fn") as cache:
        for record, error, message in (
            (quantize_mxfp4(rows), ValueError, "the record is mxfp4, the cache fp8_e4m3fn"),
            (quantize_fp8(rows, "e4m3fnuz"), ValueError, "the record is fp8_e4m3fnuz, the cache fp8_e4m3fn"),
            (quantize_fp8(rows, scale=0.5), ValueError, "the record's scale is 0.5, the cache's 0.37.*: make the cache with scale=record.scale"),
            (quantize_fp8(rows[:16], scale=FP8_SCALE), ValueError, "the record has 1 page of 16 tokens, the cache 2"),
            (quantize_fp8(rows[:, :512], scale=FP8_SCALE), ValueError, r"kv.codes has shape \(32, 512\)"),
            (rows, TypeError, "kv has dtype float32"),
        ):
            with pytest.raises(error, match=message):
                cache.load(record)
        for slots, message in (([0, 32], r"slots\[1\] is 32; the cache has slots 0 to 31$"), ([-1], r"slots\[0\] is -1")):
            with pytest.raises(ValueError, match=message):
                cache.gather(slots)
        with pytest.raises(ValueError, match="kv_format is 'fp8_e4m3fnuz'"):
            PagedKVCache.from_record(emulator_device, quantize_fp8(rows, "e4m3fnuz"), 16)
        assert (stored_bytes(cache)[0] == POISON).all()


def test_a_closed_cache(emulator_device: Device):
    cache = make_cache(emulator_device, 2, 16, "mxfp4")
    cache.close()
    cache.close()
    uses = (
        lambda: cache.append(X, [0, 1, 2]),
        lambda: cache.gather([0]),
        cache.to_numpy,
        lambda: cache.load(quantize_mxfp4(np.ones((32, 576), np.float32))),
    )
    for use in uses:
        with pytest.raises(DeviceError, match="used after it was closed"):
            use()


def test_no_room_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    with open_device("emulator") as device:
        device.packaged("kv_cache")
        allocate, allocated = device.allocate, len(device._resources)
        monkeypatch.setattr(device, "allocate", lambda nbytes: allocate(nbytes if nbytes > 1000 else 1 << 60))  # no room for the scales
        with pytest.raises(DeviceError, match="allocate"):
            PagedKVCache(device, 2, 16, "mxfp4")
        assert len(device._resources) == allocated
