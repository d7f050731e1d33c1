"""Runs attention on an NVIDIA card with small odd problems, every config; tools/sanitize.py puts
compute-sanitizer around it. It can also be run alone:

ROCM_SD_ALLOW_CUDA=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 python3 -m tools.sanitize_worker

Each result is compared with float64. Every tensor has an allocation of its own, filled by a copy
from the CPU, and nothing but our kernel runs on the card.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from lib_rocm_sd.device import identify
from lib_rocm_sd.ops.attention import kernel
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.base import KernelSpec, Launch
from lib_rocm_sd.ops.dtypes import DTYPES
from lib_rocm_sd.runtime import build, launcher, source
from tests.ops.attention.judge import numbers
from tests.ops.attention.layouts import on_device
from tests.ops.attention.problems import TINY, Drawn, Kind, draw, noise
from tests.ops.attention.replay import GPU, Place, every_config
from tests.ops.running import compute

DONE = "rocm_sd sanitize: "
"""Begins the last line of a run that ended well."""
PLANTED = ("memcheck", "racecheck", "initcheck")
CPU = torch.device("cpu")
LONG = (154, 300)
"""Queries and keys: whole groups and a few more, rings that go round."""
Attend = Callable[[Place, Drawn], torch.Tensor]


def problems(kind: Kind) -> Iterator[tuple[int, Drawn]]:
    """Of the first seeds one whose rows are aligned to 16 bytes, and one with misaligned views."""
    wanted = [True, False]
    for seed in range(200):
        drawn = draw(kind, seed, TINY, CPU)
        aligned = all(
            (t.storage_offset() | t.stride(0) | t.stride(1) | t.stride(2)) % 8 == 0
            for t in drawn.inputs[:3]
        )
        if aligned in wanted:
            wanted.remove(aligned)
            yield seed, drawn
        if not wanted:
            return


def long_problem(kind: Kind) -> Drawn:
    """Plain noise."""
    shape = (1, LONG[0], 1, kind.head_dim), (1, LONG[1], 1, kind.head_dim)
    q, k, v = (noise(shape[min(i, 1)], i, CPU).to(DTYPES[kind.dtype]) for i in range(3))
    return Drawn((q, k, v, None, None), f"{LONG[0]} queries, {LONG[1]} keys", True)


def problems_of(place: Place, kind: Kind) -> Iterator[tuple[str, Drawn]]:
    """With how to run it again. A long one where tiles are copied ahead: few keys hardly show."""
    for seed, drawn in problems(kind):
        yield f"python -m tests.ops.attention.replay {place} {kind} {TINY.name} {seed}", drawn
    if kind.mask == "none" and kernel.configs(place.arch, kind.head_dim)[place.config].ahead:
        yield f"tools.sanitize_worker.long_problem: {place} {kind}", long_problem(kind)


def on_the_card(place: Place, drawn: Drawn) -> torch.Tensor:
    """The kernel's result, on the CPU."""
    inputs = [on_device(t, place.device) if t is not None else None for t in drawn.inputs[:4]]
    return place.attention()(*inputs, drawn.inputs[4]).cpu()


def check(todo: list[tuple[Place, Kind]], attend: Attend, until: float) -> tuple[int, list[str]]:
    """Launches, and what was wrong. Stops at the time `until`, which is wrong too."""
    launches, wrong = 0, list[str]()
    for place, kind in todo:
        for again, drawn in problems_of(place, kind):
            if time.monotonic() > until:
                return launches, [*wrong, f"not done in time: {place} {kind} and what follows"]
            faults = numbers(attend(place, drawn), *drawn.inputs).faults(drawn.whole)
            launches += 1
            if faults:
                wrong.append(f"{again}: {'; '.join(faults)}; {drawn.story}")
    return launches, wrong


def prepare(todo: list[tuple[Place, Kind]]) -> None:
    """Compile all, side by side, into the cache."""
    place = todo[0][0]
    launch = launcher.launcher_for(place.device, place.arch)
    assert isinstance(launch, launcher.Launcher)
    launch.build([where.spec(kind) for where, kind in todo])


def plant(fault: str, place: Place) -> int:
    """Launches with a fault that this tool of compute-sanitizer must find; how many."""
    shape = (1, 77, 1, FAULTY.head_dim)
    inputs = [torch.zeros(shape, dtype=torch.float16).to(place.device) for _ in range(3)]
    config = kernel.configs(place.arch, FAULTY.head_dim)[0]
    right = launcher.launcher_for(place.device, place.arch)
    if fault == "memcheck":
        run(beyond_the_keys(right), config, inputs)
    elif fault == "initcheck":
        inputs[1] = torch.empty(shape, dtype=torch.float16, device=place.device)
        run(right, config, inputs)
    else:
        flatten = source.flatten
        with patch.object(build.source, "flatten", lambda name: without_barriers(flatten(name))):
            run(right, config, inputs)
    return 1


def run(launch: Launch, config: kernel.AttentionConfig, inputs: list[torch.Tensor]) -> None:
    """One launch, waited for."""
    q, k, v = inputs
    compute(ATTENTION, MatrixAttention(), launch, config, AttentionInputs(q, k, v)).cpu()


def without_barriers(text: str) -> str:
    """A kernel whose waves do not wait for each other."""
    if "barrier();" not in text:
        raise ValueError("the kernel has no barrier to take away")
    return text.replace(" barrier();", " ;")


def beyond_the_keys(launch: Launch) -> Launch:
    """Tells the kernel of more keys than there are."""

    def lying(spec: KernelSpec, grid: int, block: int, params: Any, device: torch.device) -> None:
        assert isinstance(params, ctypes.Structure)
        params.seq_k += 64  # type: ignore[attr-defined]
        launch(spec, grid, block, params, device)

    return lying


FAULTY = Kind("float16", 64)


def main() -> int:
    """0: all right, or planted; 1: wrong results; 2: no card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prepare", action="store_true", help="only compile")
    parser.add_argument("--plant", choices=PLANTED, help="launch with such a fault only")
    parser.add_argument("--seconds", type=float, default=600.0, help="when to stop")
    args = parser.parse_args()
    place = Place(GPU)
    info = identify(place.device)
    if info.arch is None or info.arch.is_amd or info.reasons:
        print(f"no NVIDIA card to check on: {'; '.join(info.reasons) or info.name}")
        return 2
    until = time.monotonic() + args.seconds
    if args.plant:
        print(f"{DONE}{plant(args.plant, place)} launches, 0 wrong", flush=True)
        return 0
    todo = every_config(place)
    if args.prepare:
        prepare(todo)
        return 0
    launches, wrong = check(todo, on_the_card, until)
    print("\n".join([*wrong, f"{DONE}{launches} launches, {len(wrong)} wrong"]), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
