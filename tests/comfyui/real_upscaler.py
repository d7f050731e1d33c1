"""Run in a process of its own: a real ComfyUI's nodes for upscaling, with ours and without.

Arguments: ComfyUI's checkout, a folder for files of models. The CPU plays the card. Prints what
came of it as JSON. Packages that are not installed are as in tools/comfyui_start.py.
"""

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

checkout, folder, sys.argv[1:] = sys.argv[1], sys.argv[2], ["--cpu"]
sys.path.insert(0, checkout)

from tools.comfyui_start import NAMES, Finder

absent = [name for name in NAMES if importlib.util.find_spec(name) is None]
sys.meta_path.append(Finder(absent))  # type: ignore[arg-type]

import comfy.options

comfy.options.enable_args_parsing()

import folder_paths  # type: ignore[import-not-found]
import nodes as theirs  # type: ignore[import-not-found]
import torch
from comfy import model_management
from safetensors.torch import save_file

from lib_rocm_sd.hosts.comfyui import everywhere, nodes
from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.lab.upscaler_models import RRDBNet, level, settle
from tests.comfyui.play import play

Make = Callable[[Any, torch.Tensor], torch.Tensor]


def model(name: str, channels: int) -> Any:
    """Loaded by ComfyUI's node. `moved`: where it has been brought since."""
    network = settle(RRDBNet(4, 16, 1, channels))
    network = level(network) if channels == 3 else network
    save_file(network.state_dict(), Path(folder) / f"{name}.safetensors")
    loader = theirs.NODE_CLASS_MAPPINGS["UpscaleModelLoader"]
    found = loader.execute(f"{name}.safetensors")[0]
    move, found.moved = found.to, []
    found.to = lambda device: (found.moved.append(str(device)), move(device))
    return found


def by_theirs(loaded: Any, image: torch.Tensor) -> torch.Tensor:
    return theirs.NODE_CLASS_MAPPINGS["ImageUpscaleWithModel"].execute(loaded, image)[0]  # type: ignore[no-any-return]


def by_node(loaded: Any, image: torch.Tensor) -> torch.Tensor:
    (made,) = nodes.RocmSdUpscale().run(loaded, image, "Auto")
    return made  # type: ignore[no-any-return]


def everywhere_on(loaded: Any, image: torch.Tensor) -> torch.Tensor:
    everywhere.begin("Auto")
    try:
        return by_theirs(loaded, image)
    finally:
        everywhere.end()


def outcome(make: Make, loaded: Any, image: torch.Tensor, own: Any) -> dict[str, Any]:
    """What `make` gave beside `own`, what ComfyUI gives: a picture or an error's text."""
    tally.ours.clear()
    tally.left.clear()
    loaded.moved.clear()
    found: dict[str, Any] = {}
    try:
        made = make(loaded, image)
    except Exception as error:
        found["equal"] = f"{type(error).__name__}: {error}" == own
    else:
        is_alike = isinstance(own, torch.Tensor) and made.shape == own.shape
        found["equal"] = is_alike and torch.equal(made, own)
        found["apart"] = float((made - own).abs().max()) if is_alike else list(made.shape)
    left = [why for (part, why) in tally.left]
    found |= {"ours": sum(tally.ours.values()), "left": left, "moved": list(loaded.moved)}
    return found | {"clean": "forward" not in vars(loaded.model)}


def main() -> None:
    """Upscale pictures of odd sides, and those that a model does not fit."""
    model_management.get_torch_device = lambda: torch.device("cpu", 0)
    folder_paths.add_model_folder_path("upscale_models", folder)
    place = Path(checkout) / "comfy_extras" / "nodes_upscale_model.py"
    asyncio.run(theirs.load_custom_node(str(place), module_parent="comfy_extras"))
    play(setattr)
    generator = torch.Generator("cpu").manual_seed(1)
    image = torch.rand(2, 19, 27, 4, generator=generator)
    kinds = {"rgb": (3, 3), "rgba": (4, 4), "alpha model": (4, 3), "alpha picture": (3, 4)}
    kinds |= {"grey": (1, 1), "grey model": (1, 3)}
    ways: dict[str, Make] = {
        **{"own": by_theirs, "node": by_node, "everywhere": everywhere_on, "again": by_theirs}
    }
    found: dict[str, Any] = {}
    for kind, (taken, given) in kinds.items():
        loaded, shown = model(kind.replace(" ", "-"), taken), image[..., :given]
        try:
            own: Any = by_theirs(loaded, shown)
        except Exception as error:
            own = f"{type(error).__name__}: {error}"
        found[kind] = {way: outcome(make, loaded, shown, own) for way, make in ways.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
