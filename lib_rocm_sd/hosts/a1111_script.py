"""The always-on script: the accordion, and what happens around one generation."""

from __future__ import annotations

from typing import Any

from lib_rocm_sd import report
from lib_rocm_sd.engine import engine
from lib_rocm_sd.hosts import a1111_attention as attention
from lib_rocm_sd.hosts import a1111_host as host
from lib_rocm_sd.hosts import a1111_state as state
from lib_rocm_sd.ui import accordion
from lib_rocm_sd.ui.accordion import Options


class RocmSdScript:
    """Mixed with the WebUI's Script by `make`.

    A generation for which Enable is off gets, from before its model is loaded until `postprocess`,
    exactly what the WebUI would have without us. `postprocess` is not called when a generation
    fails, and one may run inside another: so each hook says anew what holds from there on.
    """

    def title(self) -> str:
        return accordion.TITLE

    def show(self, is_img2img: bool) -> Any:
        return host.attribute("modules.scripts", "AlwaysVisible")

    def ui(self, is_img2img: bool) -> list[Any]:
        frame = host.attribute("modules.ui_components", "InputAccordion")
        elem_id: Any = getattr(self, "elem_id", _elem_id)
        controls = accordion.build(elem_id, state.status, frame)
        self.infotext_fields = [
            (controls.enable, accordion.enable_from),
            (controls.level, accordion.level_from),
        ]
        self.paste_field_names = [accordion.INFOTEXT_KEY]
        return [controls.enable, controls.level]

    def before_process(self, p: Any, *args: Any) -> None:
        _establish(args)

    def process(self, p: Any, *args: Any) -> None:
        for message in accordion.parse(*args)[1]:
            host.say(message)
        options = _establish(args)
        report.begin()
        attention.calls.begin()
        _note(p, options)

    def before_process_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        _establish(args)

    def process_before_every_sampling(self, p: Any, *args: Any, **kwargs: Any) -> None:
        _establish(args)

    def post_sample(self, p: Any, samples: Any, *args: Any) -> None:
        _establish(args)

    def postprocess_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        _note(p, accordion.parse(*args)[0])

    def postprocess(self, p: Any, processed: Any, *args: Any) -> None:
        optimizer = state.optimizer()
        if optimizer is not None:
            optimizer.step_aside(False)


def _elem_id(name: str) -> str:
    return f"rocm_sd_{name}"


def _establish(args: tuple[Any, ...]) -> Options:
    """Make what the arguments ask for hold from now on."""
    options, _ = accordion.parse(*args)
    optimizer = state.optimizer()
    if optimizer is not None:
        optimizer.step_aside(not options.enable)
    if options.enable:
        engine.level = options.level
    return options


def _note(p: Any, options: Options) -> None:
    """Write into the infotext what ran so far; nothing where we had no part in the generation."""
    optimizer = state.optimizer()
    if optimizer is None or host.current_optimizer() is not optimizer:
        return
    left = attention.calls.left_to_host
    ran = [report.summary(), f"left to the WebUI: {left} calls" if left else ""]
    p.extra_generation_params[accordion.INFOTEXT_KEY] = options.infotext(
        ", ".join(part for part in ran if part)
    )


_made: dict[type, type] = {}


def make(base: type) -> type:
    """The script's class on top of the WebUI's class Script, the same one after "Reload UI"."""
    if base not in _made:
        _made[base] = type("RocmSdScript", (RocmSdScript, base), {"__module__": __name__})
    return _made[base]
