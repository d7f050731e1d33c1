"""kernels/rms_norm.hip, unchanged, executed on the CPU with waves of 32 and 64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import KERNELS_DIR, by_gfx
from lib_rocm_sd.ops.layer_norm.heads import ODD, HeadsInputs, HeadsProblem, KernelHeads
from lib_rocm_sd.ops.layer_norm.op import RMS_NORM_HEADS
from tests import executed
from tests.ops.layer_norm.judge import apart, head_faults, placed
from tests.ops.running import compute
from tests.verify import simt
from tests.verify.simt.launch import ShimLaunch

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]
CPU = torch.device("cpu")
SOME = HeadsProblem(2, 7, 3, 3, 40, "bfloat16")
TURNED = replace(SOME, rotary="cos and sin", own_rotary=True)
TURN = torch.ones(1, 10, 40)


def draw(problem: HeadsProblem) -> HeadsInputs:
    return RMS_NORM_HEADS.make_inputs(problem, CPU, 1)


def run(inputs: HeadsInputs, gfx: str = "gfx1100", kernels_dir: Path = KERNELS_DIR) -> Any:
    arch = by_gfx(gfx)
    assert arch is not None
    launch = ShimLaunch(arch, 1, None, kernels_dir)
    with launch.knows(*(item for item in inputs if isinstance(item, torch.Tensor))):
        return compute(RMS_NORM_HEADS, KernelHeads(), launch, None, inputs)


@pytest.mark.parametrize("problem", [each for each in ODD if each.head_dim % 8 == 0], ids=str)
@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_odd_shapes(gfx: str, problem: HeadsProblem) -> None:
    assert head_faults(run(draw(problem), gfx), draw(problem)) == []


@pytest.mark.parametrize("problem", [SOME, TURNED, replace(TURNED, rotary="matrices")], ids=str)
def test_where_tensors_lie_changes_nothing(problem: HeadsProblem) -> None:
    inputs = draw(problem)
    plain = run(inputs)
    for layout in ("misaligned", "apart"):
        assert torch.equal(run(placed(inputs, layout)), plain)


def test_each_stream_has_its_own_eps() -> None:
    inputs = draw(SOME)._replace(eps=5.0, more_eps=0.5)
    assert head_faults(run(inputs), inputs) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("squares = lane < eights ? squares : 0.0f", "squares += 0.0f"),
        ("first ? p.eps : p.more_eps", "p.eps"),
        ("part == 1 ? of_k : nullptr", "of_k"),
        ("first ? p.weight_k : p.more_k", "p.weight_k"),
        ("first ? p.weight_q : p.more_q", "p.more_q"),
        ("(place - p.tokens)", "place"),
        ("image * p.words + ", "p.words + "),
        ("if (p.lane_bits > 2)", "if (p.lane_bits > 3)"),
    ],
)
def test_a_planted_mistake_is_seen(old: str, new: str) -> None:
    kernels_dir = simt.planted("rms_norm.hip", old, new)
    inputs = draw(SOME)._replace(eps=5.0, more_eps=0.5)
    with_it = run(inputs, kernels_dir=kernels_dir)
    assert head_faults(with_it, inputs) != []


@pytest.mark.parametrize(
    ("rotary", "old", "new"),
    [
        ("cos and sin", "i == 1 ? -sin", "i == 1 ? sin"),
        ("cos and sin", "pair % 2 * 2 + i / 2", "pair % 2 * 2"),
        ("cos and sin", "+ i % 2 * 4", ""),
        ("cos and sin", "(i < 2 ? p.rotary : p.rotary_sin)", "p.rotary"),
        ("cos and sin", "image * p.rotary_apart + ", ""),
        ("cos and sin", "(p, image, place, column", "(p, image, source, column"),
        ("cos and sin", "first ? p.apart : ", "true ? p.apart : "),
        ("matrices", "entry(pair, 0) * a", "entry(pair, 0) * b"),
        ("matrices", "entry(pair, 1), b", "entry(pair, 2), b"),
        ("matrices", "ROTARY ? part < 2", "ROTARY ? weight != nullptr"),
        ("matrices", "ROTARY ? part < 2", "ROTARY ? part < 3"),
        ("matrices", "* ROTARY;", "* 1;"),
    ],
)
def test_a_planted_mistake_in_rotation_is_seen(rotary: str, old: str, new: str) -> None:
    kernels_dir = simt.planted("rms_norm.hip", old, new)
    normed = (True, False, True, False)
    inputs = draw(replace(TURNED, rotary=rotary, normed=normed))
    inputs = inputs._replace(x=apart(inputs.x, 8))
    assert head_faults(run(inputs), inputs) == []
    assert head_faults(run(inputs, kernels_dir=kernels_dir), inputs) != []


def test_what_our_kernel_refuses_is_said() -> None:
    arch, ours = by_gfx("gfx1100"), KernelHeads()
    assert ours.refusals(None, SOME) == ["no supported GPU"]
    assert ours.refusals(arch, SOME) == []
    assert ours.refusals(arch, ODD[-1]) == ["head_dim 5"]
    wide = HeadsProblem(2, 1 << 20, 0, 24, 64)
    assert "more than the kernel counts" in str(ours.refusals(arch, wide))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"heads": 7}, r"x must be \(N, tokens, 3 heads D\)"),
        ({"weight_k": torch.ones(8)}, r"weight_k must be \(40,\)"),
        ({"more_q": torch.ones(40)}, "more_q must have the dtype"),
        ({"rotary": torch.ones(2, 10, 20, 2, 3)}, r"rotary must be \('1 or N', 10, 20, 2, 2\)"),
        ({"rotary": torch.ones(1, 10, 40).half(), "rotary_sin": TURN}, "rotary must be float32"),
        ({"rotary": torch.ones(2, 10, 40), "rotary_sin": TURN}, "rotary_sin must have the shape"),
        ({"rotary_sin": TURN}, "rotary_sin goes with rotary"),
        ({"more": torch.ones(1, 3, 360, dtype=torch.bfloat16)}, r"more must be \(2, 3, 360\)"),
    ],
)
def test_a_callers_mistake_is_named_with_the_shapes(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        RMS_NORM_HEADS.problem_of(draw(SOME)._replace(**changed))
