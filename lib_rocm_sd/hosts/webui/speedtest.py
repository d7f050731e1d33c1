"""The speed test in the WebUI: its checkpoint, its processing, its queue; the tab.

Pictures go through process_images() with no scripts, but for our own one's hooks around it, so that
another extension takes no part. Nothing is saved by the WebUI, and its last prompt stays. A step is
the checkpoint's UNet, called alone as a sampler calls it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.ui.options import Options
from lib_rocm_sd.hosts.webui import host, settings, several
from lib_rocm_sd.hosts.webui import script as a1111_script
from lib_rocm_sd.hosts.webui import session as a1111_session
from lib_rocm_sd.hosts.webui import unet as unet_host
from lib_rocm_sd.hosts.webui import upscaler as upscaler_host
from lib_rocm_sd.hosts.webui import vae as a1111_vae
from lib_rocm_sd.hosts.webui.attention import autocast
from lib_rocm_sd.hosts.webui.seams import optimizer
from lib_rocm_sd.hosts.webui.trials import AT_WORK as TRYING
from lib_rocm_sd.hosts.webui.trials import trials
from lib_rocm_sd.lab.speed_job import (
    PROMPT,
    SEED,
    Attention,
    Busy,
    Cancelled,
    HostCall,
    Picture,
    PictureWish,
    Steps,
)
from lib_rocm_sd.lab.speed_session import session
from lib_rocm_sd.modules.faster import ours_whatever
from lib_rocm_sd.ops.dtypes import HALVES
from lib_rocm_sd.runtime import background

JOB = "rocm_sd speed test"
FOLDER = "rocm-sd-speed-test"
SAMPLER, CFG_SCALE = "Euler", 7.0
NO_CHECKPOINT = "no checkpoint is loaded"
AT_WORK = "the WebUI is busy: a generation is running or waiting; try again when it finishes"

COMPILING = "kernels are being compiled; try again when that finishes"
ENLARGED = 2
"""Sides of an upscaled picture for one: as hires fix asks at first, and one call of a network."""
BATCH, TOKENS, FACTOR = 2, 77, 8
"""The prompt and the negative prompt; pixels of a picture per pixel of a latent image."""


class WebUI:
    """The HostSide of the WebUI; one serves the process."""

    def __init__(self) -> None:
        self._moved: list[tuple[nn.Module, torch.device]] = []

    @property
    def device(self) -> torch.device:
        return host.device()

    @property
    def session(self) -> Session:
        return a1111_session.current()

    def busy(self) -> str:
        state: Any = host.attribute("modules.shared", "state")
        at_work = getattr(state, "job", "") or getattr(state, "job_count", 0)
        waiting = host.attribute("modules.progress", "pending_tasks")
        if background.state().running:
            return COMPILING
        if trials.state().running:
            return TRYING
        return AT_WORK if at_work or waiting else ""

    @contextmanager
    def queue(self) -> Iterator[None]:
        a1111_session.end_measuring()
        lock: Any = host.attribute("modules.call_queue", "queue_lock")
        if lock is not None and not lock.acquire(blocking=False):
            raise Busy(AT_WORK)
        state: Any = host.attribute("modules.shared", "state")
        try:
            _call(state, "begin", job=JOB)
            yield
        finally:
            try:
                unet_host.session.end()
                self._move_back()
                _call(state, "end")
            finally:
                if lock is not None:
                    lock.release()

    def attention_methods(self) -> dict[str, Attention]:
        """What the WebUI computes attention by without us, called as a layer of the UNet does."""
        ours = optimizer()
        methods: dict[str, Attention] = {} if ours is None else ours.methods()
        return methods

    def vae(self) -> Any:
        """With --lowvram and --medvram moved to the GPU, until a picture is made or the end."""
        decoder = getattr(host.vae_of(_model()), "decoder", None)
        if not isinstance(decoder, nn.Module):
            return None
        self._move_here(decoder)
        return decoder

    def unet(self) -> HostCall | None:
        """As the VAE; with --lowvram the WebUI moves its parts itself, and so does a Forge."""
        self._move_back()
        model = _model()
        unet = host.unet_of(model)
        why = unet_host.obstacle(unet)
        if unet is None or why:
            raise ValueError(why)
        if host.forge() is not None:
            host.bring(model)
        elif not getattr(host.attribute("modules.shared", "cmd_opts"), "lowvram", False):
            self._move_here(unet)
        return denoiser(unet, self.device)

    def upscaler(self) -> HostCall | None:
        """The first that is installed, of those whose networks may be ours. It loads its file each
        time, as for every picture.
        """
        self._move_back()
        known = host.attribute("modules.shared", "sd_upscalers") or ()
        data = next((each for each in known if upscaler_host.session.serves(each)), None)
        return None if data is None else upscaling(data)

    def _move_here(self, module: nn.Module) -> None:
        at = next(module.parameters()).device
        if at.type != self.device.type:
            _call(host.module("modules.lowvram"), "send_everything_to_cpu")
            module.to(self.device)
            self._moved.append((module, at))

    def image(self, wish: PictureWish) -> Picture:
        """By the loaded checkpoint. ValueError where the extension on would change nothing."""
        self._move_back()
        model = _model()
        if wish.enabled and _why_nothing():
            raise ValueError(f"this extension is not in use: {_why_nothing()}")
        p = _processing(model, wish.steps, wish.size)
        try:
            with ours_whatever(), _last_prompt_kept(), _switched(p, wish.enabled, wish.unet):
                counted = Steps(wish, self.device)
                with _noted(model, counted):
                    image, seconds = _made(p)
        except (Cancelled, RuntimeError, MemoryError, ValueError):
            raise
        except Exception as error:
            raise ValueError(trouble.once(error)) from error
        finally:
            _call(p, "close")
            _call(host.attribute("modules.shared", "total_tqdm"), "clear")
        return Picture(image, seconds, counted.per_second(), counted.peak_mib())

    def output_directory(self) -> Path | None:
        outputs = host.attribute("modules.paths_internal", "default_output_dir")
        data = host.attribute("modules.paths_internal", "data_path")
        base = outputs or (data and Path(data) / "outputs")
        return Path(base) / FOLDER if base else None

    def _move_back(self) -> None:
        while self._moved:
            module, device = self._moved.pop()
            module.to(device)


def _model() -> Any:
    """The loaded checkpoint. ValueError where there is none."""
    model = host.loaded_model()
    if model is None:
        raise ValueError(NO_CHECKPOINT)
    return model


def _call(owner: Any, name: str, **arguments: Any) -> None:
    """A method that not every WebUI has, without what it does not take."""
    method = getattr(owner, name, None)
    if callable(method):
        method(**_taken(method, arguments))


def _taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that `function` takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _processing(model: Any, steps: int, size: int) -> Any:
    """A txt2img of one picture that nothing is saved of."""
    kind: Any = host.attribute("modules.processing", "StableDiffusionProcessingTxt2Img")
    if kind is None:
        raise ValueError("this WebUI has no txt2img that could be called")
    return kind(
        **_taken(
            kind,
            {
                "sd_model": model,
                "prompt": PROMPT,
                "negative_prompt": "",
                "styles": [],
                "seed": SEED,
                "subseed": SEED,
                "sampler_name": SAMPLER,
                "steps": steps,
                "cfg_scale": CFG_SCALE,
                "width": size,
                "height": size,
                "batch_size": 1,
                "n_iter": 1,
                "restore_faces": False,
                "tiling": False,
                "enable_hr": False,
                "do_not_save_samples": True,
                "do_not_save_grid": True,
                "override_settings": {},
            },
        )
    )


def _made(p: Any) -> tuple[Any, float]:
    """The picture, and the seconds from prompt to picture."""
    process_images: Any = host.attribute("modules.processing", "process_images")
    state: Any = host.attribute("modules.shared", "state")
    for name in ("interrupted", "skipped", "stopping_generation"):
        setattr(state, name, False)
    begin = time.perf_counter()
    processed = process_images(p)
    seconds = time.perf_counter() - begin
    if state.interrupted or state.skipped or getattr(state, "stopping_generation", False):
        raise ValueError("interrupted in the WebUI")
    if not processed.images:
        raise ValueError("the WebUI made no picture")
    return processed.images[0], seconds


@contextmanager
def _switched(p: Any, enabled: bool, unet: bool) -> Iterator[None]:
    """Within this, the extension is on or off, as by Enable in the accordion, and so are the UNet's
    blocks; ValueError where these cannot be on.
    """
    script = a1111_script.RocmSdScript()
    asked = Options(enabled, a1111_session.current().level, unet="Auto" if unet else "Off")
    arguments = astuple(asked)
    try:
        script.before_process(p, *arguments)
        script.process(p, *arguments)
        if unet:
            check(asked)
        yield
    finally:
        script.postprocess(p, None, *arguments)


@contextmanager
def _last_prompt_kept() -> Iterator[None]:
    """Within this, the WebUI does not write params.txt, from which it gives back a prompt."""
    options: Any = host.attribute("modules.shared", "cmd_opts")
    before = getattr(options, "no_prompt_history", None)
    with suppress(AttributeError):
        options.no_prompt_history = True
    try:
        yield
    finally:
        if before is not None:
            options.no_prompt_history = before


def _why_nothing() -> str:
    """Why the extension on would change nothing; empty where it does something."""
    ours = optimizer()
    allowed = settings.current().attention
    if allowed and ours is not None and ours.is_applied:
        return ""
    why = a1111_vae.refusals() if not host.shortcomings() else host.shortcomings()
    if not why:
        return ""
    return (engine.usable(host.device()) or why)[0]


@contextmanager
def _noted(model: Any, steps: Steps) -> Iterator[None]:
    """Within it, each call of the model's UNet is noted; one that begins after a cancel raises."""

    def note(*_: Any) -> None:
        steps.note(getattr(host.attribute("modules.shared", "state"), "sampling_step", 0))

    unet = host.unet_of(model)
    hook = None if unet is None else unet.register_forward_pre_hook(note)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def denoiser(model: nn.Module, device: torch.device) -> HostCall:
    """ValueError with a reason where it is not known how to call `model`."""
    dtype = _dtype(model)

    def arguments(size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _arguments(model, device, dtype, size)

    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            return model(*args, **kwargs)

    arguments(FACTOR)
    return HostCall(call, arguments, _theirs, ours, str(dtype).removeprefix("torch."))


def upscaling(data: Any) -> HostCall:
    """`data`: the WebUI's UpscalerData. Its code makes a picture as large as a tile without seams,
    and gives a smaller one black borders.
    """
    session = upscaler_host.session

    def call(picture: Any) -> torch.Tensor:
        session.begin()
        made = data.scaler.upscale(picture, ENLARGED, data.data_path)
        if session.turn.left:
            raise ValueError(next(iter(session.turn.left)))
        return torch.frombuffer(bytearray(made.tobytes()), dtype=torch.uint8)

    @contextmanager
    def within(choice: str) -> Iterator[None]:
        asked = Options(level=a1111_session.current().level, upscaler=choice)
        session.set_up(asked)
        try:
            why = upscaler_host.why_not(asked) if choice == "Auto" else []
            if why:
                raise ValueError(why[0])
            yield
        finally:
            session.end()

    return HostCall(
        call,
        lambda size: ((_noise(size),), {}),
        lambda: within("Off"),
        lambda: within("Auto"),
        "uint8",
        data.name,
        int(getattr(host.attribute("modules.shared", "opts"), "ESRGAN_tile", 0)),
    )


def _noise(size: int) -> Any:
    """A picture of size x size pixels, from a seed."""
    from PIL import Image

    generator = torch.Generator("cpu").manual_seed(size)
    values = torch.randint(256, (size, size, 3), generator=generator, dtype=torch.uint8)
    return Image.frombytes("RGB", (size, size), bytes(values.flatten().tolist()))


def _dtype(model: nn.Module) -> torch.dtype:
    """The latents' dtype: a Forge's computation dtype, else the weights' dtype or, where these are
    narrow, the dtype that the WebUI computes in.
    """
    dtype = getattr(model, "computation_dtype", None) or next(model.parameters()).dtype
    if dtype in (torch.float32, *HALVES):
        return dtype
    computed = host.attribute("modules.devices", "dtype_unet")
    return computed if isinstance(computed, torch.dtype) else torch.float16


def _arguments(
    model: Any, device: torch.device, dtype: torch.dtype, size: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one step, from a seed: latents, times, text, and SDXL's vector conditioning."""
    generator = torch.Generator("cpu").manual_seed(size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    named = dict(model.named_modules())
    cross = next((m for name, m in named.items() if name.endswith("attn2")), None)
    if first is None or cross is None:
        raise ValueError("we do not know how to call this checkpoint's UNet")
    text_width = getattr(getattr(cross, "to_k", None), "in_features", None)
    if text_width is None:
        raise ValueError("we do not know which text this checkpoint's UNet reads")
    side = -(-size // FACTOR)
    times = torch.full((BATCH,), 501.0, device=device, dtype=dtype)
    text = draw(BATCH, TOKENS, text_width)
    more: dict[str, Any] = {}
    if getattr(model, "num_classes", None) is not None:
        widths = (getattr(m, "in_features", None) for m in model.label_emb.modules())
        width = next((each for each in widths if isinstance(each, int)), None)
        if width is None:
            raise ValueError("we do not know which labels this checkpoint's UNet needs")
        more["y"] = draw(BATCH, width)
    if "transformer_options" in inspect.signature(type(model).forward).parameters:
        more["transformer_options"] = {}  # a Forge writes into it, into the default too
    return (draw(BATCH, first.in_channels, side, side), times), {"context": text, **more}


@contextmanager
def _theirs() -> Iterator[None]:
    """Within this, the WebUI's own code computes all of a step."""
    seam = optimizer()
    aside: Callable[[bool], None] = getattr(seam, "step_aside", lambda aside: None)
    before = getattr(seam, "aside", False)
    several.session.end()
    unet_host.session.end()
    aside(True)
    try:
        yield
    finally:
        aside(before)


@contextmanager
def ours() -> Iterator[None]:
    """Within this, the blocks are ours as by *UNet* Auto. ValueError where none can be."""
    asked = Options(level=a1111_session.current().level, unet="Auto")
    several.session.end()
    try:
        with ours_whatever():
            unet_host.session.begin()
            unet_host.session.establish(asked)
            check(asked)
            yield
    finally:
        unet_host.session.end()


def check(asked: Options) -> None:
    """Raises ValueError with a reason where no block is ours, though `asked` for."""
    rows = unet_host.session.look()
    if unet_host.counted(rows)[0]:
        return
    left = [unet_host.explained(why) for row in rows for why in row.left]
    why = [*unet_host.why_not(asked), *left, unet_host.UNKNOWN]
    raise ValueError(f"the UNet's blocks are not ours: {why[0]}")


side = WebUI()
"""The side of the process."""


def tab() -> list[tuple[Any, str, str]]:
    """Callback: the Speed test tab, as on_ui_tabs takes it."""
    from lib_rocm_sd.hosts.ui import speed_tab
    from lib_rocm_sd.hosts.ui.check_part import CheckView
    from lib_rocm_sd.lab.card_check import check

    checked = CheckView(check, side, trials.look_again)
    return [(speed_tab.build(session, side, checked), speed_tab.TITLE, speed_tab.TAB_ID)]
