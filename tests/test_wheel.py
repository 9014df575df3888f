"""What a user gets who installs the wheel: its contents, and the command in a new venv that has the runtime dependencies and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = sorted(path.stem for path in (ROOT / "src" / "hip").glob("*.hip"))
SHAPES = {"q": (2, 16, 576), "kv": (25, 576)}  # of a batch of two requests, 5 and 20 tokens long


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, text=True, capture_output=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def build_wheel(source: Path, tree: Path) -> Path:
    """Build the wheel in `tree`, a copy made of the repository `source`, with the date that `make wheel` gives its files."""
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(source / name, tree / name)
    shutil.copytree(source / "mla_rt", tree / "mla_rt", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", ".", cwd=tree, SOURCE_DATE_EPOCH="315532800")
    [wheel] = (tree / "dist").glob("*.whl")
    return wheel


def runtime_distributions(name: str) -> Iterator[importlib.metadata.Distribution]:
    """The installed distribution and all that it needs at run time, extras left out."""
    distribution = importlib.metadata.distribution(name)
    yield distribution
    for requirement in distribution.requires or []:
        if "extra ==" not in requirement:
            yield from runtime_distributions(re.split(r"[^\w.-]", requirement)[0])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel") / "tree")


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new venv with the wheel, and links to the runtime dependencies so that nothing is downloaded. It has no compiler and no test tool."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", venv, cwd=venv.parent)
    python = venv / "bin" / "python"
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=venv.parent).strip())
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=venv.parent)
    metadata = next(site_packages.glob("mla_rt-*.dist-info")) / "METADATA"
    needed = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", metadata.read_text(), re.MULTILINE)
    assert sorted(needed) == ["hip-python", "ml_dtypes", "numpy"]
    for distribution in {d.name: d for name in needed for d in runtime_distributions(name)}.values():
        for entry in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
            link = site_packages / entry
            if not link.exists():  # namespace packages are shared by several distributions
                link.symlink_to(Path(str(distribution.locate_file(entry))))
    return venv


def test_wheel_carries_code_objects_and_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert KERNELS
    code_objects = {f"mla_rt/code_objects/gfx950/{stem}.co" for stem in KERNELS}
    assert {"mla_rt/py.typed", "mla_rt/__init__.py", "mla_rt/emulator/__init__.py", *code_objects} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "src/", "scripts/"))]


def test_wheel_is_reproducible(wheel: Path, tmp_path: Path) -> None:
    assert build_wheel(wheel.parents[1], tmp_path / "elsewhere").read_bytes() == wheel.read_bytes()


def test_installed_command_runs_with_no_compiler(venv: Path, tmp_path: Path) -> None:
    """`mla-rt info` and `mla-rt decode` from the installed wheel: PATH holds the venv alone, and the repository is not in sight."""
    environment = {"PATH": str(venv / "bin"), "PYTHONPATH": "", "HOME": str(tmp_path)}
    python, command = venv / "bin" / "python", venv / "bin" / "mla-rt"
    unwanted = "import importlib.util as u; print([m for m in ('ziglang', 'pytest', 'hypothesis', 'torch') if u.find_spec(m)])"
    assert run(python, "-c", unwanted, cwd=tmp_path, **environment).strip() == "[]"
    assert str(venv) in run(python, "-c", "import mla_rt; print(mla_rt.__file__)", cwd=tmp_path, **environment)

    version = run(python, "-c", "import importlib.metadata as m, mla_rt; print(mla_rt.__version__, m.version('mla-rt'))", cwd=tmp_path, **environment)
    assert len(set(version.split())) == 1 and run(command, "--version", cwd=tmp_path, **environment) == f"mla-rt {version.split()[0]}\n"

    info = run(command, "info", cwd=tmp_path, **environment)
    assert all(stem in info for stem in KERNELS)

    random = np.random.default_rng(0)
    bf16_bits = {name: (random.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16) for name, shape in SHAPES.items()}
    lengths = {"qo_indptr": np.array([0, 1, 2], np.int32), "kv_indptr": np.array([0, 5, 25], np.int32)}
    np.savez(tmp_path / "batch.npz", **bf16_bits, **lengths, sm_scale=np.float32(0.04))
    run(command, "decode", "batch.npz", "--kv-format", "mxfp4", "--check", "--device", "emulator", "-o", "out.npz", cwd=tmp_path, **environment)
    with np.load(tmp_path / "out.npz") as result:
        assert result["out"].shape == (2, 16, 512)
        assert result["lse"].shape == (2, 16) and np.isfinite(result["lse"]).all()
