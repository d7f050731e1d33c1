"""What torch.profiler recorded, added up by part of the model, kind of work and who did it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lib_rocm_sd.profile.blocks import PREFIX
from lib_rocm_sd.ranges import read_name

FAMILIES = {
    "attention": "attention",
    "attention_backward": "attention",
    "conv": "convolution",
    "linear": "linear",
    "group_norm": "norm",
    "layer_norm": "norm",
    "layer_norm_backward": "norm",
    "group_norm_backward": "norm",
}
"""Kinds of work, by the family of an op of ours."""
THEIRS = (
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention", "softmax")),
    ("convolution", ("conv",)),
    ("norm", ("group_norm", "layer_norm")),
    ("linear", ("linear", "addmm", "::mm", "bmm", "matmul")),
    ("copy", ("copy", "contiguous", "clone", "aten::to", "aten::cat")),
)
"""Kinds by what an operator of torch's has in its name, the first that fits."""
OTHER, PYTHON, ELSEWHERE = "other operators", "between operators", "outside of the parts"
TORCH = "torch"


@dataclass(frozen=True)
class Row:
    """`part` of the model, `kind` of work, `by` which variant or torch; times in ms. `calls`: of
    operators or ranges, not counting those within them.
    """

    part: str
    kind: str
    by: str
    calls: int
    cpu_ms: float
    gpu_ms: float


def rows_of(events: Iterable[Any]) -> list[Row]:
    """Rows from a profile's CPU events, with the GPU work each of them started; longest first."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for event in events:
        if not str(event.device_type).endswith("CPU") or event.is_async:
            continue
        part, kind, by, own = _place(event)
        found = sums.setdefault((part, kind, by), [0, 0.0, 0.0])
        found[0] += own
        found[1] += event.self_cpu_time_total / 1000
        found[2] += sum(kernel.duration for kernel in event.kernels) / 1000
    rows = [Row(*key, int(calls), cpu, gpu) for key, (calls, cpu, gpu) in sums.items()]
    return sorted(rows, key=lambda row: (-row.gpu_ms, -row.cpu_ms))


def _place(event: Any) -> tuple[str, str, str, bool]:
    """Part, kind, by whom, and whether the event is itself the call that is counted."""
    part, kind, by, caller = "", OTHER, TORCH, None
    for each in _upwards(event):
        name = str(each.name)
        if name.startswith(PREFIX):
            part = name.removeprefix(PREFIX)
            break
        found = _kind_of(name)
        if found is not None:  # the outermost counts
            kind, by, caller = *found, each
    if caller is None and not _is_operator(event):
        return part or ELSEWHERE, PYTHON, "", False
    if caller is None:
        caller = event
    return part or ELSEWHERE, kind, by, caller is event


def _upwards(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _is_operator(event: Any) -> bool:
    return "::" in event.name or read_name(event.name) is not None


def _kind_of(name: str) -> tuple[str, str] | None:
    ours = read_name(name)
    if ours is not None:
        return FAMILIES.get(ours[0], OTHER), ours[2]
    if "::" in name:
        for kind, words in THEIRS:
            if any(word in name for word in words):
                return kind, TORCH
    return None


def summed(rows: Iterable[Row], *fields: str) -> list[tuple[tuple[str, ...], int, float, float]]:
    """Rows of equal fields together: these, calls, CPU and GPU ms; longest first."""
    sums: dict[tuple[str, ...], tuple[int, float, float]] = {}
    for row in rows:
        key = tuple(getattr(row, field) for field in fields)
        calls, cpu, gpu = sums.get(key, (0, 0.0, 0.0))
        sums[key] = (calls + row.calls, cpu + row.cpu_ms, gpu + row.gpu_ms)
    found = [(key, *values) for key, values in sums.items()]
    return sorted(found, key=lambda item: (-item[3], -item[2]))
