"""What the executor raises. Every one of them fails the test that ran the kernel."""

from __future__ import annotations


class ExecutionError(Exception):
    """Something that the hardware would not do, or that the executor does not know.

    `where`: the instruction, `address` its own, once the run loop has added them.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.where, self.address = "", 0

    def __str__(self) -> str:
        return f"{self.message}; at {self.where.lstrip(', ')}" if self.where else self.message


class UnsupportedError(ExecutionError):
    """An instruction, a modifier or an operand whose semantics stand nowhere here. It says nothing
    of the kernel: `judge.execute` passes it on, and never counts it as a mistake that was found.
    """


class UndefinedError(ExecutionError):
    """What the instruction set leaves undefined: it hangs on lanes that take no part."""


class LaunchError(ExecutionError):
    """A launch that a driver refuses, or that is not what the code object was compiled for."""


class EndlessError(ExecutionError):
    """A kernel that does not end, or not within the executor's patience: a hang."""


class OutOfBoundsError(ExecutionError):
    """An access outside of every buffer, of LDS or of scratch."""


class UninitializedError(ExecutionError):
    """A register was read in a lane where nothing has been written to it."""


class HazardError(ExecutionError):
    """A register was touched whose memory access had not been waited for, or a barrier was."""


class RaceError(ExecutionError):
    """Two waves touched a place that nothing orders, and one of them wrote. `others`: addresses of
    the instructions that touched it before.
    """

    def __init__(self, message: str, others: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.others = others
