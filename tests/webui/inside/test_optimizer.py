"""What the WebUI picks, applies and undoes."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI

OURS = "ROCm SD - fused attention for AMD GPUs"
WHY_NOT = "gfx803 is not among the GPUs that this extension knows"
SD3 = "modules.models.sd3"


def titles(webui: WebUI) -> list[str]:
    return [item.title() for item in webui.sd_hijack.optimizers]


def choose(webui: WebUI, title: str) -> None:
    """Settings > Apply settings."""
    webui.shared.opts.set("cross_attention_optimization", title)


def test_automatic_picks_ours_when_usable(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    assert titles(webui)[0] == OURS
    assert webui.applied == "ROCm SD"
    assert webui.is_ours()
    assert webui.status.startswith("Attention runs on our kernel (gfx1100)")


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize("args", ["", "--opt-sdp-attention"])
def test_unsupported_device_changes_nothing(
    start: Start, capsys: pytest.CaptureFixture[str], cuda: bool, args: str
) -> None:
    plain = start(extension=False, cuda=cuda, args=args)
    expected = (titles(plain), plain.applied, [f.__name__ for f in plain.forwards])
    webui = start(gpu=FakeGpu((WHY_NOT,)), cuda=cuda, args=args)
    assert (titles(webui), webui.applied, [f.__name__ for f in webui.forwards]) == expected
    assert WHY_NOT in webui.status
    out = capsys.readouterr().out
    assert out.count(f"ROCm SD: not used on this machine: {WHY_NOT}") == 1


def test_failed_self_test_changes_nothing(start: Start, gpu: FakeGpu) -> None:
    gpu.wrong = True
    webui = start(gpu=gpu)
    assert webui.applied == "Doggettx"
    assert OURS not in titles(webui)
    assert "self-test failed" in webui.status


def test_a_broken_engine_does_not_stop_the_start(
    start: Start, gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*args: Any) -> list[str]:
        raise KeyError("planted")

    webui = start(gpu=gpu)
    webui.library("engine.engine").engine.usable = explode
    for _ in range(2):
        webui.sd_hijack.list_optimizers()
        assert OURS not in titles(webui)
        assert webui.status.startswith("Not active: KeyError")
    assert caplog.text.count("Traceback") == 2  # caught in two places
    assert "in explode" in caplog.text


def test_command_line_flags(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, args="--opt-sdp-attention")
    assert webui.applied == "sdp"
    assert "a command-line flag makes 'Automatic' pick 'sdp - scaled dot product'" in webui.status
    assert start(gpu=gpu, args="--opt-sdp-attention --opt-rocm-sd").applied == "ROCm SD"


def test_settings_switch_back_and_forth(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    ours = webui.forwards
    choose(webui, "sdp - scaled dot product")
    assert webui.applied == "sdp"
    assert not webui.is_ours()
    assert "Settings > Optimizations" in webui.status
    choose(webui, OURS)
    assert webui.forwards == ours
    choose(webui, "None")
    assert webui.applied is None
    assert {f.__name__ for f in webui.forwards} == {"attention_CrossAttention_forward", "forward"}
    assert webui.status.startswith("Ready, but not in use")
    choose(webui, "Automatic")
    assert webui.forwards == ours


def test_undo_restores_identity(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    ours = webui.ours
    webui.sd_hijack.current_optimizer = None
    ours.undo()
    webui.sd_hijack.undo_optimizations()
    before = webui.forwards
    ours.apply()
    ours.apply()
    assert webui.is_ours()
    ours.undo()
    assert all(a is b for a, b in zip(webui.forwards, before, strict=True))
    ours.undo()
    defaults = webui.sd_hijack_optimizations
    assert webui.forwards[1] is defaults.diffusionmodules_model_AttnBlock_forward
    assert webui.forwards[3] is defaults.sgm_diffusionmodules_model_AttnBlock_forward


def test_undo_restores_what_another_extension_had_put_there(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    webui.ours.undo()

    def theirs(self: Any, x: Any, context: Any = None, mask: Any = None, **kwargs: Any) -> Any:
        return x

    webui.targets[0][1].forward = theirs  # type: ignore[attr-defined]
    webui.ours.apply()
    assert webui.is_ours()
    webui.ours.undo()
    assert webui.forwards[0] is theirs


def test_loading_a_model_hijacks_again(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    ours = webui.forwards
    for _ in range(3):
        webui.sd_models.reload_model_weights(forced_reload=True)
        assert webui.forwards == ours
    webui.sd_hijack.model_hijack.undo_hijack(webui.shared.sd_model)
    assert not webui.is_ours()
    webui.sd_hijack.apply_optimizations()
    assert webui.forwards == ours


@pytest.mark.parametrize("family", ["ldm", "sgm"])
def test_host_without_one_of_the_families(
    start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    webui = start(gpu=gpu)
    webui.ours.undo()
    for name in ("attention", "diffusionmodules.model"):
        monkeypatch.setitem(sys.modules, f"{family}.modules.{name}", None)
    webui.ours.apply()
    monkeypatch.undo()
    replaced = [f.__module__.startswith("lib_rocm_sd.") for f in webui.forwards]
    assert replaced == [family != "ldm"] * 2 + [family != "sgm"] * 2


def test_model_loaded_before_the_list_is_filled(start: Start, gpu: FakeGpu) -> None:
    """Some extension asks for the model early: the WebUI applies once the list is there."""
    webui = start(gpu=gpu, before=lambda webui: webui.sd_models.load_model())
    assert webui.applied == "ROCm SD"


def test_two_threads_apply_at_once(start: Start, gpu: FakeGpu) -> None:
    """After "Reload UI" the thread that loads the model may apply while the UI is made."""
    webui = start(gpu=gpu)
    webui.sd_hijack.current_optimizer = None
    webui.ours.undo()
    before = webui.forwards
    threads = [
        threading.Thread(target=lambda: [webui.ours.apply() for _ in range(300)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert webui.is_ours()
    webui.ours.undo()
    assert webui.forwards == before


def test_step_aside_picks_what_the_list_without_us_gives(start: Start, gpu: FakeGpu) -> None:
    for args in ("", "--opt-sdp-no-mem-attention", "--disable-opt-split-attention"):
        plain = start(extension=False, args=args)
        expected = [f.__name__ for f in plain.forwards]
        webui = start(gpu=gpu, args=args)
        choose(webui, OURS)
        choose(webui, "Automatic")
        webui.ours.step_aside(True)
        assert [f.__name__ for f in webui.computing] == expected
        webui.ours.step_aside(False)
        choose(webui, OURS)
        assert webui.is_ours()


def test_sd3_transformers_attention_is_ours_and_its_text_encoders_is_not(
    start: Start, gpu: FakeGpu
) -> None:
    """A function that its module has imported by name; v is by heads, a view of one product."""
    sd3: list[Any] = []

    def load(webui: WebUI) -> None:
        sd3[:] = (importlib.import_module(f"{SD3}.{name}") for name in ("mmdit", "other_impls"))

    webui = start(gpu=gpu, dtype=torch.float16, before=load)
    mmdit, others = sd3
    torch.manual_seed(0)
    layer = mmdit.SelfAttention(64, 4, qkv_bias=True).to(torch.float16).requires_grad_(False)
    x = torch.randn(2, 93, 64).to(torch.float16)
    theirs, calls = others.attention, webui.library("hosts.webui.attention").calls
    assert mmdit.attention is not theirs and not isinstance(theirs, type(mmdit.attention))
    calls.clear()
    ours = layer(x)
    assert calls.ours["attention"] == 1 and not calls.left
    assert gpu.seen[-1][2].shape == (2, 93, 4, 16)  # v
    webui.ours.step_aside(True)
    expected = layer(x)
    assert calls.ours["attention"] == 1
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=2e-2)
    mmdit.attention, mine = lambda *args: torch.zeros(()), mmdit.attention
    assert list(webui.ours.displaced_by().values()) == [["SD 3's attention"]]
    mmdit.attention = mine
    choose(webui, "sdp - scaled dot product")
    assert mmdit.attention is theirs
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_sd3s_blocks_are_ours(start: Start, gpu: FakeGpu, autocast: bool) -> None:
    """As the WebUI calls them, under its autocast, too."""
    sd3: list[Any] = []

    def load(webui: WebUI) -> None:
        sd3.append(importlib.import_module(f"{SD3}.mmdit"))

    webui = start(gpu=gpu, dtype=torch.float16, before=load)
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(
        sd3[0].JointBlock(64, 4, mlp_ratio=4.0, qkv_bias=True, pre_only=ends)
        for ends in (False, True)
    )
    blocks = blocks.half().eval().requires_grad_(False)
    given = [torch.randn(shape).half() for shape in ((2, 7, 64), (2, 24, 64), (2, 64))]

    def step() -> torch.Tensor:
        context, x, c = given
        with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=autocast):
            for block in blocks:
                context, x = block(context, x, c=c)
        return x

    expected, unet = step(), webui.library("hosts.webui.unet")
    session = webui.library("engine.session").DEFAULT
    taken = unet.UnetTakeover([blocks], session, unet.WebUIHook())
    taken.take_over()
    ours = step()
    (row,) = taken.report()
    assert (row.kind, row.ours, row.total) == ("joint transformer block", 2, 2)
    assert not torch.equal(ours, expected)
    torch.testing.assert_close(ours, expected.to(ours), atol=1e-2, rtol=2e-2)
    taken.give_back()
    assert torch.equal(step(), expected)
