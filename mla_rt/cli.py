"""The command `mla-rt`.

Exit codes: 0 done; 1 the result breaks its promise, or the emulator found a fault in a kernel; 2 the command, its input or the device is
not usable; 130 interrupted; 141 nobody reads what it prints any more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, batch_file, probe, terminal
from .batch import make_batch
from .check import check
from .code_object import CODE_OBJECTS, CodeObject
from .decode import decode_batch, kernel_name
from .decode_kernel import KV_FORMATS
from .demo import LEGEND, TABLE_HEAD, demo, describe, describe_device, table_row, verdict
from .device import Device, open_device
from .errors import DeviceError, KernelFault, UnsupportedArch
from .formats import load_record
from .kernel_arguments import ARGUMENTS, make_arguments, read_arguments
from .occupancy import occupancy
from .output_file import require_writable, writing

BATCH = """\
A batch is an npz file with the arguments of mla_rt.decode under their names: q, kv and sm_scale; qo_indptr, kv_indptr,
kv_indices, kv_last_page_len, page_size or block_table, kv_lens; causal. uint16 arrays are bfloat16 bits. To make one:
  np.savez("batch.npz", q=q.view(np.uint16), kv=kv.view(np.uint16), kv_indptr=kv_indptr, sm_scale=576**-0.5)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: those of the process). Returns the exit code."""
    terminal.tolerate_any_character()
    try:
        code = _run(arguments)
        terminal.flush()
        return code
    except BrokenPipeError:
        return 141
    except KernelFault as fault:
        print(f"mla-rt: kernel fault: {fault}", file=sys.stderr)
        return 1
    except (OSError, ValueError, TypeError, MemoryError, DeviceError, UnsupportedArch) as error:
        print(f"mla-rt: {error or 'out of memory'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mla-rt: interrupted", file=sys.stderr)
        return 130
    finally:
        terminal.drop_what_cannot_be_written()


def _run(arguments: Sequence[str] | None) -> int:
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:  # help, the version, or a mistake that argparse has told
        return int(end.code or 0)
    return int(options.command(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mla-rt", description="MLA decode on AMD GPUs, or on the emulator of one, from numpy arrays.")
    parser.add_argument("--version", action="version", version=f"mla-rt {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    arrays = f"{BATCH}\n\nThe table of errors:\n{LEGEND}"

    def command(name: str, run: Any, text: str, epilog: str | None = None) -> argparse.ArgumentParser:
        lines = argparse.RawDescriptionHelpFormatter if epilog and "\n" in epilog else argparse.HelpFormatter
        sub = commands.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=lines)
        sub.set_defaults(command=run)
        return sub

    def on_device(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--device", choices=("auto", "hip", "emulator"), default="auto", help="where to run (default: a GPU if there is one)")

    def on_device_split(sub: argparse.ArgumentParser, splits: str = "--splits") -> None:
        on_device(sub)
        sub.add_argument(splits, type=int, metavar="N", help="parts that each request's tokens are cut into (default: as the device is filled)")

    sub = command("decode", _decode, "Decode a batch.", arrays)
    sub.add_argument("batch", type=_path, help="npz file")
    cache = sub.add_mutually_exclusive_group()
    cache.add_argument("--kv-format", choices=batch_file.CACHE_FORMATS, default="bf16", help="how the cache is stored for decoding (default: bf16)")
    cache.add_argument("--kv", type=_path, metavar="kv.npz", help="decode this cache, which `quantize` wrote, in place of the kv of the batch")
    sub.add_argument("--check", action="store_true", help="compare with float64; exit code 1 if the promised accuracy is missed")
    sub.add_argument("-o", "--output", type=_path, metavar="out.npz", help="write out (bfloat16 bits as uint16) and lse (float32)")
    on_device_split(sub)
    _add_quantizer_options(sub)

    sub = command("demo", _demo, "Decode a batch in all three cache formats, compare with float64, and say how exact it was.", arrays)
    sub.add_argument("batch", type=_path, nargs="?", help="npz file (default: a small batch is made)")
    on_device_split(sub)

    sub = command("quantize", _quantize, "Quantize an array, block-wise (mxfp4) or with one scale (fp8).")
    sub.add_argument("input", type=_path, help="npy file: floats [.., width], or bfloat16 bits as uint16")
    sub.add_argument("--to", choices=batch_file.CACHE_FORMATS[1:], required=True, help="the format")
    sub.add_argument("-o", "--output", type=_path, metavar="kv.npz", required=True)
    _add_quantizer_options(sub)

    sub = command("dequantize", _dequantize, "Write what `quantize` wrote as float32 again.")
    sub.add_argument("input", type=_path, help="npz file")
    sub.add_argument("-o", "--output", type=_path, metavar="out.npy", required=True)

    sub = command("speed", _speed, "Report how fast a decode is: modelled from exact counts on the emulator, measured on a GPU.")
    for name, kind, default, text in (
        ("--batch", int, None, "requests"),
        ("--kv-len", int, None, "tokens of each request"),
        ("--num-heads", int, 16, "query heads"),
        ("--q-len", int, 1, "query tokens of each request"),
        ("--page-size", int, 64, "tokens a page"),
    ):
        text += f" (default: {default})" if default else ""
        sub.add_argument(name, type=kind, metavar="N", required=default is None, default=default, help=text)
    sub.add_argument("--kv-format", choices=KV_FORMATS["gfx950"], required=True, help="how the cache is stored")
    on_device_split(sub, "--num-splits")
    sub.add_argument("--exact", action="store_true", help="emulate every request, however long it takes, in place of some and scaling")
    _add_report_options(sub)

    sub = command("emulate", _emulate, "Run a kernel of any code object on the emulator and count what it does.", ARGUMENTS)
    sub.add_argument("code_object", type=_path, metavar="kernel.co", help="gfx950 code object")
    sub.add_argument("name", metavar="NAME", help="of the kernel")
    sub.add_argument("--grid", type=_three, metavar="X[,Y,Z]", required=True, help="workgroups")
    sub.add_argument("--block", type=_three, metavar="X[,Y,Z]", help="work-items of a workgroup (default: as the code object states)")
    sub.add_argument("--args", type=_path, metavar="args.toml", help="the kernel's arguments; see below (default: it has none)")
    sub.add_argument("--dynamic-lds", type=int, metavar="N", default=0, help="bytes of LDS besides the kernel's own")
    sub.add_argument("--timing", choices=("earliest", "latest", "hardware"), default="earliest", help="when loads arrive (default: earliest)")
    sub.add_argument("--checks", choices=("off", "strict"), default="off", help="whether what hardware does not promise is a fault (default: off)")
    sub.add_argument("--seed", type=int, metavar="N", help="run waves and workgroups in a random order")
    _add_report_options(sub)

    sub = command("probe", _probe, "Compare what the device does with what the kernels assume of it; exit code 1 if it differs.")
    on_device(sub)

    command("info", _info, "Show the devices, the code objects, and what their kernels take of a compute unit.")
    return parser


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of a file is empty")
    return Path(text)


def _three(text: str) -> tuple[int, int, int]:
    """ "4", "4,2" or "4,2,1"."""
    numbers = [int(part) for part in text.split(",")]
    if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"one to three positive numbers are needed, not {text!r}")
    x, y, z = numbers + [1] * (3 - len(numbers))
    return x, y, z


def _add_report_options(sub: argparse.ArgumentParser) -> None:
    for name, text in (
        ("--json", "write the report for programs"),
        ("--html", "write the report as a page with pictures"),
        ("--trace", "write the timeline of one workgroup for chrome://tracing or Perfetto"),
    ):
        sub.add_argument(name, type=_path, metavar="FILE", help=text)


def _add_quantizer_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--scale-rule", choices=("floor", "ceil", "even"), help="how mxfp4 chooses a block's scale (default: even)")
    sub.add_argument("--scale", type=float, metavar="S", help="fp8: the multiplier that dequantizes (default: from the largest value)")


def _stored(options: argparse.Namespace, array: np.ndarray, kv_format: str) -> Any:
    """The array in the format; options of another format are refused, not ignored."""
    if options.scale_rule is not None and kv_format != "mxfp4":
        raise ValueError(f"--scale-rule is for mxfp4, not for {kv_format}")
    if options.scale is not None and not kv_format.startswith("fp8"):
        raise ValueError(f"--scale is for fp8, not for {kv_format}")
    return batch_file.quantize(array, kv_format, scale_rule=options.scale_rule or "even", scale=options.scale)


def _decode(options: argparse.Namespace) -> int:
    if options.output is not None:
        require_writable(options.output, options.batch, options.kv)
    if options.kv is not None and (options.scale_rule is not None or options.scale is not None):
        raise ValueError(f"{'--scale' if options.scale_rule is None else '--scale-rule'} is for quantizing; the cache of --kv is quantized already")
    arguments = batch_file.load_batch(options.batch)
    original = arguments["kv"]
    stored = load_record(options.kv) if options.kv is not None else _stored(options, original, options.kv_format)
    if stored.shape != original.shape:  # one would be judged by the other
        raise ValueError(f"{options.kv} holds a cache of shape {stored.shape}, the kv of {options.batch} has shape {original.shape}")
    batch = make_batch(**{**arguments, "kv": stored, "num_splits": options.splits})
    with _opened(options.device) as device:
        kernel = kernel_name(batch, device)
        print(f"batch   {options.batch.name}: {describe(batch)}")
        print(describe_device(device), flush=True)
        begin = time.perf_counter()
        out, lse = decode_batch(batch, device)
        seconds = time.perf_counter() - begin
    if options.output is not None:
        with writing(options.output), options.output.open("wb") as file:  # a file, not its name: numpy would append .npz to it
            np.savez(file, out=out.view(np.uint16), lse=lse)
    print(f"done    {kernel}, {batch.cache.nbytes:,} bytes of cache, {seconds:.2f} s", end="")
    if options.output is not None:
        print(f", written to {options.output}")
    else:
        print("" if options.check else "; the result was neither written (-o) nor checked (--check)")
    if not options.check:
        return 0
    result = check(batch, stored, original, out, lse)
    print(f"\n{TABLE_HEAD}\n{table_row(batch, result, kernel, seconds)}\n")
    kept, lines = verdict({batch.cache.kv_format: result})
    print(*lines, sep="\n")
    return 0 if kept else 1


def _demo(options: argparse.Namespace) -> int:
    arguments = batch_file.made_batch() if options.batch is None else batch_file.load_batch(options.batch)
    source = "made here" if options.batch is None else options.batch.name
    with _opened(options.device) as device:
        return 0 if demo({**arguments, "num_splits": options.splits}, source, device) else 1


def _quantize(options: argparse.Namespace) -> int:
    require_writable(options.output, options.input)
    array = batch_file.load_array(options.input)
    record = _stored(options, array, options.to)
    with writing(options.output):
        record.save(options.output)
    print(f"{options.output}: {options.to} {array.shape}, {record.nbytes:,} bytes")
    return 0


def _dequantize(options: argparse.Namespace) -> int:
    require_writable(options.output, options.input)
    values = load_record(options.input).dequantize()
    with writing(options.output), options.output.open("wb") as file:
        np.save(file, values)
    print(f"{options.output}: float32 {values.shape}")
    return 0


def _speed(options: argparse.Namespace) -> int:
    from .emulator_device import EmulatorDevice  # not at the top: other commands need not load the emulator
    from .speed import Shape, count_decode, measure_decode
    from .speed_report import as_measured_json, as_measured_text

    numbers = (options.batch, options.kv_len, options.kv_format, options.num_heads, options.q_len, options.num_splits, options.page_size)
    shape = Shape(*numbers)
    _check_report_files(options)
    with _opened(options.device) as device:
        if isinstance(device, EmulatorDevice):
            counted = count_decode(shape, device, exact=options.exact)
            _write_report(options, str(shape), counted.launches, counted.tiles, shape.kv_bytes, counted.sample)
            return 0
        if options.html or options.trace or options.exact:
            raise ValueError("--html, --trace and --exact belong to the model: add --device emulator")
        seconds = measure_decode(shape, device)
        print(as_measured_text(str(shape), f"{device.name} ({device.arch})", seconds, shape.kv_bytes))
        if options.json is not None:
            _write_json(options.json, as_measured_json(str(shape), f"{device.name} ({device.arch})", seconds, shape.kv_bytes))
    return 0


def _emulate(options: argparse.Namespace) -> int:
    from .emulator_device import EmulatorDevice
    from .speed import count_launch

    _check_report_files(options, options.code_object, options.args)
    tables = {} if options.args is None else read_arguments(options.args)
    with _opened("emulator") as device:
        assert isinstance(device, EmulatorDevice)
        device.seed, device.timing, device.checks = options.seed, options.timing, options.checks
        kernel = device.load(options.code_object).kernel(options.name)
        folder = Path() if options.args is None else options.args.parent
        arguments, dumps = make_arguments(tables, folder, device)
        block = options.block or (kernel.info.block_size, 1, 1)
        counts = count_launch(kernel, device, options.grid, block, dynamic_lds_bytes=options.dynamic_lds, **arguments)
        report = device.reports[-1]
        for dump in dumps:
            print(f"written {dump.path}: {dump.write():,} bytes")
        rate = f"{report.instructions_per_second:,.0f} a second"
        print(f"done    {report.num_instructions:,} instructions of waves in {report.seconds:.2f} s, {rate}\n")
    _write_report(options, f"{options.code_object.name}, {options.name}", [counts], None, None, counts)
    return 0


def _write_report(options: argparse.Namespace, title: str, launches: Any, tiles: Any, kv_bytes: int | None, sample: Any) -> None:
    """The report of counted launches on the terminal, and in the files that the options name."""
    from .speed_html import as_html
    from .speed_model import speed_of_light
    from .speed_report import as_json, as_text
    from .speed_timeline import timeline

    report = speed_of_light(launches)
    print(as_text(report, title, tiles, kv_bytes))
    if options.json is not None:
        _write_json(options.json, as_json(report, title, tiles, kv_bytes))
    if options.html is not None:
        with writing(options.html):
            options.html.write_text(as_html(report, title, tiles, kv_bytes, timeline(sample)), encoding="utf-8")
    if options.trace is not None:
        _write_json(options.trace, timeline(sample).chrome_trace())


def _write_json(path: Path, content: Any) -> None:
    with writing(path):
        path.write_text(json.dumps(content, default=dict) + "\n", encoding="utf-8")


def _check_report_files(options: argparse.Namespace, *inputs: Path | None) -> None:
    for path in (options.json, options.html, options.trace):
        if path is not None:
            require_writable(path, *inputs)


def _probe(options: argparse.Namespace) -> int:
    with _opened(options.device) as device:
        print(f"{describe_device(device)}\n", flush=True)
        findings = probe.probe(device)
        kind, name = device.kind, device.name
    print(probe.report(findings))
    contradicted = [finding.fact.name for finding in findings if not finding.confirmed]
    print(f"\n{len(findings) - len(contradicted)} of {len(findings)} facts confirmed by {name}", end="")
    print(f"; contradicted: {', '.join(contradicted)}" if contradicted else "")
    if kind == "hip":
        with open_device("emulator") as emulator:
            print(f"the emulator gives {probe.compare_bits(findings, probe.probe(emulator))}")
    return 1 if contradicted else 0


def _info(options: argparse.Namespace) -> int:
    print("devices")
    for kind in ("hip", "emulator"):
        try:
            with open_device(kind) as device:
                print(f"  {kind:<9} {device.name}, {device.arch}, {device.num_compute_units} compute units")
        except (DeviceError, UnsupportedArch) as error:
            print(f"  {kind:<9} not usable: {error}")
    with open_device("auto") as device:
        print(f"  auto      takes {device.name} ({device.reason})")
    print("\ncode objects")
    paths = sorted(CODE_OBJECTS.glob("*/*.co"))
    if not paths:
        print("  none: run `make all`")
        return 0
    row = "    {:<24} {:>6} {:>6} {:>6} {:>9} {:>8} {:>6} {:>11} {:>14}  {}"
    for path in paths:
        code_object = CodeObject.load(path)
        print(f"  {path.parent.name}/{path.name}, {len(code_object.image):,} bytes")
        print(row.format("kernel", "VGPRs", "AGPRs", "SGPRs", "LDS", "scratch", "block", "waves/SIMD", "workgroups/CU", "limited by"))
        for info in code_object.kernels.values():
            fit = occupancy(num_vgprs=info.num_vgprs, lds_bytes=info.lds_bytes, block_size=info.block_size, wavefront_size=info.wavefront_size)
            numbers = (info.num_vgprs - info.num_agprs, info.num_agprs, info.num_sgprs, info.lds_bytes, info.scratch_bytes, info.block_size)
            print(row.format(info.name, *numbers, f"{fit.waves_per_simd:g}", fit.workgroups_per_cu, fit.limited_by))
    return 0


@contextmanager
def _opened(kind: Any) -> Iterator[Device]:
    """The device, which shows the progress of long launches where somebody looks: on a terminal."""
    with open_device(kind) as device:
        if hasattr(device, "progress") and sys.stderr.isatty():
            progress = terminal.Progress()
            device.progress = progress
            try:
                yield device
            finally:
                progress.clear()
        else:
            yield device
