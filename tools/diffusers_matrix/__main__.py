"""Diffusers' features, and changes that others make of a model, after a step with ours.

    python -m tools.diffusers_matrix [--device cuda] [--only NAMES] [--share 0/4] [--out FOLDER]

Little models of true structure with random weights, in float16, are asked for steps by diffusers
alone and with ours, while something is changed and undone (`compare.ROUNDS`). NAMES are parts of
rows' names, or "changes" or "features". A row is WRONG where ours is further from the step in
float32 than twice the host, where a stand-in of ours is dead, or where, after ours is off, results
or modules are not the host's. The exit status is 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.diffusers_matrix.changes import CHANGES
from tools.diffusers_matrix.compare import ROUNDS, Place, Verdict, judged, missing
from tools.diffusers_matrix.features import FEATURES
from tools.diffusers_matrix.models import Row

PARTS = {"features": FEATURES, "changes": CHANGES}


def main() -> int:
    """Print a line for each row, and write all of them."""
    parser = argparse.ArgumentParser(prog="python -m tools.diffusers_matrix")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", default=list(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", default="0/1", help="of several processes, by their numbers")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then begin no more")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.backends.cudnn.allow_tf32 = False  # float32 is what errors are measured to
    is_cpu = device.type == "cpu"
    place = Place(device) if is_cpu else Place(device, seeds=(0, 1), repeats=3, exact=False)
    made, until = [], time.monotonic() + given.seconds
    number, of = map(int, given.share.split("/"))
    for row in _chosen(given.only)[number::of]:
        why = missing(row, place) or ("time" if time.monotonic() > until else "")
        if why:
            print(f"skipped {row.model.name}, {row.name}: there is no {why}", flush=True)
            continue
        made.append(judged(row, place))
        print(made[-1].line(), flush=True)
        if given.out:
            _write(given.out, device, made)
    counts = Counter(verdict.word for verdict in made)
    print(", ".join(f"{count} {word}" for word, count in sorted(counts.items())))
    return 1 if counts["WRONG"] else 0


def _chosen(names: Sequence[str]) -> list[Row]:
    rows = [row for name in names for row in PARTS.get(name, ())]
    others = [name for name in names if name not in PARTS]
    every = (row for part in PARTS.values() for row in part)
    told = ((row, f"{row.model.name}, {row.name}") for row in every)
    return [*rows, *(row for row, title in told if any(name in title for name in others))]


def _write(folder: Path, device: torch.device, made: Sequence[Verdict]) -> None:
    import diffusers

    folder.mkdir(parents=True, exist_ok=True)
    head = {
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": "float16",
        "rounds": ROUNDS,
    }
    rows = ",\n".join(json.dumps(verdict.as_json()) for verdict in made)
    text = f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n]}}\n'
    (folder / "diffusers-matrix.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
