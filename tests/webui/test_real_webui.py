"""The WebUI's double against a real WebUI, whose checkout ROCM_SD_WEBUI names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.webui.environments import A1111, CHECKOUT
from tests.webui.inside_run import DOUBLE, run_inside
from tests.webui.surface import Mirror

OWN = {
    "handles for the tests": (
        "modules/errors.py::recorded",
        "modules/errors.py::records",
        "modules/infotext_utils.py::paste",
        "modules/lowvram.py::moves",
        "modules/processing.py::Processed.decoded",
        "modules/processing.py::StableDiffusionProcessing.decoded",
        "modules/sd_models.py::loaded",
    ),
    "webui.py's, whose loop cannot be called": (
        "modules/initialize.py::reload_ui",
        "modules/initialize.py::start_ui",
    ),
    "smaller models, made without a config": (
        "ldm/models/autoencoder.py::AutoencoderKL.__init__",
        "ldm/models/diffusion/ddpm.py::DiffusionWrapper.__init__",
        "ldm/models/diffusion/ddpm.py::LatentDiffusion.__init__",
        "ldm/models/diffusion/ddpm.py::LatentDiffusion.family",
        "ldm/modules/diffusionmodules/model.py::Normalize",
        "ldm/modules/diffusionmodules/openaimodel.py::UNetModel.__init__",
        "modules/hypernetworks/hypernetwork.py::Hypernetwork.__init__",
        "modules/models/sd3/mmdit.py::DismantledBlock.__init__",
        "modules/models/sd3/mmdit.py::SelfAttention.__init__",
        "modules/models/sd3/other_impls.py::Mlp.__init__",
        "modules/models/sd3/sd3_impls.py::AttnBlock.__init__",
        "modules/models/sd3/sd3_impls.py::Downsample.__init__",
        "modules/models/sd3/sd3_impls.py::Normalize",
        "modules/models/sd3/sd3_impls.py::ResnetBlock.__init__",
        "modules/models/sd3/sd3_impls.py::SDVAE.__init__",
        "modules/models/sd3/sd3_impls.py::Upsample.__init__",
        "modules/models/sd3/sd3_impls.py::VAEDecoder.__init__",
        "modules/models/sd3/sd3_impls.py::VAEEncoder.__init__",
        "sgm/modules/diffusionmodules/model.py::Normalize",
    ),
    "given there by Lightning, or by who makes the object": (
        "ldm/models/autoencoder.py::AutoencoderKL.device",
        "ldm/models/autoencoder.py::AutoencoderKL.dtype",
        "modules/models/sd3/sd3_impls.py::SDVAE.dtype",
    ),
    "made there at run time": ("modules/api/models.py::StableDiffusionTxt2ImgProcessingAPI",),
    "of Forge": (
        "modules/ui_components.py::InputAccordion",
        "modules/ui_components.py::InputAccordionImpl",
    ),
    "one axis instead of three": ("scripts/xyz_grid.py::Script.run",),
}
"""What the double has for itself, beside names with an underscore."""


INSIDE = (
    "test_optimizer.py",
    "test_vae.py",
    "test_accordion.py",
    "test_unet_halves.py",
    "test_several.py",
    "test_measuring.py",
    "test_upscaler.py",
)


@pytest.fixture(scope="module")
def mirror() -> Mirror:
    place = os.environ.get("ROCM_SD_WEBUI")
    if not place:
        pytest.skip("ROCM_SD_WEBUI names no checkout of a WebUI")
    checkout = Path(place).resolve()
    assert (checkout / "modules" / "sd_hijack.py").is_file(), f"no WebUI is at {checkout}"
    return Mirror(DOUBLE, checkout)


@pytest.mark.parametrize("folder", ["modules", "scripts", "ldm", "sgm"])
def test_double_mirrors_the_real_one(mirror: Mirror, folder: str) -> None:
    missing = mirror.missing_repository(folder)
    if missing:
        pytest.skip(f"the checkout has no repositories/{missing}")
    found = mirror.differences(folder)
    own = {name for names in OWN.values() for name in names if name.startswith(f"{folder}/")}
    assert {name: how for name, how in found.items() if name not in own} == {}
    assert own - found.keys() == set(), "listed as the double's own, but it is as in the real one"


@pytest.mark.slow
@pytest.mark.parametrize("file", INSIDE)
def test_inside_the_real_one(mirror: Mirror, tmp_path: Path, file: str) -> None:
    for folder in mirror.REPOSITORIES:
        if mirror.missing_repository(folder):
            pytest.skip(f"the checkout has no repositories/{mirror.missing_repository(folder)}")
    tests = str(CHECKOUT / "tests" / "webui" / "inside" / file)
    output = run_inside("inside", A1111, tmp_path, tests, real=mirror.checkout)
    assert " passed" in output


REAL = """
from modules.other import borrowed
if True:
    def same(a, /, b=1, *rest, c, d=None, **more): ...
def other(a, b=2): ...
class Base:
    def inherited(self, x): ...
class Kind(Base):
    field: int = 1
    def __init__(self): self.value = None
    @property
    def asked(self): ...
"""
PLANTED = {
    "def same(a, /, b=1, *rest, c, d=None, **more): ...": "",
    "def borrowed(x): ...": "",
    "def _own(): ...": "",
    "class Kind:\n    field = 2\n    asked = 1\n    def inherited(self, x): self.value = 1": "",
    "def other(a, b=3): ...": "other",
    "def other(b, a=2): ...": "other",
    "def other(a, b): ...": "other",
    "def other(a, b=2, *, c): ...": "other",
    "def lacking(): ...": "lacking",
    "lacking = 1": "lacking",
    "class Lacking: ...": "Lacking",
    "class Kind:\n    def lacking(self): ...": "Kind.lacking",
    "class Kind:\n    def inherited(self, y): ...": "Kind.inherited",
    "class Kind:\n    def __init__(self): self.lacking = 1": "Kind.lacking",
    "class Kind:\n    def __init__(self, x): ...": "Kind.__init__",
}


@pytest.mark.parametrize(("source", "name"), PLANTED.items(), ids=str)
def test_a_planted_difference_is_named(tmp_path: Path, source: str, name: str) -> None:
    real, double = tmp_path / "real" / "modules", tmp_path / "double" / "modules"
    for folder in (real, double):
        folder.mkdir(parents=True)
    (real / "kind.py").write_text(REAL, encoding="utf-8")
    (real / "other.py").write_text("def borrowed(x): ...", encoding="utf-8")
    (double / "kind.py").write_text(source, encoding="utf-8")
    found = Mirror(double.parent, real.parent).differences("modules")
    assert list(found) == ([f"modules/kind.py::{name}"] if name else [])
