"""Pictures for many people: all prompts at once, and requests that come at random.

The names are MLPerf Inference's: "offline" is how many pictures a second are made where all prompts
are there at once; "server" how long one waits whose requests come as a Poisson process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lib_rocm_sd.lab.rows import Row
from lib_rocm_sd.lab.scaling import drawn, percentile
from lib_rocm_sd.lab.suite.workloads import LATENCY_LIMIT_S

LOAD = 0.8
"""Share of the time in which a server's cards are to be busy."""
Paint = Callable[[int], None]
"""Makes the pictures of a request of this number."""


def offline(row: Row, paints: Sequence[Paint], requests: int, batch: int) -> Row:
    """`row` with pictures a second, `batch` in each request, made by all cards. Before, each makes
    a request that does not count; `first` is the longest of these.
    """
    first_s = 0.0
    for paint in paints:
        begin = time.monotonic()
        paint(0)
        first_s = max(first_s, time.monotonic() - begin)
    begin = time.monotonic()
    _served(paints, [0.0] * requests)
    rate = requests * batch / (time.monotonic() - begin)
    return replace(row, median=rate, p10=rate, p90=rate, runs=1, first=first_s)


def server(row: Row, paints: Sequence[Paint], requests: int, seconds: float) -> Row:
    """`row` with the latencies in s of requests that take `seconds` each, and come as fast as keeps
    the cards busy for `LOAD` of the time.
    """
    rate = LOAD * len(paints) / seconds
    arrivals = [request.at_s for request in drawn(requests, rate, [(1.0, (seconds,))])]
    ordered = sorted(_served(paints, arrivals))
    p10, p50, p90, p95, p99 = (percentile(ordered, share) for share in (0.1, 0.5, 0.9, 0.95, 0.99))
    within = sum(latency <= LATENCY_LIMIT_S for latency in ordered) / len(ordered)
    note = f"Poisson, {rate:.3g} requests a second, limit {LATENCY_LIMIT_S:g} s"
    return replace(
        row,
        median=p50,
        p10=p10,
        p90=p90,
        runs=requests,
        p95=p95,
        p99=p99,
        within=within,
        note=note,
    )


def _served(paints: Sequence[Paint], arrivals: Sequence[float]) -> list[float]:
    """Seconds from each arrival to its end: first come, first served by whichever card is free.

    Raises what a picture raises, once all cards have stopped.
    """
    latencies, errors = [0.0] * len(arrivals), list[BaseException]()
    begin, lock = time.monotonic(), threading.Lock()
    waiting: Iterator[tuple[int, float]] = iter(enumerate(arrivals))

    def work(paint: Paint) -> None:
        while not errors:
            with lock:
                number, at = next(waiting, (-1, 0.0))
            if number < 0:
                return
            time.sleep(max(begin + at - time.monotonic(), 0.0))
            try:
                paint(number)
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                errors.append(error)
            latencies[number] = time.monotonic() - begin - at

    threads = [threading.Thread(target=work, args=(paint,), daemon=True) for paint in paints[1:]]
    for thread in threads:
        thread.start()
    try:
        work(paints[0])
        for thread in threads:
            thread.join()
    except BaseException as error:  # noqa: BLE001 - Ctrl+C: the others end after their picture
        errors.append(error)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return latencies
