"""What ranks share of a diffusers pipeline: the rows of its VAE's images, or its stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from lib_rocm_sd.cards.batch import Stage
from lib_rocm_sd.cards.group import Agreement, Group
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.cards.vae_rows import TogetherProgram, parts_of, units
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.hosts import gate
from lib_rocm_sd.hosts.diffusers.vae import DiffusersStandIn
from lib_rocm_sd.hosts.vae import ROLES, VaeWish
from lib_rocm_sd.vae.plan import BandPlan
from lib_rocm_sd.vae.program import Request
from lib_rocm_sd.vae.trace import Chain


class SharedProgram(TogetherProgram):
    """A Program whose images are made by the ranks of a group together, one after the other.

    `whole_runs`, `shared_runs` count images.
    """

    def __init__(self, module: nn.Module, group: Group, session: Session = DEFAULT) -> None:
        self._group, self._told = group, session.report
        self._agreement = Agreement(group)
        self.whole_runs = self.shared_runs = 0
        super().__init__(module)

    def _run(self, request: Request, plan: BandPlan, links: Chain, strict: bool) -> torch.Tensor:
        image, group = request.image, self._group
        one = self.chain_of(image)
        why = "there is one rank" if group.size == 1 else ""
        if group.size > units(one):
            why = f"{units(one)} ranks are the most for an image of this size, not {group.size}"
        if why or not image.shape[0]:
            self.whole_runs += image.shape[0]
            self._told.event(f"distributed: the VAE's {self._recipe.role} is not split: {why}")
            return super()._run(request, plan, links, strict)
        self._agreement.note(image)
        try:
            rows = parts_of(one, group.shares(units(one), 1))
            whole = self.together(image, rows, group, request.session)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # The others wait for this rank: it cannot try smaller bands by itself.
            text = f"{group.members[group.rank]} has too little memory for its rows of the VAE"
            raise RankError(text) from error
        self.shared_runs += len(image)
        return whole

    def settle(self) -> None:
        """Raises ValueError where the ranks' images were not the same."""
        self._agreement.look(to_the_end=True)


class SharedStandIn(DiffusersStandIn):
    """In the place of a VAE's decoder or encoder; what ends the ranks is passed on."""

    passed_on: ClassVar[tuple[type[Exception], ...]] = (*DiffusersStandIn.passed_on, RankError)

    def __init__(self, vae: Any, role: str, group: Group, session: Session) -> None:
        super().__init__(vae, role, VaeWish("whole"), session)
        self.program: SharedProgram = SharedProgram(self.module, group, session)


@contextmanager
def vae_bands(
    vae: Any, group: Group, session: Session = DEFAULT
) -> Iterator[dict[str, SharedProgram]]:
    """Decode and encode with a diffusers VAE by all ranks inside the `with` block.

    Every rank gives the same image and gets the whole result: what one rank makes as a whole frame,
    to the bit where all run by one config. Ranks have some rows of 16 of the latent image, by their
    share. An image that is too small for them is made by each rank for itself, and told. Raises
    ValueError where neither part of the VAE can be run so. The programs, by role.
    """
    gate.begin()
    stand_ins: dict[str, SharedStandIn] = {}
    left: list[str] = []
    for role in ROLES:
        if isinstance(getattr(vae, role, None), nn.Module):
            stand_in = SharedStandIn(vae, role, group, session)
            why = stand_in.obstacles() or tuple(filter(None, [stand_in.put_in()]))
            if why:
                left.append(f"{role}: {'; '.join(why)}")
            else:
                stand_ins[role] = stand_in
    try:
        if not stand_ins:
            raise ValueError(f"this VAE cannot be run by ranks: {', '.join(left) or 'no parts'}")
        yield {role: stand_in.program for role, stand_in in stand_ins.items()}
        for stand_in in stand_ins.values():
            stand_in.program.settle()
    finally:
        for stand_in in stand_ins.values():
            stand_in.take_out()


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
        with torch.no_grad():
            embeddings = pipeline.encode_prompt(
                prompt=prompt,
                device=group.device,
                num_images_per_prompt=1,
                do_classifier_free_guidance=guided,
            )
        return dict(zip(_EMBEDDINGS, embeddings, strict=False))

    def unet(embeddings: dict[str, Any], index: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(seed + index)
        present = {name: item for name, item in embeddings.items() if item is not None}
        output = pipeline(**present, **options, generator=generator, output_type="latent")
        latent: torch.Tensor = output.images
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
