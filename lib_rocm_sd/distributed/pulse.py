"""Each rank's sign of life in the store that torch.distributed was started with.

NCCL's calls do not notice that a peer has died, and gloo's do not say which. So a thread of each
rank counts up a value in the store, and looks at the others'. Who fails writes why in its stead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

SHORTEST_S, LONGEST_S = 0.05, 1.0
SILENT_BEATS = 4
"""After so many beats without a sign, a rank is what an exchange that failed had waited for."""
GONE_S = 10.0
"""After so long, or half of the limit, it is gone, whether anything failed or not."""
LEFT, FAILED = "left", "failed"


class Pulse:
    """The sign of life of rank `rank`. `names`: all ranks' names, in order.

    `calls()`: exchanges begun so far. `lost(why)` is called once, in the thread, when another rank
    is gone or has failed.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        names: Sequence[str],
        limit_s: float,
        calls: Callable[[], int],
        lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._calls, self._lost, self._clock = calls, lost, clock
        self.beat_s = min(max(limit_s / 20, SHORTEST_S), LONGEST_S)
        self._gone_s = max(min(limit_s / 2, GONE_S), SILENT_BEATS * self.beat_s)
        self._heard = {other: ("", clock()) for other in range(len(names)) if other != rank}
        self._answered_s = clock()
        self._count = 0
        self._end = threading.Event()
        self.gone = ""
        """Why all have to end, once that is known."""
        self._thread = threading.Thread(target=self._run, name="rocm_sd pulse", daemon=True)
        self._set(f"0 {calls()}")

    def start(self) -> None:
        """Beat from now on."""
        self._thread.start()

    def stop(self, last_word: str = LEFT) -> None:
        """Beat no more; what the others read from now on."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self._set(last_word)
        except (RuntimeError, OSError):  # the store's process has ended before
            return

    def stay(self) -> None:
        """For the process that has the store, after `stop`: until the others have said their last
        word too or are silent, not longer than half of the limit. They could not read why it ends.
        """
        silent_s = SILENT_BEATS * self.beat_s
        keys = [_key(other) for other in self._heard]
        end = self._clock() + self._gone_s
        while self._clock() < end:
            try:
                if self._store.check(keys):
                    self._look()
            except (RuntimeError, OSError):  # then nobody else reads it either
                return
            now = self._clock()
            if all(_last(said) or now - at > silent_s for said, at in self._heard.values()):
                return
            time.sleep(self.beat_s / 4)

    def beat(self) -> None:
        """One sign of life, and one look at the others."""
        self._count += 1
        try:
            self._set(f"{self._count} {self._calls()}")
            self._look()
        except (RuntimeError, OSError):  # which ones is torch's affair: DistError, connections
            return

    def why(self, silent_s: float) -> str:
        """Who failed, or was not heard of for so long; empty for nobody."""
        now = self._clock()
        for other, (said, _) in self._heard.items():
            if said.startswith(FAILED):
                return f"{self._names[other]} {said}"
        if now - self._answered_s > silent_s:
            return (
                "the store does not answer: its process (rank 0's, or the launcher) is gone, or "
                "this machine has lost its network"
            )
        for other, (said, heard_s) in self._heard.items():
            if said != LEFT and now - heard_s > silent_s:
                return f"{self._names[other]} died: no sign of life for {now - heard_s:.1f} s"
        return ""

    def named(self) -> str:
        """Why an exchange has failed: waits until somebody is known to be gone, not longer than it
        takes to know; else who is behind, by the number of exchanges begun.
        """
        silent_s = SILENT_BEATS * self.beat_s
        end = self._clock() + silent_s + 2 * self.beat_s
        while not (why := self.why(silent_s)) and self._clock() < end:
            time.sleep(self.beat_s / 2)
        return why or self._behind()

    def _behind(self) -> str:
        calls = {self._rank: self._calls()}
        for other, (said, _) in self._heard.items():
            if said == LEFT:
                return f"{self._names[other]} has left before"
            calls[other] = int(said.split()[1])
        least = min(calls.values())
        if least == max(calls.values()):
            return ""
        slow = [self._names[other] for other, count in sorted(calls.items()) if count == least]
        return f"{', '.join(slow)} did not come: {least} exchanges of {max(calls.values())}"

    def _run(self) -> None:
        while not self._end.wait(self.beat_s):
            self.beat()
            why = self.why(self._gone_s)
            if why and not self.gone:
                self.gone = why
                self._lost(why)

    def _look(self) -> None:
        for other, (before, _) in self._heard.items():
            said = self._store.get(_key(other)).decode()
            if said != before:
                self._heard[other] = (said, self._clock())
        self._answered_s = self._clock()

    def _set(self, said: str) -> None:
        self._store.set(_key(self._rank), said)


def _key(rank: int) -> str:
    return f"pulse/{rank}"


def _last(said: str) -> bool:
    return said == LEFT or said.startswith(FAILED)
