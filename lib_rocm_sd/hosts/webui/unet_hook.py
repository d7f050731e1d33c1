"""What the WebUI is asked before a block of its UNet runs: networks (LoRA), hypernetworks, upcast.

The WebUI applies networks in the forwards of Linear, Conv2d, GroupNorm and LayerNorm, which blocks
of ours do not call: `network_apply_weights` of its Lora extension is called on each layer instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lib_rocm_sd.hosts.webui import host, settings
from lib_rocm_sd.unet.hook import Hook

NETWORKS = "networks"
"""The module of the WebUI's extension Lora, as its own scripts import it."""
_APPLIED = "network_current_names"
_NAME = "network_layer_name"
_FUNCTIONAL = "networks are computed in the layers' forwards (lora_functional)"
_Wanted = tuple[tuple[Any, ...], ...]


class WebUIHook(Hook):
    """For the UNet of AUTOMATIC1111's WebUI and its AMD fork.

    `stands_aside()`: whether attention is the WebUI's own now.
    """

    hosts_own = ("modules.sd_hijack_utils",)
    """Its CondFunc: SpatialTransformer, GroupNorm32 and GEGLU without copies, or in float32."""

    def __init__(self, stands_aside: Callable[[], bool] = lambda: False) -> None:
        self._stands_aside = stands_aside
        self._shared: Any = host.module("modules.shared")

    @property
    def compares(self) -> bool:
        return settings.current().spot_check and super().compares

    @property
    def graphs(self) -> bool | None:
        """What graphs keep would stay on the card while the WebUI moves the UNet out of it."""
        wish = settings.GRAPHS[settings.current().graphs]
        return False if wish is None and host.is_short_of_memory() else wish

    def ready(self, leaves: Sequence[nn.Module]) -> str:
        """Apply the wanted networks where others are applied; or why the WebUI has to."""
        networks: Any = sys.modules.get(NETWORKS)
        loaded = getattr(networks, "loaded_networks", None)
        apply = getattr(networks, "network_apply_weights", None)
        if loaded is None or apply is None:
            return ""
        if getattr(self._shared.opts, "lora_functional", False):
            # The layers' forwards touch no weight then where nothing is loaded, nor do we.
            return _FUNCTIONAL if loaded else ""
        wanted = _wanted(loaded)
        if wanted is None:
            return "this WebUI's networks are not of a known kind"
        stale = [leaf for leaf in leaves if leaf.__dict__.get(_APPLIED, ()) != wanted]
        try:
            for leaf in stale:
                apply(leaf)
        except Exception as error:
            return f"networks could not be applied: {type(error).__name__}: {error}"
        if any(vars(leaf).get(_APPLIED, ()) != wanted for leaf in stale if _NAME in vars(leaf)):
            return "this WebUI notes applied networks in a way that is not known"
        return ""

    def attention(self, module: nn.Module) -> str:
        if self._stands_aside():
            return "attention is the WebUI's own"
        if getattr(self._shared, "loaded_hypernetworks", None):
            return "a hypernetwork is loaded"
        if getattr(self._shared.opts, "upcast_attn", False):
            return "attention is computed in float32"
        return ""


def _wanted(loaded: Sequence[Any]) -> _Wanted | None:
    """What a layer notes when these networks are applied to it; None where they lack a part."""
    try:
        return tuple((n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in loaded)
    except AttributeError:
        return None
