"""The build of the kernels: both compilers, what is rebuilt when, and what a user sees when it cannot go on.

Each test builds in a small copy of the repository. Its .venv is a stand-in that leads to the Python of this test run, so that nothing is
downloaded; what is under test is the repository's own Makefile and scripts/build_kernels.py.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import build_kernels

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
#pragma once
#define KERNEL extern "C" __attribute__((global)) void
constexpr int FACTOR = 3;
"""
KERNEL = """\
#include "small.h"
KERNEL {name}(int* out, int multiplicand) {{ out[__builtin_amdgcn_workitem_id_x()] = multiplicand * FACTOR; }}
"""


class Tree:
    """A copy of the repository's build with two small kernels, `one` and `two`."""

    def __init__(self, root: Path):
        self.root = root
        shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy2(ROOT / name, root / name)
        self.hip = root / "src" / "hip"
        self.hip.mkdir(parents=True)
        (self.hip / "small.h").write_text(HEADER)
        for name in ("one", "two"):
            (self.hip / f"{name}.hip").write_text(KERNEL.format(name=name))
        python = root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        write_program(python, f'exec "{sys.executable}" "$@"')
        (root / ".venv" / "installed").touch()

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # MAKEFLAGS and the like of a `make test` around us are not for this make.
        inherited = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "HIPCC", "ARCHES"}}
        return subprocess.run(["make", *arguments], cwd=self.root, env=inherited | environment, text=True, capture_output=True)

    def code_object(self, name: str) -> Path:
        return self.root / "mla_rt" / "code_objects" / "gfx950" / f"{name}.co"


def write_program(path: Path, script: str, interpreter: str = "/bin/sh") -> Path:
    path.write_text(f"#!{interpreter}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def touch_later(path: Path, than: Path) -> None:
    """Make `path` newer than `than` without waiting for the clock."""
    later = than.stat().st_mtime + 1
    os.utime(path, (later, later))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "tree").mkdir()
    return Tree(tmp_path / "tree")


@pytest.fixture
def hipcc(tmp_path: Path) -> Path:
    """A program that stands in for hipcc: compiles one .hip to a code object in the three steps that ziglang needs, and records how it was called."""
    (tmp_path / "rocm").mkdir()
    script = f"""
import pathlib, subprocess, sys
here, arguments = pathlib.Path(__file__).parent, sys.argv[1:]
(here / "calls").open("a").write(" ".join(arguments) + "\\n")
at = arguments.index("-o")
output = pathlib.Path(arguments[at + 1])
rest = arguments[:at] + arguments[at + 2:]
rest.remove("--no-gpu-bundle-output")
[arch] = [argument.split("=")[1] for argument in rest if argument.startswith("--offload-arch=")]
zig = ["{sys.executable}", "-m", "ziglang"]
for step in (
    [*zig, "clang", *rest, "-S", "-o", here / "k.s"],
    [*zig, "clang", "-target", "amdgcn-amd-amdhsa", "-mcpu=" + arch, "-mcode-object-version=5", "-c", here / "k.s", "-o", here / "k.o"],
    [*zig, "ld.lld", "-shared", here / "k.o", "-o", output],
):
    status = subprocess.run(step).returncode
    if status:
        sys.exit(status)
"""
    return write_program(tmp_path / "rocm" / "hipcc", script, sys.executable)


def test_builds_every_kernel(tree: Tree) -> None:
    done = tree.make("all")
    assert done.returncode == 0, done.stderr
    for name in ("one", "two"):
        image = tree.code_object(name).read_bytes()
        assert image[:4] == b"\x7fELF"
        assert name.encode() + b".kd\0" in image  # the kernel's descriptor
        assert b"multiplicand" in image  # the argument's name, in the note
    assert sorted(path.name for path in tree.code_object("one").parent.iterdir()) == ["one.co", "two.co"]


def test_second_make_does_nothing(tree: Tree) -> None:
    assert tree.make("all").returncode == 0
    assert tree.make("-q", "all").returncode == 0
    before = tree.code_object("one").stat()
    assert "one.co" not in tree.make("all").stdout
    assert tree.code_object("one").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("touched", "rebuilt"),
    [
        ("src/hip/small.h", {"one", "two"}),
        ("src/hip/one.hip", {"one"}),
        ("scripts/build_kernels.py", {"one", "two"}),
    ],
)
def test_rebuilds_what_changed(tree: Tree, touched: str, rebuilt: set[str]) -> None:
    assert tree.make("all").returncode == 0
    touch_later(tree.root / touched, than=tree.code_object("two"))
    assert tree.make("-q", "all").returncode == 1
    printed = tree.make("all").stdout
    assert {name for name in ("one", "two") if f"{name}.co" in printed} == rebuilt


def test_a_changed_header_changes_the_code(tree: Tree) -> None:
    assert tree.make("all").returncode == 0
    before = tree.code_object("one").read_bytes()
    header = tree.hip / "small.h"
    header.write_text(HEADER.replace("FACTOR = 3", "FACTOR = 5"))
    touch_later(header, than=tree.code_object("two"))
    assert tree.make("all").returncode == 0
    assert tree.code_object("one").read_bytes() != before


def test_a_removed_kernel_leaves_no_code_object(tree: Tree) -> None:
    assert tree.make("all").returncode == 0
    (tree.hip / "two.hip").unlink()
    assert tree.make("all").returncode == 0
    assert tree.code_object("one").exists() and not tree.code_object("two").exists()


def test_reproducible_wherever_it_is_built(tmp_path: Path) -> None:
    """The real kernels, in two directories of different depth, with different clocks."""
    images = []
    for place in ("a", "b/deeper/than/a"):
        sources = shutil.copytree(ROOT / "src" / "hip", tmp_path / place / "hip", copy_function=shutil.copy)
        kernels = sorted(sources.glob("*.hip"))
        assert kernels
        for kernel in kernels:
            build_kernels.build(kernel, tmp_path / place / f"{kernel.stem}.co", "gfx950")
        images.append({kernel.stem: (tmp_path / place / f"{kernel.stem}.co").read_bytes() for kernel in kernels})
        assert not [stem for stem, image in images[-1].items() if str(tmp_path).encode() in image]
    assert images[0] == images[1]


def test_no_path_of_the_machine_gets_into_the_code(tree: Tree) -> None:
    (tree.hip / "one.hip").write_text('extern "C" __attribute__((device, used)) const char WHERE[] = __FILE__;\n')
    assert tree.make("all").returncode == 0
    image = tree.code_object("one").read_bytes()
    assert b"one.hip\0" in image and str(tree.root).encode() not in image


@pytest.mark.parametrize("how", ["HIPCC", "PATH", "ROCM_PATH"])
def test_hipcc_is_used_where_there_is_one(tree: Tree, hipcc: Path, how: str) -> None:
    environment = {
        "HIPCC": {"HIPCC": str(hipcc)},
        "PATH": {"PATH": f"{hipcc.parent}{os.pathsep}{os.environ['PATH']}"},
        "ROCM_PATH": {"ROCM_PATH": str(hipcc.parent.parent)},
    }[how]
    if how == "ROCM_PATH":
        if shutil.which("hipcc"):
            pytest.skip("a hipcc on PATH goes before ROCM_PATH")
        (hipcc.parent / "bin").mkdir()
        shutil.move(hipcc, hipcc.parent / "bin" / "hipcc")
        hipcc = hipcc.parent / "bin" / "hipcc"
        environment = {"ROCM_PATH": str(hipcc.parent.parent)}
    done = tree.make("all", **environment)
    assert done.returncode == 0, done.stderr
    calls = (hipcc.parent / "calls").read_text().splitlines()
    assert len(calls) == 2 and all("--offload-arch=gfx950" in call for call in calls)
    expected = tree.root / "expected.co"
    build_kernels.compile_with_ziglang(tree.hip / "one.hip", expected, "gfx950")
    assert tree.code_object("one").read_bytes() == expected.read_bytes()


def test_hipcc_makes_the_real_kernels(hipcc: Path, tmp_path: Path) -> None:
    for kernel in sorted((ROOT / "src" / "hip").glob("*.hip")):
        outputs = tmp_path / "hipcc.co", tmp_path / "ziglang.co"
        build_kernels.compile_with_hipcc(hipcc, kernel, outputs[0], "gfx950")
        build_kernels.compile_with_ziglang(kernel, outputs[1], "gfx950")
        assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_an_unusable_hipcc_is_an_error(tree: Tree) -> None:
    done = tree.make("all", HIPCC="/nowhere/hipcc")
    assert done.returncode != 0
    assert "HIPCC=/nowhere/hipcc is not a program that can be run" in done.stderr


@pytest.mark.parametrize("compiler", ["default", "hipcc"])
def test_a_warning_fails_with_the_compilers_message(tree: Tree, hipcc: Path, compiler: str) -> None:
    (tree.hip / "one.hip").write_text(KERNEL.format(name="one").replace("{ out", "{ int unused; out"))
    done = tree.make("all", **({"HIPCC": str(hipcc)} if compiler == "hipcc" else {}))
    assert done.returncode != 0
    assert "one.hip:2:" in done.stderr and "unused variable 'unused'" in done.stderr
    assert not tree.code_object("one").exists()


def test_a_failed_build_keeps_the_old_code_object(tree: Tree) -> None:
    assert tree.make("all").returncode == 0
    before = tree.code_object("one").read_bytes()
    with pytest.raises(build_kernels.BuildError, match="no_such_builtin"):
        (tree.hip / "one.hip").write_text('#include "small.h"\nKERNEL one() { no_such_builtin(); }\n')
        build_kernels.build(tree.hip / "one.hip", tree.code_object("one"), "gfx950")
    assert tree.code_object("one").read_bytes() == before
    assert sorted(path.name for path in tree.code_object("one").parent.iterdir()) == ["one.co", "two.co"]


def test_no_header_of_the_system_is_seen(tree: Tree) -> None:
    (tree.hip / "one.hip").write_text("#include <stdint.h>\n" + KERNEL.format(name="one"))
    done = tree.make("all")
    assert done.returncode != 0 and "'stdint.h' file not found" in done.stderr


def test_unknown_arch(tree: Tree) -> None:
    done = tree.make("all", "ARCHES=gfx123")
    assert done.returncode != 0
    assert "unknown architecture 'gfx123': the kernels are written for gfx950" in done.stderr


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no '{python}' found: install Python 3.10 or newer"),
        ("sys.version_info = (3, 8, 0)", "Python 3.10 or newer is needed, {python} is 3.8"),
        ("sys.modules['ensurepip'] = None", "{python} has no venv module"),
    ],
    ids=["no python", "old python", "no venv"],
)
def test_a_python_that_cannot_serve(tree: Tree, tmp_path: Path, script: str | None, message: str) -> None:
    python = tmp_path / "python"
    if script is not None:
        write_program(python, f"""exec "{sys.executable}" -c "import sys; {script}; exec(sys.argv[1])" "$2" """)
    shutil.rmtree(tree.root / ".venv")
    done = tree.make("all", f"PYTHON={python}")
    assert done.returncode != 0
    assert message.format(python=python) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tree.root / ".venv").exists()
