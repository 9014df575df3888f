"""examples/embed.c, compiled as it says and run on the stand-in HIP runtime, gives what decode gives; its header is that of the code object."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import write_embedding
from conftest import ROOT
from decode_cases import Case, make
from mla_rt import decode
from mla_rt.code_object import code_object_path
from shim.library import BUILD, build
from tolerance import assert_decoded, assert_same_bits

SOURCE = ROOT / "examples" / "embed.c"
COMPILE, RUN = re.findall(r"^ \*   (.*)$", SOURCE.read_text(), re.MULTILINE)
CODE_OBJECT = code_object_path("mla_decode", "gfx950")


def compiled(folder, name, *more):
    """By the command that the file gives, with the tools and the runtime that are here."""
    shim = build()
    command = shlex.split(COMPILE.replace("/opt/rocm/include", str(ROOT / "tests/shim/include")).replace("/opt/rocm/lib", str(shim.parent)))
    assert command[0] == "cc" and command[command.index("-o") + 1] == "embed"
    command[command.index("-o") + 1] = str(folder / name)
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", *more]
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(BUILD / "zig_cache")} | os.environ
    subprocess.run([sys.executable, "-m", "ziglang", "cc", *flags, *command[1:]], cwd=SOURCE.parent, check=True, env=environment)
    return folder / name


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("embed"), "embed.so", "-shared", "-fPIC")


def run(library, folder, made, splits):
    arguments = made.arguments
    arrays = {name: arguments[name].astype(np.int32) for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")}
    for name, array in {**arrays, "q": arguments["q"], "kv": arguments["kv"]}.items():
        array.tofile(folder / f"{name}.bin")
    given = {"NUM_HEADS": made.case.num_heads, "PAGE_SIZE": made.case.page_size, "SM_SCALE": repr(float(arguments["sm_scale"])), "SPLITS": splits}
    given |= {"mla_decode.co": CODE_OBJECT, "FOLDER": folder}
    command = [str(given.get(word, word)) for word in shlex.split(RUN)[1:]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, ROOT / "tests/run_embed.py", library, *command], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = arguments["q"].shape[:2]
    out = np.fromfile(folder / "out.bin", ml_dtypes.bfloat16).reshape(*rows, 512)
    return done.stdout, (out, np.fromfile(folder / "lse.bin", np.float32).reshape(rows))


# The second has more rows a request than the kernel takes at a time, for which decode may choose another kernel.
@pytest.mark.parametrize(
    ("case", "splits", "work"),
    [
        (Case((37, 0, 3, 200), (2, 1, 0, 1), num_heads=5, page_size=4, num_splits=1), 1, 3),
        (Case((37, 0, 3, 200), (2, 1, 3, 1), num_heads=5, page_size=4, num_splits=4), 4, 4 + 1 + 3 + 4),
        (Case((70, 9), (3, 2), num_heads=9, page_size=16, num_splits=2), 2, 2 * 2 + 2 * 2),
    ],
    ids=["whole", "split", "row tiles"],
)
def test_it_decodes_as_decode_does(case, splits, work, library, tmp_path, emulator_device):
    made = make(case)
    printed, result = run(library, tmp_path, made, splits)
    assert printed == f"{len(case.kv_lens)} requests, {made.arguments['q'].shape[0] * case.num_heads} query rows, {work} workgroups\n"
    assert_decoded(*result, *made.exact())
    if max(case.q_lens) * case.num_heads <= write_embedding.kernels_by_format()["bf16"][0].rows_per_tile:
        assert_same_bits(result, decode(**made.arguments, device=emulator_device))


def test_a_program_of_its_own_says_what_is_missing(tmp_path):
    """Linked as the file says; the stand-in runtime shows no GPU to it."""
    program = compiled(tmp_path, "embed", f"-Wl,-rpath,{build().parent}")
    done = subprocess.run([program, "mla_decode.co", tmp_path, "1", "1", "1", "1"], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (1, "embed: no GPU\n")
    done = subprocess.run([program, "mla_decode.co", tmp_path, "1", "3", "1", "1"], text=True, capture_output=True)
    assert done.returncode == 2 and "pages of 1, 2, 4" in done.stderr
    done = subprocess.run([program], text=True, capture_output=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


def test_the_header_is_that_of_the_code_object():
    assert write_embedding.HEADER.read_text() == write_embedding.header(), "run scripts/write_embedding.py"


# ---- docs/embedding.md

PAGE = write_embedding.PAGE.read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_has_the_tables_of_the_code_object():
    assert write_embedding.page(PAGE) == PAGE, "run scripts/write_embedding.py"
    kernels = list(write_embedding.code_object().kernels.values())
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for kernel in kernels:
        for arg in kernel.args:
            assert [row for row in rows if re.match(rf"\| `{arg.name}` \| `[\w *]+` \| {arg.offset} \| {arg.size} \|", row)], arg
        assert any(f"| `{kernel.name}` |" in row and f"| {kernel.lds_bytes} |" in row for row in PAGE.splitlines()), kernel.name
    explained = PAGE[PAGE.index("### Arguments") :]
    assert not [arg.name for arg in kernels[0].args if arg.kind == "by_value" and f"`{arg.name}`" not in explained]


def test_a_table_that_is_out_of_date_is_noticed():
    for old in ("| `q` | `const bf16*` |", "| bf16 | `mla_decode_bf16"):
        assert PAGE.count(old) >= 1
        assert write_embedding.page(PAGE.replace(old, "| changed |", 1)) == PAGE


def test_source_and_code_object_must_agree(monkeypatch, tmp_path):
    source = write_embedding.SOURCE.read_text()
    for old, new in (
        ("const bf16* __restrict__ q,", "const bf16* __restrict__ queries,"),
        ("i32 num_heads, i32 page", "const i32* num_heads, i32 page"),
    ):
        assert old in source
        changed = tmp_path / "changed.hip"
        changed.write_text(source.replace(old, new))
        monkeypatch.setattr(write_embedding, "SOURCE", changed)
        with pytest.raises(
            ValueError, match=r"the source declares .*'queries'|num_heads is const i32\* in the source and by_value in the code object"
        ):
            write_embedding.parameters(list(write_embedding.code_object().kernels.values()))


def test_the_page_says_how_embed_is_compiled_and_run():
    (shell,) = [text for language, text in BLOCKS if language == "sh"]
    assert shell.splitlines() == [COMPILE, RUN]


def test_the_pages_programs_print_what_it_says():
    programs = [i for i, (language, _) in enumerate(BLOCKS) if language == "python"]
    assert len(programs) == 2 and {language for language, _ in BLOCKS} == {"python", "text", "sh"}
    for i in programs:
        done = subprocess.run([sys.executable, "-c", BLOCKS[i][1]], cwd=ROOT, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        if i + 1 < len(BLOCKS) and BLOCKS[i + 1][0] == "text":
            assert done.stdout == BLOCKS[i + 1][1]
        else:
            assert done.stdout.splitlines()[0].split()[0] == "0"


def test_files_that_the_page_names_are_there():
    links = re.findall(r"\]\((\.\./[^)#]+)\)", PAGE)
    assert links and not [link for link in links if not (write_embedding.PAGE.parent / link).is_file()]
