"""Ours or the host's: decides whose one attention call is, counts it, and says why it is not ours.

Calls of modules are decided by a StandIn (modules/stand_in.py), and counted here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.followed import STOPS, NotFollowedError
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.report import Report, report

ATTENTION = "attention"
"""What calls of attention are counted as."""


class NotOursError(Exception):
    """This call is the host's; the message says why."""


class Tally:
    """Counts calls, for several threads; a reason is told to the report at its first call.

    `text`: what the report is told, with the places {what} and {why}.
    """

    def __init__(self, text: str, told: Report = report) -> None:
        self._text, self._report = text, told
        self._lock = threading.Lock()
        self.ours: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        """By what was asked for, and why the host computed it."""

    def attention(
        self,
        compute: Callable[..., torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        failed: str = "ours failed: ",
        spares: bool = True,
    ) -> torch.Tensor | None:
        """What `compute` gives; None where the host has to compute the call.

        `failed` comes before an error of ours. `spares`: the host computes also what ours has too
        little memory for, since it may need less.
        """
        try:
            output = compute(*args, **kwargs)
        except (NotOursError, NotFollowedError) as reason:
            why = str(reason)
        except STOPS:
            raise
        except Exception as error:
            if not spares and is_out_of_memory(error):
                raise
            why = f"{failed}{trouble.once(error)}"
        else:
            with self._lock:
                self.ours[ATTENTION] += 1
            return output
        self.leave(ATTENTION, why)
        return None

    def served(self, what: str) -> None:
        """A call was ours."""
        with self._lock:
            self.ours[what] += 1

    def leave(self, what: str, why: str) -> None:
        """A call is the host's own."""
        with self._lock:
            self.left[what, why] += 1
            first = self.left[what, why] == 1
        if first:
            self._report.event(self._text.format(what=what, why=why))

    def stands(self, reasons: Iterable[tuple[str, str]]) -> None:
        """What is the host's as a whole, and why: each is counted once until `clear`."""
        for what, why in reasons:
            if (what, why) not in self.left:
                self.leave(what, why)

    def clear(self) -> None:
        """Count anew."""
        with self._lock:
            self.ours.clear()
            self.left.clear()
