"""Pipeline parallel: text encoder, UNet and VAE on ranks of their own, several pictures on the way.

Each picture goes from stage to stage by torch.distributed's send and receive of objects, through
the host's memory: embeddings and latents are small. A rank hands over when the next is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lib_rocm_sd.distributed.group import Group


@dataclass(frozen=True)
class Stage:
    """`work(thing, index)` of each picture, in turn by `ranks`."""

    name: str
    work: Callable[[Any, int], Any]
    ranks: tuple[int, ...]

    def owner(self, index: int) -> int:
        """The rank that works on picture `index`."""
        return self.ranks[index % len(self.ranks)]


def in_stages(group: Group, stages: Sequence[Stage], items: Sequence[Any]) -> list[Any]:
    """What the last stage makes of all items, in order, on rank 0; [] on the others.

    Raises ValueError where a rank has two stages: it would wait for itself.
    """
    ranks = [rank for stage in stages for rank in stage.ranks]
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(group.size)):
        raise ValueError(f"each of {group.size} ranks can have one stage: {ranks}")
    if not stages or not all(stage.ranks for stage in stages):
        raise ValueError("each stage needs a rank")
    own: dict[int, Any] = {}
    mine = [number for number, stage in enumerate(stages) if group.rank in stage.ranks]
    for number in mine:
        stage = stages[number]
        for index, item in enumerate(items):
            if stage.owner(index) != group.rank:
                continue
            given = group.receive(stages[number - 1].owner(index)) if number else item
            made = stage.work(_moved(given, group.device), index)
            if number + 1 < len(stages):
                group.send(_moved(made, torch.device("cpu")), stages[number + 1].owner(index))
            else:
                own[index] = _moved(made, torch.device("cpu"))
    found: dict[int, Any] = {}
    for part in group.to_first(own):
        found.update(part)
    return [found[index] for index in sorted(found)]


def parted(size: int) -> list[tuple[int, ...]]:
    """The ranks of text encoder, UNet and VAE: the UNet, which takes longest, has all but two.

    With two ranks the first has the text encoder too, and gives two stages. Raises ValueError for
    one rank.
    """
    if size < 2:
        raise ValueError("a pipeline of stages needs two ranks or more")
    if size == 2:
        return [(0,), (1,)]
    return [(0,), tuple(range(1, size - 1)), (size - 1,)]


def of_pipeline(pipeline: Any, group: Group, seed: int = 0, **options: Any) -> list[Stage]:
    """The stages of a diffusers StableDiffusionPipeline or StableDiffusionXLPipeline, for prompts.

    Picture i has the seed `seed` + i. `options`: of the pipeline's call, such as guidance_scale.
    The pipeline lies on each rank's device. A VAE that overflows in half precision, as SDXL's does,
    has to be in float32, or ours.
    """
    guided = float(options.get("guidance_scale", 7.5)) > 1

    def text(prompt: Any, index: int) -> dict[str, Any]:
        given = {"do_classifier_free_guidance": guided, "num_images_per_prompt": 1}
        with torch.no_grad():
            made = pipeline.encode_prompt(prompt=prompt, device=group.device, **given)
        return dict(zip(_EMBEDDINGS, made, strict=False))

    def unet(embeddings: dict[str, Any], index: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(seed + index)
        given = {name: item for name, item in embeddings.items() if item is not None}
        made = pipeline(**given, **options, generator=generator, output_type="latent")
        latent: torch.Tensor = made.images
        return latent

    def vae(latent: torch.Tensor, index: int) -> Any:
        scaled = latent.to(pipeline.vae.dtype) / pipeline.vae.config.scaling_factor
        with torch.no_grad():
            image = pipeline.vae.decode(scaled, return_dict=False)[0]
        return pipeline.image_processor.postprocess(image, output_type="pil")[0]

    ranks = parted(group.size)
    if len(ranks) == 2:
        return [
            Stage("text and UNet", lambda prompt, i: unet(text(prompt, i), i), ranks[0]),
            Stage("VAE", vae, ranks[1]),
        ]
    return [
        Stage("text encoder", text, ranks[0]),
        Stage("UNet", unet, ranks[1]),
        Stage("VAE", vae, ranks[2]),
    ]


_EMBEDDINGS = (
    "prompt_embeds",
    "negative_prompt_embeds",
    "pooled_prompt_embeds",
    "negative_pooled_prompt_embeds",
)
"""What encode_prompt gives, in its order; the last two of SDXL's only."""


def _moved(thing: Any, device: torch.device) -> Any:
    """The same with its tensors on a device."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if isinstance(thing, dict):
        return {key: _moved(item, device) for key, item in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)([_moved(item, device) for item in thing])
    return thing
