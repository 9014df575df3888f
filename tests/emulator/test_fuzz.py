"""Random instruction words and damaged code objects: a typed error, or an end. Never a hang, a crash of the interpreter, or another exception."""

from __future__ import annotations

import functools
import random
from collections import Counter

import numpy as np
import pytest

from mla_rt import emulator_device, open_device
from mla_rt.code_object import CodeObject, code_object_path
from mla_rt.emulator import encodings
from mla_rt.emulator.decoder import TABLES, decode
from mla_rt.emulator.descriptor import Descriptor
from mla_rt.emulator.encodings import identify
from mla_rt.emulator.machine import run
from mla_rt.emulator.memory import Memory
from mla_rt.emulator.state import EXEC, Group, State
from mla_rt.errors import DeviceError, KernelFault, UnknownInstruction, UnsupportedArch

NUM_WORDS = 100_000
NUM_CODE_OBJECTS = 1_000
ACCUM_OFFSET, NUM_VGPRS, LDS_BYTES = 64, 128, 4096
INSTRUCTION_LIMIT = 2_000  # far above what the undamaged launches need
TYPED = (ValueError, TypeError, DeviceError, UnsupportedArch, KernelFault)

# The bits that make an instruction one of a format: (mask, value) of its first dword.
PREFIXES = {
    "SOP1": (0xFF800000, 0xBE800000), "SOP2": (0xC0000000, 0x80000000), "SOPK": (0xF0000000, 0xB0000000), "SOPC": (0xFF800000, 0xBF000000),
    "SOPP": (0xFF800000, 0xBF800000), "SMEM": (0xFC000000, 0xC0000000), "VOP1": (0xFE000000, 0x7E000000), "VOP2": (0x80000000, 0),
    "VOPC": (0xFE000000, 0x7C000000), "VOP1_SDWA": (0xFE0001FF, 0x7E0000F9), "VOP2_SDWA": (0x800001FF, 0xF9), "VOPC_SDWA": (0xFE0001FF, 0x7C0000F9),
    "VOP1_DPP": (0xFE0001FF, 0x7E0000FA), "VOP2_DPP": (0x800001FF, 0xFA), "VOP3": (0xFC000000, 0xD0000000), "VOP3SD": (0xFC000000, 0xD0000000),
    "VOP3P": (0xFF800000, 0xD3800000), "VOP3P-MAI": (0xFF800000, 0xD3800000), "VOP3PX2": (0xFFFF0000, 0xD3AC0000), "DS": (0xFC000000, 0xD8000000),
    "FLAT": (0xFC000000, 0xDC000000), "MUBUF": (0xFC000000, 0xE0000000), "any": (0, 0),
}  # fmt: skip
LAYOUTS = {layout.name: layout for layout in vars(encodings).values() if isinstance(layout, encodings.Format)}
OPCODES = {name: list(table) for name, table in TABLES.items()}
OPCODES["VOP3SD"] = sorted(encodings.VOP3_WITH_SDST & TABLES["VOP3SD"].keys())
VGPR_SOURCES = 1 << 8 | 1 << 17 | 1 << 26
LONG = ("VOP3", "VOP3SD", "VOP3P", "VOP3P-MAI", "VOP3PX2")


def random_windows(seed: int, count: int) -> list[bytes]:
    """Windows of 16 random bytes, in turn of each format. Two thirds are guided, or hardly any long word would be valid: few bits are set, and
    often the opcode is one that the format has."""
    rng = random.Random(seed)
    names = list(PREFIXES)
    windows = []
    for i in range(count):
        name, guided = names[i % len(names)], rng.randrange(3)
        word = rng.getrandbits(128)
        if guided:
            word &= rng.getrandbits(128) & rng.getrandbits(128)
        mask, value = PREFIXES[name]
        word = word & ~mask | value
        if name == "VOP3PX2":
            word = word & ~(encodings.MAI_ENCODING << 87) | encodings.MAI_ENCODING << 87
        if guided and name in TABLES:
            low, width = LAYOUTS[name].fields["op"]
            word = word & ~(((1 << width) - 1) << low) | rng.choice(OPCODES[name]) << low
            if name in LONG:  # sources in vector registers
                word |= VGPR_SOURCES << 32
            if name == "VOP3PX2":
                word = (word | VGPR_SOURCES << 96) & ~(0xF << 75) & ~LAYOUTS[name].reserved | 1 << 75  # abid 1: scaled
        windows.append(word.to_bytes(16, "little"))
    return windows


def make_group(memory: Memory) -> Group:
    """Two waves with random registers, part of which are addresses in memory."""
    sizes = {"num_vgprs": NUM_VGPRS, "accum_offset": ACCUM_OFFSET, "lds_bytes": LDS_BYTES}
    state = State(kernel="random", memory=memory, num_workgroups=1, waves_per_workgroup=2, **sizes)
    rng = np.random.default_rng(0)
    address = memory.allocate(1 << 16) + 4096
    state.vgpr[:] = rng.integers(0, 1 << 32, state.vgpr.shape, np.uint32)
    state.vgpr[::2] = np.where(rng.random(state.vgpr[::2].shape) < 0.5, rng.integers(0, 64, state.vgpr[::2].shape) * 16, state.vgpr[::2])
    for register in (0, 8, 32, 100):
        state.vgpr[register], state.vgpr[register + 1] = address & 0xFFFFFFFF, address >> 32
    state.sgpr[:] = rng.integers(0, 1 << 32, state.sgpr.shape, np.uint32)
    for register in range(0, 100, 4):
        # Pairs are addresses; quads are buffer resources over that memory.
        quad = (address & 0xFFFFFFFF, address >> 32, 1 << 12, 0x00027000)
        state.sgpr[register : register + 4] = np.array(quad, np.uint32)[:, None]
    state.sgpr[EXEC], state.sgpr[EXEC + 1] = 0xFFFF0FFF, 0x0000FFFF
    return Group(state, np.arange(2))


def fates(windows: list[bytes]) -> Counter[str]:
    """Decode and execute each window on registers of its own; how often each thing happened."""
    counts: Counter[str] = Counter()
    with np.errstate(all="ignore"):  # as in a launch
        memory = Memory()
        group = make_group(memory)
        state = group.state
        vgpr, sgpr = state.vgpr.copy(), state.sgpr.copy()
        for window in windows:
            layout = identify(int.from_bytes(window[:4], "little"))
            try:
                instruction = decode(window, 0x1000, ACCUM_OFFSET)
            except UnknownInstruction:
                counts["unknown"] += 1
                continue
            counts[layout.name] += 1
            state.vgpr[:], state.sgpr[:] = vgpr, sgpr
            group = Group(state, np.arange(2))
            group.pc, group.next_pc = 0x1000, 0x1000 + instruction.encoded.size
            try:
                instruction.run(group)
            except UnknownInstruction:
                counts["unknown while running"] += 1
            except KernelFault:
                counts["fault"] += 1
            except IndexError:
                counts["register out of range"] += 1  # the machine makes a fault of it
            else:
                counts["ran"] += 1
        memory.close()
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_random_words(seed):
    counts = fates(random_windows(seed, NUM_WORDS // 4))
    assert counts["ran"] > 5_000 and counts["fault"] > 500 and counts["unknown"] > 5_000, counts
    # Every format is tried with words that mean something in it, or the test would show little.
    assert not [name for name in TABLES if counts[name] < 20], counts


def test_random_programs():
    """Straight-line programs of random words that decode, to their fault or end, through the machine."""
    from asm import launch

    windows = [window[: decoded_size(window)] for window in random_windows(9, 30_000)]
    windows = [window for window in windows if window]
    ends = Counter()
    for start in range(0, len(windows), 12):
        code = b"".join(windows[start : start + 12]) + bytes.fromhex("000081bf")  # s_endpgm
        memory = Memory()
        try:
            launch(code, bytes(256), memory, lds_bytes=LDS_BYTES, num_vgprs=NUM_VGPRS, max_group_instructions=INSTRUCTION_LIMIT)
            ends["end"] += 1
        except KernelFault as error:
            ends["limit" if "without an end" in str(error) else "fault"] += 1
        finally:
            memory.close()
    assert sum(ends.values()) > 300 and ends["fault"] > 100, ends


def decoded_size(window: bytes) -> int:
    try:
        return decode(window, 0, ACCUM_OFFSET).encoded.size
    except UnknownInstruction:
        return 0


# ---- damaged code objects


def damaged(image: bytes, rng: random.Random) -> bytes:
    """One to eight bits flipped; half of the time in a small window, so that notes and descriptors, which are small, get their share."""
    copy = bytearray(image)
    begin, end = 0, len(image)
    if rng.random() < 0.7:
        begin = rng.randrange(len(image))
        end = min(len(image), begin + 256)
    for _ in range(rng.randint(1, 8)):
        copy[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
    return bytes(copy)


def launch_sample(image: bytes) -> np.ndarray:
    """Load a code object as kernels/sample.co and run two of its kernels, one with every kind of argument and one with LDS."""
    rng = np.random.default_rng(3)
    with open_device("emulator") as device, device.load(image) as module:
        x, y = (device.to_device(rng.standard_normal(512).astype(np.float32)) for _ in range(2))
        sums, out = device.allocate(512 * 4), device.allocate(512 * 4)
        numbers = {"n": np.int32(500), "scale": np.float32(3), "flag": np.uint8(1), "shift": np.float64(0.5)}
        device.launch(module.kernel("scale_add"), 2, x=x, y=y, out=sums, **numbers)
        device.launch(module.kernel("reverse"), 2, x=sums, out=out)
        return out.download(512, np.uint32)


@pytest.fixture
def limited(monkeypatch):
    """Launches end after INSTRUCTION_LIMIT instructions."""
    monkeypatch.setattr(emulator_device, "run", functools.partial(run, max_group_instructions=INSTRUCTION_LIMIT))


def fates_of_code_objects(image: bytes, seed: int, count: int) -> Counter[str]:
    expected = launch_sample(image)
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(count):
        try:
            counts["right" if np.array_equal(launch_sample(damaged(image, rng)), expected) else "wrong"] += 1
        except TYPED as error:
            counts[type(error).__name__] += 1
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_damaged_code_objects(limited, sample, seed):
    counts = fates_of_code_objects(sample.read_bytes(), seed, NUM_CODE_OBJECTS // 4)
    assert sum(counts.values()) == NUM_CODE_OBJECTS // 4
    assert min(counts[name] for name in ("right", "ValueError", "UnknownInstruction")) > 0, counts


def test_every_known_descriptor_bit_is_read_and_every_other_raises():
    """Each of the 512 bits, flipped alone in the descriptor of a real kernel, changes what is parsed or is refused."""
    info = CodeObject.load(code_object_path("mla_decode", "gfx950")).kernels["mla_decode_bf16_narrow"]
    parsed = Descriptor.parse(info.descriptor)
    silent, refused = [], 0
    for bit in range(512):
        raw = bytearray(info.descriptor)
        raw[bit // 8] ^= 1 << bit % 8
        try:
            if Descriptor.parse(bytes(raw)) == parsed:
                silent.append(bit)
        except ValueError as error:
            assert "not emulated" in str(error)
            refused += 1
    # How many SGPRs there are is the same on every kernel of this family; whether there is scratch, its size says.
    assert silent == [48 * 8 + 6, 48 * 8 + 7, 48 * 8 + 8, 48 * 8 + 9, 52 * 8]
    assert refused > 250


def test_no_two_rows_overlap():
    """One mnemonic a row, and no opcode that two formats could both claim."""
    for name, table in TABLES.items():
        mnemonics = Counter(row.mnemonic for row in table.values())
        assert not [mnemonic for mnemonic, count in mnemonics.items() if count > 1], name
        assert all(opcode < 1 << LAYOUTS[name].fields["op"][1] for opcode in table), name
    packed, matrix = TABLES["VOP3P"].keys(), TABLES["VOP3P-MAI"].keys()
    assert not packed & matrix  # they share one encoding


def test_each_first_dword_has_one_format():
    """A dword made of a format's prefix and a table's opcode is identified as that format, so that no row hides another."""
    for name, table in TABLES.items():
        _, value = PREFIXES[name]
        low, _ = LAYOUTS[name].fields["op"]
        if name == "VOP3PX2":  # the opcode stands in the third dword
            continue
        for opcode in OPCODES[name]:
            found = identify(value | opcode << low)
            assert found is not None and (found.name == name or (name == "VOP3" and opcode in encodings.VOP3_WITH_SDST)), (
                name,
                opcode,
                table[opcode],
            )
