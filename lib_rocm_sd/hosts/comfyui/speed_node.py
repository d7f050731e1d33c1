"""What the node of the speed test gives; a test that cannot run gives the reason."""

from __future__ import annotations

import json
from typing import Any

import torch

from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.hosts import trouble
from lib_rocm_sd.hosts.comfyui import chart, host, speedtest
from lib_rocm_sd.lab import speed_text
from lib_rocm_sd.lab.speed_job import Busy


def run(preset: str, level: str, model: Any, vae: Any) -> tuple[torch.Tensor, str, str]:
    """A plot (1, H, W, 3), the result as JSON, and as Markdown. Only a Cancel is raised."""
    stops = host.attribute("comfy.model_management", "InterruptProcessingException") or ()
    try:
        document = speedtest.run(model, vae, level, preset)
    except stops:
        raise
    except Exception as error:
        plain = isinstance(error, (ValueError, Busy)) or is_out_of_memory(error)
        why = str(error) if plain else trouble.once(error)
        said = f"The speed test did not run: {why}"
        return chart.of_text(said), json.dumps({"reason": why}), said
    content = json.dumps(document.as_dict(), indent=1, ensure_ascii=False)
    return chart.of_document(document), content, speed_text.to_markdown(document)
