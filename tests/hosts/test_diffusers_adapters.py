"""What diffusers changes in a UNet's attention: masks of the prompt, fused projections,
IP-Adapters. What is ours with it, how exact, and that each change counts in the next call.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.graph_tape import Desk, recording_cpu
from tests.unet import unet_models as models

pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers.loaders import IPAdapterMixin
from diffusers.models import attention_processor as theirs_of

from lib_rocm_sd.hosts.diffusers import pipeline as host
from lib_rocm_sd.unet import compute
from tests.hosts.test_diffusers_unet import Pipeline

BF16 = torch.bfloat16
PROGRAMS = 19
"""The UNet's: 8 residual blocks, 4 transformers, 2 resamplings, 3 first and last layers, and what
makes the time embeddings, and the prompt's keys and values, for all of them.
"""


@pytest.fixture(scope="module")
def shared() -> Any:
    return models.diffusers_unet("SD 1.5").to(BF16)


@pytest.fixture
def unet(shared: Any) -> Any:
    return copy.deepcopy(shared)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    yield recording_cpu(monkeypatch, baked=True)


def plain(seed: int = 0) -> Any:
    """What a step is given."""
    return models.in_dtype(models.diffusers_inputs("SD 1.5", seed=seed), BF16)


def masked(lengths: tuple[int, int], seed: int = 0) -> Any:
    """The same with a mask of both prompts by their lengths."""
    mask = torch.arange(77) < torch.tensor(lengths)[:, None]
    return {**plain(seed), "encoder_attention_mask": mask}


def assert_all_ours(patch: Any) -> None:
    rows = patch.unet.rows()
    assert len(rows) == 6
    assert [str(row) for row in rows if row.ours < row.total or row.partly] == []


def assert_as_exact(unet: Any, given: Any, theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """Ours errs at most twice as much as torch's."""
    exact = exact_of(unet, given)
    assert models.errors(ours, exact)[1] < 2 * models.errors(theirs, exact)[1]


def test_a_mask_of_the_prompt_is_ours_and_recorded(unet: Any, desk: Desk) -> None:
    given = [masked((77, 9)), masked((1, 40)), masked((77, 77), seed=1)]
    theirs = [models.step(unet, each) for each in given]
    with host.patched(Pipeline(unet), unet=True) as patch:
        models.step(unet, given[0])
        ours = [models.step(unet, each).clone() for each in given]
        assert_all_ours(patch)
        assert (desk.recorded, desk.replayed) == (PROGRAMS, 3 * PROGRAMS)
    for each, made, expected in zip(given, ours, theirs, strict=True):
        assert_as_exact(unet, each, expected, made)
        assert torch.equal(models.step(unet, each), expected)


def test_a_mask_that_does_not_fit_is_the_hosts(unet: Any) -> None:
    """diffusers pads it by as many keys as there are, which then are too many."""
    given = masked((77, 9))
    given["encoder_attention_mask"] = given["encoder_attention_mask"][:, :60]
    with host.patched(Pipeline(unet), unet=True):
        with pytest.raises((RuntimeError, ValueError)):
            models.step(unet, given)
        assert models.step(unet, plain()).isfinite().all()


def test_prompts_with_and_without_a_mask_in_turn(unet: Any, desk: Desk) -> None:
    both = masked((77, 9)), plain()
    with host.patched(Pipeline(unet), unet=True):
        launched = [models.step(unet, each).clone() for each in both]
        for _ in range(3):
            for each, made in zip(both, launched, strict=True):
                assert torch.equal(models.step(unet, each), made)
    assert not torch.equal(*launched)
    assert desk.replayed > 2 * PROGRAMS


def test_fused_projections_are_ours_and_recorded(unet: Any, desk: Desk) -> None:
    given, before = plain(), models.step(unet, plain())
    with torch.no_grad():
        unet.fuse_qkv_projections()
        for name, layer in unet.named_modules():
            if name.endswith(("to_qkv", "to_kv")):
                layer.weight.mul_(1.5)  # so that it matters which layers are read
    theirs = models.step(unet, given)
    with host.patched(Pipeline(unet), unet=True) as patch:
        for _ in range(3):
            ours = models.step(unet, given).clone()
        assert_all_ours(patch)
        assert (desk.recorded, desk.replayed) == (PROGRAMS, 2 * PROGRAMS)
    assert_as_exact(unet, given, theirs, ours)
    assert models.errors(ours, before)[1] > 2 * models.errors(ours, theirs)[1]
    assert torch.equal(models.step(unet, given), theirs)


def test_projections_that_are_fused_and_no_more_count_at_once(unet: Any) -> None:
    """diffusers keeps the processors of before, which were ours: they are its own when ours end."""
    given = plain()
    theirs = models.step(unet, given)
    with host.patched(Pipeline(unet), unet=True) as patch:
        first = models.step(unet, given)
        with torch.no_grad():
            unet.fuse_qkv_projections()
        assert torch.equal(models.step(unet, given), first)
        assert_all_ours(patch)
        unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_qkv.weight.data.mul_(2)
        changed = models.step(unet, given)
        assert models.errors(changed, first)[1] > 0.01
        unet.unfuse_qkv_projections()
        assert torch.equal(models.step(unet, given), first)
        assert_all_ours(patch)
        unet.fuse_qkv_projections()
    unet.unfuse_qkv_projections()
    assert torch.equal(models.step(unet, given), theirs)


REGIONS = "ip_adapter_masks"
IMAGE, IMAGE_TOKENS = 24, 4
"""Values of a picture that an IP-Adapter is given, and the tokens that it makes of them."""


def load_adapters(unet: Any, count: int = 1, seed: int = 3) -> None:
    """As files of IP-Adapters are loaded, each with a projection of a picture to four tokens."""
    drawn = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn) * shape[-1] ** -0.5

    files, context = [], unet.config.cross_attention_dim
    crossing = [m for n, m in unet.named_modules() if n.endswith("attn2")]
    for _ in range(count):
        names = ["proj.weight", "proj.bias", "norm.weight", "norm.bias"]
        shapes = [
            (IMAGE_TOKENS * context, IMAGE),
            (IMAGE_TOKENS * context,),
            (context,),
            (context,),
        ]
        projection = {name: draw(*shape) for name, shape in zip(names, shapes, strict=True)}
        projection["norm.weight"] += 1
        keys = {
            f"{2 * number + 1}.to_{key}_ip.weight": draw(attn.to_q.out_features, context)
            for number, attn in enumerate(crossing)
            for key in ("k", "v")
        }
        files.append({"image_proj": projection, "ip_adapter": keys})
    unet._load_ip_adapter_weights(files)
    unet.eval().requires_grad_(False)


def with_images(*counts: int, seed: int = 0, **more: Any) -> Any:
    """What a step is given with so many pictures for each adapter."""
    images = [models.draw(2, count, IMAGE, seed=seed + count).to(BF16) for count in counts]
    return {**plain(seed), "added_cond_kwargs": {"image_embeds": images}, **more}


def set_scale(unet: Any, scale: Any) -> None:
    IPAdapterMixin.set_ip_adapter_scale(Pipeline(unet), scale)


@pytest.fixture
def images_unet(unet: Any) -> Any:
    """With one adapter."""
    load_adapters(unet)
    set_scale(unet, 0.8)
    return unet


def exact_of(unet: Any, given: Any) -> torch.Tensor:
    """In float64; lists of images, too."""
    wide = models.in_dtype(given, torch.float64)
    if "added_cond_kwargs" in given:
        images = given["added_cond_kwargs"]["image_embeds"]
        wide["added_cond_kwargs"] = {"image_embeds": [each.double() for each in images]}
    return models.step(copy.deepcopy(unet).double(), wide)


def test_an_ip_adapter_is_ours_and_recorded(images_unet: Any, desk: Desk) -> None:
    unet, given = images_unet, with_images(1)
    set_scale(unet, 0.0)
    without = models.step(unet, given)
    set_scale(unet, 0.8)
    theirs = models.step(unet, given)
    with host.patched(Pipeline(unet), unet=True) as patch:
        for _ in range(3):
            ours = models.step(unet, given).clone()
        assert_all_ours(patch)
        made_of_images = 1
        programs = PROGRAMS + made_of_images
        assert (desk.recorded, desk.replayed) == (programs, 2 * programs)
    assert_as_exact(unet, given, theirs, ours)
    assert models.errors(ours, without)[1] > 2 * models.errors(ours, theirs)[1]
    assert torch.equal(models.step(unet, given), theirs)


def test_each_change_of_an_ip_adapter_counts_at_once(unet: Any, desk: Desk) -> None:
    """A scale is baked into a recording: another one is launched, and recorded, anew."""
    given = with_images(1)

    def both(given: Any = given) -> torch.Tensor:
        """What ours makes of it, which is what diffusers makes."""
        patch_off = copy.deepcopy(unet)
        made = models.step(unet, given).clone()
        again = models.step(unet, given).clone()
        theirs = models.step(patch_off, given)
        assert torch.equal(made, again)
        assert models.errors(made, theirs)[1] < 0.02
        return made

    first = models.step(unet, plain())
    with host.patched(Pipeline(unet), unet=True) as patch:
        load_adapters(unet)
        set_scale(unet, 1.0)
        seen = [both()]
        for scale in (0.3, {"mid": 0.9, "up": {"block_1": [0.5, 0.0]}}):
            set_scale(unet, scale)
            seen.append(both())
        seen.append(both(with_images(1, seed=5)))
        layer = unet.mid_block.attentions[0].transformer_blocks[0].attn2.processor.to_v_ip[0]
        layer.weight.data.mul_(4)
        seen.append(both())
        load_adapters(unet, 2, seed=9)
        set_scale(unet, [0.5, 0.7])
        seen.append(both(with_images(1, 2)))
        assert_all_ours(patch)
        IPAdapterMixin.unload_ip_adapter(Pipeline(unet))
        last = models.step(unet, plain())
        assert_all_ours(patch)
    for one, other in itertools.combinations(seen, 2):
        assert models.errors(one, other)[1] > 1e-3
    assert models.errors(last, first)[1] < 0.02
    assert torch.equal(models.step(unet, plain()), first)


def test_blocks_that_count_no_image_have_no_keys_of_it_made_or_kept(
    images_unet: Any, desk: Desk
) -> None:
    """From the second step on: the first has them made before it has met all blocks."""
    unet, given = images_unet, with_images(1)
    crossing = [m for n, m in unet.named_modules() if n.endswith("attn2")]
    theirs_made = []
    with host.patched(Pipeline(unet), unet=True) as patch:
        taken: Any = patch.unet.takeover
        for counting in (crossing[:2], crossing[2:], crossing[1:]):
            for attn in crossing:
                attn.processor.scale = [0.8 if attn in counting else 0.0]
            for _ in range(3):
                made = models.step(unet, given).clone()
                (images,) = taken._prompts.more
                held = images._step
                assert held is None or held.ready is None, "kept after the last block that asks"
            theirs_made.append(made)
            layers = {attn.processor.to_k_ip[0] for attn in counting}
            assert layers in [{part.layers[0] for part in parts} for parts in images._sides]
        assert_all_ours(patch)
    for counting, made in zip((crossing[:2], crossing[2:], crossing[1:]), theirs_made, strict=True):
        for attn in crossing:
            attn.processor.scale = [0.8 if attn in counting else 0.0]
        assert models.errors(made, models.step(unet, given))[1] < 0.02


def regions(*counts: int, seed: int = 0) -> list[torch.Tensor]:
    """Masks (1, images, H, W) for each adapter, on the CPU, as diffusers' processor makes them."""
    drawn = [models.draw(1, count, 32, 32, seed=seed + count) for count in counts]
    return [(each > 0).float() for each in drawn]


def test_regions_of_images_are_ours_and_recorded(unet: Any, desk: Desk) -> None:
    load_adapters(unet, 2)
    set_scale(unet, [[0.4, 0.9], 0.6])
    masks = regions(2, 1)
    given = with_images(2, 1, cross_attention_kwargs={REGIONS: masks})
    theirs = models.step(unet, given)
    with host.patched(Pipeline(unet), unet=True) as patch:
        for _ in range(3):
            ours = models.step(unet, given).clone()
        assert_all_ours(patch)
        assert (desk.recorded, desk.replayed) == (PROGRAMS + 2, 2 * (PROGRAMS + 2))
        masks[0].data.copy_(1 - masks[0])  # which torch does not count
        other = models.step(unet, given).clone()
        changed = models.step(copy.deepcopy(unet), given)
    assert_as_exact(unet, given, changed, other)
    assert models.errors(ours, theirs)[1] < 0.02
    assert models.errors(other, ours)[1] > 2 * models.errors(other, changed)[1]
    masks[0].copy_(1 - masks[0])
    assert torch.equal(models.step(unet, given), theirs)


def test_a_region_is_weighed_anew_for_a_block_that_counted_no_image_before(unet: Any) -> None:
    """The first and the last blocks count the image in one step each, and the mask is written to
    between these, which torch does not count.
    """
    load_adapters(unet)
    masks = regions(1)
    given = with_images(1, cross_attention_kwargs={REGIONS: masks})
    with host.patched(Pipeline(unet), unet=True):
        set_scale(unet, {"down": 1.0, "mid": 0.0, "up": 0.0})
        models.step(unet, given)
        masks[0].data.copy_(1 - masks[0])
        set_scale(unet, {"down": 0.0, "mid": 0.0, "up": 1.0})
        ours = models.step(unet, given)
    assert models.errors(ours, models.step(unet, given))[1] < 0.02


def test_a_route_has_as_many_keys_with_regions_and_without(
    images_unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two pictures in a region, then both everywhere: a kernel's arguments are packed once
    for a route.
    """
    keys: dict[tuple[str, torch.Size], set[int]] = {}
    attention = compute.attention

    def noted(calls: Any, where: str, q: Any, k: Any, *others: Any) -> torch.Tensor:
        keys.setdefault((where, q.shape), set()).add(k.shape[1])
        return attention(calls, where, q, k, *others)

    monkeypatch.setattr(compute, "attention", noted)
    with host.patched(Pipeline(images_unet), unet=True) as patch:
        set_scale(images_unet, [[1.0, 0.0]])
        models.step(images_unet, with_images(2, cross_attention_kwargs={REGIONS: regions(2)}))
        set_scale(images_unet, 0.7)
        models.step(images_unet, with_images(2))
        assert_all_ours(patch)
    crossed = {number for numbers in keys.values() for number in numbers}
    assert {IMAGE_TOKENS, 2 * IMAGE_TOKENS} <= crossed
    assert all(len(numbers) == 1 for numbers in keys.values()), keys


def test_regions_are_weighed_once_a_step_for_blocks_of_a_size(
    images_unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    weigh = theirs_of.IPAdapterMaskProcessor.downsample

    def counted(mask: Any, batch: int, tokens: int, width: int) -> Any:
        sizes.append(tokens)
        return weigh(mask, batch, tokens, width)

    monkeypatch.setattr(theirs_of.IPAdapterMaskProcessor, "downsample", staticmethod(counted))
    given = with_images(1, cross_attention_kwargs={REGIONS: regions(1)})
    models.step(images_unet, given)
    assert sorted(sizes) == [16, 64, 64, 64]
    sizes.clear()
    with host.patched(Pipeline(images_unet), unet=True):
        for _ in range(2):
            models.step(images_unet, given)
            assert sorted(sizes) == [16, 64]
            sizes.clear()


def test_a_mask_of_the_prompt_beside_an_image(images_unet: Any) -> None:
    given = {**with_images(3), "encoder_attention_mask": masked((20, 9))["encoder_attention_mask"]}
    theirs = models.step(images_unet, given)
    with host.patched(Pipeline(images_unet), unet=True) as patch:
        ours = models.step(images_unet, given)
        assert_all_ours(patch)
    assert_as_exact(images_unet, given, theirs, ours)


OTHERWISE: dict[str, Any] = {
    "no images": plain(),
    "scales without regions": with_images(1),
    "regions of too few images": with_images(1, cross_attention_kwargs={REGIONS: regions(2)}),
    "regions as one tensor": with_images(1, cross_attention_kwargs={REGIONS: regions(1)[0]}),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_not_as_an_ip_adapter_has_it_is_diffusers(name: str, images_unet: Any) -> None:
    """What it makes of it, or its own error."""
    unet, given = images_unet, OTHERWISE[name]
    if name == "scales without regions":
        set_scale(unet, [[0.5, 0.5]])

    def made() -> Any:
        try:
            return models.step(unet, given)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            return type(error), str(error)

    theirs = made()
    with host.patched(Pipeline(unet), unet=True):
        ours = made()
    if isinstance(theirs, torch.Tensor):
        assert models.errors(ours, theirs)[1] < 0.02
    else:
        assert ours == theirs


def test_an_ip_adapter_of_another_class_is_called(images_unet: Any) -> None:
    """As extensions derive theirs, with more in them."""

    class More(theirs_of.IPAdapterAttnProcessor2_0):  # type: ignore[misc, name-defined]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 2

    attn = images_unet.mid_block.attentions[0].transformer_blocks[0].attn2
    attn.processor.__class__ = More
    theirs = models.step(images_unet, with_images(1))
    with host.patched(Pipeline(images_unet), unet=True) as patch:
        ours = models.step(images_unet, with_images(1))
        row = next(row for row in patch.unet.rows() if row.kind == "transformer block")
    assert "attn2.processor is a More" in next(iter(row.partly))
    assert models.errors(ours, theirs)[1] < 0.02
