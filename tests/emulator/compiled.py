"""Kernels of tests/kernels, compiled and loaded where everything is checked and nothing arrives before its wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from build_kernels import compile_with_ziglang
from mla_rt.device import open_device
from mla_rt.resources import Module

FOLDER = Path(__file__).parent.parent / "kernels"


def compiled_module(stem: str) -> Callable[..., Iterator[Module]]:
    """A fixture: the code object of kernels/<stem>.hip on an emulator of its own."""

    @pytest.fixture(scope="module")
    def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Module]:
        output = tmp_path_factory.mktemp(stem) / f"{stem}.co"
        compile_with_ziglang(FOLDER / f"{stem}.hip", output, "gfx950")
        with open_device("emulator", timing="latest", checks="strict") as device:
            yield device.load(output)

    return module
