"""What ends all ranks."""

from __future__ import annotations

from lib_rocm_sd.errors import RocmSdError


class RankError(RocmSdError):
    """Another rank died, failed, or did not come in time. The message names it."""


class LeftOut(SystemExit):  # noqa: N818 - no error of the program's: the others go on
    """This rank's device is not used. Ends the process with status 0, so its launcher lets the
    others go on.
    """

    def __init__(self, why: str) -> None:
        super().__init__(0)
        self.why = why

    def __str__(self) -> str:
        return self.why
