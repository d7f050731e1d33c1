"""What the caller chooses, and what a caller may get wrong or do meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import report
from lib_rocm_sd.vae import plan, policy, program
from lib_rocm_sd.vae.plan import BandPlan
from lib_rocm_sd.vae.policy import MODES, Plans, Wish
from lib_rocm_sd.vae.program import Program
from tests.vae import vae_models
from tests.vae.vae_models import coder, error, image, needs_half, own

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_ROWS", 16)


def last(made: Program) -> BandPlan:
    assert made.last_plan is not None
    return made.last_plan


@pytest.mark.parametrize("level", ["Auto", "Performance", "Memory"])
@pytest.mark.parametrize("kind", ["ldm decoder", "ldm encoder"])
def test_modes_choose_between_whole_and_bands(kind: str, level: str) -> None:
    module, x = coder(kind).double(), image(kind, 24, 7).double()
    made, expected, session = Program(module), own(module, x), Session.of(level)
    for mode, whole in (("whole", True), ("banded", False)):
        assert error(made(x, session=session, mode=mode), expected) < 1e-12
        assert last(made).whole == whole
    peak = last(made).peak_bytes
    made(x, session=session, mode="whole", budget_bytes=1000)
    assert last(made).whole and last(made).peak_bytes > peak
    made(x, session=session)
    assert last(made).whole  # with memory enough for anything so small


def test_a_mode_that_is_none_is_a_callers_mistake() -> None:
    with pytest.raises(ValueError, match="no mode 'tiled': there are auto, whole, banded"):
        Program(coder("ldm decoder"))(image("ldm decoder"), mode="tiled")
    assert MODES == ("auto", "whole", "banded")


def test_what_is_too_low_for_bands_is_made_whole() -> None:
    module, x = coder("ldm decoder"), image("ldm decoder", 1, 9)
    made = Program(module)
    assert error(made(x, mode="banded"), own(module, x)) < 1e-5
    assert all(leg.rows is None or leg.rows >= 4 for leg in last(made).legs)


def plans() -> Plans:
    return Plans(vae_models.standard("decoder"), torch.float16, vae_models.way)


@pytest.fixture
def _real_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_ROWS", 64)


@pytest.mark.usefixtures("_real_rows")
@pytest.mark.parametrize("level", ["Auto", "Performance", "Memory"])
def test_modes_at_a_real_size(level: str) -> None:
    made, size = plans(), (1, 128, 128)
    whole = made.planner(size).whole()
    assert made.plan(size, Wish(level, "whole", 1), 1 << 20, 0)[0] == whole
    banded = made.plan(size, Wish(level, "banded"), 64 * GIB, 16 * GIB)[0]
    assert not banded.whole and banded.peak_bytes <= whole.peak_bytes // 2
    assert banded.cost <= 2.5 * whole.cost
    within = made.plan(size, Wish(level, "banded", 300 * MIB), 64 * GIB, 16 * GIB)[0]
    assert not within.whole and within.peak_bytes <= 300 * MIB


@pytest.mark.usefixtures("_real_rows")
def test_a_batch_in_modes() -> None:
    made, size = plans(), (4, 64, 64)
    together, links = made.plan(size, Wish(mode="whole"), 64 * GIB, 0)
    assert together.whole and links.batch == 4
    single, links = made.plan(size, Wish(mode="banded"), 64 * GIB, 0)
    assert not single.whole and links.batch == 1
    alone = made.plan((1, 64, 64), Wish(mode="banded"), 64 * GIB, 0)[0]
    outputs = 4 * 3 * 512 * 512 * 2
    assert single.peak_bytes == alone.peak_bytes + outputs


@pytest.mark.usefixtures("_real_rows")
def test_performance_goes_in_bands_where_torchs_convolution_does_not_fit() -> None:
    """It needs copies of its input, so more than ours does: the plan counts with what will run."""
    for chosen, is_whole in ((vae_models.way, True), (vae_models.library, False)):
        made = Plans(vae_models.standard("decoder"), torch.float16, chosen)
        found, _ = made.plan((1, 128, 128), Wish("Performance"), 950 * MIB, 0)
        assert found.whole == is_whole
        assert found.peak_bytes <= policy.FREE_SHARE * 950 * MIB


def test_a_whole_frame_that_does_not_fit_is_made_in_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = coder("ldm decoder").double(), image("ldm decoder", 40, 9).double()
    run_plan, tried = program.run_plan, list[BandPlan]()

    def short(made: Any, chosen: BandPlan, *rest: Any) -> torch.Tensor:
        tried.append(chosen)
        if chosen.whole:
            raise torch.cuda.OutOfMemoryError("HIP out of memory")
        return run_plan(made, chosen, *rest)

    monkeypatch.setattr(program, "run_plan", short)
    made = Program(module)
    assert error(made(x, mode="whole"), own(module, x)) < 1e-12
    assert tried[0].whole and not tried[-1].whole
    tried.clear()
    made(x, mode="whole")
    assert len(tried) == 1 and not tried[0].whole


def test_where_nothing_fits_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("HIP out of memory")

    monkeypatch.setattr(program, "run_plan", short)
    report.clear()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Program(coder("ldm decoder"))(image("ldm decoder", 20, 9))
    events = report.snapshot()["events"]
    assert "there is no smaller way" in events[-1] and "bands" in events[-1]


@needs_half
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["whole", "banded"])
def test_what_is_no_number_comes_out_and_is_told_once(
    dtype: torch.dtype, value: float, mode: str
) -> None:
    module, x = coder("ldm decoder").to(dtype), image("ldm decoder", 17, 6).to(dtype)
    x[0, 1, 2, 3] = value
    made = Program(module)
    report.clear()
    for _ in range(2):
        assert made(x, mode=mode).isnan().all()
    told = [event for event in report.snapshot()["events"] if "has NaN" in event]
    assert told == ["the decoder's input has NaN or infinity"]
    x[0, 1, 2, 3] = 0
    assert made(x, mode=mode).isfinite().all()


class _Meanwhile:
    """Does something to a module after the n-th band."""

    def __init__(self, module: nn.Module, at: int, do: Any) -> None:
        self.module, self.at, self.do, self.told = module, at, do, 0

    def __call__(self, done: int, total: int) -> None:
        self.told += done > 0
        if self.told == self.at:
            self.do(self.module)


def other_weights(module: nn.Module) -> None:
    """As a checkpoint is loaded: into the same tensors."""
    module.load_state_dict(vae_models.fill(coder("ldm decoder"), seed=9).state_dict())


def new_tensors(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 1.5


def another_layer(module: nn.Module) -> None:
    layer: Any = module.get_submodule("conv_out")
    module.conv_out = vae_models.fill(nn.Conv2d(layer.in_channels, 3, 3, padding=1), seed=3)
    module.conv_out.double()


@pytest.mark.parametrize("change", [other_weights, new_tensors, another_layer])
@pytest.mark.parametrize("at", [1, 3])
def test_weights_that_change_half_way_are_run_again(change: Any, at: int) -> None:
    module, x = coder("ldm decoder").double(), image("ldm decoder", 24, 6).double()
    made = Program(module)
    made(x, mode="banded")
    meanwhile = _Meanwhile(module, at, change)
    got = made(x, mode="banded", progress=meanwhile)
    assert error(got, own(module, x)) < 1e-12
    assert meanwhile.told > last(made).ticks


def test_weights_that_always_change_are_given_up() -> None:
    module, x = coder("ldm decoder").double(), image("ldm decoder", 24, 6).double()

    def always(done: int, total: int) -> None:
        new_tensors(module)

    with pytest.raises(RuntimeError, match="the decoder changes whenever it is run"):
        Program(module)(x, mode="banded", progress=always)


def test_inference_tensors_are_not_taken_for_changing() -> None:
    with torch.inference_mode():
        module, x = coder("ldm decoder").double(), image("ldm decoder", 24, 6).double()
    assert error(Program(module)(x, mode="banded"), own(module, x)) < 1e-12


@pytest.mark.parametrize("size", [(1, 1), (1, 999), (61, 83)])
@pytest.mark.parametrize("mode", ["whole", "banded"])
def test_odd_sizes_in_every_mode(size: tuple[int, int], mode: str) -> None:
    kind = "ldm decoder no-attention"
    module, x = coder(kind), image(kind, *size)
    assert error(Program(module)(x, mode=mode), own(module, x)) < 1e-5


@pytest.mark.parametrize("size", [(5, 4), (7, 1999), (121, 83)])
@pytest.mark.parametrize("mode", ["whole", "banded"])
def test_odd_sizes_of_pictures(size: tuple[int, int], mode: str) -> None:
    module = coder("ldm encoder")
    x = image("ldm encoder", 31, 500)[:, :, : size[0], : size[1]]
    assert x.shape[2:] == size and not (x.is_contiguous() and size != (5, 4))
    assert error(Program(module)(x, mode=mode), own(module, x)) < 1e-5


@pytest.mark.parametrize("mode", ["whole", "banded"])
@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_a_batch_of_strided_images(role: str, mode: str) -> None:
    module, x = coder(f"ldm {role}").double(), image(f"ldm {role}", 20, 9, batch=3).double()
    strided = x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
    assert not strided.is_contiguous()
    before = strided.clone()
    assert error(Program(module)(strided, mode=mode), own(module, x)) < 1e-12
    assert torch.equal(strided, before)
