"""Attention with gradients down to our kernels' source, the engine's own way but for the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from lib_rocm_sd import followed, functional
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.report import Report
from tests.following import BACKWARD, FORWARD, ran, told
from tests.ops.attention_backward.judge import drawn, faults
from tests.ops.toy_op import GFX1100, engine_of
from tests.torch_ops.test_torch_ops_attention_backward import Counting, Showing
from tests.verify import simt

pytestmark = pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing()))


class Shown(Showing):
    """With what else is asked of an engine."""

    def run(self, op: Any, inputs: Any, session: Session) -> Any:
        with self.launch.knows():
            route = self.engine.route(op, inputs, session)
        return self.follow(route, op, inputs, session)

    def refused(self, *asked: Any) -> list[str]:
        with self.launch.knows():
            return self.engine.refused(*asked)


def test_forward_and_backward_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, session = Counting(), Session(report=Report())
    user, _ = engine_of(GFX1100, launcher=lambda device, row: launch)
    monkeypatch.setattr(followed, "engine", Shown(user.engine, launch))
    given = drawn(AttentionProblem(1, 2, 33, 45, 40))
    q, k, v = (t.clone().requires_grad_() for t in given[:3])
    made = functional.attention(q, k, v, session=session)
    assert launch.entries[-1] == "attention_forward"
    made.backward(given.grad)
    assert launch.entries[-2:] == ["attention_backward"] * 2
    assert ran(session) == {FORWARD: 1, BACKWARD: 1} and not told(session)
    found = [t.grad for t in (q, k, v)]
    assert faults(tuple(found), given._replace(output=made.detach())) == []  # type: ignore[arg-type]
