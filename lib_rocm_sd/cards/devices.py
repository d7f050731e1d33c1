"""Which further cards there are, and which of them a user has chosen. Importable without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lib_rocm_sd.device import identify

if TYPE_CHECKING:
    import torch

TEST = "ROCM_SD_SEVERAL_TEST"
"""For tests and development: the devices of replicas, such as `cpu` or `cuda:0`, with commas. Here
the same card twice is allowed.
"""


BESIDE_ZLUDA = "torch runs through ZLUDA, which processes of other cards would have to load, too"


@dataclass(frozen=True)
class Chosen:
    """`devices` beside one's own; `left`: why others are not among them."""

    devices: tuple[torch.device, ...]
    left: tuple[str, ...] = ()


def chosen(home: torch.device, text: str = "", environ: Mapping[str, str] = os.environ) -> Chosen:
    """The cards beside `home`. `text`: their numbers, with commas; empty for all of them."""
    import torch

    test = environ.get(TEST, "")
    if test:
        return Chosen(tuple(torch.device(name.strip()) for name in test.split(",")))
    if home.type != "cuda":
        return Chosen((), ("this is not a GPU",))
    own = torch.cuda.current_device() if home.index is None else home.index
    count = torch.cuda.device_count()
    if count < 2:
        return Chosen((), (f"there is one card, {identify(home).name}: nothing to divide with",))
    if identify(home).backend == "zluda":
        return Chosen((), (BESIDE_ZLUDA,))
    numbers, notes = _numbers(text, own, count)
    devices = []
    for number in numbers:
        info = identify(torch.device("cuda", number))
        if info.reasons:
            notes.append(f"card {number} ({info.name}): {'; '.join(info.reasons)}")
        else:
            devices.append(torch.device("cuda", number))
    return Chosen(tuple(devices), tuple(notes))


def numbers_of(text: str) -> list[int] | None:
    """The numbers in '1, 2'; empty for all; None where it is something else."""
    parts = [part for part in re.split(r"[,;\s]+", text.strip()) if part]
    if all(re.fullmatch(r"\d{1,3}", part) for part in parts):
        return [int(part) for part in parts]
    return None


def _numbers(wanted: str, own: int, count: int) -> tuple[list[int], list[str]]:
    asked = numbers_of(wanted)
    if not asked:
        return [number for number in range(count) if number != own], []
    notes = []
    if len(set(asked)) < len(asked):
        notes.append("a card was named twice; each is used once")
    if own in asked:
        notes.append(f"card {own} is the one that the steps are computed on anyway")
    notes += [f"there is no card {number}" for number in sorted(set(asked)) if number >= count]
    numbers = [number for number in dict.fromkeys(asked) if number != own and number < count]
    return numbers, notes
