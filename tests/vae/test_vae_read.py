"""Reading a host's VAE: complete, or with reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lib_rocm_sd.hosts.read.vae import is_known, read
from lib_rocm_sd.modules.watch import Structure
from lib_rocm_sd.vae.steps import AttentionStep, ConvStep, made_rows, needed_rows, rows_above
from tests import doubles
from tests.vae import vae_models


@pytest.mark.parametrize("kind", vae_models.KINDS)
def test_every_kind_is_read_completely(kind: str) -> None:
    module = vae_models.coder(kind)
    recipe = read(module)
    assert recipe.reasons == ()
    assert recipe.role == kind.split()[1]
    used = {id(leaf) for step in recipe.steps for leaf in step.leaves if leaf is not None}
    weighted = {id(child) for child in module.modules() if child._parameters}
    assert used == weighted


def test_steps_of_a_decoder_in_order() -> None:
    steps = read(vae_models.ldm_coder("decoder", (16, 32))).steps
    named = [
        (step.name, step.kind if isinstance(step, ConvStep) else "attention") for step in steps
    ]
    blocks = [f"up.1.block.{i}.conv{j}" for i in (0, 1) for j in (1, 2)]
    last = [f"up.0.block.{i}.conv{j}" for i in (0, 1) for j in (1, 2)]
    middle = ["mid.block_1.conv1", "mid.block_1.conv2"]
    assert named == [
        ("conv_in", "3x3"),
        *((name, "3x3") for name in middle),
        ("mid.attn_1", "attention"),
        *((name.replace("1.", "2."), "3x3") for name in middle),
        *((name, "3x3") for name in blocks),
        ("up.1.upsample", "upsample"),
        *((name, "3x3") for name in last),
        ("conv_out", "3x3"),
    ]
    narrowing = [s.name for s in steps if isinstance(s, ConvStep) and s.shortcut is not None]
    assert narrowing == ["up.0.block.0.conv2"]
    assert [s.name for s in steps if s.norm is None] == ["conv_in", "up.1.upsample"]


def test_encoder_downsamples_by_strided_convolutions() -> None:
    for kind in ("ldm encoder", "diffusers encoder"):
        steps = read(vae_models.coder(kind)).steps
        kinds = [step.kind for step in steps if isinstance(step, ConvStep)]
        assert kinds.count("3x3 stride 2") == 2
        assert sum(isinstance(step, AttentionStep) for step in steps) == 1


def _set(path: str, **values: Any) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        target = module.get_submodule(path)
        for key, value in values.items():
            setattr(target, key, value)

    return change


def _hook(module: nn.Module) -> None:
    module.get_submodule("mid.block_1").register_forward_hook(lambda *_: None)


def _class_forward(module: nn.Module) -> None:
    block = module.get_submodule("mid.block_1")
    theirs: Any = lambda self, x, temb=None: x  # noqa: E731
    block.__class__ = type(
        "ResnetBlock", (type(block),), {"forward": theirs, "__module__": doubles.VAE}
    )


def _fp8(module: nn.Module) -> None:
    module.to(torch.float8_e4m3fn)


def _half(module: nn.Module) -> None:
    module.get_submodule("conv_out").half()


def _meta(module: nn.Module) -> None:
    module.to("meta")


def _dropout(module: nn.Module) -> None:
    dropout: Any = module.get_submodule("mid.block_1.dropout").train()
    dropout.p = 0.5


LDM_CHANGES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "forward of the decoder": (_set("", forward=len), "decoder.forward has been replaced"),
    "forward of a block": (_set("mid.block_1", forward=len), "block_1.forward has been replaced"),
    "forward of a layer": (_set("mid.block_1.conv1", forward=len), "conv1.forward has been"),
    "asymmetric tiling": (_set("conv_in", _conv_forward=len), "conv_in._conv_forward has been"),
    "forward of a class": (_class_forward, "ResnetBlock.forward has been replaced by"),
    "hook": (_hook, "mid.block_1 has forward hooks"),
    "give_pre_end": (_set("", give_pre_end=True), "give_pre_end is True"),
    "tanh_out": (_set("", tanh_out=True), "tanh_out is True"),
    "num_resolutions": (_set("", num_resolutions=2), "num_resolutions is 2"),
    "num_res_blocks": (_set("", num_res_blocks=2), "num_res_blocks is 2"),
    "tiling": (_set("conv_in", padding_mode="circular"), "padding_mode is circular"),
    "dilation": (_set("conv_in", dilation=(2, 2)), "conv_in.dilation is (2, 2)"),
    "another block": (_set("mid", block_1=nn.Identity()), "mid.block_1 is a Identity"),
    "another convolution": (_set("", conv_in=nn.Linear(4, 4)), "conv_in is a Linear"),
    "another norm": (_set("", norm_out=nn.LayerNorm(16)), "norm_out is a LayerNorm"),
    "no norm": (_set("", norm_out=None), "norm_out is missing"),
    "one child more": (_set("mid", extra=nn.ReLU()), "mid has a extra"),
    "a parameter more": (_set("mid", gain=nn.Parameter(torch.ones(1))), "parameter gain"),
    "time embedding": (_set("mid.block_1", temb_proj=nn.Linear(8, 32)), "has a temb_proj"),
    "3x3 shortcut": (_set("mid.block_1", conv_shortcut=nn.Conv2d(32, 32, 3)), "conv_shortcut"),
    "needless shortcut": (_set("mid.block_1", nin_shortcut=nn.Conv2d(32, 32, 1)), "32 to 32"),
    "no upsampling convolution": (_set("up.1.upsample", with_conv=False), "no convolution"),
    "no upsampling": (_set("up.1", upsample=None), "up.1 has no upsample"),
    "upsampling at the end": (
        _set("up.0", upsample=doubles.module_of(doubles.VAE).Upsample(16, True)),
        "up.0 has a upsample, which is never run",
    ),
    "attention in some blocks": (
        _set("up.1", attn=nn.ModuleList([nn.Identity()])),
        "do not go together",
    ),
    "wrong channels": (_set("mid.block_2", conv1=nn.Conv2d(16, 32, 3, padding=1)), "16 channels"),
    "dtypes": (_half, "several dtypes"),
    "fp8": (_fp8, "weights are torch.float8_e4m3fn"),
    "meta": (_meta, "weights lie on meta"),
    "dropout at work": (_dropout, "not a dropout at rest"),
}


@pytest.mark.parametrize("name", LDM_CHANGES)
def test_what_is_not_known_of_ldm_is_a_reason(name: str) -> None:
    change, words = LDM_CHANGES[name]
    module = vae_models.ldm_coder("decoder")
    change(module)
    recipe = read(module)
    assert recipe.steps == ()
    assert any(words in reason for reason in recipe.reasons), recipe.reasons


DIFFUSERS_CHANGES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "activation": (_set("", conv_act=nn.ReLU()), "conv_act is a ReLU"),
    "activation of a block": (
        _set("mid_block.resnets.0", nonlinearity=nn.GELU()),
        "nonlinearity is a GELU",
    ),
    "time embedding": (
        _set("mid_block.resnets.0", time_emb_proj=nn.Linear(8, 32)),
        "time_emb_proj",
    ),
    "scale": (_set("mid_block.resnets.0", output_scale_factor=2.0), "output_scale_factor is 2.0"),
    "scale_shift": (
        _set("mid_block.resnets.0", time_embedding_norm="scale_shift"),
        "time_embedding_norm is scale_shift",
    ),
    "processor": (_set("mid_block.attentions.0", processor=object()), "has a object"),
    "fused": (
        _set("mid_block.attentions.0", processor=type("FusedAttnProcessor2_0", (), {})()),
        "has a FusedAttnProcessor2_0",
    ),
    "attention scale": (_set("mid_block.attentions.0", scale=1.0), "scale 1.0"),
    "no residual": (
        _set("mid_block.attentions.0", residual_connection=False),
        "residual_connection is False",
    ),
    "spatial norm": (
        _set("mid_block.attentions.0", spatial_norm=nn.GroupNorm(4, 32)),
        "has a spatial_norm",
    ),
    "interpolation": (_set("up_blocks.0.upsamplers.0", interpolate=False), "interpolate is False"),
    "transposed": (
        _set("up_blocks.0.upsamplers.0", use_conv_transpose=True),
        "use_conv_transpose is True",
    ),
}


@pytest.mark.parametrize("name", DIFFUSERS_CHANGES)
def test_what_is_not_known_of_diffusers_is_a_reason(name: str) -> None:
    change, words = DIFFUSERS_CHANGES[name]
    module = vae_models.diffusers_coder("decoder")
    change(module)
    recipe = read(module)
    assert recipe.steps == ()
    assert any(words in reason for reason in recipe.reasons), recipe.reasons


def test_symmetric_padding_before_a_strided_convolution_is_not_ours() -> None:
    module = vae_models.diffusers_coder("encoder")
    _set("down_blocks.0.downsamplers.0", padding=1)(module)
    assert any("padding is 1" in reason for reason in read(module).reasons)


def test_other_classes_are_not_known() -> None:
    assert "Conv2d of torch" in read(nn.Conv2d(1, 1, 1)).reasons[0]
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    tiny = diffusers.AutoencoderTiny().decoder
    assert any("is a DecoderTiny" in reason for reason in read(tiny).reasons)


@pytest.mark.parametrize(
    ("family", "known"),
    [
        ("ldm.modules.diffusionmodules.model", True),
        ("sgm.modules.diffusionmodules.model", True),
        ("modules.models.sd3.sd3_impls", True),
        ("flux.modules.autoencoder", True),
        ("backend.nn.vae", True),
        ("ldm.modules.diffusionmodules.openaimodel", False),
        ("somebody.notflux.modules.autoencoder2", False),
        ("xbackend.nn.vae", False),
    ],
)
def test_families_are_known_by_their_python_module(family: str, known: bool) -> None:
    assert is_known(family) is known


def test_forwards_that_were_put_back_are_the_classs_own() -> None:
    """Extensions that undo what they did leave the class's methods, bound, on the instances."""
    module = vae_models.ldm_coder("decoder")
    conv: Any = module.get_submodule("mid.block_1.conv1")
    module.forward = module.forward
    conv._conv_forward = conv._conv_forward
    assert read(module).reasons == ()


def test_attention_forward_of_an_optimizer_is_expected() -> None:
    module = vae_models.ldm_coder("decoder")
    block = module.get_submodule("mid.attn_1")
    theirs: Any = lambda self, x: x  # noqa: E731
    block.__class__ = type(
        "AttnBlock", (type(block),), {"forward": theirs, "__module__": doubles.VAE}
    )
    assert read(module).reasons == ()


def test_reading_changes_nothing() -> None:
    module = vae_models.ldm_coder("decoder")
    before = {name: dict(child.__dict__) for name, child in module.named_modules()}
    read(module)
    assert {name: dict(child.__dict__) for name, child in module.named_modules()} == before


@pytest.mark.parametrize("kind", ["3x3", "3x3 stride 2", "upsample"])
@pytest.mark.parametrize("height", [2, 3, 7, 16])
def test_rows_that_a_convolution_needs(kind: str, height: int) -> None:
    """Against the definition: which input rows change which output rows."""
    import torch.nn.functional as F

    def run(x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(1, 1, 3, 3)
        if kind == "upsample":
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        if kind == "3x3 stride 2":
            return F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, stride=2)
        return F.conv2d(x, weight, padding=1)

    rows = [
        run(torch.eye(height)[i].view(1, 1, -1, 1).repeat(1, 1, 1, 4))[0, 0] for i in range(height)
    ]
    out_height = rows[0].shape[0]
    for first in range(out_height):
        for last in range(first + 1, out_height + 1):
            low, high = needed_rows(kind, (first, last), height)
            touching = [i for i in range(height) if rows[i][first:last].any()]
            assert low <= touching[0] and touching[-1] < high
            made = made_rows(kind, (first, last))
            assert made[0] <= first and last <= made[1]
            assert needed_rows(kind, made, height) == (low, high)
            middle = next(i for i in range(height) if rows[i][made[0]].any())
            above = rows_above(kind, made, (low, high))
            assert above == (low < made[0] // (2 if kind == "upsample" else 1)) or "2" in kind
            assert low + above >= middle


AROUND: dict[str, tuple[Any, str, str]] = {
    "a layer's class": (nn.GroupNorm, "forward", "GroupNorm.forward has been replaced by"),
    "an inner forward": (nn.Conv2d, "_conv_forward", "Conv2d._conv_forward has been replaced by"),
    "torch's function": (nn.functional, "group_norm", "functional.group_norm has been replaced"),
}


@pytest.mark.parametrize(("owner", "name", "why"), AROUND.values(), ids=AROUND)
def test_what_others_put_into_torch_is_seen(
    owner: Any, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = vae_models.coder("ldm decoder")
    structure = Structure(module)
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: own(*given))
    assert why in "; ".join(read(module).reasons) and not structure.same()
    monkeypatch.undo()
    assert not read(module).reasons


def test_layers_that_the_webuis_networks_replaced_are_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A VAE has no networks."""

    def network_forward(self: Any, x: Any) -> Any:
        return x

    network_forward.__module__ = "networks"
    monkeypatch.setattr(nn.Conv2d, "forward", network_forward)
    assert not read(vae_models.coder("ldm decoder")).reasons


def test_a_hook_on_all_modules_is_seen() -> None:
    module = vae_models.coder("ldm decoder")
    structure = Structure(module)
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert "a hook is set on all modules" in read(module).reasons[0] and not structure.same()
    finally:
        handle.remove()
    assert not read(module).reasons
