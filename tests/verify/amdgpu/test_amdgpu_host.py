"""From the engine down to AMD machine code and back, with the project's own loader between them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tinygrad", reason="tinygrad, which decodes AMD's instructions, is missing")

from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd import __main__ as command
from lib_rocm_sd import arch, device, report
from lib_rocm_sd.commands import selftest_cases
from lib_rocm_sd.engine import selftest
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.ops import registry
from lib_rocm_sd.ops.attention.formula import reference
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.unet.takeover import take_over
from lib_rocm_sd.vae.program import Program
from tests.vae.vae_models import error, image, ldm_coder, needs_half, own
from tests.verify.amdgpu import launch
from tests.verify.amdgpu.memory import Memory
from tests.verify.amdgpu_host import NAMES, Gpu, smallest, standing_in

CPU = torch.device("cpu")
EXECUTED = tuple(NAMES)


@pytest.fixture
def gpu(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    """The CPU as the GPU that the test names."""
    why = launch.missing(request.param)
    if why:
        pytest.skip(why)
    with standing_in(request.param, tmp_path_factory.mktemp("hip")) as made:
        yield made


on_every = pytest.mark.parametrize("gpu", EXECUTED, indirect=True)


@on_every
def test_attention_through_the_engine(gpu: Gpu) -> None:
    problem = AttentionProblem(2, 2, 50, 77, 40, "float16", "none")
    q, k, v, *rest = ATTENTION.make_inputs(problem, CPU, 7)
    out = engine.run(ATTENTION, AttentionInputs(q, k, v))
    exact = reference(AttentionInputs(q, k, v, None, None))
    assert selftest.relative_error(out, exact) <= ATTENTION.tolerance(problem)
    assert engine.plan(problem, CPU).variant.name == "rocm_sd"
    assert device.identify(CPU).gfx == gpu.gfx
    tested = len(gpu.launches)
    engine.run(ATTENTION, AttentionInputs(q, k, v))
    assert len(gpu.launches) == tested + 1
    last = gpu.launches[-1]
    assert last.stream > 0 and last.counts.total > 1000


@pytest.mark.parametrize("gpu", ["gfx1100", "gfx942"], indirect=True)
@pytest.mark.parametrize("mask", ["bool", "float16"])
def test_strided_views_and_masks(gpu: Gpu, mask: str) -> None:
    """Queries, keys and values as slices of one projection, as a host may hand them over."""
    torch.manual_seed(3)
    whole = torch.randn(2, 33, 3, 2, 64).half()
    q, k, v = whole.unbind(2)
    added = torch.randn(2, 1, 33, 33)
    given = added > 0 if mask == "bool" else added.half()
    out = engine.run(ATTENTION, AttentionInputs(q, k, v, given, 0.2))
    exact = reference(AttentionInputs(q, k, v, given, 0.2))
    problem = ATTENTION.problem_of(AttentionInputs(q, k, v, given, 0.2))
    assert selftest.relative_error(out, exact) <= ATTENTION.tolerance(problem)
    assert gpu.launches[-1].entry == "attention_forward"


@pytest.mark.slow
@needs_half
@pytest.mark.parametrize("gpu", ["gfx1201", "gfx942"], indirect=True)
def test_a_decode_by_our_program(gpu: Gpu) -> None:
    report.report.clear()
    module, x = ldm_coder("decoder", (32, 32)).half(), image("ldm decoder", 6, 5).half()
    with torch.no_grad():
        exact = own(ldm_coder("decoder", (32, 32)).double(), x.double())
        theirs, ours = own(module, x), Program(module)(x)
    assert error(ours, exact) <= 2 * error(theirs, exact)
    rows = report.report.snapshot()["rows"]
    assert rows and {row["variant"] for row in rows} == {"rocm_sd"}
    assert {"conv3x3", "upsample_conv", "attention_forward", "pack_tiles"} < set(gpu.entries())


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["gfx1201", "gfx942"], indirect=True)
def test_a_joint_block_by_our_program(gpu: Gpu) -> None:
    """SD 3.5 medium's: two streams, and the picture's attention to itself alone."""
    attention = pytest.importorskip("diffusers.models.attention", reason="no diffusers here")
    torch.manual_seed(0)
    block = attention.JointTransformerBlock(128, 2, 64, False, "rms_norm", True)
    block = block.half().eval().requires_grad_(False)
    given = [torch.randn(shape).half() for shape in ((2, 21, 128), (2, 5, 128), (2, 128))]
    exact = copy.deepcopy(block).double()(*(each.double() for each in given))
    theirs, whole = block(*given), nn.ModuleList([block])
    report.report.clear()
    taken = take_over(whole)
    ours = block(*given)
    taken.give_back()
    for mine, hosts, right in zip(ours, theirs, exact, strict=True):
        assert error(mine, right) <= 2 * error(hosts, right)
    rows = {row["op"]: row["variant"] for row in report.report.snapshot()["rows"]}
    rows.pop("linear")  # a library's
    assert len(rows) == 3 and set(rows.values()) == {"rocm_sd"}
    assert {"layer_norm", "rms_norm_heads", "attention_forward"} <= set(gpu.entries())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["double", "single"])
@pytest.mark.parametrize("gpu", ["gfx1201", "gfx942"], indirect=True)
def test_a_block_of_flux_by_our_program(gpu: Gpu, kind: str) -> None:
    flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    torch.manual_seed(0)
    block = {"double": flux.FluxTransformerBlock, "single": flux.FluxSingleTransformerBlock}[kind]
    block = block(128, 2, 64).half().eval().requires_grad_(False)
    given = [torch.randn(shape).half() for shape in ((2, 21, 128), (2, 5, 128), (2, 128))]
    angles = torch.randn(26, 32).repeat_interleave(2, 1)
    turned = angles.cos(), angles.sin()
    exact = copy.deepcopy(block).double()(*(each.double() for each in given), turned)
    theirs, whole = block(*given, turned), nn.ModuleList([block])
    report.report.clear()
    taken = take_over(whole)
    ours = block(*given, turned)
    taken.give_back()
    for mine, hosts, right in zip(ours, theirs, exact, strict=True):
        assert error(mine, right) <= 2 * error(hosts, right)
    rows = {row["op"]: row["variant"] for row in report.report.snapshot()["rows"]}
    rows.pop("linear")  # a library's
    assert len(rows) == 3 and set(rows.values()) == {"rocm_sd"}
    assert {"layer_norm", "rms_norm_heads", "attention_forward"} <= set(gpu.entries())


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["gfx1201"], indirect=True)
def test_the_self_test_of_a_card(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its owner runs it."""
    chosen = smallest(selftest_cases.cases(arch.table()[gpu.gfx]))
    monkeypatch.setattr(selftest_cases, "cases", lambda row: chosen)
    path = tmp_path / "result.json"
    assert command.main(["doctor", "--self-test", "--out", str(path)]) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["complete"] and document["passed"] == len(chosen)
    assert {row["op"] for row in document["rows"]} == {op.name for op in registry.ops()}
    assert document["machine"]["gfx"] == gpu.gfx
    assert {name for row in document["rows"] for name in row["compilers"]} == {"clang"}
    assert all(row["error"] <= row["tolerance"] for row in document["rows"])
    assert len(gpu.launches) >= len(chosen)
    assert f"{len(chosen)} of {len(chosen)} cases passed" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["gfx1201"], indirect=True)
def test_what_the_executor_refuses_is_no_result(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads beyond its tensors fails its launch, and then the test."""
    q, k, v = (torch.randn(1, 64, 1, 64).half() for _ in range(3))
    engine.run(ATTENTION, AttentionInputs(q, k, v))
    before = len(gpu.launches)
    monkeypatch.setattr("tests.verify.amdgpu_host.memory", _only(q, k))
    out = engine.run(ATTENTION, AttentionInputs(q, k, v))  # torch's own computes it
    assert selftest.relative_error(out, reference(AttentionInputs(q, k, v, None, None))) < 0.01
    assert len(gpu.launches) == before
    assert "lie in no buffer" in str(gpu.errors.pop(0))
    assert (
        engine.plan(ATTENTION.problem_of(AttentionInputs(q, k, v, None, None)), CPU).variant.name
        != "rocm_sd"
    )
    gpu.errors.clear()


def _only(*tensors: Any) -> Any:
    def memory() -> Memory:
        made = Memory()
        for place, tensor in enumerate(tensors):
            made.add_host(tensor.data_ptr(), tensor.untyped_storage().nbytes(), f"{place}")
        return made

    return memory


def test_it_ends_with_its_context(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert launch.missing("gfx1100") or device.identify(CPU).backend == "cpu"
    with standing_in("gfx1100", tmp_path_factory.mktemp("hip")):
        assert device.identify(CPU).backend == "hip"
        assert engine.status_line(CPU).startswith("attention runs on our kernel (gfx1100)")
    assert device.identify(CPU).backend == "cpu"
    assert set(engine.usable(CPU)) == {"no GPU: this is the CPU"}
