"""Convolutions that read and write channels of wider images, and over their own shortcut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.functional import conv
from lib_rocm_sd.ops.conv import layout
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.conv.weights import ConvWeights
from tests import executed
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.simt.attention import UNITS
from tests.verify.simt.launch import ShimLaunch

CPU = torch.device("cpu")


def shim(test: Any) -> Any:
    """Skipped without the shim, left out while nothing changes."""
    skip = pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
    return skip(executed.known(by="shim")(test))


STRIDED = (
    ConvProblem("3x3", 2, 5, 18, 32, 32, "float16", True, "identity", 32, True),
    ConvProblem("3x3", 1, 9, 17, 32, 48, "bfloat16", False, "conv", 32),
    ConvProblem("3x3", 1, 5, 7, 32, 3, "float16", True),
    ConvProblem("3x3 stride 2", 1, 9, 20, 32, 32),
    ConvProblem("upsample", 1, 5, 17, 32, 32, statistics=True),
)
IN_PLACE = (
    ConvProblem("3x3", 2, 5, 18, 32, 48, "float16", True, "identity", 48, True, True),
    ConvProblem("3x3", 1, 9, 33, 32, 128, "float16", False, "identity", 128, False, True),
    ConvProblem("3x3", 1, 5, 18, 32, 64, "float16", True, "conv", 96, True, True),
    ConvProblem("3x3", 1, 5, 18, 32, 144, "float16", False, "conv", 32, False, True),
)


def spread(image: torch.Tensor, stride: int, first: int = 8) -> torch.Tensor:
    """`image` as channels `first` on of one with `stride` channels, NaN all around."""
    wide = image.new_full((*image.shape[:3], stride), math.nan)
    wide[..., first : first + image.shape[3]] = image
    return wide[..., first : first + image.shape[3]]


def run(problem: ConvProblem, gfx: str, inputs: ConvInputs, sanitize: str | None = None) -> Any:
    arch = by_gfx(gfx)
    assert arch is not None
    variant, weights = MatrixConv(problem.kind), inputs.weights
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    launch = ShimLaunch(arch, 1, sanitize)
    with launch.knows(*tensors, weights.weight, weights.bias):
        return compute(
            CONVS[problem.kind], variant, launch, variant.configs(arch, problem)[0], inputs
        )


def inputs_of(problem: ConvProblem, strided: bool = False) -> ConvInputs:
    inputs = CONVS[problem.kind].make_inputs(problem, CPU, 5)
    if not strided:
        return inputs
    x, shortcut = inputs.x, inputs.shortcut
    return inputs._replace(
        x=spread(x, x.shape[3] + 24),
        shortcut=None if shortcut is None else spread(shortcut, shortcut.shape[3] + 16),
    )


def check_strided(problem: ConvProblem, gfx: str, sanitize: str | None = None) -> None:
    """To the bit what the same convolution gives of dense images; beside it nothing is written."""
    dense, norm = run(problem, gfx, inputs_of(problem))
    wide = torch.full((*dense.shape[:3], dense.shape[3] + 32), 7.0, dtype=dense.dtype)
    out = wide[..., 16 : 16 + dense.shape[3]]
    y, again = run(problem, gfx, inputs_of(problem, strided=True)._replace(out=out), sanitize)
    assert y.data_ptr() == out.data_ptr() and torch.equal(out, dense)
    assert (wide[..., :16] == 7.0).all() and (wide[..., 16 + dense.shape[3] :] == 7.0).all()
    assert norm is None or torch.equal(norm, again)


@shim
@pytest.mark.parametrize("problem", STRIDED, ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_channels_of_wider_images(gfx: str, problem: ConvProblem) -> None:
    check_strided(problem, gfx)


@shim
def test_channels_of_wider_images_without_access_outside() -> None:
    check_strided(STRIDED[0], "gfx1100", "address,undefined")


@shim
@pytest.mark.parametrize("problem", IN_PLACE, ids=str)
@pytest.mark.parametrize("gfx", UNITS)
def test_over_the_shortcut(gfx: str, problem: ConvProblem) -> None:
    expected, norm = run(problem, gfx, inputs_of(problem)._replace(out=None))
    inputs = inputs_of(problem)
    y, again = run(problem, gfx, inputs)
    assert (
        inputs.out is not None
        and y.data_ptr() == inputs.out.data_ptr()
        and torch.equal(y, expected)
    )
    assert norm is None or torch.allclose(norm, again, rtol=1e-5, atol=1e-5)


@shim
@pytest.mark.parametrize("problem", IN_PLACE[1:3], ids=str)
def test_over_the_shortcut_without_races(problem: ConvProblem) -> None:
    run(problem, "gfx1200", inputs_of(problem), "thread")


def test_in_place_one_work_group_makes_all_channels() -> None:
    problem = ConvProblem("3x3", 1, 64, 64, 128, 256, "float16", True, "conv", 512, True, True)
    for gfx in UNITS:
        arch = by_gfx(gfx)
        assert arch is not None
        variant = MatrixConv("3x3")
        assert not variant.refusals(arch, problem)
        assert all(c.block_co >= 256 for c in variant.configs(arch, problem))
        too_many = replace(problem, out_channels=2048)
        assert any("in place" in reason for reason in variant.refusals(arch, too_many))


def plain(channels: int = 16) -> tuple[torch.Tensor, ConvWeights]:
    return torch.randn(1, 4, 5, channels), ConvWeights(torch.randn(16, channels, 3, 3))


def test_torchs_own_writes_to_out() -> None:
    x, weights = plain()
    expected, _ = conv("3x3", x, weights, shortcut=x.clone())
    wide = torch.randn(1, 4, 5, 40)
    wide[..., 8:24] = x
    place = wide[..., 8:24]
    y, _ = conv("3x3", x, weights, shortcut=place, out=place)
    assert y.data_ptr() == place.data_ptr() and torch.allclose(place, expected)


def test_an_unusable_out_is_refused_with_its_layout() -> None:
    x, weights = plain()
    shortcut = torch.randn(1, 4, 5, 24)
    wide = torch.empty(1, 4, 5, 36)
    for out, words in (
        (torch.empty(1, 4, 5, 8), "must be"),
        (torch.empty(1, 4, 5, 16, dtype=torch.float64), "must be"),
        (torch.empty(1, 4, 5, 16).transpose(1, 2).contiguous().transpose(1, 2), "dense"),
        (wide[..., :16], "dense"),
        (x, "overlaps x"),
        (shortcut[..., 8:], "overlaps the shortcut"),
    ):
        with pytest.raises(ValueError, match=words):
            conv("3x3", x, weights, shortcut=shortcut[..., :16], out=out)


def test_an_embedding_that_does_not_fit_is_refused_with_its_shape() -> None:
    x, weights = plain()
    for embedding, words in (
        (torch.randn(2, 16), r"embedding must be \(N, Co\): .*, embedding \(2, 16\)"),
        (torch.randn(16), r"embedding must be \(N, Co\): .*, embedding \(16,\)"),
        (torch.randn(1, 16).double(), "or float32"),
    ):
        with pytest.raises(ValueError, match=words):
            conv("3x3", x, weights, embedding=embedding)
    y, _ = conv("3x3", x, weights, embedding=torch.ones(1, 16))
    assert torch.allclose(y, conv("3x3", x, weights)[0] + 1, atol=1e-5)


def test_what_is_dense() -> None:
    wide = torch.empty(2, 3, 4, 48, dtype=torch.float16)
    assert layout.pixel_stride(wide) == 48
    assert layout.pixel_stride(wide[..., 8:24]) == 48
    assert layout.pixel_stride(wide[..., 4:20]) is None  # begins between multiples of 16 bytes
    assert layout.pixel_stride(wide[:, :2]) is None and layout.pixel_stride(wide[:1, :2]) == 48
    assert layout.pixel_stride(wide[:, :, :2]) is None
    assert layout.pixel_stride(torch.empty(1, 1, 1, 12)) == 16
    assert layout.pixel_stride(torch.empty(1, 1, 3, 12)) is None
    assert layout.pixel_stride(wide[:, :1, :1, :16]) == 3 * 4 * 48
    assert layout.pixel_stride(wide.transpose(2, 3)) is None
    assert layout.pixel_stride(torch.empty(1, 1 << 14, 1).expand(1, 1 << 14, 1 << 14)[None]) is None


def test_what_overlaps() -> None:
    wide = torch.empty(1, 3, 4, 48, dtype=torch.float16)
    assert not layout.overlap(wide[..., :16], wide[..., 16:])
    assert layout.overlap(wide[..., :24], wide[..., 16:])
    assert layout.overlap(wide[:, :2], wide[:, 1:])
    assert not layout.overlap(wide[:, :1], wide[:, 1:])
    assert not layout.overlap(wide[:, 1:, :, :16], wide[..., 16:])
    assert layout.overlap(wide[:, 1:, :, :16], wide[..., 8:])
    assert not layout.overlap(wide, wide.clone())
