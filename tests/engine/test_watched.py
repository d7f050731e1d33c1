"""The first launch of a kernel class for a caller, which is waited for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from lib_rocm_sd.engine import route as route_module
from lib_rocm_sd.engine.route import Route, watched
from lib_rocm_sd.ops.base import Call
from tests.ops.toy_op import Doubler, op_of


class Written(NamedTuple):
    x: torch.Tensor
    out: torch.Tensor | None


def add(call: Call[Any, Written]) -> torch.Tensor | None:
    inputs = call.inputs
    return None if inputs.out is None else inputs.out.add_(inputs.x)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_was_written_in_place_is_as_before_if_the_device_fails(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another variant adds to it then."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(route_module, "synchronize", fail)
    monkeypatch.setattr(route_module, "is_recording", lambda device: False)
    op = op_of(Doubler("only"))
    plan: Any = SimpleNamespace(variant=op.variants[0], config=None)
    route = Route(add, None, None, torch.device("cuda"), plan)  # type: ignore[arg-type]
    gate: Any = SimpleNamespace(launching=lambda asked, stage: nullcontext())
    out = torch.ones(3) if in_place else None
    first = watched(route, gate, op)
    with pytest.raises(RuntimeError, match="illegal"):
        first(Call(None, Written(torch.ones(3), out)))
    assert out is None or torch.equal(out, torch.ones(3))
    monkeypatch.setattr(route_module, "synchronize", lambda device: None)
    first(Call(None, Written(torch.ones(3), out)))
    assert route.run is add and (out is None or torch.equal(out, torch.full((3,), 2.0)))
