"""Trials of variants that cannot do without torch: the self-test as the engine runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.engine import selftest
from lib_rocm_sd.engine.memory import empty_cache
from lib_rocm_sd.ops.base import KernelSpec, Op, Variant
from lib_rocm_sd.ops.registry import op_named
from lib_rocm_sd.report import config_fields
from lib_rocm_sd.runtime import launcher
from lib_rocm_sd.trials import recording
from lib_rocm_sd.trials.verdicts import FAULTED, PASSED, REFUSED, WRONG, names_fault


class _Launcher(launcher.Launcher):
    """The engine's, with machine code that was given to it."""

    codes: dict[KernelSpec, bytes]

    def _code(self, spec: KernelSpec) -> bytes:
        return self.codes[spec] if spec in self.codes else super()._code(spec)


class TorchTester:
    """As child.Tester."""

    def __init__(self, index: int, arch: Arch, say: Callable[[dict[str, Any]], None]) -> None:
        self._device, self._arch, self._say = torch.device("cuda", index), arch, say
        self._launch = _Launcher(launcher.driver_for(index), index, arch)
        self._launch.codes = {}

    def test(self, head: dict[str, Any], blobs: Sequence[bytes]) -> dict[str, Any]:
        """The verdict of one class. Its memory is given back: another child may need it."""
        try:
            return self._tested(head, blobs)
        finally:
            empty_cache(self._device)

    def _take(self, head: dict[str, Any], blobs: Sequence[bytes]) -> None:
        for spec, place in head["codes"]:
            self._launch.codes[recording.spec_of(spec)] = blobs[place]

    def _tested(self, head: dict[str, Any], blobs: Sequence[bytes]) -> dict[str, Any]:
        self._take(head, blobs)
        op, variant, config, problems = described(head["torch"], self._arch)
        worst: dict[str, Any] = {"outcome": PASSED, "error": 0.0, "notes": []}
        for problem in problems:
            self._say({"kind": "trying", "problem": str(problem)})
            try:
                check = selftest.check(op, variant, config, self._launch, problem, self._device)
            except (RuntimeError, MemoryError) as error:
                reason = selftest.describe(error)
                return worst | {"outcome": REFUSED, "reason": reason, "lasting": False}
            if math.isfinite(check.error) and check.error >= worst["error"]:
                worst |= {"error": check.error, "tolerance": check.tolerance}
            if check.reason:
                outcome = FAULTED if names_fault(check.reason) else WRONG
                return worst | {"outcome": outcome, "reason": check.reason}
        return worst


def description(
    op: Op[Any, Any], variant: Variant[Any, Any], config: Any, problems: Sequence[Any]
) -> dict[str, Any]:
    """A class as JSON has it."""
    return {
        "op": op.name,
        "variant": variant.name,
        "config": config_fields(config),
        "problems": [asdict(problem) for problem in problems],
    }


def described(
    row: dict[str, Any], arch: Arch
) -> tuple[Op[Any, Any], Variant[Any, Any], Any, list[Any]]:
    """What `description` was given. ValueError where this version has no such thing."""
    op = op_named(row["op"])
    variant = next((v for v in op.variants if v.name == row["variant"]), None) if op else None
    if op is None or variant is None:
        raise ValueError(f"there is no {row['variant']} for {row['op']}")
    kind = type(op.usual[0][1])
    problems = [kind(**fields) for fields in row["problems"]]
    for config in variant.configs(arch, problems[0]):
        if config_fields(config) == row["config"]:
            return op, variant, config, problems
    raise ValueError(f"{row['op']}: {row['variant']} has no such config")
