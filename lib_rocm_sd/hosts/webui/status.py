"""The state of this extension in the WebUI, as the accordion shows it."""

from __future__ import annotations

from typing import Any

from lib_rocm_sd import console, report
from lib_rocm_sd.device import DeviceInfo, identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.ui import status as page
from lib_rocm_sd.hosts.ui.options import VAE_MODES, Options
from lib_rocm_sd.hosts.ui.status import COMPILING, TRYING, Failure, Status, StatusRow
from lib_rocm_sd.hosts.webui import attention, host, settings, several, unet, upscaler, vae
from lib_rocm_sd.hosts.webui.seams import optimizer
from lib_rocm_sd.hosts.webui.trials import trials
from lib_rocm_sd.policy import PERFORMANCE
from lib_rocm_sd.runtime import background

SPEED_TAB = "Speed test"
EVENTS_SHOWN = 3
WHOLE, BANDS = "whole frame", "bands"
VAE_OFF = "VAE off"
THE_WEBUIS = "the WebUI's own code"
OTHERWISE = "the WebUI's own attention is used"


def look(options: Options) -> Status:
    """The state, were a picture made with `options` now. Never raises.

    It compiles and tests what was never used, but not while that is done in the background.
    """
    try:
        return _look(options)
    except Exception as error:
        return Status("not active, see below", (f"Not active: {trouble.once(error)}",))


def _look(options: Options) -> Status:
    compiling = background.state()
    failure = None
    if compiling.failure:
        failure = Failure(compiling.failure, compiling.log_path)
    if host.shortcomings():
        return Status("not active in this WebUI", tuple(sentences().splitlines()))
    info = identify(host.device())
    if info.reasons:
        lines = tuple(sentences().splitlines())
        told = "not active, see below" if info.arch else "not active, no supported GPU"
        return Status(told, lines, _without_us(info), risk=trials.risk())
    work, progress = _at_work()
    said = sentences() if options.enable else "Pictures are exactly as without this extension."
    if options.enable and options.level == PERFORMANCE.name and engine.unmeasured:
        said += f"\n{page.unmeasured(engine.unmeasured, 'between pictures')}"
    return Status(
        _headline(options, info, work, progress),
        () if compiling.running else tuple(said.splitlines()),
        _rows(options, info),
        tuple(report.snapshot()["events"][-EVENTS_SHOWN:]),
        progress=progress,
        work=work,
        risk=trials.risk(),
        failure=failure,
        speed_tab=_speed_tab(),
    )


def sentences() -> str:
    """A line about attention and mostly one about the VAE, for people; never raises."""
    try:
        lines = [_of_attention(), "" if host.shortcomings() else vae.status()]
    except Exception as error:
        return f"Not active: {trouble.once(error)}"
    return "\n".join(line for line in lines if line)


def _of_attention() -> str:
    lacking = host.shortcomings()
    if lacking:
        return (
            "Not active: this WebUI has no place for an attention optimizer "
            f"({'; '.join(lacking)}). It runs as if this extension were not installed."
        )
    ours = optimizer()
    device = host.device()
    line = engine.status_line(device, OTHERWISE)
    text = line[:1].upper() + line[1:] + "."
    if engine.usable(device):
        return text
    if not settings.current().attention:
        return (
            f"Ready, but not in use: '{settings.ATTENTION}' is not selected in Settings > "
            "ROCm SD > Operations that may be replaced."
        )
    if ours.is_chosen:
        taken = _displaced()
        return f"{text} But {taken}, so ours gets only the calls it passes on." if taken else text
    return f"Ready, but not in use: {ours.why_another()}"


def _displaced() -> str:
    """Who has taken the place of our attention, and where; empty where nobody has."""
    ours = optimizer()
    found = ours.displaced_by() if ours.is_applied else {}
    return ", ".join(f"{name} has replaced {' and '.join(where)}" for name, where in found.items())


def _at_work() -> tuple[str, tuple[int, int] | None]:
    """What is done in the background, and how far it is."""
    compiling, trying = background.state(), trials.state()
    if compiling.running:
        return COMPILING, (compiling.done, compiling.total)
    if trying.running:
        return TRYING, (trying.done, trying.total)
    return COMPILING, None


def _headline(
    options: Options, info: DeviceInfo, work: str, progress: tuple[int, int] | None
) -> str:
    if not options.enable:
        return "off"
    attention_part = f"attention on {info.gfx}" if not _why_not_attention(options) else ""
    if progress is not None:
        doing = "compiling" if work == COMPILING else "trying"
        left_s = trials.state().left_s if work == TRYING else 0.0
        count = console.how_far(doing, *progress, left_s)
        return " · ".join(filter(None, (options.level, attention_part, count)))
    vae_part = _vae_in_short(options)
    if _unusable() and vae_part in ("", VAE_OFF):
        return "not active, the kernels cannot be used"
    unet_part = _unet_in_short(options)
    other = "another extension" if _displaced() else "the WebUI"
    parts = (
        *(attention_part or f"attention left to {other}", *unet_part),
        vae_part or "VAE left to the WebUI",
    )
    return " · ".join((options.level, *parts))


def _unusable() -> list[str]:
    """Why our attention cannot be used here, without waiting where that is known."""
    device = host.device()
    known = engine.known(device)
    return engine.usable(device) if known is None else known


def _vae_in_short(options: Options) -> str:
    """What the VAE does, in two or three words; empty where it cannot be ours."""
    if not VAE_MODES[options.vae]:
        return VAE_OFF
    if _why_not_vae("decoder", options):
        return ""
    if VAE_MODES[options.vae] == "banded" or BANDS in vae.session.turn.ran:
        return "VAE in bands"
    return f"VAE {WHOLE}" if WHOLE in vae.session.turn.ran else "VAE ready"


def _unet_in_short(options: Options) -> tuple[str, ...]:
    """How many blocks are ours, in two or three words; nothing where none can be."""
    if unet.why_not(options):
        return ()
    ours, total = unet.counted(unet.session.look())
    if not total:
        return ("UNet ready",)
    return ("UNet" if ours == total else f"UNet {ours} of {total}",) if ours else ()


def _why_not_attention(options: Options) -> tuple[str, ...]:
    """Why attention will not be ours; empty if it will."""
    if not options.enable:
        return ("Enable is off",)
    unusable = _unusable()
    if unusable:
        return tuple(unusable)
    if not settings.current().attention:
        return ("Settings > ROCm SD excludes attention",)
    ours: Any = optimizer()
    if not ours.is_chosen:
        return (ours.why_another(),)
    taken, ran = _displaced(), page.rows_of(report.snapshot())
    return (taken,) if taken and (page.UNET, "attention") not in ran else ()


def _why_not_vae(role: str, options: Options) -> tuple[str, ...]:
    """Why the VAE's decoder, or its encoder, will not be ours; empty if it will."""
    if not options.enable:
        return ("Enable is off",)
    if not VAE_MODES[options.vae]:
        return ("VAE is Off",)
    if not settings.current().vae(role):
        return (f"Settings > ROCm SD excludes the VAE's {role}",)
    left = (message for message in vae.session.turn.left if message.startswith(_left_to(role)))
    return (*vae.why_not(), *(message.removeprefix(_left_to(role)) for message in left))


def _left_to(role: str) -> str:
    return f"the VAE's {role} was left to the WebUI: "


def _rows(options: Options, info: DeviceInfo) -> tuple[StatusRow, ...]:
    """What ran each operation in the last generation, or would run it."""
    ran = page.rows_of(report.snapshot())
    why = _why_not_attention(options)
    found = list(ran.pop((page.UNET, "attention"), ())) if not why else []
    if why:
        found.append(StatusRow("Attention", _hosts_attention(), page.shortened(why)))
    elif not found:
        found.append(StatusRow("Attention", f"our kernel ({info.gfx})"))
    left = attention.calls.left.total()
    if left and not why:
        calls = f"{THE_WEBUIS}, {page.counted(left, 'call')}"
        found.append(StatusRow("Attention", calls, ("see the notes below",)))
    found += [*_of_unet(options), *several.rows(options, _why_not_vae("decoder", options))]
    for operation, role in settings.ROLES.items():
        why = _why_not_vae(role, options)
        # nothing is noted of an encode
        manners = vae.session.turn.ran if role == "decoder" else ()
        runs = THE_WEBUIS if why else ", ".join(("our kernels", *manners))
        found.append(StatusRow(operation, runs, page.shortened(why)))
    why = tuple(upscaler.why_not(options))
    runs = THE_WEBUIS if why else ", ".join(("our kernels", *upscaler.session.turn.ran))
    found.append(StatusRow(settings.UPSCALER, runs, page.shortened(why)))
    return (*found, *(row for family in ran.values() for row in family))


def _of_unet(options: Options) -> list[StatusRow]:
    """A row for each kind of block; one alone where none was looked at."""
    why = tuple(unet.why_not(options))
    blocks = () if why else unet.session.look()
    if not blocks:
        runs = THE_WEBUIS if why else "our blocks, starting with the next picture"
        return [StatusRow(settings.UNET, runs, page.shortened(why))]
    found = [
        page.of_blocks(
            *(row.kind, row.total, row.ours),
            {unet.explained(text): count for text, count in {**row.left, **row.partly}.items()},
        )
        for row in blocks
    ]
    found += page.of_controlnets(unet.session.controlnets)
    if any(row.ours for row in blocks):
        why_not = unet.session.unrecorded()
        runs = "one by one" if why_not else "GPU graphs, one call per block"
        found.append(
            StatusRow(f"{page.UNET}, launches", runs, page.shortened((why_not,) if why_not else ()))
        )
    return found


def _without_us(info: DeviceInfo) -> tuple[StatusRow, ...]:
    why = page.shortened(info.reasons)
    others = (settings.UNET, *settings.ROLES, settings.UPSCALER)
    return (
        StatusRow("Attention", _hosts_attention(), why),
        *(StatusRow(operation, THE_WEBUIS, why) for operation in others),
    )


def _hosts_attention() -> str:
    """Whose attention the WebUI has where it is not ours."""
    if _displaced():
        return "another extension's code"
    ours: Any = optimizer()
    return ours.hosts_attention() or THE_WEBUIS


def _speed_tab() -> str:
    """The tab's label where it is registered."""
    registered = host.attribute("modules.script_callbacks", "callback_map") or {}
    for entry in registered.get("callbacks_ui_tabs", ()):
        if str(getattr(entry.callback, "__module__", "")).startswith("lib_rocm_sd."):
            return SPEED_TAB
    return ""
