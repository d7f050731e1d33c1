"""What is tried in a process of its own before it is needed: all of Stable Diffusion 1.5 and XL.

`main` is what install.py runs in a process that has torch: it records what is launched, and has
children launch it. Without torch this module can be imported, and says whether that is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from lib_rocm_sd import cache, console
from lib_rocm_sd.shipped import (
    AT_START,
    QWEN_PART,
    SD3_PART,
    SWINIR_PART,
    UPSCALER_PART,
    shipped,
    work,
)
from lib_rocm_sd.trials import stamp, verdicts
from lib_rocm_sd.trials.verdicts import Verdict

if TYPE_CHECKING:
    from lib_rocm_sd.arch import Arch
    from lib_rocm_sd.trials.conductor import Conductor
    from lib_rocm_sd.trials.place import Place
    from lib_rocm_sd.trials.subject import Subject

MARK, PROGRESS = "rocm_sd: ", "rocm_sd progress: "
"""What lines for install.py begin with: what came of it, and how far it is."""
MOST_REASONS = 3
IN_VAIN = 3
"""So many in a row that could not be tried at all: the rest is left to the host."""

Say = Callable[[str], None]


def classes(part: str, arch: Arch) -> list[Subject]:
    """What one of the parts in shipped.py launches, of what is compiled ahead, what is needed first
    first. Needs torch.
    """
    from lib_rocm_sd.trials.subject import subjects

    compiled = shipped(arch, (*AT_START, part))
    return [each for each in subjects(work(part, arch), arch) if compiled.keys() >= set(each.specs)]


def all_classes(arch: Arch) -> list[Subject]:
    """Classes of all parts, each once."""
    found = (each for part in AT_START for each in classes(part, arch))
    return list({each.identity: each for each in found}.values())


def further_classes(arch: Arch) -> list[Subject]:
    """What only another level than Auto launches, where Auto prefers another way, SD 3, upscalers
    and Qwen-Image's VAE: compiled and tried when that level is chosen, or one is loaded, and by a
    doctor.
    """
    from lib_rocm_sd.trials.subject import subjects

    asked = [*work("unet", arch), *work(SD3_PART, arch)]
    under_auto = {each.identity for each in subjects(asked, arch)}
    every = subjects(asked, arch, ours=True)
    others = [each for each in every if each.identity not in under_auto]
    parts = (SD3_PART, UPSCALER_PART, SWINIR_PART, QWEN_PART)
    later = {each.identity: each for part in parts for each in classes(part, arch)}
    ahead = {each.identity for each in all_classes(arch)}
    return [*others, *(each for identity, each in later.items() if identity not in ahead)]


def gradient_classes(arch: Arch) -> list[Subject]:
    """Classes of attention's gradients, tried ahead if a host's settings say that it trains with
    ours. Their kernels are compiled for that.
    """
    from lib_rocm_sd.ops.attention.op import ATTENTION_AND_LSE
    from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
    from lib_rocm_sd.trials.subject import subjects

    usual = [problem for _, problem in ATTENTION_BACKWARD.usual]
    asked = [(op, problem) for op in (ATTENTION_AND_LSE, ATTENTION_BACKWARD) for problem in usual]
    return list(subjects(asked, arch))


def places(gfx: Iterable[str] = ()) -> list[Place]:
    """The cards here that our kernels serve, one of each kind; of these gfx ids where given."""
    import torch

    from lib_rocm_sd.device import identify
    from lib_rocm_sd.engine.planner import default_launcher
    from lib_rocm_sd.trials import place, zluda

    wanted = set(gfx)
    found: dict[str, Place] = {}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(count)]
    zluda.settle(devices)
    for device in devices:
        info = identify(device)
        if info.reasons or info.arch is None or (wanted and info.gfx not in wanted):
            continue
        with suppress(RuntimeError, OSError):
            here = place.of(device, default_launcher(device, info.arch))
            if here is not None:
                found.setdefault(here.key, here)
    return list(found.values())


def main(folder: str, limit_s: float, gfx: Sequence[str]) -> int:
    """Try what has no verdict yet on the cards of these kinds, with the cache in the host's
    `folder`, if it is not empty. What install.py shows is in lines that begin with a mark.
    """
    end = time.monotonic() + limit_s
    if folder:
        cache.set_directory(folder)
    for here in places(gfx):
        try_all(here, end - time.monotonic(), _marked, shown=partial(_marked, mark=PROGRESS))
    return 0


def _marked(line: str, mark: str = MARK) -> None:
    console.say(f"{mark}{line}")


def try_all(
    here: Place,
    limit_s: float,
    say: Say = print,
    conductor: Callable[..., Conductor] | None = None,
    listed: Sequence[Subject] | None = None,
    shown: Say = lambda line: None,
) -> list[Verdict]:
    """Try the classes on one card; return the verdicts. `shown` gets how far it is. `conductor` and
    `listed` are for tests.
    """
    from lib_rocm_sd.trials.conductor import Conductor, halt

    listed = all_classes(here.arch) if listed is None else listed
    begun = time.monotonic()
    found: list[Verdict] = []

    def in_vain() -> bool:
        last = found[-IN_VAIN:]
        return len(last) == IN_VAIN and all(v.outcome == verdicts.REFUSED for v in last)

    def told(subject: Subject, verdict: Verdict) -> None:
        found.append(verdict)
        left_s = console.left_s(begun, len(found), len(listed))
        shown(console.how_far("trying", len(found), len(listed), left_s))

    made = (conductor or Conductor)(here, stop=in_vain)
    made.run(listed, told=told, limit_s=limit_s)
    halted = halt(here)
    if halted or len(found) == len(listed):
        stamp.put(here.arch.gfx)
    say(f"{here}: {_summary(len(listed), found, time.monotonic() - begun)}")
    for line in _barred(found, halted):
        say(line)
    if len(found) < len(listed) and not halted:
        say(f"The other {len(listed) - len(found)} are tried later, in the background.")
    return found


def _summary(total: int, found: Sequence[Verdict], took_s: float) -> str:
    passed = sum(verdict.passed for verdict in found)
    return f"{passed} of {total} kernels passed, that took {took_s:.0f} s."


def _barred(found: Sequence[Verdict], halted: str) -> Iterable[str]:
    barred = [v for v in found if not v.passed and v.reason != halted]
    for verdict in barred[:MOST_REASONS]:
        yield f"not used: {verdict.subject}: {verdict.refusal}"
    if len(barred) > MOST_REASONS:
        yield f"and {len(barred) - MOST_REASONS} more; doctor lists them"
    if halted:
        yield halted
