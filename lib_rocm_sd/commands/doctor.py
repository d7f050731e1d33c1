"""`python -m lib_rocm_sd doctor`: what this machine has, what would run on it, and why not more.

Nothing here is needed to be present, torch included: what is missing is said to be missing. Nothing
of ours is launched in this process that a child did not find right.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd import __version__, arch, cache, device
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands import selftest
from lib_rocm_sd.commands.support import anonymous, places
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.errors import NotSupportedError
from lib_rocm_sd.ops import tuned
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.runtime import torch_build
from lib_rocm_sd.shipped import AT_START, shipped
from lib_rocm_sd.trials import verdicts
from lib_rocm_sd.trials.verdicts import Verdict

if TYPE_CHECKING:
    import torch

    from lib_rocm_sd.engine.engine import Engine
    from lib_rocm_sd.ops.base import Op

WAIT_S = 300.0


EXAMPLE_GFX = "gfx1100"
"""Whose compilers and kernels are looked at on a machine without a supported GPU."""

SWITCHES = (
    "HSA_OVERRIDE_GFX_VERSION",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    "MIOPEN_FIND_MODE",
    "HIP_PATH",
    "ROCM_PATH",
    "ROCM_SD_",
)
"""Names, or beginnings of names, of environment variables that change what runs."""

MOST_LOOKS = 4
"""What was refused is followed by another config, which has to be tried, too."""
TROUBLE = (ImportError, OSError, RuntimeError, ValueError, AttributeError, MemoryError)
"""What a broken installation of anything raises when it is asked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--json, --self-test with --out and --gpu."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--self-test",
        action="store_true",
        help="run every kernel and config on the GPU, and write a result file to send",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the self-test's result file")
    parser.add_argument("--gpu", type=int, metavar="N", help="which GPU the self-test takes")


def main(args: argparse.Namespace) -> int:
    """Print the findings. 0: healthy, or merely no GPU; 1: something that we rely on is broken.

    With --self-test: 0 passed, 1 failed, 2 not run.
    """
    if args.self_test:
        return selftest.main(args.out, args.gpu, args.json)
    if args.out is not None or args.gpu is not None:
        raise UsageError("--out and --gpu go with --self-test")
    findings = examine()
    print(json.dumps(findings, indent=1) if args.json else render(findings))
    return int(bool(findings["broken"]))


def examine(engine: Engine | None = None) -> dict[str, Any]:
    """All findings, JSON-able, without user name and home folder. Compiles and tests on a GPU.

    `broken` lists what we rely on and what does not work; it is empty on a machine without a GPU.
    """
    broken: list[str] = []
    devices = _devices(broken)
    work, vae = _settled(devices, engine, broken) if devices else ([], [])
    infos = [info for _, info in devices]
    # The rows of the GPUs that torch or the system's driver lists; where there are none, one.
    listed = dict.fromkeys([info.gfx for info in infos if info.gfx] + device.kfd_gpus())
    arches = list(filter(None, map(arch.by_gfx, listed))) or [arch.table()[EXAMPLE_GFX]]
    findings = {
        "rocm_sd": __version__,
        "system": {
            "os": platform.platform(),
            "python": platform.python_version(),
            "executable": sys.executable,
        },
        "torch": _torch(),
        "hip_library": _hip_library(infos),
        "driver_gpus": device.kfd_gpus(),
        "devices": [_device(info) for info in infos],
        "environment": {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(SWITCHES)
        },
        "compilers": [row for each in arches for row in _compilers(each)],
        "cache": _cache(),
        "work": work,
        "vae": vae,
        "trials": latest_verdicts(infos),
        "models": _models(infos),
        "kernels": [_kernels(each) for each in arches],
        "tuned": [_tuned(each) for each in arches],
        "broken": broken,
    }
    return anonymous(findings)


def _torch() -> dict[str, Any]:
    try:
        import torch
    except TROUBLE as error:
        return {"version": None, "reason": _line(error)}
    versions = {"version": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda}
    return {**versions, "path": str(torch.__file__)}


def _hip_library(infos: Sequence[DeviceInfo]) -> dict[str, Any]:
    """The HIP runtime that kernels would be launched through, looked for only beside an AMD GPU."""
    if not any(info.backend in ("hip", "zluda") for info in infos):
        return {"path": None, "reason": "not looked for: torch has no AMD GPU"}
    try:
        from lib_rocm_sd.runtime import hip

        return {"path": str(hip.library()._name)}
    except TROUBLE as error:
        return {"path": None, "reason": _line(error)}


def _devices(broken: list[str]) -> list[tuple[torch.device, DeviceInfo]]:
    """Every GPU of torch's, else the CPU."""
    try:
        import torch

        old = torch_build.too_old(torch.__version__)
        if old:
            broken.append(old)
            return []
        from lib_rocm_sd.trials import zluda

        found = list(places())
        zluda.settle(found)
        return [(place, device.identify(place)) for place in found]
    except TROUBLE as error:
        broken.append(f"torch cannot be used: {_line(error)}")
        return []


def _device(info: DeviceInfo) -> dict[str, Any]:
    about = {name: getattr(info, name) for name in ("index", "name", "backend", "gfx")}
    reasons, notes = list(info.reasons), list(info.notes)
    return {**about, "supported": not reasons, "reasons": reasons, "notes": notes}


def _compilers(row: Arch) -> list[dict[str, Any]]:
    from lib_rocm_sd.runtime import compilers

    try:
        ordered = list(compilers.in_order(row))
    except TROUBLE as error:
        about = {"file": None, "reasons": [_line(error)], "note": ""}
        return [{"name": "any", "gfx": row.gfx, **about}]
    rows = []
    for compiler in ordered:
        try:
            reasons = compiler.refusals(row)
            note = "" if reasons else compilers.note(compiler, row)
            about = {"file": _file(compiler.identity()), "reasons": reasons, "note": note}
        except TROUBLE as error:
            about = {"file": None, "reasons": [_line(error)], "note": ""}
        rows.append({"name": compiler.name, "gfx": row.gfx, **about})
    return rows


def _file(identity: str) -> str | None:
    """The file in a compiler's identity."""
    try:
        return str(json.loads(identity)[1])
    except (ValueError, LookupError, TypeError):
        return identity or None


def _cache() -> dict[str, Any]:
    folder = cache.directory()
    sizes = []
    for path in [] if folder is None else folder.rglob("*"):
        with suppress(OSError):  # another process may tidy up meanwhile
            sizes += [path.stat().st_size] if path.is_file() else []
    return {
        "directory": None if folder is None else str(folder),
        "files": len(sizes),
        "bytes": sum(sizes),
        "reasons": cache.reasons(),
    }


def latest_verdicts(infos: Iterable[DeviceInfo]) -> list[dict[str, Any]]:
    """The latest verdict of each class on the cards that torch has."""
    names = {f"{info.name} ({info.gfx})" for info in infos}
    latest: dict[tuple[str, str], Verdict] = {}
    for _, verdict in verdicts.every():
        if verdict.device in names:
            key = (verdict.device, verdict.subject)
            latest[key] = max(latest.get(key, verdict), verdict, key=lambda each: each.date)
    return [verdict.as_dict() for verdict in latest.values()]


def _models(infos: Iterable[DeviceInfo]) -> list[dict[str, Any]]:
    """Who makes pictures by which models on the cards that torch has, as times have shown."""
    try:
        from lib_rocm_sd.modules.faster import verdicts as found_on
    except TROUBLE:
        return []
    each = ((info, found_on(info).items()) for info in infos)
    return [
        {"device": f"{info.name} ({info.gfx})", "model": key, **asdict(verdict)}
        for info, found in each
        for key, verdict in found
    ]


def _kernels(row: Arch) -> dict[str, Any]:
    """How many of the kernels that are compiled ahead for this GPU are in the cache."""
    from lib_rocm_sd.runtime import build

    specs = shipped(row, AT_START)
    op_of = {part: part.partition(" ")[0] for part in AT_START}  # both UNets are one here
    counts = {op: {"shipped": 0, "compiled": 0} for op in op_of.values()}
    about: dict[str, Any] = {"gfx": row.gfx, "shipped": len(specs), "compiled": 0, "ops": counts}
    try:
        for spec, part in specs.items():
            ready, op = build.is_cached(spec, row), op_of[part]
            about["compiled"] += ready
            counts[op]["shipped"] += 1
            counts[op]["compiled"] += ready
    except TROUBLE as error:
        about["reason"] = _line(error)
    return about


def _tuned(row: Arch) -> dict[str, Any]:
    """By whom the configs of attention were chosen that run first, and what of that is ignored."""
    dims, dtypes = attention_kernel.SHIPPED_HEAD_DIMS, attention_kernel.DTYPES
    sources = [attention_kernel.choice(row, dtype, dim).source for dtype in dtypes for dim in dims]
    counts = {name: sources.count(name) for name in (tuned.MEASURED, tuned.MODELLED)}
    reasons = attention_kernel.table_reasons(row)
    return {"gfx": row.gfx, **counts, "default": sources.count(""), "reasons": reasons}


# -- what would run -------------------------------------------------------------------------------


def _settled(
    devices: Sequence[tuple[torch.device, DeviceInfo]], engine: Engine | None, broken: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Attention and the VAE on each device, when all that they need was tried. Without an `engine`,
    one of its own, which launches only what was tried.
    """
    from lib_rocm_sd.engine.engine import Engine
    from lib_rocm_sd.ops.attention.op import ATTENTION
    from lib_rocm_sd.trials.gate import put_before

    gate = None
    if engine is None:
        engine = Engine()
        gate = put_before(engine, partial(print, file=sys.stderr))
    attention = [(name, ATTENTION, problem) for name, problem in ATTENTION.usual]
    vae = [(op.name, op, op.usual[0][1]) for op in _vae_ops()]
    for _ in range(MOST_LOOKS):
        trouble: list[str] = []
        work_rows, vae_rows = [], []
        for place, info in devices:
            row = _examined(place, info, engine, attention, "our kernel", trouble)
            row["status"] = _tried(partial(engine.status_line, place), trouble, f"{place}: ")
            work_rows.append(row)
        for place, info in devices:
            vae_rows.append(_examined(place, info, engine, vae, "our convolution", trouble))
        if gate is None or not gate.state().running or not gate.wait(WAIT_S):
            break
        engine.renew()
    broken += trouble
    return work_rows, vae_rows


def _vae_ops() -> tuple[Op[Any, Any], ...]:
    from lib_rocm_sd.ops.conv import op as conv
    from lib_rocm_sd.ops.conv.kernel import VAE_KINDS
    from lib_rocm_sd.ops.group_norm import op as group_norm

    convs = (conv.CONVS[kind] for kind in VAE_KINDS)
    return (*convs, group_norm.STATISTICS, group_norm.FINALIZE, group_norm.APPLY)


def _examined(
    place: torch.device,
    info: DeviceInfo,
    engine: Engine,
    usual: Sequence[tuple[str, Op[Any, Any], Any]],
    what: str,
    broken: list[str],
) -> dict[str, Any]:
    """Is ours usable on a device, and what would run `usual`: name, op, problem. `what` of ours has
    to be usable on a known GPU.

    On any other device nobody relies on us: also an old torch that lacks half precision there is
    no trouble.
    """
    trouble: list[str] = []
    why = _tried(partial(engine.usable, place, usual[0][1]), trouble) or []
    if not info.reasons:
        trouble += [f"{what} cannot be used: {reason}" for reason in why]
    row: dict[str, Any] = {"device": str(place), "usable": not why and not trouble}
    row["why"] = list(dict.fromkeys(why))
    row["problems"] = []
    for name, op, problem in usual:
        each: dict[str, Any] = {"name": name, "problem": str(problem), "variant": None}
        try:
            plan = engine.plan(problem, place, op)
            each |= {"variant": plan.variant.name, "why": plan.why, "reasons": dict(plan.refusals)}
        except NotSupportedError as error:
            if not info.reasons:
                trouble.append(_line(error))
        except TROUBLE as error:
            trouble.append(_line(error))
        checks = _tried(partial(engine.checks, problem, place, op), trouble) or {}
        each["self_tests"] = {
            variant: {
                "error": check.error if check.error < float("inf") else None,
                "tolerance": check.tolerance,
                "reason": check.reason,
            }
            for variant, check in checks.items()
        }
        row["problems"].append(each)
    broken += [f"{place}: {text}" for text in dict.fromkeys(trouble)]
    return row


def _tried(ask: Callable[[], Any], broken: list[str], begin: str = "") -> Any:
    """The answer; None, and a line in `broken`, where asking failed."""
    try:
        return ask()
    except TROUBLE as error:
        broken.append(begin + _line(error))
        return None


def _line(error: BaseException) -> str:
    """A short form of an error: class and message, at most six lines of it."""
    lines = str(error).strip().splitlines()[:6]
    return f"{type(error).__name__}: {' / '.join(line.strip() for line in lines)}"


# -- as text --------------------------------------------------------------------------------------

CHOSEN_BY = {
    "measured": "measured by an owner",
    "modelled": "modelled from machine code, not measured",
    "default": "default",
}
"""The origins of a choice in kernels/tuned, in words."""


def _trials(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What went wrong first."""
    if not rows:
        yield "none was made on the devices above"
    for row in sorted(rows, key=lambda row: row["outcome"] == verdicts.PASSED):
        yield f"{row['device']}, {row['date'][:10]}: {selftest.verdict_line(row)}"


def _models_text(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Those that are left to the host first."""
    if not rows:
        yield "none was timed on the devices above"
    for row in sorted(rows, key=lambda row: row["ours"]):
        who = "ours" if row["ours"] else "the host's own"
        times = f"ours {row['ours_ms']:.1f} ms, the host's {row['theirs_ms']:.1f} ms"
        yield f"{row['device']}, {row['model']}: {who} is used ({times})"


def render(findings: dict[str, Any]) -> str:
    """The findings as text, section by section, the verdict last."""
    sections = (
        ("Machine", _machine(findings)),
        ("Devices", _devices_text(findings)),
        ("Compilers", _compilers_text(findings)),
        ("Cache", _cache_text(findings)),
        ("Attention", _work_text(findings)),
        ("VAE decode and encode", _vae_text(findings)),
        ("Trials in a process of their own", _trials(findings["trials"])),
        ("Models, ours and the host's own", _models_text(findings["models"])),
        ("Verdict", _verdict(findings)),
    )
    blocks = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections]
    return "\n\n".join(blocks)


def _machine(findings: dict[str, Any]) -> Iterator[str]:
    system, torch = findings["system"], findings["torch"]
    yield f"rocm_sd {findings['rocm_sd']} on {system['os']}"
    yield f"Python {system['python']}, {system['executable']}"
    if torch["version"] is None:
        yield f"no torch: {torch['reason']}"
    else:
        built = f"HIP {torch['hip']}, CUDA {torch['cuda']}"
        yield f"torch {torch['version']} ({built}), {torch['path']}"
    library = findings["hip_library"]
    yield f"HIP runtime: {library['path'] or library['reason']}"
    for name, value in findings["environment"].items():
        yield f"{name}={value}"


def _devices_text(findings: dict[str, Any]) -> Iterator[str]:
    for row in findings["devices"]:
        what = f"{row['backend']} {row['index']}: {row['name']}"
        gfx = f" ({row['gfx']})" if row["gfx"] else ""
        yield f"{what}{gfx}: {'supported' if row['supported'] else '; '.join(row['reasons'])}"
        yield from (f"  note: {note}" for note in row["notes"])
    gpus = findings["driver_gpus"]
    yield f"AMD GPUs that the system's driver lists: {', '.join(gpus) or 'none'}"
    if gpus and not any(row["backend"] == "hip" for row in findings["devices"]):
        yield "  torch uses none of them: is this torch a ROCm build?"


def _compilers_text(findings: dict[str, Any]) -> Iterator[str]:
    for row in findings["compilers"]:
        ready = f"ready, {row['note']}" if row["note"] else "ready"
        state = "; ".join(row["reasons"]) or ready
        where = f" ({row['file']})" if row["file"] else ""
        yield f"{row['name']} for {row['gfx']}: {state}{where}"
    for row in findings["kernels"]:
        reason = f" ({row['reason']})" if row.get("reason") else ""
        each = (f"{name} {n['compiled']} of {n['shipped']}" for name, n in row["ops"].items())
        yield f"kernels for {row['gfx']} compiled: {', '.join(each)}{reason}"


def _cache_text(findings: dict[str, Any]) -> Iterator[str]:
    row = findings["cache"]
    if row["directory"] is None:
        yield "no folder can be used: kernels are compiled anew at every start"
    else:
        yield f"{row['directory']}: {row['files']} files, {row['bytes'] / 2**20:.1f} MiB"
    yield from row["reasons"]


def _work_text(findings: dict[str, Any]) -> Iterator[str]:
    for row in findings["work"]:
        yield from _problems(row, row["status"])
    if not findings["work"]:
        yield "not tried without torch"
    for row in findings["tuned"]:
        counts = (f"{row[name]} {words}" for name, words in CHOSEN_BY.items() if row[name])
        yield f"configs that run first on {row['gfx']}: {', '.join(counts)}"
        yield from (f"  {reason}" for reason in row["reasons"])


def _vae_text(findings: dict[str, Any]) -> Iterator[str]:
    for row in findings["vae"]:
        why = "; ".join(row["why"]) or "see the verdict"
        kernels = "our kernels" if row["usable"] else f"torch's: {why}"
        yield from _problems(row, f"its convolutions run on {kernels}")
    if not findings["vae"]:
        yield "not tried without torch"


def _problems(row: dict[str, Any], status: str) -> Iterator[str]:
    """A device: its status, what runs each problem, why nothing else does, and the self-tests."""
    yield f"{row['device']}: {status}"
    refusals: dict[str, None] = {}
    for problem in row["problems"]:
        why = f" ({problem['why']})" if problem["variant"] else ""
        runs = problem["variant"] or "nothing can run this"
        yield f"  {problem['name']}, {problem['problem']}: {runs}{why}"
        for variant, reasons in problem.get("reasons", {}).items():
            refusals[f"  not {variant}: {'; '.join(reasons)}"] = None
    yield from refusals
    yield "  self-tests, error against float64 / tolerance:"
    for problem in row["problems"]:
        tests = (f"{name} {_test(test)}" for name, test in problem["self_tests"].items())
        yield f"    {problem['problem']}: {', '.join(tests)}"


def _test(test: dict[str, Any]) -> str:
    if test["error"] is None:
        return f"FAILED ({test['reason']})"
    result = f"{test['error']:.1e} / {test['tolerance']:.1e}"
    return f"FAILED {result}" if test["reason"] else result


def _verdict(findings: dict[str, Any]) -> Iterator[str]:
    yield from (f"broken: {line}" for line in findings["broken"])
    if findings["broken"]:
        return
    parts = {"attention": findings["work"], "VAE": findings["vae"]}
    ours = [name for name, rows in parts.items() if any(row["usable"] for row in rows)]
    if ours:
        yield f"healthy: our kernels run {' and '.join(ours)}"
    else:
        yield "nothing is broken; without a supported GPU our kernel has nothing to run on"
