"""Linear layers by the solution of rocBLAS or hipBLASLt that torch's TunableOp found to be fastest.

TunableOp times every solution that the libraries have for a product, the first time that it meets
it. It is switched on for the length of a call, and everything is put back afterwards; while that
call is submitted, another thread's products go through it too. What it found stays in the process,
and in a file in our cache folder.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lib_rocm_sd import cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import Call, Run, reasons
from lib_rocm_sd.ops.gradients import gradient_refusals
from lib_rocm_sd.ops.lazily import torch
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.problem import LinearProblem, tolerance
from lib_rocm_sd.ops.linear.torch import TorchLinear
from lib_rocm_sd.ops.optional import card_refusals

VARIABLES = "PYTORCH_TUNABLEOP_"
"""With which the names of a user's own settings begin; they count before what a program sets."""
MOST_MS, MOST_ITERATIONS = 5, 5
"""Most milliseconds and iterations for one solution. The libraries decide how many solutions there
are: hundreds for hipBLASLt.
"""
ALLOWANCE = 2.0
"""Times the op's tolerance that a chosen solution may be from torch's default: both round."""
SETTINGS = (
    ("get_filename", "set_filename"),
    ("get_max_tuning_duration", "set_max_tuning_duration"),
    ("get_max_tuning_iterations", "set_max_tuning_iterations"),
    ("tuning_is_enabled", "tuning_enable"),
    ("is_enabled", "enable"),
)
"""How to read and to set each, in the order in which they are set."""
_switches = threading.Lock()
"""They are the process's, see ops/attention/libraries.py."""


class TunedLinear(TorchLinear):
    """torch's products with TunableOp. On CUDA torch has only its default to choose from."""

    name = "torch tunable"
    preference = 0

    def refusals(self, arch: Arch | None, problem: LinearProblem) -> list[str]:
        none = card_refusals(arch)
        if none:
            return none
        if torch.version.hip is None:
            return ["TunableOp has nothing to choose from on CUDA"]
        return unavailable()

    def input_refusals(self, inputs: LinearInputs) -> list[str]:
        return gradient_refusals(*inputs[:-1], *inputs.more)

    def bound(self, call: Call[LinearProblem, LinearInputs]) -> Run:
        """Tunes at its first call, and compares what was chosen with torch's default."""
        run = super().bound(call)
        return _Tuned(super().run if run == self.run else run)

    def run(self, call: Call[LinearProblem, LinearInputs]) -> torch.Tensor:
        with switched_on(tune=not _recorded(call.inputs.x)):
            return super().run(call)


class _Tuned:
    """Callable like `Variant.run`, for inputs of one key."""

    __slots__ = ("_ready", "_run")

    def __init__(self, run: Run) -> None:
        self._run, self._ready = run, False

    def __call__(self, call: Call[LinearProblem, LinearInputs]) -> torch.Tensor:
        problem, inputs = call.problem, call.inputs
        made: torch.Tensor
        if self._ready:
            with switched_on(tune=False):
                made = self._run(call)
            return made
        if _recorded(inputs.x):
            made = self._run(call)
            return made
        with switched_on(tune=True):
            chosen = self._run(Call(problem, _aside(inputs)))
        made = self._run(Call(problem, _aside(inputs)))
        _compare(chosen, made, problem)
        self._ready = True
        return made if inputs.out is None else inputs.out.copy_(made)


def _aside(inputs: LinearInputs) -> LinearInputs:
    """The same, with a copy of what would be written over: who goes on after an error needs it."""
    if inputs.out is None:
        return inputs
    copy = inputs.out.clone()
    return inputs._replace(residual=copy, out=copy)


def _compare(chosen: torch.Tensor, right: torch.Tensor, problem: LinearProblem) -> None:
    """RuntimeError where a solution is wrong: then TunableOp is not used for such problems."""
    largest = right.abs().amax().double()
    error = float((chosen.double() - right.double()).abs().amax() / largest.clamp_min(1e-30))
    if not error <= ALLOWANCE * tolerance(problem):
        raise RuntimeError(f"TunableOp chose what is wrong by {error:.2g}: {problem}")


def unavailable() -> list[str]:
    """Why TunableOp cannot be switched on here."""
    tunable = _module()
    if tunable is None:
        return [f"torch {torch.__version__} has no torch.cuda.tunable: 2.3 has"]
    own = sorted(name for name in os.environ if name.startswith(VARIABLES))
    with _switches:
        on = bool(tunable.is_enabled())
    return reasons(
        (own, f"{', '.join(own)}: TunableOp is set by the user, and left alone"),
        (on and not own, "TunableOp is on in this process, and left alone"),
        (cache.directory() is None, "there is no cache folder for what it finds"),
    )


@contextmanager
def switched_on(tune: bool) -> Iterator[None]:
    """Within this, products go through TunableOp. `tune`: those that it does not know are timed,
    and what is found is kept in our file. As before after it, whatever happens.
    """
    tunable: Any = _module()
    wanted: tuple[Any, ...] = (tune, True)
    if tune:
        wanted = (str(file()), MOST_MS, MOST_ITERATIONS, *wanted)
    with _switches, ExitStack() as stack:
        for (read, write), value in zip(SETTINGS[-len(wanted) :], wanted, strict=True):
            stack.callback(getattr(tunable, write), getattr(tunable, read)())
            getattr(tunable, write)(value)
        known = len(tunable.get_results()) if tune else 0  # the first look reads the file
        yield
        writes = getattr(tunable, "write_file", None)  # later ones write each result at once
        if writes is not None and tune and len(tunable.get_results()) > known:
            writes(str(file()))


def file() -> Path:
    """Where results are: one for each torch and card, for torch takes no others."""
    folder = cache.directory()
    assert folder is not None
    card = ""
    if torch.cuda.is_initialized():
        card = str(torch.cuda.get_device_properties(torch.cuda.current_device()))
    key = cache.key_of("tunableop", torch.__version__, str(torch.version.hip), card)
    path = folder / "tune" / "tunableop" / f"{key[:16]}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _recorded(x: torch.Tensor) -> bool:
    """During a graph capture nothing can be timed."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _module() -> Any:
    """torch.cuda.tunable, where there is all that is needed of it: torch 2.3 and later."""
    try:
        module = importlib.import_module("torch.cuda.tunable")
    except ImportError:
        return None
    needed = [name for pair in SETTINGS for name in pair] + ["get_results"]
    return module if all(hasattr(module, name) for name in needed) else None
