"""MLA decode for AMD GPUs from numpy arrays: see `decode`, the quantizers of `formats`, and `open_device`."""

from . import reference
from .decode import decode
from .device import open_device
from .errors import DeviceError, KernelFault, UnknownInstruction, UnsupportedArch
from .formats import FP8, MXFP4, quantize_fp8, quantize_mxfp4
from .merge import merge

__all__ = [
    "FP8",
    "MXFP4",
    "DeviceError",
    "KernelFault",
    "UnknownInstruction",
    "UnsupportedArch",
    "decode",
    "merge",
    "open_device",
    "quantize_fp8",
    "quantize_mxfp4",
    "reference",
]
