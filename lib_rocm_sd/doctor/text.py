"""The doctor's findings as text for people, and without what says who they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib_rocm_sd.doctor import trials

CHOSEN_BY = {
    "measured": "measured by an owner",
    "modelled": "modelled from machine code, not measured",
    "default": "default",
}
"""The origins of a choice in kernels/tuned, in words."""


def anonymous(value: Any, home: str | None = None, user: str | None = None) -> Any:
    """`value` with, in every string, the home folder as ~ and the user's name in paths as USER."""
    home = _home() if home is None else home
    user = _user() if user is None else user
    if isinstance(value, str):
        return _hidden(value, home, user)
    if isinstance(value, dict):
        return {key: anonymous(item, home, user) for key, item in value.items()}
    if isinstance(value, list):
        return [anonymous(item, home, user) for item in value]
    return value


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:
        return ""


def _user() -> str:
    return os.environ.get("USERNAME") or os.environ.get("USER") or os.environ.get("LOGNAME") or ""


def _hidden(text: str, home: str, user: str) -> str:
    if len(home) > 1:
        for form in (home, home.replace("\\", "/"), home.replace("\\", "\\\\")):
            text = re.sub(re.escape(form) + r"(?![\w.-])", "~", text, flags=re.IGNORECASE)
    if user:
        text = re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\]|$)", "USER", text)
    return text


def render(findings: dict[str, Any]) -> str:
    """The findings as text, section by section, the verdict last."""
    sections = (
        ("Machine", _machine(findings)),
        ("Devices", _devices(findings)),
        ("Compilers", _compilers(findings)),
        ("Cache", _cache(findings)),
        ("Attention", _work(findings)),
        ("VAE decode and encode", _vae(findings)),
        ("Trials in a process of their own", trials.text(findings["trials"])),
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


def _devices(findings: dict[str, Any]) -> Iterator[str]:
    for row in findings["devices"]:
        what = f"{row['backend']} {row['index']}: {row['name']}"
        gfx = f" ({row['gfx']})" if row["gfx"] else ""
        yield f"{what}{gfx}: {'supported' if row['supported'] else '; '.join(row['reasons'])}"
        yield from (f"  note: {note}" for note in row["notes"])
    gpus = findings["driver_gpus"]
    yield f"AMD GPUs that the system's driver lists: {', '.join(gpus) or 'none'}"
    if gpus and not any(row["backend"] == "hip" for row in findings["devices"]):
        yield "  torch uses none of them: is this torch a ROCm build?"


def _compilers(findings: dict[str, Any]) -> Iterator[str]:
    for row in findings["compilers"]:
        ready = f"ready, {row['note']}" if row["note"] else "ready"
        state = "; ".join(row["reasons"]) or ready
        where = f" ({row['file']})" if row["file"] else ""
        yield f"{row['name']} for {row['gfx']}: {state}{where}"
    for row in findings["kernels"]:
        reason = f" ({row['reason']})" if row.get("reason") else ""
        each = (f"{name} {n['compiled']} of {n['shipped']}" for name, n in row["ops"].items())
        yield f"kernels for {row['gfx']} compiled: {', '.join(each)}{reason}"


def _tuned(findings: dict[str, Any]) -> Iterator[str]:
    for row in findings["tuned"]:
        counts = (f"{row[name]} {words}" for name, words in CHOSEN_BY.items() if row[name])
        yield f"configs that run first on {row['gfx']}: {', '.join(counts)}"
        yield from (f"  {reason}" for reason in row["reasons"])


def _cache(findings: dict[str, Any]) -> Iterator[str]:
    row = findings["cache"]
    if row["directory"] is None:
        yield "no folder can be used: kernels are compiled anew at every start"
    else:
        yield f"{row['directory']}: {row['files']} files, {row['bytes'] / 2**20:.1f} MiB"
    yield from row["reasons"]


def _work(findings: dict[str, Any]) -> Iterator[str]:
    for row in findings["work"]:
        yield f"{row['device']}: {row['status']}"
        yield from _problems(row)
    if not findings["work"]:
        yield "not tried without torch"
    yield from _tuned(findings)


def _vae(findings: dict[str, Any]) -> Iterator[str]:
    for row in findings["vae"]:
        if row["usable"]:
            yield f"{row['device']}: its convolutions run on our kernels"
        else:
            why = "; ".join(row["why"]) or "see the verdict"
            yield f"{row['device']}: its convolutions run on torch's: {why}"
        yield from _problems(row)
    if not findings["vae"]:
        yield "not tried without torch"


def _problems(row: dict[str, Any]) -> Iterator[str]:
    """What runs each problem, why nothing else does, and the self-tests."""
    told: dict[str, None] = {}
    for problem in row["problems"]:
        why = f" ({problem['why']})" if problem["variant"] else ""
        runs = problem["variant"] or "nothing can run this"
        yield f"  {problem['name']}, {problem['problem']}: {runs}{why}"
        for variant, reasons in problem.get("reasons", {}).items():
            told[f"  not {variant}: {'; '.join(reasons)}"] = None
    yield from told
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
