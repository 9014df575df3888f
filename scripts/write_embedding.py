"""Write the tables of docs/embedding.md and examples/mla_decode.h: the arguments of the decode kernels, for hosts that are not Python.

What an argument is called and where it lies is read from the code object, its type and shape from the signature in src/hip/mla_decode.hip.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from mla_rt.code_object import CodeObject, KernelInfo, code_object_path
from mla_rt.decode_kernel import KV_FORMATS, DecodeKernel, kernel_for
from mla_rt.device import open_device

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "embedding.md"
HEADER = ROOT / "examples" / "mla_decode.h"
SOURCE = ROOT / "src" / "hip" / "mla_decode.hip"
ARCH = "gfx950"
C_TYPES = {"bf16": "uint16_t", "u8": "uint8_t", "i32": "int32_t", "u32": "uint32_t", "f32": "float"}
MANY_ROWS = 1 << 16  # more than any tile has


@dataclass(frozen=True)
class Parameter:
    """One of the kernels' parameters. type: "const bf16*", "i32", …; comment: what the source says of it; offset, size: in bytes, from the note."""

    name: str
    type: str
    comment: str
    offset: int
    size: int

    @property
    def c_declaration(self) -> str:
        const, element, pointer = re.fullmatch(r"(const )?(\w+)(\*?)", self.type).groups()  # type: ignore[union-attr]
        return f"{const or ''}{C_TYPES[element]} {pointer}{self.name}"


def signature(source: str) -> dict[str, tuple[str, str]]:
    """(type, comment) of each parameter of the kernels, by name and in order."""
    text = source.replace("\\\n", "\n")
    text = text[text.index("KERNEL(NUM_THREADS) name(") :].split("(", 2)[2].split("SHARED")[0]
    found = re.findall(r"((?:const )?\w+\*?)\s+(?:__restrict__\s+)?(\w+)(?:,|\) \{)\s*(?:/\*\s*(.*?)\s*\*/)?", text)
    return {name: (kind, comment) for kind, name, comment in found}


def parameters(kernels: list[KernelInfo]) -> list[Parameter]:
    """Of all decode kernels, which have them in common. ValueError if they do not, or if source and code object disagree."""
    first = kernels[0]
    for kernel in kernels:
        if (kernel.args, kernel.kernarg_bytes, kernel.block_size) != (first.args, first.kernarg_bytes, first.block_size):
            raise ValueError(f"{kernel.name} and {first.name} have different arguments")
    declared = signature(SOURCE.read_text(encoding="utf-8"))
    if list(declared) != [arg.name for arg in first.args]:
        raise ValueError(f"the source declares {list(declared)}, the code object has {[arg.name for arg in first.args]}")
    for arg in first.args:
        if ("*" in declared[arg.name][0]) != (arg.kind == "global_buffer"):
            raise ValueError(f"{arg.name} is {declared[arg.name][0]} in the source and {arg.kind} in the code object")
    return [Parameter(arg.name, *declared[arg.name], arg.offset, arg.size) for arg in first.args]


def kernels_by_format() -> dict[str, list[DecodeKernel]]:
    """The kernels for each format, that with the fewest rows a workgroup first."""
    with open_device("emulator") as device:
        found = {}
        for kv_format in KV_FORMATS[ARCH]:
            by_name = {of.kernel.info.name: of for of in (kernel_for(device, kv_format, rows) for rows in (1, MANY_ROWS))}
            found[kv_format] = sorted(by_name.values(), key=lambda of: of.rows_per_tile)
        return found


def code_object() -> CodeObject:
    return CodeObject.load(code_object_path("mla_decode", ARCH))


def argument_table() -> str:
    kernels = list(code_object().kernels.values())
    lines = ["| argument | type | offset | bytes | shape, null |", "|---|---|---|---|---|"]
    lines += [f"| `{of.name}` | `{of.type}` | {of.offset} | {of.size} | {of.comment or 'by value'} |" for of in parameters(kernels)]
    return "\n".join([*lines, "", f"{kernels[0].kernarg_bytes} bytes in all; {kernels[0].block_size} work-items a workgroup."])


def kernel_table() -> str:
    lines = ["| cache | kernel | TILE_ROWS | tokens at a time | LDS bytes |", "|---|---|---|---|---|"]
    for kv_format, kernels in kernels_by_format().items():
        for of in kernels:
            info = of.kernel.info
            lines.append(f"| {kv_format} | `{info.name}` | {of.rows_per_tile} | {of.tokens_per_tile} | {info.lds_bytes} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its tables made anew."""
    for name, table in (("arguments", argument_table()), ("kernels", kernel_table())):
        begin, end = f"<!-- {name}: written by scripts/write_embedding.py -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n\n{end}{rest.split(end)[1]}"
    return text


def header() -> str:
    found = code_object()
    kernels = list(found.kernels.values())
    width = max(len(of.c_declaration) for of in parameters(kernels)) + 1
    lines = [
        "/* The decode kernels' arguments (docs/embedding.md). Written by scripts/write_embedding.py from mla_decode.co; do not edit. */",
        "#ifndef MLA_DECODE_H",
        "#define MLA_DECODE_H",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        f"#define MLA_DECODE_BLOCK_SIZE {kernels[0].block_size}",
        f"#define MLA_DECODE_ARGUMENT_BYTES {kernels[0].kernarg_bytes}",
        f"#define MLA_DECODE_WORK_WORDS {found.constants['WORK_WORDS']}",
        f"#define MLA_DECODE_QK_WIDTH {found.constants['QK_WIDTH']}",
        f"#define MLA_DECODE_KV_LORA_RANK {found.constants['KV_LORA_RANK']}",
        "",
        "/* Of each cache format, the kernel with the fewest query rows a workgroup, which serves any batch. */",
    ]
    for kv_format, (kernel, *_) in kernels_by_format().items():
        lines.append(f'#define MLA_DECODE_{kv_format.upper()} "{kernel.kernel.info.name}"')
        lines.append(f"#define MLA_DECODE_{kv_format.upper()}_ROWS {kernel.rows_per_tile}")
    lines += ["", "struct mla_decode_arguments {"]
    for of in parameters(kernels):
        declared = f"{of.c_declaration};"
        lines.append(f"  {declared:{width}} /* {of.comment} */" if of.comment else f"  {declared}")
    lines += ["};"]
    for of in parameters(kernels):
        lines.append(f'_Static_assert(offsetof(struct mla_decode_arguments, {of.name}) == {of.offset}, "{of.name}");')
    return "\n".join([*lines, "#endif", ""])


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    HEADER.write_text(header(), encoding="utf-8")
    print(PAGE.relative_to(ROOT), HEADER.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
