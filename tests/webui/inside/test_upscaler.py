"""Upscaling networks in the WebUI: where they are ours, and what Off and failures give."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI
from PIL import Image, ImageChops

SCRIPTS = Path(__file__).resolve().parents[1] / "double" / "scripts"
TILE, OVERLAP = 32, 4
NAME, KEY = "tiny", "ROCm SD Upscaler"
OFF = (True, "Auto", "Auto", 0, "Off", "Off", "", "Off")
AUTO = (*OFF[:-1], "Auto")


def state_dict(features: int = 8, convs: int = 2, scale: int = 2) -> dict[str, torch.Tensor]:
    """Real-ESRGAN's compact network with small random weights."""
    generator = torch.Generator("cpu").manual_seed(7)
    widths = [3, *[features] * (convs + 1)]
    found = {}
    for place, width in enumerate(widths):
        out = features if place <= convs else 3 * scale**2
        shape = (out, width, 3, 3)
        found[f"body.{2 * place}.weight"] = torch.randn(shape, generator=generator) * 0.1
        found[f"body.{2 * place}.bias"] = torch.randn(out, generator=generator) * 0.02
        if place <= convs:
            found[f"body.{2 * place + 1}.weight"] = torch.full((features,), 0.25)
    return found


def with_upscaler(webui: WebUI) -> None:
    """An upscaler is installed, and its tiles are small."""
    folder = webui.data / "models" / "ESRGAN"
    folder.mkdir(parents=True, exist_ok=True)
    old = {"_use_new_zipfile_serialization": False}  # the WebUI takes a newer zip for malicious
    torch.save(state_dict(), folder / f"{NAME}.pth", **old)
    webui.shared.sd_upscalers = webui.esrgan_model.UpscalerESRGAN(str(folder)).scalers
    webui.shared.opts.data.update(ESRGAN_tile=TILE, ESRGAN_tile_overlap=OVERLAP)
    if type(webui) is WebUI:  # a real one has its own script for Extras
        builtin = webui.data / "extensions" / "zz-builtin"
        builtin.mkdir(parents=True, exist_ok=True)
        (builtin / "scripts").symlink_to(SCRIPTS, target_is_directory=True)


def with_swinir(patch: pytest.MonkeyPatch, webui: WebUI) -> None:
    """One of the WebUI's SwinIR, also where the WebUI makes its list anew."""
    name = property(lambda scaler: "SwinIR", lambda scaler, given: None)
    patch.setattr(webui.esrgan_model.UpscalerESRGAN, "name", name, raising=False)
    with_upscaler(webui)


def picture(width: int = 50, height: int = 37, seed: int = 0) -> Image.Image:
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.frombytes("RGB", (width, height), bytes(values.flatten().tolist()))


def apart(one: Image.Image, other: Image.Image) -> int:
    """The largest difference, of 255."""
    assert one.size == other.size
    return max(high for _, high in ImageChops.difference(one, other).getextrema())


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.convs = True
    return made


@pytest.fixture
def webui(start: Start, gpu: FakeGpu) -> WebUI:
    return start(gpu=gpu, before=with_upscaler)


def data_of(webui: WebUI) -> Any:
    return next(each for each in webui.shared.sd_upscalers if each.name == NAME)


def upscale(webui: WebUI, image: Image.Image, scale: float = 2) -> Image.Image:
    """As scripts do it, and extensions."""
    data = data_of(webui)
    made: Image.Image = data.scaler.upscale(image, scale, data.data_path)
    return made


def extras(webui: WebUI, image: Image.Image, enabled: bool = True, **ours: Any) -> Any:
    """What Extras makes of a picture, by the API's way."""
    runner = webui.scripts.scripts_postproc
    theirs = {
        **{"upscale_enabled": enabled, "upscale_mode": 0, "upscale_by": 2, "max_side_length": 0},
        **{"upscaler_1_name": NAME, "upscaler_2_visibility": 0.0, "upscale_crop": False},
    }
    args = runner.create_args_for_run({"Upscale": theirs, "ROCm SD": ours})
    made = webui.scripts_postprocessing.PostprocessedImage(image)
    with webui.generating(), job(webui):
        runner.run(made, args)
    return made


def extras_script(webui: WebUI) -> Any:
    """Ours."""
    scripts = webui.scripts.scripts_postproc.scripts_in_preferred_order()
    return next(each for each in scripts if each.name == "ROCm SD")


@contextmanager
def job(webui: WebUI) -> Iterator[None]:
    """What the page or the API asks for."""
    webui.shared.state.begin("task")
    try:
        yield
    finally:
        webui.shared.state.end()


def without_tiles(webui: WebUI, image: Image.Image) -> Image.Image:
    """By the WebUI's own code."""
    webui.shared.opts.data["ESRGAN_tile"] = 0
    try:
        return webui_own(webui, image)
    finally:
        webui.shared.opts.data["ESRGAN_tile"] = TILE


def webui_own(webui: WebUI, image: Image.Image) -> Image.Image:
    session = webui.library("hosts.webui.upscaler").session
    before = dict(vars(session))
    session.establish(webui.library("hosts.ui.options").Options(upscaler="Off"))
    try:
        return upscale(webui, image)
    finally:
        vars(session).update(before)


def runs(webui: WebUI, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what our program is given from now on."""
    seen: list[tuple[int, ...]] = []
    program = webui.library("upscaler.program").Upscaler
    whole = program.__call__

    def call(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append(tuple(image.shape))
        return whole(self, image, **kwargs)

    monkeypatch.setattr(program, "__call__", call)
    return seen


def test_extras_has_no_seams(webui: WebUI, monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture()
    right, tiled = without_tiles(webui, image), webui_own(webui, image)
    assert apart(right, tiled) > 3, "tiles are seen"
    seen = runs(webui, monkeypatch)
    made = extras(webui, image, choice="Auto")
    assert apart(made.image, right) <= 1
    assert seen == [(1, 3, 37, 50)]
    assert made.info[KEY].startswith("Auto, whole picture, conv: ")
    off = extras(webui, image, choice="Off")
    assert off.image.tobytes() == tiled.tobytes(), "nor what was kept of ours"
    assert off.info[KEY] == "off" and len(seen) == 1
    again = extras(webui, image)
    assert again.image.tobytes() == made.image.tobytes() and len(seen) == 2
    assert not webui.errors_reported


def test_the_walk_of_swinir(webui: WebUI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which its script takes, for whole pictures too, and where the choice is Off as it was."""
    image, utils = picture(), webui.upscaler_utils
    model = data_of(webui).scaler.load_model(data_of(webui).data_path)
    how = {"tile_size": TILE, "tile_overlap": OVERLAP, "scale": 2, "desc": "SwinIR"}
    tiled = utils.upscale_2.theirs(image, model, **how)
    right = utils.upscale_with_model.theirs(model, image, tile_size=0)
    assert apart(tiled, right) > 3
    seen = runs(webui, monkeypatch)
    made = utils.upscale_2(image, model, **how)
    assert apart(made, right) <= 1 and seen == [(1, 3, 37, 50)]
    session = webui.library("hosts.webui.upscaler").session
    session.establish(webui.library("hosts.ui.options").Options(upscaler="Off"))
    assert utils.upscale_2(image, model, **how).tobytes() == tiled.tobytes()
    data = SimpleNamespace(
        scaler=SimpleNamespace(name="SwinIR"), local_data_path=data_of(webui).data_path
    )
    assert session.serves(data)
    data.local_data_path = "https://example.org/swinir.pth"
    assert not session.serves(data), "nobody has fetched it"


def test_a_walk_that_an_extension_has_wrapped_is_not_passed_by(webui: WebUI) -> None:
    image, utils = picture(), webui.upscaler_utils
    model = data_of(webui).scaler.load_model(data_of(webui).data_path)
    how = {"tile_size": TILE, "tile_overlap": OVERLAP, "scale": 2, "desc": "SwinIR"}
    own = utils.upscale_2.theirs

    @functools.wraps(own)
    def inverted(*args: Any, **kwargs: Any) -> Image.Image:
        return ImageChops.invert(own(*args, **kwargs))

    webui.monkeypatch.setattr(utils.upscale_2, "theirs", inverted)
    right = inverted(image, model, **how)
    assert utils.upscale_2(image, model, **how).tobytes() == right.tobytes()
    (why,) = webui.library("hosts.webui.upscaler").session.turn.left
    assert "it does not take a whole picture" in why


def test_extras_without_an_upscaler_notes_nothing(webui: WebUI) -> None:
    assert KEY not in extras(webui, picture(), enabled=False).info


def test_hires_fix(start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"enable_hr": True, "hr_scale": 2.0, "hr_upscaler": NAME}
    expected = start(extension=False, before=with_upscaler).txt2img(**wanted)
    webui = start(gpu=gpu, before=with_upscaler)
    seen = runs(webui, monkeypatch)
    off = webui.txt2img(False, **wanted)
    assert off.images[0].tobytes() == expected.images[0].tobytes() and not seen
    on = webui.txt2img(*AUTO, **wanted)
    assert seen == [(1, 3, 64, 64)]
    assert f"{KEY}: " in on.info and "whole picture" in on.info
    off = webui.txt2img(*OFF, **wanted)
    assert f"{KEY}: off" in off.info and len(seen) == 1
    plain = webui.txt2img(*AUTO)
    assert KEY not in plain.info, "nothing was upscaled"
    assert not webui.errors_reported


def test_img2img(webui: WebUI, monkeypatch: pytest.MonkeyPatch) -> None:
    webui.shared.opts.data["upscaler_for_img2img"] = NAME
    seen = runs(webui, monkeypatch)
    result = webui.img2img(*AUTO, init_images=[picture(40, 40)])
    assert seen == [(1, 3, 40, 40)] and f"{KEY}: " in result.info
    webui.img2img(*OFF, init_images=[picture(40, 40)])
    assert len(seen) == 1


@pytest.mark.parametrize(("args", "calls"), [(AUTO, 1), (OFF, 0), ((False,), 0)])
def test_a_script_that_upscales_before_its_pictures_are_begun(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch, args: tuple[Any, ...], calls: int
) -> None:
    """SD upscale, and Ultimate SD upscale."""
    seen = runs(webui, monkeypatch)
    kind = webui.processing.StableDiffusionProcessingImg2Img
    runner = webui.scripts.scripts_img2img
    with webui.generating():
        p = webui.new_generation(kind, {"init_images": [picture(64, 64)]})
        p.scripts, p.script_args = runner, webui.script_args(runner, args)
        upscale(webui, picture())
        result = webui.process(p)
    assert len(seen) == calls
    assert (f'{KEY}: "Auto, whole picture' in result.info) is bool(calls)


def test_off_holds_for_all_that_a_script_does(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ultimate SD upscale, and others that upscale after pictures are made."""
    seen = runs(webui, monkeypatch)
    with job(webui):
        webui.txt2img(*OFF)
        upscale(webui, picture())
        assert not seen
    upscale(webui, picture())
    assert len(seen) == 1


def test_extras_among_the_operations_of_txt2img(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WebUI calls only the second of its two functions there."""
    seen = runs(webui, monkeypatch)
    own = extras_script(webui)
    made = webui.scripts_postprocessing.PostprocessedImage(picture())
    with job(webui):
        webui.txt2img(*OFF)
        upscale(webui, picture())
        own.process(made, choice="Auto")
        assert made.info[KEY] == "off"
        upscale(webui, picture())
    assert not seen


def test_extras_that_are_skipped_leave_no_choice_behind(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = runs(webui, monkeypatch)
    own = extras_script(webui)
    with job(webui):
        own.process_firstpass(picture(), choice="Off")
    upscale(webui, picture())
    assert len(seen) == 1


def test_an_upscaler_of_an_extension_without_a_scaler(start: Start, gpu: FakeGpu) -> None:
    def other(webui: WebUI) -> None:
        with_upscaler(webui)
        webui.shared.sd_upscalers = [SimpleNamespace(name="another"), *webui.shared.sd_upscalers]

    webui = start(gpu=gpu, before=other)
    assert webui.library("hosts.webui.upscaler").session.is_wanted and not webui.errors_reported


def test_between_generations_it_is_ours_where_the_settings_allow_it(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = runs(webui, monkeypatch)
    webui.txt2img(*OFF)
    upscale(webui, picture())
    assert len(seen) == 1
    allowed = ["Attention", "VAE decode"]
    webui.shared.opts.data["rocm_sd_operations"] = allowed
    webui.txt2img(*AUTO)
    assert upscale(webui, picture()).tobytes() == webui_own(webui, picture()).tobytes()
    assert len(seen) == 1


def test_reload_leaves_no_trace(webui: WebUI) -> None:
    place, walk = webui.esrgan_model, webui.library("hosts.webui.upscaler").Walk
    assert isinstance(place.upscale_with_model, walk)
    assert isinstance(webui.upscaler_utils.upscale_with_model, walk)
    assert isinstance(webui.upscaler_utils.upscale_2, walk)
    webui.script_callbacks.script_unloaded_callback()
    assert not isinstance(place.upscale_with_model, walk)
    assert place.upscale_with_model is webui.upscaler_utils.upscale_with_model
    assert not isinstance(webui.upscaler_utils.upscale_2, walk)


def test_another_extension_has_wrapped_the_network(webui: WebUI) -> None:
    load = webui.modelloader.load_spandrel_model

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        own = model.model.forward
        model.model.forward = lambda x: own(x) * 0.5
        return model

    webui.monkeypatch.setattr(webui.modelloader, "load_spandrel_model", wrapped)
    image = picture()
    made = extras(webui, image)
    assert made.image.tobytes() == webui_own(webui, image).tobytes()
    assert made.info[KEY] == "Auto, left to the WebUI"
    (why,) = webui.library("hosts.webui.upscaler").session.turn.left
    assert "another extension has replaced its forward" in why


def why_left(webui: WebUI, image: Image.Image) -> str:
    """The reason for which a picture is the WebUI's, to the bit."""
    made = extras(webui, image)
    assert made.image.tobytes() == webui_own(webui, image).tobytes()
    (why,) = webui.library("hosts.webui.upscaler").session.turn.left
    return str(why).removeprefix("an upscaler was left to the WebUI: ")


ERRORS: dict[str, tuple[Callable[[], Exception], str]] = {
    "memory": (lambda: torch.cuda.OutOfMemoryError("out of memory"), "too little memory"),
    "an error": (lambda: ArithmeticError("no good"), "ours failed: ArithmeticError: no good"),
}


@pytest.mark.parametrize("which", ERRORS)
def test_what_fails_is_the_webuis(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    make, said = ERRORS[which]

    def call(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise make()

    monkeypatch.setattr(webui.library("upscaler.program").Upscaler, "__call__", call)
    assert said in why_left(webui, picture())


def test_a_convolution_that_may_not_be_ours_leaves_all_to_the_webui(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be torch's in half precision, as a network's of a kind that was never tried."""
    engine, seen = webui.library("engine.engine").engine, runs(webui, monkeypatch)
    usable = engine.usable

    def asked(device: Any, op: Any, session: Any, problem: Any = None) -> list[str]:
        if problem is not None and problem.epilogue == "prelu":
            return ["is being tried in a process of its own first"]
        return list(usable(device, op, session))

    monkeypatch.setattr(engine, "usable", asked)
    why = why_left(webui, picture())
    assert why.endswith("epilogue prelu: is being tried in a process of its own first")
    assert not seen


def test_a_result_that_main_memory_does_not_hold(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WebUI makes it of its tiles, of which each has 8 bits."""
    stand_in, seen = webui.library("hosts.upscaler"), runs(webui, monkeypatch)
    monkeypatch.setattr(stand_in, "host_available_bytes", lambda: 36 * 74 * 100 - 1)
    assert why_left(webui, picture()).startswith("a result of 100 x 74 as a whole takes 0 MiB")
    assert not seen
    monkeypatch.setattr(stand_in, "host_available_bytes", lambda: 36 * 74 * 100)
    extras(webui, picture(seed=1))
    assert len(seen) == 1


def test_without_kernels_it_is_the_webuis(start: Start) -> None:
    webui = start(gpu=FakeGpu(), before=with_upscaler)
    assert "there is no conv" in why_left(webui, picture())


def test_no_start_compiles_an_upscalers_kernels_where_none_is_installed(
    start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    webui = start(gpu=gpu, before=with_upscaler)
    assert webui.library("hosts.webui.background")._later == ["upscaler"]
    webui = start(gpu=gpu, before=functools.partial(with_swinir, monkeypatch))
    assert webui.library("hosts.webui.background")._later == ["upscaler SwinIR"]
    webui = start(gpu=gpu)
    assert webui.library("hosts.webui.background")._later == []


@pytest.mark.parametrize(("windows", "part"), [(False, "upscaler"), (True, "upscaler SwinIR")])
def test_while_kernels_are_compiled_it_is_the_webuis(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch, windows: bool, part: str
) -> None:
    background, asked = webui.library("hosts.webui.background"), []

    def refusal(part: str) -> str:
        asked.append(part)
        return "compiling, 3 of 9 kernels are done"

    monkeypatch.setattr(background, "refusal", refusal)
    monkeypatch.setattr(webui.library("upscaler.steps").Network, "has_windows", windows)
    assert why_left(webui, picture()) == "compiling, 3 of 9 kernels are done"
    assert set(asked) == {part} and background._later[-1] == part


def test_what_cannot_be_begun_costs_no_picture(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    background, seen = webui.library("hosts.webui.background"), runs(webui, monkeypatch)

    def fails(settle: Any, part: str) -> None:
        raise OSError("no cache")

    monkeypatch.setattr(background, "begin_upscaler", fails)
    extras(webui, picture())
    assert len(seen) == 1


def test_a_webui_that_takes_no_tile_size_of_0(webui: WebUI) -> None:
    """As a Forge's that divides by the step from tile to tile."""
    place = webui.esrgan_model
    walk = place.upscale_with_model
    own = walk.theirs

    def divides(model: Any, img: Any, *, tile_size: int, tile_overlap: int = 0) -> Any:
        assert 1 / tile_size
        return own(model, img, tile_size=tile_size, tile_overlap=tile_overlap)

    walk.theirs = divides
    assert "ZeroDivisionError" in why_left(webui, picture())
    assert "forward" not in vars(data_of(webui).scaler.load_model(data_of(webui).data_path).model)


def test_a_network_that_is_not_known_is_the_webuis(webui: WebUI) -> None:
    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.interpolate(self.layer(x), scale_factor=2)

    network = Network()

    def load(*args: Any, **kwargs: Any) -> Any:
        class Model:
            model = network

            def to(self, device: Any) -> None:
                pass

            def __call__(self, image: torch.Tensor) -> torch.Tensor:
                return self.model(image)

        return Model()

    webui.monkeypatch.setattr(webui.modelloader, "load_spandrel_model", load)
    assert "Network" in why_left(webui, picture())


def test_a_corrupt_file_is_told_by_the_webui(webui: WebUI) -> None:
    Path(data_of(webui).data_path).write_bytes(b"nothing that torch can read")
    image = picture()
    made = extras(webui, image)
    assert made.image.size == (96, 72), "enlarged by Lanczos, as the WebUI does it"
    assert KEY not in made.info
    assert any("Unable to load ESRGAN model" in text for text in webui.errors_reported)


@pytest.mark.parametrize("size", [(1, 1), (3, 7), (257, 2), (16411, 2)])
def test_odd_and_tiny_pictures(webui: WebUI, size: tuple[int, int]) -> None:
    image = picture(*size)
    walk = webui.upscaler_utils.upscale_with_model
    model = data_of(webui).scaler.load_model(data_of(webui).data_path)
    made = walk(model, image, tile_size=TILE, tile_overlap=OVERLAP)
    assert apart(made, walk.theirs(model, image, tile_size=0)) <= 1
    assert not webui.library("hosts.webui.upscaler").session.turn.left


@pytest.mark.parametrize("channels", [1, 4])
def test_a_network_of_other_channels_ends_in_the_webuis_error(webui: WebUI, channels: int) -> None:
    """The WebUI gives each network three."""
    model = data_of(webui).scaler.load_model(data_of(webui).data_path)
    shape = {"num_in_ch": channels, "num_out_ch": channels, "num_feat": 8, "num_conv": 2}
    model._model = type(model.model)(**shape, upscale=2)
    walk = webui.upscaler_utils.upscale_with_model
    for call in (walk, walk.theirs):
        with pytest.raises(RuntimeError, match=f"to have {channels} channels, but got 3"):
            call(model, picture(), tile_size=TILE, tile_overlap=OVERLAP)
    (why,) = webui.library("hosts.webui.upscaler").session.turn.left
    assert f"does not have the network's {channels} channels" in why


def test_interrupt_gives_the_picture_as_it_came(
    webui: WebUI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the WebUI does amid its tiles; and it is enlarged by Lanczos then."""
    watch = webui.library("hosts.webui.progress").Watch
    shown: list[str] = []
    progress = watch.progress

    def told(self: Any, done: int, total: int) -> None:
        progress(self, done, 5)
        shown.append(webui.shared.state.textinfo)
        webui.shared.state.interrupt()

    monkeypatch.setattr(watch, "progress", told)
    image = picture()
    made = extras(webui, image, choice="Auto")
    assert made.image.tobytes() == image.resize((96, 72), Image.Resampling.LANCZOS).tobytes()
    assert shown == ["Upscaler: preparing."] and webui.shared.state.textinfo is None
    webui.shared.state.interrupted = False


def test_the_status(webui: WebUI) -> None:
    status, options = webui.library("hosts.webui.status"), webui.library("hosts.ui.options")

    def row(**asked: Any) -> Any:
        rows = status.look(options.Options(**asked)).rows
        return next(each for each in rows if each.operation == "Upscaler")

    assert (row().runs, row().why) == ("our kernels", ())
    extras(webui, picture())
    assert row().runs == "our kernels, whole picture"
    assert row(upscaler="Off").why == ("Upscaler is Off",)
    assert row(enable=False).why == ("Enable is off",)


def test_the_speed_test(webui: WebUI) -> None:
    side = webui.library("hosts.webui.speedtest").WebUI()
    call = side.upscaler()
    assert call is not None and call.note == NAME
    args, _ = call.arguments(64)
    with call.theirs():
        own = call.call(*args)
    with call.ours():
        ours = call.call(*args)
    assert call.compared_at == TILE
    one, _ = call.arguments(TILE)
    with call.theirs():
        one_tile = call.call(*one)
    with call.ours():
        assert (call.call(*one).int() - one_tile.int()).abs().max() <= 1
    assert own.shape == ours.shape and not torch.equal(own, ours)
    webui.shared.opts.data["rocm_sd_operations"] = ["Attention"]
    with pytest.raises(ValueError, match="excludes the upscaler"), call.ours():
        pass
    webui.shared.sd_upscalers = []
    assert side.upscaler() is None


def test_the_seam_is_where_it_was_imported_by_name(start: Start, gpu: FakeGpu) -> None:
    """Also in an extension's module."""

    def other(webui: WebUI) -> None:
        with_upscaler(webui)
        module = type(sys)("an_extensions_upscaler")
        module.__file__ = str(webui.data / "extensions" / "other" / "upscaler.py")
        vars(module)["upscale_with_model"] = webui.upscaler_utils.upscale_with_model
        webui.monkeypatch.setitem(sys.modules, module.__name__, module)

    webui = start(gpu=gpu, before=other)
    walk = webui.library("hosts.webui.upscaler").Walk
    assert isinstance(sys.modules["an_extensions_upscaler"].upscale_with_model, walk)
