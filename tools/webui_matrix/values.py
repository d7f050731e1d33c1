"""What a scenario leaves open until a WebUI runs: sizes, pictures, the names of models."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tools.webui_client import Client

LISTS: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "LoRA": ("sdapi/v1/loras", lambda said: [each["name"] for each in said]),
    "hypernetwork": ("sdapi/v1/hypernetworks", lambda said: [each["name"] for each in said]),
    "embedding": ("sdapi/v1/embeddings", lambda said: list(said["loaded"])),
    "checkpoint": ("sdapi/v1/sd-models", lambda said: [each["title"] for each in said]),
    "VAE": ("sdapi/v1/sd-vae", lambda said: [each["model_name"] for each in said]),
    "ControlNet model": ("controlnet/model_list", lambda said: list(said["model_list"])),
}
"""Where a WebUI tells which models of a kind it has."""


class MissingError(Exception):
    """What a scenario needs is not here; the message says what."""


@dataclass
class World:
    """One WebUI: its models, the folder of its extensions, the size of plain pictures."""

    client: Client
    extensions: Path
    side: int = 512
    steps: int = 8
    _names: dict[str, list[str]] = field(default_factory=dict)

    def names(self, kind: str) -> list[str]:
        if kind not in self._names:
            route, read = LISTS[kind]
            try:
                said = self.client.ask(route)
            except RuntimeError as error:
                if f"{route}: 404" not in str(error):
                    raise
                raise MissingError(f"the WebUI does not list any {kind}") from None
            self._names[kind] = read(said)
        return self._names[kind]


class Open:
    """A value that depends on the WebUI."""

    def of(self, world: World) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Side(Open):
    """As many times the side of a plain picture, as a multiple of something."""

    times: float
    multiple: int = 1

    def of(self, world: World) -> int:
        return round(world.side * self.times / self.multiple) * self.multiple


@dataclass(frozen=True)
class Model(Open):
    """The first of a kind whose name has `part` in it."""

    kind: str
    part: str

    def of(self, world: World) -> str:
        for name in world.names(self.kind):
            if self.part in name:
                return name
        raise MissingError(f"no {self.kind} with '{self.part}' in its name")


@dataclass(frozen=True)
class FileOf(Open):
    """The name of an extension's own file."""

    extension: str
    pattern: str

    def of(self, world: World) -> str:
        found = sorted((world.extensions / self.extension).glob(self.pattern))
        if not found:
            raise MissingError(f"no file {self.extension}/{self.pattern}")
        return found[0].name


@dataclass(frozen=True)
class Text(Open):
    """A template with what is open in it."""

    template: str
    values: tuple[Open, ...]

    def of(self, world: World) -> str:
        return self.template.format(*(value.of(world) for value in self.values))


@dataclass(frozen=True)
class Drawing(Open):
    """A picture as the API takes it: white "circles" on black, coloured "noise", a "mask"."""

    kind: str

    def of(self, world: World) -> str:
        draw = {"circles": _circles, "noise": _noise, "mask": _mask}[self.kind]
        buffer = io.BytesIO()
        draw(world.side).save(buffer, "PNG")
        return base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Embeds(Open):
    """A picture as a vision tower would have seen it, in torch's file format."""

    width: int

    def of(self, world: World) -> str:
        import torch

        buffer = io.BytesIO()
        drawn = torch.randn(1, self.width, generator=torch.Generator().manual_seed(1))
        torch.save({"image_embeds": drawn}, buffer)
        return base64.b64encode(buffer.getvalue()).decode()


def _circles(side: int) -> Image.Image:
    image = Image.new("RGB", (side, side), "black")
    draw = ImageDraw.Draw(image)
    for x, y, wide, high in np.random.default_rng(3).random((14, 4)) * side:
        box = (x - wide / 4, y - high / 4, x + wide / 4, y + high / 4)
        draw.ellipse(box, outline="white", width=max(1, side // 128))
    return image


def _noise(side: int) -> Image.Image:
    random = np.random.default_rng(5)
    coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3)).astype(np.uint8))
    smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)).astype(int)
    rough = smooth + random.integers(-20, 20, smooth.shape)
    return Image.fromarray(rough.clip(0, 255).astype(np.uint8))


def _mask(side: int) -> Image.Image:
    image = Image.new("L", (side, side), 0)
    box = (side // 4, side // 4, side * 3 // 4, side * 3 // 4)
    ImageDraw.Draw(image).ellipse(box, fill=255)
    return image


def filled(value: Any, world: World) -> Any:
    """The same with nothing open. Raises MissingError."""
    if isinstance(value, Open):
        return value.of(world)
    if isinstance(value, Mapping):
        return {key: filled(each, world) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [filled(each, world) for each in value]
    return value


def labelled(known: Sequence[Mapping[str, Any]], changes: Mapping[str | int, Any]) -> list[Any]:
    """A script's arguments: its defaults, some changed by label or by number.

    `known` is what /sdapi/v1/script-info says. "Label#1" is the second of that label.
    """
    values = [each["value"] for each in known]
    labels = [each["label"] for each in known]
    for key, value in changes.items():
        label, _, which = str(key).partition("#")
        places = [at for at, each in enumerate(labels) if each == label]
        if isinstance(key, int):
            places = [key] if key < len(values) else []
        at = int(which or 0)
        if at >= len(places):
            raise ValueError(f"the script has no argument '{key}', but {labels}")
        values[places[at]] = value
    return values
