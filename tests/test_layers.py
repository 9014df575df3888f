"""The layering of the package, read from its import statements: they point down only, and one mistake cannot cancel itself out."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mla_rt"

# Each unit of the package (a module, or emulator/ as a whole) and the units it may import. A new module has to be given its place here.
LAYERS = {
    "errors": set(),
    "reference": set(),
    "elements": set(),
    "msgpack": set(),
    "elf": set(),
    "formats": {"errors", "elements"},
    "work_list": {"errors"},
    "merge": {"errors"},
    "code_object": {"errors", "elf", "msgpack"},
    "emulator": {"errors"},
    "resources": {"errors", "code_object", "device"},
    "device": {"errors", "code_object", "resources", "graph", "hip_device", "emulator_device"},
    "graph": {"errors", "device", "resources"},
    "hip_device": {"errors", "code_object", "device", "resources"},
    "emulator_device": {"errors", "code_object", "device", "resources", "emulator"},
    "arguments": {"errors"},
    "requests": {"errors", "arguments"},
    "batch": {"errors", "elements", "formats", "arguments", "requests"},
    "page_allocator": {"errors", "arguments", "requests"},
    "cache_layouts": {"errors", "elements", "formats", "batch"},
    "cache": {"errors", "elements", "formats", "arguments", "arrays", "requests", "batch", "device", "resources", "decode_kernel"},
    "decode_kernel": {"errors", "device", "resources"},
    "dlpack": {"errors"},
    "arrays": {"errors", "device", "resources", "dlpack"},
    "operands": {"errors", "device", "resources", "arrays"},
    "plan": {"errors", "arguments", "requests", "batch", "work_list", "device", "resources", "arrays", "decode_kernel", "operands"},
    "decode": {"errors", "formats", "batch", "merge", "device", "resources", "decode_kernel", "plan"},
}
# The command line stands on all of these, but reaches a backend through device.py only; nothing below knows of it.
COMMAND = {"kernel_arguments", "accuracy", "occupancy", "output_file", "terminal", "batch_file", "check", "demo", "probe", "cli", "__main__"}
PUBLIC = LAYERS.keys() - {"emulator", "hip_device", "emulator_device"}
# The speed-of-light model reads the emulator's counts; it is loaded by the commands that need it.
SPEED = {"speed_rates", "speed_model", "speed_report", "speed_timeline", "speed_html", "speed"}
LAYERS |= {unit: PUBLIC | SPEED - {unit} | {"occupancy", "emulator", "emulator_device"} for unit in SPEED}
LAYERS |= {unit: PUBLIC | (COMMAND | {"__init__"}) - {unit, "__main__"} for unit in COMMAND} | {"__init__": PUBLIC}
LAYERS["cli"] |= SPEED | {"emulator_device"}
# device.py opens backends by name when asked to, and captures graphs, and not before; what it makes knows it by type only; the commands that
# count load what that takes.
LAZY = {("device", "hip_device"), ("device", "emulator_device"), ("device", "graph"), ("resources", "device")}
LAZY |= {("cli", unit) for unit in SPEED | {"emulator_device"}}
THIRD_PARTY = {"numpy", "ml_dtypes"}


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_for_type_checkers(block: ast.If) -> bool:
    return isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"


def imported_modules(path: Path) -> list[tuple[str, bool]]:
    """(absolute module name, whether at the top of the file) for every import of the file, those inside functions and for type checkers included."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    later = [block for block in ast.walk(tree) if isinstance(block, ast.FunctionDef) or (isinstance(block, ast.If) and is_for_type_checkers(block))]
    inside = {node for block in later for node in ast.walk(block)}
    package = (PACKAGE.name, *path.relative_to(PACKAGE).parent.parts) if path.is_relative_to(PACKAGE) else ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            # `from . import formats` names a module, `from .formats import MXFP4` what is in one.
            names = [".".join([*base, alias.name]) for alias in node.names] if base == [PACKAGE.name] else [".".join(base)]
        else:
            continue
        found += [(name, node not in inside) for name in names]
    return found


def project_files() -> list[Path]:
    return [path for folder in ("mla_rt", "src", "tests", "scripts", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_its_place() -> None:
    assert {"errors", "emulator", "__init__"} <= {unit_of(path) for path in MODULES}
    assert {unit_of(path) for path in MODULES} <= LAYERS.keys()


def test_the_layers_have_no_cycle() -> None:
    below = {unit: {other for other in allowed if (unit, other) not in LAZY} for unit, allowed in LAYERS.items() if unit not in COMMAND | SPEED}
    placed: set[str] = set()
    while below.keys() - placed:
        free = {unit for unit, allowed in below.items() if unit not in placed and allowed <= placed}
        assert free, f"these import each other: {below.keys() - placed}"
        placed |= free


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    unit = unit_of(path)
    for name, at_top in imported_modules(path):
        top, _, rest = name.partition(".")
        if top != PACKAGE.name:
            allowed = top in sys.stdlib_module_names or top in THIRD_PARTY or (top == "hip" and unit == "hip_device")
            assert allowed, f"{unit} may not import {name}"
            continue
        target = rest.split(".")[0] or "__init__"
        if target not in LAYERS:  # a name that the package itself exports, such as `from . import __version__`
            target = "__init__"
        assert target == unit or target in LAYERS[unit], f"{unit} may not import {target}"
        assert not (at_top and (unit, target) in LAZY), f"{unit} must import {target} only when it is opened"


def test_the_package_imports_no_backend() -> None:
    code = "import sys, mla_rt; print(*sorted(sys.modules), sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, text=True, capture_output=True).stdout.split()
    assert "mla_rt" in loaded
    backends = {"torch", "hip", "rocm", "mla_rt.hip_device", "mla_rt.emulator_device", "mla_rt.emulator"}
    assert not backends & set(loaded)


def test_nothing_imports_torch() -> None:
    files = project_files()
    assert Path(__file__).resolve() in files
    offenders = [str(path) for path in files if any(name.split(".")[0] == "torch" for name, _ in imported_modules(path))]
    assert not offenders
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in {".h", ".hip"}]
    lines = [line for path in sources for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines and not [line for line in lines if line.lstrip().startswith("#include") and ("torch" in line or "ATen" in line)]


def test_only_gfx9_h_names_builtins_of_the_machine() -> None:
    offenders = [path.name for path in (ROOT / "src" / "hip").iterdir() if "__builtin_amdgcn_" in path.read_text(encoding="utf-8")]
    assert offenders == ["gfx9.h"]
