"""What several cards would take, by a model of time, and a farm of them, simulated. Needs no torch.

Assumed: a step takes the longer of what the device works and what the CPU takes to submit; nothing
is exchanged while the device computes; every message costs the link's latency, and every byte its
share of the bandwidth; a gather among c cards passes c - 1 messages, one after the other.

Figures of an NVIDIA H200 stand in docs/results; tests compare them with the files. Those of two
H200s are from the issue that asked for several GPUs, and are in no file.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

TWO_H200 = "two NVIDIA H200, NVLink, eager fp16 diffusers UNets, one process for each"


@dataclass(frozen=True)
class Step:
    """A UNet's call for a prompt and its negative prompt.

    `device_ms`: what the device works, `submit_ms`: what the CPU takes to submit it, by `launches`.
    `fixed_share`: of the device's time, what does not fall with the batch. `edges`, `norms`,
    `keys`: exchanges of patch parallel, and `edge_bytes`, `key_bytes`: what one rank of two sends
    in them. `units`: into how many rows of the smallest image it can be parted.
    """

    name: str
    device_ms: float
    submit_ms: float
    launches: int
    fixed_share: float
    edges: int
    norms: int
    keys: int
    edge_bytes: int
    key_bytes: int
    image_bytes: int
    units: int

    @property
    def one_card_ms(self) -> float:
        return max(self.device_ms, self.submit_ms)


SD15_FIXED = 0.51
"""A step takes f + n p for n pictures: 1/133.0 s for one and 1/53.56 s for four, in the WebUI with
the UNet's blocks (webui-unet-h200.json), so f is half of a step for one."""
SDXL_FIXED = 0.093
"""ComfyUI's split of SDXL takes 1/1.80 to 1/1.86 of the time on two cards (the issue; which ones is
not known): (f + p) / (f + 2 p) = 1/1.83."""

SD15_ROWS = (52, 61, 16, 4629504, 46202880, 32768, 8)
SDXL_ROWS = (40, 46, 70, 8194048, 419430400, 131072, 32)
LARGE_ROWS = (40, 46, 70, 16388096, 1677721600, 524288, 64)
STEPS = (
    Step("SD 1.5 512x512, blocks", 6.457, 4.334, 742, SD15_FIXED, *SD15_ROWS),
    Step("SD 1.5 512x512, eager", 11.943, 27.895, 1175, SD15_FIXED, *SD15_ROWS),
    Step("SDXL 1024x1024, blocks", 30.746, 8.720, 1682, SDXL_FIXED, *SDXL_ROWS),
    Step("SDXL 1024x1024, eager", 41.676, 69.753, 2353, SDXL_FIXED, *SDXL_ROWS),
    # Not measured: 1024x1024's device time, 16 times its self-attention (10 of 183.6 us and 60 of
    # 35.3 us, attention-h200.json: sdpa) and 4 times the rest; the same launches.
    Step("SDXL 2048x2048, blocks", 170.4, 8.720, 1682, SDXL_FIXED / 5, *LARGE_ROWS),
    Step("SDXL 2048x2048, eager", 214.2, 69.753, 2353, SDXL_FIXED / 5, *LARGE_ROWS),
)
"""Times: unet-h200.json, Auto and eager. Exchanges and bytes were counted by running patch parallel
without data, by diffusers' blocks: ours exchange as often, and less where an image is enlarged.
"""

VAE_MS = {512: 8.208, 1024: 27.672, 2048: 125.573, 4096: 795.538}
"""One decode, whole frame or bands, by pictures' size: vae-h200.json, rocm_sd Auto."""


@dataclass(frozen=True)
class Picture:
    """What users ask for: seconds on one card, of which `steps` steps of `step_s`, and the VAE's
    (vae-h200.json).
    """

    name: str
    seconds: float
    steps: int
    step_s: float
    vae_s: float
    fixed_share: float
    share: float

    @property
    def rest_s(self) -> float:
        """Text encoder, VAE, and all that is no step."""
        return max(self.seconds - self.steps * self.step_s, 0.0)


PICTURES = (
    Picture("SD 1.5 512x512, 20 steps", 0.23651, 20, 1 / 133.005, 0.008208, SD15_FIXED, 0.6),
    Picture("SD 1.5 512x512, 4 pictures", 0.69344, 20, 1 / 53.559, 0.032832, SD15_FIXED / 4, 0.15),
    Picture("SD 1.5 1024x1024, 20 steps", 0.83369, 20, 1 / 36.535, 0.027672, SDXL_FIXED, 0.25),
)
"""webui-unet-h200.json: 512, 512x4 and 1024, UNet Auto. `share` of all requests is assumed, as
SDXL's fixed share of the last is.
"""


@dataclass(frozen=True)
class Pair:
    """A step on one card and, split by guidance, on two. ms."""

    name: str
    one_ms: float
    two_ms: float
    step: str


PAIRS = (
    Pair("SD 1.5", 18.3, 25.8, "SD 1.5 512x512, eager"),
    Pair("SDXL", 53.9, 47.4, "SDXL 1024x1024, eager"),
)
"""Measured on TWO_H200, in a prototype whose processes handed over through Python."""


@dataclass(frozen=True)
class Link:
    """Between two cards, each way at once: bytes per second, and what a small message takes."""

    name: str
    gb_s: float
    latency_us: float
    source: str


LINKS = (
    Link("NVLink (H200)", 386.0, 13.0, "measured on two H200s, a copy (the issue)"),
    Link("xGMI (MI300X)", 48.0, 15.0, "64 GB/s each way by AMD's data sheet, 3/4 of it assumed"),
    Link("PCIe 5.0 x16", 47.0, 20.0, "63 GB/s by the standard, 3/4 of it assumed"),
    Link("PCIe 4.0 x16", 24.0, 20.0, "31.5 GB/s by the standard, 3/4 of it assumed"),
    Link("Ethernet 100 Gbit/s", 11.0, 30.0, "12.5 GB/s, 7/8 of it assumed, with RDMA"),
    Link("Ethernet 10 Gbit/s", 1.1, 60.0, "1.25 GB/s, 7/8 of it assumed"),
)
CARDS = (2, 4, 8, 16, 32, 64)


SUBMITTED = 4
"""Launches that an exchange adds: what is packed, sent, taken apart and put together."""
NORM_BYTES = 2 * 960 * 16
"""Bytes from a rank for a GroupNorm of two images: four values in float32 for each of the channels,
of which a UNet's norms have about as many on average."""


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


def guidance(step: Step, link: Link, handoff_ms: float = 0.0) -> Split:
    """Prompt and negative prompt on two cards. `handoff_ms`: what Python adds at an exchange."""
    device = step.device_ms * (step.fixed_share + (1 - step.fixed_share) / 2)
    exchanged = _message_ms(link, step.image_bytes / 2)
    return Split(2, max(device, step.submit_ms) + exchanged + handoff_ms, step.one_card_ms)


def patches(step: Step, cards: int, link: Link) -> Split:
    """Rows of every image on `cards` cards, exact."""
    one = step.one_card_ms
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


def handoff_ms(link: Link) -> float:
    """What Python added to a step in the two-card prototype: fitted to the first pair alone."""
    return PAIRS[0].two_ms - guidance(_of_pair(PAIRS[0]), link).ms


def checked(link: Link) -> list[tuple[Pair, float]]:
    """The runs on two cards, and the model's ms: the first is fitted, the others are predicted."""
    wait = handoff_ms(link)
    return [(pair, guidance(_of_pair(pair), link, wait).ms) for pair in PAIRS]


def _of_pair(pair: Pair) -> Step:
    """The pair's step as submitted on that machine.

    One card was as slow as its CPU for the first pair, whose device time is shorter: that gives
    what a launch took there, and so what the other pair's launches took.
    """
    step, first = by_name(pair.step), PAIRS[0]
    launch_ms = first.one_ms / by_name(first.step).launches
    return replace(step, submit_ms=launch_ms * step.launches)


def picture_speedup(picture: Picture, cards: int) -> float:
    """Times as fast as one card with the steps split by guidance over two, or four."""
    if cards < 2:
        return 1.0
    fixed = picture.fixed_share
    step_s = picture.step_s * (fixed + (1 - fixed) / cards)
    return picture.seconds / (picture.rest_s + picture.steps * step_s)


Gang = Callable[[int, int], int]
"""How many cards the next request gets, none as long as it waits for more: of so many free ones,
with so many requests behind it.
"""
POLICIES: dict[str, Gang] = {
    "one card": lambda free, behind: 1,
    "two cards": lambda free, behind: 2 if free >= 2 else 0,
    "two when idle": lambda free, behind: 2 if free >= 2 + behind else 1,
}


@dataclass(frozen=True)
class Request:
    """Comes at `at_s`; `seconds[k]` with k + 1 cards."""

    at_s: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Served:
    """What a simulation found. Latency is from coming to going. `busy`: share of cards."""

    requests: int
    per_s: float
    busy: float
    mean_s: float
    mean_wait_s: float
    p50_s: float
    p95_s: float
    p99_s: float


def simulate(requests: Sequence[Request], cards: int, gang: Gang) -> Served:
    """First come, first served, each by as many cards as `gang` says, from 1 to those free.

    The first tenth is not counted: the farm begins empty. Requests are in order of time.
    """
    events: list[tuple[float, int]] = []  # when cards become free, and how many
    free, clock, busy_s, last = cards, 0.0, 0.0, 0.0
    latencies, waits = [], []
    arrivals = [request.at_s for request in requests]
    for index, request in enumerate(requests):
        clock = max(clock, request.at_s)
        while True:
            while events and events[0][0] <= clock:
                free += heapq.heappop(events)[1]
            behind = bisect.bisect_right(arrivals, clock) - index - 1
            workers = gang(free, behind) if free else 0
            if workers:
                break
            clock = max(clock, events[0][0])
        used = max(1, min(workers, free, len(request.seconds)))
        seconds = request.seconds[used - 1]
        heapq.heappush(events, (clock + seconds, used))
        free -= used
        busy_s += used * seconds
        last = max(last, clock + seconds)
        if index >= len(requests) // 10:
            latencies.append(clock + seconds - request.at_s)
            waits.append(clock - request.at_s)
    latencies.sort()
    span = last - requests[0].at_s
    return Served(
        len(requests),
        len(requests) / span,
        busy_s / span / cards,
        sum(latencies) / len(latencies),
        sum(waits) / len(waits),
        *(percentile(latencies, share) for share in (0.5, 0.95, 0.99)),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def drawn(
    count: int,
    per_s: float,
    kinds: Sequence[tuple[float, tuple[float, ...]]],
    seed: int = 0,
) -> list[Request]:
    """`count` requests that come as a Poisson process. `kinds`: share, and seconds by cards."""
    random_ = random.Random(seed)
    shares = [share for share, _ in kinds]
    now, requests = 0.0, []
    for _ in range(count):
        now += random_.expovariate(per_s)
        (seconds,) = random_.choices([seconds for _, seconds in kinds], shares)
        requests.append(Request(now, seconds))
    return requests
