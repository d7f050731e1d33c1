"""The speed test of the model and the VAE that are given to its node.

The node waits for it, so ComfyUI does nothing else meanwhile. Whole pictures are not made: a step
of the model is called as samplers call it. Read in Comfy-Org/ComfyUI a125cd84 (0.3.64):
comfy/model_base.py, comfy/model_management.py, comfy/ldm/modules/attention.py, folder_paths.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import gate, trouble
from lib_rocm_sd.hosts.comfyui import host, unet
from lib_rocm_sd.hosts.comfyui.model import WITHOUT, is_dynamic, optimized
from lib_rocm_sd.hosts.comfyui.vae import given, usable
from lib_rocm_sd.lab import speed_result
from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.speed_job import Attention, Busy, HostCall, HostSide, Picture, PictureWish
from lib_rocm_sd.lab.speed_result import OURS, WHAT, Document, Request
from lib_rocm_sd.lab.speed_session import session as speed
from lib_rocm_sd.lab.speed_text import machine_line, printable, to_markdown
from lib_rocm_sd.lab.svg import COLOURS, number
from lib_rocm_sd.modules.faster import ours_whatever
from lib_rocm_sd.runtime import background

FOLDER = "rocm-sd-speed-test"
BATCH, TOKENS, FACTOR = 2, 77, 8
"""The prompt and the negative prompt; pixels of a picture per pixel of a latent image."""
TIME = 500.0
POLL_S, READY_S = 0.2, 600.0
PARTS_OF_PROGRESS = 100
WIDTH, LINE, PAD, NAME, BAR = 1024, 22, 16, 330, 430
"""Width of the picture, line height, border, start and longest length of the bars, in pixels."""
INK, PAPER, FAINT = "#222222", "#ffffff", "#777777"
Line = tuple[str, float, str, str]
"""What stands at the left, the bar's share of the longest, its colour, what stands behind it."""


class Comfy(HostSide):
    """The HostSide of one node's inputs; `model` a ModelPatcher, `vae` a comfy.sd.VAE, or None."""

    host_name = "ComfyUI"

    def __init__(self, model: Any, vae: Any, level: str) -> None:
        self._model, self._vae, self._level = model, vae, level

    @property
    def device(self) -> torch.device:
        """Where the model is brought, or else the VAE: that may be another card than ComfyUI's."""
        patchers = (self._model, getattr(self._vae, "patcher", None))
        devices = [getattr(each, "load_device", None) for each in patchers]
        return next((each for each in devices if isinstance(each, torch.device)), host.device())

    @property
    def session(self) -> Session:
        return host.session_of(self._level)

    def busy(self) -> str:
        return "kernels are being compiled or tried; run it again later" if at_work() else ""

    def attention_methods(self) -> dict[str, Attention]:
        """What ComfyUI was started with."""
        theirs = host.attribute("comfy.ldm.modules.attention", "optimized_attention")
        if not callable(theirs):
            return {}

        def method(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            apart = (t.transpose(1, 2) for t in (q, k, v))
            return theirs(*apart, q.shape[2], skip_reshape=True)

        return {getattr(theirs, "__name__", "its own"): method}

    def vae(self) -> Any:
        decoder = getattr(given(getattr(self._vae, "first_stage_model", None)), "decoder", None)
        return decoder if isinstance(decoder, nn.Module) else None

    def unet(self) -> HostCall | None:
        model = getattr(self._model, "model", None)
        denoising: Any = getattr(model, "diffusion_model", None)
        why = unet.obstacle(denoising)
        if not why and type(denoising).__name__ != unet.UNET_CLASS[1]:
            why = "the speed test has no inputs for a transformer"
        if model is None or why:
            raise ValueError(why or "no model is given")
        if is_dynamic(self._model):
            node = "give it the model of ROCm SD Optimization with unet Auto"
            raise ValueError(f"DynamicVRAM loads this model: {node}, or {WITHOUT}")
        return denoiser(self._model, self.device, self._level)

    def image(self, wish: PictureWish) -> Picture:
        raise ValueError("whole pictures are made by workflows")

    def output_directory(self) -> Path | None:
        asked = host.attribute("folder_paths", "get_output_directory")
        return Path(asked()) / FOLDER if callable(asked) else None

    def load(self) -> None:
        """Have ComfyUI bring both to the device."""
        patchers = [getattr(self._vae, "patcher", None), self._model]
        present = [patcher for patcher in patchers if patcher is not None]
        loads = host.attribute("comfy.model_management", "load_models_gpu")
        if present and callable(loads):
            loads(present)


def denoiser(patcher: Any, device: torch.device, level: str) -> HostCall:
    """A step of `BaseModel.apply_model` by the model's options, without ours and with them."""
    model, dtype = patcher.model, next(patcher.model.diffusion_model.parameters()).dtype
    ours, theirs = (
        optimized(patcher, level, attention=on, unet=on).model_options[host.OPTIONS]
        for on in (True, False)
    )
    wanted = [theirs]

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return model.apply_model(*args, transformer_options=dict(wanted[0]), **kwargs)

    @contextmanager
    def with_options(options: Any) -> Iterator[None]:
        wanted[0] = options
        try:
            yield
        finally:
            wanted[0] = theirs

    @contextmanager
    def with_ours() -> Iterator[None]:
        why = "; ".join(unet.unusable(device))
        if why:
            raise ValueError(f"the UNet's blocks are not ours: {why}")
        with ours_whatever(), with_options(ours):
            yield

    return HostCall(
        call,
        lambda size: arguments(model, device, size),
        lambda: with_options(theirs),
        with_ours,
        str(dtype).removeprefix("torch."),
    )


def arguments(
    model: Any, device: torch.device, size: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a step amid sampling, from a seed. ValueError if the model is not as known."""
    generator = torch.Generator("cpu").manual_seed(size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    cross = next(
        (m for name, m in model.diffusion_model.named_modules() if name.endswith("attn2")), None
    )
    first = next((m for m in model.diffusion_model.modules() if isinstance(m, nn.Conv2d)), None)
    width = getattr(getattr(cross, "to_k", None), "in_features", None)
    if first is None or width is None:
        raise ValueError("it is not known how this model is called")
    side, own = -(-size // FACTOR), 4
    sigma = model.model_sampling.sigma(torch.tensor([TIME])).to(device).float().expand(BATCH)
    more: dict[str, Any] = {"c_crossattn": draw(BATCH, TOKENS, width)}
    if first.in_channels > own:
        more["c_concat"] = draw(BATCH, first.in_channels - own, side, side)
    if getattr(model, "adm_channels", 0):
        more["y"] = draw(BATCH, model.adm_channels)
    return (draw(BATCH, own, side, side) * sigma.view(-1, 1, 1, 1), sigma), more


def at_work() -> bool:
    """Whether kernels are compiled, or tried by children, which takes the card's time."""
    return background.state().running or gate.state().running


def run(model: Any, vae: Any, level: str, preset: str) -> Document:
    """A whole test, shown on the node. Raises what ComfyUI raises once the user presses Cancel;
    ValueError or Busy with a reason.
    """
    side = Comfy(model, vae, level)
    unfit = identify(side.device).reasons
    if unfit:
        raise ValueError(f"nothing of ROCm SD can run here ({'; '.join(unfit)})")
    parts = ("attention", *(["vae"] if vae is not None else []), *(["step"] if model else []))
    side.load()
    _get_ready(side.device)
    ident = speed.start(Request(parts, preset), side)
    show = host.progress_bar()
    try:
        while not speed.wait(POLL_S):
            show(round(PARTS_OF_PROGRESS * speed.progress().fraction), PARTS_OF_PROGRESS)
            host.stop_if_interrupted()
    except host.Cancelled as cancelled:
        raise cancelled.error from None
    finally:
        speed.cancel()
        speed.wait()
    content = speed.result(ident)
    assert content is not None
    return speed_result.of(content)


def _get_ready(device: torch.device) -> None:
    """Wait until nothing is compiled or tried any more."""
    end = time.monotonic() + READY_S
    for begin in (usable, unet.unusable):
        begin(device)
        while at_work() and time.monotonic() < end:
            host.stop_if_interrupted()
            time.sleep(POLL_S)


def nothing_ran(document: Document) -> str:
    """The headline where no time of ours was measured, with the first reason; else empty."""
    own = [row for row in document.rows if row.way == OURS[row.test]]
    if any(not row.reason for row in own):
        return ""
    why = next((row.reason for row in own), "the test was ended before")
    return f"Nothing of ROCm SD ran: {why}"


# -- the plot: bars drawn by Pillow ---------------------------------------------------------------


def plot_of(document: Document) -> torch.Tensor:
    """(1, H, W, 3), 0..1."""
    headline = nothing_ran(document)
    lines: list[Line] = [
        *([(headline, 0.0, INK, "")] if headline else []),
        (f"ROCm SD speed test, {document.date[:10]}", 0.0, INK, ""),
        (machine_line(document.machine), 0.0, INK, ""),
    ]
    for test in WHAT:
        cases = dict.fromkeys(row.case for row in document.rows if row.test == test)
        for case in cases:
            lines += [("", 0.0, INK, ""), (f"{test}: {case}", 0.0, INK, "")]
            rows = [row for row in document.rows if (row.test, row.case) == (test, case)]
            lines += _bars(rows, OURS[test])
    lines += [(note, 0.0, FAINT, "") for note in document.notes]
    return drawn(lines)


def _bars(rows: Sequence[Row], ours: str) -> list[Line]:
    most = max([row.median for row in rows if not row.reason], default=0.0)
    lines = []
    for row in rows:
        colour = COLOURS[0] if row.way == ours else COLOURS[1]
        if row.reason or not most > 0:
            lines.append((row.way, 0.0, FAINT, row.reason))
        else:
            said = f"{number(row.median)} {row.unit}"
            lines.append((row.way, row.median / most, colour, said))
    return lines


def drawn(lines: Sequence[Line]) -> torch.Tensor:
    """One picture of them, as high as it has to be."""
    from PIL import Image, ImageDraw, ImageFont

    height = 2 * PAD + LINE * max(len(lines), 1)
    picture = Image.new("RGB", (WIDTH, height), PAPER)
    draw, font = ImageDraw.Draw(picture), _font(ImageFont)
    for place, (name, share, colour, said) in enumerate(lines):
        top = PAD + place * LINE
        plain = not said and not share
        ink = colour if plain else INK
        draw.text((PAD, top), printable(name), fill=ink, font=font)
        end = NAME + round(BAR * share)
        if share:
            draw.rectangle((NAME, top + 2, end, top + LINE - 6), fill=colour)
        draw.text((end + 8, top), printable(said), fill=INK if share else FAINT, font=font)
    data = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return data.view(1, height, WIDTH, 3).float() / 255


def _font(fonts: Any) -> Any:
    """Pillow's own: a smooth one where it has that."""
    try:
        return fonts.load_default(14)
    except TypeError:  # before 10.1
        return fonts.load_default()


# -- the node -------------------------------------------------------------------------------------


def run_node(preset: str, level: str, model: Any, vae: Any) -> tuple[torch.Tensor, str, str]:
    """What the node gives: a plot (1, H, W, 3), the result as JSON, and as Markdown. A test that
    cannot run gives the reason; only a Cancel is raised.
    """
    stops = host.attribute("comfy.model_management", "InterruptProcessingException") or ()
    try:
        document = run(model, vae, level, preset)
    except stops:
        raise
    except Exception as error:
        plain = isinstance(error, (ValueError, Busy)) or is_out_of_memory(error)
        why = str(error) if plain else trouble.once(error)
        said = f"The speed test did not run: {why}"
        plot = drawn([(line, 0.0, INK, "") for line in said.splitlines()])
        return plot, json.dumps({"reason": why}), said
    content = json.dumps(document.as_dict(), indent=1, ensure_ascii=False)
    headline = nothing_ran(document)
    said = f"{headline}.\n\n" if headline else ""
    return plot_of(document), content, said + to_markdown(document)
