"""Double of modules/api/models.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
A request, its answer, and what describes a script's arguments.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScriptArg:
    label: str | None = None
    value: Any = None
    minimum: Any = None
    maximum: Any = None
    step: Any = None
    choices: list | None = None


@dataclass
class ScriptInfo:
    name: str | None = None
    is_alwayson: bool | None = None
    is_img2img: bool | None = None
    args: list[ScriptArg] = field(default_factory=list)


@dataclass
class StableDiffusionTxt2ImgProcessingAPI:
    alwayson_scripts: dict = field(default_factory=dict)


@dataclass
class TextToImageResponse:
    info: str
