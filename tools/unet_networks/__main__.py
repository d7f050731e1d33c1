"""A real WebUI's UNet with networks (LoRA) and other patchers, by our blocks and its own, on a CPU.

    ROCM_SD_WEBUI=PATH python -m tools.unet_networks [--json FILE] [--part ldm|sgm|others]
        [--kind LoHa]

PATH is a WebUI's checkout, once started, so that its repositories are there. Its own code runs, on
UNets of its own configs with few channels and random weights. Packages that it needs are looked for
where Python looks (`tests/webui/environments.py` lists them). The exit status is 1 if a row is
wrong: an error larger than the WebUI's own, other weights, or bits where none may differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tools.unet_networks import files, models, networks, others
from tools.unet_networks.compare import Row
from tools.unet_networks.webui import WebUI

NETWORKS = {"ldm": networks.FAMILIES[:1], "sgm": networks.FAMILIES[1:]}
PARTS = (*NETWORKS, "others")
"""Networks on an UNet of ldm's and on one of sgm's, and whatever else there is."""


def main() -> int:
    """Print a line for each row, and write all of them."""
    parser = argparse.ArgumentParser(prog="python -m tools.unet_networks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append")
    titles = [kind.title for kind in files.KINDS]
    parser.add_argument("--kind", choices=titles, action="append", help="of networks; all if none")
    given = parser.parse_args()
    place = os.environ.get("ROCM_SD_WEBUI")
    if not place:
        print("ROCM_SD_WEBUI names no checkout of a WebUI", file=sys.stderr)
        return 2
    made = []
    with tempfile.TemporaryDirectory() as data:
        webui = WebUI(Path(place).resolve(), Path(data) / "data")
        for row in _rows(webui, given.part or PARTS, given.kind or titles):
            made.append(row)
            print(line(row), flush=True)
    if given.json:
        given.json.write_text(_as_json(made), encoding="utf-8")
    wrong = [row for row in made if not row.right]
    largest = largest_error(made)
    print(f"largest error: {largest:.2f} of the WebUI's in the mean of all rows")
    print(f"{len(made)} rows, {len(wrong)} wrong")
    return 1 if wrong or largest > 1 else 0


def largest_error(rows: list[Row]) -> float:
    """Ours over the WebUI's, the geometric mean over all rows where chance decides neither."""
    judged = [row for row in rows if row.most == 1.0]
    found = [row.ours[0] / row.webui[0] for row in judged if row.ours and row.webui]
    return statistics.geometric_mean(found)


def _rows(webui: WebUI, parts: Sequence[str], titles: Sequence[str]) -> Iterator[Row]:
    kinds = [kind for kind in files.KINDS if kind.title in titles]
    for part in parts:
        if part in NETWORKS:
            yield from networks.rows(webui, kinds, NETWORKS[part])
        else:
            yield from others.rows(webui)


def line(row: Row) -> str:
    """For people: ours and the WebUI's error, how far apart they are, what is not ours."""
    head = f"{'right' if row.right else 'WRONG'} {row.model}, {row.what}, {row.situation}: "
    if row.raised:
        return f"{head}both raise {row.raised}" if row.right else f"{head}raised {row.raised}"
    if row.ours is None or row.webui is None:
        found = "bit by bit the WebUI's" if row.apart == 0 else f"{row.apart:.1e} apart"
    else:
        pairs = zip(("largest", "rms"), row.ours, row.webui, strict=True)
        found = ", ".join(f"{name} {mine:.2e} ({own:.2e})" for name, mine, own in pairs)
        found += f", {row.apart:.1e} apart"
    found += f", changes {row.changed:.2f}" + ("" if row.weights else ", OTHER WEIGHTS")
    return head + "; ".join([found, *row.notes])


def _as_json(rows: list[Row]) -> str:
    """A row to a line."""
    head = {
        "torch": torch.__version__,
        "device": "cpu",
        "dtype": "float16, where a row does not say otherwise",
        "steps": "2 for networks, 4 for others, of a batch of 2",
        "unets": {name: family.config for name, family in models.FAMILIES.items()},
        "channels": models.CHANNELS,
    }
    lines = ",\n".join(json.dumps(row.as_json()) for row in rows)
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    sys.exit(main())
