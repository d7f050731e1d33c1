"""Runs a function in several processes as torchrun starts them, on gloo, and gives what they gave.

A server that has imported all that is needed forks them, so that each costs next to nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.waiting import WAIT_S

PRELOADED = ["tests.distributed.preloaded"]


@dataclass(frozen=True)
class Ended:
    """How one rank ended: what the function gave, or the kind and text of its error."""

    made: Any = None
    error: str = ""
    text: str = ""
    exitcode: int | None = 0


def launch(function: Callable[..., Any], size: int, *args: Any, **environment: str) -> list[Ended]:
    """`function(*args)` on `size` ranks, by rank. It has to be one of a module of the tests."""
    kind = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(kind)
    if kind == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    given = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(False)
        variables = {**given, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
        process = context.Process(target=_run, args=(theirs, variables, function, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    return [_ended(*pair) for pair in zip(pipes, processes, strict=True)]


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def made(ends: list[Ended]) -> list[Any]:
    """What the ranks gave; none of them may have failed."""
    for rank, end in enumerate(ends):
        assert not end.error, f"rank {rank}: {end.error}: {end.text}"
        assert end.exitcode == 0
    return [end.made for end in ends]


def _run(pipe: Any, variables: dict[str, str], function: Callable[..., Any], args: Any) -> None:
    os.environ.update(variables)
    try:
        pipe.send(Ended(function(*args)))
    except BaseException as error:  # noqa: B036 - told to the test, whatever it is
        text = str(error) if isinstance(error, SystemExit) else traceback.format_exc()
        pipe.send(Ended(error=type(error).__name__, text=text))
        if isinstance(error, SystemExit):
            raise


def _ended(pipe: Any, process: Any) -> Ended:
    found = Ended(error="nothing said")
    try:
        if pipe.poll(WAIT_S):
            found = pipe.recv()
    except EOFError:
        pass
    process.join(WAIT_S)
    if process.is_alive():
        process.kill()
    return Ended(found.made, found.error, found.text, process.exitcode)
