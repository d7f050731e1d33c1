"""Bands: equal to the whole frame, within the memory that was predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.read.vae import read
from lib_rocm_sd.report import report
from lib_rocm_sd.vae import attention, bands, plan, program, store
from lib_rocm_sd.vae.plan import BandPlan, Leg
from lib_rocm_sd.vae.program import Program
from tests.peak import Peak
from tests.vae import vae_models
from tests.vae.vae_models import (
    coder,
    error,
    fixed,
    image,
    legs_of,
    needs_half,
    own,
    planner_of,
)

HOST = 1 << 40


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands, chunks and blocks small enough for small images to have many."""
    monkeypatch.setattr(plan, "MIN_ROWS", 8)
    monkeypatch.setattr(attention, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(store, "HOST_BLOCK_BYTES", 1 << 14)


def run(module: nn.Module, x: torch.Tensor, chosen: BandPlan, **options: Any) -> torch.Tensor:
    return fixed(module, chosen)(x, **options)


@pytest.mark.parametrize("kind", vae_models.KINDS)
def test_every_plan_gives_the_whole_frames_result(kind: str) -> None:
    module = coder(kind).double()
    x = image(kind, 23, 7).double()
    expected = own(module, x)
    planner = planner_of(module, x)
    whole = planner.whole()
    plans = {}
    for divisor in (1.05, 1.5, 3, 6):
        for host in (0, HOST):
            found = planner.cheapest(int(whole.peak_bytes / divisor), host)
            if found is not None:
                assert found.peak_bytes <= whole.peak_bytes / divisor
                plans[found.legs] = found
    plans[()] = planner.smallest(0)
    assert sum(not found.whole for found in plans.values()) >= 2
    for found in plans.values():
        assert error(run(module, x, found), expected) < 1e-12, found.legs


@pytest.mark.parametrize("hidden", [None, "device", "host"])
@pytest.mark.parametrize("keep", ["device", "host"])
def test_any_height_anywhere(keep: str, hidden: str | None) -> None:
    module = coder("ldm decoder").double()
    x = image("ldm decoder", 21, 5).double()
    expected = own(module, x)
    for rows in (16, 40, 84):
        assert error(run(module, x, legs_of(module, rows, keep, hidden)), expected) < 1e-12


def test_one_leg_makes_everything_again_and_again() -> None:
    module = coder("ldm decoder no-attention").double()
    x = image("ldm decoder", 9, 5).double()
    only = BandPlan((Leg(0, len(read(module).steps), 12, "output"),), 0, 0, 0.0, 1)
    assert error(run(module, x, only), own(module, x)) < 1e-12


@needs_half
@pytest.mark.parametrize("kind", ["ldm decoder", "ldm encoder", "diffusers decoder"])
def test_half_in_bands_is_half_whole_to_the_bit(kind: str) -> None:
    """Each value is computed from the same numbers in the same order."""
    module = coder(kind).half()
    x = image(kind, 39, 9).half()
    planner = planner_of(module, x)
    whole = Program(module)(x)
    for divisor, host in ((1.5, 0), (2.5, 0), (3, HOST)):
        banded = planner.cheapest(int(planner.whole().peak_bytes / divisor), host)
        assert banded is not None and not banded.whole
        assert torch.equal(run(module, x, banded), whole)


def test_a_batch_goes_image_by_image() -> None:
    module = coder("ldm decoder").double()
    x = image("ldm decoder", 13, 5, batch=3).double()
    done: list[tuple[int, int]] = []
    chosen = legs_of(module, 8, "device", None)
    got = run(module, x, chosen, progress=lambda *at: done.append(at))
    assert error(got, own(module, x)) < 1e-12


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4),
    reason="an older torch's convolutions hold more on the CPU",
)
@pytest.mark.parametrize("kind", ["ldm decoder", "ldm encoder"])
def test_no_plan_takes_more_than_it_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with torch's convolutions, whose temporary images are part of the prediction."""
    monkeypatch.setattr(attention, "CHUNK_BYTES", 1 << 16)
    module = coder(kind)
    x = image(kind, 40, 24)
    planner = planner_of(module, x)
    whole = planner.whole()
    chosen = [whole, planner.smallest(0)]
    for divisor in (1.3, 3):
        found = planner.cheapest(int(whole.peak_bytes / divisor), HOST)
        chosen += [found] if found is not None else []
    assert len(chosen) == 4
    for found in chosen:
        made = fixed(module, found)
        made(x)  # weights prepared, ops verified
        with Peak() as measured:
            made(x)
        assert 0.3 * found.peak_bytes < measured.peak - found.host_bytes
        assert measured.peak - found.host_bytes <= 1.05 * found.peak_bytes, found


def test_progress_rises_to_its_total() -> None:
    module = coder("ldm decoder")
    x = image("ldm decoder", 40, 12, batch=2)
    planner = planner_of(module, x[:1])
    chosen = planner.cheapest(planner.whole().peak_bytes // 3, 0)
    assert chosen is not None
    told: list[tuple[int, int]] = []
    run(module, x, chosen, progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total in told} == {len(told)} and len(told) == 2 * chosen.ticks


def test_interrupt_is_heard_between_bands() -> None:
    module = coder("ldm decoder")
    x = image("ldm decoder", 13, 5)
    told: list[int] = []
    with pytest.raises(bands.Interrupted):
        run(
            module,
            x,
            legs_of(module, 8, "device", None),
            progress=lambda done, total: told.append(done),
            interrupt=lambda: len(told) == 4,
        )
    assert told == [1, 2, 3, 4]
    assert error(Program(module)(x), own(module, x)) < 1e-5


class _Short:
    """A device whose memory ends at `limit_bytes`, though it says otherwise."""

    def __init__(self, limit_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[BandPlan] = []
        self.limit_bytes = limit_bytes
        run_plan = program.run_plan

        def short(made: Any, chosen: BandPlan, *rest: Any) -> torch.Tensor:
            self.tried.append(chosen)
            if chosen.peak_bytes > self.limit_bytes:
                raise torch.cuda.OutOfMemoryError("HIP out of memory")
            return run_plan(made, chosen, *rest)

        monkeypatch.setattr(program, "run_plan", short)


@pytest.mark.parametrize("level", ["Auto", "Performance"])
def test_out_of_memory_halves_the_budget(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = coder("ldm decoder").double()
    x = image("ldm decoder", 60, 12).double()
    whole = planner_of(module, x).whole().peak_bytes
    short = _Short(whole // 3, monkeypatch)
    made = Program(module)
    session = Session.of(level)
    assert error(made(x, session=session), own(module, x)) < 1e-12
    peaks = [chosen.peak_bytes for chosen in short.tried]
    assert short.tried[0].whole and not short.tried[-1].whole and len(peaks) == 3
    assert peaks[1] <= peaks[0] // 2 and peaks[2] <= peaks[0] // 4
    made(x, session=session)
    assert len(short.tried) == 4 and short.tried[3] is short.tried[2]
    assert any("out of memory (whole frame" in told for told in report.snapshot()["events"])


class _Decodes:
    """Of one image, on a device whose memory is too short for the whole frame, once or for long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._module = coder("ldm decoder")
        self._image = image("ldm decoder", 60, 12)
        self._made = Program(self._module)
        self.whole_bytes = planner_of(self._module, self._image).whole().peak_bytes
        self.short = _Short(self.whole_bytes * 2 // 3, monkeypatch)
        self.free_bytes = 4 * self.whole_bytes
        monkeypatch.setattr(program, "free_bytes", lambda *_: self.free_bytes)

    def tried(self, runs: int) -> list[list[bool]]:
        """By run: of each plan that it tried, whether that was the whole frame."""
        found = []
        for _ in range(runs):
            self.short.tried.clear()
            self._made(self._image)
            found.append([chosen.whole for chosen in self.short.tried])
        return found


FAILED, BANDS, WHOLE = [True, False], [False], [True]


def test_after_out_of_memory_the_whole_frame_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report.clear()
    decodes = _Decodes(monkeypatch)
    assert decodes.tried(2) == [FAILED, BANDS]
    decodes.short.limit_bytes = decodes.whole_bytes
    assert decodes.tried(5) == 3 * [BANDS] + 2 * [WHOLE]
    decodes.short.limit_bytes -= 1
    assert decodes.tried(6) == [FAILED] + 4 * [BANDS] + [FAILED]
    assert any("for 4 runs or until clearly more" in told for told in report.snapshot()["events"])


def test_a_whole_frame_that_never_fits_is_tried_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = [run for run, tried in enumerate(_Decodes(monkeypatch).tried(63)) if tried == FAILED]
    assert failed == [0, 5, 14, 31]


def test_where_clearly_more_memory_is_free_the_whole_frame_is_tried_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decodes = _Decodes(monkeypatch)
    assert decodes.tried(1) == [FAILED]
    decodes.free_bytes = decodes.free_bytes * 6 // 5
    assert decodes.tried(1) == [BANDS]
    decodes.free_bytes *= 2
    assert decodes.tried(9) == [FAILED] + 8 * [BANDS]
    decodes.free_bytes *= 2
    decodes.short.limit_bytes = decodes.whole_bytes
    assert decodes.tried(2) == [WHOLE, WHOLE]


def test_memory_that_is_taken_by_others_only_amid_a_decode_is_tried_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decodes = _Decodes(monkeypatch)
    before, at_failure = decodes.free_bytes, decodes.free_bytes // 2
    run_plan = program.run_plan

    def taken(made: Any, chosen: BandPlan, *rest: Any) -> torch.Tensor:
        decodes.free_bytes = at_failure if chosen.whole else before
        return run_plan(made, chosen, *rest)

    monkeypatch.setattr(program, "run_plan", taken)
    assert decodes.tried(10) == 2 * [FAILED] + 8 * [BANDS]


def test_out_of_memory_is_raised_where_the_smallest_bands_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = _Short(0, monkeypatch)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="HIP out of memory"):
        Program(coder("ldm decoder"))(image("ldm decoder", 23, 7))
    peaks = [chosen.peak_bytes for chosen in short.tried]
    assert len(peaks) > 2 and peaks == sorted(peaks, reverse=True)


def test_other_errors_are_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("HIP error: illegal address")

    monkeypatch.setattr(program, "run_plan", broken)
    with pytest.raises(RuntimeError, match="illegal address"):
        Program(coder("ldm decoder"))(image("ldm decoder"))


@needs_half
def test_never_black_in_bands() -> None:
    module = coder("ldm decoder")
    for name, parameter in module.named_parameters():
        if name.endswith("conv2.weight"):
            parameter.data.mul_(8e4)
    module.half()
    x = image("ldm decoder", 13, 9).half()
    exact = own(module.double(), x.double())
    module.half()
    made = fixed(module, legs_of(module, 8, "device", None))
    got = made(x)
    assert made.scales.stream < 1
    assert error(got, exact) < 5e-3


@needs_half
def test_nan_goes_through_bands() -> None:
    module = coder("ldm decoder").half()
    x = image("ldm decoder", 13, 9).half()
    x[0, 0, 0, 0] = float("nan")
    assert run(module, x, legs_of(module, 8, "host", "host")).isnan().all()


def test_the_callers_budget_is_kept_to() -> None:
    module = coder("ldm decoder").double()
    x = image("ldm decoder", 40, 24).double()
    made = Program(module)
    expected = made(x)
    assert made.last_plan is not None and made.last_plan.whole
    budget = made.last_plan.peak_bytes // 3
    assert error(made(x, budget_bytes=budget), expected) < 1e-12
    banded: Any = made.last_plan
    assert not banded.whole and banded.peak_bytes <= budget
    assert error(made(x, budget_bytes=1), expected) < 1e-12
    (plans,) = made._plans.values()
    assert made.last_plan == plans.planner((1, 40, 24)).smallest(0)
