"""Networks of each kind: added, changed, two at once, switched, removed, computed in forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.unet_networks import files, models
from tools.unet_networks.compare import Bench, Row, Situation
from tools.unet_networks.webui import WebUI

FAMILIES = ("SD 1.5", models.SHALLOW)
APART = 0.01
"""The WebUI's forwards then find convolution weights of another layout, and round otherwise. Where
a step in float32 is known, ours and the WebUI's in fp16 are about as far apart.
"""
_Wanted = Sequence[tuple[str, float]]


def rows(
    webui: WebUI, kinds: Sequence[files.Kind], families: Sequence[str] = FAMILIES
) -> Iterator[Row]:
    """All situations of each kind, on an UNet of each family."""
    for family in families:
        bench = Bench(webui, models.make(webui, family), steps=2)
        leaves = models.leaves(bench.model.unet)
        diffusers = not bench.model.whole.is_sdxl
        folder = webui.data / "lora"
        files.write(folder / "other.safetensors", files.OTHER, leaves, diffusers, 1000)
        for kind in kinds:
            for old in folder.glob("network*.safetensors"):
                old.unlink()
            name = f"network{files.KINDS.index(kind)}-{family.replace(' ', '-')}"
            count = files.write(folder / f"{name}.safetensors", kind, leaves, diffusers, 7)
            webui.networks.list_available_networks()
            yield from bench.rows(kind.title, _situations(webui, name, count))
            failed = webui.networks.extra_network_lora.errors
            if failed:
                raise AssertionError(f"the WebUI could not apply {kind.title}: {failed}")


def _situations(webui: WebUI, name: str, count: int) -> list[Situation]:
    def situation(
        title: str, wanted: _Wanted, functional: bool = False, dyn: int | None = None
    ) -> Situation:
        def enter() -> None:
            webui.shared.opts.data["lora_functional"] = functional
            load(webui, wanted, dyn)
            found = {net.name: len(net.modules) for net in webui.networks.loaded_networks}
            if count and found.get(name, count) != count:
                raise AssertionError(f"{found[name]} of {count} layers were found in the file")

        some = bool(wanted)
        apart = APART if some and functional else None
        return Situation(title, enter, apart, changes=some)

    return [
        situation("added", [(name, 1.0)]),
        situation("weight changed", [(name, 0.4)]),
        situation("fewer dimensions", [(name, 1.0)], dyn=2),
        situation("two at once", [(name, 1.0), ("other", 0.7)]),
        situation("switched", [("other", 1.0)]),
        situation("removed", []),
        situation("lora_functional", [(name, 1.0)], functional=True),
        situation("not functional again", [(name, 1.0)]),
        situation("functional, removed", [], functional=True),
        situation("removed again", []),
    ]


def switched(webui: WebUI, name: str) -> list[Situation]:
    """One network, functional for a while, and none."""
    names = ("removed again", "added", "lora_functional", "not functional again", "removed")
    known = {one.name: one for one in _situations(webui, name, 0)}
    return [known[one] for one in names]


def load(webui: WebUI, wanted: _Wanted, dyn: int | None = None) -> None:
    """As the prompt's <lora:name:weight> does."""
    webui.networks.load_networks(
        [name for name, _ in wanted],
        [1.0 for _ in wanted],
        [weight for _, weight in wanted],
        [dyn for _ in wanted],
    )
    if len(webui.networks.loaded_networks) != len(wanted):
        raise AssertionError(f"not all of {wanted} were loaded")
