"""AMD's own libraries as `python -m tools.debian_hip` has them here."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.trials.place import Place
from tests.verify import thunk
from tools import debian_hip

FILES = {"comgr": "libamd_comgr.so.2", "hiprtc": "libamdhip64.so.5"}
"""In what Debian has each compiler: hiprtc's functions are in HIP's library."""
LIMIT_S = 1800.0
"""After this a process hangs. It takes seconds, and minutes on a busy or stalled machine."""


class Card(NamedTuple):
    """A card of paper under a release's HIP, `library`."""

    release: str
    row: Arch
    paper: thunk.Paper
    library: str

    @property
    def place(self) -> Place:
        return Place(0, "hip", "Card of paper", self.row, self.library, ())


def under(
    release: str, folder: Path, patch: pytest.MonkeyPatch, preload: Path | None = None
) -> Path:
    """Where this release's libraries lie, under whose C library our children run from now on, by a
    program in `folder`, with `preload` before them; skips the test where they are not there.
    """
    try:
        found = debian_hip.libraries(release)
        patch.setattr(sys, "executable", str(_python(release, folder, preload)))
    except debian_hip.MissingError as error:
        pytest.skip(str(error))
    return found


@cache
def _python(release: str, folder: Path, preload: Path | None) -> Path:
    made = folder / f"python-{release}-{preload.stem if preload else 'plain'}"
    return debian_hip.python(release, made, preload=preload)
