"""The exceptions that `mla_rt` raises beyond `ValueError` and `TypeError`.

They live at the bottom of the package, so that the host side and the emulator name the same types without importing each other.
"""


class DeviceError(RuntimeError):
    """A HIP call failed, or a device, buffer or stream is used after it was closed. The message names the call and HIP's text.

    brief: the same in a few words, without what to do about it; the message itself where that is short.
    """

    def __init__(self, message: str, *, brief: str | None = None):
        super().__init__(message)
        self.brief = message if brief is None else brief


class UnsupportedArch(RuntimeError):
    """A code object, or a GPU, of an architecture that cannot serve here. Raised before anything is launched."""


class KernelFault(RuntimeError):
    """The emulator found a kernel doing what hardware would punish or hide.

    The message names the kernel, the offset of the instruction in its code, the workgroup, wave and lane, and the address if there is one.
    """


class UnknownInstruction(KernelFault):
    """The emulator met an encoding, modifier or format that it does not know. The message names the pc and the bytes."""
