"""What makes the whole frame take less memory and costs next to nothing.

A residual block's output may be written over what the block began with, where nobody else reads
that; and an image that is made when memory is fullest may be made in two halves, so that its
statistics, one for each work-group before they are merged, take half as much. Both give the same
bits.
"""

from __future__ import annotations

from dataclasses import replace

from lib_rocm_sd.vae.forecast import Forecast
from lib_rocm_sd.vae.plan import BandPlanner
from lib_rocm_sd.vae.steps import AttentionStep, ConvStep
from lib_rocm_sd.vae.trace import Chain, alive_bytes, whole_problem
from lib_rocm_sd.vae.ways import Chosen

HALVED_BYTES = 24 << 20
"""Statistics that take no more are made at once: it keeps a small card's work-groups together."""


def thrifty(chain: Chain, chosen: Chosen) -> BandPlanner:
    """The planner of `chain` with what is to be made in place, and in halves, when it runs so."""
    able = [image for image in range(2, chain.last + 1) if _may_be_in_place(chain, image, chosen)]
    narrower = [i for i in able if chain.sizes[i].channels < chain.sizes[i - 2].channels]
    best = replace(chain, in_place=frozenset(able) - frozenset(narrower))
    forecast = Forecast(best, chosen)
    least = BandPlanner(best, chosen, forecast).whole().peak_bytes
    for image in narrower:  # keeps a wider image's memory, so it may do harm
        tried = replace(best, in_place=best.in_place | {image})
        other = Forecast(tried, chosen, forecast)
        peak = BandPlanner(tried, chosen, other).whole().peak_bytes
        if peak < least:
            best, forecast, least = tried, other, peak
    halved = _halved(best, forecast)
    if halved:
        best = replace(best, halved=halved)
        forecast = Forecast(best, chosen, forecast)
    return BandPlanner(best, chosen, forecast)


def _may_be_in_place(chain: Chain, image: int, chosen: Chosen) -> bool:
    """True where our kernel can write the image over the one that its block began with."""
    if not chain.steps[image - 1].residual:
        return False
    channels, before = chain.sizes[image].channels, chain.sizes[image - 2].channels
    attended = image < chain.last and isinstance(chain.steps[image], AttentionStep)
    if channels > before or (channels < before and attended):
        return False
    apart, over = (chosen(whole_problem(chain, image, in_place)) for in_place in (False, True))
    # By one config, so that bands, which may be out of place, still have the same bits.
    return over.fused and apart.fused and over.config == apart.config


def _halved(chain: Chain, forecast: Forecast) -> frozenset[int]:
    """The images during which the most is alive, where their statistics add much to it."""
    if chain.batch > 1:
        return frozenset()
    actions = chain.actions(chain.last, chain.rows(chain.last), frozenset({0}))
    alive = alive_bytes(chain, actions)
    found = set()
    for action, size in zip(actions, alive, strict=True):
        if action.source is None or not isinstance(chain.steps[action.image - 1], ConvStep):
            continue
        problem = whole_problem(chain, action.image)
        way = forecast.way(action.image)
        statistics = way.workspace_bytes(problem)
        if way.fused and statistics > HALVED_BYTES and size + statistics > max(alive):
            found.add(action.image)
    return frozenset(found)
