"""What every test run needs: current code objects, and property tests that draw the same examples each time."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from devices import compile_sample, device, emulator_device, hip_device, sample, shim  # noqa: F401 - fixtures for every test

ROOT = Path(__file__).resolve().parent.parent

# A failure must be the same failure on the next run and on another machine; emulator runs have no sensible deadline.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=False)
hypothesis.settings.load_profile("repeatable")


def stale_code_objects(root: Path, arch: str = "gfx950") -> list[str]:
    """Names of the code objects of `arch` under `root` that are missing or older than a kernel source."""
    sources = root / "src" / "hip"
    headers = [header.stat().st_mtime for header in sources.glob("*.h")]
    stale = []
    for kernel in sorted(sources.glob("*.hip")):
        code_object = root / "mla_rt" / "code_objects" / arch / f"{kernel.stem}.co"
        if not code_object.is_file() or code_object.stat().st_mtime < max(kernel.stat().st_mtime, *headers, 0.0):
            stale.append(code_object.name)
    return stale


def pytest_sessionstart(session: pytest.Session) -> None:
    """Testing machine code that is not that of the sources would be worse than not testing."""
    if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist: its controller has looked
        return
    stale = stale_code_objects(ROOT)
    if stale:
        raise pytest.UsageError(f"missing, or older than src/hip: {', '.join(stale)}; run `make all` first")
