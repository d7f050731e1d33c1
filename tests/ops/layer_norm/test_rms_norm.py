"""RMSNorm of pixels on the CPU: as a host computes it, and what our kernel refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows

from lib_rocm_sd import arch, functional
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops.layer_norm import rms
from lib_rocm_sd.ops.layer_norm.op import RMS_NORM
from lib_rocm_sd.ops.layer_norm.rms import RmsInputs, RmsProblem
from tests.ops.layer_norm.judge import draw

ROW = arch.table()["gfx1100"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("problem", rms.ODD, ids=str)
def test_it_is_right_on_the_cpu(
    problem: RmsProblem, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of a few rows, too."""
    monkeypatch.setattr(rms, "CHUNK_BYTES", 999)
    problem = replace(problem, dtype=dtype)
    inputs = draw(problem)
    assert RMS_NORM.problem_of(inputs) == problem
    made = functional.rms_norm(inputs.x, inputs.gamma, inputs.eps, inputs.silu)
    assert (made.dtype, made.shape, made.is_contiguous()) == (inputs.x.dtype, inputs.x.shape, True)
    assert relative_error(made, RMS_NORM.reference(inputs)) <= RMS_NORM.tolerance(problem)


def test_the_reference_is_the_hosts_formula() -> None:
    """Of a length, which is 1e-12 at least."""
    inputs = draw(RmsProblem((5, 7, 96), "float64", affine="float64", silu=True))
    inputs.x[0] *= 1e-14
    inputs.x[1, 2] = 0
    theirs = F.silu(F.normalize(inputs.x, dim=-1) * 96**0.5 * inputs.gamma)
    assert relative_error(RMS_NORM.reference(inputs), theirs) < 1e-14
    assert 1e-6 < theirs[0].abs().max() < 1


def test_what_the_kernel_does_not_hold_is_torchs() -> None:
    ours, torchs = RMS_NORM.variants
    for channels, refused in ((96, False), (12288, False), (7, True), (12296, True)):
        reasons = ours.refusals(ROW, RmsProblem((3, channels)))
        assert reasons == [f"rows of {channels}, which no work-group holds"] * refused
        assert torchs.refusals(ROW, RmsProblem((3, channels))) == []
    assert ours.refusals(ROW, RmsProblem((3, 96), "float32")) != []


@pytest.mark.parametrize("changed", [{"gamma": torch.ones(7)}, {"x": torch.ones(8).int()}])
def test_a_callers_mistake_is_told_with_the_shapes(changed: dict[str, Any]) -> None:
    inputs = RmsInputs(torch.ones(3, 8), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"x \(.*gamma \("):
        RMS_NORM.problem_of(inputs._replace(**changed))


def test_without_elements() -> None:
    for shape in ((0, 8), (2, 0), (3, 0, 8)):
        x = torch.ones(shape).half()
        assert functional.rms_norm(x, torch.ones(shape[-1]), 1e-6, True).shape == shape
