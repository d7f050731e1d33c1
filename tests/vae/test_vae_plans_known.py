"""Plans for many sizes and budgets, as they were when planning was plain and slow.

`python -m tests.vae.test_vae_plans_known` writes the file anew, where other plans are wanted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.ops.base import Variant
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.vae.forecast import Chosen, ConvWay
from lib_rocm_sd.vae.policy import Plans, Wish
from lib_rocm_sd.vae.steps import Recipe
from tests.vae import vae_models

PATH = Path(__file__).parents[1] / "data" / "vae_plans.json"
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Ours(ConvWay):
    """A kernel of ours whose memory is known here, so that a tuned kernel changes no plan."""

    @property
    def fused(self) -> bool:
        return True

    def workspace_bytes(self, problem: ConvProblem) -> int:
        rows, columns = problem.out_size
        each = -(-problem.out_channels // 16) * 16 * 16
        group_rows = self.config or 8
        return (
            problem.statistics * problem.batch * each * -(-rows // group_rows) * (columns // 16 + 2)
        )


@dataclass(frozen=True)
class Theirs(ConvWay):
    """A convolution that keeps a normalised image, an enlarged one, and sums."""

    @property
    def fused(self) -> bool:
        return False

    def workspace_bytes(self, problem: ConvProblem) -> int:
        p = problem
        rows, columns = p.out_size
        before = p.batch * p.height * p.width * p.in_channels
        made = p.batch * rows * columns * p.out_channels
        enlarged = 8 * before if p.kind == "upsample" else 0
        return before * 6 * p.norm + enlarged + made * (4 + p.in_place) + p.statistics * made // 4


def _variant(problem: ConvProblem) -> Variant[ConvProblem, ConvInputs]:
    return CONVS[problem.kind].variants[0]


def _mixed(problem: ConvProblem) -> ConvWay:
    kind = Theirs if problem.in_channels == 256 or problem.out_channels % 8 else Ours
    return kind(_variant(problem), None)


WAYS: dict[str, Chosen] = {
    "ours": lambda problem: Ours(_variant(problem), None),
    "theirs": lambda problem: Theirs(_variant(problem), None),
    "mixed": _mixed,
    "thick": lambda problem: Ours(_variant(problem), 2),
    "narrow": lambda p: Ours(_variant(p), 8 + (p.in_place and p.shortcut == "conv")),
}


@lru_cache(maxsize=4)
def recipe(role: str, latent: int) -> Recipe:
    return vae_models.standard(role, latent)


def planned(case: dict[str, Any]) -> dict[str, Any]:
    """What is planned for a case, as it is written down."""
    plans = Plans(recipe(case["role"], case["latent"]), torch.float16, WAYS[case["way"]])
    wish = Wish(*case["wish"])
    size = tuple(case["size"])
    plan, links = plans.plan(size, wish, case["free"], case["host"])
    legs = [[leg.start, leg.stop, leg.rows, leg.keep, leg.hidden] for leg in plan.legs]
    return {
        "legs": legs,
        "peak": plan.peak_bytes,
        "host": plan.host_bytes,
        "cost": plan.cost,
        "ticks": plan.ticks,
        "batch": links.batch,
        "in_place": sorted(links.in_place),
        "halved": sorted(links.halved),
    }


def _cases() -> list[dict[str, Any]]:
    """Sizes, ways, wishes and memory that are not alike."""
    decoder: list[tuple[Any, ...]] = [
        ((1, h, w), way, wish, free, host)
        for (h, w), way, wish, free, host in [
            ((64, 64), "ours", ("Memory",), 130 * GIB, 64 * GIB),
            ((64, 64), "ours", ("Auto",), 130 * GIB, 64 * GIB),
            ((64, 64), "theirs", ("Memory",), 8 * GIB, 0),
            ((96, 64), "mixed", ("Memory",), 8 * GIB, 8 * GIB),
            ((128, 128), "ours", ("Memory",), 130 * GIB, 64 * GIB),
            ((128, 128), "ours", ("Memory",), 130 * GIB, 0),
            ((128, 128), "narrow", ("Memory",), 8 * GIB, GIB),
            ((128, 128), "mixed", ("Memory",), 8 * GIB, 64 * MIB),
            ((128, 128), "theirs", ("Memory",), 8 * GIB, 16 * GIB),
            ((128, 128), "ours", ("Auto",), GIB, 4 * GIB),
            ((128, 128), "ours", ("Auto",), 300 * MIB, 4 * GIB),
            ((128, 128), "ours", ("Performance",), 700 * MIB, 4 * GIB),
            ((128, 128), "ours", ("Auto", "auto", 1), 8 * GIB, 4 * GIB),
            ((128, 128), "ours", ("Auto", "auto", 200 * MIB), 8 * GIB, 4 * GIB),
            ((128, 128), "ours", ("Auto", "auto", 512 * MIB), 8 * GIB, 0),
            ((128, 128), "ours", ("Auto", "banded"), 8 * GIB, 4 * GIB),
            ((128, 128), "theirs", ("Auto", "banded"), 8 * GIB, 4 * GIB),
            ((128, 128), "ours", ("Memory", "banded"), 8 * GIB, 4 * GIB),
            ((128, 128), "ours", ("Memory", "whole"), 8 * GIB, 4 * GIB),
            ((152, 104), "ours", ("Memory",), 8 * GIB, 8 * GIB),
            ((61, 83), "ours", ("Memory",), 8 * GIB, 8 * GIB),
            ((61, 83), "mixed", ("Auto", "banded"), 8 * GIB, 8 * GIB),
            ((1, 999), "ours", ("Memory",), 8 * GIB, 8 * GIB),
            ((999, 1), "ours", ("Memory",), 8 * GIB, 8 * GIB),
            ((1, 1), "ours", ("Auto", "banded"), 8 * GIB, 8 * GIB),
            ((256, 256), "ours", ("Memory",), 130 * GIB, 64 * GIB),
            ((256, 256), "ours", ("Auto",), 3 * GIB, 0),
            ((256, 256), "narrow", ("Auto", "auto", GIB), 16 * GIB, 2 * GIB),
            ((256, 256), "mixed", ("Performance",), 4 * GIB, 2 * GIB),
            ((384, 256), "ours", ("Auto", "auto", 3 * GIB // 2), 16 * GIB, 2 * GIB),
            ((512, 512), "ours", ("Memory",), 130 * GIB, 64 * GIB),
            ((256, 256), "thick", ("Auto",), 130 * GIB, 64 * GIB),
            ((512, 512), "thick", ("Auto", "auto", 2 * GIB), 130 * GIB, 16 * GIB),
            ((512, 512), "ours", ("Auto", "auto", 2 * GIB), 130 * GIB, 16 * GIB),
            ((512, 512), "theirs", ("Auto",), 8 * GIB, 16 * GIB),
            ((1024, 1024), "ours", ("Auto", "auto", 4 * GIB), 130 * GIB, 64 * GIB),
        ]
    ]
    decoder += [
        ((4, 64, 64), "ours", ("Auto",), 8 * GIB, GIB),
        ((4, 64, 64), "ours", ("Auto",), GIB, GIB),
        ((3, 96, 96), "mixed", ("Memory",), 8 * GIB, GIB),
    ]
    encoder = [
        ((1, 512, 512), "ours", ("Memory",), 8 * GIB, GIB),
        ((1, 1024, 1024), "ours", ("Memory",), 8 * GIB, GIB),
        ((1, 1000, 777), "mixed", ("Memory",), 8 * GIB, GIB),
        ((1, 2048, 2048), "ours", ("Auto", "auto", GIB), 8 * GIB, 0),
        ((1, 1024, 1024), "theirs", ("Auto", "banded"), 8 * GIB, GIB),
        ((2, 512, 512), "ours", ("Auto",), 8 * GIB, GIB),
    ]
    roles = [("decoder", 4, case) for case in decoder] + [("encoder", 4, case) for case in encoder]
    roles.append(("decoder", 16, ((1, 128, 128), "ours", ("Memory",), 8 * GIB, 8 * GIB)))
    keys = ("size", "way", "wish", "free", "host")
    return [
        {"role": role, "latent": latent, **dict(zip(keys, case, strict=True))}
        for role, latent, case in roles
    ]


def _known() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def _name(case: dict[str, Any]) -> str:
    wish, size = case["wish"], "x".join(map(str, case["size"]))
    return f"{case['role']} {size} {case['way']} {' '.join(map(str, wish))} {case['free'] >> 20}"


@pytest.mark.parametrize("known", _known() if PATH.exists() else [], ids=lambda k: _name(k["case"]))
def test_the_plan_is_the_known_one(known: dict[str, Any]) -> None:
    assert planned(known["case"]) == known["plan"]


def test_what_is_known_is_of_all_cases() -> None:
    cases = json.loads(json.dumps(_cases()))
    assert [known["case"] for known in _known()] == cases
    legs = [leg for known in _known() for leg in known["plan"]["legs"]]
    assert {leg[3] for leg in legs} == {"device", "host", "output"}
    assert any(leg[4] for leg in legs)
    assert any(known["plan"]["halved"] for known in _known())


if __name__ == "__main__":
    lines = [json.dumps({"case": case, "plan": planned(case)}) for case in _cases()]
    PATH.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
