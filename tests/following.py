"""A CPU that plays a card for attention and its gradients: kernels of ours, computed by formula.

All but the launch is as on a card: refusals, self-tests, plans, rows of the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lib_rocm_sd import followed, functional
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.engine.engine import Engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import attention, gate
from lib_rocm_sd.ops.attention import formula, ours, with_lse
from lib_rocm_sd.ops.attention_backward import formula as backward_formula
from lib_rocm_sd.ops.attention_backward import ours as backward_ours
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.report import Report
from tests.ops.toy_op import GFX1100

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FORWARD, BACKWARD = ("attention and lse", "rocm_sd"), ("attention backward", "rocm_sd")
PLAIN = ("attention", "rocm_sd")
"""Where no gradient is wanted."""


class Card:
    """`engine`: whose kernels take float32 too, and not float64. `spoil`: changes what the kernels
    of the gradients make.
    """

    def __init__(self) -> None:
        self.engine = Engine(identify=lambda device: GFX1100, launcher=lambda device, row: object())  # type: ignore[arg-type, return-value]
        self.spoil: Callable[[torch.Tensor], torch.Tensor] = lambda made: made

    def attend(self, call: Call[Any, Any]) -> torch.Tensor:
        inputs = call.inputs
        return formula.reference(inputs).to(inputs.q.dtype)

    def attend_and_lse(self, call: Call[Any, Any]) -> Any:
        inputs = call.inputs
        output, lse = with_lse.reference(inputs)
        return output.to(inputs.q.dtype), lse.float()

    def gradients(self, call: Call[Any, Any]) -> Any:
        inputs = call.inputs
        made = backward_formula.reference(inputs)
        return tuple(self.spoil(each.to(inputs.q.dtype).contiguous()) for each in made)


def ran(session: Session) -> Counter[tuple[str, str]]:
    """How often each variant of each op ran for a session."""
    found: Counter[tuple[str, str]] = Counter()
    for row in session.report.snapshot()["rows"]:
        found[row["op"], row["variant"]] += row["calls"]
    return +found


def told(session: Session) -> str:
    return "\n".join(session.report.snapshot()["events"])


def _not_float64(dtype: str) -> tuple[bool, str]:
    return dtype == "float64", f"{dtype}: the kernel takes fp16 and bf16"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """In the place of the process's engine, for functions and for hosts."""
    made = Card()
    monkeypatch.setattr(ours.MatrixAttention, "run", lambda variant, *given: made.attend(*given))
    monkeypatch.setattr(
        with_lse.MatrixForward, "run", lambda variant, *given: made.attend_and_lse(*given)
    )
    monkeypatch.setattr(
        backward_ours.MatrixBackward, "run", lambda variant, *given: made.gradients(*given)
    )
    for module in (ours, backward_ours):
        monkeypatch.setattr(module, "halves_only", _not_float64)
    for where in (followed, functional, attention):
        monkeypatch.setattr(where, "engine", made.engine)
    monkeypatch.setattr(attention, "identify", _here)
    monkeypatch.setattr(attention, "HALVES", FLOATS)
    monkeypatch.setattr(gate, "begin", lambda *say: None)
    return made


def _here(device: torch.device) -> DeviceInfo:
    return GFX1100


@pytest.fixture
def session() -> Session:
    """With a report of its own."""
    return Session(report=Report())
