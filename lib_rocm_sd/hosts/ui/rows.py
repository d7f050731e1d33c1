"""The report's rows as the status table shows them: what ran, and what kept faster ways out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lib_rocm_sd.hosts.ui.status import StatusRow
from lib_rocm_sd.ops.registry import FAMILIES, op_named

UNET = "UNet"
"""The part whose rows go by the op's title alone, as the settings call them."""
NAMES = {
    "rocm_sd": "our kernel",
    "torch + rocm_sd": "torch with one of our kernels",
    "torch NCHW + rocm_sd": "torch in NCHW with one of our kernels",
    "sdpa": "torch's SDPA",
    "sliced": "torch, in slices",
    "torch": "torch",
    "zeros": "nothing to compute",
}
REASONS_SHOWN = 3
BLOCKS = {
    "residual block": "residual blocks",
    "transformer": "transformers",
    "transformer block": "transformer blocks",
}
"""The kinds of a UNet's blocks that have a plural."""


def rows_of(snapshot: Mapping[str, Any]) -> dict[tuple[str, str], list[StatusRow]]:
    """The rows of `report.snapshot()` by part and family, those with the most calls first."""
    calls: dict[tuple[str, str, str], int] = {}
    why: dict[tuple[str, str, str], dict[str, dict[str, None]]] = {}
    for row in snapshot["rows"]:
        key = (str(row["part"]), str(row["family"]), str(row["variant"]))
        calls[key] = calls.get(key, 0) + int(row["calls"])
        for name, text in _why(row):
            why.setdefault(key, {}).setdefault(name, {})[text] = None
    found: dict[tuple[str, str], list[StatusRow]] = {}
    for key in sorted(calls, key=lambda key: -calls[key]):
        part, family, variant = key
        runs = f"{name_of(variant)}, {counted(calls[key], 'call')}"
        others = tuple(
            f"{name_of(name)}: {'; '.join(shortened(list(texts), 1))}"
            for name, texts in why.get(key, {}).items()
        )
        found.setdefault((part, family), []).append(StatusRow(label_of(part, family), runs, others))
    return found


def of_blocks(kind: str, total: int, ours: int, why: Mapping[str, int]) -> StatusRow:
    """A kind of a UNet's blocks. `why`: what is the host's, or why a block is, and of how many."""
    name = BLOCKS.get(kind, kind)
    said = [f"{count} of {total}: {text}" for text, count in why.items()]
    return StatusRow(f"{UNET}, {name}", f"{ours} of {total} are ours", shortened(said))


def label_of(part: str, family: str) -> str:
    """How people call a family's ops in a part of the model."""
    title = FAMILIES[family].title if family in FAMILIES else family
    return title if part in ("", UNET) else f"{part}, {title.lower()}"


def name_of(variant: str) -> str:
    """A variant's name for people."""
    return NAMES.get(variant, variant)


def counted(number: int, thing: str) -> str:
    """'1 call', '2 calls'."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def shortened(texts: Sequence[str], most: int = REASONS_SHOWN) -> tuple[str, ...]:
    """The first few of them, and how many more there are."""
    more = len(texts) - most
    return (*texts[:most], *((f"and {more} more",) if more > 0 else ()))


def _why(row: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What keeps out each variant that is expected to be faster than the one that ran."""
    preferences = _preferences(str(row["op"]))
    mine = preferences.get(str(row["variant"]))
    for name, texts in row["reasons"].items():
        faster = mine is None or preferences.get(name, mine) > mine
        said = [text for text in texts if not text.startswith("comes after ")]
        if faster and said:
            yield name, "; ".join(said)


def _preferences(op_name: str) -> dict[str, int]:
    op = op_named(op_name)
    return {} if op is None else {variant.name: variant.preference for variant in op.every}
