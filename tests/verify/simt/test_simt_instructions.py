"""The shim's instructions against tables written down here, their signatures against clang."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lib_rocm_sd.arch import KERNELS_DIR, Arch, by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from tests.verify import simt

KERNELS = simt.SIMT_DIR / "kernels"
pytestmark = pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))

UNITS = ("gfx1100", "gfx1200", "gfx90a", "sm_80")
HALVES_AND_RESULTS = {
    "gfx1030": (2, 2, 1),
    "gfx1100": (16, 16, 8),
    "gfx1200": (8, 8, 8),
    "gfx90a": (4, 4, 4),
    "sm_80": (8, 4, 4),
}
"""Halves of A and of B that a lane holds, and floats of D."""


def row(gfx: str) -> Arch:
    arch = by_gfx(gfx)
    assert arch is not None
    return arch


def execute(spec: KernelSpec, arch: Arch, *arrays: np.ndarray) -> None:
    """Runs one wave of a kernel whose parameters are pointers to `arrays`, in this order."""
    pointers = (ctypes.c_uint64 * len(arrays))(*(array.ctypes.data for array in arrays))
    params = type("Params", (ctypes.Structure,), {"_fields_": [("p", type(pointers))]})(pointers)
    memory = [simt.Region(array.ctypes.data, array.nbytes) for array in arrays]
    program = simt.compile_shim(spec, arch, kernels_dir=KERNELS)
    simt.run(program, params, memory, 1, arch.wave_size)


def expected_moves(value: np.ndarray, index: np.ndarray, gfx: str) -> dict[str, np.ndarray]:
    """Per row of moves.hip what the ISA documents say that each lane gets."""
    wave = len(value)
    lane = np.arange(wave)
    i, base, old = lane % 16, lane // 16 * 16, 1000 + lane
    permuted = np.zeros_like(value)
    permuted[index] = value
    mirrored = value[base + 15 - i]
    rows = {
        "ds_bpermute": value[index],
        "ds_permute": permuted,
        "ds_swizzle xor 16": value[lane ^ 16],
        "ds_swizzle quad": value[lane ^ 1],
        "readfirstlane": np.full(wave, value[0]),
        "readlane": np.full(wave, value[5]),
        "quad_perm": value[lane ^ 3],
        "row_shl": np.where(i < 13, value[np.minimum(lane + 3, wave - 1)], 0),
        "row_shr": np.where(i > 0, value[lane - 1], old),
        "row_ror": value[base + (i + 11) % 16],
        "row_mirror": mirrored,
        "row_half_mirror": value[lane ^ 7],
        "row_mask": np.where(lane // 16 == 1, mirrored, old),
        "bank_mask": np.where(i < 4, mirrored, old),
        "mov_dpp": mirrored,
    }
    bits = sum(int(value[n] & 1) << n for n in range(wave))
    if wave == 32:
        select = [15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
        return rows | {
            "row_share": value[base + 7],
            "row_xmask": value[lane ^ 5],
            "permlane16": value[base + np.array(select)[i]],
            "permlanex16": value[lane ^ 16],
            "ballot": np.full(wave, bits),
        }
    return rows | {
        "ballot, low": np.full(wave, bits & 0xFFFFFFFF),
        "ballot, high": np.full(wave, bits >> 32),
    }


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx90a"])
def test_moves_between_lanes(gfx: str) -> None:
    arch = row(gfx)
    random = np.random.default_rng(1)
    value = random.integers(0, 1 << 31, arch.wave_size, dtype=np.uint32)
    index = random.permutation(arch.wave_size).astype(np.uint32)
    expected = expected_moves(value, index, gfx)
    out = np.zeros((len(expected), 64), np.uint32)
    execute(KernelSpec("moves.hip", "moves"), arch, value, index, out)
    got = out[:, : arch.wave_size].astype(np.int64)
    for name, want, have in zip(expected, expected.values(), got, strict=True):
        assert have.tolist() == want.tolist(), name


def test_arithmetic_within_a_lane() -> None:
    exp_cases = {0.0: 1.0, 1.5: 2**1.5, -126.0: 2.0**-126, -127.0: 0.0, 200.0: np.inf}
    exp_cases |= {-np.inf: 0.0, np.inf: np.inf, 1e-40: 1.0, np.nan: np.nan}
    x = np.zeros((32, 3), np.uint32)
    x[: len(exp_cases), 0] = np.array(list(exp_cases), np.float32).view(np.uint32)
    x[10] = 0x80112233, 0x84556677, 0x0C0D_0700
    x[11] = 0x80112233, 0x84556677, 0x0B09_0403
    x[12] = 0x80112233, 0x84556677, 8
    x[13] = 0x80112233, 0x84556677, 2
    x[14, :2] = np.array([1.9999, -7e4], np.float32).view(np.uint32)
    out = np.zeros((5, 64), np.uint32)
    execute(KernelSpec("arithmetic.hip", "arithmetic"), row("gfx1030"), x, out)
    perm, alignbit, alignbyte, exponential, toward_zero = out
    assert perm[10] == 0x00FF_8077  # constant 0, constant 0xff, byte 7, byte 0
    assert perm[11] == 0xFFFF_3384  # signs of halves 3 and 1, byte 4, byte 3
    assert alignbit[12] == 0x33845566
    assert alignbyte[13] == 0x22338455
    assert toward_zero[14] == 0xFBFF_3FFF
    got = exponential[: len(exp_cases)].view(np.float32)
    np.testing.assert_allclose(got, np.array(list(exp_cases.values()), np.float32), rtol=2e-7)


def to_bits(x: np.ndarray, bf16: bool) -> np.ndarray:
    if not bf16:
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def to_float(bits: np.ndarray, bf16: bool) -> np.ndarray:
    if not bf16:
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def registers(
    gfx: str, a: np.ndarray, b: np.ndarray, d: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each lane holds of A (m, k), B (k, n) and D (m, n): (lanes, elements) each."""
    if gfx == "gfx1100":
        return np.vstack([a, a]), np.vstack([b.T, b.T]), np.vstack([d[0::2].T, d[1::2].T])
    if gfx in ("gfx1200", "gfx90a"):
        step = 8 if gfx == "gfx1200" else 4
        starts = range(0, 16, step)
        return (
            np.vstack([a[:, k : k + step] for k in starts]),
            np.vstack([b[k : k + step].T for k in starts]),
            np.vstack([d[m : m + step].T for m in starts]),
        )
    lanes = [divmod(lane, 4) for lane in range(32)]
    quarters = [(0, 0), (8, 0), (0, 8), (8, 8)]  # of A: first row, first k
    return (
        np.array(
            [[a[g + m, k + 2 * t + i] for m, k in quarters for i in (0, 1)] for g, t in lanes]
        ),
        np.array([[b[k + 2 * t + i, g] for k in (0, 8) for i in (0, 1)] for g, t in lanes]),
        np.array([[d[g + m, 2 * t + i] for m in (0, 8) for i in (0, 1)] for g, t in lanes]),
    )


def product_spec(gfx: str, bf16: bool, clamp: int = 0) -> KernelSpec:
    names = ("HALVES_A", "HALVES_B", "RESULTS")
    defines = {**dict(zip(names, HALVES_AND_RESULTS[gfx], strict=True)), "BF16_HALVES": int(bf16)}
    return KernelSpec("products.hip", "products", (*defines.items(), ("CLAMP", clamp)))


@pytest.mark.parametrize("bf16", [False, True], ids=["f16", "bf16"])
@pytest.mark.parametrize("gfx", UNITS)
def test_matrix_instructions(gfx: str, bf16: bool) -> None:
    random = np.random.default_rng(2)
    columns = 8 if gfx == "sm_80" else 16
    a, b = (
        to_bits(random.normal(size=(16, 16)), bf16),
        to_bits(random.normal(size=(16, columns)), bf16),
    )
    c = random.normal(size=(16, columns)).astype(np.float32)
    want = to_float(a, bf16) @ to_float(b, bf16) + c
    a_lanes, b_lanes, c_lanes = (np.ascontiguousarray(x) for x in registers(gfx, a, b, c))
    d_lanes = np.zeros_like(c_lanes)
    execute(product_spec(gfx, bf16), row(gfx), a_lanes, b_lanes, c_lanes, d_lanes)
    np.testing.assert_allclose(d_lanes, registers(gfx, a, b, want)[2], rtol=0, atol=1e-5)


def test_gfx11_wants_its_operands_twice() -> None:
    a = np.zeros((32, 16), np.uint16)
    b, c, d = a.copy(), np.zeros((32, 8), np.float32), np.zeros((32, 8), np.float32)
    b[21, 3] = 0x3C00
    with pytest.raises(simt.SimtError, match=r"lanes 5 and 21 must hold the same B\[3\]\[5\]"):
        execute(product_spec("gfx1100", False), row("gfx1100"), a, b, c, d)


@pytest.mark.parametrize("bf16", [False, True], ids=["f16", "bf16"])
@pytest.mark.parametrize("clamp", [0, 1])
def test_dot2(bf16: bool, clamp: int) -> None:
    random = np.random.default_rng(3)
    a, b = (to_bits(random.normal(size=(32, 2)), bf16) for _ in range(2))
    c, d = random.normal(size=(32, 1)).astype(np.float32), np.zeros((32, 1), np.float32)
    execute(product_spec("gfx1030", bf16, clamp), row("gfx1030"), a, b, c, d)
    want = (to_float(a, bf16) * to_float(b, bf16)).sum(1, keepdims=True) + c
    want = want.clip(0, 1) if clamp else want
    np.testing.assert_allclose(d, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["f16", "bf16"])
@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx90a", "gfx942"])
def test_clang_accepts_the_same_calls(gfx: str, mode: str, tmp_path: Path) -> None:
    """The sources that the shim runs compile for the GPU: names and arguments are right."""
    arch = row(gfx)
    if gfx == "gfx1030" and mode == "bf16":
        pytest.skip("gfx1030 has no v_dot2_f32_bf16")
    sizes = {"gfx1201": "gfx1200", "gfx942": "gfx90a"}
    product = product_spec(sizes.get(gfx, gfx), mode == "bf16")
    for name in ("moves.hip", "arithmetic.hip", product.source):
        defines = {**arch.defines(), **dict(product.defines)}
        command = [str(simt.find_clang()), "-x", "hip", "--cuda-device-only", "-std=c++17", "-O1"]
        command += [f"--offload-arch={gfx}", "-nogpuinc", "-nogpulib", f"-I{KERNELS_DIR}"]
        command += [f"-D{key}={value}" for key, value in defines.items()]
        command += ["-S", "-o", str(tmp_path / "out.s"), str(KERNELS / name)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, f"{name}: {result.stderr}"
