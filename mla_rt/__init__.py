"""MLA decode for AMD GPUs from numpy arrays.

decode                         attention of a batch of requests over their KV cache: numpy arrays in, numpy arrays out
plan                           the same prepared once for a serving loop, on device memory
PagedKVCache                   a cache on a device: new tokens are quantized into it there; PageAllocator and PagedSequences say which page is whose
import_cache                   a cache that another program wrote, in one of the named layouts
as_array                       an array of another library on the device, by DLPack or __cuda_array_interface__, without a copy
quantize_mxfp4, quantize_fp8   make the smaller caches, as MXFP4 and FP8 records, which also wrap bytes that exist already
merge                          join the results of disjoint parts of a cache
open_device                    a GPU, or the emulator that runs the same kernels where there is none; memory, streams and launches on it
reference                      the mathematics in float64
"""

from . import reference
from .arrays import DeviceArray, as_array
from .cache import PagedKVCache
from .cache_layouts import import_cache
from .decode import decode
from .device import open_device
from .errors import DeviceError, KernelFault, UnknownInstruction, UnsupportedArch
from .formats import FP8, MXFP4, quantize_fp8, quantize_mxfp4
from .merge import merge
from .page_allocator import OutOfPages, PageAllocator, PagedSequences
from .plan import Plan, plan

__version__ = "0.1.0"

__all__ = [
    "FP8",
    "MXFP4",
    "DeviceArray",
    "DeviceError",
    "KernelFault",
    "OutOfPages",
    "PageAllocator",
    "PagedKVCache",
    "PagedSequences",
    "Plan",
    "UnknownInstruction",
    "UnsupportedArch",
    "__version__",
    "as_array",
    "decode",
    "import_cache",
    "merge",
    "open_device",
    "plan",
    "quantize_fp8",
    "quantize_mxfp4",
    "reference",
]
