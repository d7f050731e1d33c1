"""The doubles of Forge and reForge against a real one, whose checkout ROCM_SD_FORGE names; and our
host in its real attention, layers and VAE, on the CPU, with the WebUI's double around them.

Forge, reForge, or Forge Classic; one that has both packages is tried as both.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.webui.environments import FORGE, FORGE_BACKEND, prepare
from tests.webui.inside_run import DOUBLE, WEBUI, run_inside
from tests.webui.surface import Mirror

DOUBLES = {"backend": "forge_double", "ldm_patched": "reforge_double"}
SINCE = {"backend": "backend/nn/chroma.py", "ldm_patched": "ldm_patched/modules/rmsnorm.py"}
"""A file that older ones lack, which have other signatures than those that were read."""
SCRIPT_API = (
    *("modules/scripts.py", "modules/script_callbacks.py", "modules/script_loading.py"),
    *("modules/call_queue.py", "modules/shared.py", "modules/devices.py", "modules/cache.py"),
    *("modules/paths_internal.py", "modules/extensions.py", "modules/sd_unet.py"),
)
"""What the script, the page and the settings use of a WebUI, and the double mirrors."""
OWN = {"backend/nn/vae.py::IntegratedAutoencoderKL.config": "given there by diffusers"}
"""What the doubles have for themselves, beside names with an underscore."""


@pytest.fixture(scope="module")
def checkout() -> Path:
    place = os.environ.get("ROCM_SD_FORGE")
    if not place:
        pytest.skip("ROCM_SD_FORGE names no checkout of a Forge")
    found = Path(place).resolve()
    assert any((found / package).is_dir() for package in DOUBLES), f"no Forge is at {found}"
    return found


@pytest.mark.parametrize("package", DOUBLES)
def test_double_mirrors_the_real_one(checkout: Path, package: str) -> None:
    if not (checkout / SINCE[package]).is_file():
        pytest.skip(f"the checkout has no {SINCE[package]}")
    found = Mirror(WEBUI / DOUBLES[package], checkout).differences(package)
    assert {name: how for name, how in found.items() if name not in OWN} == {}
    assert {name for name in OWN if name.startswith(f"{package}/")} <= found.keys()


def test_the_script_api_is_a1111s(checkout: Path) -> None:
    found = Mirror(DOUBLE, checkout).differences("modules")
    asked = {name: how for name, how in found.items() if name.startswith(SCRIPT_API)}
    assert asked.keys() <= {"modules/script_callbacks.py::on_list_optimizers"}, asked


@pytest.mark.slow
def test_inside_the_real_one(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = prepare(FORGE_BACKEND)
    if why:
        pytest.skip(why)
    monkeypatch.setenv("ROCM_SD_FORGE_INSIDE", str(checkout))
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(FORGE_BACKEND.folder / "pycache"))
    output = run_inside("forge", FORGE, tmp_path, first=FORGE_BACKEND)
    assert " passed" in output
