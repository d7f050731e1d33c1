"""Diffusers' UNet in a pipeline: what is taken over, what it gives, that it leaves no trace."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from tests.unet import unet_models as models
from tests.vae.vae_models import needs_half

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

from lib_rocm_sd.commands import little_model
from lib_rocm_sd.hosts.diffusers import pipeline as host
from lib_rocm_sd.hosts.diffusers import unet as unet_host
from lib_rocm_sd.ops.layer_norm.op import LAYER_NORM
from lib_rocm_sd.unet.takeover import take_over

BF16 = torch.bfloat16


class Pipeline:
    """All that `patched` asks of a pipeline."""

    def __init__(self, unet: Any) -> None:
        self.unet = unet


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(models.diffusers_unet("SDXL").to(BF16))


@pytest.fixture
def inputs() -> dict[str, Any]:
    given: dict[str, Any] = models.in_dtype(models.diffusers_inputs("SDXL"), BF16)
    return given


def test_a_unet_of_torchscript_is_left_alone() -> None:
    """torch sets no hooks on one."""
    unet = torch.jit.script(nn.Identity())
    with host.patched(Pipeline(unet), unet=True) as patch:
        assert patch.unet.takeover is None and patch.unet.rows() == []
        assert torch.equal(unet(torch.ones(3)), torch.ones(3))


def test_the_blocks_are_ours_inside_the_with(pipeline: Pipeline, inputs: Any) -> None:
    theirs, report = models.step(pipeline.unet, inputs), Report()
    with host.patched(pipeline, unet=True, session=Session(report=report)) as patch:
        ours = models.step(pipeline.unet, inputs)
        rows = patch.unet.rows()
        assert {row.kind for row in rows} == {
            "residual block",
            "transformer",
            "transformer block",
            "upsampling",
            "downsampling",
            "first and last layers",
        }
        assert all(row.ours == row.total and not row.partly for row in rows)
    assert models.errors(ours, theirs)[0] < 0.05
    assert not torch.equal(ours, theirs)
    assert not report.snapshot()["events"]
    assert {row["part"] for row in report.snapshot()["rows"]} == {"UNet"}
    assert patch.unet.rows() == []
    assert torch.equal(models.step(pipeline.unet, inputs), theirs)
    assert not any("forward" in vars(module) for module in pipeline.unet.modules())


@needs_half
def test_whole_pictures_of_the_little_model_agree() -> None:
    """In fp16; their greatest difference is that of 3 of 255."""
    pytest.importorskip("transformers")
    little = little_model.load(little_model.MODEL, torch.float16)

    def picture() -> Any:
        return little(
            "a red circle left of a blue square",
            num_inference_steps=2,
            guidance_scale=little_model.GUIDANCE,
            latents=little_model.latents(little, seed=0)[..., :18, :14],
            height=144,
            width=112,
            output_type="pt",
        ).images

    theirs = picture()
    with host.patched(little, vae=False, unet=True) as patch:
        ours = picture()
        assert all(row.ours == row.total and not row.partly for row in patch.unet.rows())
    assert not torch.equal(ours, theirs)
    assert float((ours.float() - theirs.float()).abs().max()) <= 3 / 255
    assert torch.equal(picture(), theirs)


def test_off_unless_it_is_asked_for(pipeline: Pipeline) -> None:
    with host.patched(pipeline) as patch:
        assert patch.unet.takeover is None
        assert not patch.unet.rows()
        assert not any("forward" in vars(module) for module in pipeline.unet.modules())


def test_float32_is_left_alone_and_said(inputs: Any) -> None:
    unet, report = models.diffusers_unet("SDXL"), Report()
    with host.patched(Pipeline(unet), unet=True, session=Session(report=report)):
        assert not any("forward" in vars(module) for module in unet.modules())
    assert "its weights are float32" in "\n".join(report.snapshot()["events"])


def test_inside_another_with(pipeline: Pipeline, inputs: Any) -> None:
    with host.patched(pipeline, unet=True):
        ours = models.step(pipeline.unet, inputs)
        with host.patched(pipeline, unet=True) as inner:
            assert all(row.ours == row.total for row in inner.unet.rows())
            assert torch.equal(models.step(pipeline.unet, inputs), ours)
        assert torch.equal(models.step(pipeline.unet, inputs), ours)


def test_a_processor_of_another_kind_is_called(pipeline: Pipeline, inputs: Any) -> None:
    """As IP-Adapter sets one on attn2."""
    calls = []

    class Adapter:
        def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return torch.zeros_like(hidden_states)

    attentions = [m for n, m in pipeline.unet.named_modules() if n.endswith("attn2")]
    for attn in attentions:
        attn.set_processor(Adapter())
    theirs = models.step(pipeline.unet, inputs)
    calls.clear()
    with host.patched(pipeline, unet=True) as patch:
        ours = models.step(pipeline.unet, inputs)
        row = next(row for row in patch.unet.rows() if row.kind == "transformer block")
    assert models.errors(ours, theirs)[0] < 0.05
    assert len(calls) == len(attentions)
    assert row.ours == row.total
    assert sum(row.partly.values()) == len(attentions)
    assert "processor is a Adapter" in next(iter(row.partly))


def test_masks_and_more_arguments_reach_the_hosts_attention(
    pipeline: Pipeline, inputs: Any
) -> None:
    mask = torch.ones(2, 77)
    mask[:, 40:] = 0
    given = {**inputs, "encoder_attention_mask": mask}
    theirs, plain = models.step(pipeline.unet, given), models.step(pipeline.unet, inputs)
    with host.patched(pipeline, unet=True):
        ours = models.step(pipeline.unet, given)
    assert models.errors(ours, theirs)[0] < models.errors(ours, plain)[0] / 2
    assert models.errors(ours, theirs)[0] < 0.05


def test_a_layer_of_another_class_is_called_within_its_attention(
    pipeline: Pipeline, inputs: Any
) -> None:
    """As adapters of PEFT take a Linear's place."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Any) -> Any:
            return 2 * self.base(x)

    block = next(m for n, m in pipeline.unet.named_modules() if n.endswith("blocks.0.attn1"))
    with host.patched(pipeline, unet=True) as patch:
        models.step(pipeline.unet, inputs)
        block.to_q = Adapted(block.to_q)
        ours = models.step(pipeline.unet, inputs)
        row = next(row for row in patch.unet.rows() if row.kind == "transformer block")
    assert row.partly == {"attn1.to_q is a Adapted, not a Linear": 1}
    assert models.errors(ours, models.step(pipeline.unet, inputs))[0] < 0.05


@pytest.mark.parametrize("patient", [False, True])
def test_only_a_patient_session_waits_until_blocks_may_be_ours(
    patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = True

    def known(device: torch.device, op: Any) -> list[str]:
        return ["is being tried" if waiting else "is wrong"]

    def usable(device: torch.device, op: Any, session: Session) -> list[str]:
        assert op is LAYER_NORM and session.patient
        return []

    engine = SimpleNamespace(known=known, waits=lambda device, op: waiting, usable=usable)
    monkeypatch.setattr(unet_host, "engine", engine)
    session = Session().patiently() if patient else Session()
    layers = [nn.Linear(2, 2, device="meta")]
    ready = unet_host.DiffusersHook(session, nn.Module()).ready(layers)
    assert ready == ("" if patient else "is being tried")
    waiting = False
    assert unet_host.DiffusersHook(session, nn.Module()).ready(layers) == "is wrong"


def test_a_unet_whose_weights_are_brought_by_groups_is_diffusers(pipeline: Any) -> None:
    """What the first block makes for all others would read weights that are still on their way."""
    hooks = pytest.importorskip("diffusers.hooks", reason="this diffusers has no hooks of models")
    if not hasattr(hooks, "apply_group_offloading"):
        pytest.skip("this diffusers has no group offloading")
    cpu, unet = torch.device("cpu"), pipeline.unet
    hooks.apply_group_offloading(
        unet,
        onload_device=cpu,
        offload_device=cpu,
        offload_type="block_level",
        num_blocks_per_group=1,
    )
    hook = unet_host.DiffusersHook(Session.of("Auto"), unet)
    assert "group offloading" in hook.ready([unet.conv_in])
    for name in list(unet._diffusers_hook.hooks):
        unet._diffusers_hook.remove_hook(name)
    assert not hook.ready([unet.conv_in])


@pytest.mark.parametrize("kernel", ["fir", "sde_vp"])
def test_a_residual_block_that_samples_otherwise_is_diffusers(kernel: str) -> None:
    from diffusers.models.resnet import ResnetBlock2D

    block = ResnetBlock2D(in_channels=32, temb_channels=16, groups=8, up=True, kernel=kernel)
    taken = take_over(nn.Sequential(block.to(BF16).eval()))
    assert "upsample is missing" in str(taken.report()[0])
    taken.give_back()


@pytest.fixture(scope="module")
def controlled() -> Pipeline:
    """A UNet and two ControlNets."""
    from diffusers.models.controlnets import ControlNetModel, MultiControlNetModel

    keys = ("block_out_channels", "down_block_types", "layers_per_block", "cross_attention_dim")
    given: dict[str, Any] = {key: models.SMALL[key] for key in (*keys, "norm_num_groups")}
    given |= {"attention_head_dim": 4, "conditioning_embedding_out_channels": (16, 16, 32, 32)}
    nets = [models.fill(ControlNetModel(**given), seed).to(BF16) for seed in (1, 2)]
    made = Pipeline(models.diffusers_unet().to(BF16))
    made.controlnet = MultiControlNetModel(nets)  # type: ignore[attr-defined]
    return made


def controlled_step(pipeline: Any, dtype: torch.dtype = BF16) -> torch.Tensor:
    """As diffusers' pipelines make one."""
    given = models.in_dtype(models.diffusers_inputs(), dtype)
    images = [models.draw(2, 3, 64, 64, seed=seed).to(dtype) for seed in (5, 6)]
    with torch.no_grad():
        down, mid = pipeline.controlnet(
            **given, controlnet_cond=images, conditioning_scale=[0.7, 0.4], return_dict=False
        )
    added = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    return models.step(pipeline.unet, {**given, **added})


def test_the_blocks_of_controlnets_are_ours_too(controlled: Pipeline) -> None:
    nets = controlled.controlnet.nets  # type: ignore[attr-defined]
    theirs = controlled_step(controlled)
    with host.patched(controlled, unet=True) as patch:
        for _ in range(2):  # the first call of a block lays its weights
            ours = controlled_step(controlled)
        rows = [row for each in patch.controlnets for row in each.rows()]
        assert len(patch.controlnets) == len(nets)
        assert all(row.ours == row.total and not row.partly for row in rows)
        # of each: the first convolution, and those of five results
        assert [row.total for row in rows if row.kind == "first and last layers"] == [6, 6]
    wide = copy.deepcopy(controlled)
    wide.unet.float(), wide.controlnet.float()  # type: ignore[attr-defined]
    exact = controlled_step(wide, torch.float32)
    assert not torch.equal(ours, theirs)
    assert models.errors(ours, exact)[1] <= 1.2 * models.errors(theirs, exact)[1]
    assert not any("forward" in vars(module) for net in nets for module in net.modules())
    assert torch.equal(controlled_step(controlled), theirs)


def test_a_layer_of_a_controlnets_result_that_changes_is_called(controlled: Pipeline) -> None:
    """As an extension may put a scale of its own there."""
    net = controlled.controlnet.nets[0]  # type: ignore[attr-defined]
    with host.patched(controlled, unet=True) as patch:
        controlled_step(controlled)
        net.controlnet_mid_block.forward = torch.zeros_like
        ours = controlled_step(controlled)
        last = next(row for row in patch.controlnets[0].rows() if row.kind.startswith("first"))
        del net.controlnet_mid_block.forward
    assert last.ours == last.total - 1
    assert models.errors(ours, controlled_step(controlled))[0] > 0.05


@pytest.fixture(scope="module")
def kandinsky() -> Pipeline:
    return Pipeline(models.diffusers_unet("Kandinsky").to(BF16))


def test_attention_of_kandinskys_is_ours_where_it_may_be(kandinsky: Pipeline) -> None:
    """A mask, as its prior's prompts have, and another processor are diffusers'."""
    from diffusers.models.attention_processor import AttnAddedKVProcessor

    def shown(patch: Any) -> Any:
        return next(row for row in patch.unet.rows() if row.kind == "image attention")

    given = models.in_dtype(models.diffusers_inputs("Kandinsky"), BF16)
    mask = torch.ones(2, 77)
    mask[:, 40:] = 0
    masked = {**given, "encoder_attention_mask": mask.bool()}
    theirs, apart = (models.step(kandinsky.unet, each) for each in (given, masked))
    attention = kandinsky.unet.mid_block.attentions[0]
    with host.patched(kandinsky, unet=True) as patch:
        for _ in range(2):
            ours = models.step(kandinsky.unet, given)
        assert (shown(patch).ours, shown(patch).left) == (shown(patch).total, {})
        assert models.errors(ours, theirs)[0] < 0.05 and not torch.equal(ours, theirs)
        assert models.errors(models.step(kandinsky.unet, masked), apart)[0] < 0.05
        before, attention.processor = attention.processor, AttnAddedKVProcessor()
        assert models.errors(models.step(kandinsky.unet, given), theirs)[0] < 0.05
        assert shown(patch).left == {"its processor is a AttnAddedKVProcessor": 1}
        attention.processor = before
    assert models.errors(apart, theirs)[0] > 0.05
    assert torch.equal(models.step(kandinsky.unet, given), theirs)
    assert not any("forward" in vars(module) for module in kandinsky.unet.modules())


def test_motion_modules_of_animatediff_are_ours() -> None:
    """Attention over frames, in blocks that add where each frame is."""
    motion = getattr(diffusers, "UNetMotionModel", None)
    if motion is None:
        pytest.skip("this diffusers has no motion modules")
    kinds = {
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
    }
    given: dict[str, Any] = {**models.SMALL, **kinds, "num_attention_heads": 4}
    del given["attention_head_dim"]
    heads = {"motion_num_attention_heads": 4, "motion_max_seq_length": 8}
    unet: Any = models.fill(motion(**given, **heads)).to(BF16)
    inputs = {
        "sample": models.draw(1, 4, 3, 8, 8),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": models.draw(3, 77, models.KEYS_DIM, seed=2),
    }
    theirs = models.step(unet, models.in_dtype(inputs, BF16))
    exact = models.step(copy.deepcopy(unet).float(), inputs)
    with host.patched(Pipeline(unet), unet=True) as patch:
        for _ in range(2):
            ours = models.step(unet, models.in_dtype(inputs, BF16))
        assert all(row.ours == row.total and not row.partly for row in patch.unet.rows())
        block = unet.down_blocks[0].motion_modules[0].transformer_blocks[0]
        block.pos_embed.pe.mul_(2)
        changed = models.step(unet, models.in_dtype(inputs, BF16))
    assert models.errors(ours, exact)[1] <= 1.2 * models.errors(theirs, exact)[1]
    assert models.errors(changed, models.step(unet, models.in_dtype(inputs, BF16)))[0] < 0.05
    assert not torch.equal(changed, ours)
