"""tests/webui/inside with Forge's gradio. A file of its own: workers take tests by the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.webui.environments import FORGE
from tests.webui.inside_run import WEBUI, check

WITHOUT_PAGE = (
    *("test_displaced.py", "test_first_launch.py", "test_forward.py", "test_generation.py"),
    *("test_optimizer.py", "test_vae.py", "test_vae_interrupt.py", "test_vae_memory.py"),
    *("test_vae_trouble.py", "test_unet.py", "test_unet_halves.py", "test_speed_unet.py"),
    *("test_guard.py", "test_several.py", "test_training.py", "test_trials.py"),
    *("test_unet_trouble.py", "test_measuring.py", "test_unet_faster.py"),
)
"""Next to nothing in these is gradio's; they run with A1111's."""


@pytest.mark.slow
def test_webui(tmp_path: Path) -> None:
    check(FORGE, tmp_path, *(f"--ignore={WEBUI / 'inside' / name}" for name in WITHOUT_PAGE))
