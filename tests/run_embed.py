"""Runs the main() of a library made of examples/embed.c on the stand-in HIP runtime: run_embed.py LIBRARY ARGUMENT …"""

from __future__ import annotations

import ctypes
import sys

from shim.library import Shim


def main() -> int:
    shim = Shim()  # first: the library is then bound to it
    arguments = (ctypes.c_char_p * len(sys.argv[1:]))(*(argument.encode() for argument in sys.argv[1:]))
    library = ctypes.CDLL(sys.argv[1])
    with shim.one_gpu():
        return int(library.main(len(arguments), arguments))


if __name__ == "__main__":
    sys.exit(main())
