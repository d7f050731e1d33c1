"""What an op's variants say to one problem: each is asked when it matters, and once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lib_rocm_sd.ops.base import Op, Variant
from lib_rocm_sd.policy import Candidate, Policy, limit

Ask = Callable[[Variant[Any, Any]], Sequence[str]]
"""Why a variant cannot."""


class Answers:
    """`ask`: why a variant cannot run the problem. `further`: what there is beside that, until
    `close`: it may hold tensors.
    """

    def __init__(self, op: Op[Any, Any], ask: Ask, further: Ask) -> None:
        self._op, self._ask = op, ask
        self._further: Ask | None = further
        self._said: dict[str, list[str]] = {}

    def refusals(self, variant: Variant[Any, Any]) -> list[str]:
        """All reasons against `variant`; empty where it can."""
        said = self._said.get(variant.name)
        if said is None:
            said = list(self._ask(variant))
            if self._further is not None:
                said += self._further(variant)
            self._said[variant.name] = said
        return said

    def accepts(self, variant: Variant[Any, Any]) -> bool:
        """Whether there is no reason against it."""
        return not self.refusals(variant)

    def add(self, variant: Variant[Any, Any], why: Sequence[str]) -> None:
        """It does not run for these reasons either."""
        self.refusals(variant).extend(why)

    def all(self) -> dict[str, list[str]]:
        """Refusals of every variant, by name."""
        return {variant.name: self.refusals(variant) for variant in self._op.variants}

    def close(self) -> None:
        """The plan is made."""
        self._further = None


class Others(Mapping[str, list[str]]):
    """Why `chosen` runs and not the others, by their names. Found out when somebody looks: of a
    hundred plans that a new size of a picture takes, nobody looks at most.
    """

    def __init__(
        self,
        answers: Answers,
        chosen: Candidate,
        candidates: Sequence[Candidate],
        policy: Policy,
        free_bytes: int,
    ) -> None:
        self._answers, self._chosen, self._candidates = answers, chosen, candidates
        self._policy, self._free = policy, free_bytes
        self._known: dict[str, list[str]] | None = None

    def _made(self) -> dict[str, list[str]]:
        if self._known is None:
            others = [other for other in self._candidates if other is not self._chosen]
            self._known = {other.variant.name: self._why_not(other) for other in others}
        return self._known

    def _why_not(self, other: Candidate) -> list[str]:
        found = self._answers.refusals(other.variant) or limit(self._policy, other, self._free)
        return found or [f"comes after {self._chosen.variant.name}"]

    def __getitem__(self, name: str) -> list[str]:
        return self._made()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())

    def __repr__(self) -> str:
        return repr(self._made())
