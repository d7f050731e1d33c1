"""A model of time: work on the device, its submission by the CPU, and what is exchanged.

Assumed: a step takes the longer of what the device works and what the CPU takes to submit; nothing
is exchanged while the device computes; every message costs the link's latency, and every byte its
share of the bandwidth; a gather among c cards passes c - 1 messages, one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lib_rocm_sd.scaling.measured import PAIRS, STEPS, VAE_MS, Link, Pair, Picture, Step

SUBMITTED = 4
"""Launches that an exchange adds: what is packed, sent, taken apart and put together."""
NORM_BYTES = 2 * 32 * 3 * 8
"""Bytes from a rank for a GroupNorm of two images: count, mean, variance of 32 groups, float64."""


@dataclass(frozen=True)
class Split:
    """What some cards take. `why`: why they cannot; then `ms` is NaN."""

    cards: int
    ms: float
    one_ms: float
    why: str = ""

    @property
    def speedup(self) -> float:
        """Times as fast as one card."""
        return self.one_ms / self.ms


def one_card(step: Step) -> float:
    """A step's ms."""
    return max(step.device_ms, step.submit_ms)


def guidance(step: Step, link: Link, handoff_ms: float = 0.0) -> Split:
    """Prompt and negative prompt on two cards. `handoff_ms`: what Python adds at an exchange."""
    device = step.device_ms * (step.fixed_share + (1 - step.fixed_share) / 2)
    exchanged = _message_ms(link, step.image_bytes / 2)
    return Split(2, max(device, step.submit_ms) + exchanged + handoff_ms, one_card(step))


def patches(step: Step, cards: int, link: Link) -> Split:
    """Rows of every image on `cards` cards, exact."""
    one = one_card(step)
    if step.units < 2 * cards:
        return Split(cards, math.nan, one, f"{step.units} rows of the smallest image")
    largest = math.ceil(step.units / cards) / step.units
    device = step.device_ms * (step.fixed_share + (1 - step.fixed_share) * largest)
    exchanges = step.edges + step.norms + step.keys
    submit = step.submit_ms * (1 + SUBMITTED * exchanges / step.launches)
    both_ways = 1 if cards == 2 else 2
    edges = step.edges * _message_ms(link, both_ways * step.edge_bytes / step.edges)
    # One rank of two sends half of all keys and values.
    keys = step.keys * _gather_ms(link, 2 * step.key_bytes / step.keys, cards)
    norms = step.norms * _gather_ms(link, NORM_BYTES * cards, cards)
    return Split(cards, max(device, submit) + edges + keys + norms, one)


def vae(size: int, cards: int, link: Link) -> Split:
    """A decode of a picture `size` x `size` by rows, without making any row twice."""
    one, latent = VAE_MS[size], size // 8
    units = math.ceil(latent / 16)
    if units < cards:
        return Split(cards, math.nan, one, f"{units} times 16 rows of the latent image")
    device = one * math.ceil(units / cards) / units
    edges = sum(
        count * _message_ms(link, 2 * latent * factor * channels * 2)
        for count, factor, channels in VAE_CONVOLUTIONS
    )
    middle = _gather_ms(link, latent * latent * 512 * 2, cards) * (2 if latent >= 181 else 1)
    convolutions = sum(count for count, _, _ in VAE_CONVOLUTIONS)
    statistics = convolutions * _gather_ms(link, latent // 16 * 512 * 16, cards)
    picture = _gather_ms(link, size * size * 3 * 2, cards)
    return Split(cards, device + edges + middle + statistics + picture, one)


def batch(picture: Picture, cards: int) -> Split:
    """Pictures over the cards, each made by one; ms for one of many."""
    return Split(cards, picture.seconds * 1e3 / cards, picture.seconds * 1e3)


def stages(picture: Picture, cards: int) -> Split:
    """Text encoder, UNet and VAE on cards of their own; ms for one of many, by the slowest stage.

    What is neither a step nor the VAE is the first stage's. Two cards have two stages.
    """
    first_s, steps_s = picture.rest_s - picture.vae_s, picture.steps * picture.step_s
    if cards == 2:
        slowest_s = max(first_s + steps_s, picture.vae_s)
    else:
        slowest_s = max(first_s, steps_s / (cards - 2), picture.vae_s)
    return Split(cards, slowest_s * 1e3, picture.seconds * 1e3)


VAE_CONVOLUTIONS = ((11, 1, 512), (7, 2, 512), (1, 4, 512), (6, 4, 256), (1, 8, 256), (7, 8, 128))
"""Convolutions of Stable Diffusion's decoder: how many there are, the size of their images relative
to the latent image, and how many channels they read.
"""


def _message_ms(link: Link, size_bytes: float) -> float:
    return link.latency_us / 1e3 + size_bytes / link.gb_s / 1e6


def _gather_ms(link: Link, all_bytes: float, cards: int) -> float:
    """Each card has its part of `all_bytes` and gets the others'."""
    return (cards - 1) * _message_ms(link, all_bytes / cards)


def by_name(name: str) -> Step:
    """The step of this name."""
    return next(step for step in STEPS if step.name == name)


@dataclass(frozen=True)
class Checked:
    """A measured pair and what the model says of it. ms; `error` of the model, as a share."""

    pair: Pair
    model_ms: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.model_ms / self.pair.two_ms - 1


def handoff_ms(link: Link) -> float:
    """What Python added to a step in the two-card prototype: fitted to the first pair alone."""
    pair = PAIRS[0]
    return pair.two_ms - guidance(_of_pair(pair, pair), link).ms


def checked(link: Link) -> list[Checked]:
    """The model beside the runs on two cards: the first is fitted, the others are predicted."""
    first, wait = PAIRS[0], handoff_ms(link)
    return [
        Checked(pair, guidance(_of_pair(pair, first), link, wait).ms, pair is first)
        for pair in PAIRS
    ]


def _of_pair(pair: Pair, first: Pair) -> Step:
    """The pair's step as submitted on that machine.

    One card was as slow as its CPU for the first pair, whose device time is shorter: that gives
    what a launch took there, and so what the other pair's launches took.
    """
    step, of_first = by_name(pair.step), by_name(first.step)
    submit = first.one_ms / of_first.launches * step.launches
    return Step(**{**step.__dict__, "submit_ms": submit})


def picture_speedup(picture: Picture, cards: int) -> float:
    """Times as fast as one card with the steps split by guidance over two, or four."""
    if cards < 2:
        return 1.0
    fixed = picture.fixed_share
    step_s = picture.step_s * (fixed + (1 - fixed) / cards)
    return picture.seconds / (picture.rest_s + picture.steps * step_s)
