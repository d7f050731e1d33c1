"""What ops say of their problems where nothing was measured; without torch, too."""

from __future__ import annotations

from typing import Any

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.registry import ops

GFX = ("gfx1030", "gfx1100", "gfx942")


def told() -> list[str]:
    """What runs unmeasured of all usual problems of all ops, and which kernels that launches."""
    return [
        f"{gfx}, {op.name}, {problem}: {_launched(op, problem, gfx)}"
        for op in ops()
        for gfx in GFX
        for problem in (*(usual for _, usual in op.usual), *op.cases)
    ]


def _launched(op: Op[Any, Any], problem: Any, gfx: str) -> str:
    arch = by_gfx(gfx)
    assert arch is not None
    able = [v for v in op.variants if not v.refusals(arch, problem)]
    first = max(able, key=lambda variant: variant.preference_for(arch, problem))
    config = first.configs(arch, problem)[0]
    specs = [str(spec) for spec in first.specs(arch, problem, config)]
    return f"{first.name}, {first.workspace(problem)} bytes, {config}, {specs}"
