"""What one user of the engine asks of it: a model, a workflow or a host, beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from lib_rocm_sd import policy as policies
from lib_rocm_sd.policy import Policy
from lib_rocm_sd.report import Report
from lib_rocm_sd.report import report as process_report


@dataclass(frozen=True, eq=False)
class Session:
    """Told apart by identity: plans made for one are not another's. Self-tests, times and what is
    barred are facts about the device, and shared.

    `headroom_bytes`: device memory left to others. `progress(message)` and `interrupt()` are
    called while Performance measures, which may take seconds; once interrupted it goes on with
    what it knows. `later()`: the host has moments between two pictures, in which it calls
    `Engine.measure_next`: Performance measures then. `part`: of the model, such as "UNet", for the
    report. `patient`: a first call waits until the gate has had its kernels tried; else another
    variant computes meanwhile.
    """

    policy: Policy = policies.AUTO
    headroom_bytes: int = 0
    report: Report = process_report
    progress: Callable[[str], None] = lambda message: None
    interrupt: Callable[[], bool] = bool
    later: Callable[[], bool] = bool
    part: str = ""
    patient: bool = False

    @classmethod
    def of(cls, level: str, headroom_bytes: int = 0, report: Report = process_report) -> Session:
        """By a level's name; ValueError where there is no such level."""
        return cls(policies.by_name(level), headroom_bytes, report)

    def of_part(self, part: str) -> Session:
        """The same for a part of the model; always the same session."""
        return self if part == self.part else _of_part(self, part)

    def patiently(self) -> Session:
        """The same, patient; always the same session."""
        return self if self.patient else _patient(self)

    @property
    def level(self) -> str:
        """Auto, Performance or Memory."""
        return self.policy.name

    @property
    def measures(self) -> bool:
        """True where variants are chosen by measured times."""
        return self.policy.rank_by == "measured"


@lru_cache(maxsize=64)
def _of_part(session: Session, part: str) -> Session:
    return replace(session, part=part)


@lru_cache(maxsize=64)
def _patient(session: Session) -> Session:
    return replace(session, patient=True)


DEFAULT = Session()
"""Session for callers that give none."""
