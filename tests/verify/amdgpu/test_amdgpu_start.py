"""What waves begin with, and waves of 64 lanes on RDNA: small kernels of our own, executed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.verify.amdgpu import executor, loader
from tests.verify.amdgpu.launch import compiler, missing
from tests.verify.amdgpu.memory import Memory

RDNA = ("gfx1030", "gfx1100", "gfx1201")
_AT = 0x10000


def run(gfx: str, body: str, folder: Path, *options: str, block: int = 128) -> np.ndarray:
    """What a kernel writes to `out` (3 * block,) in three groups: `me` is the place of each
    work-item.
    """
    if reason := missing(gfx):
        pytest.skip(reason)
    source, result = folder / "small.hip", folder / "small.co"
    source.write_text(
        f"""extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 256)))
        void small(unsigned* out) {{
            unsigned item = __builtin_amdgcn_workitem_id_x(), value = 0;
            unsigned me = __builtin_amdgcn_workgroup_id_x() * {block} + item;
            {body}
            out[me] = value;
        }}""",
        encoding="utf-8",
    )
    found = compiler()
    assert found is not None
    command = [*found.program, "-x", "hip", f"--offload-arch={gfx}", "--offload-device-only"]
    command += ["--no-gpu-bundle-output", "-nogpuinc", "-nogpulib", "-O3", *options]
    subprocess.run([*command, source, "-o", result], check=True, timeout=600)
    code = result.read_bytes()
    out, memory = np.zeros(3 * block, np.uint32), Memory()
    memory.add(_AT, out.view(np.uint8), name="out")
    size = loader.load(code, "small").resources.kernarg_bytes
    executor.run(code, "small", _AT.to_bytes(8, "little").ljust(size, b"\0"), 3, block, memory)
    return out


def test_a_wave_of_rdna4_knows_its_number(tmp_path: Path) -> None:
    """In five bits of TTMP8; Triton's kernels read it there."""
    body = 'asm volatile("s_mov_b32 %0, ttmp8" : "=s"(value)); value = value >> 25 & 31;'
    found = run("gfx1201", body, tmp_path)
    assert np.array_equal(found, np.tile(np.arange(128) // 32, 3))


WAVE64 = "-mwavefrontsize64"


@pytest.mark.parametrize("gfx", RDNA)
def test_waves_of_64_lanes_vote_and_part_on_rdna(gfx: str, tmp_path: Path) -> None:
    """A vote of 64 lanes, of which some take another way; each counts those below it."""
    body = """
        unsigned lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
        if (me % 5 == 2) value = 1000 + lane;
        else {
            unsigned long long vote = __builtin_amdgcn_ballot_w64(me % 3 == 0);
            value = __builtin_amdgcn_mbcnt_hi(vote >> 32, __builtin_amdgcn_mbcnt_lo(vote, 0));
        }"""
    found = run(gfx, body, tmp_path, WAVE64)
    me = np.arange(3 * 128)
    votes = ((me % 3 == 0) & (me % 5 != 2)).reshape(-1, 64)
    below = (np.cumsum(votes, axis=1) - votes).ravel()
    assert np.array_equal(found, np.where(me % 5 == 2, 1000 + me % 64, below))


@pytest.mark.parametrize("gfx", RDNA)
def test_rows_of_64_lanes_are_exchanged(gfx: str, tmp_path: Path) -> None:
    body = """
        value = me;
        value = __builtin_amdgcn_permlanex16(value, value, 0x76543210, 0xfedcba98, true, false);
        value += __builtin_amdgcn_readlane(me, 40) * 1000;"""
    me = np.arange(3 * 128)
    assert np.array_equal(run(gfx, body, tmp_path, WAVE64), (me ^ 16) + (me // 64 * 64 + 40) * 1000)
