"""Starts the real WebUI whose checkout ROCM_SD_INSIDE names; it has the double's handles."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import real_parts
import torch
from conftest import WebUI

ROOT = Path(os.environ["ROCM_SD_INSIDE"]).resolve()
FLAGS = "--use-cpu all --no-half --skip-version-check --no-download-sd-model --skip-ort"
"""In float32: half precision needs CUDA's autocast. The VAE alone may have another dtype."""
SETTINGS = {
    "disabled_extensions": sorted(p.name for p in (ROOT / "extensions-builtin").iterdir()),
    "samples_save": False,
    "grid_save": False,
    "return_grid": False,
    "show_progress_type": "Full",
    "show_progress_every_n_steps": 0,
}
GENERATION = {
    "prompt": "a red circle",
    "seed": 1,
    "steps": 3,
    "cfg_scale": 5.0,
    "width": 64,
    "height": 64,
    "sampler_name": "Euler",
    "do_not_save_grid": True,
}


class RealWebUI(WebUI):
    """Another start of it forgets what the former one had imported and patched."""

    api_fields = MappingProxyType({"steps": 1, "width": 64, "height": 64, "sampler_name": "Euler"})

    def prepare(self, args: str, cuda: bool) -> None:
        patch = self.monkeypatch
        (self.data / "config.json").write_text(json.dumps(SETTINGS), encoding="utf-8")
        command = ["launch.py", "--data-dir", str(self.data), *shlex.split(f"{FLAGS} {args}")]
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "path", [str(ROOT), *sys.path])
        patch.setattr(sys, "meta_path", [real_parts.Stubs(), *sys.meta_path])
        patch.setattr(torch.Tensor, "__str__", torch.Tensor.__str__)  # the AMD fork replaces it
        for name, value in {
            "COVERAGE_RUN": "1",  # leaves SIGINT alone
            "GRADIO_ANALYTICS_ENABLED": "False",
            "HF_HUB_OFFLINE": "1",
            "IGNORE_CMD_ARGS_ERRORS": "1",  # not all have the same flags
        }.items():
            patch.setenv(name, value)
        patch.setattr(torch.cuda, "is_available", lambda: cuda and _asked_by_optimizers())

    def load(self, family: str, dtype: torch.dtype, whole: bool) -> None:
        self.initialize.imports()
        self._record_errors()
        self.devices.dtype_vae = dtype
        kind = f"{family}-whole" if whole else family
        made = self.data.parents[1] / f"checkpoints-{kind}"  # once for all tests
        if not made.is_dir():
            made.mkdir()
            for seed in (0, 3, 5, 7):
                real_parts.write_checkpoint(made, family, seed, whole)
        folder = self.data / "models" / "Stable-diffusion"
        folder.parent.mkdir(exist_ok=True)
        folder.symlink_to(made, target_is_directory=True)
        self.sd_models.list_models()
        self.shared.opts.data["sd_model_checkpoint"] = "model-0"
        self.initialize.Thread = _AtOnce
        self.ui_extensions.preload_extensions_git_metadata = lambda: None  # this is no clone
        self._previews_as_if_asked_for()

    def begin(self) -> None:
        self.initialize.initialize()

    def start_ui(self) -> None:
        self.script_callbacks.before_ui_callback()
        self.shared.demo = self.ui.create_ui()
        self.script_callbacks.app_started_callback(self.shared.demo, None)

    def forget(self) -> None:
        patches = sys.modules.get("modules.patches")
        for (owner, name), value in [
            item for key in getattr(patches, "originals", {}).values() for item in key.items()
        ]:
            setattr(owner, name, value)
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(f"{ROOT}{os.sep}"):
                del sys.modules[name]

    def load_vae(self, weights: dict[str, torch.Tensor]) -> None:
        path = self.data / "models" / "VAE" / "another.safetensors"
        path.parent.mkdir(exist_ok=True)
        real_parts.save_file(weights, path)
        self.sd_vae.reload_vae_weights(vae_file=str(path))

    def paste(self, tab: str, info: str) -> dict[Any, Any]:
        clicks: list[dict[str, Any]] = []

        class Button:
            def click(self, **event: Any) -> None:
                clicks.append(event)

        fields = self.infotext_utils.paste_fields[tab]["fields"]
        self.infotext_utils.connect_paste(Button(), fields, None, None, tab)
        return dict(zip(clicks[0]["outputs"], clicks[0]["fn"](info), strict=True))

    def new_generation(self, kind: Any, fields: dict[str, Any]) -> Any:
        if "refiner_checkpoint" in fields:
            fields = {"refiner_switch_at": 0.5, **fields}
        p = kind(sd_model=self.shared.sd_model, **{**GENERATION, **fields})
        p.is_api = True  # else the page's seed, sampler and refiner replace these
        return p

    def process(self, p: Any) -> Any:
        """With what the double keeps: the pictures as floats, before they are rounded."""
        decoded: list[torch.Tensor] = []
        runner, whole = p.scripts, p.scripts.postprocess_batch

        def keep(given: Any, images: torch.Tensor, **kwargs: Any) -> None:
            if given is p:
                decoded.append(images.clone())
            whole(given, images, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "postprocess_batch", keep)
            result = self.processing.process_images(p)
        result.decoded = decoded
        return result

    def _record_errors(self) -> None:
        errors = self.errors
        report, record = errors.report, errors.record_exception
        errors.records, errors.recorded = [], []

        def reporting(message: str, *, exc_info: bool = False) -> None:
            errors.records.append(f"{message}\n{sys.exc_info()[1] if exc_info else ''}")
            known = len(errors.recorded)
            report(message, exc_info=exc_info)
            del errors.recorded[known:]

        def recording() -> None:
            errors.recorded.append(sys.exc_info()[1])
            record()

        errors.report, errors.record_exception = reporting, recording

    def _previews_as_if_asked_for(self) -> None:
        """A browser asks for one after each step, here a thread as in the double."""
        common = self.sd_samplers_common
        whole = common.store_latent

        def store(decoded: Any) -> None:
            whole(decoded)
            every = self.shared.opts.show_progress_every_n_steps
            due = every > 0 and self.shared.state.sampling_step % every == 0
            if due and self.shared.opts.live_previews_enable:
                request = threading.Thread(target=self.shared.state.do_set_current_image)
                request.start()
                request.join()

        common.store_latent = store


def _asked_by_optimizers() -> bool:
    """Whether the priorities of the WebUI's optimizers ask: elsewhere there is no CUDA."""
    return sys._getframe(2).f_globals["__name__"] == "modules.sd_hijack_optimizations"


class _AtOnce:
    """In place of the thread that loads the model."""

    def __init__(self, target: Any) -> None:
        self.start = target
