"""What is done around torch's convolution, executed on the CPU as each matrix unit's GPU would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.conv import formula
from lib_rocm_sd.ops.conv import torch as search
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import Band, ConvProblem
from lib_rocm_sd.ops.conv.torch import LibraryConv, PlanarConv, TorchConv
from tests import executed
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    executed.known(by="shim"),
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 3),
        reason="this torch has no convolution of halves on the CPU",
    ),
]

CASES = (
    ConvProblem("3x3", 2, 9, 19, 16, 24),
    ConvProblem("3x3", 1, 9, 17, 32, 64, "bfloat16", True, "identity", 64, True),
    ConvProblem("3x3", 2, 5, 18, 64, 32, "float16", True, "conv", 48, True),
    ConvProblem("3x3", 2, 5, 18, 32, 32, "float16", True, "none", 0, True, embedding=True),
    ConvProblem("3x3 stride 2", 2, 9, 20, 32, 32, "bfloat16", statistics=True),
    ConvProblem("3x3 stride 2 padded", 2, 9, 20, 32, 32, "bfloat16", statistics=True),
    ConvProblem("upsample", 2, 5, 17, 32, 32, "float16", statistics=True),
    ConvProblem("3x3", 2, 5, 18, 64, 32, "float16", True, "conv", 48, True, in_rows=True),
    ConvProblem("3x3", 2, 5, 18, 4, 32, in_rows=True),
    ConvProblem("3x3", 1, 5, 18, 32, 32, norm=True, embedding=True, in_rows=True),
    ConvProblem("3x3 stride 2 padded", 2, 9, 20, 32, 32, "bfloat16", in_rows=True),
    ConvProblem("upsample", 2, 5, 17, 32, 32, "float16", in_rows=True),
    ConvProblem("upsample", 1, 5, 17, 32, 32, "float16", statistics=True, in_rows=True),
)


def run_shim(
    problem: ConvProblem,
    inputs: ConvInputs,
    sanitize: str | None = None,
    library: type[LibraryConv] = LibraryConv,
) -> Any:
    arch = by_gfx("gfx1100")
    assert arch is not None
    variant = library(problem.kind)
    launch = ShimLaunch(arch, 1, sanitize)
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    weights = inputs.weights
    with launch.knows(*tensors, weights.weight, weights.bias_on(torch.device("cpu"))):
        return compute(
            CONVS[problem.kind], variant, launch, variant.configs(arch, problem)[0], inputs
        )


def inputs_of(problem: ConvProblem) -> ConvInputs:
    return CONVS[problem.kind].make_inputs(problem, torch.device("cpu"), 5)


def as_on_a_gpu(problem: ConvProblem, inputs: ConvInputs) -> torch.Tensor:
    """torch's own way on a GPU: bias and shortcut are added to what was rounded to half before."""
    x, weights, norm, shortcut = inputs[:4]
    weight, bias, shortcut_weight = weights.plain(x)
    if norm is not None:
        scale, offset = norm[:, None, None].unbind(-1)
        x = torch.nn.functional.silu(x.float() * scale + offset).to(x.dtype)
    y = formula.convolve_plain(problem.kind, x.permute(0, 3, 1, 2), weight) + bias
    if inputs.embedding is not None:
        y = y + inputs.embedding[:, None, None]
    if shortcut is None:
        return y
    return y + (shortcut if shortcut_weight is None else shortcut @ shortcut_weight.T)


def check(problem: ConvProblem, **how: Any) -> None:
    """As near to float64 as torch's own operators, or twice as far."""
    inputs = inputs_of(problem)
    exact, exact_norm = CONVS[problem.kind].reference(inputs)
    output, norm = run_shim(problem, inputs, **how)

    def error(y: torch.Tensor) -> float:
        return (y.double() - exact).abs().max().item()

    assert error(output) <= 2 * error(as_on_a_gpu(problem, inputs))
    if problem.statistics:
        assert (norm - exact_norm).abs().max() <= 2e-3 * exact_norm.abs().max()


@pytest.mark.parametrize("problem", CASES, ids=str)
def test_the_passes_around_a_convolution_are_right(problem: ConvProblem) -> None:
    check(problem)


@pytest.mark.parametrize("problem", [each for each in CASES if each.in_rows], ids=str)
def test_so_they_are_around_one_of_planes(problem: ConvProblem) -> None:
    check(problem, library=PlanarConv)


def test_planes_are_for_a_unets_weights() -> None:
    (why,) = PlanarConv("3x3").refusals(by_gfx("gfx1100"), CASES[0])
    assert "as they lie" in why


def test_no_access_outside_of_any_buffer() -> None:
    check(CASES[2], sanitize="address,undefined")


def test_no_races() -> None:
    check(CASES[1], sanitize="thread")


def test_bands_have_the_statistics_of_the_image_to_the_bit() -> None:
    problem = replace(CASES[1], height=40)
    inputs = inputs_of(problem)
    shortcut = inputs.shortcut
    assert shortcut is not None
    whole, _ = run_shim(problem, inputs)
    parts = []
    for first, last in ((0, 16), (16, 32), (32, 40)):
        above = 1 if first else 0
        part = inputs._replace(
            x=inputs.x[:, first - above : last + 1],
            shortcut=shortcut[:, first:last],
            band=Band(above, last - first),
        )
        rows, statistics = run_shim(problem, part)
        parts.append(statistics)
        assert statistics.shape == (1, 1, last - first, 64, 4)
        assert torch.equal(rows, whole[:, first:last])
    counted = torch.cat(parts, 2)[..., 2]
    assert (counted == problem.width).all()


@pytest.mark.parametrize("kind", list(CONVS))
def test_too_large_a_value_sets_the_overflow_flag(kind: str) -> None:
    problem = ConvProblem(kind, 1, 4, 4, 16, 16)
    for factor, flag in ((1.0, 0), (4e4, 1)):
        inputs = inputs_of(problem)
        overflow = torch.zeros(1, dtype=torch.int32)
        run_shim(problem, inputs._replace(x=inputs.x * factor, overflow=overflow))
        assert overflow.item() == flag


def test_miopen_is_never_made_to_search(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, arch = CASES[0], by_gfx("gfx1100")
    assert LibraryConv("3x3").refusals(arch, problem) == []
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(search, "_miopen", lambda: None)
    assert "searching" in LibraryConv("3x3").refusals(arch, problem)[0]
    assert TorchConv.last_resort


def test_no_search_puts_the_flags_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with search.no_search():
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark


def test_threads_that_want_no_search_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that ends first leaves the other without a search, and the last puts it back."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    first, second = search.no_search(), search.no_search()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.cudnn.benchmark
    second.__exit__(None, None, None)
    assert torch.backends.cudnn.benchmark
