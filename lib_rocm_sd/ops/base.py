"""What an op is made of.

An op is one place: its problem, its reference, its variants with their refusals, its cases.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from lib_rocm_sd.arch import Arch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KernelSpec:
    """One thing to compile.

    A file of kernels/, the entry's name, and the definitions that specialise it.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        """Name and definitions in one line."""
        return " ".join([self.entry, *(f"{name}={value}" for name, value in self.defines)])


class Launch(Protocol):
    """Launches a kernel on torch's current stream of `device`; compiles and loads it if needed.

    `grid` counts work-groups, `block` work-items of a group, both one-dimensional. Raises
    CompileError, LaunchError or
    DeviceOutOfMemoryError.
    """

    def __call__(
        self,
        spec: KernelSpec,
        grid: int,
        block: int,
        params: ctypes.Structure,
        device: torch.device,
    ) -> None: ...


class Config(Protocol):
    """Tile sizes of one variant.

    Frozen dataclasses: hashable, and the field names are what a tuning file stores.
    """

    def __hash__(self) -> int: ...


P = TypeVar("P")
"""An op's problem: one call, without its tensors."""
I = TypeVar("I", bound=tuple[Any, ...])  # noqa: E741 - inputs, as P is the problem
"""An op's inputs: a NamedTuple, tensors first."""


@dataclass(slots=True, eq=False)
class Call(Generic[P, I]):
    """One call of a variant. `problem` is the one that `inputs` pose, `config` one of the variant's
    configs. `launch` starts kernels of ours; a variant made of torch calls does without.
    """

    problem: P
    inputs: I
    launch: Launch | None = None
    config: Any = None

    @property
    def launcher(self) -> Launch:
        """`launch`, for a variant that needs one."""
        if self.launch is None:
            raise ValueError(f"{self.problem}: a kernel of ours needs a launch")
        return self.launch


Run = Callable[[Call[Any, Any]], Any]
"""Called as `Variant.run` is."""


class Variant(ABC, Generic[P, I]):
    """One way to run an op. Stateless."""

    name: str
    ours = False
    """True for our own kernels, which need a `launch` and a row of the arch table."""
    preference = 0
    """Rank by expectation where nothing was measured.

    The highest that does not refuse is taken first.
    """

    untried = False
    """True for kernels of ours that no trial in a process of its own knows: where a host has its
    kernels tried before they are launched, it does without them."""
    derives = False
    """True for what torch.func transforms and what has derivatives of any order and mode, where
    others made of torch calls do not. In an op without such a variant all of these do."""
    last_resort = ""
    """What is never measured, and runs where nothing else can, says here what it is: a block of a
    host's is better left to the host then."""

    def refusals(self, arch: Arch | None, problem: P) -> list[str]:
        """Why this variant cannot run `problem`.

        Empty when it can. Asked once per problem, never per call.
        """
        return []

    def preference_for(self, arch: Arch | None, problem: P) -> int:
        """`preference`, where the device or the problem decides."""
        return self.preference

    def workspace(self, problem: P) -> int:
        """Bytes of device memory needed beside inputs and output."""
        return 0

    def configs(self, arch: Arch | None, problem: P) -> Sequence[Any]:
        """The search space, first what is run unless another was measured to be faster.

        A variant without tile sizes has one config: None.
        """
        return (None,)

    def defaults(self, arch: Arch | None, problem: P) -> Sequence[Any]:
        """What is tried where nothing was measured: the first config; the safe one, if another."""
        return self.configs(arch, problem)[:1]

    def tested_as(self, config: Any) -> Any:
        """What stands for `config` in self-tests and trials: a config with the same kernels, of
        which it differs by arguments only.
        """
        return config

    def notes(self, arch: Arch | None, problem: P) -> list[str]:
        """What is wrong with what the order of `configs` rests on; told once."""
        return []

    def specs(self, arch: Arch, problem: P, config: Any) -> Sequence[KernelSpec]:
        """The kernels that `run` will launch, so that they can be compiled ahead."""
        return ()

    def input_refusals(self, inputs: I) -> list[str]:
        """Why these tensors cannot be taken although the problem could: strides, gradients.

        Asked once per key of the op.
        """
        return []

    def bound(self, call: Call[P, I]) -> Run:
        """`run`, or what is faster than it, for calls whose inputs have the same key.

        Keeps nothing of the inputs. Several threads may call it at once.
        """
        return self.run

    @abstractmethod
    def run(self, call: Call[P, I]) -> Any:
        """Compute."""


def _itself(problem: P) -> P:
    return problem


TrialInputs = Sequence[tuple[str, Callable[[], Any]]]
"""Names, and what makes inputs on the CPU."""


CPU: Any = "cpu"
SEED = 2654435769
"""Seed of self-tests and trials, whose inputs so differ by where they lie alone, and of timing."""


def _none_further(problem: Any) -> TrialInputs:
    return ()


@dataclass(frozen=True)
class Op(Generic[P, I]):
    """An op as the engine, the tests, the benchmark and the tuner see it.

    `family`: the folder it lies in; see registry.py. `title`: what people call it.
    `problem_of(inputs)` -> P; ValueError, with shapes, on a caller's mistake.
    `key_of(inputs)`: equal for calls that may share one plan. All that the problem, its checks and
    `Variant.input_refusals` depend on is in it; see keys.py.
    `reference(inputs)` -> float64 tensor shaped like the output; works on any device.
    `make_inputs(problem, device, seed)` -> random inputs, drawn from a generator of its own.
    `tolerance(problem)` -> the most that max |output - reference| / max |reference| may be.
    `output_shape(problem)`: of the first result.
    `test_problems(problem)` -> small problems whose right results vouch for `problem`. The first is
    the same for all problems of a class (attention: same dtype, head_dim, mask kind) and names the
    class; more may follow, such as one with the real problem's tails.
    `usual`: problems a user meets, by name; on the first hangs whether our kernel counts as usable.
    `output_dtype(problem)`: where it is not the first input's.
    `results(problem, inputs)`: empty results, where they are not one tensor of that shape and
    dtype, which lies densely.
    `measured_as(problem)`: the problem whose measured times decide for `problem` too, so that a new
    size of an image is not always measured anew.
    `trial_inputs(problem)`: beside the test problems, what the first trial of `problem`'s class on
    a card runs: other strides, masks and tails, offsets beyond 2 GiB.
    `measured_only`: what other libraries and compilers have. Only a session that measures asks
    them, and takes one only by its measured time.
    """

    name: str
    family: str
    title: str
    variants: Sequence[Variant[P, I]]
    problem_of: Callable[[I], P]
    key_of: Callable[[I], Hashable]
    reference: Callable[[I], Any]
    make_inputs: Callable[[P, torch.device, int], I]
    tolerance: Callable[[P], float]
    output_shape: Callable[[P], tuple[int, ...]]
    test_problems: Callable[[P], Sequence[P]]
    cases: Sequence[P] = field(default_factory=tuple)
    usual: Sequence[tuple[str, P]] = field(default_factory=tuple)
    output_dtype: Callable[[P], torch.dtype] | None = None
    results: Callable[[P, I], Any] | None = None
    measured_as: Callable[[P], P] = _itself
    trial_inputs: Callable[[P], TrialInputs] = _none_further
    measured_only: Sequence[Variant[P, I]] = ()

    @property
    def every(self) -> tuple[Variant[P, I], ...]:
        """All variants, also those that are asked only where times are measured."""
        return (*self.variants, *self.measured_only)

    def empty(self, problem: P, inputs: I) -> Any:
        """Tensors like what a variant gives for `inputs`, one or several, without its values."""
        if self.results is not None:
            return self.results(problem, inputs)
        dtype = self.output_dtype(problem) if self.output_dtype else None
        return inputs[0].new_empty(self.output_shape(problem), dtype=dtype)

    def able(self, arch: Arch | None, problem: P) -> list[Variant[P, I]]:
        """The variants that do not refuse, in the order in which they are taken where nothing was
        measured.
        """
        able = [variant for variant in self.variants if not variant.refusals(arch, problem)]
        return sorted(able, key=lambda variant: -variant.preference_for(arch, problem))

    def ours(
        self, arch: Arch, problem: P, every: bool = False
    ) -> Iterator[tuple[Variant[P, I], Any, tuple[KernelSpec, ...]]]:
        """The variant that is taken where nothing was measured, if it is ours; its config as it is
        tested, and the kernels of the class. `every`: all variants of ours, in their order.
        """
        for variant in self.able(arch, problem)[: None if every else 1]:
            if variant.ours:
                config = variant.tested_as(variant.defaults(arch, problem)[0])
                yield variant, config, self.class_specs(arch, variant, config, problem)

    def class_specs(
        self, arch: Arch, variant: Variant[P, I], config: Any, problem: P
    ) -> tuple[KernelSpec, ...]:
        """What a variant launches for a problem and for what vouches for it."""
        every = (problem, *self.test_problems(problem))
        return tuple(dict.fromkeys(s for p in every for s in variant.specs(arch, p, config)))


Work = list[tuple[Op[Any, Any], Any]]
"""Ops, and problems of theirs."""


def norm_tolerance(problem: Any) -> float:
    """`Op.tolerance` of norms: a few units in the last place."""
    return {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5}.get(problem.dtype, 1e-12)


def reasons(*checks: tuple[object, str]) -> list[str]:
    """The messages of the checks whose condition is true."""
    return [message for condition, message in checks if condition]


ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a value, by the float types known here."""
HALVES = ("float16", "bfloat16")


def halves_only(dtype: str) -> tuple[bool, str]:
    """A check of a kernel that reads nothing else."""
    return dtype not in HALVES, f"{dtype}: the kernel takes fp16 and bf16"


MOST_WORK_ITEMS = (1 << 32) - 1
"""HIP's limit of grid x block in one dimension."""


def one_launch(items: int) -> tuple[bool, str]:
    """A check that so many work-items can be launched at once."""
    return items > MOST_WORK_ITEMS, f"{items} work-items are more than one launch may have"
