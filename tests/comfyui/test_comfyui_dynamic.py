"""Models that ComfyUI's DynamicVRAM loads, which brings a layer's weights in each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib_rocm_sd.hosts.comfyui import speedtest
from lib_rocm_sd.hosts.comfyui import unet as ours
from lib_rocm_sd.hosts.comfyui import vae as vaes
from lib_rocm_sd.hosts.comfyui.attention import KEY
from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.hosts.comfyui.model import optimized
from tests.comfyui.conftest import left
from tests.comfyui.play import Engine
from tests.comfyui.unet_steps import TOTALS, counts, model_of, near, step, with_ours
from tests.vae.vae_models import fill

UNLESS = "start ComfyUI with --disable-dynamic-vram"


class Loader:
    """Gives the same model each time."""

    def __init__(self, comfy: Any) -> None:
        self.comfy, self.calls = comfy, 0

    def __call__(self, disable_dynamic: bool = False) -> Any:
        assert disable_dynamic
        self.calls += 1
        return model_of(self.comfy)


@pytest.fixture
def loader(comfy: Any) -> Loader:
    return Loader(comfy)


@pytest.fixture
def dynamic(comfy: Any, loader: Loader) -> Any:
    made = comfy.patcher.ModelPatcherDynamic(model_of(comfy).model, None, None)
    made.cached_patcher_init = (loader, ())
    made.model_options["transformer_options"]["another's"] = 1
    return made


def test_with_blocks_the_clone_is_not_dynamic(
    comfy: Any, dynamic: Any, blocks: None, loader: Loader
) -> None:
    theirs, made = step(dynamic), with_ours(dynamic)
    assert type(made) is comfy.patcher.ModelPatcher and loader.calls == 1
    assert made.model is not dynamic.model and made.patches_uuid == dynamic.patches_uuid
    assert made.model_options["transformer_options"]["another's"] == 1
    assert near(step(made), theirs) and counts() == TOTALS and not tally.left
    assert torch.equal(step(dynamic), theirs)
    assert dynamic.model_options["transformer_options"] == {"another's": 1}
    with_ours(made)
    assert loader.calls == 1  # what is not dynamic shares its model


def test_attention_alone_stays_dynamic(dynamic: Any, loader: Loader) -> None:
    made = optimized(dynamic, "Auto", attention=True)
    assert made.is_dynamic() and made.model is dynamic.model and not loader.calls
    assert list(made.model_options["transformer_options"]) == ["another's", KEY]
    assert not tally.left


def fails(disable_dynamic: bool = False) -> None:
    raise MemoryError("no memory")


WITHOUT: dict[str, tuple[Any, str]] = {
    "none": (None, "RuntimeError: there is no loader to ask"),
    "another's": ((lambda: None, ()), "TypeError: "),
    "short of memory": ((fails, ()), "MemoryError: no memory"),
}


@pytest.mark.parametrize("which", WITHOUT)
def test_without_a_loader_that_can_blocks_are_comfyuis(
    dynamic: Any, blocks: None, which: str
) -> None:
    dynamic.cached_patcher_init, why = WITHOUT[which]
    theirs, made = step(dynamic), optimized(dynamic, "Auto", attention=True, unet=True)
    assert made.is_dynamic() and made.model is dynamic.model
    (told,) = left()
    assert told.startswith("UNet: this model is loaded by DynamicVRAM, and its loader cannot")
    assert why in told and told.endswith(UNLESS)
    assert KEY in made.model_options["transformer_options"]
    assert torch.equal(step(made), theirs)
    assert "brings its weights from elsewhere in each call" in str(ours.rows())


def test_nothing_is_loaded_where_no_block_could_be_ours(comfy: Any, loader: Loader) -> None:
    """A model that is no UNet, and a device that is not known."""
    other = comfy.base.BaseModel({"query_dim": 32, "heads": 4, "dim_head": 8})
    for model, device in ((other, None), (model_of(comfy).model, torch.device("cpu"))):
        given = comfy.patcher.ModelPatcherDynamic(model, device, None)
        given.cached_patcher_init = (loader, ())
        assert with_ours(given).is_dynamic()
    assert not loader.calls


def test_a_vae_that_is_dynamic_says_how_it_could_be_ours(comfy: Any, card: Engine) -> None:
    weights = fill(comfy.sd.AutoencoderKL(ddconfig=comfy.sd.CONFIG, embed_dim=4)).state_dict()
    vae = comfy.sd.VAE(sd=weights)
    vae.patcher = comfy.patcher.ModelPatcherDynamic(vae.first_stage_model, None, None)
    vae.patcher.patch_model()
    z = torch.randn(1, 4, 8, 8)
    with torch.no_grad():
        decoded = vae.decode(z)
        made = vaes.with_ours(vae, vaes.NodeWish(session=speedtest.host.session_of("Auto")))
        assert torch.equal(made.decode(z), decoded)
    told = list(left())
    assert told[0] == f"VAE: DynamicVRAM brings its weights in each call; {UNLESS}"
    assert "others: brings its weights from elsewhere in each call" in told[1]
    speedtest.host.tally.clear()  # another workflow, in which the node's VAE is ComfyUI's to keep
    with torch.no_grad():
        made.decode(z)
    assert list(left()) == told


def test_the_speed_test_asks_for_a_model_that_is_not_dynamic(
    dynamic: Any, blocks: None, loader: Loader
) -> None:
    with pytest.raises(ValueError, match="with unet Auto, or start ComfyUI with"):
        speedtest.Comfy(dynamic, None, "Auto").unet()
    assert not loader.calls
    assert speedtest.Comfy(with_ours(dynamic), None, "Auto").unet() is not None
