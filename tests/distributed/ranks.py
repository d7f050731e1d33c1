"""What ranks do in the tests: each function is run by all of them (launch.py)."""

from __future__ import annotations

import os
import time
from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lib_rocm_sd.__main__ import main
from lib_rocm_sd.cards import meeting
from lib_rocm_sd.commands import little_model
from lib_rocm_sd.distributed import (
    Group,
    for_each,
    guidance_split,
    in_stages,
    joined,
    of_pipeline,
    patch_parallel,
    vae_bands,
)
from lib_rocm_sd.hosts.diffusers.pipeline import patched
from lib_rocm_sd.hosts.diffusers.unet import patched_unet
from lib_rocm_sd.report import report

LIMIT_S = 600.0
SHORT_S = 8.0
PROMPTS = ("a red circle", "a blue square", "a green triangle", "a star")


@cache
def little() -> Any:
    """The little pipeline in float32. The server that forks ranks has loaded it for all of them."""
    pipeline = little_model.load(little_model.MODEL, torch.float32)
    for part in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
        part.eval().requires_grad_(False)
    return pipeline


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def error(made: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return float((made - wanted).abs().max() / wanted.abs().max())


def alike(group: Group, tensor: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    return all(torch.equal(tensor, other) for other in group.gather(tensor))


def residuals(height: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a ControlNet would add in the little UNet."""
    sizes = [(height, width)]
    for _ in range(2):
        sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
    levels = ((40, 0), (40, 0), (40, 1), (80, 1), (80, 2), (160, 2))
    made = [
        drawn(2, channels, *sizes[level], dtype=dtype, seed=index)
        for index, (channels, level) in enumerate(levels)
    ]
    return {
        "down_block_additional_residuals": tuple(made),
        "mid_block_additional_residual": drawn(2, 160, *sizes[2], dtype=dtype, seed=9),
    }


def calls(sizes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """Calls of the little UNet in float64 at some sizes of latent images: by ranks and alone."""
    unet = deepcopy(little().unet).double()
    found: dict[str, Any] = {}
    prompt = drawn(2, 77, 96, dtype=torch.float64, seed=5)
    with joined(limit_s=LIMIT_S) as group, torch.no_grad():
        for height, width in sizes:
            image = drawn(2, 4, height, width, dtype=torch.float64)
            added = residuals(height, width, torch.float64) if height % 8 else {}
            with guidance_split(unet, group) as split:
                halves = unet(image, 501, prompt, **added).sample
            with patch_parallel(unet, group) as patches:
                (rows,) = unet(image, 501, prompt, return_dict=False, **added)
            # Made once: the other ranks compare their bits with rank 0's.
            alone = unet(image, 501, prompt, **added).sample if group.rank == 0 else rows
            found[f"{height}x{width}"] = {
                "guidance": error(halves, alone),
                "rows": error(rows, alone),
                "counts": (split.split_calls, patches.split_calls, patches.whole_calls),
                "alike": alike(group, halves) and alike(group, rows),
            }
        found["untouched"] = not any("forward" in vars(m) for m in unet.modules())
        found["single"] = _single_call(unet, group)
        found["stale"] = _stale(unet, group) if group.size == 2 else []
        found["blocks"] = _blocks(group)
    found["told"] = report.snapshot()["events"]
    return found


def _single_call(unet: Any, group: Group) -> dict[str, Any]:
    """Without guidance, or of too few rows: each rank for itself; by unequal shares."""
    image, prompt = drawn(1, 4, 16, 16).double(), drawn(1, 77, 96).double()
    alone = unet(image, 501, prompt).sample
    few = unet(image[:, :, :4], 501, prompt).sample
    with guidance_split(unet, group) as split:
        guided = unet(image, 501, prompt).sample
    with patch_parallel(unet, group) as patches:
        low = unet(image[:, :, :4], 501, prompt).sample
    batch = drawn(group.size + 2, 4, 8, 8).double()
    prompts = drawn(group.size + 2, 77, 96).double()
    together = unet(batch, torch.arange(len(batch)), prompts).sample
    with guidance_split(unet, group):
        uneven = unet(batch, torch.arange(len(batch)), prompts).sample

    def other_prompts() -> None:
        with guidance_split(unet, group):
            unet(batch, 501, prompts + 0.5 * group.rank)

    return {
        "prompts": _said(other_prompts),
        "same": torch.equal(guided, alone) and torch.equal(low, few),
        "whole": (split.whole_calls, patches.whole_calls),
        "uneven": error(uneven, together),
    }


def _stale(unet: Any, group: Group) -> list[float]:
    """Errors of steps by the stale form, the image moving a little in each; then a new picture."""
    found: list[float] = []
    prompt = drawn(2, 77, 96).double()
    first, moved = drawn(2, 4, 16, 16).double(), drawn(2, 4, 16, 16, seed=1).double()
    with patch_parallel(unet, group, stale=True):
        steps = [(first + 0.002 * step * moved, 500 - step) for step in range(3)]
        steps.append((moved, 900))
        made = [unet(image, at, prompt).sample for image, at in steps]
    if group.rank:
        return found
    for got, (image, at) in zip(made, steps, strict=True):
        found.append(error(got, unet(image, at, prompt).sample))
    return found


def _blocks(group: Group) -> float:
    """The error of a guidance split in half precision with the UNet's blocks ours."""
    unet = deepcopy(little().unet).half()
    image, prompt = drawn(2, 4, 16, 16).half(), drawn(2, 77, 96, seed=5).half()
    alone = unet(image, 501, prompt).sample
    with patched_unet(unet), guidance_split(unet, group):
        return error(unet(image, 501, prompt).sample, alone)


def decodes(sizes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """The little VAE by ranks, and whole on one: whether their bits are the same."""
    found: dict[str, Any] = {}
    vae = little().vae.half()
    with joined(limit_s=LIMIT_S) as group, torch.no_grad():
        for height, width in sizes:
            latent = drawn(1, 4, height, width, dtype=torch.float16)
            before = group.traffic.sent_bytes
            with vae_bands(vae, group) as programs:
                shared = vae.decode(latent).sample
            sent = group.traffic.sent_bytes - before
            counts, alone = programs["decoder"], shared
            if group.rank == 0:
                with patched(SimpleNamespace(vae=vae), vae="whole", wait=True):
                    alone = vae.decode(latent).sample
            found[f"{height}x{width}"] = {
                "equal": torch.equal(shared, alone) and alike(group, shared),
                "counts": (counts.shared_runs, counts.whole_runs),
                "sent": sent,
            }
        image = drawn(2, 3, 128, 64).half().clamp(-1, 1)
        with patched(SimpleNamespace(vae=vae), vae="whole", wait=True):
            alone = torch.cat([vae.encode(one).latent_dist.mean for one in image.split(1)])
        with vae_bands(vae, group) as programs:
            shared = vae.encode(image).latent_dist.mean
        found["encoder"] = (torch.equal(shared, alone), programs["encoder"].shared_runs)
        found["untouched"] = not any("forward" in vars(m) for m in vae.modules())
        found["seeds"] = _different(vae, group)
    return found


def _different(vae: Any, group: Group) -> str:
    """What is said where ranks decode different latents."""
    try:
        with vae_bands(vae, group):
            vae.decode(drawn(1, 4, 64, 16, seed=group.rank).half())
    except ValueError as error:
        return str(error)
    return ""


def pictures() -> dict[str, Any]:
    """Whole pictures by the little pipeline: in every way that ranks can share them."""
    pipeline = little()
    options = {"num_inference_steps": 2, "guidance_scale": 3.0, "width": 64}

    def picture(prompt: str, index: int, **more: Any) -> Any:
        generator = torch.Generator("cpu").manual_seed(index)
        made = pipeline(prompt, generator=generator, output_type="np", **{**options, **more})
        return np.rint(made.images[0] * 255).astype(np.uint8)

    with joined(limit_s=LIMIT_S, share=[1.0, 2.0, 1.0]) as group:
        many, few = for_each(group, PROMPTS, picture), for_each(group, PROMPTS[:1], picture)
        stages = in_stages(group, of_pipeline(pipeline, group, 0, **options), PROMPTS[:2])
        with guidance_split(pipeline.unet, group), vae_bands(pipeline.vae, group):
            guided = picture(PROMPTS[0], 0, height=256)
        with patched(pipeline, vae=False, wait=True), patch_parallel(pipeline.unet, group):
            rows = picture(PROMPTS[0], 0, height=192)
        pair = group.team(3)
        found = {
            "counts": (len(many), len(few), len(stages)),
            "same": len({guided.tobytes() for guided in group.objects(guided)}) == 1,
            "team": (pair.size, pair.rank, [int(t) for t in pair.gather(torch.tensor(group.rank))]),
            "unfit team": _said(lambda: group.team(2)),
            "unfit stages": _said(lambda: in_stages(group, [], PROMPTS)),
        }
        if group.rank == 0:
            alone = [picture(prompt, index) for index, prompt in enumerate(PROMPTS)]
            found["many"] = all(map(np.array_equal, many, alone)) and np.array_equal(
                few[0], alone[0]
            )
            found["stages"] = all(
                np.array_equal(np.asarray(got), want)
                for got, want in zip(stages, alone, strict=False)
            )
            found["guided"] = _levels(guided, picture(PROMPTS[0], 0, height=256))
            found["rows"] = _levels(rows, picture(PROMPTS[0], 0, height=192))
    return found


def _said(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _levels(one: Any, other: Any) -> int:
    """The largest difference, of 255."""
    return int(np.abs(one.astype(int) - other.astype(int)).max())


def ending(rank: int, how: str) -> tuple[int, float]:
    """One rank ends in the midst; the others exchange on. How long one that ended waited."""
    with joined(limit_s=SHORT_S) as group:
        group.gather(torch.zeros(1))
        if group.rank == rank:
            _end(how)
        for _ in range(1000):
            group.gather(torch.zeros(1))
    return group.size, 0.0


def _end(how: str) -> None:
    if how == "dies":
        os._exit(9)
    if how == "hangs":
        time.sleep(1.5 * SHORT_S)
    raise MemoryError("CUDA out of memory: Tried to allocate 2.00 GiB")


def coming(
    unfit: int = -1, card: str = "", device: str | None = None, limit_s: float = LIMIT_S
) -> tuple[int, int, float]:
    """Ranks that meet and exchange once, and again; one may fail its self-test."""
    meant = int(os.environ["RANK"])
    if card:
        theirs = meeting.member
        meeting.member = lambda *given: replace(theirs(*given), card=card)
    for _ in range(2 if unfit < 0 else 1):
        with joined(
            device,
            limit_s=limit_s,
            selftest=lambda _: "it adds wrongly" if meant == unfit else "",
        ) as group:
            total = float(sum(group.gather(torch.tensor([float(meant)]))))
    return group.size, group.rank, total


def command(words: tuple[str, ...]) -> int:
    """A command line of ours, on each rank."""
    return main(words)


def example(source: str, name: str) -> dict[str, Any]:
    """A program as it stands in a document; those of its values that can be told."""
    values: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), values)
    return {key: item for key, item in values.items() if isinstance(item, (int, float, str, bool))}
