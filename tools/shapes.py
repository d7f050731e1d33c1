"""Captions and pictures of coloured shapes: the data that the little model is trained on.

A scene is a row of integers (`FIELDS`). From a batch of scenes come the captions, as text or as
token ids, and the pictures, rendered from signed distances with anti-aliased edges. Everything is
vectorised in torch, so a GPU makes its own data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.14, 0.14),
    "green": (0.15, 0.62, 0.24),
    "blue": (0.15, 0.33, 0.86),
    "yellow": (0.98, 0.85, 0.12),
    "orange": (0.96, 0.50, 0.07),
    "purple": (0.55, 0.19, 0.68),
    "white": (0.97, 0.97, 0.97),
    "black": (0.08, 0.08, 0.09),
}
PLAIN = (0.78, 0.81, 0.85)
"""The background of a caption that names none."""
SHAPES = ("circle", "square", "triangle", "star", "diamond", "ring", "cross", "heart")
SIZES = ("small", "", "big")
PLACES = ("", "on the left", "on the right", "at the top", "at the bottom", "in the center")
RELATIONS = ("", "left of", "right of", "above", "below", "inside")
FIELDS = ("shape0", "colour0", "size0", "place", "relation", "shape1", "colour1", "size1", "ground")

_INSIDE = RELATIONS.index("inside")
_NO_GROUND = len(COLOURS)
_RADIUS_ONE = (0.115, 0.17, 0.235)
_RADIUS_TWO = (0.105, 0.15, 0.195)
_PLACE_CENTRE = ((0.5, 0.5), (0.27, 0.5), (0.73, 0.5), (0.5, 0.27), (0.5, 0.73), (0.5, 0.5))
_RELATION_OFFSET = ((0, 0), (-0.23, 0), (0.23, 0), (0, -0.23), (0, 0.23), (0, 0))


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes: for each name of FIELDS, `columns[name]` is int64 of shape (batch,)."""

    columns: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.columns["shape0"])

    def __getitem__(self, index: Tensor | slice) -> Scenes:
        return Scenes({name: column[index] for name, column in self.columns.items()})

    @staticmethod
    def concatenated(parts: list[Scenes]) -> Scenes:
        """The scenes of all `parts`, in order."""
        return Scenes({name: torch.cat([part.columns[name] for part in parts]) for name in FIELDS})


def random_scenes(count: int, generator: torch.Generator) -> Scenes:
    """`count` random scenes on the generator's device; no shape has the colour it stands on."""

    def draw(n: int) -> Tensor:
        return torch.randint(n, (count,), generator=generator, device=generator.device)

    colours = len(COLOURS)
    two = draw(2) == 1
    relation = torch.where(two, draw(len(RELATIONS) - 1) + 1, 0)
    inside = relation == _INSIDE
    ground = torch.where(draw(2) == 1, draw(colours), _NO_GROUND)
    named = ground < _NO_GROUND
    colour0 = torch.where(named, (ground + 1 + draw(colours - 1)) % colours, draw(colours))
    colour1 = torch.where(named, (ground + 1 + draw(colours - 1)) % colours, draw(colours))
    other = (colour0 + 1) % colours
    other = torch.where(other == ground, (other + 1) % colours, other)
    size0, size1 = draw(len(SIZES)), draw(len(SIZES))
    return Scenes(
        {
            "shape0": draw(len(SHAPES)),
            "colour0": colour0,
            "size0": torch.where(inside, size0 // 2, size0),
            "place": torch.where(two, 0, draw(len(PLACES))),
            "relation": relation,
            "shape1": draw(len(SHAPES)),
            "colour1": torch.where(inside & (colour1 == colour0), other, colour1),
            "size1": torch.where(inside, 1 + size1 // 2, size1),
            "ground": ground,
        }
    )


# --- captions ---


def _slots(row: Mapping[str, int]) -> list[str]:
    colours = list(COLOURS)

    def thing(which: int) -> list[str]:
        size, colour = SIZES[row[f"size{which}"]], colours[row[f"colour{which}"]]
        return [*_with_article(size, colour), SHAPES[row[f"shape{which}"]]]

    words = thing(0)
    if row["relation"]:
        words += [RELATIONS[row["relation"]], *thing(1)]
    words.append(PLACES[row["place"]])
    if row["ground"] < _NO_GROUND:
        words += ["on", *_with_article("", colours[row["ground"]]), "background"]
    return words


def _with_article(size: str, colour: str) -> list[str]:
    return ["an" if not size and colour == "orange" else "a", size, colour]


def captions(scenes: Scenes) -> list[str]:
    """Each scene's caption, like "a red ring left of a blue star on a white background"."""
    rows = zip(*(scenes.columns[name].tolist() for name in FIELDS), strict=True)
    return [" ".join(filter(None, _slots(dict(zip(FIELDS, row, strict=True))))) for row in rows]


def words() -> list[str]:
    """Every word that a caption can hold, sorted."""
    phrases = [*COLOURS, *SHAPES, *SIZES, *PLACES, *RELATIONS, "a", "an", "on", "background"]
    return sorted({word for phrase in phrases for word in phrase.split()})


class Captioner:
    """Captions as token ids, made on the device: those the tokenizer gives for `captions`."""

    def __init__(
        self, vocabulary: Mapping[str, int], device: torch.device, length: int = 77
    ) -> None:
        """`vocabulary` maps `words()` and "<|startoftext|>", "<|endoftext|>" to ids."""
        self.start, self.end = vocabulary["<|startoftext|>"], vocabulary["<|endoftext|>"]
        self.length = length

        def table(phrases: list[str], width: int) -> Tensor:
            rows = [[vocabulary[word] for word in phrase.split()] for phrase in phrases]
            return torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)

        things = [
            " ".join(filter(None, _with_article(size, colour)))
            for size in SIZES
            for colour in COLOURS
        ]
        grounds = [
            " ".join(["on", *_with_article("", colour)[::2], "background"]) for colour in COLOURS
        ]
        self._thing = table(things, 3)
        self._shape = table(list(SHAPES), 1)
        self._relation = table(list(RELATIONS), 2)
        self._place = table(list(PLACES), 3)
        self._ground = table([*grounds, ""], 4)

    def __call__(self, scenes: Scenes) -> Tensor:
        """Token ids, int64 (len(scenes), length)."""
        c = scenes.columns
        thing0 = self._thing[c["size0"] * len(COLOURS) + c["colour0"]]
        thing1 = self._thing[c["size1"] * len(COLOURS) + c["colour1"]]
        second = torch.cat([thing1, self._shape[c["shape1"]]], 1)
        second = second.masked_fill((c["relation"] == 0)[:, None], -1)
        parts = [thing0, self._shape[c["shape0"]], self._relation[c["relation"]], second]
        ids = torch.cat([*parts, self._place[c["place"]], self._ground[c["ground"]]], 1)
        order = torch.argsort((ids < 0).to(torch.int8), dim=1, stable=True)
        ids = ids.gather(1, order)
        padded = torch.full((len(ids), self.length), self.end, dtype=ids.dtype, device=ids.device)
        padded[:, 0] = self.start
        padded[:, 1 : 1 + ids.shape[1]] = torch.where(ids < 0, self.end, ids)
        return padded

    def empty(self, count: int) -> Tensor:
        """Token ids of the empty caption, int64 (count, length)."""
        padded = torch.full((count, self.length), self.end, device=self._thing.device)
        padded[:, 0] = self.start
        return padded


# --- pictures ---


def _distances(x: Tensor, y: Tensor) -> list[Tensor]:
    """Signed distance to each of SHAPES, about one in radius, at (x, y); y points down."""
    ax, ay = x.abs(), y.abs()
    radius = torch.hypot(x, y)
    diagonal = (ax + (y - 0.22).abs()) * math.sqrt(0.5)
    lobes = torch.hypot(ax - 0.58 * math.sqrt(0.5), y - 0.22 + 0.58 * math.sqrt(0.5))
    return [
        radius - 0.92,
        torch.maximum(ax, ay) - 0.82,
        torch.maximum(y - 0.12, 0.866 * ax - 0.5 * (y - 0.12)) - 0.52,
        _star(x, y, radius),
        (ax + ay) * math.sqrt(0.5) - 0.7,
        (radius - 0.7).abs() - 0.24,
        torch.minimum(torch.maximum(ax - 0.3, ay - 0.95), torch.maximum(ay - 0.3, ax - 0.95)),
        torch.minimum(diagonal, lobes) - 0.58,
    ]


def _star(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    sector = math.pi / 5
    angle = torch.atan2(x, -y)
    folded = (torch.remainder(angle + sector, 2 * sector) - sector).abs()
    u, v = radius * torch.cos(folded), radius * torch.sin(folded)
    du, dv = 0.45 * math.cos(sector) - 1.0, 0.45 * math.sin(sector)
    return (-(u - 1.0) * dv + v * du) / -math.hypot(du, dv)


def _place_of(scenes: Scenes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Centres (batch, 2, xy) and radii (batch, 2) in picture widths; radius 0 for no shape."""
    c, device, count = scenes.columns, generator.device, len(scenes)

    def jitter(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device) * 2 - 1

    def table(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    two, inside = c["relation"] > 0, c["relation"] == _INSIDE
    sizes = torch.stack([c["size0"], c["size1"]], 1)
    radii = torch.where(two[:, None], table(_RADIUS_TWO)[sizes], table(_RADIUS_ONE)[sizes])
    within = torch.stack(
        [table((0.09, 0.12, 0.12))[sizes[:, 0]], table((0.3, 0.32, 0.35))[sizes[:, 1]]], 1
    )
    radii = torch.where(inside[:, None], within, radii) * (1 + 0.07 * jitter(count, 2))
    free = ((c["relation"] == 0) & (c["place"] == 0))[:, None]
    centre = table(_PLACE_CENTRE)[c["place"]] + torch.where(free, 0.2, 0.025) * jitter(count, 2)
    offset = table(_RELATION_OFFSET)[c["relation"]]
    apart = torch.where((two & ~inside)[:, None], 0.025, 0.0)
    first = centre + offset + apart * jitter(count, 2)
    second = centre - offset + apart * jitter(count, 2)
    radii[:, 1] = torch.where(two, radii[:, 1], 0.0)
    return torch.stack([first, second], 1), radii


def render(scenes: Scenes, generator: torch.Generator, size: int = 128) -> Tensor:
    """Pictures, float32 (batch, 3, size, size) in -1..1; places and sizes vary with `generator`."""
    c, device = scenes.columns, generator.device
    palette = torch.tensor([*COLOURS.values(), PLAIN], device=device)
    axis = (torch.arange(size, device=device) + 0.5) / size
    centres, radii = _place_of(scenes, generator)
    light = (1.04 - 0.08 * axis).view(1, 1, size, 1)
    image = (palette[c["ground"]].view(-1, 3, 1, 1) * light).expand(-1, -1, -1, size)
    for which in (1, 0):
        radius = radii[:, which].clamp_min(1e-3).view(-1, 1, 1)
        x = (axis.view(1, 1, size) - centres[:, which, 0].view(-1, 1, 1)) / radius
        y = (axis.view(1, size, 1) - centres[:, which, 1].view(-1, 1, 1)) / radius
        shape, present = c[f"shape{which}"], (radii[:, which] > 0).view(-1, 1, 1)
        shade = _coverage(x - 0.1, y - 0.13, radius, shape, size, softness=0.035 * size)
        image = image * (1 - 0.3 * (shade * present).unsqueeze(1))
        cover = (_coverage(x, y, radius, shape, size) * present).unsqueeze(1)
        glow = (1.02 - 0.09 * (0.4 * x + 0.6 * y).clamp(-1, 1)).unsqueeze(1)
        colour = palette[c[f"colour{which}"]].view(-1, 3, 1, 1) * glow
        image = image + (colour - image) * cover
    return image.clamp(0, 1) * 2 - 1


def _coverage(
    x: Tensor, y: Tensor, radius: Tensor, shape: Tensor, size: int, softness: float = 1.0
) -> Tensor:
    """How much of each pixel the shape covers, 0 to 1; `softness` is the edge's width in pixels."""
    x, y = torch.broadcast_tensors(x, y)
    distance = torch.zeros_like(x)
    for index, candidate in enumerate(_distances(x, y)):
        distance = torch.where((shape == index).view(-1, 1, 1), candidate, distance)
    return (0.5 - distance * radius * size / softness).clamp(0, 1)
