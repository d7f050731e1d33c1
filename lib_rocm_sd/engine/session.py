"""What one user of the engine asks of it: a model, a workflow or a host, beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lib_rocm_sd import policy as policies
from lib_rocm_sd.policy import Policy
from lib_rocm_sd.report import Report
from lib_rocm_sd.report import report as process_report


def _untold(message: str) -> None:
    """Nobody watches."""


@dataclass(frozen=True, eq=False)
class Session:
    """Told apart by identity: plans made for one are not another's. Self-tests, times and what is
    barred are facts about the device, and shared.

    `headroom_bytes`: device memory left to others. `progress(message)` and `interrupt()` are
    called while Performance measures, which may take seconds; once interrupted it goes on with
    what it knows.
    """

    policy: Policy = policies.AUTO
    headroom_bytes: int = 0
    report: Report = process_report
    progress: Callable[[str], None] = _untold
    interrupt: Callable[[], bool] = bool

    @classmethod
    def of(cls, level: str, headroom_bytes: int = 0, report: Report = process_report) -> Session:
        """By a level's name; ValueError where there is no such level."""
        return cls(policies.by_name(level), headroom_bytes, report)

    @property
    def level(self) -> str:
        """Auto, Performance or Memory."""
        return self.policy.name

    @property
    def measures(self) -> bool:
        """True where variants are chosen by measured times."""
        return self.policy.rank_by == "measured"


DEFAULT = Session()
"""Of callers that give none."""
