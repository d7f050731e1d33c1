"""What a host says of its UNet before a block of it runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class Hook:
    """A host that has nothing to say. Others derive from it."""

    hosts_own: tuple[str, ...] = ()
    """Python modules whose forwards, put into the classes of blocks, compute what those do."""

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
