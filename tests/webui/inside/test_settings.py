"""The section in the WebUI's settings: what it has, and that a change counts at once."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
import torch
from accordion_help import by_id, events, refresh
from conftest import FakeGpu, Start, WebUI
from PIL import Image
from vae_help import HALF, coders, runs, same, untouched

OPERATIONS = "rocm_sd_operations"
ALL = ["Attention", "VAE decode", "VAE encode", "UNet blocks", "Upscaler"]


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = True
    return made


@pytest.fixture
def webui(start: Start, gpu: FakeGpu) -> WebUI:
    return start(gpu=gpu, dtype=HALF)


def page(webui: WebUI) -> gr.Blocks:
    """The settings as the WebUI makes them of the options, which it looks at only then."""
    with gr.Blocks(analytics_enabled=False) as demo:
        for key, info in ours(webui).items():
            args = info.component_args or {}
            info.component(label=info.label, value=info.default, elem_id=f"setting_{key}", **args)
    return demo


def ours(webui: WebUI) -> dict[str, Any]:
    return {k: v for k, v in webui.shared.opts.data_labels.items() if k.startswith("rocm_sd")}


def test_section(webui: WebUI) -> None:
    found = ours(webui)
    assert list(found) == [
        OPERATIONS,
        "rocm_sd_headroom_mib",
        "rocm_sd_live_previews",
        "rocm_sd_graphs",
        "rocm_sd_spot_check",
        "rocm_sd_compare_speed",
        "rocm_sd_log_level",
        "rocm_sd_cache",
    ]
    assert {info.section for info in found.values()} == {("rocm_sd", "ROCm SD")}
    saved = {k: v for k, v in webui.shared.opts.data.items() if k in found}
    assert saved == {
        OPERATIONS: ALL,
        "rocm_sd_headroom_mib": 0,
        "rocm_sd_live_previews": True,
        "rocm_sd_graphs": "Auto",
        "rocm_sd_spot_check": True,
        "rocm_sd_compare_speed": True,
        "rocm_sd_log_level": "Warnings",
    }
    assert all("class='info'" in info.comment_after for k, info in found.items() if k in saved)
    made = [type(block) for block in page(webui).blocks.values()]
    for kind in (gr.CheckboxGroup, gr.Slider, gr.Checkbox, gr.Radio, gr.Button):
        assert kind in made
    assert not webui.errors_reported


def test_reloading_keeps_the_values(webui: WebUI) -> None:
    webui.shared.opts.set("rocm_sd_headroom_mib", 512)
    webui.initialize.reload_ui()
    assert webui.shared.opts.rocm_sd_headroom_mib == 512
    assert webui.library("hosts.webui.session").current().headroom_bytes == 512 << 20


def test_an_operation_newer_than_what_was_saved(start: Start, gpu: FakeGpu) -> None:
    """It is selected; removed later, it stays so."""

    def saved(webui: WebUI) -> None:
        webui.shared.opts.data[OPERATIONS] = ["Attention", "UNet blocks"]

    webui = start(gpu=gpu, dtype=HALF, before=saved)
    assert webui.shared.opts.rocm_sd_operations == ["Attention", "UNet blocks", "Upscaler"]
    webui.shared.opts.set(OPERATIONS, ALL[:4])
    webui.initialize.reload_ui()
    assert webui.shared.opts.rocm_sd_operations == ALL[:4]


def test_attention_may_be_excluded(webui: WebUI) -> None:
    expected = webui.txt2img(False)
    webui.shared.opts.set(OPERATIONS, ALL[1:])
    assert not webui.is_ours()  # at once
    result = webui.txt2img()
    assert 'ROCm SD: "Auto, attention left to the WebUI"' in result.info
    assert not webui.is_ours()
    title, _, status = refresh(webui)
    assert "attention left to the WebUI · VAE" in title
    assert "Settings &gt; ROCm SD excludes attention" in status
    webui.shared.opts.set(OPERATIONS, ALL)
    assert webui.is_ours()
    assert "attention: rocm_sd" in webui.txt2img().info
    assert not same(expected, result)  # the VAE was ours


@pytest.mark.parametrize(("kept", "roles"), [(ALL[:2], ["decoder"]), (ALL[::2], ["encoder"])])
def test_parts_of_the_vae_may_be_excluded(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch, kept: list[str], roles: list[str]
) -> None:
    seen = runs(webui, monkeypatch)
    webui.shared.opts.set(OPERATIONS, kept)
    webui.img2img(init_images=[Image.new("RGB", (64, 64), "red")])
    assert [role for role, _ in seen] == roles
    assert untouched(webui)
    status = refresh(webui)[2]
    other = ({"decoder", "encoder"} - set(roles)).pop()
    assert f"Settings &gt; ROCm SD excludes the VAE&#x27;s {other}" in status


def test_nothing_may_be_replaced(webui: WebUI) -> None:
    expected = webui.txt2img(False)
    webui.shared.opts.set(OPERATIONS, [])
    result = webui.txt2img()
    assert same(result, expected)
    assert "ROCm SD VAE" not in result.info


def test_a_change_while_a_picture_is_made_counts_for_the_next(webui: WebUI) -> None:
    """The lock is the WebUI's: another thread holds it while it generates."""
    lock = webui.call_queue.queue_lock
    entered, leave = threading.Event(), threading.Event()

    def generate() -> None:
        with lock:
            entered.set()
            leave.wait(600)

    thread = threading.Thread(target=generate)
    thread.start()
    entered.wait(600)
    webui.shared.opts.set(OPERATIONS, ALL[1:])
    assert webui.is_ours()
    assert webui.library("hosts.webui.settings_page").compile_again().startswith("A picture is")
    leave.set()
    thread.join()
    webui.txt2img()
    assert not webui.is_ours()


def test_headroom(webui: WebUI, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, session = webui.library("engine.memory"), webui.library("hosts.webui.session")
    device = torch.device("cuda", 0)
    for name, value in (("memory_allocated", 1 << 30), ("memory_reserved", 3 << 30)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    stats = {"allocated_bytes": 1 << 30, "reserved_bytes": 3 << 30}
    nested = {name: {"all": {"current": value}} for name, value in stats.items()}
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device: nested)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def free_bytes() -> Any:
        return memory.free_bytes(device, session.current().headroom_bytes)

    assert free_bytes() == 6 << 30
    webui.shared.opts.set("rocm_sd_headroom_mib", 2048)
    assert free_bytes() == 4 << 30
    webui.shared.opts.set("rocm_sd_headroom_mib", 16384)
    assert free_bytes() == 0
    webui.shared.opts.data["rocm_sd_headroom_mib"] = 1024  # override_settings: no onchange
    webui.txt2img()
    assert free_bytes() == 5 << 30


def test_headroom_plans_anew(webui: WebUI) -> None:
    engine, session = webui.library("engine.engine").engine, webui.library("hosts.webui.session")

    def planned() -> list[Any]:
        now = session.current()
        return [key for key in engine._routes if key[1] in (now, now.of_part("UNet"))]

    webui.txt2img()
    assert planned()
    session.establish(headroom_bytes=0)
    assert planned()
    webui.shared.opts.set("rocm_sd_headroom_mib", 64)
    assert not planned()


def test_live_previews_may_be_the_webuis(webui: WebUI, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = runs(webui, monkeypatch)
    decoder = coders(webui)[0]
    image = torch.zeros(1, 4, 8, 8, dtype=HALF)
    session = webui.library("hosts.webui.vae").session
    session.begin()
    session.establish(webui.library("hosts.ui.options").DEFAULTS)

    def preview() -> None:
        thread = threading.Thread(target=lambda: decoder(image))
        thread.start()
        thread.join()

    with torch.no_grad():
        decoder.requires_grad_(False)
        preview()
        assert len(seen) == 1
        webui.shared.opts.set("rocm_sd_live_previews", False)
        preview()
        assert len(seen) == 1
        decoder(image)  # the picture itself
        assert len(seen) == 2
    session.end()


def test_log_level(webui: WebUI, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("rocm_sd")
    for name, level in (("Errors", 40), ("Everything", 10), ("Warnings", 30)):
        webui.shared.opts.set("rocm_sd_log_level", name)
        assert log.level == level
    webui.shared.opts.set("rocm_sd_log_level", "Everything")
    webui.library("engine.engine").engine.reset()
    webui.txt2img()
    assert any("attention" in r.message and "rocm_sd" in r.message for r in caplog.records)
    webui.shared.opts.set("rocm_sd_log_level", "Warnings")


def test_nonsense_is_the_default(webui: WebUI) -> None:
    """config.json may have been edited by hand."""
    for value in (None, "x", -5, float("nan"), float("inf"), True, [1]):
        for key in ours(webui):
            webui.shared.opts.data[key] = value
        settings = webui.library("hosts.webui.settings").current()
        assert settings.headroom_mib == 0, value
        assert settings.log_level == "Warnings", value
        assert set(settings.operations) <= set(ALL), value
        assert webui.txt2img().info, value


def fill_cache(webui: WebUI) -> Path:
    cache = webui.library("cache")
    cache.write("code", "a" * 64, b"x" * 5000)
    cache.write("tune", "gfx1100/attention.json", b"{}")
    folder = cache.directory()
    assert isinstance(folder, Path)
    (folder / "mine.txt").write_text("not an entry")
    return folder


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ROCM_SD_CACHE_DIR", str(tmp_path / "<cache>"))
    return tmp_path / "<cache>"


def click(webui: WebUI, elem_id: str) -> str:
    demo = page(webui)
    kept, webui.shared.demo = webui.shared.demo, demo
    try:
        (function,) = events(webui, by_id(webui, elem_id)["id"], "click")
        return str(function())
    finally:
        webui.shared.demo = kept


def test_cache_panel(cache_folder: Path, start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    folder = fill_cache(webui)
    assert folder == cache_folder
    shown = webui.library("hosts.webui.settings_page").contents()
    assert "&lt;cache&gt;</code>" in shown and "Size: 5 KiB" in shown
    said = click(webui, "rocm_sd_cache_clear")
    assert "Removed 5 KiB" in said and "Size: 0 bytes" in said
    assert (folder / "mine.txt").is_file()
    assert webui.library("cache").read("code", "a" * 64) is None


def test_compile_again(
    cache_folder: Path, start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    webui = start(gpu=gpu)
    fill_cache(webui)
    begun: list[int] = []
    monkeypatch.setattr(type(webui.ours), "compile_again", lambda self: begun.append(1))
    said = click(webui, "rocm_sd_cache_again")
    assert begun == [1] and "Compiling. The accordion in txt2img shows the progress." in said
    assert webui.library("cache").read("code", "a" * 64) is None
    assert webui.library("cache").read("tune", "gfx1100/attention.json") == b"{}"

    module = webui.library("runtime.background")
    running = module.BackgroundState(running=True, done=1, total=2)
    monkeypatch.setattr(module, "state", lambda: running)
    for button in ("rocm_sd_cache_again", "rocm_sd_cache_clear"):
        assert "Kernels are being compiled" in click(webui, button)
    assert begun == [1]


def test_compile_again_without_a_gpu(start: Start) -> None:
    webui = start(cuda=False)
    assert "There is nothing to compile: no GPU" in click(webui, "rocm_sd_cache_again")


def test_no_cache_folder(start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    webui = start(gpu=gpu)
    cache = webui.library("cache")
    monkeypatch.setattr(cache, "directory", lambda: None)
    monkeypatch.setattr(cache, "reasons", lambda: ["/x <y> cannot be written"])
    shown = webui.library("hosts.webui.settings_page").contents()
    assert "There is no cache folder." in shown and "/x &lt;y&gt; cannot be written" in shown


def test_webui_without_options(start: Start, gpu: FakeGpu, capsys: Any) -> None:
    def remove(webui: WebUI) -> None:
        del webui.shared.OptionInfo

    webui = start(gpu=gpu, before=remove)
    assert "attention: rocm_sd" in webui.txt2img().info
    assert "no place for our settings" in capsys.readouterr().out
    assert not webui.errors_reported
