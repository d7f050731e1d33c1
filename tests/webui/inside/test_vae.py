"""The VAE in generations that go well: whose decoder runs, and what the WebUI is told."""

from __future__ import annotations

import gc
import importlib
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start
from PIL import Image
from vae_help import (
    HALF,
    add_script,
    distance,
    runs,
    same,
    untouched,
    value_of,
)

PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = True
    return made


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batches": {"batch_size": 2, "n_iter": 2},
    "hires": {"enable_hr": True},
    "checkpoint": {"override_settings": {"sd_model_checkpoint": "model-5"}},
    "plain sdxl": {},
    "hires sdxl": {"enable_hr": True},
    "refiner": {"refiner_checkpoint": "model-7", "steps": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_on_and_off(start: Start, gpu: FakeGpu, monkeypatch: Any, case: str) -> None:
    fields = CASES[case]
    family = "sgm" if case.endswith("sdxl") else "ldm"
    expected = start(extension=False, family=family, dtype=HALF).txt2img(**fields)
    webui = start(gpu=gpu, family=family, dtype=HALF)
    seen = runs(webui, monkeypatch)

    assert same(webui.txt2img(False, **fields), expected)
    assert not seen and untouched(webui)

    on = webui.txt2img(True, **fields)
    images = fields.get("batch_size", 1) * fields.get("n_iter", 1)
    assert len(seen) == images and {role for role, _ in seen} == {"decoder"}
    assert untouched(webui)
    assert 'ROCm SD VAE: "Auto, whole frame, conv: torch"' in on.info
    attention_only = webui.txt2img(True, "Auto", "Off", **fields)
    assert len(seen) == images and untouched(webui)
    assert "ROCm SD VAE: off" in attention_only.info
    assert distance(on, attention_only) < 0.05

    assert same(webui.txt2img(False, **fields), expected)
    assert not webui.errors_reported and not webui.errors.recorded


def test_img2img_encodes_with_ours(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    seen = runs(webui, monkeypatch)
    on = webui.img2img(True, init_images=[PICTURE])
    assert seen == [("encoder", (1, 3, 64, 64)), ("decoder", (1, 4, 8, 8))]
    off = webui.img2img(False, init_images=[PICTURE])
    assert len(seen) == 2 and untouched(webui)
    assert distance(on, off) < 0.3  # another picture is 1.0


@pytest.mark.parametrize("budget", [0, 1, 512])
def test_banded(start: Start, gpu: FakeGpu, monkeypatch: Any, budget: int) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    case = {"width": 128, "height": 256}
    whole = webui.txt2img(True, "Auto", "Auto", **case)
    banded = webui.txt2img(True, "Auto", "Always banded", budget, **case)
    named = f"Always banded, {budget} MiB, bands" if budget else "Always banded, bands"
    assert named in banded.info
    assert distance(whole, banded) < 1 / 255
    assert not webui.errors_reported


def test_a_budget_that_is_too_small_is_told(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    result = webui.txt2img(True, "Auto", "Auto", 1, width=256, height=320, steps=1)
    assert result.images[0].size == (256, 320)
    assert "the budget is 1 MiB" in result.comments


NO_HALF_PREVIEW = pytest.mark.double_only(
    "its previews go through numpy, which has no bfloat16, and a CPU has no other half"
)


@pytest.mark.parametrize("kind", [pytest.param("Full", marks=NO_HALF_PREVIEW), "Approx cheap"])
def test_live_previews(start: Start, gpu: FakeGpu, monkeypatch: Any, kind: str) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    webui.shared.opts.show_progress_every_n_steps = 1
    webui.shared.opts.show_progress_type = kind
    seen = runs(webui, monkeypatch)
    result = webui.txt2img(steps=4)
    assert len(seen) == (5 if kind == "Full" else 1)
    assert webui.shared.state.current_image is not None
    assert "Auto, whole frame" in result.info
    assert not webui.errors.recorded


def test_previews_do_not_wait_for_a_long_decode(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    coder = webui.library("hosts.webui.vae")
    monkeypatch.setattr(coder, "PREVIEW_WAIT_S", 0.01)
    program = webui.library("vae.program").Program
    whole = program.__call__

    def slow(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        request = threading.Thread(target=webui.shared.state.do_set_current_image)
        request.start()
        request.join()
        return whole(self, image, **kwargs)

    monkeypatch.setattr(program, "__call__", slow)
    expected = webui.txt2img()
    assert [type(error).__name__ for error in webui.errors.recorded] == ["BusyError"]
    assert "whole frame" in expected.info


@pytest.mark.double_only("on a CPU nothing is moved")
@pytest.mark.parametrize("flag", ["--medvram", "--lowvram"])
def test_low_vram(start: Start, gpu: FakeGpu, monkeypatch: Any, flag: str) -> None:
    """The VAE's weights move for each decode; what was packed of them is not kept."""
    expected = start(gpu=gpu, dtype=HALF).txt2img(n_iter=2)
    webui = start(gpu=gpu, dtype=HALF, args=flag)
    released: list[Any] = []
    program = webui.library("vae.program").Program
    whole = program.release
    monkeypatch.setattr(program, "release", lambda self: (released.append(self), whole(self))[1])
    result = webui.txt2img(n_iter=2)
    assert same(result, expected) and "whole frame" in result.info
    assert webui.lowvram.moves.count(webui.shared.sd_model.first_stage_model) == 2
    assert len(released) >= 2 and not released[-1]._ready


def test_another_vae(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    before = webui.txt2img()
    vae = webui.shared.sd_model.first_stage_model
    others = {key: value * 0.9 for key, value in vae.state_dict().items()}
    webui.load_vae(others)
    on, off = webui.txt2img(), webui.txt2img(True, "Auto", "Off")
    assert not same(on, before)
    assert "whole frame" in on.info
    assert distance(on, off) < 0.05


@pytest.mark.double_only("the real one loads other weights into the model that is there")
def test_an_unloaded_model_is_not_held(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    webui.txt2img()
    old = weakref.ref(webui.shared.sd_model.first_stage_model)
    webui.shared.opts.sd_model_checkpoint = "model-3"
    webui.txt2img()
    gc.collect()
    assert old() is None


def test_sd3(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """SD3's VAE has classes of its own, 16 channels, and no quant_conv."""
    webui = start(gpu=gpu, dtype=HALF)
    seen = runs(webui, monkeypatch)
    torch.manual_seed(0)
    vae = importlib.import_module("modules.models.sd3.sd3_impls").SDVAE().to(HALF).eval()
    vae.requires_grad_(False)
    latent, picture = torch.randn(1, 16, 6, 5).to(HALF), torch.randn(1, 3, 48, 40).to(HALF)

    def coded() -> list[torch.Tensor]:
        torch.manual_seed(1)  # encode() draws
        return [vae.decode(latent), vae.encode(picture)]

    expected = coded()
    model = types.SimpleNamespace(first_stage_model=vae, lowvram=False)
    monkeypatch.setattr(webui.sd_models.model_data, "sd_model", model)
    session = webui.library("hosts.webui.vae").session
    session.establish(webui.library("hosts.ui.options").DEFAULTS)
    ours = coded()
    session.end()
    assert [role for role, _ in seen] == ["decoder", "encoder"]
    for got, want in zip(ours, expected, strict=True):
        assert (got - want).abs().max() < 0.05 * want.abs().max()
    assert torch.equal(vae.decode(latent), expected[0])


def test_beside_the_lora_extension(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """Every WebUI has it: it replaces the forwards of torch's layers, for layers that it named."""

    def through(own: Any) -> Any:
        def applied(self: Any, x: Any) -> Any:
            return own(self, x)

        applied.__module__ = "networks"
        return applied

    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img()
    for kind in (torch.nn.Conv2d, torch.nn.Linear, torch.nn.GroupNorm):
        monkeypatch.setattr(kind, "forward", through(kind.forward))
    result = webui.txt2img()
    assert same(result, expected) and "whole frame" in result.info


@pytest.mark.parametrize("size", [(8, 8), (8, 104), (72, 200)])
def test_odd_sizes(start: Start, gpu: FakeGpu, monkeypatch: Any, size: tuple[int, int]) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    seen = runs(webui, monkeypatch)
    result = webui.txt2img(True, width=size[0], height=size[1])
    assert result.images[0].size == size and len(seen) == 1
    assert not webui.errors_reported


def test_generation_inside_another(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    expected = start(extension=False, dtype=HALF).txt2img(n_iter=2)
    webui = start(gpu=gpu, dtype=HALF)
    inner: list[Any] = []

    def nest(self: Any, p: Any, *args: Any, **kwargs: Any) -> None:
        if not inner:
            inner.append(None)
            inner[0] = webui.txt2img(True, "Memory")

    add_script(webui, postprocess_batch=nest)
    assert same(webui.txt2img(False, n_iter=2), expected)
    assert "whole frame" in inner[0].info


def test_vae_works_beside_another_optimizer(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    webui.shared.opts.set("cross_attention_optimization", "sdp - scaled dot product")
    info = webui.txt2img().info
    assert "ROCm SD VAE" in info and "ROCm SD:" not in info
    pasted = webui.paste("txt2img", info)
    enable, *_ = webui.scripts.scripts_txt2img.script("ROCm SD Optimization").controls
    assert value_of(pasted[enable]) is True


@pytest.mark.parametrize(
    ("level", "vae", "budget"),
    [
        *(("Memory", "Auto", 0), ("Auto", "Auto", 640), ("Performance", "Off", 0)),
        *(("Auto", "Always banded", 0), ("Memory", "Always banded", 77)),
    ],
)
def test_infotext_round_trip(start: Start, gpu: FakeGpu, level: str, vae: str, budget: int) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    info = webui.txt2img(True, level, vae, budget).info
    for tab in ("txt2img", "img2img"):
        runner = getattr(webui.scripts, f"scripts_{tab}")
        controls = runner.script("ROCm SD Optimization").controls
        updates = webui.paste(tab, info)
        pasted = [value_of(updates[control]) for control in controls[:5]]
        unet = webui.library("hosts.ui.options").UNET_DEFAULT
        assert pasted == [True, level, vae, None if vae == "Off" else budget, unet]


def test_api(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)

    def info(*args: Any) -> str:
        return webui.by_api({"rocm sd optimization": {"args": list(args)}})

    assert 'ROCm SD VAE: "Auto, whole frame' in info()
    assert 'ROCm SD VAE: "Auto, whole frame' in info(True, "Memory")
    assert "ROCm SD VAE: off" in info(True, "Auto", "off")
    assert 'ROCm SD VAE: "Auto, 300 MiB, whole frame' in info(True, "Auto", "AUTO", "299.5")
    assert "ROCm SD VAE" not in info(False, "Auto", "Auto", 0)
    assert 'ROCm SD VAE: "Auto, whole frame' in info(True, "Auto", "Auto", "nonsense")
