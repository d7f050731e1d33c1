"""Is a variant right on this machine? A small problem, compared with float64 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from lib_rocm_sd.errors import DeviceOutOfMemoryError
from lib_rocm_sd.ops.base import SEED, Call, Launch, Op, Variant

FAILURES = (RuntimeError, OSError, TypeError, AttributeError, ValueError)
"""What a variant may die of without anybody being to blame but itself: CompileError, LaunchError,
torch's RuntimeError, an API that this torch lacks."""

_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "bad_alloc")


@dataclass(frozen=True)
class Check:
    """The outcome of one self-test. `error` is max |output - reference| / max |reference|.

    `reason` is empty when the test was passed; `error` is infinite without a usable output.
    """

    error: float
    tolerance: float
    reason: str = ""


def is_out_of_memory(error: BaseException) -> bool:
    """True for "out of memory" of torch, the driver or Python: such errors are passed on."""
    kinds: tuple[type[BaseException], ...] = (MemoryError, DeviceOutOfMemoryError)
    kinds += (getattr(torch.cuda, "OutOfMemoryError", MemoryError),)
    if isinstance(error, kinds):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def check(
    op: Op[Any, Any],
    variant: Variant[Any, Any],
    config: Any,
    launch: Launch | None,
    problem: Any,
    device: torch.device,
) -> Check:
    """Run `problem` through `variant` on `device` and compare with the op's reference on the CPU.

    A failure is a Check with a reason; only "out of memory" is raised. torch's global random
    generators, autograd and autocast are left alone.
    """
    tolerance = op.tolerance(problem)
    with torch.no_grad(), _autocast_off(device):
        reference = reference_of(op.reference, op.make_inputs, problem)
        try:
            inputs = op.make_inputs(problem, device, SEED)
            output = variant.run(Call(problem, inputs, launch, config))
            dtype = op.output_dtype(problem) if op.output_dtype else inputs[0].dtype
            return compare(output, dtype, reference, tolerance, problem)
        except FAILURES as error:  # what a launch dies of may be told by the copy to the CPU
            if is_out_of_memory(error):
                raise
            return Check(math.inf, tolerance, f"{problem}: {describe(error)}")


@lru_cache(maxsize=4)
def reference_of(reference: Callable[[Any], Any], make_inputs: Any, problem: Any) -> Any:
    """What an op's reference gives for a problem. Its configs and variants ask one after another,
    each for the same few problems.
    """
    return reference(make_inputs(problem, torch.device("cpu"), SEED))


def compare(
    output: Any, dtype: torch.dtype, reference: Any, tolerance: float, problem: Any
) -> Check:
    """The worst of an op's outputs; only the first must have the dtype of the inputs."""
    if not isinstance(reference, tuple):
        return _compare(output.detach().to("cpu"), dtype, reference, tolerance, problem)
    pairs = [(o.to("cpu"), r) for o, r in zip(output, reference, strict=True) if r is not None]
    checks = [
        _compare(o, dtype if place == 0 else o.dtype, r, tolerance, problem)
        for place, (o, r) in enumerate(pairs)
    ]
    return max(checks, key=lambda check: (check.reason != "", check.error))


@contextmanager
def _autocast_off(device: torch.device) -> Iterator[None]:
    """No autocast on the CPU, where the reference runs, nor on `device`."""
    with ExitStack() as stack:
        for kind in {"cpu", device.type} & {"cpu", "cuda"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _compare(
    output: torch.Tensor,
    dtype: torch.dtype,
    reference: torch.Tensor,
    tolerance: float,
    problem: Any,
) -> Check:
    if output.shape != reference.shape or output.dtype != dtype:
        actual, expected = (f"{tuple(t.shape)}" for t in (output, reference))
        reason = f"{problem}: output is {actual} {output.dtype}, expected {expected} {dtype}"
        return Check(math.inf, tolerance, reason)
    error = relative_error(output, reference)
    if error <= tolerance:
        return Check(error, tolerance)
    what = "NaN or infinity" if math.isinf(error) else f"wrong by {error:.2g}"
    return Check(error, tolerance, f"{problem}: {what}, the tolerance is {tolerance:.2g}")


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """max |output - reference| / max |reference| in float64; infinity if `output` is not finite."""
    if reference.numel() == 0:
        return 0.0
    error = (output.double() - reference.double()).abs().max().item()
    size = reference.double().abs().max().item()
    ratio = error / size if size else error
    return ratio if math.isfinite(ratio) else math.inf


def describe(error: BaseException) -> str:
    """One line: the first line of the message, or the class where the message is empty."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
