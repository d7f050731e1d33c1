"""What it costs a step to see that no block of a UNet has changed, in UNets of the true depth.

    python -m tools.unet_check

Their channels are few, since only the number of modules counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lib_rocm_sd.modules.watch import Watch
from lib_rocm_sd.unet.takeover import take_over

ROUNDS = 300
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


def main() -> None:
    """Print a line for each UNet."""
    from diffusers import UNet2DConditionModel

    for name, config in UNETS.items():
        made: Any = UNet2DConditionModel(cross_attention_dim=32, attention_head_dim=4, **config)
        unet = made.to(torch.bfloat16).eval().requires_grad_(False)
        began = time.perf_counter()
        taken = take_over(unet)
        reading_ms = 1e3 * (time.perf_counter() - began)
        watches = [stand_in.reading.watch for stand_in in taken.stand_ins]
        least, median = _timed_ms(partial(_all_same, watches))
        print(
            f"{name}: {len(watches)} blocks, seen unchanged in {median:.3f} ms (at best "
            f"{least:.3f}), read in {reading_ms:.0f} ms"
        )
        taken.give_back()


def _all_same(watches: Sequence[Watch]) -> bool:
    return all(watch.same() for watch in watches)


def _timed_ms(work: Callable[[], object]) -> tuple[float, float]:
    """The least and the median time of `work`."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times), statistics.median(times)


if __name__ == "__main__":
    main()
