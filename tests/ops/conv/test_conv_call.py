"""A bound convolution gives the kernels what an unbound one does; who is preferred where."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import table
from lib_rocm_sd.ops.base import Call, KernelSpec, Launch
from lib_rocm_sd.ops.conv import formula
from lib_rocm_sd.ops.conv import torch as library
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.kernel import ConvConfig, ConvParams, ConvSumParams
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem
from lib_rocm_sd.ops.conv.torch import LibraryConv
from tests import executed
from tests.ops.launches import Launches, shifted
from tests.ops.running import bind, compute
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

CPU = torch.device("cpu")
PLAIN = ConvProblem("3x3", 2, 6, 18, 64, 32, norm=True, in_rows=True)
PROBLEMS = (
    PLAIN,
    replace(PLAIN, statistics=True, embedding=True, dtype="bfloat16"),
    replace(PLAIN, shortcut="conv", shortcut_channels=48),
    replace(PLAIN, shortcut="identity", shortcut_channels=32),
    replace(PLAIN, in_channels=192, statistics=True, shortcut="identity", shortcut_channels=32),
    replace(PLAIN, in_channels=192, shortcut="conv", shortcut_channels=64, embedding=True),
    replace(PLAIN, kind="upsample", norm=False),
    replace(PLAIN, kind="3x3 stride 2 padded", norm=False, out_channels=20),
)
MADE = {"out", "statistics", "sums", "bias"}
"""Where tensors lie that a call makes: an embedding is added to the bias."""


def config(problem: ConvProblem) -> ConvConfig:
    return MatrixConv(problem.kind).configs(table()["gfx1100"], problem)[0]


def drawn(problem: ConvProblem, seed: int = 0) -> ConvInputs:
    """What makes the next norm launches nothing."""
    made = CONVS[problem.kind].make_inputs(problem, CPU, seed)
    overflow = torch.zeros(1, dtype=torch.int32)
    return made._replace(finish=lambda statistics, *_: statistics, overflow=overflow)


def read(entry: str, params: bytes) -> dict[str, Any]:
    kind: type[ctypes.Structure] = ConvSumParams if entry == "conv_sum" else ConvParams
    got = kind.from_buffer_copy(params)
    values = {name: getattr(got, name) for name, *_ in kind._fields_}  # type: ignore[misc]
    return {name: bool(value) if name in MADE else value for name, value in values.items()}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_bound_call_launches_what_an_unbound_one_does(problem: ConvProblem) -> None:
    op, variant, launch = CONVS[problem.kind], MatrixConv(problem.kind), Launches()
    chosen = config(problem)
    assert (chosen.splits > 1) == (problem.in_channels > 64)
    bound = bind(op, variant, launch, chosen, drawn(problem))
    for seed in (0, 1):
        inputs = drawn(problem, seed)
        launch.seen.clear()
        results = [bound(inputs), compute(op, variant, launch, chosen, inputs)]
        half = len(launch.seen) // 2
        assert half == (2 if chosen.splits > 1 else 1)
        for one, other in zip(launch.seen[:half], launch.seen[half:], strict=True):
            assert one[:3] == other[:3] and one[4] == other[4]
            assert read(one[0].entry, one[3]) == read(other[0].entry, other[3])
        for mine, theirs in zip(*results, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    assert launch.prepared == half


def test_images_that_lie_otherwise_are_run() -> None:
    """Among channels of a wider one, or not at a multiple of 16 bytes."""
    problem, launch = PROBLEMS[3], Launches()
    inputs = drawn(problem)
    bound = bind(CONVS["3x3"], MatrixConv("3x3"), launch, config(problem), inputs)
    wide = torch.zeros(2, 6, 18, 128, dtype=inputs.x.dtype)
    assert inputs.shortcut is not None
    bound(inputs._replace(x=wide[..., 64:].copy_(inputs.x)))
    got = ConvParams.from_buffer_copy(launch.seen[-1][3])
    assert got.in_stride == 128 and launch.prepared == 0
    bound(inputs._replace(shortcut=shifted(inputs.shortcut)))
    got = ConvParams.from_buffer_copy(launch.seen[-1][3])
    assert got.shortcut % 16 == 0 and launch.prepared == 0
    bound(inputs)
    assert launch.prepared == 1


def test_packed_weights_bands_and_other_launchers_are_run() -> None:
    variant, launch = MatrixConv("3x3"), Launches()
    plain: Launch = lambda *words: None  # noqa: E731
    band = Band(1, 3)
    for problem, how, given in (
        (replace(PLAIN, in_rows=False), launch, {}),
        (PLAIN, launch, {"band": band}),
        (PLAIN, plain, {}),
    ):
        inputs = drawn(problem)._replace(**given)  # type: ignore[arg-type]
        assert variant.bound(Call(problem, inputs, how, config(problem))) == variant.run
        library = LibraryConv("3x3")
        passes = library.configs(table()["gfx1100"], problem)[0]
        assert library.bound(Call(problem, inputs, how, passes)) == library.run


class Preparing(ShimLaunch):
    """A shim that can prepare a launch."""

    def prepare(
        self, spec: KernelSpec, grid: int, block: int, params: ctypes.Structure, device: Any
    ) -> Callable[[], None]:
        return lambda: self(spec, grid, block, params, device)


@executed.known(by="shim")
@pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("kind", [MatrixConv, LibraryConv])
def test_a_bound_call_gives_the_same_bits(kind: Any, problem: ConvProblem) -> None:
    """So does one of another bias, shortcut and image."""
    if kind is LibraryConv and problem.out_channels % 8:
        problem = replace(problem, out_channels=24)
    op, variant, arch = CONVS[problem.kind], kind(problem.kind), table()["gfx1100"]
    chosen, launch = variant.configs(arch, problem)[0], Preparing(arch)
    inputs = [replace_finish(op.make_inputs(problem, CPU, seed)) for seed in (0, 1)]
    given = [item for each in inputs for item in (*each, each.weights.weight)]
    with launch.knows(*(item for item in given if isinstance(item, torch.Tensor))):
        call = bind(op, variant, launch, chosen, inputs[0])
        for each in inputs:
            y, norm = call(each)
            expected, exact = compute(op, variant, launch, chosen, each)
            assert torch.equal(y, expected)
            assert norm is exact is None or torch.equal(norm, exact)


def replace_finish(inputs: ConvInputs) -> ConvInputs:
    return inputs._replace(finish=lambda statistics, *_: statistics)


def test_the_library_comes_first_where_it_is_fast_with_channels_last_halves() -> None:
    """CDNA and NVIDIA; of packed weights ours does everywhere."""
    for gfx, arch in table().items():
        ours, library = MatrixConv("3x3"), LibraryConv("3x3")
        first = ours.preference_for(arch, PLAIN) > library.preference_for(arch, PLAIN)
        assert first == arch.family.startswith("RDNA"), gfx
        packed = replace(PLAIN, in_rows=False)
        assert ours.preference_for(arch, packed) > library.preference_for(arch, packed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"in_channels": 4}, "4 input channels"),
        ({"in_channels": 40}, "40 input channels"),
        ({"dtype": "float32"}, "fp16 and bf16"),
        ({"out_channels": 1 << 17, "in_channels": 1280}, "a weight of"),
        ({"kind": "upsample"}, "neither norm nor shortcut"),
        ({"shortcut": "conv", "shortcut_channels": 40}, "no whole tiles"),
        ({"shortcut": "conv", "shortcut_channels": 32, "in_place": True}, "is written"),
    ],
)
def test_what_it_cannot_read_is_refused(change: dict[str, Any], reason: str) -> None:
    problem = replace(PLAIN, **change)
    found = MatrixConv(problem.kind).refusals(table()["gfx1100"], problem)
    assert any(reason in each for each in found), found
    assert not MatrixConv("3x3").refusals(table()["gfx1100"], PLAIN)


@pytest.mark.parametrize(
    "shape", [(2, 8, 3, 5), (1, 4, 1, 1), (2, 6, 4, 3), (1, 320, 8, 7)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_image_is_enlarged_as_torch_does_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whole pixels are copied eight bytes at a time where they are so many and lie so."""
    drawn = torch.randn(shape).to(dtype)
    flat = torch.empty(drawn.numel() + 1, dtype=dtype)
    batch, channels, height, width = shape
    images = {
        "dense": drawn.contiguous(memory_format=torch.channels_last),
        "planes": drawn,
        "misaligned": flat[1:]
        .view(batch, height, width, channels)
        .permute(0, 3, 1, 2)
        .copy_(drawn),
        "some channels": drawn.to(memory_format=torch.channels_last)[:, : channels // 2],
    }
    for name, image in images.items():
        made, expected = library.enlarged(image), formula.enlarged(image)
        assert torch.equal(made, expected), name
    dense = library.enlarged(images["dense"])
    assert dense.is_contiguous(memory_format=torch.channels_last)
