"""In the child: may our kernels be launched beside its ZLUDA? Step by step, the safest first.

A step gives the reason against it. One that ends the process, or never comes back, is a verdict
too, which the parent writes (zluda.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import POINTER, byref, c_int, c_size_t, c_uint64
from pathlib import Path
from typing import Any, Protocol

import torch

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.selftest import FAILURES, describe, is_out_of_memory
from lib_rocm_sd.errors import LaunchError
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.runtime import hip, zluda
from lib_rocm_sd.runtime.driver import typed
from lib_rocm_sd.runtime.zluda import HIP_MAJORS, Nvcuda, Zluda
from lib_rocm_sd.trials.torch_child import TorchTester, described
from lib_rocm_sd.trials.verdicts import FAULTED, PASSED, REFUSED, names_fault

ROUNDS = 1000
COMPILING = "torch's own kernels, which ZLUDA compiles before their first use"
EXACT = 1024
"""Whole numbers up to here are exact in float16."""
BUSY_ITEMS = 1 << 24
"""What torch works on before it writes: who does not wait for it, reads too early."""

Step = tuple[str, Callable[[], str]]
Say = Callable[[dict[str, Any]], None]


class Side(Protocol):
    """Torch. Nothing waits for the card but `warm` and `wrong`."""

    def warm(self) -> None:
        """Do once what `round` does, without us."""

    def memory(self) -> int:
        """The address of a tensor."""

    def round(self, number: int) -> None:
        """Torch writes to memory that it has just taken, ours computes, torch reads."""

    def wrong(self) -> int:
        """How many of the rounds since the last time were not right."""

    def other_stream(self) -> AbstractContextManager[Any]:
        """Inside, another stream than the default one is current."""


class Beneath:
    """The calls of the HIP library that the steps compare with ZLUDA's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._check = hip.HipDriver(library).check
        self._library = typed(
            library,
            {
                "hipRuntimeGetVersion": [POINTER(c_int)],
                "hipGetDevice": [POINTER(c_int)],
                "hipMemGetAddressRange": [POINTER(c_uint64), POINTER(c_size_t), c_uint64],
            },
        )

    def number(self, call: str) -> int:
        """What a call with one result gives."""
        number = c_int()
        self._check(call, getattr(self._library, call)(byref(number)))
        return number.value

    def range_of(self, address: int) -> tuple[int, int]:
        """Begin and size of the allocation that has `address`."""
        begin, size = c_uint64(), c_size_t()
        status = self._library.hipMemGetAddressRange(byref(begin), byref(size), address)
        self._check("hipMemGetAddressRange", status)
        return begin.value, size.value


def steps(
    here: Zluda, library: str, nvcuda: Nvcuda, beneath: Beneath, index: int, side: Side
) -> Iterator[Step]:
    """All but the self-test. `library`: the HIP library of the host's process."""
    yield "the same HIP library", lambda: other_library(here, library)
    yield "versions", lambda: unknown_version(nvcuda, beneath)
    yield COMPILING, lambda: warmed(side)
    yield "the same device", lambda: other_device(beneath, index)
    yield "the same memory", lambda: other_memory(nvcuda, beneath, side.memory())
    yield "the order on the default stream", lambda: out_of_order(side)
    yield "the order in another thread", lambda: in_a_thread(lambda: out_of_order(side))
    yield "the order on another stream", lambda: out_of_order(side, side.other_stream())


def other_library(here: Zluda, library: str) -> str:
    """Several files may have one name: the SDK's, one beside torch and the display driver's."""
    if Path(library) == here.hip:
        return ""
    return f"it is {here.hip} in the test's process and {library} in the program's"


def unknown_version(nvcuda: Nvcuda, beneath: Beneath) -> str:
    """HIP 5 had other structures, and nobody has read what a later one does."""
    major = beneath.number("hipRuntimeGetVersion") // 10_000_000
    if major not in HIP_MAJORS:
        supported = " and ".join(map(str, HIP_MAJORS))
        return f"HIP {major} is not among those known beneath ZLUDA, {supported}"
    return nvcuda.unknown()


def warmed(side: Side) -> str:
    """Compiling may take minutes, and is no fault."""
    side.warm()
    return ""


def other_device(beneath: Beneath, index: int) -> str:
    """ZLUDA sets HIP's device to that of the context (push_context_stack, set_current)."""
    device = beneath.number("hipGetDevice")
    return "" if device == index else f"torch's device {index} is HIP's {device}"


def other_memory(nvcuda: Nvcuda, beneath: Beneath, address: int) -> str:
    """Another copy of HIP would not know torch's memory."""
    theirs, ours = nvcuda.range_of(address), beneath.range_of(address)
    if theirs == ours and theirs[0] <= address < sum(theirs):
        return ""
    return f"a tensor at {address:#x} lies in {theirs} by ZLUDA and in {ours} by HIP"


def out_of_order(side: Side, stream: AbstractContextManager[Any] | None = None) -> str:
    """Whether ours came before torch's write or after torch's read."""
    with stream or nullcontext():
        for number in range(ROUNDS):
            side.round(number)
        wrong = side.wrong()
    return f"{wrong} of {ROUNDS} rounds were wrong" if wrong else ""


def in_a_thread(work: Callable[[], str]) -> str:
    """What `work` gives, or raises, in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def examined(listed: Iterator[Step], say: Say) -> dict[str, Any]:
    """The verdict of the steps, up to the first that is not passed."""
    for name, step in listed:
        say({"kind": "trying", "problem": name})
        lasting = True
        try:
            reason = step()
        except (*FAILURES, MemoryError) as error:
            reason, lasting = describe(error), not is_out_of_memory(error)
        if reason:
            outcome = FAULTED if names_fault(reason) else REFUSED
            return {"outcome": outcome, "reason": f"{name}: {reason}", "lasting": lasting}
    return {"outcome": PASSED, "reason": ""}


def opened(index: int, arch: Arch, say: Say) -> ZludaTester:
    """The tester of torch's device `index`. Raises LaunchError where that is not ZLUDA's."""
    info = identify(torch.device("cuda", index))
    if info.backend != "zluda":
        raise LaunchError(f"in the test's process torch finds {info.name or 'no GPU'}, not ZLUDA")
    return ZludaTester(index, arch, say)


class ZludaTester(TorchTester):
    """Torch through ZLUDA, and one class of attention of ours."""

    def _tested(self, head: dict[str, Any], blobs: Sequence[bytes]) -> dict[str, Any]:
        self._take(head, blobs)
        op, variant, config, problems = described(head["torch"], self._arch)

        def ours(x: torch.Tensor) -> torch.Tensor:
            inputs = AttentionInputs(x, x[:, :1], x[:, :1])
            call = Call(op.problem_of(inputs), inputs, self._launch, config)
            return variant.run(call).view(x.shape)

        p = problems[0]
        side = TorchSide(self._device, (p.batch, p.seq_q, p.heads, p.head_dim), ours)
        here = zluda.loaded()
        nvcuda, beneath = Nvcuda(hip.opened(here.nvcuda)), Beneath(hip.opened(here.hip))
        index = self._device.index
        answer = examined(steps(here, head["library"], nvcuda, beneath, index, side), self._say)
        return answer if answer["outcome"] != PASSED else super()._tested(head, blobs)


class TorchSide:
    """Attention over one key gives that key's value, to the bit. So a round's number, which torch
    writes everywhere, is what it must read everywhere.
    """

    def __init__(
        self, device: torch.device, shape: Sequence[int], ours: Callable[[Any], torch.Tensor]
    ) -> None:
        self._device, self._shape, self._ours = device, tuple(shape), ours
        self._busy = torch.empty(BUSY_ITEMS, dtype=torch.float16, device=device)
        self._wrong = torch.empty((), dtype=torch.int64, device=device)

    def warm(self) -> None:
        self._busy.fill_(0)
        self._wrong.fill_(0)
        self._round(0, lambda x: x)
        self.wrong()

    def memory(self) -> int:
        return self._busy.data_ptr()

    def round(self, number: int) -> None:
        self._round(number % EXACT, self._ours)

    def _round(self, number: int, ours: Callable[[Any], torch.Tensor]) -> None:
        self._busy.add_(1)
        shape = (1 + number % 3, *self._shape[1:])
        x = torch.full(shape, float(number), dtype=torch.float16, device=self._device)
        self._wrong += (ours(x) != number).any()

    def wrong(self) -> int:
        count = int(self._wrong)
        self._wrong.fill_(0)
        return count

    @contextmanager
    def other_stream(self) -> Iterator[None]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()
