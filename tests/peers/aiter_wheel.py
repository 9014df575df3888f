"""AMD's own MLA kernels as published in a wheel of AITER: fetched by name when the tests run, kept under build/, never part of this repository."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "amd-aiter==0.1.7.post2.dev18"  # 40 MB
KERNELS = "aiter_meta/hsa/gfx950/mla/"  # code objects of the MLA kernels
CACHE = ROOT / "build" / "peers" / WHEEL.partition("==")[2]
TIMEOUT = 300  # seconds


def missing() -> str | None:
    """Fetch the code objects unless they are there; the reason why not, if that fails."""
    return None if CACHE.is_dir() else _fetch()


def code_objects() -> dict[str, Path]:
    """The code objects by name without suffix. Skips the test where the registry is out of reach."""
    if reason := missing():
        pytest.skip(reason)
    return {path.stem: path for path in sorted(CACHE.glob("*.co"))}


@functools.cache  # one attempt a run
def _fetch() -> str | None:
    """Fill the cache; the reason why not, if that fails."""
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest", folder, WHEEL]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"pip did not fetch {WHEEL} within {TIMEOUT} s"
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            return f"pip cannot fetch {WHEEL}: {(done.stderr.strip().splitlines() or ['no wheel'])[-1]}"
        extracted = Path(folder, "kernels")
        extracted.mkdir()
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                if name.startswith(KERNELS) and name.endswith(".co"):
                    (extracted / Path(name).name).write_bytes(wheel.read(name))
        try:
            os.rename(extracted, CACHE)  # whole, or not at all
        except OSError:  # another process was faster
            if not CACHE.is_dir():
                raise
    return None
