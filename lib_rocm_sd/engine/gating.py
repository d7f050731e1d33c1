"""A kernel class, and who may say that it must not be launched here. trials/gate.py does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from lib_rocm_sd.ops.base import Launch, Op, Variant


@dataclass(frozen=True)
class Refusal:
    """`waits`: it will be answered anew, after which the host calls `Engine.renew`."""

    reason: str
    waits: bool = False


@dataclass(frozen=True)
class Asked:
    """A class on a device: `variant` with `config`, for all problems like `problem`. `launch` is
    what would launch it; None where that was not asked yet, and for torch's calls.
    """

    op: Op[Any, Any]
    variant: Variant[Any, Any]
    config: Any
    problem: Any
    device: torch.device
    launch: Launch | None = None

    @property
    def tests(self) -> Sequence[Any]:
        """The problems that vouch for it; the first names the class."""
        return _tests(self.op.test_problems, self.problem)

    def key(self, test: Any = None) -> Hashable:
        """Equal for what is barred together; with one of its `tests`, for one self-test."""
        tested = self.variant.tested_as(self.config)
        return (self.op.name, self.variant.name, tested, test or self.tests[0], self.device)


@lru_cache(maxsize=256)
def _tests(ask: Callable[[Any], Sequence[Any]], problem: Any) -> Sequence[Any]:
    """`Op.test_problems`, of which one plan asks several times."""
    return ask(problem)


class Gatekeeper(Protocol):
    """Asked when plans are made and at the first launches of a class, never later. Its answers must
    not wait: the engine's lock is held.
    """

    def refusal(self, asked: Asked) -> Refusal | None:
        """Why the class is not to be launched in this process; None where it may be."""

    def vouches(self, asked: Asked) -> bool:
        """The class was launched elsewhere, and found right there."""

    def launching(self, asked: Asked, stage: str) -> AbstractContextManager[Any] | None:
        """To be entered around the class's first launch and the synchronisation after it, in its
        self-test (stage "self-test") and then for a caller ("call"); None where that was.
        """

    def wait(self, timeout_s: float) -> bool:
        """Until all that waits is answered; False where it still is not."""

    def failed(self, asked: Asked, reason: str) -> None:
        """A launch of the class failed in this process, and the process lives."""
