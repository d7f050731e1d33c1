"""What running a plan asks of the engine, as problems of its ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Op, Work
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import STATISTICS_ROWS
from lib_rocm_sd.ops.dtypes import DTYPE_NAMES
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, STATISTICS
from lib_rocm_sd.ops.group_norm.problem import ApplyProblem, FinalizeProblem, ImageProblem
from lib_rocm_sd.vae import attention
from lib_rocm_sd.vae.plan import BandPlan, Leg
from lib_rocm_sd.vae.steps import AttentionStep, Rows
from lib_rocm_sd.vae.trace import Action, Chain, bands, conv_problem, normed, parts


def of_plan(chain: Chain, plan: BandPlan) -> Work:
    """All that `plan` asks; of the many bands of an image the first two, the last two and one more.

    How many parts the statistics have that a norm is made from is told by whoever makes them: here
    it is a guess, which neither what is compiled nor what is tested depends on.
    """
    found: dict[tuple[str, Any], Op[Any, Any]] = {}
    norms: set[int] = set()
    for leg in plan.legs:
        for image, cuts, stored in _passes(chain, leg):
            for rows in cuts:
                for action in chain.actions(image, rows, stored):
                    found.update(_asked(chain, action, image, norms))
            norms.add(image)
    return [(op, problem) for (_, problem), op in found.items()]


def of_whole(chain: Chain) -> Work:
    """All that the whole frame asks."""
    return of_plan(chain, BandPlan((Leg(0, chain.last, None, "output"),), 0, 0, 0.0, 1))


def _passes(chain: Chain, leg: Leg) -> Iterator[tuple[int, list[Rows], frozenset[int]]]:
    """An image that is made, its rows band by band, and the images that are read for it."""
    stored = frozenset({leg.start})
    for image in leg.passes(chain):
        if leg.rows is None:
            yield image, [chain.rows(image)], stored
            continue
        split = bands(chain.sizes[image].height, leg.band_rows(chain, image))
        middle = split[(len(split) - 1) // 2]
        yield image, list(dict.fromkeys((*split[:2], middle, *split[-2:]))), stored
        stored |= {image} if leg.hidden else set()


def _asked(
    chain: Chain, action: Action, made: int, norms: set[int]
) -> Iterator[tuple[tuple[str, Any], Op[Any, Any]]]:
    """What an action on the way to image `made` asks. `norms`: of images that have one by now."""
    if action.source is None:
        return
    image, step = action.image, chain.steps[action.image - 1]
    whole = action.source == chain.rows(image - 1) and action.made == chain.rows(image)
    wanted = normed(chain, image) and image not in norms and (whole or image == made)
    asked: Work = []
    if isinstance(step, AttentionStep):
        asked = list(_of_attention(chain, action))
    else:
        made_of = [conv_problem(chain, part, wanted) for part in parts(chain, action)]
        asked = [(CONVS[problem.kind], problem) for problem in made_of]
    if wanted:
        asked.append((FINALIZE, _finalize(chain, image)))
    if wanted and whole:
        norms.add(image)
    yield from (((op.name, each), op) for op, each in asked)


def _finalize(chain: Chain, image: int) -> FinalizeProblem:
    norm, height = chain.steps[image].norm, chain.sizes[image].height
    assert norm is not None
    wide = DTYPE_NAMES[torch.promote_types(chain.dtype, torch.float32)]
    affine = DTYPE_NAMES[torch.promote_types(norm.weight.dtype, torch.float32)]
    parts = -(-height // STATISTICS_ROWS)
    return FinalizeProblem(chain.batch, parts, norm.num_channels, norm.num_groups, wide, affine)


def _of_attention(chain: Chain, action: Action) -> Iterator[tuple[Op[Any, Any], Any]]:
    step, size = chain.steps[action.image - 1], chain.sizes[action.image]
    assert isinstance(step, AttentionStep)
    batch, dtype, width = chain.batch, DTYPE_NAMES[chain.dtype], size.width
    rows = attention.chunk_rows(batch, width, size.channels, chain.itemsize)
    heights = {last - first for first, last in bands(size.height, rows)}
    pixels, per_head = size.height * width, size.channels // step.heads
    for height in sorted(heights, reverse=True):
        yield APPLY, ApplyProblem(batch, size.channels, height, width, dtype)
        queries = height * width
        yield ATTENTION, AttentionProblem(batch, step.heads, queries, pixels, per_head, dtype)
    if normed(chain, action.image):
        yield STATISTICS, ImageProblem(batch, size.channels, size.height, width, dtype)
