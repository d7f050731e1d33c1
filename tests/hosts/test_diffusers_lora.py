"""PEFT's adapters around a UNet's layers, of diffusers and PEFT themselves: what is ours with them,
how exact it is, and that each change counts in the next call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import compute, weights
from lib_rocm_sd.unet.merged import Merged, MergedLayers
from tests.calls import calls_of
from tests.graph_tape import recording_cpu
from tests.unet import unet_models as models
from tests.vae.vae_models import needs_half

pytest.importorskip("diffusers", reason="diffusers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from lib_rocm_sd.commands import little_model
from lib_rocm_sd.hosts.diffusers import pipeline as host
from tests.hosts.test_diffusers_unet import Pipeline

BF16 = torch.bfloat16
LAYERS = (
    *("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
    *("conv1", "conv2", "conv_shortcut", "time_emb_proj", "conv", "conv_in", "conv_out"),
)


def config(rank: int = 4, **options: Any) -> Any:
    options = {"target_modules": list(LAYERS), "lora_alpha": 2 * rank, **options}
    return peft.LoraConfig(r=rank, init_lora_weights=False, **options)


def adapted(dtype: torch.dtype = BF16, **options: Any) -> Any:
    """A UNet with one adapter, "one", of all layers that a block has."""
    torch.manual_seed(1)
    unet = models.diffusers_unet("SD 1.5").to(dtype)
    unet.add_adapter(config(**options), "one")
    return unet.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def shared() -> Any:
    """With two adapters of different ranks, "one" active: copied by who changes it."""
    unet = adapted()
    unet.add_adapter(config(rank=7), "two")
    unet.set_adapters("one")
    return unet.eval().requires_grad_(False)


@pytest.fixture
def unet(shared: Any) -> Any:
    return copy.deepcopy(shared)


@pytest.fixture(scope="module")
def inputs() -> Any:
    return models.in_dtype(models.diffusers_inputs("SD 1.5"), BF16)


def values_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pause between two steps, and without one amid a step."""
    monkeypatch.setattr(weights, "PAUSE_S", math.inf)
    monkeypatch.setattr(weights, "LOOK_STEPS", 1)


def calls_of_now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each look at adapters is of, from now on."""
    looked: list[int] = []
    now = MergedLayers._now

    def noted(self: MergedLayers) -> Any:
        looked.append(len(self.layers))
        return now(self)

    monkeypatch.setattr(MergedLayers, "_now", noted)
    return looked


def assert_all_ours(patch: Any) -> None:
    rows = patch.unet.rows()
    assert len(rows) == 6
    assert [str(row) for row in rows if row.ours < row.total or row.partly] == []


def copies(unet: Any, patch: Any) -> list[Any]:
    stand_ins = patch.unet.takeover.stand_ins
    return [leaf for each in stand_ins for leaf in each.reading.leaves if isinstance(leaf, Merged)]


def test_all_blocks_are_ours_and_nothing_remains(unet: Any, inputs: Any) -> None:
    theirs = models.step(unet, inputs)
    before = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    with host.patched(Pipeline(unet), unet=True) as patch:
        ours = models.step(unet, inputs)
        assert_all_ours(patch)
        layers = [m for m in unet.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
        merged = copies(unet, patch)
        assert len(merged) == len(layers) > 60
        assert {tuple(m.base().weight.shape[2:]) for m in merged} == {(), (1, 1), (3, 3)}
        taken: Any = patch.unet.takeover
        factors = [a.weight for m in merged for adapter in m.adapters for a in adapter.modules()]
        held = sum(each.nbytes for each in (*factors, *(m.weight for m in merged)))
        assert taken.extra_bytes >= held == sum(m.copy_bytes for m in merged)
        for name, tensor in unet.state_dict().items():
            assert torch.equal(tensor, before[name]), name
    assert models.errors(ours, theirs)[1] < 0.02
    assert not torch.equal(ours, theirs)
    assert torch.equal(models.step(unet, inputs), theirs)
    assert not any("forward" in vars(module) for module in unet.modules())


def test_a_step_errs_at_most_twice_as_much_as_by_torch(unet: Any) -> None:
    given = [models.in_dtype(models.diffusers_inputs("SD 1.5", seed=i), BF16) for i in range(4)]
    every = models.batched(given)
    exact = models.step(copy.deepcopy(unet).double(), models.in_dtype(every, torch.float64))
    theirs = models.step(unet, every)
    with host.patched(Pipeline(unet), unet=True) as patch:
        ours = models.step(unet, every)
        assert_all_ours(patch)
    assert models.errors(ours, exact)[1] < 2 * models.errors(theirs, exact)[1]


def _written(unet: Any) -> None:
    for module in unet.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.lora_B["one"].weight.mul_(-1)


def _other_data(unet: Any) -> None:
    for module in unet.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            up = module.lora_B["one"].weight
            up.data = -up.data


def _written_unseen(unet: Any) -> None:
    """As PEFT's hot swap: torch counts no change."""
    for module in unet.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.lora_B["one"].weight.data.mul_(-1)


def _base_written(unet: Any) -> None:
    for module in unet.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.base_layer.weight.mul_(-1)


def _added(unet: Any) -> None:
    torch.manual_seed(3)
    unet.add_adapter(config(rank=2), "three")
    unet.set_adapters(["one", "three"])
    unet.to(BF16).eval()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda u: u.set_adapters("one", 0.25),
    "scaled by 0": lambda u: u.set_adapters("one", 0.0),
    "the other adapter": lambda u: u.set_adapters("two"),
    "both": lambda u: u.set_adapters(["one", "two"], [0.5, 1.0]),
    "one more": _added,
    "disabled": lambda u: u.disable_adapters(),
    "fused": lambda u: u.fuse_lora(),
    "fused with a scale": lambda u: u.fuse_lora(lora_scale=0.3),
    "deleted": lambda u: u.delete_adapters("one"),
    "unloaded": lambda u: u.unload_lora(),
    "written in place": _written,
    "other data": _other_data,
    "written through data": _written_unseen,
    "base written in place": _base_written,
}
BACK: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda u: u.set_adapters("one", 1.0),
    "disabled": lambda u: u.enable_adapters(),
    "fused": lambda u: u.unfuse_lora(),
}
ALMOST_ALIKE = {"fused"}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_change_counts_in_the_next_call(
    unet: Any, inputs: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values_in_each_step(monkeypatch)
    with host.patched(Pipeline(unet), unet=True) as patch:
        first = models.step(unet, inputs)
        CHANGES[name](unet)
        ours = models.step(unet, inputs)
        assert_all_ours(patch) if name != "unloaded" else None
        back = BACK.get(name)
        if back is not None:
            back(unet)
            again = models.step(unet, inputs)
            assert models.errors(again, first)[1] < (0.02 if name == "fused" else 1e-6)
            CHANGES[name](unet)
    theirs = models.step(unet, inputs)
    assert models.errors(ours, theirs)[1] < 0.02
    assert name in ALMOST_ALIKE or models.errors(first, theirs)[1] > 0.04


@torch.no_grad()
def test_a_block_that_computed_no_step_before_reads_what_was_written_since(
    inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the call of the model tells that it is in another step: each block is the host's
    in one of two steps, and the weights, a bias and an adapter are written to unseen between them.
    """
    values_in_each_step(monkeypatch)
    unet = adapted(target_modules=["to_q", "conv1"])
    last = [m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock"][-1]
    blocks = [m for m in unet.modules() if hasattr(m, "attn2") or hasattr(m, "time_emb_proj")]
    resnet = unet.up_blocks[-1].resnets[-1]

    def late(are_ours: bool) -> None:
        for each in blocks:
            each.training = (each in (last, resnet)) is not are_ours

    with host.patched(Pipeline(unet), unet=True) as patch:
        models.step(unet, inputs)
        for are_ours in (False, True):
            late(are_ours)
            ours = models.step(unet, inputs)
            if not are_ours:
                last.attn2.to_v.weight.data.mul_(-9)
                resnet.conv2.bias.data.add_(3)
                for up in (last.attn1.to_q.lora_B, resnet.conv1.lora_B):
                    up["one"].weight.data.mul_(-4)
        assert not any(row.left for row in patch.unet.rows())
    theirs = models.step(unet, inputs)
    assert models.errors(ours, theirs)[1] < 0.02


@torch.no_grad()
def test_adapters_are_looked_at_once_in_a_call_of_the_model_and_else_before_each_block(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = calls_of_now(monkeypatch)
    monkeypatch.setattr(weights, "PAUSE_S", math.inf)
    resnet = unet.up_blocks[-1].resnets[-1]
    x = models.draw(2, resnet.in_channels, 4, 4).to(BF16)
    emb = models.draw(2, resnet.time_emb_proj.in_features).to(BF16)
    with host.patched(Pipeline(unet), unet=True) as patch:
        models.step(unet, inputs)
        for is_theirs in (False, False, True):
            resnet.training = is_theirs
            looked.clear()
            models.step(unet, inputs)
            assert looked[0] == len(copies(unet, patch))
            assert (len(looked) > 1) is is_theirs  # whose code may write to those of later blocks
        looked.clear()
        resnet.training = False
        resnet.conv1.lora_B["one"].weight.mul_(-1)
        ours = resnet(x, emb)
        assert looked
    assert models.errors(ours, resnet(x, emb))[1] < 0.02


@torch.no_grad()
def test_a_processor_of_diffusers_in_a_block_that_is_not_ours_costs_no_looks(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PAUSE_S", math.inf)
    _leave_attention(unet)
    with host.patched(Pipeline(unet), unet=True) as patch:
        assert patch.replaced
        models.step(unet, inputs)
        looked = calls_of_now(monkeypatch)
        models.step(unet, inputs)
        assert len(looked) == 1
        kind = unet.mid_block.attentions[0].transformer_blocks[0].attn1.processor.__class__
        call = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda *given, **more: call(*given, **more))
        models.step(unet, inputs)
        assert len(looked) > 2


@torch.no_grad()
def test_what_a_hook_within_the_model_writes_counts_in_that_call(unet: Any, inputs: Any) -> None:
    with host.patched(Pipeline(unet), unet=True):
        for _ in range(3):
            models.step(unet, inputs)
        hook = unet.mid_block.register_forward_hook(lambda *_: _written(unet.up_blocks))
        ours = models.step(unet, inputs)
        hook.remove()
    _written(unet.up_blocks)
    unet.mid_block.register_forward_hook(lambda *_: _written(unet.up_blocks))
    assert models.errors(ours, models.step(unet, inputs))[1] < 0.02


class _Scales(torch.nn.Module):
    """Has adapters of `layers` count otherwise amid each call of the model."""

    def __init__(self, theirs: Any, layers: Any) -> None:
        super().__init__()
        self.theirs, self.layers = theirs, [layers]

    @torch.no_grad()
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for each in self.layers[0].modules():
            if isinstance(each, peft.tuners.lora.LoraLayer):
                each.scaling["one"] = -each.scaling["one"]
        return self.theirs(x, *args, **kwargs)


def _as_processor(unet: Any, layers: Any) -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0

    class Processor(AttnProcessor2_0):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            scales(args[1])
            return super().__call__(*args, **kwargs)

    scales = _Scales(lambda _: None, layers)
    unet.mid_block.attentions[0].transformer_blocks[0].attn2.set_processor(Processor())


def _as_forward(unet: Any, layers: Any) -> None:
    block = unet.mid_block
    block.forward = _Scales(block.forward, layers).forward


def _as_class(unet: Any, layers: Any) -> None:
    unet.mid_block = _Scales(unet.mid_block, layers)
    unet.mid_block.has_cross_attention = True


def _as_block(unet: Any, layers: Any) -> None:
    unet.mid_block.resnets[0] = _Scales(unet.mid_block.resnets[0], layers)


def _as_model(unet: Any, layers: Any) -> None:
    resnet, scales = unet.up_blocks[-1].resnets[-1], _Scales(lambda _: None, layers)
    x = models.draw(2, resnet.in_channels, 4, 4).to(BF16)
    emb = models.draw(2, resnet.time_emb_proj.in_features).to(BF16)

    class Own(type(unet)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            resnet(x, emb)
            scales(None)
            return super().forward(*args, **kwargs)

    unet.__class__ = Own


def _leave_attention(unet: Any) -> None:
    for each in (unet.mid_block.attentions[0], unet.mid_block.attentions[0].transformer_blocks[0]):
        norm = each.norm if hasattr(each, "norm") else each.norm1
        norm.__class__ = type("Norm", (type(norm),), {})  # which is not read


def _as_processor_of_theirs(unet: Any, layers: Any) -> None:
    _leave_attention(unet)
    _as_processor(unet, layers)


@pytest.mark.parametrize(
    "where",
    [_as_processor, _as_processor_of_theirs, _as_forward, _as_class, _as_block, _as_model],
)
@torch.no_grad()
def test_scales_that_somebodys_code_sets_amid_a_call_count_in_that_call(
    unet: Any,
    inputs: Any,
    where: Callable[[Any, Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "PAUSE_S", math.inf)
    with host.patched(Pipeline(unet), unet=True) as patch:
        taken: Any = patch.unet.takeover
        for _ in range(3):
            models.step(unet, inputs)
        where(unet, unet.up_blocks)
        taken.take_over()
        ours = [models.step(unet, inputs) for _ in range(2)]
    theirs = [models.step(unet, inputs) for _ in range(2)]
    for one, other in zip(ours, theirs, strict=True):
        assert models.errors(one, other)[1] < 0.02
    assert models.errors(*ours)[1] > 0.04


@torch.no_grad()
def test_a_block_called_after_an_interrupted_call_has_the_scales_of_now(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PAUSE_S", 0.0)
    resnet = unet.up_blocks[-1].resnets[-1]
    x = models.draw(2, resnet.in_channels, 4, 4).to(BF16)
    emb = models.draw(2, resnet.time_emb_proj.in_features).to(BF16)
    first = resnet(x, emb)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with host.patched(Pipeline(unet), unet=True):
        models.step(unet, inputs)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(compute, "linear", interrupted)
            models.step(unet, inputs)
        unet.set_adapters("one", -3.0)
        ours = resnet(x, emb)
    theirs = resnet(x, emb)
    assert models.errors(ours, theirs)[1] < 0.02
    assert models.errors(first, theirs)[1] > 0.04


@torch.no_grad()
def test_a_bias_that_was_replaced_before_the_first_call_counts(unet: Any, inputs: Any) -> None:
    conv = unet.up_blocks[-1].resnets[-1].conv2.base_layer
    first = models.step(unet, inputs)
    with host.patched(Pipeline(unet), unet=True):
        conv.bias = torch.nn.Parameter(models.draw(len(conv.bias)).to(BF16), False)
        ours = models.step(unet, inputs)
    theirs = models.step(unet, inputs)
    assert models.errors(ours, theirs)[1] < 0.02
    assert models.errors(first, theirs)[1] > 0.04


@torch.no_grad()
def test_values_are_looked_at_after_a_pause_and_now_and_then(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not between two steps of a sampler, since it waits for the device."""
    looks: list[int] = []
    look = weights.look

    def looked(layers: Any) -> None:
        looks.append(len(layers))
        look(layers)

    monkeypatch.setattr(weights, "look", looked)
    with host.patched(Pipeline(unet), unet=True) as patch:
        models.step(unet, inputs)
        for pause_s, expected in ((math.inf, 1), (0.0, weights.LOOK_STEPS)):
            monkeypatch.setattr(weights, "PAUSE_S", pause_s)
            looks.clear()
            for _ in range(weights.LOOK_STEPS):
                models.step(unet, inputs)
            assert looks == [len(copies(unet, patch))] * expected


def test_a_step_looks_at_adapters_by_few_calls(
    inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a recorded step Python does little else."""
    recording_cpu(monkeypatch)
    monkeypatch.setattr(weights, "PAUSE_S", math.inf)
    counts = []
    for unet in (models.diffusers_unet("SD 1.5").to(BF16), adapted()):
        with host.patched(Pipeline(unet), unet=True):
            for _ in range(weights.LOOK_STEPS + 1):
                models.step(unet, inputs)
            step = partial(models.step, unet, inputs)
            counts.append(min(calls_of(step) for _ in range(3)))
    plain, with_adapters = counts
    assert plain < with_adapters < 1.03 * plain


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[Merged]:
    made: list[Merged] = []
    before = Merged.renew

    def renew(self: Merged) -> None:
        made.append(self)
        before(self)

    monkeypatch.setattr(Merged, "renew", renew)
    return made


def test_a_scale_of_each_call_makes_the_copies_once(
    unet: Any, inputs: Any, renewals: list[Merged]
) -> None:
    """diffusers multiplies the scales by it before each call, and divides them after it."""
    given = {**inputs, "cross_attention_kwargs": {"scale": 0.7}}
    theirs = models.step(unet, given)
    with host.patched(Pipeline(unet), unet=True) as patch:
        ours = models.step(unet, given)
        assert_all_ours(patch)
        first = len(renewals)
        assert first == len(copies(unet, patch))
        for _ in range(4):
            assert torch.equal(models.step(unet, given), ours)
        assert len(renewals) == first
        places = [each.weight.data_ptr() for each in copies(unet, patch)]
        whole = models.step(unet, inputs)
        assert len(renewals) == 2 * first
        assert [each.weight.data_ptr() for each in copies(unet, patch)] == places
    assert models.errors(ours, theirs)[1] < 0.02
    assert models.errors(whole, models.step(unet, inputs))[1] < 0.02


def test_copies_are_freed_with_their_adapters(unet: Any, inputs: Any) -> None:
    with host.patched(Pipeline(unet), unet=True) as patch:
        models.step(unet, inputs)
        taken: Any = patch.unet.takeover
        assert taken._weights._copied_bytes > 0
        unet.fuse_lora()
        for _ in range(2):
            models.step(unet, inputs)
        assert taken._weights._copied_bytes == 0
        assert_all_ours(patch)


def test_the_level_memory_leaves_them_to_the_host_and_says_so(unet: Any, inputs: Any) -> None:
    report = Report()
    theirs = models.step(unet, inputs)
    with host.patched(
        Pipeline(unet), unet=True, session=Session.of("Memory", report=report)
    ) as patch:
        assert torch.equal(models.step(unet, inputs), theirs)
        taken: Any = patch.unet.takeover
        assert taken._weights._copied_bytes == 0
        assert "take memory, and the level is Memory" in "\n".join(report.snapshot()["events"])
        unet.fuse_lora()
        fused = models.step(unet, inputs)
        assert_all_ours(patch)
    assert models.errors(fused, models.step(unet, inputs))[1] < 0.02


def test_copies_take_at_most_half_of_what_is_free(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, limit = Report(), 1 << 20
    with host.patched(Pipeline(unet), unet=True, session=Session(report=report)) as patch:
        taken: Any = patch.unet.takeover
        held = taken._weights
        monkeypatch.setattr(weights, "free_bytes", lambda *_: limit - held._copied_bytes)
        ours = models.step(unet, inputs)
        assert 0 < held._copied_bytes <= limit // 2
    assert "MiB are free" in "\n".join(report.snapshot()["events"])
    assert models.errors(ours, models.step(unet, inputs))[1] < 0.02


def test_without_memory_for_a_copy_the_host_computes(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renew(self: Merged) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Merged, "renew", renew)
    report = Report()
    theirs = models.step(unet, inputs)
    with host.patched(Pipeline(unet), unet=True, session=Session(report=report)):
        assert torch.equal(models.step(unet, inputs), theirs)
    assert "ran out of memory" in "\n".join(report.snapshot()["events"])


def test_without_memory_to_look_at_adapters_their_copies_are_made_anew(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    values_in_each_step(monkeypatch)
    with host.patched(Pipeline(unet), unet=True) as patch:
        models.step(unet, inputs)
        _written_unseen(unet)
        monkeypatch.setattr(torch, "_foreach_sub", apart)
        ours = models.step(unet, inputs)
        assert_all_ours(patch)
    assert models.errors(ours, models.step(unet, inputs))[1] < 0.02


@needs_half
def test_pictures_of_a_pipeline_agree_and_its_adapters_come_and_go() -> None:
    pytest.importorskip("transformers")
    little = little_model.load(little_model.MODEL, torch.float16)
    drawn = torch.Generator("cpu").manual_seed(1)
    file = {}
    for name, layer in little.unet.named_modules():
        if name.endswith(("to_q", "to_v", "conv1")):
            out, *rest = layer.weight.shape
            ones = [1] * (len(rest) - 1)
            down = torch.randn(4, *rest, generator=drawn) * layer.weight[0].numel() ** -0.5
            file[f"unet.{name}.lora_A.weight"] = down.half()
            up = torch.randn(out, 4, *ones, generator=drawn) * 0.25
            file[f"unet.{name}.lora_B.weight"] = up.half()

    def picture(scale: float = 1.0) -> torch.Tensor:
        made: torch.Tensor = little(
            "a red circle left of a blue square",
            num_inference_steps=1,
            guidance_scale=little_model.GUIDANCE,
            latents=little_model.latents(little, seed=0)[..., :18, :14],
            height=144,
            width=112,
            output_type="pt",
            cross_attention_kwargs={"scale": scale},
        ).images.float()
        return made

    plain = picture()
    with host.patched(little, vae=False, unet=True) as patch:
        little.load_lora_weights(dict(file), adapter_name="one")
        ours = picture(0.5)
        assert all(row.ours == row.total and not row.partly for row in patch.unet.rows())
        little.unload_lora_weights()
        without = picture()
    assert torch.equal(picture(), plain)
    little.load_lora_weights(dict(file), adapter_name="one")
    theirs = picture(0.5)
    changed = float((theirs - plain).abs().mean())
    assert float((ours - theirs).abs().mean()) < changed / 10
    assert float((without - plain).abs().mean()) < changed / 10
