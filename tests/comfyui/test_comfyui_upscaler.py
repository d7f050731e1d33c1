"""ComfyUI's upscaling: by our node, by its own with the start option, and what fails."""

from __future__ import annotations

import functools
import gc
import importlib
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts import upscaler
from lib_rocm_sd.hosts.comfyui import everywhere, nodes, status
from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.lab import upscaler_models
from lib_rocm_sd.upscaler import program
from lib_rocm_sd.upscaler.program import Upscaler
from tests.comfyui.conftest import left
from tests.comfyui.play import Engine

SPANDREL = Path(__file__).resolve().parents[1] / "webui" / "double"


@pytest.fixture
def model(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Real-ESRGAN's compact network of small random weights, as Load Upscale Model gives it."""
    monkeypatch.syspath_prepend(str(SPANDREL))
    kind = importlib.import_module("spandrel.architectures.Compact.arch.SRVGG").SRVGGNetCompact
    torch.manual_seed(0)
    network = kind(num_feat=8, num_conv=2, upscale=2).eval()
    return importlib.import_module("spandrel").ImageModelDescriptor(network, 2, 3)


def pictures(count: int = 2, height: int = 13, width: int = 21) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.rand(count, height, width, 3, generator=generator)


def exact(model: Any, image: torch.Tensor) -> torch.Tensor:
    """Without tiles, in float32."""
    made: torch.Tensor = model(image.movedim(-1, -3)).movedim(-3, -1)
    return made


def by_node(model: Any, image: torch.Tensor, level: str = "Auto") -> torch.Tensor:
    (made,) = nodes.RocmSdUpscale().run(model, image, level)
    assert isinstance(made, torch.Tensor)
    return made


def test_the_node_has_no_seams(comfy: Any, model: Any, card: Engine) -> None:
    image = pictures()
    own = comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"].execute(model, image)[0]
    right = exact(model, image)
    assert (own - right).abs().max() > 3 / 255, "tiles are seen"
    made = by_node(model, image)
    assert made.shape == (2, 26, 42, 3) and made.device.type == "cpu"
    assert (made - right).abs().max() < 1 / 255
    assert dict(tally.ours) == {"Upscaler": 1} and not tally.left
    assert comfy.management._required[-1] > 0, "ComfyUI has made room"
    assert "forward" not in vars(model.model)
    assert "Upscaler: 1 of 1 call ours" in status.text()


def test_comfyuis_own_node_with_the_start_option(comfy: Any, model: Any, card: Engine) -> None:
    kind = comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"]
    image, before = pictures(), dict(vars(kind))
    own = kind.execute(model, image)[0]
    everywhere.begin("Auto")
    for method in (kind.execute, kind.upscale, kind().upscale):
        made = method(model, image)
        assert made.result == (made[0],)
        assert (made[0] - exact(model, image)).abs().max() < 1 / 255
    assert dict(tally.ours) == {"Upscaler": 3}
    everywhere.end()
    assert {name: vars(kind)[name] for name in before} == before
    assert torch.equal(kind.execute(model, image)[0], own)


def test_an_older_comfyuis_node(comfy: Any, model: Any, card: Engine) -> None:
    """Its method is the instance's, and gives a tuple."""
    theirs = comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"]

    class ImageUpscaleWithModel:
        FUNCTION = "upscale"

        def upscale(self, upscale_model: Any, image: torch.Tensor) -> tuple[torch.Tensor]:
            return (theirs.execute(upscale_model, image)[0],)

    comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"] = ImageUpscaleWithModel
    image = pictures(1)
    everywhere.begin("Auto")
    (made,) = ImageUpscaleWithModel().upscale(model, image)
    assert (made - exact(model, image)).abs().max() < 1 / 255
    everywhere.end()
    (own,) = ImageUpscaleWithModel().upscale(model, image)
    assert torch.equal(own, theirs.execute(model, image)[0])
    model.model.forward = lambda x: type(model.model).forward(model.model, x)
    assert torch.equal(by_node(model, image), own)


def test_a_models_weights_are_packed_once(
    comfy: Any, model: Any, card: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until they change; where ComfyUI moves them, nothing of them is kept on the card."""
    packed: list[None] = []
    prepare = program.prepare

    def counted(*args: Any) -> Any:
        packed.append(None)
        return prepare(*args)

    monkeypatch.setattr(program, "prepare", counted)
    image = pictures(1)
    for _ in range(2):
        by_node(model, image)
    assert len(packed) == 1
    model.model.body[0].weight.data = model.model.body[0].weight.data * 0.5
    made = by_node(model, image)
    assert (made - exact(model, image)).abs().max() < 1 / 255
    assert len(packed) == 2

    def moved(device: Any) -> None:
        for parameter in model.model.parameters():
            parameter.data = parameter.data.clone()

    monkeypatch.setattr(model, "to", moved, raising=False)
    by_node(model, image)
    assert not upscaler._kept[model].program._ready


def test_a_model_that_nobody_holds_is_gone_at_once(comfy: Any, model: Any, card: Engine) -> None:
    """Hosts may load one for each picture, and do not call Python's collector then."""
    image, network = pictures(1), weakref.ref(model.model)
    another = type(model)(model.model, 2, 3)
    gc.disable()
    try:
        for _ in range(2):
            by_node(another, image)
        del another, model._model
        assert network() is None
    finally:
        gc.enable()


def test_a_forward_that_somebody_kept_is_the_networks_own(
    comfy: Any, model: Any, card: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(model, "to", lambda *args: kept.append(model.model.forward), raising=False)
    image = pictures(1)
    right = exact(model, image)
    by_node(model, image)
    model.model.forward = kept[0]
    assert torch.equal(exact(model, image), right)
    by_node(model, image)
    assert dict(tally.ours) == {"Upscaler": 2} and "forward" not in vars(model.model)


def test_our_node_with_the_start_option_tries_once(
    comfy: Any, model: Any, card: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[None] = []

    def fails(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tried.append(None)
        raise ArithmeticError("no good")

    kind, image = comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"], pictures(1)
    own = kind.execute(model, image)[0]
    monkeypatch.setattr(Upscaler, "__call__", fails)
    everywhere.begin("Auto")
    assert torch.equal(by_node(model, image), own)
    assert len(tried) == 1 and sum(left().values()) == 1
    everywhere.end()


def test_a_comfyuis_node_with_more_inputs(comfy: Any, model: Any, card: Engine) -> None:
    """One that we do not know may ask for another picture."""

    class ImageUpscaleWithModel:
        FUNCTION = "upscale"

        def upscale(self, upscale_model: Any, image: Any, scale_by: float = 1.0) -> tuple[Any, ...]:
            return (image * scale_by, "theirs")

    comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"] = ImageUpscaleWithModel
    image, node = pictures(1), ImageUpscaleWithModel()
    everywhere.begin("Auto")
    made, *rest = node.upscale(model, image=image, scale_by=0.5)
    assert torch.equal(made, image * 0.5) and rest == ["theirs"]
    (said,) = left()
    assert said == "Upscaler: its node was given upscale_model, image, scale_by"
    (made,) = node.upscale(image=image, upscale_model=model)
    assert made.shape == (1, 26, 42, 3)
    with pytest.raises(TypeError, match="nothing_known"):
        node.upscale(model, image, nothing_known=1)  # type: ignore[call-arg]
    everywhere.end()


@pytest.mark.parametrize("start_option", [False, True])
def test_no_picture(comfy: Any, model: Any, card: Engine, start_option: bool) -> None:
    kind, image = comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"], pictures(1)[:0]
    if start_option:
        everywhere.begin("Auto")
        assert kind.execute(model, image)[0].shape == (0, 26, 42, 3)
        everywhere.end()
    else:
        assert by_node(model, image).shape == (0, 26, 42, 3)
    assert left() == {"Upscaler: there is no picture": 1}


@pytest.mark.parametrize(("taken", "given"), [(1, 1), (1, 3), (3, 4), (4, 3), (4, 4)])
def test_channels_that_are_not_three_are_comfyuis(
    comfy: Any, model: Any, card: Engine, taken: int, given: int
) -> None:
    """A grey picture's channel is there three times, all others end in ComfyUI's error."""
    kind = comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"]
    shape = {"num_in_ch": taken, "num_out_ch": taken, "num_feat": 8, "num_conv": 2}
    network = upscaler_models.settle(type(model.model)(**shape, upscale=2))
    model = type(model)(network, 2, taken)
    image = pictures(1)[..., [0] * given]
    if (taken, given) == (1, 1):
        assert torch.equal(by_node(model, image), kind.execute(model, image)[0])
    else:
        with pytest.raises(RuntimeError) as error:
            kind.execute(model, image)
        with pytest.raises(RuntimeError, match=re.escape(str(error.value))):
            by_node(model, image)
    (said,) = left()
    if taken == given:
        assert said == f"Upscaler: it gives {taken} channels, ComfyUI's node 3"
    else:
        shown = f"a picture of shape {(given, 13, 21)} does not have the network's {taken} channels"
        assert said == f"Upscaler: {shown}"


def test_a_comfyui_without_the_node(comfy: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rocm_sd.comfyui")
    comfy.nodes.NODE_CLASS_MAPPINGS.clear()
    assert everywhere.begin("Auto")
    assert "upscaling is ComfyUI's own: ValueError: this ComfyUI has no node" in caplog.text


WHY = {
    "another forward": "Upscaler: another extension has replaced its forward",
    "compiled in place": "Upscaler: it is compiled by torch.compile",
    "no memory": "Upscaler: there is too little memory",
    "an error": "Upscaler: ours failed: ArithmeticError: no good",
    "another network": "Upscaler: Sequential of torch.nn.modules.container is not known",
    "no network": "Upscaler: it is no network that spandrel has loaded",
    "a level that is none": "Upscaler: the node failed: no optimization level 'Fast'",
}


@pytest.mark.parametrize("which", WHY)
def test_what_cannot_be_ours_is_comfyuis(
    comfy: Any, model: Any, card: Engine, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    image = pictures(1)
    error: Exception | None = None
    if which == "another forward":
        model.model.forward = lambda x: type(model.model).forward(model.model, x)
    elif which == "compiled in place":  # as Module.compile does: a call of it never comes to ours
        model.model._compiled_call_impl = functools.partial(type(model.model).forward, model.model)
    elif which == "another network":
        model._model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1))
    elif which == "no network":
        monkeypatch.setattr(type(model), "model", property(lambda self: self._model.forward))
        monkeypatch.setattr(type(model), "to", lambda self, *args: self)
    elif which == "no memory":
        error = torch.cuda.OutOfMemoryError("out of memory")
    elif which == "an error":
        error = ArithmeticError("no good")

    def fails(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert error is not None
        raise error

    if error is not None:
        monkeypatch.setattr(Upscaler, "__call__", fails)
    level = "Fast" if which == "a level that is none" else "Auto"
    made = by_node(model, image, level)
    kind = comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"]
    assert torch.equal(made, kind.execute(model, image)[0])
    (said,) = left()
    assert said.startswith(WHY[which]) and not tally.ours


def test_without_a_card_it_is_comfyuis_to_the_bit(comfy: Any, model: Any) -> None:
    image = pictures(1)
    kind = comfy.nodes.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"]
    assert torch.equal(by_node(model, image), kind.execute(model, image)[0])
    assert left() == {"Upscaler: no GPU: this is the CPU": 1}


def test_cancel_ends_it(
    comfy: Any, model: Any, card: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Upscaler.__call__

    def call(self: Any, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        comfy.management.interrupt_current_processing()
        kwargs["progress"](1, 3)
        return whole(self, image, **kwargs)

    monkeypatch.setattr(Upscaler, "__call__", call)
    with pytest.raises(comfy.management.InterruptProcessingException):
        by_node(model, pictures())
    assert "forward" not in vars(model.model) and not tally.ours
