"""Classes that need torch: named by JSON, found again, and tested by the engine's self-test."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lib_rocm_sd.engine.selftest import Check
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.trials import conductor, recorder, torch_child
from lib_rocm_sd.trials.subject import Subject
from lib_rocm_sd.trials.verdicts import FAULTED, PASSED, REFUSED, WRONG
from tests.trials.doubles import arch_of

ARCH = arch_of("gfx1100")
VAE = AttentionProblem(1, 1, 4096, 4096, 512)
CASES = [
    (ATTENTION, ATTENTION.variants[1], VAE),
    (CONVS["3x3"], CONVS["3x3"].variants[1], ConvProblem("3x3", 1, 64, 64, 16, 16, norm=True)),
]


@pytest.mark.parametrize(("op", "variant", "problem"), CASES, ids=["attention", "conv"])
def test_what_computes_between_its_launches_needs_torch(
    op: Any, variant: Any, problem: Any
) -> None:
    config = variant.configs(ARCH, problem)[0]
    with pytest.raises(recorder.NeedsTorchError):
        recorder.recordings(op, variant, config, problem)
    row = json.loads(json.dumps(torch_child.description(op, variant, config, [problem])))
    assert torch_child.described(row, ARCH) == (op, variant, config, [problem])


def test_what_this_version_does_not_have_is_said() -> None:
    row = torch_child.description(ATTENTION, ATTENTION.variants[0], None, [VAE])
    for change in ({"op": "none"}, {"variant": "none"}, {"config": {"waves": -1}}):
        with pytest.raises(ValueError, match="no "):
            torch_child.described({**row, **change}, ARCH)


def test_a_kernel_for_many_keys_is_tried_with_as_many() -> None:
    variant = ATTENTION.variants[1]
    subject = Subject.of(ATTENTION, variant, None, VAE, ARCH)
    assert len(subject.specs) == 2
    (longer,) = conductor._longer(subject)
    launched = {
        spec
        for p in (longer, *ATTENTION.test_problems(VAE))
        for spec in variant.specs(ARCH, p, None)
    }
    assert launched == set(subject.specs)


CHECKS: dict[str, Check | LaunchError] = {
    PASSED: Check(1e-4, 2e-3),
    WRONG: Check(0.5, 2e-3, "wrong by 0.5"),
    FAULTED: Check(float("inf"), 2e-3, "RuntimeError: CUDA error: an illegal memory access"),
    REFUSED: LaunchError("out of memory"),
}


@pytest.mark.parametrize("outcome", CHECKS)
def test_the_self_test_becomes_a_verdict(outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = CHECKS[outcome]

    def check(*given: Any) -> Check:
        if isinstance(answer, Check):
            return answer
        raise answer

    said: list[dict[str, Any]] = []
    tester = torch_child.TorchTester.__new__(torch_child.TorchTester)
    vars(tester).update(_device=torch.device("cpu"), _arch=ARCH, _say=said.append, _launch=None)
    monkeypatch.setattr(torch_child.selftest, "check", check)
    row = torch_child.description(ATTENTION, ATTENTION.variants[1], None, [VAE])
    found = tester.test({"codes": [], "torch": row}, [])
    assert found["outcome"] == outcome
    assert said == [{"kind": "trying", "problem": str(VAE)}]
    json.dumps(found, allow_nan=False)
