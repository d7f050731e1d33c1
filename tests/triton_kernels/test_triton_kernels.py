"""Our kernels in Triton, as Triton interprets them on the CPU, and their variants' reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import table
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops import optional
from lib_rocm_sd.ops.attention.libraries import TritonAttention
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, Op
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU
from lib_rocm_sd.ops.group_norm.problem import GroupNormProblem
from lib_rocm_sd.ops.group_norm.torch import TritonGroupNorm

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
ARCH = table()["gfx1100"]
ATTEND, NORMALISE = TritonAttention(), TritonGroupNorm()
IMAGE = GroupNormProblem(2, 40, 37, 60, groups=4, silu=True)
SEQUENCE = AttentionProblem(2, 3, 37, 77, 40)

INTERPRETED = """
from dataclasses import replace
import torch
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops.attention.libraries import TritonAttention
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.group_norm.torch import TritonGroupNorm
from lib_rocm_sd.ops.group_norm.op import GROUP_NORM_SILU
from lib_rocm_sd.ops.group_norm.problem import ODD, GroupNormProblem
from lib_rocm_sd.triton_kernels.attention import TritonConfig
from lib_rocm_sd.triton_kernels.run import NORM_TILES, NormTile

def judged(op, variant, config, problem, changed={}):
    inputs = op.make_inputs(problem, torch.device("cpu"), 1)._replace(**changed)
    made = variant.run(Call(problem, inputs, config=config))
    error = relative_error(made, op.reference(inputs))
    assert made.dtype == inputs[0].dtype and error <= op.tolerance(problem), (problem, error)
    return made, inputs
"""
ATTENTIONS = """
small = TritonConfig(32, 32, 4, 1)
for sizes in ((2, 3, 37, 77, 40), (1, 2, 20, 33, 160), (1, 1, 1, 1, 8), (1, 1, 33, 32, 248)):
    for mask in ("none", "bool", "float16", "float32"):
        problem = replace(AttentionProblem(*sizes), mask=mask)
        for scale in (None, -0.3):
            judged(ATTENTION, TritonAttention(), small, problem, {"scale": scale})
_, inputs = judged(ATTENTION, TritonAttention(), small, AttentionProblem(1, 2, 32, 64, 64))
q = inputs.q.expand(3, -1, -1, -1)[..., ::1]  # batches that lie in the same memory
k, v = (t.repeat(3, 1, 2, 1)[:, :, ::2] for t in inputs[1:3])
problem = AttentionProblem(3, 2, 32, 64, 64)
given = {"q": q, "k": k, "v": v, "scale": 0.0}
judged(ATTENTION, TritonAttention(), small, problem, given)
"""
NORMS = """
further = (
    GroupNormProblem(2, 40, 37, 60, groups=4, silu=True),
    GroupNormProblem(1, 32, 33, 35, "float32", False, groups=8, affine="none"),
    GroupNormProblem(1, 8, 131, 132, "float16", groups=2, affine="float32"),
)
known = [p for p in ODD if "bfloat16" not in (p.dtype, p.affine) and p.dtype != "float64"]
for problem in (*known, *further):  # it does not know bfloat16
    made, inputs = judged(GROUP_NORM_SILU, TritonGroupNorm(), NORM_TILES[0], problem)
    kind = torch.channels_last if problem.channels_last else torch.contiguous_format
    assert made.is_contiguous(memory_format=kind)
x = torch.randn(1, 16, 40, 40) * 1e-3 + 1000  # a mean of which float32 keeps few digits
problem = GroupNormProblem(1, 16, 40, 40, "float32", False, False, 2, "none")
given = {"x": x, "gamma": None, "beta": None, "groups": 2, "silu": False, "eps": 1e-12}
inputs = GROUP_NORM_SILU.make_inputs(problem, torch.device("cpu"), 1)._replace(**given)
made = TritonGroupNorm().run(Call(problem, inputs, config=NormTile(512, 64, 4)))
error = relative_error(made, GROUP_NORM_SILU.reference(inputs))
assert error < 0.03, error  # one step of float32 at 1000 is 6e-5
strided = torch.randn(2, 16, 9, 7)[..., ::2]
problem = GroupNormProblem(2, 16, 9, 4, "float32", False, True, 4, "none")
given = {"x": strided, "gamma": None, "beta": None, "groups": 4, "silu": True}
judged(GROUP_NORM_SILU, TritonGroupNorm(), NORM_TILES[0], problem, given)
"""


def needs_triton() -> None:
    triton = pytest.importorskip(
        "triton", reason="no triton: pip install -r requirements/triton.txt"
    )
    if triton.__version__.startswith("2."):
        pytest.skip("Triton 2 does not interpret all of it")


def _named(item: object) -> str:
    """The same in every process."""
    return str(getattr(item, "name", item))


@pytest.mark.parametrize("program", [ATTENTIONS, NORMS], ids=["attention", "group norm"])
def test_it_is_right_as_triton_interprets_it(program: str) -> None:
    needs_triton()
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED + program],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_head_is_cut_into_few_columns() -> None:
    needs_triton()
    from lib_rocm_sd.triton_kernels.attention import pieces

    assert [pieces(d) for d in (8, 40, 64, 80, 96, 120, 160)] == [
        *((16, 0), (32, 16), (64, 0), (64, 16), (64, 32), (128, 0), (128, 32)),
    ]
    for head_dim in range(1, 257):
        first, rest = pieces(head_dim)
        assert head_dim <= first + rest and (not rest or 16 <= rest < first < head_dim)


def test_only_on_amd_a_head_is_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_triton()
    from lib_rocm_sd.triton_kernels.run import cut

    for hip, found in (("7.0", [(32, 16), (64, 16)]), (None, [(64, 0), (128, 0)])):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert [cut(40), cut(80)] == found


def test_few_configs_are_tried() -> None:
    needs_triton()
    for case in ATTENTION.cases:
        assert 1 < len(ATTEND.configs(ARCH, case)) <= 3
    assert 1 < len(NORMALISE.configs(ARCH, IMAGE)) <= 3


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one, and Triton."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(optional, "absent", lambda package, module: "")
    monkeypatch.setattr(optional, "module", lambda name: SimpleNamespace(too_old=lambda: ""))


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("variant", "problem", "told"),
    [
        (ATTEND, replace(SEQUENCE, dtype="float32"), "float32: the kernel takes fp16 and bf16"),
        (ATTEND, replace(SEQUENCE, mask="float64"), "a float64 mask: it takes"),
        (ATTEND, replace(SEQUENCE, head_dim=512), "head_dim 512: it takes up to 256"),
        (ATTEND, replace(SEQUENCE, seq_q=1 << 25), "33554432 queries are too many"),
        (NORMALISE, replace(IMAGE, dtype="float64"), "float64: it computes in float32"),
        (NORMALISE, replace(IMAGE, channels=8192), "2048 channels of a group"),
        (NORMALISE, replace(IMAGE, width=1 << 26), "an image has more than 2^31 values"),
    ],
    ids=_named,
)
def test_what_the_kernels_do_not_take(variant: Any, problem: Any, told: str) -> None:
    (why,) = variant.refusals(ARCH, problem)
    assert why.startswith(told)
    assert variant.refusals(None, problem) == ["no supported GPU"]


@pytest.mark.usefixtures("card")
def test_what_they_take() -> None:
    assert ATTEND.refusals(ARCH, SEQUENCE) == NORMALISE.refusals(ARCH, IMAGE) == []


def test_tensors_that_they_do_not_take() -> None:
    inputs = ATTENTION.make_inputs(replace(SEQUENCE, mask="bool"), CPU, 1)
    assert ATTEND.input_refusals(inputs) == []
    turned = inputs.v.transpose(1, 3).contiguous().transpose(1, 3)
    (why,) = ATTEND.input_refusals(inputs._replace(v=turned))
    assert why == "the last stride of v is not 1"
    far = torch.empty_strided((2, 3, 3, 40), (1, 1 << 30, 40, 1), device="meta")
    (why,) = ATTEND.input_refusals(inputs._replace(k=far, mask=None))
    assert why == "a head of k reaches over 2^31 elements"
    assert ATTEND.input_refusals(inputs._replace(q=inputs.q.requires_grad_()))
    image = GROUP_NORM_SILU.make_inputs(IMAGE, CPU, 1)
    assert NORMALISE.input_refusals(image) == []
    apart = image._replace(gamma=torch.randn(80).half()[::2])
    assert NORMALISE.input_refusals(apart) == ["gamma or beta has gaps"]
    assert NORMALISE.input_refusals(image._replace(x=image.x.requires_grad_()))


def test_without_triton_or_with_an_old_one_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(optional, "absent", lambda package, module: f"{package} is not installed")
    pairs: list[tuple[Any, Any]] = [(ATTEND, SEQUENCE), (NORMALISE, IMAGE)]
    for variant, problem in pairs:
        assert variant.refusals(ARCH, problem) == ["triton is not installed"]
        assert variant.configs(ARCH, problem) == (None,)
    monkeypatch.setattr(optional, "absent", lambda package, module: "")
    old = SimpleNamespace(too_old=lambda: "triton 2.1.0 is older than 3.0")
    monkeypatch.setattr(optional, "module", lambda name: old)
    assert optional.triton_refusals(ARCH) == ["triton 2.1.0 is older than 3.0"]


def test_which_triton_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_triton()
    from lib_rocm_sd.triton_kernels import run

    for version, old in (("2.1.0", True), ("3.0.0", False), ("3.9.0+git1", False), ("4.0", False)):
        monkeypatch.setattr(run.triton, "__version__", version)
        assert bool(run.too_old()) == old
    with pytest.raises(RuntimeError, match="Triton, a tile: "), run.launching(CPU, "a tile"):
        raise run.triton.OutOfResources(2, 1, "shared memory")


GPU_CASES: list[tuple[Op[Any, Any], Any, Any]] = [
    *((ATTENTION, ATTEND, replace(SEQUENCE, head_dim=d)) for d in (40, 64, 80, 160, 248)),
    (ATTENTION, ATTEND, replace(SEQUENCE, mask="bool", dtype="bfloat16")),
    (ATTENTION, ATTEND, replace(SEQUENCE, mask="float32")),
    (ATTENTION, ATTEND, AttentionProblem(2, 8, 1024, 1024, 40)),
    (GROUP_NORM_SILU, NORMALISE, IMAGE),
    (GROUP_NORM_SILU, NORMALISE, replace(IMAGE, dtype="bfloat16", channels_last=False)),
    (GROUP_NORM_SILU, NORMALISE, GroupNormProblem(1, 128, 256, 256, silu=True)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "variant", "problem"), GPU_CASES, ids=_named)
def test_on_the_card_every_config_is_right(op: Any, variant: Any, problem: Any) -> None:
    device = torch.device("cuda:0")
    arch = identify(device).arch
    why = variant.refusals(arch, problem)
    if why:
        pytest.skip("; ".join(why))
    right = op.reference(op.make_inputs(problem, CPU, 1))
    configs = variant.configs(arch, problem)
    for config in configs:
        made = variant.run(Call(problem, op.make_inputs(problem, device, 1), None, config))
        assert relative_error(made.cpu(), right) <= op.tolerance(problem), config
