"""Random words that the decoder takes are instructions for LLVM too: printed as assembly, they assemble to the same bytes.

How an instruction is written is taken from the forms that `test_decoder` finds LLVM to accept; the registers, constants and modifiers in it are
replaced by those of the random word.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter

from asm import accepted
from test_decoder import CASES, FORMS, assembled, texts
from test_decoder import TABLES as ROWS

from mla_rt.emulator import encodings
from mla_rt.emulator.decoder import decode
from mla_rt.errors import UnknownInstruction

ACCUM_OFFSET = 64
WORDS_PER_ROW = 12
PLAIN_FORMS = tuple(encoding for encoding in FORMS if encoding.partition("_")[2] == "" and encoding != "SOPP")
LAYOUTS = {layout.name: layout for layout in vars(encodings).values() if isinstance(layout, encodings.Format)}
OPERANDS = ("sdst", "ssrc0", "ssrc1", "vdst", "src0", "src1", "vsrc1", "src2")
TOKEN = re.compile(r"\b[sv](?:(\d+)|\[(\d+):(\d+)\])(?!\w)")
NAMED = {102: "flat_scratch_lo", 103: "flat_scratch_hi", 106: "vcc_lo", 107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi"}
PAIRS = {102: "flat_scratch", 106: "vcc", 126: "exec"}
OTHERS = {251: "src_vccz", 252: "src_execz", 253: "src_scc", 240: "0.5", 241: "-0.5", 242: "1.0", 243: "-1.0", 244: "2.0", 245: "-2.0", 246: "4.0",
          247: "-4.0", 248: "0.15915494309189532"}  # fmt: skip


def operand(code: int, width: int, literal: int | None) -> str:
    """An operand code as LLVM writes it, for an operand of `width` registers."""
    if code >= 256 or code <= 101:
        letter, first = ("v", code - 256) if code >= 256 else ("s", code)
        return f"{letter}{first}" if width == 1 else f"{letter}[{first}:{first + width - 1}]"
    if code == 255 and literal is not None:
        return f"{literal:#x}"
    if 128 <= code <= 208:
        return str(code - 128 if code <= 192 else 192 - code)
    return (PAIRS if width == 2 else NAMED).get(code) or OTHERS.get(code) or f"<operand {code}>"


@functools.cache
def form(encoding: str, opcode: int) -> tuple[str, bytes, tuple[str, ...]] | None:
    """A row as LLVM takes it: its text, its bytes, and the field of each of its operands; None if its text is out of the ordinary."""
    mnemonic = ROWS["VOP3" if encoding == "VOP3SD" else encoding][opcode].mnemonic
    for text, _ in texts(encoding, mnemonic):
        code = assembled().get(text)
        if code is None or "literal" in text or "op_sel" in text or "bitop3" in text or "m0" in text or "0x" in text:
            continue
        fields = decode(code, 0, ACCUM_OFFSET).encoded.fields
        if decode(code, 0, ACCUM_OFFSET).encoded.encoding != encoding:
            continue
        found: list[str] = []  # in the order of the operands
        for token in TOKEN.finditer(text):
            number = int(token[1] or token[2])
            found += [name for name in OPERANDS if name not in found and fields.get(name) in (number, number + 256)][:1]
        if len(found) == len(TOKEN.findall(text)):
            return text, code, tuple(found)
    return None


def randomized(rng: random.Random, encoding: str, code: bytes, names: list[str], is_narrow: bool) -> bytes:
    """The instruction with random operands and modifiers, and a literal behind it for operands that are one (is_narrow: of 16 bits)."""
    word = int.from_bytes(code, "little")
    values = {}
    for name in names:
        _, width = LAYOUTS[encoding].fields[name]
        values[name] = rng.getrandbits(width)
        if width == 9 and rng.random() < 0.5:
            values[name] |= 256
    for name in ("neg", "abs", "clamp", "omod", "op_sel", "neg_hi"):
        if encoding in ("VOP3", "VOP3SD", "VOP3P") and name in LAYOUTS[encoding].fields and rng.random() < 0.15:
            values[name] = rng.getrandbits(LAYOUTS[encoding].fields[name][1])
    for name, value in values.items():
        low, width = LAYOUTS[encoding].fields[name]
        word = word & ~(((1 << width) - 1) << low) | value << low
    return word.to_bytes(len(code), "little") + rng.getrandbits(16 if is_narrow else 32).to_bytes(4, "little")


def printed(text: str, places: tuple[str, ...], fields: dict[str, int], encoding: str) -> str:
    """The text with the operands and modifiers of `fields`."""

    remaining, is_mix = iter(places), "_mix" in text  # in these neg_hi is abs
    fields = {"abs": 0, **fields}

    def replace(token: re.Match[str]) -> str:
        name = next(remaining)
        width = 1 if token[1] else int(token[3]) - int(token[2]) + 1
        code = fields[name] + (256 if token[0].startswith("v") and fields[name] < 256 and name in ("vdst", "vsrc1") else 0)
        shown = operand(code, width, fields.get("literal"))
        index = {"src0": 0, "src1": 1, "src2": 2}.get(name)
        if (encoding in ("VOP3", "VOP3SD") or is_mix) and index is not None:
            shown = f"|{shown}|" if fields["neg_hi" if is_mix else "abs"] >> index & 1 else shown
            shown = f"neg({shown})" if fields["neg"] >> index & 1 else shown
        return shown

    shown = TOKEN.sub(replace, text)
    count = sum(name.startswith("src") for name in places)
    if "permlane" in text:
        return shown + " fi:1" * (fields.get("op_sel", 0) & 1) + " bound_ctrl:1" * (fields.get("op_sel", 0) >> 1)
    if encoding in ("VOP3", "VOP3P") and fields.get("op_sel"):
        shown += f" op_sel:[{','.join(str(fields['op_sel'] >> i & 1) for i in [*range(count), *([3] if encoding == 'VOP3' else [])])}]"
    if encoding == "VOP3P" and not is_mix:
        for name, key in (("neg_lo", "neg"), ("neg_hi", "neg_hi")):
            if fields[key]:
                shown += f" {name}:[{','.join(str(fields[key] >> i & 1) for i in range(count))}]"
    if fields.get("omod"):
        shown += {1: " mul:2", 2: " mul:4", 3: " div:2"}[fields["omod"]]
    return shown + (" clamp" if fields.get("clamp") else "")


def samples() -> list[tuple[str, bytes]]:
    """(text, bytes) of random words of every row that the decoder takes."""
    rng = random.Random(4)
    found = []
    for table, opcode in CASES:
        for encoding in PLAIN_FORMS:
            if not (encoding == table or (encoding == "VOP3SD" and table == "VOP3")):
                continue
            known = form(encoding, opcode)
            if known is None:
                continue
            text, code, places = known
            for _ in range(WORDS_PER_ROW):
                window = randomized(rng, encoding, code, list(places), "16" in text)
                try:
                    instruction = decode(window, 0, ACCUM_OFFSET)
                except UnknownInstruction:
                    continue
                encoded = instruction.encoded
                if encoded.encoding == encoding:  # an operand code may make an SDWA or DPP instruction of it
                    found.append((printed(text, places, dict(encoded.fields), encoding), encoded.raw))
    return found


def test_what_is_decoded_llvm_assembles():
    cases = samples()
    assembled_again = accepted(tuple(dict.fromkeys(text for text, _ in cases)))
    wrong = [(text, raw.hex(" "), assembled_again.get(text, b"").hex(" ")) for text, raw in cases if assembled_again.get(text) != raw]
    assert len(cases) > 3000
    assert not wrong, f"{len(wrong)} of {len(cases)}: {Counter(text.split()[0] for text, _, _ in wrong).most_common(12)}: {wrong[:12]}"
