"""The always-on script: the accordion, what happens around one generation, and axes for the WebUI's
X/Y/Z plot. And the script of Extras, which has a choice of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from lib_rocm_sd import report
from lib_rocm_sd.hosts.ui import accordion, options
from lib_rocm_sd.hosts.ui.options import Options
from lib_rocm_sd.hosts.webui import (
    attention,
    background,
    host,
    session,
    settings,
    status,
)
from lib_rocm_sd.hosts.webui.seams import optimizer as attention_seam
from lib_rocm_sd.hosts.webui.several import session as several
from lib_rocm_sd.hosts.webui.trials import trials
from lib_rocm_sd.hosts.webui.unet import counted
from lib_rocm_sd.hosts.webui.unet import session as unet
from lib_rocm_sd.hosts.webui.upscaler import session as upscaler
from lib_rocm_sd.hosts.webui.vae import session as vae
from lib_rocm_sd.policy import LEVELS
from lib_rocm_sd.shipped import ATTENTION_PART
from lib_rocm_sd.trials.gate import WAITS
from lib_rocm_sd.upscaler.program import PART as UPSCALER

FILE = "xyz_grid.py"
ATTRIBUTE = "rocm_sd_axes"
"""Where the cell's values are kept, on the WebUI's `p`, which is a copy for each cell."""


class RocmSdScript:
    """Mixed with the WebUI's Script by `make`.

    A generation for which Enable is off gets, from before its model is loaded until `postprocess`,
    exactly what the WebUI would have without us. `postprocess` is not called when a generation
    fails, and one may run inside another: so each hook says anew what holds from there on.
    """

    def title(self) -> str:
        return options.TITLE

    def show(self, is_img2img: bool) -> Any:
        return host.attribute("modules.scripts", "AlwaysVisible")

    def ui(self, is_img2img: bool) -> list[Any]:
        elem_id: Any = getattr(self, "elem_id", lambda name: f"rocm_sd_{name}")
        controls = accordion.build(elem_id, status.look, trials.check)
        for control in (controls.enable, controls.several, controls.cards):
            control.change(_prepare, list(controls), queue=False, show_progress="hidden")
        self.infotext_fields = [
            (controls.enable, options.enable_from),
            (controls.level, options.level_from),
            (controls.vae, options.vae_from),
            (controls.budget, options.budget_from),
            (controls.unet, options.unet_from),
            (controls.upscaler, options.upscaler_from),
        ]
        keys = (options.INFOTEXT_KEY, options.UNET_KEY, options.VAE_KEY, options.UPSCALER_KEY)
        self.paste_field_names = list(keys)
        return list(controls)

    def setup(self, p: Any, *args: Any) -> None:
        upscaler.set_up(_asked(p, args))

    def before_process(self, p: Any, *args: Any) -> None:
        _establish(p, args)

    def process(self, p: Any, *args: Any) -> None:
        for message in options.parse(*args)[1]:
            host.say(message)
        report.begin()
        optimizer = attention_seam()
        if optimizer is not None:
            optimizer.order()
        attention.calls.clear()
        vae.begin()
        unet.begin(*_turn_and_steps(p))
        upscaler.begin()
        _note(p, _establish(p, args))

    def before_process_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        several.begin()
        _establish(p, args)

    def process_before_every_sampling(self, p: Any, *args: Any, **kwargs: Any) -> None:
        _establish(p, args)

    def post_sample(self, p: Any, samples: Any, *args: Any) -> None:
        _establish(p, args)

    def postprocess_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        _note(p, _asked(p, args))

    def postprocess(self, p: Any, processed: Any, *args: Any) -> None:
        vae.end()
        upscaler.end()
        optimizer = attention_seam()
        if optimizer is not None:
            optimizer.step_aside(not settings.current().attention)
        if _asked(p, args).enable:
            session.measure()


class RocmSdExtras:
    """Mixed with the WebUI's ScriptPostprocessing by `make_extras`. A request of the API that does
    not name it has the default: None.
    """

    name = host.NAME
    order = 100_000
    """Behind what upscales, to note what ran."""
    _wanted: bool | None = None

    def ui(self) -> dict[str, Any]:
        import gradio as gr

        choice = gr.Radio(
            list(options.UPSCALER_MODES),
            value=options.DEFAULTS.upscaler,
            label=options.UPSCALER_KEY,
            elem_id="extras_rocm_sd_upscaler",
        )
        return {"choice": choice}

    def process_firstpass(self, pp: Any, choice: Any = None) -> None:
        report.begin()
        upscaler.set_up(_extras(choice))
        if upscaler.is_wanted is not self._wanted:
            # the WebUI keeps upscaled pictures, whoever made them
            host.attribute("modules.scripts", "scripts_postproc").image_changed()
        self._wanted = upscaler.is_wanted

    def process(self, pp: Any, choice: Any = None) -> None:
        # Among the operations of txt2img and img2img, what holds is the accordion's choice.
        if upscaler.turn.asked and upscaler.asked.enable:
            pp.info[options.UPSCALER_KEY] = _upscaled(upscaler.asked)


def _extras(choice: Any) -> Options:
    """What Extras asks for."""
    count = len(fields(Options)) - 1
    asked, messages = options.parse(*[None] * count, choice)
    for message in messages:
        host.say(message)
    return asked


def _prepare(*values: Any) -> None:
    """What the page's controls are now."""
    several.prepare(options.parse(*values)[0])


def _asked(p: Any, args: tuple[Any, ...]) -> Options:
    """What the arguments ask for, or the cell of an X/Y/Z plot that `p` is."""
    asked, values = options.parse(*args)[0], getattr(p, ATTRIBUTE, None)
    return replace(asked, **values) if isinstance(values, dict) else asked


def _establish(p: Any, args: tuple[Any, ...]) -> Options:
    """Make what is asked for hold from now on, as far as the settings allow."""
    asked = _asked(p, args)
    allowed = settings.current()
    session.establish(asked.level if asked.enable else None, allowed.headroom_mib << 20)
    optimizer = attention_seam()
    if optimizer is not None:
        optimizer.step_aside(not (asked.enable and allowed.attention))
    vae.establish(asked)
    upscaler.establish(asked)
    unet.establish(asked)
    several.establish(asked)
    return asked


def _note(p: Any, asked: Options) -> None:
    """Write into the infotext what ran so far; nothing where we had no part in the generation."""
    optimizer, written = attention_seam(), p.extra_generation_params
    if optimizer is None:
        return
    if optimizer.is_applied:
        left = attention.calls.left.total()
        ran = [_ran("UNet", "attention"), f"left to the WebUI: {left} calls" if left else ""]
        if not optimizer.works:
            ran = ["attention left to the WebUI", background.at_work(ATTENTION_PART)]
        elif not any(ran) and optimizer.displaced_by():
            ran = ["attention left to another extension"]
        written[options.INFOTEXT_KEY] = asked.infotext(_listed(ran))
    if asked.enable and vae.can_serve:
        ran = [*vae.turn.ran, _ran("VAE", "conv"), "left to the WebUI" if vae.turn.left else ""]
        written[options.VAE_KEY] = asked.vae_infotext(_listed(ran))
    differed = unet.news()
    ours, total = counted(unet.look())
    others = options.INFOTEXT_KEY in written or options.VAE_KEY in written
    if asked.enable and unet.may_serve and (others or ours):
        checked = "a check differed" if differed else ""
        written[options.UNET_KEY] = asked.unet_infotext(_listed([_blocks(ours, total), checked]))
    if asked.enable and upscaler.turn.asked:
        written[options.UPSCALER_KEY] = _upscaled(asked)
    for message in (*vae.news(), *differed, *unet.timed.news(), *upscaler.news()):
        p.comment(f"{host.NAME}: {message}")


def _turn_and_steps(p: Any) -> tuple[int, int]:
    """The first seed, so that the same picture is checked in the same places; and the steps that it
    makes of those that were asked for.
    """
    seeds = getattr(p, "all_seeds", None) or [getattr(p, "seed", 0)]
    share = getattr(p, "denoising_strength", None) if getattr(p, "init_images", None) else None
    return int(seeds[0]), max(int((getattr(p, "steps", 1) or 1) * (share or 1)), 1)


def _blocks(ours: int, total: int) -> str:
    """For instance '80 of 82 blocks, linear: rocm_sd, torch, conv: torch'."""
    waits = any(WAITS in why for row in unet.rows for why in row.left)
    doing = background.BEING_TRIED if waits else background.at_work(*background.unet_parts())
    if not ours:
        return _listed(["left to the WebUI", doing])
    others = f"others {doing}" if doing and ours < total else ""
    ran = [_ran("UNet", family) for family in ("linear", "conv")]
    return _listed([f"{ours} of {total} blocks", others, *ran])


def _upscaled(asked: Options) -> str:
    """What ran of the upscaling networks in this generation, as an infotext has it."""
    turn = upscaler.turn
    left = "left to the WebUI" if turn.left else ""
    return asked.upscaler_infotext(_listed([*turn.ran, _ran(UPSCALER, "conv"), left]))


def _ran(part: str, family: str) -> str:
    """For instance 'conv: rocm_sd, torch': what computed the ops of a family in a part of the model
    whose name begins with `part`, most calls first.
    """
    calls: dict[str, int] = {}
    for row in report.snapshot()["rows"]:
        if row["family"] == family and row["part"].startswith(part):
            calls[row["variant"]] = calls.get(row["variant"], 0) + row["calls"]
    names = sorted(calls, key=lambda name: -calls[name])
    return f"{family}: {', '.join(names)}" if names else ""


def _listed(parts: list[str]) -> str:
    return ", ".join(part for part in parts if part)


_made: dict[type, type] = {}


def make(base: type) -> type:
    """The script's class on top of the WebUI's class Script, the same one after "Reload UI"."""
    if base not in _made:
        _made[base] = type("RocmSdScript", (RocmSdScript, base), {"__module__": __name__})
    return _made[base]


def make_extras(base: type | None) -> type | None:
    """The script of Extras on top of the WebUI's class, likewise; None where it has none."""
    if base is None:
        return None
    if base not in _made:
        _made[base] = type("RocmSdExtras", (RocmSdExtras, base), {"__module__": __name__})
    return _made[base]


@dataclass(frozen=True)
class Axis:
    """`field` of Options takes each of `choices` in turn."""

    label: str
    field: str
    choices: tuple[str, ...]

    def listed(self) -> list[str]:
        """Callback of the plot: what its menu offers."""
        return list(self.choices)

    def value(self, text: Any) -> Any:
        """What a cell's text means. Raises ValueError, in plain words, for nonsense."""
        place = [field.name for field in fields(Options)].index(self.field)
        asked, messages = options.parse(*[None] * place, text)
        if messages:
            raise ValueError(messages[0].split(";")[0])
        return getattr(asked, self.field)

    def apply(self, p: Any, x: Any, xs: Sequence[Any]) -> None:
        """Callback of the plot: make a cell."""
        setattr(p, ATTRIBUTE, {**getattr(p, ATTRIBUTE, {}), self.field: self.value(x)})

    def confirm(self, p: Any, xs: Sequence[Any]) -> None:
        """Callback of the plot, before the first cell. Raises ValueError, which it shows."""
        for x in xs:
            self.value(x)


AXES = (
    Axis(f"[{host.NAME}] Enable", "enable", ("True", "False")),
    Axis(f"[{host.NAME}] {options.LEVEL_LABEL}", "level", tuple(LEVELS)),
    Axis(f"[{host.NAME}] {options.VAE_LABEL}", "vae", tuple(options.VAE_MODES)),
    Axis(f"[{host.NAME}] {options.UNET_LABEL}", "unet", tuple(options.UNET_MODES)),
    Axis(f"[{host.NAME}] {options.SEVERAL_LABEL}", "several", tuple(options.SEVERAL_MODES)),
    Axis(f"[{host.NAME}] {options.UPSCALER_LABEL}", "upscaler", tuple(options.UPSCALER_MODES)),
)


def add_axes() -> None:
    """Callback, before the UI is created: every script is loaded, X/Y/Z's among them.

    "Reload UI" executes that script anew, so there is nothing to take back.
    """
    for module in _modules():
        make = getattr(module, "AxisOption", None)
        listed = getattr(module, "axis_options", None)
        if not callable(make) or not isinstance(listed, list):
            continue
        there = {getattr(option, "label", "") for option in listed}
        listed += [
            make(axis.label, str, axis.apply, confirm=axis.confirm, choices=axis.listed)
            for axis in AXES
            if axis.label not in there
        ]


def _modules() -> Iterator[ModuleType]:
    seen: set[int] = set()
    for script in host.attribute("modules.scripts", "scripts_data") or ():
        module = getattr(script, "module", None)
        ours = Path(str(getattr(script, "path", ""))).name == FILE
        if ours and isinstance(module, ModuleType) and id(module) not in seen:
            seen.add(id(module))
            yield module
