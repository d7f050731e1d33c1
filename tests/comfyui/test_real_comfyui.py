"""A real ComfyUI; ROCM_SD_COMFYUI names its checkout: what the double mirrors, and our nodes in it.

ROCM_SD_COMFYUI_PYTHON is a Python that has what ComfyUI's requirements.txt asks for; else this one.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lib_rocm_sd.lab.upscaler_models import RRDBNet, level, settle
from tests.comfyui.conftest import DOUBLE
from tests.comfyui.server import Server, running
from tests.webui.surface import Mirror

OWN = {
    "a smaller model": (
        "comfy/sd.py::CONFIG",
        "comfy/cldm/cldm.py::ControlNet.__init__",
        "comfy/model_base.py::BaseModel.__init__",
        "comfy/ldm/modules/diffusionmodules/openaimodel.py::UNetModel.__init__",
        *(
            f"comfy/ldm/modules/diffusionmodules/mmdit.py::{name}.__init__"
            for name in ("Mlp", "RMSNorm", "SelfAttention", "DismantledBlock", "MMDiT")
        ),
        *(
            f"comfy/ldm/flux/layers.py::{name}.__init__"
            for name in ("RMSNorm", "QKNorm", "SelfAttention", "Modulation")
        ),
        *(
            f"comfy/ldm/flux/layers.py::{name}Block.__init__"
            for name in ("DoubleStream", "SingleStream")
        ),
        *(
            f"comfy/ldm/chroma/layers.py::{name}Block.__init__"
            for name in ("DoubleStream", "SingleStream")
        ),
        "comfy/ldm/flux/model.py::Flux.__init__",
        *(
            f"comfy/ldm/qwen_image/model.py::{name}.__init__"
            for name in ("GELU", "FeedForward", "Attention", "QwenImageTransformerBlock")
        ),
        "comfy/ldm/qwen_image/model.py::QwenImageTransformer2DModel.__init__",
        *(f"comfy/ldm/chroma/model.py::Chroma.{name}" for name in ("__init__", "forward")),
        *(
            f"comfy/ldm/pixart/{name}.__init__"
            for name in (
                *("blocks.py::MultiHeadCrossAttention", "blocks.py::AttentionKVCompress"),
                *("pixartms.py::PixArtMSBlock", "pixartms.py::PixArtMS"),
            )
        ),
        *(
            f"comfy/ldm/wan/model.py::Wan{name}.__init__"
            for name in ("SelfAttention", "AttentionBlock", "Model")
        ),
    ),
    "of a newer ComfyUI": (
        "comfy/ldm/modules/attention.py::ComfyAttention",
        "comfy/ldm/modules/attention.py::CrossAttention.comfy_attention",
        "comfy/model_patcher.py::ModelPatcherDynamic",
    ),
}
"""What the double has for itself, beside names with an underscore."""
WITHOUT_NODES: dict[str, Any] = {
    "1": {"class_type": "TinyModels", "inputs": {"seed": 0}},
    "2": {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1},
    },
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["1", 0],
            "positive": ["1", 1],
            "negative": ["1", 1],
            "latent_image": ["2", 0],
            "seed": 1,
            "steps": 2,
            "cfg": 1.0,
            "sampler_name": "euler",
            "scheduler": "normal",
            "denoise": 1.0,
        },
    },
    "4": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["1", 2]}},
    "5": {"class_type": "VAEEncode", "inputs": {"pixels": ["4", 0], "vae": ["1", 2]}},
    "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
    "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "test"}},
}
LEFT = re.compile(r"\nPerformance: (\d+) sizes? (?:is|are) still to be measured, when the next")
AGAIN = {"class_type": "RocmSdStatus", "inputs": {}}
"""Makes a workflow another one, which is not taken from the server's cache as a whole."""
STATUS = {"12": {"class_type": "RocmSdStatus", "inputs": {"after": ["6", 0]}}}


def with_nodes(mode: str, unet: str = "Off", level: str = "Auto") -> dict[str, Any]:
    """The same workflow through our nodes, and the status after it."""
    switches: dict[str, Any] = {"level": level, "budget_mib": 0, "decode": True, "encode": True}
    made = {key: {**node, "inputs": dict(node["inputs"])} for key, node in WITHOUT_NODES.items()}
    made["10"] = {
        "class_type": "RocmSdModel",
        "inputs": {"model": ["1", 0], "level": level, "attention": True, "unet": unet},
    }
    made["11"] = {"class_type": "RocmSdVae", "inputs": {"vae": ["1", 2], "mode": mode, **switches}}
    made["3"]["inputs"]["model"] = ["10", 0]
    for key in ("4", "5", "6"):
        made[key]["inputs"]["vae"] = ["11", 0]
    return made | STATUS


@pytest.fixture(scope="module")
def checkout() -> Path:
    place = os.environ.get("ROCM_SD_COMFYUI")
    if not place:
        pytest.skip("ROCM_SD_COMFYUI names no checkout of ComfyUI")
    found = Path(place).resolve()
    assert (found / "comfy" / "sd.py").is_file(), f"no ComfyUI is at {found}"
    return found


@pytest.fixture(scope="module")
def python() -> str:
    return os.environ.get("ROCM_SD_COMFYUI_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def without(checkout: Path, python: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The picture of a ComfyUI that does not have this custom node."""
    folder = tmp_path_factory.mktemp("without")
    with running(checkout, python, folder, ours=False) as server:
        return server.make(WITHOUT_NODES).picture


@pytest.fixture(scope="module")
def installed(
    checkout: Path, python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with running(checkout, python, tmp_path_factory.mktemp("with")) as server:
        yield server


@pytest.mark.parametrize("folder", ["comfy", "comfy_api", "comfy_extras"])
def test_double_mirrors_the_real_one(checkout: Path, folder: str) -> None:
    found = Mirror(DOUBLE, checkout).differences(folder)
    own = {name for names in OWN.values() for name in names if name.startswith(f"{folder}/")}
    assert {name: how for name, how in found.items() if name not in own} == {}
    assert own <= set(found)


def test_installed_it_changes_nothing(installed: Server, without: bytes) -> None:
    assert installed.make(WITHOUT_NODES).picture == without


@pytest.mark.parametrize("mode", ["Auto", "Always banded"])
def test_without_a_card_the_nodes_change_nothing_and_say_why(
    installed: Server, without: bytes, mode: str
) -> None:
    made = installed.make(with_nodes(mode, "Auto"))
    assert made.picture == without
    said = made.texts["12"]
    assert said.startswith("Not active: no supported GPU (this is the CPU)")
    for part in ("attention", "UNet", "VAE decode", "VAE encode"):
        assert f"\n{part}: 0 of " in said
    assert "Before it" not in said or said.count("VAE decode: 0 of 2 calls ours") == 2


def test_the_speed_test_measures_nothing_without_a_card(installed: Server) -> None:
    made = installed.make(
        {
            "1": WITHOUT_NODES["1"],
            "2": {
                "class_type": "RocmSdSpeedTest",
                "inputs": {
                    **{"preset": "quick", "level": "Auto"},
                    **{"model": ["1", 0], "vae": ["1", 2]},
                },
            },
            "3": {
                "class_type": "SaveImage",
                "inputs": {"images": ["2", 0], "filename_prefix": "speed"},
            },
        }
    )
    assert made.texts["2"] == (
        "The speed test did not run: nothing of ROCm SD can run here (no GPU: this is the CPU)"
    )
    assert made.picture.startswith(b"\x89PNG")


def test_the_start_option_changes_nothing_without_a_card(
    checkout: Path, python: str, tmp_path: Path, without: bytes
) -> None:
    with running(checkout, python, tmp_path / "all", ROCM_SD_COMFYUI_ALL="1") as server:
        made = server.make(WITHOUT_NODES | STATUS)
    assert made.picture == without
    assert "\nattention: 0 of " in made.texts["12"]


def test_where_the_cpu_plays_the_card_all_of_it_is_ours(
    checkout: Path, python: str, tmp_path: Path, without: bytes
) -> None:
    """Attention in float64, the VAE and the UNet by our programs with torch's operations: off by
    rounding. Once the UNet's blocks are not asked for, nothing of them is left.
    """
    with running(checkout, python, tmp_path / "card", ROCM_SD_PLAY="1") as server:
        ways = (("Auto", "Off"), ("Always banded", "Off"), ("Auto", "Auto"))
        made = [server.make(with_nodes(*way)) for way in ways]
        own = server.make({**WITHOUT_NODES, "8": AGAIN}).picture
        measuring = [server.make(with_nodes("Auto", "Auto", "Performance"))]
        measuring += [server.make(with_nodes("Always banded", "Auto", "Performance"))]
    assert own == without
    left = [LEFT.search(each.texts["12"]) for each in measuring]
    assert left[0] and (not left[1] or int(left[1][1]) < int(left[0][1]))
    assert "UNet: " not in made[1].texts["12"]
    said = made[2].texts["12"]
    last, before = said.split("Before it, since ComfyUI's start:")
    for counts in (
        "UNet: 2 of 2 calls ours",
        "VAE decode: 2 of 2 calls",
        "VAE encode: 1 of 1 call",
    ):
        assert f"\n{counts}" in last
    assert "VAE decode: 4 of 4 calls ours" in before and "UNet: " not in before
    assert "UNet, transformer blocks: 7 of 7 are ours" in last
    assert "ComfyUI's own, " not in said
    for each in made + measuring:
        assert largest_difference(each.picture, without) <= 1


def test_cancel_amid_bands_ends_the_decode(checkout: Path, python: str, tmp_path: Path) -> None:
    """ComfyUI's own decode would end first, and the next node be interrupted."""
    workflow = {
        "1": WITHOUT_NODES["1"],
        "2": {
            "class_type": "EmptyLatentImage",
            "inputs": {"width": 512, "height": 512, "batch_size": 1},
        },
        "4": {"class_type": "VAEDecode", "inputs": {"samples": ["2", 0], "vae": ["11", 0]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "c"}},
        "11": with_nodes("Always banded")["11"],
    }
    with running(checkout, python, tmp_path / "cancel", ROCM_SD_PLAY="1") as server:
        server.make(with_nodes("Always banded"))  # from now on there are models
        name = server.begin(workflow)
        time.sleep(1.0)
        server.ask("/interrupt", {})
        made = server.ended(name)
        after = server.make({"12": AGAIN}).texts["12"]
    (how,) = (what for kind, what in made.messages if kind == "execution_interrupted")
    assert how["node_type"] == "VAEDecode"
    assert "ComfyUI's own, " not in after


def test_a_picture_of_wans_vae_is_ours_and_a_video_comfyuis(checkout: Path, python: str) -> None:
    command = (python, "-m", "tests.comfyui.real_wan_vae", str(checkout))
    place = Path(__file__).resolve().parents[2]
    made = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    for coder in json.loads(made.stdout.splitlines()[-1]).values():
        assert coder["reasons"] == []
        assert 0 < coder["picture"] < 1e-5
        assert coder["video"] == 0


@pytest.fixture(scope="module")
def spandrel(python: str) -> None:
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('spandrel') is None)"
    if subprocess.run((python, "-c", find), check=False).returncode:
        pytest.skip("ComfyUI's Python has no spandrel")


@pytest.mark.usefixtures("spandrel")
def test_upscaling_is_ours_where_three_channels_are(
    checkout: Path, python: str, tmp_path: Path
) -> None:
    """By our node and everywhere, of pictures of odd sides; off again it is ComfyUI's to the bit.
    What it makes of other channels, or its error, stays.
    """
    words = (python, "-m", "tests.comfyui.real_upscaler", str(checkout), str(tmp_path))
    place = Path(__file__).resolve().parents[2]
    made = subprocess.run(words, cwd=place, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout.splitlines()[-1])
    for kind, ways in found.items():
        own = ways["own"]
        assert own["moved"] == (["cpu:0", "cpu"] if "apart" in own else ["cpu:0"]), kind
        assert ways["again"] == own and own["equal"] and not own["ours"], kind
        for way in (ways["node"], ways["everywhere"]):
            assert way["moved"][-len(own["moved"]) :] == own["moved"] and way["clean"], kind
            assert way["equal"] is (kind != "rgb") and way["ours"] == (kind == "rgb"), kind
    assert 0 < max(found["rgb"][way]["apart"] for way in ("node", "everywhere")) < 1 / 255
    assert {kind: ways["node"]["left"] for kind, ways in found.items()} == {
        "rgb": [],
        "rgba": ["it gives 4 channels, ComfyUI's node 3"],
        "grey": ["it gives 1 channels, ComfyUI's node 3"],
        **{
            kind: [f"a picture of shape {shape} does not have the network's {taken} channels"]
            for kind, shape, taken in (
                ("alpha model", (3, 19, 27), 4),
                ("alpha picture", (4, 19, 27), 3),
                ("grey model", (3, 19, 27), 1),
            )
        },
    }


@pytest.mark.usefixtures("spandrel")
def test_upscaling_in_a_workflow(checkout: Path, python: str, tmp_path: Path) -> None:
    image: Any = pytest.importorskip("PIL.Image")
    files = {kind: tmp_path / kind for kind in ("input", "models/upscale_models")}
    for place in files.values():
        place.mkdir(parents=True)
    network = level(settle(RRDBNet(4, 16, 1)))
    save_file(network.state_dict(), files["models/upscale_models"] / "tiny.safetensors")
    picture = torch.randint(0, 256, (19, 27, 3), generator=torch.Generator().manual_seed(0))
    image.fromarray(picture.byte().numpy()).save(files["input"] / "small.png")
    right = network(picture.movedim(-1, 0)[None] / 255)[0].movedim(0, -1).clamp(0, 1) * 255
    given: dict[str, Any] = {"upscale_model": ["1", 0], "image": ["2", 0]}
    loader = {"class_type": "UpscaleModelLoader", "inputs": {"model_name": "tiny.safetensors"}}
    workflow: dict[str, Any] = {
        "1": loader,
        "2": {"class_type": "LoadImage", "inputs": {"image": "small.png"}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "u"}},
        "12": {"class_type": "RocmSdStatus", "inputs": {"after": ["3", 0]}},
    }
    nodes = {"ImageUpscaleWithModel": given, "RocmSdUpscale": {**given, "level": "Auto"}}
    with running(checkout, python, tmp_path, ROCM_SD_PLAY="1", ROCM_SD_COMFYUI_ALL="1") as server:
        for name, inputs in nodes.items():
            made = server.make({**workflow, "3": {"class_type": name, "inputs": inputs}})
            assert "\nUpscaler: 1 of 1 call ours" in made.texts["12"]
            seen = image.open(io.BytesIO(made.picture)).convert("RGB")
            values = torch.frombuffer(bytearray(seen.tobytes()), dtype=torch.uint8)
            values = values.view(76, 108, 3).float()
            assert (values - right).abs().max() < 2


def largest_difference(one: bytes, other: bytes) -> int:
    """Of two PNGs, in 0..255."""
    image: Any = pytest.importorskip("PIL.Image")
    both = [image.open(io.BytesIO(data)).convert("RGB").tobytes() for data in (one, other)]
    return max(abs(a - b) for a, b in zip(*both, strict=True))
