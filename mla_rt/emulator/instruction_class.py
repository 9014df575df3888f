"""Instructions by class: what part of a compute unit they keep busy."""

from __future__ import annotations

from .completion import MAX_LGKMCNT, MAX_VMCNT, wait_of
from .instruction import Instruction

CLASSES = ("valu", "transcendental", "mfma", "salu", "smem", "lds", "vmem", "wait", "barrier", "branch", "other")
_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
_SOPP = {"s_waitcnt": "wait", "s_barrier": "barrier", "s_branch": "branch"}
_BY_ENCODING = {"SMEM": "smem", "DS": "lds", "FLAT": "vmem", "MUBUF": "vmem", "VOP3PX2": "mfma"}
_F8F6F4_FORMATS = ("fp8", "bf8", "fp6", "bf6", "fp4")


def class_of(instruction: Instruction) -> str:
    """One of CLASSES. "other": s_nop, s_endpgm, s_setprio and what else only the front end of a wave sees; LDS-DMA is "vmem"."""
    encoding, mnemonic = instruction.encoded.encoding, instruction.mnemonic
    if encoding in _BY_ENCODING:
        return _BY_ENCODING[encoding]
    if encoding == "SOPP":
        return "branch" if mnemonic.startswith("s_cbranch") else _SOPP.get(mnemonic, "other")
    if encoding.startswith("SOP"):
        return "branch" if instruction.ends_block else "salu"
    if encoding == "VOP3P-MAI" and not mnemonic.startswith("v_accvgpr"):
        return "mfma"
    return "transcendental" if mnemonic.startswith(_TRANSCENDENTAL) else "valu"


def kind_of(instruction: Instruction) -> str:
    """The mnemonic, with what else decides how long it takes: the operand formats of f8f6f4, the counters that an s_waitcnt waits for."""
    mnemonic, encoded = instruction.mnemonic, instruction.encoded
    if mnemonic.endswith("_f8f6f4"):
        return f"{mnemonic} {_F8F6F4_FORMATS[encoded.cbsz]}×{_F8F6F4_FORMATS[encoded.blgp]}"
    wait = wait_of(instruction)
    if wait is None:
        return mnemonic
    waited_for = [name for name, limit, none in (("vmcnt", wait.vmcnt, MAX_VMCNT), ("lgkmcnt", wait.lgkmcnt, MAX_LGKMCNT)) if limit < none]
    return " ".join([mnemonic, *waited_for])
