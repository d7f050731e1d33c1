"""The doubles of Forge and reForge against a real one, whose checkout ROCM_SD_FORGE names; our host
in its real attention, layers and VAE, on the CPU, with the WebUI's double around them; and in a
whole one.

Forge, reForge, or Forge Classic; one that has both packages is tried as both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.webui.environments import A1111, CHECKOUT, FORGE, FORGE_BACKEND, REAL, prepare
from tests.webui.inside_run import DOUBLE, WEBUI, run_inside
from tests.webui.surface import Mirror

WHOLE_LIMIT_S = 1800
DOUBLES = {"backend": "forge_double", "ldm_patched": "reforge_double"}
SINCE = {"backend": "backend/nn/chroma.py", "ldm_patched": "ldm_patched/modules/rmsnorm.py"}
"""A file that older ones lack, which have other signatures than those that were read."""
SCRIPT_API = (
    *("modules/scripts.py", "modules/script_callbacks.py", "modules/script_loading.py"),
    *("modules/call_queue.py", "modules/shared.py", "modules/devices.py", "modules/cache.py"),
    *("modules/paths_internal.py", "modules/extensions.py", "modules/sd_unet.py"),
)
"""What the script, the page and the settings use of a WebUI, and the double mirrors."""
_FLUX = "backend/nn/flux.py::IntegratedFluxTransformer2DModel"
OWN = {
    "backend/nn/vae.py::IntegratedAutoencoderKL.config": "given there by diffusers",
    f"{_FLUX}.__init__": "a smaller model",
    f"{_FLUX}.forward": "without what a text encoder makes",
}
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
    if not any((checkout / file).is_file() for file in SINCE.values()):
        pytest.skip("the checkout is older than what was read")
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


@pytest.fixture(scope="module")
def environments(checkout: Path) -> list[str]:
    """Folders of packages for a whole Forge, reForge or Classic; these have gradio 3."""
    is_forge = (checkout / "backend").is_dir()
    if not is_forge and not (checkout / "repositories").is_dir():
        pytest.skip("the checkout has no repositories: it has never been started")
    wanted = (FORGE_BACKEND, FORGE, REAL) if is_forge else (REAL, A1111)
    for why in map(prepare, wanted):
        if why:
            pytest.skip(why)
    return [str(environment.folder) for environment in wanted]


def started_by(
    script: str, checkout: Path, environments: list[str], data: Path, *, ours: bool, card: bool
) -> tuple[list[str], dict[str, str]]:
    """The command that starts a whole Forge with data of its own by one of forge/'s scripts, and
    its environment.
    """
    extensions = data / "extensions"
    extensions.mkdir(parents=True)
    if ours:
        (extensions / "rocm-sd").symlink_to(CHECKOUT, target_is_directory=True)
    file = str(WEBUI / "forge" / script)
    paths = [*environments, str(WEBUI / "inside")]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ROCM_SD_INSIDE": str(checkout)}
    known |= {"PYTHONPYCACHEPREFIX": str(FORGE_BACKEND.folder / "pycache")}
    return [sys.executable, file, str(checkout), str(data), *["card"] * card], known


def whole(checkout: Path, environments: list[str], data: Path, *, ours: bool, card: bool) -> Any:
    """What a whole Forge says: forge/whole.py."""
    command, known = started_by("whole.py", checkout, environments, data, ours=ours, card=card)
    done = subprocess.run(
        command,
        env=known,
        capture_output=True,
        text=True,
        timeout=WHOLE_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((data / "found.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_whole_one(checkout: Path, environments: list[str], tmp_path: Path) -> None:
    def run(name: str, **options: bool) -> Any:
        return whole(checkout, environments, tmp_path / name, **options)

    alone = run("without", ours=False, card=False)
    without, enlarged = alone["first"], alone["upscaled, off"]
    plain = run("on a CPU", ours=True, card=False)
    assert all(plain[name] == without for name in ("first", "on", "off", "blocks", "off again"))
    assert plain["status"].startswith("Not active: no supported GPU (this is the CPU)")
    for name in ("upscaled, off", "upscaled"):
        assert plain[name].items() >= enlarged.items() and not plain[name]["ran"]
    (left,) = plain["upscaled"]["left"]
    assert left.endswith("no GPU: this is the CPU")

    played = run("on a card", ours=True, card=True)
    assert played["off"]["pixels"] == without["pixels"] and "ROCm SD: off" in played["off"]["info"]
    assert played["upscaled, off"].items() >= enlarged.items()
    assert played["upscaled"]["ran"] == ["whole picture"] and not played["upscaled"]["left"]
    assert played["upscaled"]["pixels"] != enlarged["pixels"], "it has no tiles"
    assert played["first"] == played["on"] and played["on"]["pixels"] != without["pixels"]
    assert 'ROCm SD: "Auto, attention: rocm_sd"' in played["on"]["info"]
    assert 'ROCm SD VAE: "Auto, whole frame, conv: torch"' in played["on"]["info"]
    assert "blocks, linear: torch, conv: torch" in played["blocks"]["info"]
    assert played["off again"] == played["off"]
    assert played["in parts, off"] == played["off"] and played["blocks again"] == played["blocks"]
    part = re.search(r"Auto, (\d+) of (\d+) blocks", played["in parts"]["info"])
    left = 'ROCm SD UNet: "Auto, left to the WebUI"'  # Classic leaves all layers
    assert int(part[1]) < int(part[2]) if part else left in played["in parts"]["info"]
    assert 'ROCm SD: "Auto, attention: rocm_sd"' in played["in parts"]["info"]
    assert "weights from elsewhere in each call" in played["status in parts"]  # the VAE's
    assert played["status"].startswith("Attention runs on our kernel (gfx1100).")
    assert "The VAE runs on our kernels." in played["status"]
    assert 'ROCm SD: "Performance, attention: rocm_sd"' in played["measured"]["info"]
    assert played["measured"]["put off"] > 0 == played["measured"]["left"]
