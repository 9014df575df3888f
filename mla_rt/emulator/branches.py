"""Instructions that move the program counter or stop a wave. They report to the machine through `group.next_pc` and `group.stop`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .instruction import Encoded, Row, Run
from .operands import check_scalar_destination, scalar_u64
from .state import EXEC, VCC, Group


def _target(encoded: Encoded) -> int:
    """Byte distance from the instruction to its branch target."""
    words = encoded.simm16 - 0x10000 if encoded.simm16 & 0x8000 else encoded.simm16
    return 4 + 4 * words


def _conditional(mnemonic: str, taken: Callable[[Group], np.ndarray]) -> Row:
    def bind(encoded: Encoded) -> Run:
        distance = _target(encoded)

        def run(group: Group) -> None:
            condition = taken(group)
            if condition.all():
                group.next_pc = group.pc + distance
            elif condition.any():
                group.next_pc = np.where(condition, group.pc + distance, group.pc + 4)

        return run

    return Row(mnemonic, bind, ends_block=True)


def _branch(encoded: Encoded) -> Run:
    distance = _target(encoded)

    def run(group: Group) -> None:
        group.next_pc = group.pc + distance

    return run


def _stop(reason: str) -> Callable[[Encoded], Run]:
    def bind(encoded: Encoded) -> Run:
        def run(group: Group) -> None:
            group.stop = reason

        return run

    return bind


def _return_address(group: Group) -> np.ndarray:
    return np.full(group.n, group.pc + 4, np.uint64)


def _jump(save: bool) -> Callable[[Encoded], Run]:
    """s_setpc_b64, s_swappc_b64: the pc from an SGPR pair, where waves may differ."""

    def bind(encoded: Encoded) -> Run:
        source = scalar_u64(encoded.ssrc0)
        destination = check_scalar_destination(encoded.sdst, 2) if save else None

        def run(group: Group) -> None:
            group.next_pc = source(group).astype(np.int64)
            if destination is not None:
                group.write_sgpr64(destination, _return_address(group))

        return run

    return bind


def _getpc(encoded: Encoded) -> Run:
    destination = check_scalar_destination(encoded.sdst, 2)
    return lambda group: group.write_sgpr64(destination, _return_address(group))


def _call(encoded: Encoded) -> Run:
    destination, distance = check_scalar_destination(encoded.sdst, 2), _target(encoded)

    def run(group: Group) -> None:
        group.write_sgpr64(destination, _return_address(group))
        group.next_pc = group.pc + distance

    return run


BRANCH_SOP1 = {
    28: Row("s_getpc_b64", _getpc),
    29: Row("s_setpc_b64", _jump(save=False), ends_block=True),
    30: Row("s_swappc_b64", _jump(save=True), ends_block=True),
}
BRANCH_SOPK = {21: Row("s_call_b64", _call, ends_block=True)}
BRANCH_SOPP = {
    1: Row("s_endpgm", _stop("end"), ends_block=True),
    2: Row("s_branch", _branch, ends_block=True),
    4: _conditional("s_cbranch_scc0", lambda group: ~group.scc),
    5: _conditional("s_cbranch_scc1", lambda group: group.scc),
    6: _conditional("s_cbranch_vccz", lambda group: group.read_sgpr64(VCC) == 0),
    7: _conditional("s_cbranch_vccnz", lambda group: group.read_sgpr64(VCC) != 0),
    8: _conditional("s_cbranch_execz", lambda group: group.read_sgpr64(EXEC) == 0),
    9: _conditional("s_cbranch_execnz", lambda group: group.read_sgpr64(EXEC) != 0),
    10: Row("s_barrier", _stop("barrier"), ends_block=True),
}
