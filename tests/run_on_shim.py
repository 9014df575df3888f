"""Runs a Python program where the stand-in HIP runtime shows a GPU, with a stand-in for CuPy: run_on_shim.py PROGRAM"""

from __future__ import annotations

import runpy
import sys

from shim.library import Shim


def main() -> None:
    shim = Shim()
    with shim.one_gpu():
        import stand_in_cupy

        sys.modules["cupy"] = stand_in_cupy
        runpy.run_path(sys.argv[1], run_name="__main__")


if __name__ == "__main__":
    main()
