"""The VAE in generations: whose decoder runs, what stays behind, and what the WebUI is told."""

from __future__ import annotations

import copy
import gc
import importlib
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from PIL import Image

HALF = torch.bfloat16
PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = True
    return made


def coders(webui: WebUI) -> list[Any]:
    vae = webui.shared.sd_model.first_stage_model
    return [vae.decoder, vae.encoder]


def untouched(webui: WebUI) -> bool:
    """Whether neither decoder nor encoder has a forward of its own."""
    return not any("forward" in coder.__dict__ for coder in coders(webui))


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.decoded, b.decoded, strict=True))


def distance(a: Any, b: Any) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a.decoded, b.decoded, strict=True))


def runs(webui: WebUI, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """What our programs run from now on: role and the input's shape."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    program = webui.library("vae.program").Program
    whole = program.__call__

    def call(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append((self._recipe.role, tuple(image.shape)))
        return whole(self, image, **kwargs)

    monkeypatch.setattr(program, "__call__", call)
    return seen


def break_program(webui: WebUI, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[int]:
    calls: list[int] = []

    def call(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        raise error

    monkeypatch.setattr(webui.library("vae.program").Program, "__call__", call)
    return calls


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batches": {"batch_size": 2, "n_iter": 2},
    "hires": {"enable_hr": True},
    "checkpoint": {"override_settings": {"sd_model_checkpoint": "model-5"}},
    "refiner": {"refiner_checkpoint": "model-7", "steps": 4},
}


@pytest.mark.parametrize("family", ["ldm", "sgm"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_and_off(
    start: Start, gpu: FakeGpu, monkeypatch: Any, case: dict[str, Any], family: str
) -> None:
    expected = start(extension=False, family=family, dtype=HALF).txt2img(**case)
    webui = start(gpu=gpu, family=family, dtype=HALF)
    seen = runs(webui, monkeypatch)

    assert same(webui.txt2img(False, **case), expected)
    assert not seen and untouched(webui)

    on = webui.txt2img(True, **case)
    images = case.get("batch_size", 1) * case.get("n_iter", 1)
    assert len(seen) == images and {role for role, _ in seen} == {"decoder"}
    assert untouched(webui)
    assert 'ROCm SD VAE: "Auto, whole frame, conv: torch"' in on.info
    attention_only = webui.txt2img(True, "Auto", "Off", **case)
    assert len(seen) == images and untouched(webui)
    assert "ROCm SD VAE: off" in attention_only.info
    assert distance(on, attention_only) < 0.05

    assert same(webui.txt2img(False, **case), expected)
    assert not webui.errors_reported and not webui.errors.recorded


def test_img2img_encodes_with_ours(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    seen = runs(webui, monkeypatch)
    on = webui.img2img(True, init_images=[PICTURE])
    assert seen == [("encoder", (1, 3, 64, 64)), ("decoder", (1, 4, 8, 8))]
    off = webui.img2img(False, init_images=[PICTURE])
    assert len(seen) == 2 and untouched(webui)
    assert distance(on, off) < 0.1


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
    result = webui.txt2img(True, "Auto", "Auto", 1, width=512, height=512, steps=1)
    assert result.images[0].size == (512, 512)
    assert "the budget is 1 MiB" in result.comments


@pytest.mark.parametrize("kind", ["Full", "Approx cheap"])
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
    coder = webui.library("hosts.a1111_coder")
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
    assert len(webui.lowvram.moves) == 2
    assert len(released) >= 2 and not released[-1]._ready


def test_another_vae(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    before = webui.txt2img()
    vae = webui.shared.sd_model.first_stage_model
    others = {key: value * 0.9 for key, value in vae.state_dict().items()}
    webui.sd_vae.reload_vae_weights(vae_file=others)
    on, off = webui.txt2img(), webui.txt2img(True, "Auto", "Off")
    assert not same(on, before)
    assert "whole frame" in on.info
    assert distance(on, off) < 0.05


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
    expected = [vae.decode(latent), vae.encode(picture)]
    model = types.SimpleNamespace(first_stage_model=vae, lowvram=False)
    monkeypatch.setattr(webui.sd_models.model_data, "sd_model", model)
    session = webui.library("hosts.a1111_vae").session
    session.establish(webui.library("ui.options").DEFAULTS)
    ours = [vae.decode(latent), vae.encode(picture)]
    session.end()
    assert [role for role, _ in seen] == ["decoder", "encoder"]
    for got, want in zip(ours, expected, strict=True):
        assert (got - want).abs().max() < 0.05 * want.abs().max()
    assert torch.equal(vae.decode(latent), expected[0])


class TiledVae:
    """What multidiffusion-upscaler's Tiled VAE does to the coders; its hook calls the whole one."""

    class VAEHook:
        def __init__(self, net: Any) -> None:
            self.net = net
            self.calls = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.net.original_forward(x)

    def __init__(self, webui: WebUI) -> None:
        self.webui = webui

    def process(self, *args: Any) -> None:
        for coder in coders(self.webui):
            if not hasattr(coder, "original_forward"):
                coder.original_forward = coder.forward
            coder.forward = self.VAEHook(coder)

    def postprocess(self, *args: Any) -> None:
        for coder in coders(self.webui):
            if isinstance(coder.forward, self.VAEHook):
                coder.forward = coder.original_forward


def add_script(webui: WebUI, **hooks: Callable[..., Any]) -> Any:
    """Another extension's script in txt2img, run after ours."""
    kind = type("Other", (webui.scripts.Script,), hooks)
    other = kind()
    other.args_from = other.args_to = 0
    webui.scripts.scripts_txt2img.alwayson_scripts.append(other)
    return other


@pytest.mark.parametrize("first", [True, False])
def test_tiled_vae_is_left_alone(start: Start, gpu: FakeGpu, monkeypatch: Any, first: bool) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img(True, "Auto", "Off")
    ours = webui.txt2img()
    seen = runs(webui, monkeypatch)
    tiled = TiledVae(webui)
    if first:  # it was there before us, or is left over from a crash
        tiled.process()
    else:
        add_script(
            webui,
            process=lambda self, p, *args: tiled.process(),
            postprocess=lambda self, p, processed, *args: tiled.postprocess(),
        )
    result = webui.txt2img()
    assert not seen and same(result, expected)
    assert "left to the WebUI" in result.info
    assert "VAEHook of test_vae" in result.comments
    assert "VAEHook of test_vae" in webui.status
    if first:
        assert isinstance(coders(webui)[0].forward, tiled.VAEHook)
        assert coders(webui)[0].forward.calls == 1
        tiled.postprocess()
    else:
        webui.scripts.scripts_txt2img.alwayson_scripts.pop()

    assert same(webui.txt2img(False), webui.txt2img(False))
    assert not seen
    again = webui.txt2img()
    assert len(seen) == 1 and same(again, ours)
    assert not webui.errors_reported


def test_what_others_kept_of_us_is_the_webuis(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """An extension that copies the model, or keeps the forward, amid a generation."""
    webui = start(gpu=gpu, dtype=HALF)
    kept: list[Any] = []

    def keep(self: Any, p: Any, *args: Any) -> None:
        decoder = coders(webui)[0]
        kept.extend([decoder.forward, copy.deepcopy(decoder)])

    add_script(webui, process=keep)
    webui.txt2img()
    seen = runs(webui, monkeypatch)
    forward, decoder = kept
    latent = torch.randn(1, 4, 8, 8).to(HALF)
    with torch.no_grad():
        own = coders(webui)[0](latent)
        assert torch.equal(forward(latent), own)
        assert torch.equal(decoder(latent), own)
    assert not seen


@pytest.mark.parametrize(
    ("args", "named"), [("--no-half-vae", "--no-half-vae"), ("--no-half", "--no-half"), ("", "")]
)
def test_float32_is_honoured(
    start: Start, gpu: FakeGpu, monkeypatch: Any, args: str, named: str
) -> None:
    expected = start(gpu=gpu).txt2img(True, "Auto", "Off")
    webui = start(gpu=gpu, args=args)
    assert named in webui.status and "its weights are float32" in webui.status
    assert not args or "costs speed and is not needed" in webui.status
    seen = runs(webui, monkeypatch)
    result = webui.txt2img()
    assert not seen and same(result, expected)
    assert 'ROCm SD VAE: "Auto, left to the WebUI"' in result.info


def test_tiling_is_the_webuis(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """For "Tiling" the WebUI sets padding_mode of all convolutions, those of the VAE too."""

    def circular(webui: WebUI, mode: str = "circular") -> None:
        for module in webui.shared.sd_model.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.padding_mode = mode
                padding = [side for size in reversed(module.padding) for side in (size, size)]
                module._reversed_padding_repeated_twice = padding

    webui = start(gpu=gpu, dtype=HALF)
    ours = webui.txt2img()
    circular(webui)
    result, expected = webui.txt2img(), webui.txt2img(True, "Auto", "Off")
    assert same(result, expected) and not same(result, ours)
    assert "circular" in result.comments
    circular(webui, "zeros")
    assert same(webui.txt2img(), ours)


def test_failure_of_ours(start: Start, gpu: FakeGpu, monkeypatch: Any, capsys: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img(True, "Auto", "Off", n_iter=2)
    with monkeypatch.context() as patch:
        calls = break_program(webui, patch, RuntimeError("a planted failure"))
        result = webui.txt2img(n_iter=2)
        assert not webui.txt2img().comments
    assert same(result, expected)
    assert len(calls) == 2  # once a generation: the second picture does not pay for it again
    assert "left to the WebUI" in result.info
    assert result.comments.count("a planted failure") == 1
    assert capsys.readouterr().out.count("a planted failure") == 1
    assert "a planted failure" in webui.status
    assert "whole frame" in webui.txt2img().info
    assert "planted" not in webui.status


@pytest.mark.parametrize("kind", ["OutOfMemoryError", "MemoryError"])
def test_out_of_memory_is_passed_on(
    start: Start, gpu: FakeGpu, monkeypatch: Any, kind: str
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    error = getattr(torch.cuda, kind, MemoryError)
    with monkeypatch.context() as patch:
        break_program(webui, patch, error("out of memory"))
        with pytest.raises(error):
            webui.txt2img()
    assert "whole frame" in webui.txt2img().info
    assert untouched(webui)


class Clock:
    """Ten seconds pass between two looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def interrupt_after(webui: WebUI, monkeypatch: Any, part: int, clock: Any) -> list[str | None]:
    """Interrupt during the first decode after `part` parts; gives what the progress bar showed."""
    coder = webui.library("hosts.a1111_coder")
    shown: list[str | None] = []

    class Watch(coder.Watch):  # type: ignore[name-defined]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(clock=clock, **kwargs)

        def progress(self, done: int, total: int) -> None:
            super().progress(done, total)
            shown.append(webui.shared.state.textinfo)
            if len(shown) == part:
                webui.shared.state.interrupt()

    monkeypatch.setattr(coder, "Watch", Watch)
    return shown


BIG = {"width": 128, "height": 512, "steps": 1}


def test_progress(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    webui.shared.state.textinfo = "Batch 1 of 1"
    shown = interrupt_after(webui, monkeypatch, 0, Clock())
    webui.txt2img(True, "Auto", "Always banded", **BIG)
    words = [str(text).split() for text in shown if text != "VAE: preparing."]
    done, total = [int(word[1]) for word in words], int(words[-1][3])
    assert done == sorted(done) and 3 < 0.8 * total < done[-1] <= total
    assert shown[-1] == f"VAE: {done[-1]} of {total} parts."
    assert webui.shared.state.textinfo == "Batch 1 of 1"


def test_interrupt_between_bands(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    monkeypatch.setattr(webui.library("hosts.a1111_coder"), "ROUGH_PIXELS", 16)
    expected = webui.txt2img(True, "Auto", "Always banded", **BIG)
    shown = interrupt_after(webui, monkeypatch, 2, Clock())
    result = webui.txt2img(True, "Auto", "Always banded", batch_size=2, n_iter=2, **BIG)
    assert len(shown) == 2  # the second picture's decode is not begun, the second batch neither
    assert [image.size for image in result.images] == [(128, 512)] * 2
    assert "interrupted: a rough picture" in result.info
    rough, exact = result.decoded[0], expected.decoded[0]
    assert (rough.mean((0, 2, 3)) - exact.mean((0, 2, 3))).abs().max() < 0.1
    assert 0.02 < rough.std() < exact.std()
    assert untouched(webui) and not webui.errors_reported
    assert webui.shared.state.textinfo is None

    webui.shared.state.interrupted = False
    assert same(webui.txt2img(True, "Auto", "Always banded", **BIG), expected)


def test_an_interrupt_at_the_very_end_keeps_the_picture(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    expected = webui.txt2img(True, "Auto", "Always banded", **BIG)
    interrupt_after(webui, monkeypatch, 2, lambda: 0.0)
    result = webui.txt2img(True, "Auto", "Always banded", **BIG)
    assert webui.shared.state.interrupted and same(result, expected)


def test_what_an_interrupted_sampler_has_is_decoded_in_full(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    shown = interrupt_after(webui, monkeypatch, 0, Clock())

    def interrupt(self: Any, p: Any, *args: Any, **kwargs: Any) -> None:
        webui.shared.state.interrupt()

    add_script(webui, process_before_every_sampling=interrupt)
    result = webui.txt2img(True, "Auto", "Always banded", **BIG)
    assert len(shown) > 3 and "interrupted" not in result.info


def test_nans_reach_the_webuis_check(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF, args="--disable-nan-check")
    model = webui.shared.sd_model

    def nans(x: torch.Tensor, t: Any, cond: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(x, float("nan"))

    model.apply_model = nans
    assert webui.txt2img().decoded[0].isnan().all()
    webui.shared.cmd_opts.disable_nan_check = False
    with pytest.raises(webui.devices.NansException, match="unet"):
        webui.txt2img()


def test_a_vae_that_gives_nans_is_retried_by_the_webui(start: Start, gpu: FakeGpu) -> None:
    """Weights beyond rescue: the WebUI turns the VAE to float32, which is then its own."""
    webui = start(gpu=gpu, dtype=HALF)
    decoder = coders(webui)[0]
    with torch.no_grad():
        decoder.conv_out.bias.fill_(float("nan"))
    whole = decoder.conv_out.to

    def mend(*args: Any) -> Any:
        with torch.no_grad():
            decoder.conv_out.bias.fill_(0.0)
        return whole(*args)

    webui.shared.sd_model.first_stage_model.to = lambda *args: (
        mend()
        and type(webui.shared.sd_model.first_stage_model).to(
            webui.shared.sd_model.first_stage_model, *args
        )
    )
    result = webui.txt2img()
    assert not result.decoded[0].isnan().any()
    assert next(decoder.parameters()).dtype == torch.float32
    assert "left to the WebUI" in result.info


def test_gradients_are_the_webuis(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    seen = runs(webui, monkeypatch)
    session = webui.library("hosts.a1111_vae").session
    session.establish(webui.library("ui.options").DEFAULTS)
    latent = torch.randn(1, 4, 8, 8).to(HALF).requires_grad_()
    coders(webui)[0](latent).float().sum().backward()
    session.end()
    assert latent.grad is not None and not seen


@pytest.mark.parametrize("size", [(8, 8), (8, 104), (72, 200)])
def test_odd_sizes(start: Start, gpu: FakeGpu, monkeypatch: Any, size: tuple[int, int]) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    seen = runs(webui, monkeypatch)
    result = webui.txt2img(True, width=size[0], height=size[1])
    assert result.images[0].size == size and len(seen) == 1
    assert not webui.errors_reported


def test_crash_in_the_middle(start: Start, gpu: FakeGpu) -> None:
    expected = start(extension=False, dtype=HALF).txt2img()
    webui = start(gpu=gpu, dtype=HALF)
    ours = webui.txt2img()
    model = webui.shared.sd_model
    whole = model.apply_model
    model.apply_model = None
    with pytest.raises(TypeError):
        webui.txt2img()
    model.apply_model = whole
    assert same(webui.txt2img(False), expected) and untouched(webui)
    assert same(webui.txt2img(), ours) and untouched(webui)


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


def test_reload_amid_a_generation_leaves_nothing(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    session = webui.library("hosts.a1111_vae").session
    session.establish(webui.library("ui.options").DEFAULTS)
    assert not untouched(webui)
    webui.initialize.reload_ui()
    assert untouched(webui)


def test_vae_works_beside_another_optimizer(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    webui.shared.opts.set("cross_attention_optimization", "sdp - scaled dot product")
    info = webui.txt2img().info
    assert "ROCm SD VAE" in info and "ROCm SD:" not in info
    pasted = webui.infotext_utils.paste("txt2img", info)
    enable, *_ = webui.scripts.scripts_txt2img.script("ROCm SD Optimization").controls
    assert value_of(pasted[enable]) is True


def test_no_convolutions(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    gpu.convs = False
    webui = start(gpu=gpu, dtype=HALF)
    seen = runs(webui, monkeypatch)
    result = webui.txt2img()
    assert not seen and "ROCm SD VAE" not in result.info
    assert "The VAE is the WebUI's own: there are no convolutions." in webui.status


def value_of(update: Any) -> Any:
    return update.get("value") if isinstance(update, dict) else update.value


@pytest.mark.parametrize(
    ("vae", "budget"),
    [("Auto", 0), ("Auto", 640), ("Always banded", 0), ("Always banded", 77), ("Off", 0)],
)
def test_infotext_round_trip(start: Start, gpu: FakeGpu, vae: str, budget: int) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    info = webui.txt2img(True, "Performance", vae, budget).info
    for tab in ("txt2img", "img2img"):
        runner = getattr(webui.scripts, f"scripts_{tab}")
        controls = runner.script("ROCm SD Optimization").controls
        updates = webui.infotext_utils.paste(tab, info)
        pasted = [value_of(updates[control]) for control in controls]
        assert pasted == [True, "Performance", vae, None if vae == "Off" else budget]


def test_api(start: Start, gpu: FakeGpu) -> None:
    webui = start(gpu=gpu, dtype=HALF)
    api = webui.api_server()

    def info(*args: Any) -> str:
        scripts = {"rocm sd optimization": {"args": list(args)}}
        return str(api.text2imgapi(alwayson_scripts=scripts).info)

    assert 'ROCm SD VAE: "Auto, whole frame' in info()
    assert 'ROCm SD VAE: "Auto, whole frame' in info(True, "Memory")
    assert "ROCm SD VAE: off" in info(True, "Auto", "off")
    assert 'ROCm SD VAE: "Auto, 300 MiB, whole frame' in info(True, "Auto", "AUTO", "299.5")
    assert "ROCm SD VAE" not in info(False, "Auto", "Auto", 0)
    assert 'ROCm SD VAE: "Auto, whole frame' in info(True, "Auto", "Auto", "nonsense")
