"""What is compiled ahead, and tried, is what the blocks of a UNet launch under Auto."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import Arch, amd_table, table
from lib_rocm_sd.calls import Calls
from lib_rocm_sd.catalog.unet import (
    OTHER_STEPS,
    SD15,
    SDXL,
    STEPS,
    Layer,
    Problem,
    asked_by,
    embeddings,
    prompts,
    step,
    work,
)
from lib_rocm_sd.engine.planner import VariantPlan
from lib_rocm_sd.engine.route import Route
from lib_rocm_sd.hosts.read import unet as reading
from lib_rocm_sd.lab.models import CONFIGS
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, KernelSpec, Op
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm.problem import FinalizeProblem, GroupNormProblem, NormProblem
from lib_rocm_sd.ops.linear import inputs as linear_inputs
from lib_rocm_sd.shipped import AT_START, part_specs, shipped
from lib_rocm_sd.trials.subject import Subject, subjects
from lib_rocm_sd.unet.takeover import take_over
from tests import sweeps
from tests.unet.steps import arguments

pytest.importorskip("diffusers", reason="diffusers is a dev extra")
ROOT = Path(__file__).resolve().parents[2]
SIZES = {"SD 1.5": (512, 512), "SDXL": (1024, 1024)}
CARD = table()["gfx942"]
NAMES = ("gfx", "family", "names")
Asked = dict[tuple[str, Any], Op[Any, Any]]


@cache
def asked(name: str, fast: bool = False) -> Asked:
    """What a step of diffusers' UNet asks of the engine with its blocks ours, without memory. Where
    a place asks which way it would go, it goes torch's, as most do under Auto; `fast`: convolutions
    go a library's way, and norms in one launch of ours where that is.
    """
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**CONFIGS[name])
    unet = unet.half().eval().requires_grad_(False)
    found: Asked = {}

    def run(calls: Calls, place: str, op: Op[Any, Any], inputs: Any) -> Any:
        problem = op.problem_of(inputs)
        found[op.name, problem] = op
        if op.name == "attention":
            return inputs[0].new_empty(op.output_shape(problem))
        return next(v for v in op.variants if not v.ours).run(Call(problem, inputs))

    def route(calls: Calls, place: str, op: Op[Any, Any], inputs: Any) -> Route:
        problem, plan = op.problem_of(inputs), None
        if fast and op.family in ("conv", "group_norm"):
            if op.family == "conv":
                found[op.name, problem] = op  # a large image's
            ours = next(v for v in op.variants if v.ours and not isinstance(v, MatrixConv))
            config = ours.configs(CARD, problem)[:1]
            plan = VariantPlan(ours, config[0], {}, "") if config else None
        return Route(run, None, problem, inputs[0].device, plan)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Calls, "run", run)
        patch.setattr(Calls, "route", route)
        patch.setattr(reading, "_check_parameters", lambda *given: None)
        taken = take_over(unet)
        for title, module in list(sys.modules.items()):  # ops refuse tensors without memory
            if title.startswith("lib_rocm_sd.ops.") and hasattr(module, "tensor_errors"):
                patch.setattr(module, "tensor_errors", lambda **tensors: [])
        patch.setattr(linear_inputs, "overlap", lambda a, b: False)
        unet(*arguments(name, *SIZES[name], dtype=torch.float16))
    for row in taken.report():
        assert not row.left, row
    return found


@cache
def compiled_ahead(arch: Arch) -> frozenset[KernelSpec]:
    """For the blocks of UNets."""
    return frozenset(part_specs("unet", arch))


def of_auto(arch: Arch) -> list[Subject]:
    """The classes of both models that Auto launches, where they are kernels of ours."""
    fast = arch.has_fast_libraries
    every = [(op, problem) for name in SIZES for (_, problem), op in asked(name, fast).items()]
    return subjects(every, arch)


@pytest.mark.parametrize("gfx", amd_table())
def test_all_that_auto_launches_is_compiled_and_tried_ahead(gfx: str) -> None:
    arch = amd_table()[gfx]
    own, attention = compiled_ahead(arch), set(shipped(arch, ["attention"]))
    tried = {each.identity for each in subjects(work(arch=arch), arch)}
    found = of_auto(arch)
    assert {each.op.name for each in found} == {op.name for op, _ in work()} | {"attention"}
    for each in found:
        if each.op.name == "attention":
            assert attention >= set(each.specs), each
        else:
            assert own >= set(each.specs), each
            assert each.identity in tried, each


@pytest.mark.parametrize("gfx", amd_table())
def test_nothing_is_compiled_ahead_that_auto_never_launches(gfx: str) -> None:
    """By the WebUI's UNets either, whose last convolution has a norm."""
    arch = amd_table()[gfx]
    last = [layers[-1] for layers in STEPS]
    listed = [*of_auto(arch), *subjects(work([last], OTHER_STEPS, arch=arch), arch)]
    found = {spec for each in listed for spec in each.specs}
    for spec in compiled_ahead(arch) - found:
        assert spec in embeddings_of_the_webui(arch), spec
    assert all(dict(spec.defines).get("GATE", 0) == 0 for spec in shipped(arch, AT_START))


def embeddings_of_the_webui(arch: Arch) -> set[KernelSpec]:
    """In whose models the middle comes before the way up."""
    layers = [each for unet in (SD15, SDXL) for each in (*embeddings(unet), *prompts(unet))]
    return {spec for each in subjects(work([layers]), arch) for spec in each.specs}


class Watched(Arch):
    """Notes which facts of its row are read. Fails who asks which GPU it is: what is launched hangs
    on the other facts.
    """

    def __getattribute__(self, name: str) -> Any:
        assert name not in NAMES, f"{name} was asked for"
        if name in Arch.__dataclass_fields__:
            vars(self).setdefault("facts", {})[name] = vars(self)[name]
        return super().__getattribute__(name)

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def first(op: Op[Any, Any], problem: Any, arch: Arch) -> Sequence[KernelSpec]:
    """What Auto launches, where it is ours."""
    variant = op.able(arch, problem)[0]
    config = variant.defaults(arch, problem)[0]
    return variant.specs(arch, problem, config) if variant.ours else ()


@pytest.fixture(scope="module")
def everywhere() -> Callable[[Arch], dict[KernelSpec, str]]:
    """What a GPU launches at all usual sizes and batches, and where. Asked once for GPUs whose rows
    agree in all that was read for a kind of problem.
    """
    steps = [
        (unet, width, height, batch)
        for unet, sides in ((SD15, range(384, 1088, 64)), (SDXL, range(640, 1600, 64)))
        for width, height in combinations_with_replacement(sides, 2)
        for batch in (1, 2, 3, 4, 6, 8)
        if 2 * width >= height
    ]
    kinds: dict[type, dict[Problem, str]] = {}
    for unet, width, height, batch in sweeps.some(steps):
        where = f"{unet.name} {width}x{height}, batch {batch}"
        for layer in step(unet, width, height, batch):
            kinds.setdefault(type(layer.problem), {})[layer.problem] = where
    launches: dict[type, list[tuple[dict[str, Any], dict[KernelSpec, str]]]]
    launches = {kind: [] for kind in kinds}

    def of_kind(arch: Arch, kind: type) -> dict[KernelSpec, str]:
        for facts, specs in launches[kind]:
            if all(getattr(arch, name) == value for name, value in facts.items()):
                return specs
        row = Watched(**vars(arch))
        specs = {
            spec: f"{where}: {layer}"
            for layer, where in kinds[kind].items()
            for op, problem in asked_by(layer, row)
            for spec in first(op, problem, row)
        }
        launches[kind].append((vars(row).get("facts", {}), specs))
        return specs

    return lambda arch: {spec: at for kind in kinds for spec, at in of_kind(arch, kind).items()}


@pytest.mark.parametrize("gfx", table())
def test_no_usual_size_or_batch_has_a_kernel_that_is_not_compiled_ahead(
    gfx: str, everywhere: Callable[[Arch], dict[KernelSpec, str]]
) -> None:
    """A first step at such a size would wait for the compiler, or be the host's own."""
    arch = table()[gfx]
    found, own = everywhere(arch), compiled_ahead(arch)
    assert found
    assert not {spec: where for spec, where in found.items() if spec not in own}


@pytest.mark.parametrize("gfx", table())
def test_attention_of_no_usual_size_has_a_kernel_that_is_not_compiled_ahead(gfx: str) -> None:
    arch = table()[gfx]
    problems: set[AttentionProblem] = set()
    for unet, sides in ((SD15, (384, 512, 768)), (SDXL, (640, 1024, 1536))):
        for side, batch in product(sides, (1, 2, 4)):
            every = [layer.problem for layer in step(unet, side, side, batch)]
            problems |= {each for each in every if isinstance(each, AttentionProblem)}
    compiled = shipped(arch, AT_START)
    for each in subjects([(ATTENTION, problem) for problem in problems], arch):
        assert compiled.keys() >= set(each.specs), each


def test_a_watched_row_knows_what_was_read_and_fails_who_asks_for_a_name() -> None:
    row = table()["gfx1100"]
    watched = Watched(**vars(row))
    assert watched.matrix == row.matrix and watched.has_fast_libraries == row.has_fast_libraries
    assert vars(watched)["facts"].keys() >= {"matrix"} and "lds_bytes" not in vars(watched)["facts"]
    for name in NAMES:
        with pytest.raises(AssertionError, match=f"{name} was asked for"):
            getattr(watched, name)


def test_what_is_first_under_auto_is_known_without_torch() -> None:
    ours, library, *_ = CONVS["3x3"].variants
    problem = ConvProblem("3x3", 2, 64, 64, 320, 320, in_rows=True)
    for arch in table().values():
        behind = ours.preference_for(arch, problem) < library.preference_for(arch, problem)
        assert behind == arch.has_fast_libraries


@pytest.mark.parametrize("name", SIZES)
def test_the_listed_problems_are_those_that_are_asked(name: str) -> None:
    """Each class of them; attention's are listed by attention."""
    listed = {(op.name, op.test_problems(problem)[0]) for op, problem in work()}
    for (op_name, problem), op in asked(name).items():
        if op_name != "attention":
            assert (op_name, op.test_problems(problem)[0]) in listed, problem


@pytest.mark.parametrize(("name", "layers"), [*zip(SIZES, STEPS, strict=True)])
def test_what_a_step_fuses_is_what_is_asked(name: str, layers: tuple[Layer, ...]) -> None:
    """Each convolution and norm. diffusers has the last ones apart, and applies that norm."""
    found = {problem for op, problem in asked(name) if op.startswith(("conv", "group norm"))}
    *others, norm, last = (layer.problem for layer in layers)
    assert isinstance(last, ConvProblem) and isinstance(norm, NormProblem)
    applied = GroupNormProblem(*norm.shape, groups=norm.groups, affine=norm.affine)
    listed = {
        problem
        for layer in (*others, applied, replace(last, norm=False))
        for _, problem in asked_by(layer)
        if isinstance(layer, ConvProblem | NormProblem | GroupNormProblem)
    }
    assert without_parts(found) == without_parts(listed)


def without_parts(problems: set[Any]) -> set[Any]:
    """Of statistics, which each variant makes as it likes."""
    return {replace(p, parts=1) if isinstance(p, FinalizeProblem) else p for p in problems}


def test_the_list_has_no_entry_twice_and_one_half_type() -> None:
    for arch in amd_table().values():
        specs = part_specs("unet", arch)
        assert len(specs) == len(set(specs))
        assert all(dict(spec.defines).get("BF16_HALVES", 0) == 0 for spec in specs)


def test_the_lists_need_no_torch() -> None:
    code = (
        "import sys; from lib_rocm_sd.arch import table;"
        "from lib_rocm_sd.shipped import part_specs;"
        "part_specs('unet', table()['gfx1100']); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=600)
    assert done.returncode == 0
