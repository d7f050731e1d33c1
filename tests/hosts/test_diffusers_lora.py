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
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.report import Report
from lib_rocm_sd.unet import weights
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
HALVES = [BF16, pytest.param(torch.float16, marks=needs_half)]
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


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 40)
        self.small = nn.Conv2d(48, 40, 1)
        self.large = nn.Conv2d(48, 40, 3, padding=1, bias=False)


def read(layers: Any, name: str) -> tuple[Any, Findings]:
    """What a layer is read as."""
    import lib_rocm_sd.hosts.read  # noqa: F401 - knows the layers of adapters

    found = Findings("tests")
    if name == "linear":
        return found.linear(layers, name), found
    return found.conv(layers, name, kernel=1 if name == "small" else 3), found


def injected(dtype: torch.dtype, *options: dict[str, Any]) -> Any:
    """The layers with adapters "0", "1" and so on, all active."""
    torch.manual_seed(2)
    layers = models.fill(Layers()).to(dtype)
    for number, option in enumerate(options):
        made = config(**{"target_modules": ["linear", "small", "large"], **option})
        peft.inject_adapter_in_model(made, layers, str(number))
    for module in layers.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.set_adapter([str(number) for number in range(len(options))])
            for magnitude in module.lora_magnitude_vector.values():
                magnitude.weight.data.mul_(1.5)
    return layers.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["linear", "small", "large"])
@pytest.mark.parametrize(
    "options",
    [
        [{"rank": 4}],
        [{"rank": 3}, {"rank": 8, "use_rslora": True}],
        [{"rank": 4, "lora_alpha": 0}],
        [{"rank": 4, "use_dora": True}],
        [{"rank": 4, "use_dora": True}, {"rank": 2}, {"rank": 3, "use_dora": True}],
    ],
    ids=["one", "two ranks", "scale 0", "DoRA", "DoRA and others"],
)
@torch.no_grad()
def test_a_layer_errs_at_most_twice_as_much_as_by_torch(
    options: list[dict[str, Any]], name: str, dtype: torch.dtype
) -> None:
    layers = injected(dtype, *options)
    leaf, found = read(layers, name)
    assert not found.reasons
    assert leaf.obstacle() == "" and leaf.is_stale()
    leaf.renew()
    assert not leaf.is_stale()
    x = models.draw(64, 48) if name == "linear" else models.draw(4, 48, 6, 6)
    x = x.to(dtype)
    exact = copy.deepcopy(getattr(layers, name)).double()(x.double())
    theirs, ours = getattr(layers, name)(x), leaf(x)
    assert ours.dtype == dtype
    assert models.errors(ours, exact)[1] <= 2 * models.errors(theirs, exact)[1]


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
    monkeypatch.setattr(weights, "PAUSE_S", 0.0)  # this UNet's changes are done sooner
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
    monkeypatch.setattr(weights, "PAUSE_S", 0.0)
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
def test_factors_are_looked_at_once_in_a_call_of_the_model_and_else_before_each_block(
    unet: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    factors = MergedLayers._factors

    def noted(self: MergedLayers) -> Any:
        looked.append(len(self.layers))
        return factors(self)

    monkeypatch.setattr(MergedLayers, "_factors", noted)
    monkeypatch.setattr(weights, "PAUSE_S", math.inf)
    resnet = unet.up_blocks[-1].resnets[-1]
    x = models.draw(2, resnet.in_channels, 4, 4).to(BF16)
    emb = models.draw(2, resnet.time_emb_proj.in_features).to(BF16)
    with host.patched(Pipeline(unet), unet=True) as patch:
        models.step(unet, inputs)
        resnet.training = True
        for _ in range(2):
            looked.clear()
            models.step(unet, inputs)
        assert looked == [len(copies(unet, patch))]
        resnet.training = False
        resnet.conv1.lora_B["one"].weight.mul_(-1)
        ours = resnet(x, emb)
        assert len(looked) > 1
    assert models.errors(ours, resnet(x, emb))[1] < 0.02


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


@torch.no_grad()
def test_only_layers_that_changed_are_made_anew_and_another_bias_is_read() -> None:
    layers = injected(BF16, {"rank": 4})
    leaves = [read(layers, name)[0] for name in ("linear", "small", "large")]
    merged = MergedLayers([*leaves, layers])
    assert merged.stale() == leaves
    for leaf in leaves:
        leaf.renew()
    assert merged.stale() == []
    linear, small, large = (getattr(layers, name) for name in ("linear", "small", "large"))
    linear.base_layer.bias = nn.Parameter(linear.base_layer.bias + 1, False)
    assert merged.stale() == [] and leaves[0].bias is linear.base_layer.bias
    small.scaling["0"] *= 1 + 2**-40
    assert merged.stale() == []
    small.scaling["0"] *= 2
    large.lora_A["0"].weight.add_(1)
    assert merged.stale() == leaves[1:]
    linear.lora_B["0"].weight = None
    assert merged.stale() == leaves
    assert leaves[0].obstacle() == "an adapter was taken away"


@torch.no_grad()
def test_scales_in_another_dict_count_and_a_tensor_is_no_scale_for_ours() -> None:
    """PEFT makes tensors of all scales to prepare for hot swaps, and writes to them in place."""
    layer = injected(BF16, {"rank": 4})
    leaf, _ = read(layer, "linear")
    merged, own = MergedLayers([leaf]), layer.linear
    leaf.renew()
    assert merged.stale() == []
    own.scaling = {"0": -own.scaling["0"]}
    assert merged.stale() == [leaf]
    leaf.renew()
    assert merged.stale() == []
    own.scaling["0"] = torch.tensor(own.scaling["0"])
    for _ in range(2):
        assert merged.stale() == [leaf]
    assert leaf.obstacle() == "the scale of an adapter is no number"


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

    monkeypatch.setattr(weights, "PAUSE_S", 0.0)
    with host.patched(Pipeline(unet), unet=True) as patch:
        models.step(unet, inputs)
        _written_unseen(unet)
        monkeypatch.setattr(torch, "_foreach_sub", apart)
        ours = models.step(unet, inputs)
        assert_all_ours(patch)
    assert models.errors(ours, models.step(unet, inputs))[1] < 0.02


@torch.no_grad()
def test_a_copy_that_ctrl_c_interrupts_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: torch.Tensor) -> Any:
        raise KeyboardInterrupt

    layer = injected(BF16, {"rank": 4})
    leaf, _ = read(layer, "linear")
    missing_bytes = leaf.missing_bytes()
    leaf.renew()
    assert (missing_bytes, leaf.missing_bytes()) == (leaf.copy_bytes, 0)
    own = layer.linear.scaling
    own["0"] *= -3
    with monkeypatch.context() as patching, pytest.raises(KeyboardInterrupt):
        patching.setattr(torch.Tensor, "clone", interrupted)
        leaf.renew()
    own["0"] /= -3
    assert leaf.is_stale()


def _with(**options: Any) -> Callable[[], Any]:
    return lambda: injected(BF16, {"rank": 4, **options})


def _changed(change: Callable[[Any], Any]) -> Callable[[], Any]:
    def made() -> Any:
        layers = injected(BF16, {"rank": 4})
        change(layers.linear)
        return layers

    return made


def _loha() -> Any:
    layers = models.fill(Layers()).to(BF16)
    peft.inject_adapter_in_model(peft.LoHaConfig(r=2, target_modules=["linear"]), layers)
    return layers


def _disabled_while_merged(layer: Any) -> None:
    layer.merge()
    layer.enable_adapters(False)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "LoHa": (_loha, "linear is a Linear of peft.tuners.loha.layer"),
    "a bias of its own": (_with(lora_bias=True), "linear.0 has a bias"),
    "dropout in training": (
        _changed(
            lambda layer: layer.lora_dropout.update({"0": nn.Dropout(0.5)}) or layer.train(True)
        ),
        "linear.0.lora_dropout.0 is a Dropout: not a dropout at rest",
    ),
    "hooks, as of adapters for each sample": (
        _changed(lambda layer: layer.register_forward_pre_hook(lambda *_: None)),
        "linear has forward hooks",
    ),
    "a hook within": (
        _changed(lambda layer: layer.lora_A["0"].register_forward_hook(lambda *_: None)),
        "linear.0.lora has forward hooks",
    ),
    "a forward of another's": (
        _changed(lambda layer: setattr(layer, "forward", lambda x: x)),
        "linear.forward has been replaced",
    ),
    "no scale of its own": (
        _changed(lambda layer: layer.scaling.update({"0": torch.ones(())})),
        "linear.0 has a scale that is a Tensor",
    ),
    "another variant": (
        _changed(lambda layer: layer.lora_variant.update({"0": object()})),
        "linear.0 is a variant of LoRA (object)",
    ),
    "columns for rows": (
        _changed(lambda layer: setattr(layer, "fan_in_fan_out", True)),
        "linear.fan_in_fan_out is True",
    ),
    "disabled while merged": (
        _changed(_disabled_while_merged),
        "linear has merged adapters that are disabled",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_an_adapter_is_the_hosts_with_the_reason(name: str) -> None:
    make, why = REFUSED[name]
    _, found = read(make(), "linear")
    assert why in "; ".join(found.reasons)


def test_an_adapter_that_was_left_elsewhere_is_the_hosts() -> None:
    layers = injected(BF16, {"rank": 4})
    leaf, _ = read(layers, "linear")
    layers.linear.lora_A["0"].to("meta")
    assert "lies on another device" in leaf.obstacle()
    with torch.inference_mode():
        layers.linear.lora_A["0"].weight = nn.Parameter(torch.ones(4, 48), False)
    assert "made in inference mode" in leaf.obstacle()


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
