"""What ranks do in the tests of patch parallel with the UNet's blocks ours (launch.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch

from lib_rocm_sd.distributed import Group, RankError, joined, patch_parallel
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.hosts.diffusers.pipeline import patched
from lib_rocm_sd.hosts.diffusers.unet import patched_unet
from lib_rocm_sd.report import report
from lib_rocm_sd.unet import compute
from lib_rocm_sd.unet.shared import Embeddings, Prompts
from lib_rocm_sd.unet.stand_in import BlockStandIn
from tests.distributed.ranks import LIMIT_S, SHORT_S, alike, drawn, error, little, residuals
from tests.unet import unet_models as models

SHARED = (Embeddings, Prompts)
Place = tuple[str, tuple[int, int]]
PARTS = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "proj_in", "conv1", "conv2", "conv")


def unet_of(name: str) -> Any:
    """A little UNet of the shape of SD 1.5's, or of SDXL's, in half precision."""
    if name == "SD 1.5":
        return deepcopy(little().unet).half()
    return models.diffusers_unet(name).eval().requires_grad_(False).half()


def given_to(name: str, size: tuple[int, int], dtype: torch.dtype = torch.float16) -> Any:
    """The arguments of a call, the same on all ranks; at odd heights with a ControlNet's images."""
    if name != "SD 1.5":
        return models.in_dtype(models.diffusers_inputs(name, 2, *size), dtype)
    image, prompt = drawn(2, 4, *size), drawn(2, 77, 96, seed=5)
    added = residuals(*size, dtype) if size[0] % 2 else {}
    given = {"sample": image.to(dtype), "encoder_hidden_states": prompt.to(dtype)}
    return {**given, "timestep": 501, **added}


@contextmanager
def both(unet: Any, group: Group, inside: bool = True, **more: Any) -> Iterator[Any]:
    """Blocks of ours and rows of the ranks, in either order."""
    with ExitStack() as stack:
        if inside:
            stack.enter_context(patched_unet(unet))
        parallel = stack.enter_context(patch_parallel(unet, group, **more))
        if not inside:
            stack.enter_context(patched_unet(unet))
        yield parallel


def calls(places: tuple[Place, ...], share: tuple[float, ...]) -> dict[str, Any]:
    """By place: errors against float64 of ours by rows, of ours and of torch's by one rank."""
    found: dict[str, Any] = {}
    with joined(limit_s=LIMIT_S, share=share) as group, torch.no_grad():
        for number, (name, size) in enumerate(places):
            unet, given = unet_of(name), given_to(name, size)
            traffic = group.traffic
            with both(unet, group, inside=number % 2 == 0) as parallel:
                before = traffic.exchanges, traffic.sent_bytes
                made = unet(**given).sample
                sent = traffic.exchanges - before[0], traffic.sent_bytes - before[1]
                again = unet(**given).sample
            before = traffic.exchanges, traffic.sent_bytes
            with patch_parallel(unet, group):
                unet(**given)
            diffusers_sent = traffic.exchanges - before[0], traffic.sent_bytes - before[1]
            place = found[f"{name} {size[0]}x{size[1]}"] = {
                "alike": alike(group, made) and torch.equal(made, again),
                "counts": (parallel.split_calls, parallel.whole_calls),
                "ours": len(parallel.ours),
                "sent": sent,
                "diffusers' sent": diffusers_sent,
            }
            if group.rank == 0:
                torchs = unet(**given).sample
                with patched_unet(unet):
                    alone = unet(**given).sample
                wanted = unet.double()(**given_to(name, size, torch.float64)).sample
                place["errors"] = [error(each.double(), wanted) for each in (made, alone, torchs)]
        found["told"] = report.snapshot()["events"]
    return found


def changes() -> dict[str, Any]:
    """Errors of two ranks beside one rank's, with what people add to a UNet; and what is shared, by
    whom, where one rank cannot do it.
    """
    found: dict[str, Any] = {}
    with joined(limit_s=LIMIT_S) as group, torch.no_grad():
        found["one rank only"] = _one_only(group)
        found["held"] = _held(group)
        found["lacking"] = _lacking(group)
        found["different ways"] = _different_ways(group)
        found["once a step"] = _once_a_step(group)
        found["pipeline"] = _pipeline(group)
        found["stale"] = _stale(group)
        found["LoRA"] = _with_lora(group)
        found["IP-Adapter"] = _with_images(group)
        found["FreeU"] = _whole(group, lambda unet: unet.enable_freeu(0.9, 0.2, 1.2, 1.4))
        found["another forward"] = _whole(group, _first_again)
        found["late LoRA"] = _whole(group, lambda unet: unet.add_adapter(_lora(), "one"))
        found["told"] = report.snapshot()["events"]
    return found


def _apart(unet: Any, group: Group, given: Any) -> list[float]:
    """Differences to one rank's by torch: of our blocks by rows, and of diffusers' by rows."""
    alone, made = unet(**given).sample, []
    for ours in (True, False):
        with both(unet, group) if ours else patch_parallel(unet, group) as parallel:
            made.append(error(unet(**given).sample, alone))
            assert parallel.split_calls == 1 and bool(parallel.ours) is ours
    return made


def _one_only(group: Group) -> tuple[float, int]:
    unet, given = unet_of("SD 1.5"), given_to("SD 1.5", (16, 16))
    alone = unet(**given).sample
    with ExitStack() as stack:
        if group.rank:
            stack.enter_context(patched_unet(unet))
        parallel = stack.enter_context(patch_parallel(unet, group))
        return error(unet(**given).sample, alone), len(parallel.ours)


def _held(group: Group) -> tuple[float, int]:
    """Somebody keeps rank 0's weights, which then cannot be laid anew."""
    unet, given = unet_of("SD 1.5"), given_to("SD 1.5", (16, 16))
    alone = unet(**given).sample
    kept = unet.state_dict() if group.rank == 0 else {}
    with both(unet, group) as parallel:
        apart = error(unet(**given).sample, alone)
    assert bool(kept) is (group.rank == 0)
    return apart, len(parallel.ours)


def _lacking(group: Group) -> list[tuple[float, int]]:
    """Rank 1 finds after a call that residual blocks have no kernel of ours; then it has some."""
    unet, given = unet_of("SD 1.5"), given_to("SD 1.5", (16, 16))
    alone, found = unet(**given).sample, []

    def obstacle(block: BlockStandIn, routes: Any) -> str:
        return "no convolution of ours" if block.kind.title == "residual block" else ""

    with both(unet, group) as parallel:
        for step in range(3):
            lacks = group.rank == 1 and step < 2
            with patch.object(BlockStandIn, "obstacle", obstacle) if lacks else nullcontext():
                found.append((error(unet(**given).sample, alone), len(parallel.ours)))
            if step == 1:
                engine.renew()
    return found


def _different_ways(group: Group) -> str:
    """What is raised where one rank leaves a block to diffusers that was to be ours on all."""
    unet, given = unet_of("SD 1.5"), given_to("SD 1.5", (16, 16))
    first = unet.down_blocks[0].resnets[0]
    with both(unet, group) as parallel:
        without = patch.object(parallel, "is_ours", lambda m: m in parallel.ours and m is not first)
        with without if group.rank else nullcontext():
            try:
                unet(**given)
            except RankError as raised:
                return str(raised)
    return ""


def _once_a_step(group: Group) -> tuple[int, int]:
    """How often time embeddings and prompts are made on this rank, in one call."""
    unet, given = unet_of("SD 1.5"), given_to("SD 1.5", (16, 16))
    makers = [patch.object(c, "_made", autospec=True, side_effect=c._made) for c in SHARED]
    with both(unet, group), makers[0] as times, makers[1] as prompts:
        unet(**given)
    return times.call_count, prompts.call_count


def _pipeline(group: Group) -> tuple[int, int]:
    """The largest difference of a picture, of 255, by a pipeline whose UNet's blocks are ours."""
    pipeline = little().to(torch.float16)
    pipeline.vae.float()

    def picture() -> Any:
        generator = torch.Generator("cpu").manual_seed(1)
        options = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": 192, "width": 64}
        latent = pipeline("a red circle", generator=generator, output_type="latent", **options)
        made = pipeline.vae.decode(latent.images.float() / pipeline.vae.config.scaling_factor)
        return (made.sample.clamp(-1, 1) * 127.5).round().int()

    alone = picture()
    ours = patched(pipeline, unet=True, vae=False, wait=True)
    with ours, patch_parallel(pipeline.unet, group) as parallel:
        made = picture()
    return int((made - alone).abs().max()), len(parallel.ours)


def _stale(group: Group) -> list[float]:
    """Errors of steps whose image moves a little; then of a new picture."""
    unet, given = unet_of("SD 1.5"), given_to("SD 1.5", (16, 16))
    first, moved = given["sample"], drawn(2, 4, 16, 16, seed=1).half()
    steps = [(first + 0.05 * step * moved, 500 - step) for step in range(3)] + [(moved, 900)]
    asked = [{**given, "sample": image, "timestep": at} for image, at in steps]
    with both(unet, group, stale=True):
        made = [unet(**each).sample for each in asked]
    return [error(got, unet(**each).sample) for got, each in zip(made, asked, strict=True)]


def _lora() -> Any:
    import peft

    return peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, target_modules=list(PARTS))


def _with_lora(group: Group) -> list[float]:
    torch.manual_seed(1)
    unet = unet_of("SD 1.5")
    unet.add_adapter(_lora(), "one")
    unet.half().eval().requires_grad_(False)
    return _apart(unet, group, given_to("SD 1.5", (16, 16)))


def _with_images(group: Group) -> tuple[list[float], bool]:
    """With an IP-Adapter; and whether a call with a mask of it is one rank's."""
    from tests.hosts.test_diffusers_adapters import load_adapters

    unet = models.diffusers_unet("SD 1.5")
    load_adapters(unet)
    unet.half()
    given = models.in_dtype(models.diffusers_inputs("SD 1.5", 2, 16, 16), torch.float16)
    given["added_cond_kwargs"] = {"image_embeds": [drawn(2, 1, 24).half()]}
    apart = _apart(unet, group, given)
    given["cross_attention_kwargs"] = {"ip_adapter_masks": [drawn(1, 1, 32, 32).gt(0).half()]}
    alone = unet(**given).sample
    with patch_parallel(unet, group) as parallel:
        same = torch.equal(unet(**given).sample, alone)
    return apart, same and parallel.whole_calls == 1


def _whole(group: Group, change: Callable[[Any], None]) -> bool:
    """Whether a call after `change` is one rank's."""
    torch.manual_seed(1)
    unet, given = unet_of("SD 1.5"), given_to("SD 1.5", (16, 16))
    with patch_parallel(unet, group) as parallel:
        change(unet)
        unet.half().requires_grad_(False)
        made = unet(**given).sample
    return torch.equal(made, unet(**given).sample) and parallel.whole_calls == 1


def _first_again(unet: Any) -> None:
    """Somebody puts back a forward that he has kept."""
    unet.conv_in.forward = type(unet.conv_in).forward.__get__(unet.conv_in)


def failing(rank: int) -> None:
    """One rank fails amid a block of ours, while the others wait for its rows."""
    unet, given = unet_of("SD 1.5"), given_to("SD 1.5", (24, 16))
    with joined(limit_s=SHORT_S) as group, torch.no_grad(), both(unet, group):
        fails = patch.object(compute, "downsample", side_effect=RuntimeError("a kernel failed"))
        with fails if group.rank == rank else nullcontext():
            unet(**given)
