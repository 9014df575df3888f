"""MXFP4 and FP8 on the host: quantize, dequantize, wrap existing bytes, save and load.

Inputs of the quantizers are float32, bfloat16 or float16 arrays of either byte order: all three are exact in float32, from whose
bits every code is derived. float64 is refused, because a first rounding to float32 could move a value onto a tie of the second; the
caller who accepts that writes `.astype(np.float32)`.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .elements import E4M3, E4M3_FORMATS, INFINITY_BITS, MX_BLOCK, MXFP4_VALUES, SCALE_RULES, magnitude_bits, quantize_blocks

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Path = str | os.PathLike[str]
_Record = TypeVar("_Record")

_ACCEPTED_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))

_SMALLEST_NORMAL = np.float32(2.0**-126)

# Elements handled at a time: the temporaries of a chunk (some 20 bytes an element) stay within a core's second-level cache.
_CHUNK_ELEMENTS = 1 << 16

# ---- Records ----


@dataclass(frozen=True, eq=False)
class MXFP4:
    """A tensor of E2M1 codes with one E8M0 scale for each 32 consecutive elements of the last axis.

    codes   uint8 [..., width / 2]: two elements a byte, the even index in the low nibble; width a positive multiple of 32.
    scales  uint8 [..., width / 32]: row-major, one row for each row of codes (not swizzled).

    Both may be the buffers of another library: codes keeps its shape and is not copied unless strided; scales may have more columns
    than blocks, more entries on its first axis than codes has, and may be 2-D [rows, columns] over all rows of codes flattened.
    The padding is dropped without being read, so that the record's own scales are always `codes.shape[:-1] + (width / 32,)`.

    Raises TypeError for a dtype other than uint8 and ValueError for shapes that do not fit.
    """

    codes: _Bytes
    scales: _Bytes

    def __post_init__(self) -> None:
        codes = _as_bytes(self.codes, "codes")
        if codes.ndim == 0 or codes.shape[-1] == 0 or codes.shape[-1] % (MX_BLOCK // 2):
            raise ValueError(f"codes has shape {codes.shape}; its last axis must be a positive multiple of {MX_BLOCK // 2} bytes")
        object.__setattr__(self, "codes", codes)
        object.__setattr__(self, "scales", _trim_scales(_as_bytes(self.scales, "scales"), codes.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> _Floats:
        """float32 array of `shape`: element times scale, exact; NaN throughout a block whose scale is NaN.

        Products of 2^128 and more, which only scale codes 253 and 254 can form, are beyond float32 and become infinities.
        """
        values = np.empty(self.shape, np.float32)
        out = values.reshape(-1, MX_BLOCK)
        packed = self.codes.reshape(-1, MX_BLOCK // 2)
        scales = self.scales.reshape(-1)
        for chunk in _chunks(len(scales), MX_BLOCK):
            row = scales[chunk, None].astype(np.uint16) << 4
            out[chunk, 0::2] = MXFP4_VALUES[row | packed[chunk] & 15]
            out[chunk, 1::2] = MXFP4_VALUES[row | packed[chunk] >> 4]
        return values

    def save(self, path: _Path) -> None:
        """Write an npz file holding the bytes and a tag of the format, under exactly this path."""
        _write(path, "mxfp4", codes=self.codes, scales=self.scales)

    @classmethod
    def load(cls, path: _Path) -> MXFP4:
        """Read what save wrote. ValueError if the file is not such a file or holds another format; OSError if it cannot be read."""
        _, arrays = _read(path, _MXFP4_FIELDS)
        return _rebuild(path, cls, **arrays)


@dataclass(frozen=True, eq=False)
class FP8:
    """A tensor of E4M3 codes with one scale.

    codes  uint8 [...], at least one axis; not copied unless strided.
    scale  np.float32, positive and finite: the multiplier that dequantizes. A Python float or an array of one element is taken too.
    dtype  "e4m3fn" or "e4m3fnuz": what the bytes mean.

    Raises TypeError for codes that are not uint8 or a scale that is not a number, ValueError for a scale or dtype out of range.
    """

    codes: _Bytes
    scale: np.float32
    dtype: str

    def __post_init__(self) -> None:
        codes = _as_bytes(self.codes, "codes")
        if codes.ndim == 0:
            raise ValueError("codes has no axis; at least one is needed")
        _e4m3(self.dtype)
        object.__setattr__(self, "codes", codes)
        object.__setattr__(self, "scale", _as_scale(self.scale))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scale."""
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self) -> _Floats:
        """float32 array of `shape`: element times scale, rounded once to float32 (infinite where that overflows)."""
        with np.errstate(over="ignore", under="ignore"):
            table = E4M3_FORMATS[self.dtype].values * self.scale
        values = np.empty(self.shape, np.float32)
        out, codes = values.reshape(-1), self.codes.reshape(-1)
        for chunk in _chunks(len(codes), 1):  # Indexing widens its index eightfold.
            out[chunk] = table[codes[chunk]]
        return values

    def save(self, path: _Path) -> None:
        """Write an npz file holding the bytes, the scale and a tag of the format, under exactly this path."""
        _write(path, f"fp8_{self.dtype}", codes=self.codes, scale=np.asarray(self.scale))

    @classmethod
    def load(cls, path: _Path) -> FP8:
        """Read what save wrote. ValueError if the file is not such a file or holds another format; OSError if it cannot be read."""
        tag, arrays = _read(path, _FP8_FIELDS)
        return _rebuild(path, cls, dtype=tag.removeprefix("fp8_"), **arrays)


# ---- Quantizers ----


def quantize_mxfp4(x: npt.NDArray[Any], scale_rule: str = "even") -> MXFP4:
    """Quantize x [..., width] (float32, bfloat16 or float16; width a positive multiple of 32) to MXFP4.

    With amax the largest magnitude of a block, its scale is 2^(e - 2), at least 2^-127, where 2 is the exponent of E2M1's largest value and
        "floor"  e = floor(log2(amax)), as in OCP MX 1.0, 6.3;
        "ceil"   e = ceil(log2(amax));
        "even"   e = floor(log2(amax rounded to E2M1's precision, one mantissa bit, ties to even)).
    Elements are x / scale (exact) rounded to the nearest E2M1 value, ties to the even code; beyond 6 they become 6, with their sign.
    The standard leaves NaN and infinities to the implementation. Here a block that holds either has the scale NaN (255) and zero
    codes: an infinity has no scale under which its neighbours would survive, so it is not hidden. A block of zeros has the scale 2^-127.
    Under "even" and "ceil" an amax close to float32's largest value may round up to 2^128, which dequantizes to infinity in float32.

    Raises TypeError for another dtype or a rule that is no str, ValueError for another width or rule.
    """
    _require_name("scale_rule", scale_rule, SCALE_RULES)
    x = _as_floats(x)
    width = x.shape[-1]
    if width == 0 or width % MX_BLOCK:
        raise ValueError(f"x has shape {x.shape}; its last axis must be a positive multiple of {MX_BLOCK}")
    blocks = x.reshape(-1, MX_BLOCK)
    codes = np.empty((len(blocks), MX_BLOCK // 2), np.uint8)
    scales = np.empty(len(blocks), np.uint8)
    for chunk in _chunks(len(blocks), MX_BLOCK):
        codes[chunk], scales[chunk] = quantize_blocks(blocks[chunk], SCALE_RULES[scale_rule])
    return MXFP4(codes.reshape(*x.shape[:-1], width // 2), scales.reshape(*x.shape[:-1], width // MX_BLOCK))


def quantize_fp8(x: npt.NDArray[Any], dtype: str = "e4m3fn", scale: float | np.float32 | None = None) -> FP8:
    """Quantize x [...] (float32, bfloat16 or float16, at least one axis) to FP8 with one scale for the tensor.

    dtype  "e4m3fn" or "e4m3fnuz".
    scale  the multiplier that dequantizes, rounded to float32, positive and finite. None: the largest finite |x| divided by the dtype's
           largest value (448, 240), in float32; 1 if there is none or it is zero. Where the quotient is subnormal and so coarsely
           rounded, it is raised by one place: the scale is never zero and nothing saturates.

    Two roundings: x / scale to float32, then that to the nearest E4M3 value, ties to even, subnormals included. It is OFP8's
    saturating conversion: beyond the largest value, infinities included, the largest value with the sign of x; NaN stays NaN (0x7F in
    e4m3fn, 0x80 in e4m3fnuz). In e4m3fnuz what rounds to zero is 0x00 for either sign.

    Raises TypeError for another dtype of x, ValueError for a dtype or scale out of range.
    """
    e4m3 = _e4m3(dtype)
    x = _as_floats(x)
    flat = x.reshape(-1)
    chunks = _chunks(len(flat), 1)
    if scale is None:
        amax = max((_largest_finite(flat[chunk]) for chunk in chunks), default=np.float32(0))
        scale = amax / e4m3.max_value if amax else np.float32(1)
        if scale < _SMALLEST_NORMAL:
            scale = np.nextafter(scale, _SMALLEST_NORMAL)
    scale = _as_scale(scale)
    codes = np.empty(len(flat), np.uint8)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for chunk in chunks:
            codes[chunk] = e4m3.encode(np.divide(flat[chunk].astype(np.float32, copy=False), scale, dtype=np.float32))
    return FP8(codes.reshape(x.shape), scale, dtype)


def _largest_finite(values: npt.NDArray[Any]) -> np.float32:
    magnitude = magnitude_bits(values.astype(np.float32, copy=False))
    magnitude *= magnitude < INFINITY_BITS
    largest: np.float32 = magnitude.max().view(np.float32)
    return largest


# ---- Checks of arguments ----


def _as_floats(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    x = np.asarray(x)
    if x.dtype.newbyteorder("=") not in _ACCEPTED_DTYPES:
        advice = ""
        if x.dtype.kind == "f":
            advice = " (x.astype(np.float32), if that rounding may come first)"
        elif x.dtype in (np.dtype(np.uint16), np.dtype("V2")):
            advice = " (bits of bfloat16: x.view(ml_dtypes.bfloat16))"
        raise TypeError(f"x has dtype {x.dtype}; accepted are {', '.join(map(str, _ACCEPTED_DTYPES))}{advice}")
    if x.ndim == 0:
        raise ValueError("x has no axis; at least one is needed")
    return x


def _as_bytes(array: npt.NDArray[Any], name: str) -> _Bytes:
    array = np.asarray(array)
    if array.dtype != np.uint8:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be uint8 (the bits of the codes)")
    return np.asarray(array, order="C")


def _as_scale(scale: Any) -> np.float32:
    number = np.asarray(_float_of(scale) if type(scale) is int else scale)
    if number.dtype.kind not in "fiu":
        raise TypeError(f"scale is {scale!r}; it must be a real number")
    if number.size != 1:
        raise ValueError(f"scale has shape {number.shape}; it must be one number for the tensor")
    with np.errstate(over="ignore", under="ignore"):
        rounded: np.float32 = np.float32(number.item())
    if not 0 < rounded < np.inf:
        raise ValueError(f"scale is {scale!r}; it must be positive and finite in float32")
    return rounded


def _float_of(number: int) -> float:
    """For integers that numpy has no dtype for, of which float64 may not hold the largest either."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _e4m3(dtype: str) -> E4M3:
    _require_name("dtype", dtype, E4M3_FORMATS)
    return E4M3_FORMATS[dtype]


def _require_name(option: str, value: Any, known: Collection[str]) -> None:
    names = ", ".join(map(repr, known))
    if not isinstance(value, str):
        raise TypeError(f"{option} is {value!r}; it must be a str, one of {names}")
    if value not in known:
        raise ValueError(f"{option} is {value!r}; it must be one of {names}")


def _trim_scales(scales: _Bytes, codes_shape: tuple[int, ...]) -> _Bytes:
    rows, num_blocks = codes_shape[:-1], codes_shape[-1] // (MX_BLOCK // 2)
    num_rows = int(np.prod(rows, dtype=np.int64))
    if scales.ndim and scales.shape[-1] >= num_blocks:
        scales = scales[..., :num_blocks]
        same_axes = scales.ndim == len(codes_shape)
        if same_axes and (not rows or (scales.shape[1:-1] == rows[1:] and scales.shape[0] >= rows[0])):
            return np.ascontiguousarray(scales[: rows[0]] if rows else scales)
        if scales.ndim == 2 and scales.shape[0] >= num_rows:
            return np.ascontiguousarray(scales[:num_rows]).reshape(*rows, num_blocks)
    shapes = dict.fromkeys([(*rows, num_blocks), (num_rows, num_blocks)])  # the same for codes of two axes
    raise ValueError(
        f"scales has shape {scales.shape}; codes of shape {codes_shape} need {' or '.join(map(str, shapes))}, "
        "with any padding at the end of the first and last axes"
    )


def _chunks(num_items: int, elements_per_item: int) -> list[slice]:
    step = _CHUNK_ELEMENTS // elements_per_item
    return [slice(start, start + step) for start in range(0, num_items, step)]


# ---- Files ----

_MXFP4_FIELDS: dict[str, tuple[str, ...]] = {"mxfp4": ("codes", "scales")}
_FP8_FIELDS: dict[str, tuple[str, ...]] = {f"fp8_{name}": ("codes", "scale") for name in E4M3_FORMATS}

# What zipfile, zlib and numpy raise on damaged files; RuntimeError (and its NotImplementedError) is zipfile's word for flags and
# compression methods it does not know, OSError for offsets before the start of the file.
UNREADABLE = (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


def load_record(path: _Path) -> MXFP4 | FP8:
    """Read what `save` of either record wrote. ValueError if the file is not such a file; OSError if it cannot be read."""
    tag, arrays = _read(path, _MXFP4_FIELDS | _FP8_FIELDS)
    if tag in _MXFP4_FIELDS:
        return _rebuild(path, MXFP4, **arrays)
    return _rebuild(path, FP8, dtype=tag.removeprefix("fp8_"), **arrays)


def why_unreadable(error: Exception) -> str:
    """What an UNREADABLE error says, without numpy's advice to load Python objects: no file of ours has any, and they can run code."""
    return "it holds Python objects" if "allow_pickle" in str(error) else str(error)


def _write(path: _Path, tag: str, **arrays: Any) -> None:
    with open(path, "wb") as file:  # Given a name, numpy would append ".npz" to it.
        np.savez(file, format=np.array(tag), **arrays)


def _read(path: _Path, fields: dict[str, tuple[str, ...]]) -> tuple[str, dict[str, npt.NDArray[Any]]]:
    """The tag of a file and its arrays; `fields` names what each acceptable tag needs."""
    expected = " or ".join(map(repr, fields))
    with open(path, "rb") as file:
        try:
            zipfile.ZipFile(file).close()  # numpy would take what is no zip file for a pickle.
            file.seek(0)
            stored = dict(np.load(file, allow_pickle=False))
        except UNREADABLE as error:
            raise ValueError(f"{os.fspath(path)}: not a readable npz file of format {expected} ({why_unreadable(error)})") from None
    if "format" not in stored:
        raise ValueError(f"{os.fspath(path)}: holds no array 'format', which names the format; expected {expected}")
    tag = str(stored["format"])
    if tag not in fields:
        raise ValueError(f"{os.fspath(path)}: its format is {tag!r}; expected {expected}")
    missing = [name for name in fields[tag] if name not in stored]
    if missing:
        raise ValueError(f"{os.fspath(path)}: holds no array {', '.join(map(repr, missing))}")
    return tag, {name: stored[name] for name in fields[tag]}


def _rebuild(path: _Path, record: Callable[..., _Record], **fields: Any) -> _Record:
    try:
        return record(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
