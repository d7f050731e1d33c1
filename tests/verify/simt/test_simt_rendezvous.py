"""The shim's scheduler: barriers, divergence, LDS, and what the sanitizers see."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from tests.verify import simt

pytestmark = pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))

THREADS, GROUPS = 64, 3
CASES = (
    *("exchange", "no barrier", "half a wave returns", "one wave returns", "two barriers"),
    *("divergent shuffle", "two shuffles", "LDS poison", "LDS overflow", "LDS sizes"),
    *("global overflow", "groups collide", "within a wave", "no wave barrier", "endless", "vote"),
    "two functions",
)
"""In the order of the enum in rendezvous.hip."""


class RendezvousParams(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint64), ("out", ctypes.c_uint64)]


def execute(
    case: str, seed: int = 1, sanitize: str | None = None, timeout_s: float = 600.0
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a case of rendezvous.hip: (input, output), a row per work-group."""
    reason = simt.missing(sanitize)
    if reason:
        pytest.skip(reason)
    arch = by_gfx("gfx1100")
    assert arch is not None
    spec = KernelSpec(
        "rendezvous.hip", "rendezvous", (("THREADS", THREADS), ("CASE", CASES.index(case)))
    )
    program = simt.compile_shim(spec, arch, sanitize, simt.SIMT_DIR / "kernels")
    x = np.arange(GROUPS * THREADS, dtype=np.uint32).reshape(GROUPS, THREADS)
    out = np.zeros_like(x)
    params = RendezvousParams(x.ctypes.data, out.ctypes.data)
    memory = [simt.Region(array.ctypes.data, array.nbytes) for array in (x, out)]
    simt.run(program, params, memory, GROUPS, THREADS, seed, timeout_s)
    return x, out


@pytest.mark.parametrize("sanitize", simt.SANITIZERS, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_exchange_through_lds(seed: int, sanitize: str | None) -> None:
    x, out = execute("exchange", seed, sanitize)
    assert (out == np.roll(x, -32, axis=1)).all()


def test_a_missing_barrier_gives_wrong_results() -> None:
    for seed in range(1, 9):
        x, out = execute("no barrier", seed)
        assert not (out == np.roll(x, -32, axis=1)).all(), f"seed {seed}"


def test_a_missing_barrier_is_a_race() -> None:
    with pytest.raises(simt.SimtError, match="ThreadSanitizer: data race"):
        execute("no barrier", sanitize="thread")


def test_a_group_that_writes_what_another_writes_is_a_race() -> None:
    with pytest.raises(simt.SimtError, match="ThreadSanitizer: data race"):
        execute("groups collide", sanitize="thread")


@pytest.mark.parametrize("sanitize", [None, "thread"], ids=str)
def test_a_vote_of_one_is_known_to_all(sanitize: str | None) -> None:
    assert (execute("vote", sanitize=sanitize)[1] == 1).all()


@pytest.mark.parametrize("sanitize", [None, "thread"], ids=str)
def test_exchange_within_a_wave(sanitize: str | None) -> None:
    x, out = execute("within a wave", sanitize=sanitize)
    assert (out == x.reshape(-1, 2)[:, ::-1].reshape(x.shape)).all()


def test_a_missing_wave_barrier_gives_wrong_results() -> None:
    for seed in range(1, 5):
        x, out = execute("no wave barrier", seed)
        assert not (out == x.reshape(-1, 2)[:, ::-1].reshape(x.shape)).all(), f"seed {seed}"


SITE = r"\(call site [+-]\d+, [+-]\d+, [+-]\d+\)"
DIVERGENCE = {
    "half a wave returns": r"work-items \d+-15 have returned, .* wait at barrier .* of a wave",
    "one wave returns": "work-items 0-31 have returned, work-items 32-63 wait at barrier",
    "two barriers": rf"wait at barrier {SITE}, work-items 32-63 wait at barrier {SITE}",
    "divergent shuffle": "work-items 0-0 have returned, work-items 1-1 wait at ds_bpermute",
    "two functions": rf"work-items 0-0 wait at (\S+) {SITE}, work-items 1-1 wait at \1 {SITE}",
    "two shuffles": r"work-items 0-0 wait at ds_bpermute .* work-items 1-1 wait at ds_bpermute",
}


@pytest.mark.parametrize("case", DIVERGENCE)
def test_divergence_is_reported(case: str) -> None:
    with pytest.raises(simt.SimtError, match=f"divergence: .*{DIVERGENCE[case]}"):
        execute(case)


def test_lds_starts_as_nan() -> None:
    _, out = execute("LDS poison")
    assert (out == 0xFFFFFFFF).all()


def test_lds_sizes_must_agree() -> None:
    with pytest.raises(simt.SimtError, match="asks for (8|256) bytes of LDS"):
        execute("LDS sizes")


@pytest.mark.parametrize("case", ["LDS overflow", "global overflow"])
def test_one_word_past_the_end_is_seen(case: str) -> None:
    with pytest.raises(simt.SimtError, match="AddressSanitizer: heap-buffer-overflow"):
        execute(case, sanitize="address,undefined")


def test_an_endless_kernel_is_stopped() -> None:
    with pytest.raises(simt.SimtError, match="not done after 1 s"):
        execute("endless", timeout_s=1.0)


def test_parameters_of_another_size_are_refused() -> None:
    arch = by_gfx("gfx1100")
    assert arch is not None
    spec = KernelSpec("rendezvous.hip", "rendezvous", (("THREADS", THREADS), ("CASE", 0)))
    program = simt.compile_shim(spec, arch, kernels_dir=simt.SIMT_DIR / "kernels")
    params = type("P", (ctypes.Structure,), {"_fields_": [("x", ctypes.c_uint64)]})()
    with pytest.raises(simt.SimtError, match="parameters have 16 bytes, 8 were given"):
        simt.run(program, params, [], 1, THREADS)


def test_a_plant_must_find_its_text() -> None:
    with pytest.raises(ValueError, match="0 times, 'no such text', not more than 0"):
        simt.planted("attention.hip", "no such text", "")


def test_an_error_of_the_source_shows_the_log() -> None:
    arch = by_gfx("gfx1100")
    assert arch is not None
    spec = KernelSpec("rendezvous.hip", "rendezvous", (("CASE", 0),))
    with pytest.raises(simt.SimtError, match="use of undeclared identifier 'THREADS'"):
        simt.compile_shim(spec, arch, kernels_dir=simt.SIMT_DIR / "kernels")
