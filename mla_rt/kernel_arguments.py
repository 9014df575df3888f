"""The arguments of any kernel, from a file: what `mla-rt emulate` launches it with."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .device import Device
from .resources import Buffer

SCALARS = {**{f"{kind}{bits}": f"{kind}{bits // 8}" for kind in "iu" for bits in (8, 16, 32, 64)}, "f16": "f2", "f32": "f4", "f64": "f8"}
ARGUMENTS = """\
The file of arguments has one table for each argument of the kernel, by its name in the code object:
  n   = { i32 = 64 }                          a scalar; its type is one of i8 to i64, u8 to u64, f16, f32, f64
  x   = { from = "x.npy" }                    a buffer with the contents of a file (paths are relative to the file of arguments)
  y   = { size = 256, fill = 0 }              a buffer of so many bytes, each 0 to 255 (default 255: NaN in every format)
  out = { size = 256, dump = "out.npy", dtype = "float32", shape = [8, 8] }     written to a file when the kernel has ended
  z   = { null = true }                       a null pointer
as TOML (Python 3.11 or newer) or, with the suffix .json, as JSON."""
_BUFFER_KEYS = {"from", "size", "fill", "dump", "dtype", "shape"}


@dataclass(frozen=True)
class Dump:
    """A buffer to write to a file after the run. shape None: one axis."""

    buffer: Buffer
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...] | None

    def write(self) -> int:
        """Write it; returns the number of bytes of the array."""
        shape = (self.buffer.nbytes // self.dtype.itemsize,) if self.shape is None else self.shape
        array = self.buffer.download(shape, self.dtype)
        with self.path.open("wb") as file:  # a file, not its name: numpy would append .npy to it
            np.save(file, array)
        return array.nbytes


def read_arguments(path: Path) -> dict[str, Any]:
    """The tables of the file. ValueError if it is not readable as what its suffix says, or on TOML before Python 3.11."""
    text = path.read_bytes().decode()
    if path.suffix == ".json":
        tables = json.loads(text)  # its error is a ValueError
    else:
        try:
            tomllib = importlib.import_module("tomllib")
        except ImportError:
            raise ValueError(f"{path}: this Python reads no TOML (3.11 and newer do): write the same tables as JSON, in a file named .json") from None
        tables = tomllib.loads(text)  # its error is a ValueError too
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"{path}: one table for each argument is needed")
    return tables


def make_arguments(tables: Mapping[str, Any], folder: Path, device: Device) -> tuple[dict[str, Any], list[Dump]]:
    """Values for a launch, and what to write after it. ValueError naming the argument for what is not as ARGUMENTS describes."""
    values: dict[str, Any] = {}
    dumps = []
    for name, table in tables.items():
        if len(table) == 1 and (kind := next(iter(table))) in SCALARS:
            values[name] = _scalar(name, kind, table[kind])
        elif table == {"null": True}:
            values[name] = None
        else:
            values[name], dump = _buffer(name, table, folder, device)
            dumps += [dump] if dump else []
    return values, dumps


def _scalar(name: str, kind: str, number: Any) -> np.generic:
    dtype = np.dtype(SCALARS[kind])
    if dtype.kind == "f":
        fits = isinstance(number, (int, float))
    else:
        fits = isinstance(number, int) and np.iinfo(dtype).min <= number <= np.iinfo(dtype).max
    if isinstance(number, bool) or not fits:
        raise ValueError(f"argument {name}: {number!r} is no {kind}")
    scalar: np.generic = dtype.type(number)
    return scalar


def _buffer(name: str, table: Mapping[str, Any], folder: Path, device: Device) -> tuple[Buffer, Dump | None]:
    if not table.keys() <= _BUFFER_KEYS or ("from" in table) == ("size" in table) or ("from" in table and "fill" in table):
        raise ValueError(f"argument {name}: a scalar type, null = true, or a buffer with either from or size (and fill) is needed, not {dict(table)}")
    if "from" in table:
        try:
            buffer = device.to_device(np.load(folder / table["from"], allow_pickle=False))
        except (ValueError, EOFError) as error:
            raise ValueError(f"argument {name}: {table['from']} is not a readable npy file ({error})") from None
    else:
        size, fill = table["size"], table.get("fill", 0xFF)
        if not isinstance(size, int) or not isinstance(fill, int) or size < 0 or not 0 <= fill <= 255:
            raise ValueError(f"argument {name}: size is a number of bytes and fill 0 to 255, not {size!r} and {fill!r}")
        buffer = device.allocate(size)
        buffer.fill(fill)
    if "dump" not in table:
        return buffer, None
    try:
        dtype = np.dtype(table.get("dtype", "uint8"))
    except TypeError:
        raise ValueError(f"argument {name}: numpy has no dtype {table['dtype']!r}") from None
    shape = tuple(table["shape"]) if "shape" in table else None
    count = buffer.nbytes // dtype.itemsize if shape is None else int(np.prod(shape))
    if count * dtype.itemsize != buffer.nbytes:  # now, not after the run
        raise ValueError(f"argument {name}: {buffer.nbytes} bytes are no {dtype} array{'' if shape is None else f' of shape {shape}'}")
    return buffer, Dump(buffer, folder / table["dump"], dtype, shape)
