"""The convolutions as the engine, the tests, the benchmark and the tuner see them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lib_rocm_sd.ops.base import CPU, SEED, Op, TrialInputs
from lib_rocm_sd.ops.conv import formula
from lib_rocm_sd.ops.conv import inputs as conv_inputs
from lib_rocm_sd.ops.conv import problem as problems
from lib_rocm_sd.ops.conv.inputs import ConvInputs, make_inputs
from lib_rocm_sd.ops.conv.kernel import KINDS
from lib_rocm_sd.ops.conv.layout import MOST_ROW_VALUES
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem, out_size, test_problems
from lib_rocm_sd.ops.conv.torch import LibraryConv, PlanarConv, TorchConv
from lib_rocm_sd.ops.lazily import torch

# What the first trial on a card runs beside the test problem: wider pixels, bands, far rows.


_FAR_ROWS = 34
"""Rows of 64 MiB each, enough to reach beyond 2 GiB."""


def trial_inputs(problem: ConvProblem) -> TrialInputs:
    """Trial inputs for the class of `problem`."""
    (small,) = test_problems(problem)
    p = replace(small, batch=2, height=small.height + 2, width=19)
    trials = [(f"{p}, of a wider image", partial(_wide, p))]
    if not p.in_place and not p.statistics:  # a band's statistics come in parts of its own
        one = replace(p, batch=1)
        trials.append((f"{one}, a band", partial(_band, one)))
    if p.in_channels <= 128 and not p.in_place and p.shortcut == "none":
        trials.append((f"{p}, rows beyond 2 GiB", partial(_far, p)))
    return trials


def _wide(p: ConvProblem) -> ConvInputs:
    """x, and shortcuts that are not written over, as channels of images with 16 more."""
    inputs = make_inputs(p, CPU, SEED)
    shortcut, second = (
        image if image is None else _spread(image, image.shape[3] + 16)
        for image in (inputs.shortcut, inputs.second)
    )
    inputs = inputs._replace(x=_spread(inputs.x, p.in_channels + 16), second=second)
    return inputs if p.in_place else inputs._replace(shortcut=shortcut)


def _band(p: ConvProblem) -> ConvInputs:
    """Rows from the middle of an image, those above and below them being there."""
    inputs = make_inputs(p, CPU, SEED)
    above = 0 if p.kind == "3x3 stride 2" else 1
    rows = {"upsample": 2 * (p.height - 2), "3x3 stride 2": out_size(p.kind, p.height, p.width)[0]}
    rows["3x3 stride 2 padded"] = (p.height - 1) // 2
    band = Band(above, rows.get(p.kind, p.height - 2))
    shortcut, second = (
        image if image is None else image[:, : band.rows].contiguous()
        for image in (inputs.shortcut, inputs.second)
    )
    return inputs._replace(band=band, shortcut=shortcut, second=second)


def _far(p: ConvProblem) -> ConvInputs:
    """An x whose last rows lie beyond 2 GiB, of which only its pixels are touched."""
    inputs = make_inputs(replace(p, batch=1, height=_FAR_ROWS), CPU, SEED)
    step = MOST_ROW_VALUES // inputs.x.shape[2] // 8 * 8
    return inputs._replace(x=_spread(inputs.x, step))


def _spread(image: torch.Tensor, step: int) -> torch.Tensor:
    """`image` (N, H, W, C) with `step` values from pixel to pixel."""
    batch, height, width, channels = image.shape
    pixels = batch * height * width
    whole = torch.empty((pixels - 1) * step + channels, dtype=image.dtype)
    strides = (height * width * step, width * step, step, 1)
    view = whole.as_strided(tuple(image.shape), strides)
    return view.copy_(image)


def _op(kind: str) -> Op[ConvProblem, ConvInputs]:
    return Op(
        name=f"conv {kind}",
        family="conv",
        title="Convolution",
        variants=(MatrixConv(kind), LibraryConv(kind), PlanarConv(kind), TorchConv(kind)),
        problem_of=partial(conv_inputs.problem_of, kind),
        key_of=conv_inputs.key_of,
        reference=partial(formula.reference, kind),
        make_inputs=conv_inputs.make_inputs,
        tolerance=problems.tolerance,
        output_shape=problems.output_shape,
        test_problems=problems.test_problems,
        cases=tuple(problem for _, problem in problems.usual(kind)),
        usual=problems.usual(kind),
        results=conv_inputs.empty,
        measured_as=problems.measured_as,
        trial_inputs=trial_inputs,
    )


CONVS: dict[str, Op[ConvProblem, ConvInputs]] = {kind: _op(kind) for kind in KINDS}
OPS = tuple(CONVS.values())
