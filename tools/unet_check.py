"""What it costs a step to know that ours is what the host computes, in UNets of the true depth.

    python -m tools.unet_check [--device cuda] [--json FILE]

On the CPU: the look at all blocks before their calls (modules/watch.py). On a card also what the
spot check (unet/spot.py) adds to 20 steps, and what a `state_dict` costs while ours is on, in time
and memory: with true weights' shapes, random, fp16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd.engine.session import DEFAULT
from lib_rocm_sd.modules.watch import Watch
from lib_rocm_sd.unet.spot import STEPS
from lib_rocm_sd.unet.takeover import UnetTakeover, take_over

ROUNDS = 300
PICTURES = 15
UNETS: dict[str, dict[str, Any]] = {
    "SD 1.5": {"block_out_channels": (32, 32, 64, 64)},
    "SDXL": {
        "block_out_channels": (32, 32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "use_linear_projection": True,
    },
}
"""Of few channels, since only the number of modules counts."""
TRUE: dict[str, dict[str, Any]] = {
    "SD 1.5": {"cross_attention_dim": 768, "attention_head_dim": 8},
}
SIDE, TOKENS, BATCH = 64, 77, 2
Row = dict[str, Any]


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(prog="tools.unet_check")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [_looked(name, config) for name, config in UNETS.items()]
    device = torch.device(options.device)
    if device.type == "cuda":
        rows += [row for name, config in TRUE.items() for row in _on_a_card(name, config, device)]
    for row in rows:
        print("; ".join(f"{key} {value}" for key, value in row.items()))
    if options.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        about = {"device": name, "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(about, indent=1) + "\n")


def _made(dtype: torch.dtype, device: torch.device | str = "cpu", **config: Any) -> Any:
    from diffusers import UNet2DConditionModel

    made: Any = UNet2DConditionModel(**config)
    return made.to(device, dtype).eval().requires_grad_(False)


def _looked(name: str, config: dict[str, Any]) -> Row:
    unet = _made(torch.bfloat16, cross_attention_dim=32, attention_head_dim=4, **config)
    began = time.perf_counter()
    taken = take_over(unet)
    reading_ms = 1e3 * (time.perf_counter() - began)
    watches = [stand_in.reading.watch for stand_in in taken.stand_ins]
    times = _timed_ms(partial(_all_same, watches), ROUNDS)
    taken.give_back()
    return {
        "what": f"{name}: the look at {len(watches)} blocks",
        **_spread(times),
        "read_ms": round(reading_ms, 1),
    }


def _on_a_card(name: str, config: dict[str, Any], device: torch.device) -> list[Row]:
    unet = _made(torch.float16, device, **config)
    given = (
        torch.randn(BATCH, 4, SIDE, SIDE, device=device, dtype=torch.float16),
        torch.tensor(500, device=device),
        torch.randn(BATCH, TOKENS, config["cross_attention_dim"], device=device).half(),
    )

    def picture(taken: UnetTakeover, turn: int, compared: bool) -> None:
        taken.generation_begins(turn)
        if not compared:
            taken.spot.begin(())
        for _ in range(STEPS):
            unet(*given)
        torch.cuda.synchronize(device)

    with torch.no_grad():
        taken = take_over(unet, DEFAULT.patiently())
        for turn in range(4):
            picture(taken, turn, True)
        both: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(PICTURES):
            for compared, times in both.items():
                times += _timed_ms(partial(picture, taken, turn, compared), 1)
        left = dict(taken.spot.left)
        rows = [_row_of(f"{name}: {STEPS} steps, {_word(on)}", times) for on, times in both.items()]
        ratio = statistics.median(both[True]) / statistics.median(both[False])
        rows.append({"what": f"{name}: the spot check", "adds": f"{ratio - 1:.1%}", "left": left})
        rows += _state_dicts(name, unet, given, device)
        taken.give_back()
    return rows


def _state_dicts(name: str, unet: Any, given: Any, device: torch.device) -> list[Row]:
    """While ours is on and laid, and while it is not."""

    def read() -> None:
        unet.state_dict()
        torch.cuda.synchronize(device)

    rows = []
    for what in ("laid", "as it was"):
        if what == "laid":
            unet(*given)
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        times = _timed_ms(read, 1)
        kept = torch.cuda.memory_allocated(device) - before
        peak = torch.cuda.max_memory_allocated(device) - before
        row = _row_of(f"{name}: state_dict(), weights {what}", times)
        rows.append({**row, "kept_mib": kept >> 20, "peak_mib": peak >> 20})
    return rows


def _word(compared: bool) -> str:
    return "compared" if compared else "not compared"


def _row_of(what: str, times: Sequence[float]) -> Row:
    return {"what": what, **_spread(times)}


def _spread(times: Sequence[float]) -> Row:
    least, median, most = min(times), statistics.median(times), max(times)
    return {"median_ms": round(median, 3), "least_ms": round(least, 3), "most_ms": round(most, 3)}


def _all_same(watches: Sequence[Watch]) -> bool:
    return all(watch.same() for watch in watches)


def _timed_ms(work: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    return times


if __name__ == "__main__":
    main()
