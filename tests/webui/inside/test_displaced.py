"""Another extension puts its own forwards in the place of ours, or has them beside us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accordion_help import TITLE, refresh
from conftest import FakeGpu, Start, WebUI
from test_generation import same


class Wrappers:
    """An extension that wraps all four forwards, and adds a little to what they give."""

    def __init__(self, webui: WebUI) -> None:
        self.calls = 0
        self.forwards = []
        for _, cls in webui.targets:
            self.forwards.append(self.around(cls.forward))  # type: ignore[attr-defined]
            cls.forward = self.forwards[-1]  # type: ignore[attr-defined]

    def around(self, inner: Any) -> Any:
        def wrapped(module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return inner(module, x, *args, **kwargs) + 0.125

        return wrapped


def replace_all(webui: WebUI) -> None:
    hosts = webui.sd_hijack_optimizations

    def taken(module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(module, "to_q"):
            return hosts.split_cross_attention_forward_v1(module, x, *args, **kwargs)
        return hosts.sdp_attnblock_forward(module, x)

    for _, cls in webui.targets:
        cls.forward = taken  # type: ignore[attr-defined]


@pytest.mark.parametrize("args", ["", "--opt-split-attention-v1 --opt-rocm-sd"])
@pytest.mark.parametrize("family", ["ldm", "sgm"])
def test_a_wrapper_outlives_enable_off(start: Start, gpu: FakeGpu, family: str, args: str) -> None:
    plain = start(extension=False, family=family, args=args.replace("--opt-rocm-sd", ""))
    Wrappers(plain)
    expected = plain.txt2img()

    webui = start(gpu=gpu, family=family, args=args)
    wrappers = Wrappers(webui)
    for _ in range(2):
        used, calls = len(gpu.seen), wrappers.calls
        assert same(webui.txt2img(False), expected)
        assert wrappers.calls > calls
        assert len(gpu.seen) == used
        assert webui.forwards == wrappers.forwards
        calls = wrappers.calls
        result = webui.txt2img(True)
        assert not same(result, expected)
        assert wrappers.calls > calls
        assert len(gpu.seen) > used
        assert webui.forwards == wrappers.forwards


def test_undo_leaves_a_wrapper_which_gets_the_webuis_own(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    cls = webui.targets[0][1]
    torch.manual_seed(3)
    module: Any = cls(query_dim=80, context_dim=80, heads=2, dim_head=40).eval()
    x = torch.randn(1, 6, 80)
    inner, outer = cls.forward, Wrappers(webui).forwards[0]  # type: ignore[attr-defined]
    webui.ours.undo()
    assert cls.forward is outer  # type: ignore[attr-defined]
    default = webui.library("hosts.webui.host").module("modules.hypernetworks.hypernetwork")
    used = len(gpu.seen)
    with torch.no_grad():
        theirs = default.attention_CrossAttention_forward(module, x)
        assert torch.equal(inner(module, x), theirs)
        assert torch.equal(module(x), theirs + 0.125)
        webui.ours.apply()
        webui.ours.step_aside(True)
        doggettx = webui.sd_hijack_optimizations.split_cross_attention_forward(module, x)
        assert torch.equal(module(x), doggettx)
    assert len(gpu.seen) == used


def test_status_names_who_replaced_ours(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    webui.txt2img()
    replace_all(webui)
    used = len(gpu.seen)
    generated = webui.txt2img(True, "Auto", "Off")
    assert len(gpu.seen) == used
    title, _, status = refresh(webui, True, "Auto", "Off")
    assert title.startswith(f"{TITLE}: Auto · attention left to another extension")
    assert "another extension&#x27;s code" in status
    assert "taken of test_displaced.py has replaced ldm&#x27;s CrossAttention and " in status
    assert "taken of test_displaced.py has replaced" in webui.status
    assert "attention left to another extension" in generated.infotexts[0]
    webui.sd_hijack.apply_optimizations()
    assert "has replaced" not in refresh(webui)[2] + webui.status


def test_status_of_a_wrapper_that_passes_calls_on(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    Wrappers(webui)
    webui.txt2img()
    title, _, status = refresh(webui)
    assert title.startswith(f"{TITLE}: Auto · attention on gfx1100")
    assert "our kernel, " in status
    assert "wrapped of test_displaced.py has replaced ldm&#x27;s CrossAttention" in status


def test_a_stand_in_that_does_more_than_set_forwards(start: Start, gpu: FakeGpu) -> None:
    """The AMD fork's "Flash attention" replaces torch's own function, too, and its undo() is
    wrong where apply() was not called.
    """
    webui = start(gpu=gpu)

    class Flash(webui.sd_hijack_optimizations.SdOptimizationSdp):  # type: ignore[name-defined,misc]
        name = "Flash attention"
        priority = 100
        applied: list[str] = []  # noqa: RUF012

        def apply(self) -> None:
            super().apply()
            self.applied.append("applied")

        def undo(self) -> None:
            super().undo()
            assert self.applied.pop() == "applied"

    flash = Flash()
    webui.sd_hijack.optimizers.append(flash)
    webui.sd_hijack.optimizers.sort(key=lambda item: item.priority, reverse=True)
    sdp = webui.sd_hijack_optimizations.scaled_dot_product_attention_forward
    wrappers = Wrappers(webui)
    for _ in range(2):
        webui.ours.step_aside(True)
        webui.ours.step_aside(True)
        assert flash.applied == ["applied"]
        assert webui.computing[0] is sdp
        webui.ours.step_aside(False)
        assert flash.applied == []
        assert webui.computing[0] is sdp
    assert webui.forwards == wrappers.forwards
    webui.ours.step_aside(True)
    webui.sd_hijack.apply_optimizations()
    assert flash.applied == ["applied"]
    webui.ours.step_aside(False)
    assert flash.applied == []
    assert webui.is_ours()
