"""How undefined bits pass through the instructions whose result needs only a part of its sources: which rule is whose."""

from __future__ import annotations

import numpy as np

from .instruction import Instruction
from .undefined_bits import BIT_RULES
from .undefined_lanes import LANE_RULES, dpp_rule, matrix_rule
from .undefined_parts import FIELDS, HALF_SELECT, PART_RULES, field_rule, half_select_rule, packed_rule, sdwa_rule
from .undefined_scalar import SCALAR_RULES
from .undefined_sources import Rule

_RULES: dict[str, Rule] = {**BIT_RULES, **PART_RULES, **LANE_RULES, **SCALAR_RULES}


def rule_for(instruction: Instruction) -> Rule | None:
    """The rule of an instruction; None for the general one."""
    encoded, name = instruction.encoded, instruction.mnemonic
    if encoded.encoding in ("VOP3P-MAI", "VOP3PX2"):
        return matrix_rule
    if encoded.encoding.endswith("_DPP"):
        return dpp_rule(encoded)
    if encoded.encoding.endswith("_SDWA"):
        return sdwa_rule
    if name.startswith("v_pk_") and encoded.encoding == "VOP3P":
        return packed_rule(encoded, name)
    if name in FIELDS:
        return field_rule(encoded, name)
    if name in HALF_SELECT and encoded.encoding == "VOP3":
        return half_select_rule
    if name.startswith(("v_cmp_", "v_cmpx_")):
        return lambda sources: np.broadcast_to(sources.whole(), sources.group.mask.shape)
    return None if encoded.fields.get("clamp") else _RULES.get(name)
