"""Z-Image's blocks in a real diffusers transformer, with pictures of two sizes: ours, right, given
back.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows diffusers' classes
from lib_rocm_sd.calls import autocasts
from lib_rocm_sd.unet.takeover import UnetTakeover
from tests.dit.any_transformer import (
    check_blocks,
    check_recorded,
    copied,
    filled,
    masks_seen,
    taken_over,
)

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
if not hasattr(diffusers, "ZImageTransformer2DModel"):
    pytest.skip("this diffusers has no Z-Image", allow_module_level=True)

KIND = "single transformer block"


@cache
def _drawn() -> nn.Module:
    torch.manual_seed(0)
    made = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=32,
        axes_dims=[4, 8, 12],
        axes_lens=[128, 64, 64],
    )
    return filled(made)  # type: ignore[no-any-return]


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    return copied(_drawn(), dtype)


def step(transformer: Any, turn: int = 1, masked: bool = True) -> torch.Tensor:
    """On two pictures that are not square; `masked`: the second, and its prompt, are larger."""
    generator, dtype = torch.Generator().manual_seed(turn), transformer.dtype
    sizes = ((10, 6), (14, 12) if masked else (10, 6))
    words = (7, 35 if masked else 5)
    drawn = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    with torch.no_grad():
        made: list[torch.Tensor] = transformer(
            [drawn(4, 1, *size) for size in sizes],
            torch.tensor([0.5, 0.02]).to(dtype),
            [drawn(count, 32) for count in words],
        ).sample
    return torch.cat([each.flatten() for each in made])


@pytest.mark.parametrize("masked", [True, False], ids=["masked", ""])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_blocks_are_ours_as_exact_as_the_hosts_and_given_back(
    dtype: torch.dtype, masked: bool
) -> None:
    def check(taken: UnetTakeover) -> None:
        (row,) = taken.report()
        assert (row.kind, row.ours, row.total, row.left) == (KIND, 4, 4, {})

    check_blocks(model(dtype), lambda each, turn: step(each, turn, masked), check)


def test_padding_is_left_out_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = masks_seen(monkeypatch)
    transformer = model()
    taken_over(transformer)
    step(transformer)
    assert [mask is not None and mask.dtype for mask in seen] == [torch.int32] * 4


def test_a_recorded_step_is_the_launched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, _ = check_recorded(model(), step, monkeypatch)
    assert desk.recorded == 4 and desk.replayed == 12


def test_calls_of_other_forms_are_the_hosts_and_say_why() -> None:
    transformer = model()
    taken = taken_over(transformer)
    x, embedding = torch.randn(2, 5, 96).bfloat16(), torch.randn(2, 96).bfloat16()
    block, mask = transformer.layers[0], torch.ones(2, 5, dtype=torch.bool)
    said = lambda: [why for row in taken.report() for why in row.left]  # noqa: E731
    block(x, mask[:, None, None], None, embedding)
    assert said() == ["its attention has a mask that is not bool (2, 5)"]
    both = {"adaln_noisy": embedding, "adaln_clean": embedding}
    block(x, mask, None, noise_mask=mask.long(), **both)
    assert said() == ["its tokens have modulations of two kinds"]
    block(x, mask, None, embedding)
    assert said() == []


def test_what_was_changed_is_the_hosts_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = model()
    taken = taken_over(transformer)
    step(transformer)
    first, second = transformer.layers
    first.ffn_norm2 = nn.LayerNorm(96)
    second.attention.set_processor(type("Mine", (type(second.attention.processor),), {})())
    (row,) = taken.report()
    assert row.ours == 2 and [why.split(" of ")[0] for why in row.left] == [
        "ffn_norm2 is a LayerNorm, not a RMSNorm",
        "attn.processor is a Mine",
    ]
    monkeypatch.delattr(nn.functional, "rms_norm")
    (row,) = taken_over(model()).report()
    assert row.left == {"this torch has no rms_norm": 4}


def test_a_torch_whose_rms_norm_is_narrow_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.4's computes in half precision throughout, where the host's norm is float32."""

    def narrow(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt()

    monkeypatch.setattr(nn.functional, "rms_norm", narrow)
    (row,) = taken_over(model()).report()
    assert row.left == {"this torch's rms_norm overflows": 4}


def test_autocast_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs it makes torch's RMSNorm float32, as is played here."""
    of_torch = nn.functional.rms_norm

    def of_gpus(*args: Any) -> torch.Tensor:
        made = of_torch(*args)
        return made.float() if autocasts() else made

    monkeypatch.setattr(nn.functional, "rms_norm", of_gpus)
    transformer = model()
    taken = taken_over(transformer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(transformer)
    (row,) = taken.report()
    assert (row.ours, row.left) == (4, {})
