"""Whole images by the host: the same prompt, seed and sampler with the extension off, on, and on
with the UNet's blocks ours, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lib_rocm_sd.speedtest.guard import FAILED, why
from lib_rocm_sd.speedtest.job import Job, Shares, Shot
from lib_rocm_sd.speedtest.presets import sizes
from lib_rocm_sd.speedtest.result import SpeedRow
from lib_rocm_sd.speedtest.side import Cancelled, Picture

OFF, ON, UNET = "extension off", "extension on", "extension on, UNet"
METHODS = (OFF, ON, UNET)
WARM_UP_STEPS = 2
AMPLIFIED = 16
"""The difference picture's."""


def rows(job: Job) -> Iterator[SpeedRow]:
    """Per size and method: a row in s per image and one in steps per second. Raises Cancelled."""
    wanted = sizes(job.request, job.device)
    shares = Shares(job.effort.parts_s["image"], len(wanted))
    for size in wanted:
        taken = _Taken(job, size, shares.next_s(), shares)
        taken.warm_up()
        taken.measure()
        job.shots += taken.shots()
        yield from taken.rows()


class _Taken:
    """The pictures of one size."""

    def __init__(self, job: Job, size: int, share_s: float, shares: Shares) -> None:
        self.job = job
        self.size = size
        self.steps = job.effort.steps
        self.case = f"{size}x{size}, {self.steps} steps"
        self.shares = shares
        self.share_s = share_s
        self.reasons: dict[str, str] = {}
        self.pictures: dict[str, list[Picture]] = {method: [] for method in METHODS}
        self.made = 0

    def warm_up(self) -> None:
        """One each, of few steps."""
        for method in METHODS:
            self._make(method, min(WARM_UP_STEPS, self.steps), "warming up")

    def measure(self) -> None:
        """In turns, each first as often, until the size's share of time is over."""
        most = self.job.effort.pictures
        for turn in range(most):
            order = METHODS if turn % 2 == 0 else METHODS[::-1]
            for method in order:
                picture = self._make(method, self.steps, f"{turn + 1} of {most}")
                if picture is not None:
                    self.pictures[method].append(picture)
            if sum(p.seconds for both in self.pictures.values() for p in both) > self.share_s:
                return

    def _make(self, method: str, steps: int, text: str) -> Picture | None:
        """None where it failed, now or before."""
        if method in self.reasons:
            return None
        job, done = self.job, self.made
        all_of_them = len(METHODS) * (1 + job.effort.pictures)
        before = max(self.shares.rows - self.shares.left - 1, 0)

        def progress(fraction: float) -> None:
            part = (done + min(max(fraction, 0.0), 1.0)) / all_of_them
            job.told((before + part) / self.shares.rows, f"{self.case}, {method}: {text}")

        progress(0.0)
        self.made += 1
        try:
            job.guard().check()
            asked = (steps, self.size, method != OFF, progress, job.cancelled)
            return job.side.image(*asked, unet=method == UNET)
        except Cancelled:
            raise
        except FAILED as failure:
            self.reasons[method] = why(failure, f"{self.size}x{self.size}")
            return None
        finally:
            job.clean()

    def rows(self) -> list[SpeedRow]:
        """Rows of all methods, including those with nothing but a reason."""
        found = []
        for method in METHODS:
            row = SpeedRow("image", self.case, method, "s", reason=self.reasons.get(method, ""))
            pictures = self.pictures[method]
            if row.reason or not pictures:
                found.append(replace(row, reason=row.reason or "no picture was made"))
                continue
            peaks = [p.peak_mib for p in pictures if math.isfinite(p.peak_mib)]
            row = replace(row, peak_mib=max(peaks, default=math.nan))
            found.append(_with(row, [p.seconds for p in pictures]))
            speeds = [p.it_per_s for p in pictures if math.isfinite(p.it_per_s)]
            if speeds:
                found.append(_with(replace(row, unit="it/s"), speeds))
        return found

    def shots(self) -> list[Shot]:
        """The last ones with the extension on, each beside the last one with it off."""
        cases = {ON: self.case, UNET: f"{self.case}, UNet"}
        found = [self._shot(method, case) for method, case in cases.items()]
        return [shot for shot in found if shot is not None]

    def _shot(self, method: str, case: str) -> Shot | None:
        """None where one of the two is missing."""
        off, on = self.pictures[OFF], self.pictures[method]
        if not off or not on or self.reasons.keys() & {OFF, method}:
            return None
        try:
            picture, largest, mean = difference(off[-1].image, on[-1].image)
        except ValueError as error:
            self.reasons[method] = str(error)
            return None
        return Shot(case, off[-1], on[-1], picture, largest, mean)


def _with(row: SpeedRow, values: Sequence[float]) -> SpeedRow:
    ordered = sorted(values)
    count = len(ordered)
    return replace(
        row,
        median=statistics.median(ordered),
        p10=ordered[count // 10],
        p90=ordered[count * 9 // 10],
        runs=count,
    )


def difference(off: Any, on: Any) -> tuple[Any, int, float]:
    """The amplified difference of two images, its largest value and its mean, of 255.

    Raises ValueError where their sizes differ.
    """
    import numpy as np
    from PIL import Image

    if off.size != on.size:
        raise ValueError(f"the pictures have different sizes: {off.size} and {on.size}")
    one, other = (np.asarray(image.convert("RGB"), dtype=np.int16) for image in (off, on))
    gap = np.abs(one - other)
    visible = (gap * AMPLIFIED).clip(0, 255).astype(np.uint8)
    return Image.fromarray(visible), int(gap.max()), float(gap.mean())


def plain(image: Any) -> Any:
    """The pixels alone: what a host notes in an image's file stays out of ours."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.asarray(image.convert("RGB")))
