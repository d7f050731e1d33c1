"""A whole real Forge or reForge: started on the CPU, with its page, and asked for pictures of a
small model.

python whole.py CHECKOUT DATA [card]: DATA is its data folder, with the extension in it or not;
`card`: the CPU plays a card of ours. What came of it is in DATA/found.json.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

HALF = torch.bfloat16
ROOT, DATA, CARD = Path(sys.argv[1]), Path(sys.argv[2]), len(sys.argv) > 3
STUBS = (
    *("basicsr", "gfpgan", "insightface", "joblib", "loadimg", "peft", "pillow_heif", "pywt"),
    *("realesrgan", "rich"),
)
IS_REFORGE = not (ROOT / "backend").is_dir()
MEMORY = "ldm_patched.modules.model_management" if IS_REFORGE else "backend.memory_management"
FLAGS = "--always-cpu --skip-version-check --no-download-sd-model --skip-torch-cuda-test"
SHARE = 0.7
"""Of a model that memory is for when it is loaded in parts."""
UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": (1, 2),
    "num_heads": 2,
    "use_spatial_transformer": True,
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 24,
}
VAE: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [32] * 4,
    "layers_per_block": 1,
}


def start() -> Any:
    """The WebUI's `modules`, when its page is made."""
    os.environ.update(GRADIO_ANALYTICS_ENABLED="False", HF_HUB_OFFLINE="1", COVERAGE_RUN="1")
    builtin = sorted(path.name for path in (ROOT / "extensions-builtin").iterdir())
    settings = {"disabled_extensions": builtin, "samples_save": False}
    settings["live_previews_enable"] = False  # its model would be downloaded
    (DATA / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    checkpoints = DATA / "models" / "Stable-diffusion"
    checkpoints.mkdir(parents=True)
    save_file({"nothing": torch.zeros(1)}, checkpoints / "small.safetensors")
    upscalers = DATA / "models" / "ESRGAN"
    upscalers.mkdir()
    save_file(importlib.import_module("test_upscaler").state_dict(), upscalers / "tiny.safetensors")
    inside: Any = importlib.import_module("real_parts")
    inside.STUBS.update(STUBS)
    if not IS_REFORGE:
        inside.STUBS.difference_update(("accelerate", "diffusers"))
    sys.meta_path.insert(0, inside.Stubs())
    sys.path.insert(0, str(ROOT))
    sys.argv = ["launch.py", "--data-dir", str(DATA), *FLAGS.split()]
    os.chdir(ROOT)
    importlib.import_module("modules_forge.initialization").initialize_forge()
    initialize: Any = importlib.import_module("modules.initialize")
    initialize.imports()
    if CARD:
        gpu = importlib.import_module("conftest").FakeGpu()
        gpu.convs = gpu.norms = True
        gpu.install(DATA / "extensions" / "rocm-sd")
    initialize.initialize()
    modules = SimpleNamespace(
        **{
            name: importlib.import_module(f"modules.{name}")
            for name in ("processing", "script_callbacks", "scripts", "sd_models", "shared", "ui")
        }
    )
    modules.script_callbacks.before_ui_callback()
    modules.shared.demo = modules.ui.create_ui()
    modules.script_callbacks.app_started_callback(modules.shared.demo, None)
    return modules


def load(modules: Any) -> None:
    """A small model becomes the one that is loaded."""
    data = modules.sd_models.model_data
    if IS_REFORGE:
        importlib.import_module("whole_reforge").load(modules.sd_models, UNET)
    else:
        data.set_sd_model(_engine())
        data.forge_hash = str(data.forge_loading_parameters)
    modules.script_callbacks.model_loaded_callback(data.sd_model)


def picture(modules: Any, *args: Any) -> dict[str, Any]:
    """A txt2img; `args` are this extension's arguments."""
    runner = modules.scripts.scripts_txt2img
    fields = {"steps": 3, "width": 64, "height": 64, "sampler_name": "Euler", "seed": 1}
    p = modules.processing.StableDiffusionProcessingTxt2Img(
        prompt="a red circle", cfg_scale=5.0, do_not_save_grid=True, **fields
    )
    p.is_api, p.scripts = True, runner
    values: list[Any] = [0, *[None] * max(script.args_to or 0 for script in runner.scripts)]
    for script in runner.alwayson_scripts:
        if "ROCm SD" in script.title():
            values[script.args_from : script.args_from + len(args)] = args
    p.script_args = tuple(values)
    made = modules.processing.process_images(p)
    return {"pixels": zlib.crc32(made.images[0].tobytes()), "info": made.infotexts[0]}


def upscaled(modules: Any, choice: str) -> dict[str, Any]:
    """What Extras' code makes of a picture of noise, by a small network and Forge's own tiles."""
    modules.shared.opts.data.update(ESRGAN_tile=32, ESRGAN_tile_overlap=4)
    data = next(each for each in modules.shared.sd_upscalers if each.name == "tiny")
    picture = importlib.import_module("test_upscaler").picture()
    found: dict[str, Any] = {}
    if "lib_rocm_sd" in sys.modules:
        options: Any = importlib.import_module("lib_rocm_sd.hosts.ui.options")
        session = importlib.import_module("lib_rocm_sd.hosts.webui.upscaler").session
        session.set_up(options.Options(upscaler=choice))
        made = data.scaler.upscale(picture, 2, data.data_path)
        found = {"ran": [*session.turn.ran], "left": [*session.turn.left]}
        session.end()
    else:
        made = data.scaler.upscale(picture, 2, data.data_path)
    return {"pixels": zlib.crc32(made.tobytes()), "size": list(made.size), **found}


@contextlib.contextmanager
def in_parts() -> Iterator[None]:
    """Its own memory management leaves layers in main memory, as where a card has few bytes."""
    memory: Any = importlib.import_module(MEMORY)
    load = memory.LoadedModel.model_load

    def load_part(self: Any, *given: Any, **more: Any) -> Any:
        parameters = self.model.model.parameters()
        return load(self, int(SHARE * sum(p.numel() * p.element_size() for p in parameters)))

    memory.unload_all_models()
    memory.LoadedModel.model_load = load_part
    try:
        yield
    finally:
        memory.LoadedModel.model_load = load
        memory.unload_all_models()


def _engine() -> Any:
    """An engine of Forge's with its own UNet and VAE, and prompts that are made of numbers."""
    base: Any = importlib.import_module("backend.diffusion_engine.base")
    operations: Any = importlib.import_module("backend.operations")
    prediction: Any = importlib.import_module("backend.modules.k_prediction")
    unets: Any = importlib.import_module("backend.nn.unet")
    vaes: Any = importlib.import_module("backend.nn.vae")
    cpu = torch.device("cpu")
    with torch.inference_mode(), operations.using_forge_operations(device=cpu, dtype=HALF):
        unet = unets.IntegratedUNet2DConditionModel(**UNET)
        vae = vaes.IntegratedAutoencoderKL(**VAE)
    _fill(unet)
    _fill(vae)
    unet.load_device = unet.offload_device = unet.initial_device = cpu
    unet.storage_dtype = unet.computation_dtype = HALF
    config = SimpleNamespace(inpaint_model=lambda: False)
    patcher = importlib.import_module("backend.patcher.unet").UnetPatcher.from_model(
        unet, None, config, k_predictor=prediction.Prediction(prediction_type="epsilon")
    )
    own = importlib.import_module("backend.patcher.vae").VAE(model=vae, dtype=HALF)

    class Engine(base.ForgeDiffusionEngine):  # type: ignore[misc]
        def get_learned_conditioning(self, prompt: list[str]) -> torch.Tensor:
            seeds = (torch.Generator().manual_seed(zlib.crc32(str(p).encode())) for p in prompt)
            return torch.stack([torch.randn((77, UNET["context_dim"]), generator=g) for g in seeds])

        @torch.inference_mode()
        def decode_first_stage(self, x: torch.Tensor) -> torch.Tensor:
            made = self.forge_objects.vae.decode(vae.process_out(x))
            return (made.movedim(-1, 1) * 2.0 - 1.0).to(x)  # type: ignore[no-any-return]

    made = Engine(config, {})
    made.forge_objects = base.ForgeObjects(unet=patcher, clip=None, vae=own, clipvision=None)
    made.forge_objects_original = made.forge_objects.shallow_copy()
    made.forge_objects_after_applying_lora = made.forge_objects.shallow_copy()
    name = dict.fromkeys(("name", "model_name", "name_for_extra", "title", "short_title"), "small")
    made.sd_checkpoint_info = SimpleNamespace(**name, filename="small", shorthash="0", metadata={})
    made.is_sd1, made.sd_model_hash, made.filename = True, "0", "small"
    made.comments, made.extra_generation_params = [], {}
    return made


@torch.inference_mode()
def _fill(module: torch.nn.Module) -> None:
    """As Forge loads weights: amid inference mode, by their names."""
    generator, found = torch.Generator().manual_seed(0), {}
    for path, layer in module.named_modules():
        own = {name: p.shape for name, p in layer.named_parameters(recurse=False)}
        if own.pop("dummy", None) is not None:  # Forge makes these when it loads weights
            sizes: Any = (layer.out_features, layer.in_features)
            own = {"weight": torch.Size(sizes), "bias": torch.Size(sizes[:1])}
        for name, shape in own.items():
            values = torch.randn(shape, generator=generator)
            values *= shape[1:].numel() ** -0.5 if len(shape) > 1 else 0.1
            is_gain = len(shape) == 1 and name == "weight"
            found[f"{path}.{name}"] = (values + is_gain).to(HALF)
    module.load_state_dict(found)


def measured(modules: Any) -> dict[str, Any]:
    """A picture at the level Performance; what it has put off, and what is left some time after."""
    engine: Any = importlib.import_module("lib_rocm_sd.engine.engine").engine
    with importlib.import_module("modules.call_queue").queue_lock:
        made = picture(modules, True, "Performance", "Off", 0, "Off")
        made["put off"] = engine.unmeasured
    for thread in threading.enumerate():
        if thread.name == "rocm_sd measuring":
            thread.join()
    return made | {"left": engine.unmeasured}


def main() -> None:
    torch.set_num_threads(1)
    modules = start()
    load(modules)
    found: dict[str, Any] = {"first": picture(modules)}
    found["upscaled, off"] = upscaled(modules, "Off")
    if (DATA / "extensions" / "rocm-sd").exists():
        status: Any = importlib.import_module("lib_rocm_sd.hosts.webui.status")
        blocks = (True, "Auto", "Auto", 0, "Auto")
        found |= {"on": picture(modules, True), "off": picture(modules, False)}
        found |= {"blocks": picture(modules, *blocks), "off again": picture(modules, False)}
        with in_parts():
            found["in parts"] = picture(modules, *blocks)
            found["status in parts"] = status.sentences()
            found["in parts, off"] = picture(modules, False)
        found["blocks again"] = picture(modules, *blocks)
        found["upscaled"] = upscaled(modules, "Auto")
        found["status"] = status.sentences()
        found["measured"] = measured(modules)
    (DATA / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
