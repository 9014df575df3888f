"""The strict checks: what hardware does not promise, though it may do it, is a fault.

They never change a result. Missing waits, hazards and barriers are checked by the machine; here are races and undefined values.
"""

from __future__ import annotations

from .checks_lds import LdsRaces
from .checks_memory import MemoryRaces
from .checks_undefined import UndefinedValues
from .observer import Observer


def strict_observers() -> tuple[Observer, ...]:
    """The observers of one launch with checks="strict"."""
    return LdsRaces(), MemoryRaces(), UndefinedValues()
