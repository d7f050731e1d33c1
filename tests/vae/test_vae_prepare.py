"""Kernels made ready before they are needed: all of them, several at a time, once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine import selftest
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from lib_rocm_sd.ops.base import KernelSpec, Op, Work
from lib_rocm_sd.report import report
from lib_rocm_sd.shipped import part_specs
from lib_rocm_sd.vae import attention, bands, plan, readiness
from lib_rocm_sd.vae.program import Program
from lib_rocm_sd.vae.readiness import Readiness
from lib_rocm_sd.vae.trace import chain
from tests.vae import vae_models
from tests.vae.vae_models import coder, error, fixed, image, legs_of, own, planner_of

CPU = torch.device("cpu")
NONSENSE = Session(replace(DEFAULT.policy, name="Fast"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_ROWS", 8)
    monkeypatch.setattr(attention, "CHUNK_BYTES", 4096)


def summed_up(op: Op[Any, Any], problem: Any) -> tuple[str, Any]:
    """A problem, but for a band's height and the number of a statistics' parts."""
    unimportant = {"parts", "height"} & set(problem.__dataclass_fields__)
    return (op.name, replace(problem, **dict.fromkeys(unimportant, 0)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, Any]]:
    """What is asked of the engine."""
    found: set[tuple[str, Any]] = set()
    run = engine.run

    def noted(op: Op[Any, Any], inputs: Any, session: Session) -> Any:
        found.add(summed_up(op, op.problem_of(inputs)))
        return run(op, inputs, session)

    monkeypatch.setattr(engine, "run", noted)
    return found


@pytest.mark.parametrize("kind", ["ldm decoder", "ldm encoder", "ldm decoder inner-attention"])
def test_a_plans_problems_are_those_that_running_it_asks(
    kind: str, asked: set[tuple[str, Any]]
) -> None:
    module, x = coder(kind), image(kind, 27, 7)
    planner = planner_of(module, x)
    whole = planner.whole()
    plans = [whole, planner.smallest(0)]
    for divisor in (1.5, 3):
        found = planner.cheapest(int(whole.peak_bytes / divisor), 1 << 40)
        plans += [found] if found is not None else []
    if kind == "ldm decoder":
        plans += [legs_of(module, 16, "host", hidden) for hidden in (None, "device")]
    assert len(plans) > 3 and not all(made.whole for made in plans)
    for made in plans:
        fixed(module, made)(x)  # with self-tests, which ask as well
        asked.clear()
        fixed(module, made)(x)
        assert asked == {summed_up(*item) for item in readiness.of_plan(planner.chain, made)}


@pytest.fixture
def tests_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that are self-tested."""
    found: list[str] = []
    check = selftest.check

    def noted(op: Op[Any, Any], *rest: Any) -> Any:
        found.append(op.name)
        return check(op, *rest)

    monkeypatch.setattr(selftest, "check", noted)
    engine.reset()
    return found


@pytest.mark.parametrize("role", ["decoder", "encoder"])
@pytest.mark.parametrize("mode", ["whole", "banded"])
def test_after_prepare_nothing_is_tested(role: str, mode: str, tests_run: list[str]) -> None:
    module, x = coder(f"ldm {role}"), image(f"ldm {role}", 22, 6)
    program = Program(module)
    height, width = x.shape[2:]
    made = program.prepare(height, width, x.dtype, CPU, mode=mode)
    assert made.whole == (mode == "whole") and len(tests_run) > 8
    tests_run.clear()
    assert error(program(x, mode=mode), own(module, x)) < 1e-5
    assert program.last_plan == made
    assert not tests_run


def test_another_size_tests_next_to_nothing(
    tests_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CHUNK_BYTES", 32 << 20)
    program = Program(coder("ldm decoder"))
    program(image("ldm decoder", 8, 8))
    assert len(tests_run) > 8
    for size in ((16, 24), (72, 8), (64, 64)):  # sides of pictures that are multiples of 64
        tests_run.clear()
        program(image("ldm decoder", *size))
        assert not tests_run
    program(image("ldm decoder", 13, 9))
    # What depends on how many pixels there are past a multiple of a tile.
    assert set(tests_run) <= {"attention"}


def test_prepare_tells_how_far_it_is_once(tests_run: list[str]) -> None:
    program = Program(coder("ldm decoder"))
    told: list[tuple[int, int]] = []
    for _ in range(2):
        program.prepare(8, 6, torch.float32, CPU, progress=lambda *at: told.append(at))
    totals = [total for _, total in told]
    assert told[0] == (0, totals[0]) and (totals[0], totals[0]) in told
    assert [done for done, _ in told].count(0) <= 4  # the whole frame, other sizes, the plan
    assert tests_run


def test_a_run_without_prepare_tells_that_nothing_is_done_yet(tests_run: list[str]) -> None:
    program, told = Program(coder("ldm decoder")), list[tuple[int, int]]()
    program(image("ldm decoder", 8, 6), progress=lambda *at: told.append(at))
    assert [done for done, _ in told] == [*[0] * (len(told) - 1), 1]
    assert len(told) > 8 and told[-1] == (1, 1)
    told.clear()
    program(image("ldm decoder", 8, 6), progress=lambda *at: told.append(at))
    assert told == [(1, 1)]


def test_interrupt_is_heard_while_kernels_are_made_ready(tests_run: list[str]) -> None:
    module, x = coder("ldm decoder"), image("ldm decoder", 8, 6)
    program = Program(module)
    with pytest.raises(bands.Interrupted, match="made ready"):
        program(x, interrupt=lambda: len(tests_run) > 3)
    assert 3 < len(tests_run) < 8
    assert error(program(x), own(module, x)) < 1e-5


@pytest.mark.parametrize(
    ("size", "dtype", "options", "words"),
    [
        ((0, 4), torch.float32, {}, "cannot prepare for 1 x 0 x 4"),
        ((4, 4), torch.int32, {}, "torch.int32"),
        ((4, 4), torch.float32, {"batch": 0}, "cannot prepare for 0 x 4 x 4"),
        ((4, 4), torch.float32, {"mode": "tiled"}, "no mode 'tiled': there are auto, whole, ban"),
        ((4, 4), torch.float32, {"session": NONSENSE}, "no optimization level"),
        ((4, 4), torch.float32, {"budget_bytes": -3}, "memory budget"),
    ],
)
def test_a_callers_mistakes(
    size: tuple[int, int], dtype: torch.dtype, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Program(coder("ldm decoder")).prepare(*size, dtype, CPU, **options)


def test_what_cannot_be_run_cannot_be_prepared() -> None:
    with pytest.raises(UnknownModuleError):
        Program(nn.Conv2d(4, 3, 3)).prepare(8, 8, torch.float32, CPU)


class _Launcher:
    """Notes what is built; `here` is what needs no compilation."""

    def __init__(self) -> None:
        self.here: set[KernelSpec] = set()
        self.batches: list[list[KernelSpec]] = []

    def missing(self, specs: Iterable[KernelSpec]) -> list[KernelSpec]:
        return [spec for spec in specs if spec not in self.here]

    def build(self, specs: Iterable[KernelSpec]) -> None:
        self.batches.append(list(specs))
        self.here |= set(self.batches[-1])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Launcher:
    """The CPU taken for a gfx1100, whose kernels are found right without a test."""
    launcher = _Launcher()
    info = DeviceInfo(0, "RX 7900 XTX", "hip", "gfx1100", by_gfx("gfx1100"))
    monkeypatch.setattr(readiness.devices, "identify", lambda device: info)
    monkeypatch.setattr(readiness, "default_launcher", lambda device, arch: launcher)
    monkeypatch.setattr(
        Readiness, "_planned", lambda self, op, problem: vae_models.engine_plan(op, problem)
    )
    return launcher


@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_what_is_missing_is_compiled_at_once_and_was_to_be_compiled_ahead(
    role: str, gpu: _Launcher
) -> None:
    report.clear()
    program = Program(vae_models.ldm_coder(role, (32, 64), groups=32))
    size = (64, 64) if role == "decoder" else (256, 256)
    program.prepare(*size, torch.float16, CPU, mode="banded")
    assert len(gpu.batches) == 2  # the whole frame's, and what only its bands need
    assert len(gpu.batches[0]) > 8 and len(gpu.here) == sum(map(len, gpu.batches))
    arch = by_gfx("gfx1100")
    assert arch is not None
    others = {spec for spec in gpu.here if spec.source != "attention.hip"}
    assert others <= set(part_specs("vae", arch))
    assert any("compiling" in told for told in report.snapshot()["events"])
    program.prepare(96, 96, torch.float16, CPU, mode="banded")
    assert len(gpu.batches) == 2


def test_performance_compiles_the_configs_that_it_measures(gpu: _Launcher) -> None:
    module = vae_models.ldm_coder("decoder", (32, 64), groups=32)
    Program(module).prepare(16, 16, torch.float16, CPU)
    usual = len(gpu.here)
    Program(module).prepare(16, 16, torch.float16, CPU, session=Session.of("Performance"))
    assert len(gpu.here) > 1.5 * usual


def test_single_precision_on_a_gpu_is_remarked_upon(gpu: _Launcher) -> None:
    report.clear()
    program = Program(coder("ldm decoder"))
    program.prepare(8, 8, torch.float16, CPU)
    assert not any("not needed" in told for told in report.snapshot()["events"])
    program.prepare(8, 8, torch.float32, CPU)
    (told,) = (told for told in report.snapshot()["events"] if "not needed" in told)
    assert told.startswith("the decoder's weights are float32: that costs speed and memory")


def test_performance_measures_pictures_of_any_size_once() -> None:
    """What a picture asks is what all others ask, as far as times go."""
    recipe = vae_models.standard("decoder")

    def measured(height: int, width: int) -> set[tuple[str, Any]]:
        work = readiness.of_whole(chain(recipe, 1, height, width, torch.float16))
        return {(op.name, op.measured_as(problem)) for op, problem in work}

    assert measured(104, 152) == measured(128, 128) == measured(64, 64) == measured(61, 7)


def test_when_the_engine_plans_anew_so_does_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "ldm decoder"
    program, asked = Program(coder(kind)), []
    get_ready = Readiness.get_ready

    def noted(self: Readiness, work: Work, told: readiness.Told) -> None:
        asked.append(len(work))
        get_ready(self, work, told)

    monkeypatch.setattr(Readiness, "get_ready", noted)
    program(image(kind, 8, 8))
    asked.clear()
    program(image(kind, 8, 8))
    assert asked == []
    engine.renew()
    program(image(kind, 8, 8))
    assert asked
