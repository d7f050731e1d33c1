"""A farm of cards that serves many users: requests come at random, and wait in one line."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Gang = Callable[[int, int], int]
"""How many cards the next request gets: of so many free ones, with so many requests behind it."""


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
    for index, request in enumerate(requests):
        clock = max(clock, request.at_s)
        while True:
            while events and events[0][0] <= clock:
                free += heapq.heappop(events)[1]
            wanted = gang(free, _behind(requests, index, clock)) if free else 0
            if wanted:
                break
            clock = max(clock, events[0][0])
        used = max(1, min(wanted, free, len(request.seconds)))
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


def _behind(requests: Sequence[Request], index: int, clock: float, most: int = 64) -> int:
    """Requests after this one that have come by now; counted up to `most`."""
    count = 0
    for request in requests[index + 1 : index + 1 + most]:
        if request.at_s > clock:
            break
        count += 1
    return count


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def drawn(
    count: int,
    per_s: float,
    kinds: Sequence[tuple[float, tuple[float, ...]]],
    seed: int = 0,
    exponential: bool = False,
) -> list[Request]:
    """`count` requests that come as a Poisson process. `kinds`: share, and seconds by cards.

    `exponential`: seconds are means, for the formulas that suppose so.
    """
    random_ = random.Random(seed)
    shares = [share for share, _ in kinds]
    now, made = 0.0, []
    for _ in range(count):
        now += random_.expovariate(per_s)
        (seconds,) = random_.choices([seconds for _, seconds in kinds], shares)
        factor = random_.expovariate(1.0) if exponential else 1.0
        made.append(Request(now, tuple(factor * each for each in seconds)))
    return made


def alone(free: int, behind: int) -> int:
    """Each request has one card."""
    return 1


def pairs(free: int, behind: int) -> int:
    """Each request has two cards, and waits for them."""
    return 2 if free >= 2 else 0


def when_idle(free: int, behind: int) -> int:
    """Two cards where nobody behind needs the second."""
    return 2 if free >= 2 + behind else 1


POLICIES: dict[str, Gang] = {"one card": alone, "two cards": pairs, "two when idle": when_idle}


def mean_wait_s(per_s: float, service_s: float, cards: int) -> float:
    """Mean wait in an M/M/c queue: random arrivals, exponential service times (Erlang's C formula).

    Infinite where requests arrive as fast as they are served, or faster.
    """
    offered = per_s * service_s
    if offered >= cards:
        return math.inf
    term, total = 1.0, 1.0
    for k in range(1, cards):
        term *= offered / k
        total += term
    last = term * offered / cards * cards / (cards - offered)
    return last / (total + last) * service_s / (cards - offered)
