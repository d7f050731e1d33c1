"""After "Reload UI": scripts ran again, callbacks were cleared, this library is the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from conftest import FakeGpu, Start, WebUI


def ours_among(webui: WebUI) -> dict[str, list[Any]]:
    return {
        category: [f for f in functions if f.__module__.startswith("lib_rocm_sd.")]
        for category, functions in webui.callbacks().items()
    }


def test_reloading_leaves_everything_as_it_was(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)

    def state() -> tuple[Any, ...]:
        return (
            webui.callbacks(),
            webui.forwards,
            [item.title() for item in webui.sd_hijack.optimizers],
            webui.sd_hijack.current_optimizer,
            len(webui.scripts.scripts_txt2img.inputs),
            sys.path,
            [patch.owner for patch in webui.ours._patches],
        )

    before = state()
    expected = webui.txt2img().decoded[0]
    for _ in range(3):
        webui.initialize.reload_ui()
        assert state() == before
    ours = ours_among(webui)
    for category in ("list_optimizers", "before_ui", "script_unloaded", "model_loaded"):
        assert ours[f"callbacks_{category}"]
    for functions in ours.values():
        assert len(functions) == len(set(functions))
    assert webui.txt2img().decoded[0].equal(expected)
    assert not webui.errors_reported


@pytest.mark.parametrize("args", ["", "--skip-load-model-at-start"])
def test_extension_removed_before_a_reload(start: Start, gpu: FakeGpu, args: str) -> None:
    plain = start(extension=False)
    names = [f.__name__ for f in plain.forwards]
    expected = plain.txt2img()

    webui = start(gpu=gpu, args=args)
    webui.sd_models.reload_model_weights(forced_reload=True)
    assert webui.is_ours()
    (webui.data / "extensions" / "rocm-sd").unlink()
    webui.initialize.reload_ui()
    assert [f.__name__ for f in webui.forwards] == names
    assert webui.applied == "Doggettx"
    assert not any(ours_among(webui).values())
    assert webui.ours not in webui.sd_hijack.optimizers
    assert webui.txt2img().decoded[0].equal(expected.decoded[0])


def test_reload_without_loading_a_model_at_the_start(start: Start, gpu: FakeGpu) -> None:
    """--skip-load-model-at-start: nobody applies the optimizer after a reload but ourselves."""
    webui = start(gpu=gpu, args="--skip-load-model-at-start")
    webui.initialize.reload_ui()
    assert webui.applied is None
    webui.sd_models.load_model()
    assert webui.is_ours()
    webui.initialize.reload_ui()
    assert webui.is_ours()


def test_reload_while_another_optimizer_is_chosen(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    webui.shared.opts.set("cross_attention_optimization", "sdp - scaled dot product")
    before = webui.forwards
    webui.initialize.reload_ui()
    assert webui.forwards == before
    assert webui.applied == "sdp"
    webui.shared.opts.set("cross_attention_optimization", "None")
    webui.initialize.reload_ui()
    assert not webui.is_ours()


def test_reload_after_a_crash_with_enable_off(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu)
    model = webui.shared.sd_model
    model.apply_model = None
    with pytest.raises(TypeError):
        webui.txt2img(False)
    assert not webui.is_ours()
    webui.initialize.reload_ui()
    assert webui.is_ours()


def test_extension_added_before_a_reload(start: Start, gpu: FakeGpu, tmp_path: Any) -> None:
    webui = start(extension=False)
    folder = webui.data / "extensions" / "rocm-sd"
    from conftest import CHECKOUT

    folder.symlink_to(CHECKOUT, target_is_directory=True)
    gpu.install(folder)
    webui.initialize.reload_ui()
    assert webui.is_ours()
    assert webui.applied == "ROCm SD"


def test_reloading_script_bodies_only(start: Start, gpu: FakeGpu) -> None:
    """Executes our file outside load_scripts: nothing may be registered twice."""
    webui = start(gpu=gpu)
    before = webui.callbacks()
    webui.scripts.reload_script_body_only()
    assert webui.callbacks() == before
    assert "rocm_sd" in webui.txt2img().info
