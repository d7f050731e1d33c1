"""Which GPU a torch device is, or why our kernels cannot run on it. Importable without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd.arch import Arch, amd_table, by_gfx, by_marketing_name

if TYPE_CHECKING:
    import torch

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
ALLOW_ZLUDA = "ROCM_SD_ALLOW_ZLUDA"


@dataclass(frozen=True)
class DeviceInfo:
    """One torch device. Our kernels serve it when `arch` is set and `reasons` is empty.

    `backend` is hip, zluda, cuda, cpu, or torch's name of the type where it is none of these. `gfx`
    is the target code must be compiled for. `notes` are remarks that prevent nothing.
    """

    index: int
    name: str
    backend: str
    gfx: str | None
    arch: Arch | None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What torch and Linux's driver say: all input of `decide`, so that any machine can be tested.

    `hip` is torch.version.hip. `arch_name` is gcnArchName: a gfx id, with features after a colon or
    not, on Windows sometimes the marketing name, empty where torch is too old to tell. `driver` has
    the ids that Linux's driver tells, of all GPUs.
    """

    kind: str
    index: int = 0
    name: str = ""
    hip: str | None = None
    arch_name: str = ""
    capability: tuple[int, int] = (0, 0)
    driver: tuple[str, ...] = ()


def _nobody_tests(info: DeviceInfo) -> Sequence[str]:
    return (
        "torch runs through ZLUDA, which this program does not test before it uses kernels beside "
        f"it; {ALLOW_ZLUDA}=1 uses them untested",
    )


judge_zluda: Callable[[DeviceInfo], Sequence[str]] = _nobody_tests
"""Why nothing may be launched beside ZLUDA on a card that our kernels serve, asked at each
`identify`; `trials.zluda` is the one who knows.
"""


def identify(device: torch.device) -> DeviceInfo:
    """What `device` is; asks torch once per device. Never raises for a device that torch has."""
    info = _identify(device.type, device.index)
    if info.backend != "zluda" or info.reasons or os.environ.get(ALLOW_ZLUDA) == "1":
        return info
    return replace(info, reasons=tuple(judge_zluda(info)))


def forget() -> None:
    """Ask torch and the environment anew at the next `identify`."""
    _identify.cache_clear()


@lru_cache(maxsize=64)
def _identify(kind: str, index: int | None) -> DeviceInfo:
    return decide(_facts(kind, index), os.environ)


def _facts(kind: str, index: int | None) -> Facts:
    import torch

    if kind != "cuda":
        return Facts(kind, index or 0, "CPU" if kind == "cpu" else kind)
    if not torch.cuda.is_available():
        return Facts(kind, index or 0)
    index = torch.cuda.current_device() if index is None else index
    properties: Any = torch.cuda.get_device_properties(index)
    return Facts(
        kind,
        index,
        str(properties.name),
        torch.version.hip,
        str(getattr(properties, "gcnArchName", "")),
        (int(properties.major), int(properties.minor)),
        tuple(kfd_gpus()) if torch.version.hip else (),
    )


def decide(facts: Facts, environ: Mapping[str, str]) -> DeviceInfo:
    """The device that `facts` describe, under the switches in `environ`; what `judge_zluda` says
    comes on top.
    """
    if facts.kind == "cpu":
        return _without(facts, "cpu", "no GPU: this is the CPU")
    if facts.kind != "cuda":
        return _without(facts, facts.kind, f"torch back end '{facts.kind}' gives no access to HIP")
    if not facts.name:
        return _without(facts, "cuda", "no GPU: torch finds none")
    if facts.name.rstrip().endswith("[ZLUDA]"):
        return _zluda(facts, environ)
    if facts.hip:
        return _hip(facts, environ)
    return _nvidia(facts, environ)


def _without(facts: Facts, backend: str, *reasons: str) -> DeviceInfo:
    return DeviceInfo(facts.index, facts.name, backend, None, None, reasons)


def _hip(facts: Facts, environ: Mapping[str, str]) -> DeviceInfo:
    override = overrides(environ)
    notes = tuple(f"{name}={value} is set: the GPU may be another one" for name, value in override)
    gfx = facts.arch_name.split(":")[0].strip()
    if not gfx.startswith("gfx"):
        named = by_marketing_name(gfx) or by_marketing_name(facts.name)
        claimed = next(filter(None, (gfx_of_version(value) for _, value in override)), "")
        gfx = claimed or (named.gfx if named else "")
        notes += (f"the gfx id {gfx or '(unknown)'} was not reported but told from the name",)
    arch = by_gfx(gfx)
    why = [] if arch and arch.is_amd else [_unknown(gfx, facts.name)]
    claims = [each for each in override if gfx_of_version(each[1]) == gfx]
    why += filter(None, (contradiction(each, facts.driver, facts.name) for each in claims))
    arch = None if why else arch
    return DeviceInfo(facts.index, facts.name, "hip", gfx or None, arch, tuple(why), notes)


def _zluda(facts: Facts, environ: Mapping[str, str]) -> DeviceInfo:
    arch = by_marketing_name(facts.name.rstrip().removesuffix("[ZLUDA]"))
    why: tuple[str, ...] = ()
    if environ.get(ALLOW_ZLUDA) == "0":
        why += (f"torch runs through ZLUDA, and {ALLOW_ZLUDA}=0 is set",)
    if arch is None:
        why += (_unknown("", facts.name),)
    return DeviceInfo(facts.index, facts.name, "zluda", arch.gfx if arch else None, arch, why)


def _nvidia(facts: Facts, environ: Mapping[str, str]) -> DeviceInfo:
    if environ.get("ROCM_SD_ALLOW_CUDA") != "1":
        why = "an NVIDIA card; this extension's kernels are for AMD"
        return _without(facts, "cuda", why)
    if facts.capability < (8, 0):
        major, minor = facts.capability
        return _without(facts, "cuda", f"compute capability {major}.{minor} is below 8.0")
    notes = ("an NVIDIA card, allowed by ROCM_SD_ALLOW_CUDA=1 for development",)
    gfx = "sm_90" if facts.capability[0] == 9 else "sm_80"
    return DeviceInfo(facts.index, facts.name, "cuda", gfx, by_gfx(gfx), (), notes)


def overrides(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The override for all devices first, then those for single ones (…_VERSION_0, …_VERSION_1).

    Names and values; an empty value overrides nothing, one that is not a version is the user's to
    mend (see `gfx_of_version`).
    """
    return sorted(
        (name, value.strip())
        for name, value in environ.items()
        if name.startswith(OVERRIDE) and value.strip()
    )


def gfx_of_version(version: str) -> str:
    """The gfx id of an override's value: '10.3.0' is gfx1030, '9.0.10' gfx90a; '' if unreadable."""
    parts = version.strip().split(".")
    if len(parts) != 3 or not all(re.fullmatch(r"\d{1,2}", part) for part in parts):
        return ""
    major, minor, stepping = map(int, parts)
    return f"gfx{major}{minor:x}{stepping:x}"


def contradiction(override: tuple[str, str], driver: Sequence[str], name: str = "") -> str:
    """Why nothing may run under an override: it names another family than that of the card with
    this marketing name, else of all cards that the driver tells. Empty where nothing says so.
    """
    claimed = by_gfx(gfx_of_version(override[1]))
    named = by_marketing_name(name)
    gpus = [(name, named)] if named else [(gfx, by_gfx(gfx)) for gfx in driver]
    cards = [(gpu, row) for gpu, row in gpus if row is None or not row.integrated] or gpus
    if not cards or claimed is None or any(_runs_code_of(row, claimed) for _, row in cards):
        return ""
    return (
        f"{'='.join(override)} has code compiled for {claimed.gfx} ({claimed.family}), and the GPU "
        f"is of another family: {', '.join(_of_family(*each) for each in dict.fromkeys(cards))}. "
        "That can hang the card. Unset the variable"
    )


def _runs_code_of(row: Arch | None, claimed: Arch) -> bool:
    """Whether it is of this family, or of one that has come after it by a point, as RDNA3.5 after
    RDNA3: these have more instructions. A GPU without a row is of none.
    """
    return row is not None and f"{row.family}.".startswith(f"{claimed.family}.")


def _of_family(gpu: str, row: Arch | None) -> str:
    return f"{gpu} ({row.family})" if row else gpu


def _unknown(gfx: str, name: str) -> str:
    known = ", ".join(amd_table())
    what = f"{gfx} ({name})" if gfx else f"'{name}', which reports no gfx id,"
    return f"{what} is not among the GPUs that this extension knows: {known}"


def kfd_gpus(nodes: Path = KFD_NODES) -> list[str]:
    """The gfx ids of this machine's AMD GPUs in the order of Linux's driver, without torch.

    Empty where the driver is absent. HSA_OVERRIDE_GFX_VERSION is not applied.
    """
    try:
        folders = sorted(
            (node for node in nodes.iterdir() if node.name.isdigit()), key=lambda n: int(n.name)
        )
    except OSError:
        return []
    return [gfx for gfx in map(_kfd_gfx, folders) if gfx]


def _kfd_gfx(node: Path) -> str:
    """The gfx id in a node's `properties`; '' for a CPU (version 0) or an unreadable file."""
    try:
        text = (node / "properties").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^gfx_target_version\s+(\d{1,9})\s*$", text, re.MULTILINE)
    number = int(found.group(1)) if found else 0
    if not number:
        return ""
    return f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"
