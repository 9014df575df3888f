"""What the kernels take of a compute unit: no scratch, no spills, and docs/kernels.md says what the code objects say."""

from __future__ import annotations

import pytest

import write_kernels
from build_kernels import compile_with_ziglang, find_hipcc
from conftest import ROOT
from mla_rt.emulator.descriptor import Descriptor
from mla_rt.occupancy import occupancy

KERNELS = write_kernels.resources()
MAX_LDS_BYTES = 160 << 10


def test_every_kernel_file_is_among_them():
    assert {of.stem for of in KERNELS} == {path.stem for path in (ROOT / "src" / "hip").glob("*.hip")}
    names = [of.info.name for of in KERNELS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("of", KERNELS, ids=lambda of: of.info.name)
def test_nothing_goes_to_scratch_and_every_workgroup_fits(of):
    assert of.info.scratch_bytes == 0 and of.num_spills == 0
    assert of.info.lds_bytes <= MAX_LDS_BYTES and of.fit.workgroups_per_cu >= 1
    # The note, which is for people, and the descriptor, which the machine reads, agree. The descriptor may ask for more vector registers: as many as
    # there are to have where LDS or the workgroup's size allows no further wave anyway.
    descriptor = Descriptor.parse(of.info.descriptor)
    assert (descriptor.scratch_bytes, descriptor.lds_bytes) == (0, of.info.lds_bytes)
    assert descriptor.num_vgprs >= of.info.num_vgprs
    allocated = occupancy(num_vgprs=descriptor.num_vgprs, lds_bytes=of.info.lds_bytes, block_size=of.info.block_size)
    assert allocated.workgroups_per_cu == of.fit.workgroups_per_cu


def test_the_page_says_what_the_code_objects_say():
    if find_hipcc():
        pytest.skip("docs/kernels.md is of the kernels as the clang of ziglang compiles them; these are hipcc's")
    assert write_kernels.PAGE.read_text(encoding="utf-8") == write_kernels.page(), "run scripts/write_kernels.py"


def test_a_spill_would_show(tmp_path):
    """A kernel with more live values than the eight registers that it may have."""
    source = tmp_path / "spilling.hip"
    source.write_text("""
extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64), amdgpu_num_vgpr(8))) void spilling(float* x) {
    float v[32];
    #pragma unroll
    for (int i = 0; i < 32; i++) v[i] = x[i * 64 + __builtin_amdgcn_workitem_id_x()];
    __builtin_amdgcn_s_barrier();
    #pragma unroll
    for (int i = 0; i < 32; i++) x[i * 64 + __builtin_amdgcn_workitem_id_x()] = v[31 - i] * v[i];
}
""")
    compile_with_ziglang(source, tmp_path / "spilling.co", "gfx950")
    (of,) = write_kernels.resources_of(tmp_path / "spilling.co")
    assert of.info.scratch_bytes > 0 and of.num_spills > 0
