"""save and load of MXFP4 and FP8: the bytes come back, and what is not such a file is refused with its path and the reason."""

import pathlib

import ml_dtypes
import numpy as np
import pytest

from mla_rt.formats import FP8, MXFP4, load_record, quantize_fp8, quantize_mxfp4

X = np.random.default_rng(0).standard_normal((5, 1, 576), np.float32)


def assert_same_record(loaded, saved):
    assert type(loaded) is type(saved)
    np.testing.assert_array_equal(loaded.codes, saved.codes)
    assert loaded.codes.dtype == np.uint8
    if isinstance(saved, MXFP4):
        np.testing.assert_array_equal(loaded.scales, saved.scales)
    else:
        assert (loaded.scale, loaded.dtype) == (saved.scale, saved.dtype)
        assert isinstance(loaded.scale, np.float32)


@pytest.mark.parametrize("name", ["kv.npz", "kv", "kv.mxfp4"])
@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_mxfp4_round_trip(tmp_path, name, kind):
    saved = quantize_mxfp4(X)
    saved.save(kind(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert_same_record(MXFP4.load(kind(tmp_path / name)), saved)


@pytest.mark.parametrize("dtype", ["e4m3fn", "e4m3fnuz"])
def test_fp8_round_trip(tmp_path, dtype):
    for index, saved in enumerate((quantize_fp8(X, dtype), quantize_fp8(X[:0], dtype, 2.0**-149), FP8(np.arange(256, dtype=np.uint8), 0.3, dtype))):
        path = tmp_path / f"{index}.npz"
        saved.save(path)
        assert_same_record(FP8.load(path), saved)


def test_the_file_is_the_same_every_time(tmp_path):
    for name in "ab":
        quantize_mxfp4(X).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_file_is_plain_npz(tmp_path):
    quantize_fp8(X, "e4m3fnuz").save(tmp_path / "kv.npz")
    with np.load(tmp_path / "kv.npz", allow_pickle=False) as stored:
        assert str(stored["format"]) == "fp8_e4m3fnuz"
        assert sorted(stored) == ["codes", "format", "scale"]


def test_padding_of_wrapped_scales_is_not_saved(tmp_path):
    original = quantize_mxfp4(X)
    scales = np.full((256, 24), 255, np.uint8)
    scales[:5, :18] = original.scales[:, 0]
    MXFP4(original.codes, scales).save(tmp_path / "kv.npz")
    with np.load(tmp_path / "kv.npz") as stored:
        assert stored["scales"].shape == (5, 1, 18)


def test_another_format_is_refused(tmp_path):
    quantize_mxfp4(X).save(tmp_path / "mxfp4.npz")
    quantize_fp8(X).save(tmp_path / "fp8.npz")
    np.savez(tmp_path / "plain.npz", codes=np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match=r"fp8\.npz: its format is 'fp8_e4m3fn'; expected 'mxfp4'"):
        MXFP4.load(tmp_path / "fp8.npz")
    with pytest.raises(ValueError, match=r"mxfp4\.npz: its format is 'mxfp4'; expected 'fp8_e4m3fn' or 'fp8_e4m3fnuz'"):
        FP8.load(tmp_path / "mxfp4.npz")
    for record in (MXFP4, FP8):
        with pytest.raises(ValueError, match=r"plain\.npz: holds no array 'format'"):
            record.load(tmp_path / "plain.npz")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 not a zip", b"\x80\x04K\x01."])
@pytest.mark.parametrize("record", [MXFP4, FP8])
def test_other_files_are_refused(tmp_path, record, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other: not a readable npz file"):
        record.load(path)


def test_a_npy_file_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(ValueError, match=r"x\.npy: not a readable npz file"):
        MXFP4.load(tmp_path / "x.npy")


def test_pickled_members_are_refused(tmp_path):
    np.savez(tmp_path / "kv.npz", format=np.array("mxfp4"), codes=np.array([None]), scales=np.zeros((1, 1), np.uint8))
    with pytest.raises(ValueError, match=r"kv\.npz: not a readable npz file of format 'mxfp4' \(it holds Python objects\)"):
        MXFP4.load(tmp_path / "kv.npz")


def test_either_record_is_loaded_by_its_tag(tmp_path):
    for saved in (quantize_mxfp4(X), quantize_fp8(X), quantize_fp8(X, "e4m3fnuz")):
        saved.save(tmp_path / "kv.npz")
        assert_same_record(load_record(tmp_path / "kv.npz"), saved)
    np.savez(tmp_path / "kv.npz", format="bf16")
    with pytest.raises(ValueError, match=r"its format is 'bf16'; expected 'mxfp4' or 'fp8_e4m3fn' or 'fp8_e4m3fnuz'"):
        load_record(tmp_path / "kv.npz")


def test_damaged_files_are_refused_or_read_right(tmp_path):
    """Cut anywhere or with any byte changed: the same codes or a ValueError. (The zip format does not protect what it does not need.)"""
    path = tmp_path / "kv.npz"
    saved = quantize_mxfp4(X[:1, :, :32])
    saved.save(path)
    whole = path.read_bytes()
    num_refused = 0
    for position in range(len(whole)):
        for damaged in (whole[:position], whole[:position] + bytes([whole[position] ^ (1 << position % 8)]) + whole[position + 1 :]):
            path.write_bytes(damaged)
            try:
                loaded = MXFP4.load(path)
            except ValueError as error:
                assert str(error).startswith(str(path))
                num_refused += 1
            else:
                assert_same_record(loaded, saved)
    assert num_refused > 1.5 * len(whole)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        MXFP4.load(tmp_path / "absent.npz")


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        (MXFP4, {"format": "mxfp4", "codes": np.zeros((2, 16), np.uint8)}, "holds no array 'scales'"),
        (MXFP4, {"format": "mxfp4", "codes": np.zeros((2, 15), np.uint8), "scales": np.zeros((2, 1), np.uint8)}, "codes has shape"),
        (MXFP4, {"format": "mxfp4", "codes": np.zeros((2, 16), np.uint8), "scales": np.zeros((1, 1), np.uint8)}, "scales has shape"),
        (MXFP4, {"format": "mxfp4", "codes": np.zeros((2, 16), np.int8), "scales": np.zeros((2, 1), np.uint8)}, "codes has dtype int8"),
        (FP8, {"format": "fp8_e4m3fn", "codes": np.zeros(3, np.uint8)}, "holds no array 'scale'"),
        (FP8, {"format": "fp8_e4m3fn", "codes": np.zeros(3, np.uint8), "scale": np.float32(-1)}, "scale is"),
        (FP8, {"format": "fp8_e4m3fn", "codes": np.zeros(3, np.uint8), "scale": np.ones(2, np.float32)}, "scale has shape"),
        (FP8, {"format": "fp8_e4m3fn", "codes": np.zeros(3, np.float32), "scale": np.float32(1)}, "codes has dtype float32"),
        (FP8, {"format": "fp8_e5m2", "codes": np.zeros(3, np.uint8), "scale": np.float32(1)}, "its format is 'fp8_e5m2'"),
    ],
)
def test_wrong_contents_are_refused(tmp_path, record, fields, message):
    np.savez(tmp_path / "kv.npz", **fields)
    with pytest.raises(ValueError, match=rf"kv\.npz: {message}"):
        record.load(tmp_path / "kv.npz")


def test_bfloat16_input_survives_as_bytes(tmp_path):
    """numpy's own files lose ml_dtypes dtypes; a record holds only bytes and a tag."""
    saved = quantize_mxfp4(X.astype(ml_dtypes.bfloat16))
    saved.save(tmp_path / "kv.npz")
    np.testing.assert_array_equal(MXFP4.load(tmp_path / "kv.npz").dequantize(), saved.dequantize())
