"""The accordion in real gradio: its controls, its title line, the status table."""

from __future__ import annotations

import re
from typing import Any

import gradio as gr
import pytest
from accordion_help import TITLE, by_id, components, events, refresh, script
from conftest import FakeGpu, Start, WebUI
from vae_help import HALF, add_script

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = True
    return made


def cells(status: str, operation: str) -> list[list[str]]:
    """What the table has beside an operation: runs now, why."""
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th><td.*?>(.*?)</td><td.*?>(.*?)</td>", status)
    return [[runs, why] for name, runs, why in rows if name == operation]


@pytest.mark.parametrize("tab", ["txt2img", "img2img"])
def test_controls(start: Start, gpu: FakeGpu, tab: str) -> None:
    webui = start(gpu=gpu, serve=True)
    controls = script(webui, tab).controls
    default = webui.library("hosts.ui.options").UNET_DEFAULT
    values = [True, "Auto", "Auto", 0, default, "Off", "", "Auto"]
    assert [control.value for control in controls] == values
    assert all(len(control.webui_tooltip) > 40 for control in controls)
    # ui-config.json keeps exactly these classes, by their labels.
    assert [type(control) for control in controls] == [
        *(gr.Checkbox, gr.Radio, gr.Radio, gr.Number, gr.Radio, gr.Radio, gr.Textbox, gr.Radio)
    ]
    info = script(webui, tab).api_info
    assert [(arg.label, arg.value, arg.choices) for arg in info.args] == [
        ("Enable", True, None),
        ("Optimization Level", "Auto", ["Auto", "Performance", "Memory"]),
        ("VAE", "Auto", ["Off", "Auto", "Always banded"]),
        ("VAE memory budget (MiB, 0 = Auto)", 0, None),
        ("UNet", default, ["Off", "Auto"]),
        ("Several GPUs", "Off", ["Off", "Auto"]),
        ("Cards (numbers, empty: all)", "", None),
        ("Upscaler", "Auto", ["Off", "Auto"]),
    ]
    assert controls[0].elem_id == f"script_{tab}_rocm_sd_optimization_enable"
    accordions = [c for c in components(webui, "accordion") if c["label"].startswith(TITLE)]
    assert len({c["elem_id"] for c in accordions}) == 2
    assert not any(c["open"] for c in accordions)
    assert not webui.errors_reported


def test_title_says_what_runs(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    (first, _) = [c for c in components(webui, "accordion") if c["label"].startswith(TITLE)]
    assert first["label"] == f"{TITLE}: Auto · attention on gfx1100 · VAE ready"
    webui.txt2img()
    assert refresh(webui)[0] == f"{TITLE}: Auto · attention on gfx1100 · VAE whole frame"
    assert refresh(webui, True, "Memory", "Always banded")[0].endswith(
        "Memory · attention on gfx1100 · VAE in bands"
    )
    assert refresh(webui, True, "Memory", "Off")[0].endswith("attention on gfx1100 · VAE off")
    assert refresh(webui, False)[0] == f"{TITLE}: off"
    webui.shared.opts.set("cross_attention_optimization", "Doggettx")
    assert refresh(webui)[0].endswith("Auto · attention left to the WebUI · VAE whole frame")


def test_title_without_a_gpu_of_ours(start: Start) -> None:
    webui = start(cuda=False)
    title, _, status = refresh(webui)
    assert title == f"{TITLE}: not active, no supported GPU"
    assert [runs for runs, _ in cells(status, "Attention")] == ["the WebUI&#x27;s InvokeAI"]
    assert "no GPU: this is the CPU" in cells(status, "VAE decode")[0][1]


def test_kernel_that_fails_its_check(start: Start, gpu: FakeGpu) -> None:
    gpu.wrong, gpu.convs = True, False
    webui = start(gpu=gpu)
    title, _, status = refresh(webui)
    assert title == f"{TITLE}: not active, the kernels cannot be used"
    ((runs, why),) = cells(status, "Attention")
    assert runs == "the WebUI&#x27;s Doggettx" and "self-test failed" in why


def test_table_after_a_generation(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    before = refresh(webui)[2]
    assert [runs for runs, _ in cells(before, "Attention")] == ["our kernel (gfx1100)"]
    assert cells(before, "VAE decode")[0][0] == "our kernels"
    webui.txt2img()
    after = refresh(webui)[2]
    (attention,) = cells(after, "Attention")
    assert re.fullmatch(r"our kernel, \d+ calls", attention[0])
    assert "nothing" in attention[1]
    assert cells(after, "VAE decode")[0][0] == "our kernels, whole frame"
    # The fake GPU launches nothing, so torch computes the convolutions: the table says why.
    (convolution,) = cells(after, "VAE decode, convolution")
    assert convolution[0].startswith("torch, ")
    assert convolution[1].startswith("our kernel: self-test failed")
    assert "and " in convolution[1] and "more" in convolution[1]


def test_slower_ways_need_no_reason(start: Start, gpu: FakeGpu) -> None:
    rows = start(gpu=gpu).library("hosts.ui.status")
    reasons = {
        "rocm_sd": ["head_dim 41 is not a multiple of 8", "and another"],
        "torch + rocm_sd": ["comes after sdpa"],
        "sliced": ["comes after sdpa", "slow"],
    }
    row = {"part": "UNet", "op": "attention", "family": "attention", "variant": "sdpa"}
    row |= {"calls": 1, "reasons": reasons}
    (shown,) = rows.rows_of({"rows": [row]})["UNet", "attention"]
    assert shown.operation == "Attention"
    assert shown.runs == "torch's SDPA, 1 call"
    assert shown.why == ("our kernel: head_dim 41 is not a multiple of 8; and another",)


def test_attention_left_to_the_host_by_failures(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)

    def explode(*args: Any) -> Any:
        raise RuntimeError("planted")

    webui.library("functional").attention = explode
    webui.txt2img()
    left = [runs for runs, _ in cells(refresh(webui)[2], "Attention")]
    assert any(re.fullmatch(r"the WebUI&#x27;s own code, \d+ calls?", runs) for runs in left)


def test_vae_left_to_the_host(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)  # float32
    title, _, status = refresh(webui)
    assert title.endswith("attention on gfx1100 · VAE left to the WebUI")
    assert "its weights are float32" in cells(status, "VAE decode")[0][1]

    webui = start(gpu=gpu, dtype=HALF)
    decoder = webui.shared.sd_model.first_stage_model.decoder
    add_script(webui, process=lambda *args: setattr(decoder, "forward", lambda x: x))
    decoder.forward = lambda x: type(decoder).forward(decoder, x)
    webui.txt2img()
    title, _, status = refresh(webui)
    assert title.endswith("VAE left to the WebUI")
    assert "another extension has replaced its forward" in cells(status, "VAE decode")[0][1]


def test_explanation_changes_with_the_level(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    lines = webui.library("hosts.ui.accordion").EXPLANATIONS
    assert len(set(lines.values())) == 3
    assert max(map(len, lines.values())) <= 60
    for level in ("Auto", "Performance", "Memory"):
        assert lines[level] in refresh(webui, True, level)[1]


def test_every_control_refreshes(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    for control in script(webui).controls:
        function, *_ = events(webui, control._id, "change")
        assert "our kernel" in function(True, "Auto", "Auto", 0, "Off")[2]
    webui.shared.opts.set("cross_attention_optimization", "Doggettx")
    assert "&#x27;Doggettx&#x27;" in function(True, "Auto", "Auto", 0, "Off")[2]


def test_nonsense_from_the_page(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    for values in ((None,) * 5, ("x", "Turbo", "?", -3, "On")):
        assert refresh(webui, *values)[0].startswith(f"{TITLE}: Auto · attention on gfx1100"), (
            values
        )


def test_hidden_button_is_not_kept_in_ui_config(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    button = by_id(webui, "script_txt2img_rocm_sd_optimization_refresh")
    assert button["props"]["visible"] is False
    assert "rocm-sd-refresh" in button["props"]["elem_classes"]
    assert webui.shared.demo.blocks[button["id"]].do_not_save_to_config is True


def test_everything_is_escaped(start: Start) -> None:
    webui = start(gpu=FakeGpu((HOSTILE,)))
    title, explanation, status = refresh(webui, True, HOSTILE, HOSTILE, HOSTILE)
    assert "<img" not in title + explanation + status
    assert "&lt;img src=x onerror=alert(1)&gt;" in status

    page = webui.library("hosts.ui.status")
    parts = page.Status(
        HOSTILE,
        (HOSTILE,),
        (page.StatusRow(HOSTILE, HOSTILE, (HOSTILE,)),),
        (HOSTILE,),
        failure=page.Failure(HOSTILE, HOSTILE),
        speed_tab=f'"{HOSTILE}"',
    )
    shown = page.html(parts)
    assert "<img" not in shown and 'data-tab=""' not in shown
    assert shown.count("&lt;img") == 9


def test_title_is_one_short_line(start: Start, gpu: FakeGpu) -> None:
    page = start(gpu=gpu).library("hosts.ui.status")
    assert page.title(page.Status("a\n  b\tc")) == f"{TITLE}: a b c"
    assert len(page.title(page.Status("x" * 500))) == page.TITLE_LENGTH


def background(webui: WebUI, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    module = webui.library("runtime.background")
    shown = module.BackgroundState(**fields)
    monkeypatch.setattr(module, "state", lambda: shown)


def test_progress_while_kernels_are_compiled(
    start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    webui = start(gpu=gpu)
    background(webui, monkeypatch, running=True, done=3, total=12)
    engine = webui.library("engine.engine").engine
    monkeypatch.setattr(engine, "pending", lambda op: "compiling, 3 of 12 kernels are done")
    title, _, status = refresh(webui)
    assert title == f"{TITLE}: Auto · compiling kernels, 3 of 12"
    assert "rocm-sd-progress" in status and "max='12' value='3'" in status
    ((runs, why),) = cells(status, "Attention")
    assert runs == "the WebUI&#x27;s Doggettx" and why == "compiling, 3 of 12 kernels are done"
    background(webui, monkeypatch, done=12, total=12)
    monkeypatch.setattr(engine, "pending", lambda op: "")
    title, _, status = refresh(webui)
    assert "attention on gfx1100" in title and "rocm-sd-progress" not in status


def test_failed_compilation(start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    webui = start(gpu=gpu)
    background(
        webui, monkeypatch, done=3, total=12, failure="clang: no <gfx1100>", log_path="/c/<x>.log"
    )
    status = refresh(webui)[2]
    assert "Compiling failed:</strong> clang: no &lt;gfx1100&gt;" in status
    assert "<code>/c/&lt;x&gt;.log</code>" in status
    assert "Compile again" in status and "pip install ziglang" in status


def test_link_to_the_speed_test(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    callbacks = webui.script_callbacks.callback_map["callbacks_ui_tabs"]
    kept = list(callbacks)
    callbacks.clear()
    assert "rocm-sd-link" not in refresh(webui)[2]
    callbacks.extend(kept)

    def tab() -> list[Any]:
        return []

    tab.__module__ = "lib_rocm_sd.hosts.webui.speedtest"
    webui.script_callbacks.on_ui_tabs(tab)
    assert 'data-tab="Speed test"' in refresh(webui)[2]


def test_look_never_raises(start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    webui = start(gpu=gpu)

    def explode(*args: Any) -> Any:
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr(webui.library("report"), "snapshot", explode)
    title, _, status = refresh(webui)
    assert title == f"{TITLE}: not active, see below"
    assert "RuntimeError: &lt;img" in status
