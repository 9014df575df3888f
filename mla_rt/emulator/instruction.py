"""What a decoded instruction is, and what a row of the instruction tables is.

A table row says how one instruction executes. Decoding an instruction finds its row and *binds* it once: operands are resolved into
readers and writers, and what is left is a plain function `run(group)`, which is all that the machine calls in its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .float_mode import DEFAULT_MODE, FloatMode

if TYPE_CHECKING:
    from .state import Group

Run = Callable[["Group"], None]


class UnsupportedEncoding(Exception):
    """Raised while binding: a field has a value that is reserved or not emulated. The decoder adds pc and bytes."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One instruction as its bit fields.

    size: bytes, literal included; encoding: the format's name in the ISA guide ("SOP2", "VOP3P", "DS", …);
    fields: the format's bit fields by the ISA guide's lower-case names, and `literal` if there is one; raw: its bytes;
    accum_offset: index of a0 in the unified register file; mode: in which floating-point mode it computes.
    """

    size: int
    encoding: str
    fields: Mapping[str, int]
    raw: bytes
    accum_offset: int
    mode: FloatMode = DEFAULT_MODE

    def __getattr__(self, name: str) -> int:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"{self.encoding} has no field {name!r}") from None


@dataclass(frozen=True, slots=True)
class Row:
    """One instruction: its mnemonic (as LLVM prints it, without _e32/_e64) and how an encoded instance becomes a function of a group.

    ends_block: the instruction may change the pc or stop the wave, so the machine must look at the group after it.
    """

    mnemonic: str
    bind: Callable[[Encoded], Run]
    ends_block: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """A decoded, bound instruction."""

    encoded: Encoded
    mnemonic: str
    run: Run
    ends_block: bool = False
