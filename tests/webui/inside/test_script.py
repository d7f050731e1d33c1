"""The script's arguments, infotext, and WebUIs that lack something."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accordion_help import refresh
from conftest import CHECKOUT, FakeGpu, Start, WebUI

TITLE = "ROCm SD Optimization"


def script(webui: WebUI, tab: str = "txt2img") -> Any:
    return getattr(webui.scripts, f"scripts_{tab}").script(TITLE)


def test_infotext_names_what_ran(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    assert 'ROCm SD: "Auto, attention: rocm_sd"' in webui.txt2img().info
    result = webui.txt2img(True, "Performance", n_iter=2)
    assert all('ROCm SD: "Performance, attention: ' in text for text in result.infotexts)
    assert result.images[0].info["parameters"] == result.infotexts[0]
    assert "ROCm SD: off" in webui.txt2img(False).info

    def explode(*args: Any) -> torch.Tensor:
        raise RuntimeError("planted")

    webui.library("functional").attention = explode
    assert 'ROCm SD: "Auto, left to the WebUI: ' in webui.txt2img().info


def test_infotext_round_trip(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    for enable, level in [(True, "Auto"), (True, "Performance"), (True, "Memory"), (False, "Auto")]:
        info = webui.txt2img(enable, level).info
        for tab in ("txt2img", "img2img"):
            controls = script(webui, tab).controls
            updates = webui.infotext_utils.paste(tab, info)
            pasted = [value_of(updates[control]) for control in controls[:5]]
            assert not any(control in updates for control in controls[5:7])  # change no picture
            unet = webui.library("hosts.ui.options").UNET_DEFAULT if enable else None
            assert pasted == [enable, level if enable else None, None, None, unet]
            assert value_of(updates[controls[7]]) is None  # nothing was upscaled
            names = ["ROCm SD", "ROCm SD UNet", "ROCm SD VAE", "ROCm SD Upscaler"]
            assert script(webui, tab).paste_field_names == names


def value_of(update: Any) -> Any:
    """What a gradio update sets; None where it leaves the component alone."""
    return update.get("value") if isinstance(update, dict) else update.value


def test_foreign_infotext_changes_nothing(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    for text in ("a cat\nSteps: 3, Seed: 1, Size: 64x64", 'a\nSteps: 1, ROCm SD: "?", Seed: 2'):
        updates = webui.infotext_utils.paste("txt2img", text)
        assert value_of(updates[script(webui).controls[1]]) is None
    updates = webui.infotext_utils.paste("txt2img", "a cat\nSteps: 3, Seed: 1")
    assert value_of(updates[script(webui).controls[0]]) is None


API_ARGS: dict[str, tuple[list[Any], str]] = {
    "none": ([], "Auto, attention"),
    "one": ([True], "Auto, attention"),
    "both": ([True, "Memory"], "Memory, attention"),
    "off": ([False], "off"),
    "off in words": (["False", "Memory"], "off"),
    "numbers": ([1, "performance"], "Performance, attention"),
    "nulls": ([None, None, None, None], "Auto, attention"),
    "four": ([True, "memory", "off", 512], "Memory, attention"),
    "five": ([True, "memory", "off", 512, "auto"], "Memory, attention"),
}


@pytest.mark.parametrize("name", [TITLE, TITLE.lower()])
def test_api(start: Start, gpu: FakeGpu, name: str) -> None:
    webui = start(gpu=gpu)
    for args, expected in API_ARGS.values():
        info = webui.by_api({name: {"args": args}})
        assert f'ROCm SD: "{expected}' in info or f"ROCm SD: {expected}" in info, args
        assert not webui.errors_reported, args


def test_api_without_arguments(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    assert "Auto, attention: rocm_sd" in webui.by_api()
    assert "Auto, attention: rocm_sd" in webui.by_api({TITLE: {}})


BUDGET = "VAE memory budget (MiB, 0 = Auto)"


BAD_ARGS: list[tuple[list[Any], str]] = [
    (["maybe", "Auto"], "Enable is 'maybe', expected true or false; True is used"),
    ([True, "Turbo"], "Optimization Level is 'Turbo', expected one of Auto, Performance"),
    ([True, 3], "Optimization Level is 3, expected one of"),
    ([{"a": 1}, ["x"]], "Enable is {'a': 1}"),
    ([True, "Auto", "On"], "VAE is 'On', expected one of Off, Auto, Always banded; Auto is"),
    ([True, "Auto", "Auto", -1], f"{BUDGET} is -1, expected 0 or more; 0 is used"),
    ([True, "Auto", "Auto", "9" * 9000], f"{BUDGET} is '{'9' * 39}…, expected"),
    (["x" * 9000], f"Enable is '{'x' * 39}…, expected true"),
    ([True, ["x" * 9000]], f"Optimization Level is ['{'x' * 38}…, expected"),
    ([True, "Auto", "Auto", 0, "On"], "UNet is 'On', expected one of Off, Auto; "),
    ([True, "Auto", "Auto", "lots"], "VAE memory budget (MiB, 0 = Auto) is 'lots', expected"),
    ([True, "Auto", "Auto", float("nan")], "VAE memory budget (MiB, 0 = Auto) is nan"),
    ([True, "Auto", "Auto", True], "VAE memory budget (MiB, 0 = Auto) is True, expected"),
]


def test_bad_arguments(start: Start, gpu: FakeGpu, capsys: Any) -> None:
    webui = start(gpu=gpu)
    for args, message in BAD_ARGS:
        capsys.readouterr()
        info = webui.by_api({TITLE: {"args": args}})
        assert 'ROCm SD: "Auto, attention: rocm_sd"' in info, args
        assert capsys.readouterr().out.count(f"ROCm SD: {message}") == 1, args


def test_tensors_are_never_printed(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """The AMD fork replaces torch.Tensor.__str__ by a function that returns None."""
    monkeypatch.setattr(torch.Tensor, "__str__", lambda self: None)
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda self: None)
    webui = start(gpu=gpu)
    gpu.floats = False
    webui.txt2img()
    webui.txt2img(False)
    assert not webui.errors_reported


def forge(webui: WebUI) -> None:
    """Forge dfdcbab6: nothing calls the callback; no SdOptimization; an empty sd_hijack."""
    optimizer = webui.sd_hijack_optimizations.SdOptimizationDoggettx()
    del webui.sd_hijack_optimizations.SdOptimization
    for name in ("apply_optimizations", "list_optimizers", "optimizers", "current_optimizer"):
        delattr(webui.sd_hijack, name)
    webui.sd_hijack.model_hijack.apply_optimizations = optimizer.apply


def reforge(webui: WebUI) -> None:
    """reForge 3b56b268: on_list_optimizers itself is commented out."""
    forge(webui)
    del webui.script_callbacks.on_list_optimizers


def old(webui: WebUI) -> None:
    """A WebUI without the callbacks that came later."""
    del webui.script_callbacks.on_before_ui
    del webui.script_callbacks.on_script_unloaded


@pytest.mark.parametrize("lacks", [forge, reforge], ids=lambda f: f.__name__)
def test_host_without_optimizers(start: Start, gpu: FakeGpu, lacks: Any) -> None:
    """The script loads, the accordion says why nothing runs, generations are the host's."""

    expected = start(extension=False, before=lacks).txt2img()
    webui = start(gpu=gpu, before=lacks)
    for args in ((), (False,), (True, "Memory")):
        result = webui.txt2img(*args)
        assert torch.equal(result.decoded[0], expected.decoded[0])
        assert "ROCm SD" not in result.info
    label, _, status = refresh(webui)
    assert label == f"{TITLE}: not active in this WebUI"
    assert "this WebUI has no place for an attention optimizer" in status
    assert len(gpu.seen) == 0
    webui.initialize.reload_ui()
    assert script(webui) is not None
    assert not webui.errors_reported


@pytest.mark.double_only("a WebUI's own packages ask for torch's version too")
def test_a_torch_that_is_too_old(start: Start, monkeypatch: Any, capsys: Any) -> None:
    expected = start(extension=False).txt2img()
    monkeypatch.setattr(torch, "__version__", "2.0.1+rocm5.4.2")
    capsys.readouterr()
    webui = start()
    assert script(webui) is None
    result = webui.txt2img()
    assert result.decoded[0].equal(expected.decoded[0]) and result.info == expected.info
    assert not webui.errors_reported
    assert capsys.readouterr().out.count("torch 2.0.1+rocm5.4.2 is too old, 2.1 or newer") == 1
    ours = [each for each in webui.callbacks().values() if "lib_rocm_sd" in repr(each)]
    assert not ours


def test_host_without_later_callbacks(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, before=old)
    assert webui.is_ours()
    assert "rocm_sd" in webui.txt2img().info
    webui.initialize.reload_ui()
    assert webui.is_ours()
    assert not webui.errors_reported


def test_loading_leaves_sys_path_alone(start: Start, tmp_path: Path) -> None:
    """The real library, imported while the script is executed; data elsewhere, through a link."""
    before = list(sys.path)
    webui = start(cuda=False)
    assert sys.path == before
    assert str(CHECKOUT) not in sys.path
    folder = webui.data / "extensions" / "rocm-sd"
    assert Path(webui.library("hosts.webui.register").__file__).is_relative_to(folder)
    assert webui.library("arch").table()
    webui.library("commands.doctor")  # a module that nothing had imported yet
    assert not webui.errors_reported


def test_cache_lies_in_the_hosts(start: Start, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.delenv("ROCM_SD_CACHE_DIR", raising=False)
    monkeypatch.delenv("SD_WEBUI_CACHE_DIR", raising=False)
    webui = start(cuda=False)
    assert webui.library("cache")._state.host == webui.data / "cache"
    monkeypatch.setenv("SD_WEBUI_CACHE_DIR", str(tmp_path / "elsewhere"))
    webui = start(cuda=False)
    assert webui.library("cache")._state.host == tmp_path / "elsewhere"


def test_preload_sets_no_environment_variable(start: Start) -> None:
    """One that changes what torch's own attention computes would show with Enable off."""
    before = dict(os.environ)
    webui = start(cuda=False)
    changed = {k for k in os.environ if os.environ[k] != before.get(k)}
    assert changed <= {"ROCM_SD_DOUBLE_DATA", "ROCM_SD_DOUBLE_ARGS"}
    assert webui.shared.cmd_opts.opt_rocm_sd is False


def test_metadata(start: Start) -> None:
    webui = start(cuda=False)
    (ours,) = webui.extensions.active()
    assert ours.metadata.config.get("Extension", "Name") == "rocm-sd"
