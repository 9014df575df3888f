"""Compile HIP kernels to code objects: build_kernels.py --arch gfx950 --out-dir mla_rt/code_objects/gfx950 src/hip/*.hip

The one place that knows the compilers and their flags; what needs to be compiled is decided by the Makefile.
The compiler is hipcc where there is one ($HIPCC, PATH, $ROCM_PATH/bin, /opt/rocm/bin), else the clang of the PyPI package ziglang.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ARCHES = ("gfx950",)
CODE_OBJECT_VERSION = "-mcode-object-version=5"  # so that ROCm 6 loads what it can run
COMPILE_FLAGS = (
    *("-x", "hip", "--cuda-device-only", "-std=c++20", "-O3", CODE_OBJECT_VERSION),
    # Freestanding: no runtime header, device library or system header, so that both compilers see the same source.
    *("-nogpuinc", "-nogpulib", "-nostdinc"),
    *("-Wall", "-Wextra", "-Werror"),
    "-fno-discard-value-names",  # keeps the names of arguments in the metadata note: the host packs by name
    "-fuse-cuid=none",  # no hash of the path: builds are reproducible
)


class BuildError(Exception):
    """The build cannot go on; the message is for the user."""


def find_hipcc() -> Path | None:
    """The hipcc to use, or None. Raises BuildError if $HIPCC names something that cannot be run."""
    named = os.environ.get("HIPCC")
    if named:
        found = shutil.which(named)
        if found is None:
            raise BuildError(f"HIPCC={named} is not a program that can be run")
        return Path(found).absolute()
    rocm = [os.path.join(root, "bin") for root in (os.environ.get("ROCM_PATH"), "/opt/rocm") if root]
    found = shutil.which("hipcc", path=os.pathsep.join([os.environ.get("PATH", os.defpath), *rocm]))
    return Path(found).absolute() if found else None


def compile_with_hipcc(hipcc: Path, source: Path, output: Path, arch: str) -> None:
    """source -> code object. A plain ELF file, not hipcc's usual bundle of one; hipcc adds arguments of its own, which must not count as warnings."""
    flags = (f"--offload-arch={arch}", *COMPILE_FLAGS, "--no-gpu-bundle-output", "-Wno-unused-command-line-argument")
    _run([hipcc, *flags, source.name, "-o", output], source)


def compile_with_ziglang(source: Path, output: Path, arch: str) -> None:
    """source -> assembly -> object -> code object: in steps, because zig's own link step passes an option that its lld does not know."""
    zig = [sys.executable, "-m", "ziglang"]
    assembly, obj = output.with_suffix(".s"), output.with_suffix(".o")
    _run([*zig, "clang", f"--offload-arch={arch}", *COMPILE_FLAGS, "-S", source.name, "-o", assembly], source)
    _run([*zig, "clang", "-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", CODE_OBJECT_VERSION, "-c", assembly, "-o", obj], source)
    _run([*zig, "ld.lld", "-shared", "--no-undefined", obj, "-o", output], source)


def build(source: Path, output: Path, arch: str) -> str:
    """Compile one kernel file; returns the compiler's name. An existing output is replaced only by a whole new one."""
    if arch not in ARCHES:
        raise BuildError(f"unknown architecture {arch!r}: the kernels are written for {', '.join(ARCHES)}")
    source, output = source.absolute(), output.absolute()
    if not source.is_file():
        raise BuildError(f"no such kernel: {source}")
    hipcc = find_hipcc()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as scratch:
        made = Path(scratch) / output.name
        if hipcc:
            compile_with_hipcc(hipcc, source, made, arch)
        else:
            compile_with_ziglang(source, made, arch)
        made.chmod(0o644)
        made.replace(output)
    return str(hipcc or "clang of ziglang")


def _run(command: list[str | Path], source: Path) -> None:
    # In the source's own directory and by its bare name, so that no path of this machine can get into the output.
    done = subprocess.run(command, cwd=source.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise BuildError(f"{source.name}: the compiler failed ({done.returncode}): {' '.join(map(str, command))}\n{done.stdout}")
    if done.stdout:
        print(done.stdout, end="", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile HIP kernels to code objects.")
    parser.add_argument("--arch", required=True, help=f"one of {', '.join(ARCHES)}")
    parser.add_argument("--out-dir", required=True, type=Path, help="where <stem>.co is written")
    parser.add_argument("sources", nargs="+", type=Path, metavar="kernel.hip")
    arguments = parser.parse_args()
    try:
        for source in arguments.sources:
            output = arguments.out_dir / f"{source.stem}.co"
            compiler = build(source, output, arguments.arch)
            print(f"{output}  ({arguments.arch}, {compiler})")
    except BuildError as error:
        print(f"build_kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
