"""`doctor --self-test` in a process whose AMD runtime has a card of paper, with torch for the CPU.

Tensors of the CPU count as that GPU's (tests/verify/amdgpu_host): the stand-in for libhsakmt, which
HIP has loaded, is told of their storages before each launch, and HIP is waited for after it.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_size_t, c_void_p
from pathlib import Path
from typing import Any

import pytest

from lib_rocm_sd import __main__ as command
from lib_rocm_sd import first_trials
from lib_rocm_sd.arch import table
from lib_rocm_sd.commands import selftest_cases
from lib_rocm_sd.device import Facts, identify
from lib_rocm_sd.runtime.card import HipCard
from lib_rocm_sd.runtime.compile_worker import load
from lib_rocm_sd.runtime.driver import Driver
from lib_rocm_sd.trials import place
from tests.verify import amdgpu_host


def main(gfx: str, library: str, python: str, out: str) -> int:
    """`python`: what starts a process that has the card, too."""
    sys.executable = python
    card = HipCard(load(Path(library)), 0)
    facts = Facts("cuda", 0, "Card of paper", "5.7", gfx)
    row = table()[gfx]
    cases = amdgpu_host.smallest(selftest_cases.cases(row))
    classes = [each for each in first_trials.all_classes(row) if each.op.name == "layer norm"]
    start = Driver._start

    def started(driver: Driver, sizes: tuple[Any, ...], extra: Any, kept: Any, stream: int) -> None:
        with shown(card):
            start(driver, sizes, extra, kept, stream)

    with pytest.MonkeyPatch.context() as patch:
        amdgpu_host.as_gpu(patch, facts, card.new_stream(), amdgpu_host.Modules())
        patch.setattr(Driver, "_start", started)
        patch.setattr(place, "of", lambda device, launch: place.here(identify(device), 0, row))
        patch.setattr(selftest_cases, "cases", lambda row: cases)
        patch.setattr(first_trials, "all_classes", lambda row: classes[:1])
        patch.setattr(first_trials, "further_classes", lambda row: [])
        gc.freeze()  # tensors of modules are no concern of kernels
        return command.main(["doctor", "--self-test", "--out", out])


@contextmanager
def shown(card: HipCard) -> Iterator[None]:
    """Tensors that live now, to the card of paper, until it has done its work."""
    thunk = ctypes.CDLL(None)
    regions = [(each.address, len(each.data)) for each in amdgpu_host.memory().buffers]
    for address, size in regions:
        assert thunk.hsaKmtRegisterMemoryWithFlags(c_void_p(address), c_size_t(size), 0) == 0
    yield
    card.synchronise()
    for address, _ in regions:
        assert thunk.hsaKmtDeregisterMemory(c_void_p(address)) == 0
