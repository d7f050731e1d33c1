"""The modules of a real WebUI, imported on the CPU from a checkout.

What stands in the checkout is executed: its networks, hypernetworks, HyperTile, ToMe, hijacks and
optimizers. Only devices.autocast() is another. Packages that no UNet comes near are stubs.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from tests.webui.inside import real_parts
from tools.unet_networks.autocast import as_on_a_gpu

FLAGS = "--use-cpu all --skip-version-check --no-download-sd-model --skip-ort"
PRIORITIES = ("modules.sd_hijack_optimizations", "modules.sd_hijack_unet")
"""Modules of the WebUI that ask for CUDA and then choose or patch; nothing is launched there."""
ENVIRONMENT = {
    "COVERAGE_RUN": "1",  # leaves SIGINT alone
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "IGNORE_CMD_ARGS_ERRORS": "1",  # not all have the same flags
}


class WebUI:
    """`module(name)` is the WebUI's; `data` the folder that it may write to."""

    def __init__(self, checkout: Path, data: Path) -> None:
        self.checkout, self.data = checkout, data
        (data / "lora").mkdir(parents=True)
        flags = [*FLAGS.split(), "--data-dir", str(data), "--lora-dir", str(data / "lora")]
        sys.argv = ["launch.py", *flags]
        sys.path.insert(0, str(checkout))
        sys.meta_path.insert(0, _Stubs())
        os.environ.update(ENVIRONMENT)
        torch.set_num_threads(1)  # the tensors are tiny, and the machine may be busy
        with _cuda_for(PRIORITIES):
            self.module("modules.initialize").imports()
        self.networks = self._extension("Lora", "networks", "lora_script")
        self.hypertile = self._extension("hypertile", "hypertile", "hypertile_script")
        self.module("modules.script_callbacks").ui_settings_callback()
        lora = importlib.import_module("extra_networks_lora")
        self.networks.extra_network_lora = lora.ExtraNetworkLora()
        self.shared, self.devices = self.module("modules.shared"), self.module("modules.devices")
        self.devices.autocast = self._autocast
        self.hijack = self.module("modules.sd_hijack")
        self._list_optimizers()
        self._optimizers = list(self.hijack.optimizers)

    @staticmethod
    def module(name: str) -> Any:
        return importlib.import_module(name)

    def _extension(self, folder: str, name: str, script: str) -> Any:
        """The module `name` of an extension that comes with the WebUI, its script executed."""
        place = self.checkout / "extensions-builtin" / folder
        sys.path.insert(0, str(place))
        module = importlib.import_module(name)
        loading = self.module("modules.script_loading")
        loading.load_module(str(place / "scripts" / f"{script}.py"))
        return module

    def _autocast(self, disable: bool = False) -> Any:
        """What devices.autocast() is on a GPU in half precision."""
        half = self.devices.dtype_unet
        plain = disable or self.devices.force_fp16 or half == torch.float32
        return as_on_a_gpu(half, enabled=not plain)

    def _list_optimizers(self) -> None:
        own = self.module("modules.sd_hijack_optimizations").list_optimizers
        self.module("modules.script_callbacks").on_list_optimizers(own)
        with _cuda_for(PRIORITIES):
            self.hijack.list_optimizers()

    @property
    def optimizers(self) -> list[str]:
        """The WebUI's own for attention, by name."""
        return [item.name for item in self._optimizers]

    def apply_optimizer(self, wanted: Any) -> None:
        """One of the WebUI's by its name, or ours; "None" for none."""
        named = {item.name: item.title() for item in self._optimizers}
        self.hijack.optimizers[:] = [*self._optimizers]
        if not isinstance(wanted, str):
            self.hijack.optimizers.append(wanted)
        title = named.get(wanted, wanted) if isinstance(wanted, str) else wanted.title()
        with redirect_stdout(io.StringIO()):
            self.hijack.apply_optimizations(title)

    def use(self, model: Any) -> None:
        """Make `model` the loaded checkpoint."""
        data = self.module("modules.sd_models").model_data
        data.was_loaded_at_least_once = True
        data.set_sd_model(model)
        self.networks.assign_network_names_to_compvis_modules(model)


class _Stubs(real_parts.Stubs):
    """Of all but ToMe, which is looked at here."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return None if name.split(".")[0] == "tomesd" else super().find_spec(name, path, target)


@contextmanager
def _cuda_for(modules: tuple[str, ...]) -> Iterator[None]:
    """There is CUDA for the modules named, and nobody else."""
    before: Callable[[], bool] = torch.cuda.is_available

    def asked() -> bool:
        return sys._getframe(1).f_globals["__name__"] in modules

    torch.cuda.is_available = asked
    try:
        yield
    finally:
        torch.cuda.is_available = before
