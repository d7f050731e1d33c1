"""Attention in the Forges, which have no list of optimizers: their functions are replaced."""

from __future__ import annotations

from typing import Any

from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.webui import host
from lib_rocm_sd.hosts.webui.bindings import Bindings
from lib_rocm_sd.hosts.webui.forge_method import method
from lib_rocm_sd.hosts.webui.functions import Function, given, packed, spatial
from lib_rocm_sd.hosts.webui.kinds import Kind
from lib_rocm_sd.hosts.webui.seam import Seam
from lib_rocm_sd.lab.speed_job import Attention


class ForgeSeam(Seam):
    """Ours are in place unless it stands aside; then each place has what Forge put there."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind = kind
        self._usable = False
        self._bindings = Bindings(self._function)

    def begin(self) -> None:
        self._usable = not self.check()
        self.step_aside(self.aside)

    def leave(self) -> None:
        self._usable = False
        self.step_aside(False)

    @property
    def is_applied(self) -> bool:
        return self._usable

    @property
    def is_chosen(self) -> bool:
        return self._usable

    @property
    def in_use(self) -> str | None:
        return host.NAME if self.works else self._name

    def why_another(self) -> str:
        return "it has not been looked at yet; reload the UI."

    def displaced_by(self) -> dict[str, list[str]]:
        return self._bindings.displaced_by()

    def hosts_attention(self) -> str:
        return f"the WebUI's {self._name}"

    def methods(self) -> dict[str, Attention]:
        theirs = self._theirs(self._kind.packed[0])
        of_vae = self._theirs(self._kind.spatial) if self._kind.spatial else None
        return {self._name.removeprefix("attention_"): method(theirs, of_vae)}

    @property
    def _name(self) -> str:
        """Name of the function that the UNet would call without us."""
        return str(getattr(self._theirs(self._kind.packed[0]), "__name__", "attention"))

    def _theirs(self, name: str) -> Any:
        return given(host.attribute(self._kind.attention, name))

    def _function(self, theirs: Any, name: str) -> Function:
        return Function(theirs, spatial if name == self._kind.spatial else packed, self)

    def _take_over(self) -> None:
        with self._lock:
            waited, self.waits = self.waits, False
            self._usable = True
            self._refresh()
        if waited and self.works:
            host.say("attention runs on our kernel from now on")

    def _withdraw(self) -> None:
        with self._lock:
            self.waits, self._usable = True, False
            self._refresh()

    def _refresh(self) -> None:
        """The functions in their places. Where ours cannot be put, all are the WebUI's."""
        wanted = self._usable and not (self.aside or self.waits)
        try:
            if wanted:
                self._bindings.put(self._kind)
            else:
                self._bindings.take()
        except Exception as error:
            wanted = False
            host.say_once(f"attention is the WebUI's own: {trouble.once(error)}")
            self._bindings.take()
        self.stands_aside = not wanted


_made: list[ForgeSeam] = []


def make(kind: Kind) -> ForgeSeam:
    """The one of this process; survives "Reload UI"."""
    if not _made:
        _made.append(ForgeSeam(kind))
    return _made[0]
