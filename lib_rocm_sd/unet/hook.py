"""What a host says of its UNet before a block of it runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lib_rocm_sd.modules.compared import is_wanted


class Hook:
    """A host that has nothing to say. Others derive from it."""

    hosts_own: tuple[str, ...] = ()
    """Python modules whose forwards, put into the classes of blocks, compute what those do."""
    rests: bool = False
    """Whether its UNets are at rest even in training mode, which it never leaves."""
    tells: bool = False
    """Whether it calls `UnetTakeover.weights_changed` whenever weights may have changed, and
    `step_begins` before each step. So inference tensors, which count no changes, can be ours.
    """
    spares: bool = False
    """Whether the module itself finishes a call at which ours ran out of memory."""

    def serves(self) -> bool:
        """Whether calls are to be ours now, in this thread. Asked first, before each block."""
        return True

    @property
    def compares(self) -> bool:
        """Whether blocks are compared with the host's own now and then (unet/spot.py)."""
        return is_wanted()

    @property
    def graphs(self) -> bool | None:
        """Whether launches of blocks are to be recorded; None: where it is safe."""
        return None

    def ready(self, leaves: Sequence[nn.Module]) -> str:
        """Make the weights of `leaves` those that this call is to use; or why ours must not run.

        Asked before each call of each block: it has to be cheap.
        """
        return ""

    def attention(self, module: nn.Module) -> str:
        """Why this attention, read as a plain one, is to be called as it is; empty if it need not.

        Asked in each call.
        """
        return ""
