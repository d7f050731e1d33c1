"""docs/pytorch.md: its examples run as they stand, its table is that of the operators."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd import torch_ops
from lib_rocm_sd.lab.upscaler_models import RRDBNet, settle
from tests.test_readme import ROOT

TEXT = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")


def test_the_table_is_that_of_the_schemas() -> None:
    told = dict(re.findall(r"^\| `(\w+)\((.*)\)` \|", TEXT, re.MULTILINE))
    assert set(told) == {row.name for row in torch_ops.OPS}
    for row in torch_ops.OPS:
        arguments = getattr(torch.ops.rocm_sd, row.name).default._schema.arguments
        spoken = []
        for each in arguments:
            value = f'"{each.default_value}"' if str(each.type) == "str" else each.default_value
            value = "1e-5" if value == 1e-5 else value
            spoken.append(f"{each.name}={value}" if each.has_default_value() else each.name)
        assert told[row.name] == ", ".join(spoken)


def test_its_examples_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other. Inductor would compile C++ for a minute: aot_eager makes its graphs."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    if not torch_ops.KEEPS_WHOLE:
        pytest.skip("this torch is not given the operators (before 2.4)")
    try:
        from torch._dynamo.backends.registry import lookup_backend
    except ImportError as error:
        pytest.skip(f"torch.compile cannot be used here: {error}")
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    network = settle(RRDBNet(width=16, blocks=1))
    names: dict[str, Any] = {"descriptor": SimpleNamespace(model=network)}
    names["photo"] = torch.rand(1, 3, 17, 9)
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) >= 6
    for example in examples:
        exec(compile(example, "docs/pytorch.md", "exec"), names)
    assert names["mixed"].shape == (2, 64, 320) and names["total"].shape == (2, 64, 320)
    assert names["pixels"].shape == (1, 16, 16, 128)
    assert names["made"].shape == (2, 96, 64)
    assert names["picture"].shape == (1, 3, 68, 36)
    assert {graph.count("rocm_sd.attention.default") for graph in graphs} == {2}
    x, text = torch.randn(2, 35, 64), torch.randn(2, 77, 48)
    with names["patched"](names["pipeline"], vae=False), torch.no_grad():
        made, right = (
            f(x, encoder_hidden_states=text) for f in (names["compiled"], names["block"])
        )
    assert torch.allclose(made, right, atol=1e-5)
    out = capsys.readouterr().out
    assert "q (2, 64, 8, 40) torch.float32 cpu" in out
    (name,) = re.findall(r"^`(rocm_sd \| .*)`\. torch", TEXT, re.MULTILINE)
    assert repr([name]) in out
