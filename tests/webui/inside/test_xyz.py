"""The axes of the X/Y/Z plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accordion_help import script
from conftest import FakeGpu, Start, WebUI
from vae_help import HALF, untouched

SCRIPTS = Path(__file__).resolve().parents[1] / "double" / "scripts"
NAMES = ("Enable", "Optimization Level", "VAE", "UNet", "Several GPUs", "Upscaler")
LABELS = [f"[ROCm SD] {name}" for name in NAMES]


def with_plot(webui: WebUI) -> None:
    folder = webui.data / "extensions" / "zz-builtin"
    folder.mkdir()
    (folder / "scripts").symlink_to(SCRIPTS, target_is_directory=True)


@pytest.fixture
def webui(start: Start) -> WebUI:
    gpu = FakeGpu()
    gpu.convs = True
    return start(gpu=gpu, dtype=HALF, before=with_plot)


def plot(webui: WebUI, tab: str = "txt2img") -> Any:
    return getattr(webui.scripts, f"scripts_{tab}").script("X/Y/Z plot")


def cells(webui: WebUI, label: str, values: list[str], *args: Any) -> list[tuple[str, Any]]:
    runner = webui.scripts.scripts_txt2img
    p = webui.processing.StableDiffusionProcessingTxt2Img(sd_model=webui.shared.sd_model)
    p.scripts = runner
    p.script_args = webui.script_args(runner, args)
    made: list[tuple[str, Any]] = plot(webui).run(p, label, values)
    return made


@pytest.mark.parametrize("tab", ["txt2img", "img2img"])
def test_axes_are_listed(webui: WebUI, tab: str) -> None:
    options = {x.label: x for x in plot(webui, tab).current_axis_options}
    assert list(options)[-6:] == LABELS
    assert options["Nothing"] is not None
    assert [options[label].choices() for label in LABELS] == [
        ["True", "False"],
        ["Auto", "Performance", "Memory"],
        ["Off", "Auto", "Always banded"],
        ["Off", "Auto"],
        ["Off", "Auto"],
        ["Off", "Auto"],
    ]
    assert not webui.errors_reported


def test_axes_are_added_once(webui: WebUI) -> None:
    for _ in range(3):
        webui.library("hosts.webui.script").add_axes()
        webui.initialize.reload_ui()
        labels = [x.label for x in plot(webui).current_axis_options]
        assert [labels.count(label) for label in LABELS] == [1] * len(LABELS)


def test_level(webui: WebUI) -> None:
    made = cells(webui, LABELS[1], ["Auto", "Performance", "Memory"])
    assert [label for label, _ in made] == [
        f"{LABELS[1]}: {level}" for level in ("Auto", "Performance", "Memory")
    ]
    for level, (_, result) in zip(("Auto", "Performance", "Memory"), made, strict=True):
        assert f'ROCm SD: "{level}, attention: ' in result.info


def test_enable(webui: WebUI) -> None:
    (_, on), (_, off), (_, again) = cells(webui, LABELS[0], ["True", "False", "True"])
    assert 'ROCm SD: "Auto, attention: rocm_sd' in on.info
    assert "ROCm SD: off" in off.info
    assert again.decoded[0].equal(on.decoded[0])
    assert webui.is_ours() and untouched(webui)


def test_vae(webui: WebUI) -> None:
    (_, off), (_, auto), (_, banded) = cells(webui, LABELS[2], ["Off", "Auto", "Always banded"])
    assert "ROCm SD VAE: off" in off.info
    assert 'ROCm SD VAE: "Auto, whole frame' in auto.info
    assert 'ROCm SD VAE: "Always banded, ' in banded.info


def test_a_cell_changes_only_its_own_value(webui: WebUI) -> None:
    """What the accordion says holds for the rest, and the plot leaves nothing behind."""
    for _, result in cells(webui, LABELS[1], ["auto", "performance"], True, "Memory", "Off"):
        assert "ROCm SD VAE: off" in result.info
        assert "Memory" not in result.info
    assert 'ROCm SD: "Memory' in webui.txt2img(True, "Memory").info


@pytest.mark.parametrize(
    ("label", "value", "message"),
    [
        (LABELS[0], "perhaps", "Enable is 'perhaps', expected true or false"),
        (LABELS[1], "Turbo", "Optimization Level is 'Turbo', expected one of Auto"),
        (LABELS[3], "On", "UNet is 'On', expected one of Off, Auto"),
        (LABELS[2], "", "VAE is '', expected one of Off, Auto, Always banded"),
    ],
)
def test_nonsense_stops_before_the_first_cell(
    webui: WebUI, label: str, value: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        cells(webui, label, [plot_value(webui, label), value])
    assert "is used" not in str(caught.value)


def plot_value(webui: WebUI, label: str) -> str:
    (axis,) = [x for x in plot(webui).current_axis_options if x.label == label]
    return str(axis.choices()[0])


def test_a_plot_of_another_kind_is_left_alone(start: Start, gpu: FakeGpu) -> None:
    def strange(webui: WebUI) -> None:
        folder = webui.data / "extensions" / "zz" / "scripts"
        folder.mkdir(parents=True)
        text = "from modules import scripts\naxis_options = ()\n"
        text += "class Other(scripts.Script):\n    def title(self):\n        return 'Other'\n"
        (folder / "xyz_grid.py").write_text(text)

    webui = start(gpu=gpu, before=strange)
    assert script(webui) is not None
    assert not webui.errors_reported
