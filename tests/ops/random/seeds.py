"""How many random problems are solved, and which: ROCM_SD_RANDOM_PROBLEMS multiplies their number,
ROCM_SD_RANDOM_SEED gives others.
"""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("ROCM_SD_RANDOM_PROBLEMS") or 1)
FIRST_SEED = int(os.environ.get("ROCM_SD_RANDOM_SEED") or 0) * 1_000_000
USUAL = (FACTOR, FIRST_SEED) == (1, 0)
"""Whether they are those of tests/executed.json."""
