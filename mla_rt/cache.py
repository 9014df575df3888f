"""The paged KV cache on a device: new tokens are quantized there and written to their slots; rows, or all of it, are read back."""

from __future__ import annotations

import math
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from .arguments import INT32_MAX, as_count, as_integers, as_ndarray, as_positive, counted
from .arrays import DeviceArray, as_array
from .batch import QK_WIDTH, ROW_BYTES, SCALES_PER_ROW, make_cache
from .decode_kernel import KV_FORMATS
from .device import Device
from .elements import SCALE_RULES
from .errors import UnsupportedArch
from .formats import FP8, MXFP4
from .requests import as_page_size
from .resources import Buffer, Stream

_BF16, _INT64 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.int64)
_ELEMENTS = {_BF16: "bf16", np.dtype(np.float32): "f32"}  # of new_kv
_SLOTS = {np.dtype(np.int32): "i32", _INT64: "i64"}


class PagedKVCache:
    """`num_pages` pages of `page_size` tokens, each a row of 576 numbers (512 latent, 64 rope) in one format, in the memory of a device.

    A slot is a token's place: page * page_size + offset, 0 to num_slots - 1. Contents are undefined until they are written.

    device, num_pages, page_size, kv_format, scale_rule; num_slots: num_pages * page_size; kv_scale: np.float32, dequantizes an FP8 cache, 1 otherwise
    rows    Buffer: [num_slots, row_bytes] with row_bytes 1152 (bf16), 576 (fp8_e4m3fn) or 288 (mxfp4)
    scales  Buffer: [num_slots, 18] E8M0 of an MXFP4 cache, else None
    """

    def __init__(self, device: Device, num_pages: int, page_size: int, kv_format: str, *, scale: float | np.float32 = 1.0, scale_rule: str = "even"):
        """Allocate the pages.

        page_size   a power of two from 1 to 128
        kv_format   "bf16", "fp8_e4m3fn" or "mxfp4"
        scale       of fp8_e4m3fn: multiplies the codes; values beyond 448 * scale saturate
        scale_rule  of mxfp4: "floor", "ceil" or "even", see `quantize_mxfp4`

        TypeError or ValueError for an argument; UnsupportedArch if there are no kernels for the device; DeviceError if there is no room.
        """
        if not isinstance(device, Device):
            raise TypeError(f"device is a {type(device).__name__}; one that open_device opened is needed")
        if device.arch not in KV_FORMATS:
            raise UnsupportedArch(f"there are no cache kernels for {device.arch}, only for {', '.join(KV_FORMATS)}")
        for name, value, known in (("kv_format", kv_format, KV_FORMATS[device.arch]), ("scale_rule", scale_rule, tuple(SCALE_RULES))):
            if not isinstance(value, str):
                raise TypeError(f"{name} is {value!r}; a str is needed")
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it is one of {', '.join(known)}")
        self.device, self.kv_format, self.scale_rule = device, kv_format, scale_rule
        self.num_pages, self.page_size = as_count("num_pages", num_pages), as_page_size(page_size)
        self.num_slots = self.num_pages * self.page_size
        self.kv_scale = as_positive("scale", scale)
        if self.kv_scale != 1 and kv_format != "fp8_e4m3fn":
            raise ValueError(f"scale is {scale}; a cache of {kv_format} has none")
        self._module = device.packaged("kv_cache")
        self.scales: Buffer | None = None
        with ExitStack() as undo:
            self.rows = undo.enter_context(device.allocate(self.num_slots * ROW_BYTES[kv_format]))
            if kv_format == "mxfp4":
                self.scales = undo.enter_context(device.allocate(self.num_slots * SCALES_PER_ROW))
            undo.pop_all()

    @classmethod
    def from_record(cls, device: Device, record: np.ndarray | FP8 | MXFP4, page_size: int, *, scale_rule: str = "even") -> PagedKVCache:
        """A cache that holds what `load` takes, with as many pages as that fills."""
        stored = make_cache(record, as_page_size(page_size))
        cache = cls(device, len(stored.rows), page_size, stored.kv_format, scale=stored.kv_scale, scale_rule=scale_rule)
        try:
            cache.load(record)
        except BaseException:
            cache.close()
            raise
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of rows and scales."""
        return self.rows.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def append(self, new_kv: Any, slot_mapping: Any, stream: Stream | None = None) -> None:
        """Quantize new_kv[i] and write it to slot slot_mapping[i], on the device; the codes are those of the host's quantizers, to the bit.

        new_kv        [num_tokens, 576] bfloat16 or float32
        slot_mapping  [num_tokens] int64 or int32; -1: the token is skipped

        numpy arrays (slots: integers of any dtype) are uploaded, which allocates and, on a GPU, waits for the device. Anything else is taken as it
        lies on the device (see `as_array`), and queued without a copy: a Buffer counts as bfloat16 or int64; rows of new_kv may be any multiple of
        16 bytes apart, from an address that is one. It has to stay until the launch is done.

        Slots in a numpy array are checked: ValueError, naming it, for one that the cache does not have or that comes twice. Slots on the device are
        not: those outside the cache are skipped like -1, and of two tokens for one slot a mixture is left.
        A bfloat16 cache takes bfloat16 bit by bit; NaNs of float32 keep their sign only. FP8 saturates (`quantize_fp8`), a block of MXFP4 with a NaN
        or infinity becomes NaN (`quantize_mxfp4`).

        Raises TypeError or ValueError before anything is launched; DeviceError after `close`.
        """
        kv = _check_new_kv(new_kv) if isinstance(new_kv, np.ndarray | list | tuple) else self._on_device("new_kv", new_kv, (QK_WIDTH,), _BF16, stream)
        if isinstance(slot_mapping, np.ndarray | list | tuple):
            slots: Any = self._check_slots("slot_mapping", slot_mapping, skip=True)
            _require_distinct(slots)
        else:
            slots = self._on_device("slot_mapping", slot_mapping, (), _INT64, stream)
        for name, array, known in (("new_kv", kv, _ELEMENTS), ("slot_mapping", slots, _SLOTS)):
            if array.dtype not in known:
                raise TypeError(f"{name} has dtype {array.dtype}; {' or '.join(map(str, known))} is needed")
        num_tokens, num_slots = kv.shape[0], slots.shape[0]
        if num_tokens != num_slots:
            raise ValueError(f"new_kv has {counted(num_tokens, 'token')}, slot_mapping {counted(num_slots, 'slot')}")
        if num_tokens > INT32_MAX:
            raise ValueError(f"new_kv has {num_tokens} tokens; the limit is {INT32_MAX}")
        constants = self._module.constants
        stride = QK_WIDTH if isinstance(kv, np.ndarray) else _row_stride(kv, constants["APPEND_ALIGNMENT"])
        if num_tokens == 0:
            return
        if self.device._capture is not None:
            self.device._captured(stream, *(used for array in (kv, slots) if isinstance(array, DeviceArray) for used in (array, array.owner)))
        with ExitStack() as uploads:
            self.device.launch(
                self._module.kernel(f"kv_append_{self.kv_format}_from_{_ELEMENTS[kv.dtype]}_{_SLOTS[slots.dtype]}"),
                -(-num_tokens // constants["APPEND_ROWS_PER_WORKGROUP"]),
                stream=stream,
                new_kv=self._uploaded(kv, uploads, stream),
                slot_mapping=self._uploaded(slots, uploads, stream),
                rows=self.rows,
                scales=self.scales,
                num_slots=np.int64(self.num_slots),
                new_kv_stride=np.int64(stride),
                num_tokens=np.int32(num_tokens),
                kv_scale=self.kv_scale,
                scale_rounding=SCALE_RULES[self.scale_rule],
            )

    def gather(self, slots: Any, stream: Stream | None = None) -> np.ndarray:
        """The rows of these slots ([n] integers, in any order, also repeated), dequantized: float32 [n, 576].

        Only the rows asked for are copied off the device. Waits for them. ValueError for a slot that the cache does not have.
        """
        checked = self._check_slots("slots", slots)
        num_rows, row_bytes = len(checked), ROW_BYTES[self.kv_format]
        if num_rows == 0:
            return np.empty((0, QK_WIDTH), np.float32)
        with ExitStack() as resources:
            gathered = resources.enter_context(self.device.allocate(num_rows * row_bytes))
            scales = None if self.scales is None else resources.enter_context(self.device.allocate(num_rows * SCALES_PER_ROW))
            self.device.launch(
                self._module.kernel(f"kv_gather_{self.kv_format}"),
                -(-num_rows // self._module.constants[f"GATHER_ROWS_PER_WORKGROUP_{self.kv_format.upper()}"]),
                stream=stream,
                rows=self.rows,
                scales=self.scales,
                slots=self._uploaded(checked, resources, stream),
                gathered=gathered,
                gathered_scales=scales,
                num_rows=np.int32(num_rows),
            )
            record = self._record((num_rows,), gathered, scales, stream)
        return record.astype(np.float32) if isinstance(record, np.ndarray) else record.dequantize()

    def to_numpy(self, stream: Stream | None = None) -> np.ndarray | FP8 | MXFP4:
        """The whole cache as it is: bfloat16 [num_pages, page_size, 576], or an FP8 or MXFP4 record of that shape. Waits for it."""
        return self._record((self.num_pages, self.page_size), self.rows, self.scales, stream)

    def load(self, record: np.ndarray | FP8 | MXFP4, stream: Stream | None = None) -> None:
        """Fill the whole cache with the bytes of a bfloat16 array, FP8 or MXFP4 of [num_pages, page_size, 576] or [num_slots, 576] elements.

        ValueError for another format or shape, or an FP8 scale that is not the cache's (nothing is converted); TypeError for what is no record.
        """
        stored = make_cache(record, self.page_size)
        if stored.kv_format != self.kv_format:
            raise ValueError(f"the record is {stored.kv_format}, the cache {self.kv_format}")
        if stored.kv_scale != self.kv_scale:
            raise ValueError(f"the record's scale is {stored.kv_scale}, the cache's {self.kv_scale}: make the cache with scale=record.scale")
        if len(stored.rows) != self.num_pages:
            raise ValueError(f"the record has {counted(len(stored.rows), 'page')} of {self.page_size} tokens, the cache {self.num_pages}")
        self.rows.upload(stored.rows, stream)
        if self.scales is not None and stored.scales is not None:
            self.scales.upload(stored.scales, stream)

    def close(self) -> None:
        """Give the memory back, after all work given before. Closing again does nothing; any other use raises DeviceError."""
        self.rows.free()
        if self.scales is not None:
            self.scales.free()

    def __enter__(self) -> PagedKVCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PagedKVCache of {self.num_pages} x {self.page_size} tokens, {self.kv_format}, on {self.device!r}>"

    def _record(self, shape: tuple[int, ...], rows: Buffer, scales: Buffer | None, stream: Stream | None) -> np.ndarray | FP8 | MXFP4:
        row_bytes = rows.download((*shape, ROW_BYTES[self.kv_format]), np.uint8, stream)
        if scales is not None:
            return MXFP4(row_bytes, scales.download((*shape, SCALES_PER_ROW), np.uint8, stream))
        return row_bytes.view(_BF16) if self.kv_format == "bf16" else FP8(row_bytes, self.kv_scale, "e4m3fn")

    def _uploaded(self, array: Any, uploads: ExitStack, stream: Stream | None) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        buffer = uploads.enter_context(self.device.allocate(array.nbytes))
        buffer.upload(array, stream)
        return buffer

    def _check_slots(self, name: str, slots: Any, *, skip: bool = False) -> np.ndarray:
        slots = as_integers(name, slots, ndim=1, limit=None)
        outside = (slots < (-1 if skip else 0)) | (slots >= self.num_slots)
        if outside.any():
            bad = int(outside.argmax())
            skipped = ", and -1 to skip a token" if skip else ""
            raise ValueError(f"{name}[{bad}] is {slots[bad]}; the cache has slots 0 to {self.num_slots - 1}{skipped}")
        return slots.astype(np.int64)

    def _on_device(self, name: str, array: Any, row_shape: tuple[int, ...], buffer_dtype: np.dtype, stream: Stream | None) -> DeviceArray:
        """What lies on the device, as an array [n, *row_shape], packed within a row."""
        try:
            if isinstance(array, Buffer):
                row_bytes = math.prod(row_shape) * buffer_dtype.itemsize
                view = as_array(array, dtype=buffer_dtype, shape=(array.nbytes // row_bytes, *row_shape), device=self.device)
            else:
                view = as_array(array, device=self.device, stream=stream)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        if len(view.shape) != 1 + len(row_shape) or view.shape[1:] != row_shape:
            raise ValueError(f"{name} has shape {list(view.shape)}; [{', '.join(map(str, ('num_tokens', *row_shape)))}] is needed")
        if view.strides[-1] != 1 and view.shape[-1] > 1:
            raise ValueError(f"{name} of shape {list(view.shape)} has strides {list(view.strides)} in elements; the last must be 1")
        return view


def _check_new_kv(new_kv: Any) -> np.ndarray:
    new_kv = as_ndarray("new_kv", new_kv)
    if new_kv.ndim != 2 or new_kv.shape[1] != QK_WIDTH:
        raise ValueError(f"new_kv has shape {new_kv.shape}; [num_tokens, {QK_WIDTH}] is needed")
    return np.ascontiguousarray(new_kv)


def _row_stride(new_kv: Any, alignment: int) -> int:
    """Elements from row to row. ValueError if a row does not begin at a multiple of `alignment` bytes."""
    stride = new_kv.strides[0] if new_kv.shape[0] > 1 else QK_WIDTH
    stride_bytes = stride * new_kv.dtype.itemsize
    if new_kv.address % alignment:
        raise ValueError(f"new_kv is at address {new_kv.address:#x}: its rows begin at multiples of {alignment} bytes")
    if stride_bytes % alignment:
        raise ValueError(f"new_kv has rows {stride_bytes} bytes apart: they begin at multiples of {alignment} bytes")
    return stride


def _require_distinct(slot_mapping: np.ndarray) -> None:
    order = np.argsort(slot_mapping, kind="stable")
    in_order = slot_mapping[order]
    twice = (in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0)
    if twice.any():
        at = int(twice.argmax())
        raise ValueError(f"slot_mapping[{order[at]}] and [{order[at + 1]}] are both {in_order[at]}; a slot takes one token")
