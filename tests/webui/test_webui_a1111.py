"""tests/webui/inside with A1111's gradio, but for the UNet's, which test_webui_a1111_unet.py has.

Two files: workers take tests by the file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import executed
from tests.webui.environments import A1111
from tests.webui.inside_run import check

BEGINNING = "test_first_launch.py or test_generation.py or test_script.py or test_settings.py"
"""What a user meets first: executed also where nothing has changed."""


@pytest.mark.slow
def test_webui_begins(tmp_path: Path) -> None:
    check(A1111, tmp_path, "-k", BEGINNING)


@pytest.mark.slow
@executed.known(by=A1111.name, parts=executed.page)
def test_webui(tmp_path: Path) -> None:
    check(A1111, tmp_path, "-k", f"not unet and not ({BEGINNING})")
