"""xFormers and flash-attention as variants, with packages made up after their signatures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_rocm_sd.arch import table
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.selftest import relative_error
from lib_rocm_sd.ops import optional
from lib_rocm_sd.ops.attention.formula import attend
from lib_rocm_sd.ops.attention.libraries import LIBRARIES, FlashAttention, XformersAttention
from lib_rocm_sd.ops.attention.op import ATTENTION
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call
from tests.packages import installed

CPU = torch.device("cpu")
ARCH = table()["gfx1100"]
PROBLEM = AttentionProblem(2, 3, 17, 15, 40)
XFORMERS, FLASH, IN_TRITON = XformersAttention(), FlashAttention(False), FlashAttention(True)


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    optional.absent.cache_clear()
    yield
    optional.absent.cache_clear()


def _heads_last(q: Any, k: Any, v: Any, bias: Any, scale: float | None) -> torch.Tensor:
    """(B, S, H, D) in and out."""
    factor = q.shape[3] ** -0.5 if scale is None else scale
    q64, k64, v64 = (t.double().transpose(1, 2) for t in (q, k, v))
    return attend(q64, k64, v64, bias, factor).transpose(1, 2).to(q.dtype)


def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> torch.Tensor:
    """As xFormers declares it, with what its operators ask of a bias."""
    if attn_bias is not None:
        assert attn_bias.shape == (*query.shape[:1], query.shape[2], query.shape[1], key.shape[1])
        assert attn_bias.dtype == query.dtype and attn_bias.stride(-1) == 1
        assert all(stride % 8 == 0 for stride in attn_bias.stride()[:-1])
    return _heads_last(query, key, value, attn_bias, scale)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """As flash-attention 2 declares it."""
    return _heads_last(q, k, v, None, softmax_scale)


def xformers() -> Any:
    forward = memory_efficient_attention_forward
    return installed("xformers", "xformers.ops", memory_efficient_attention_forward=forward)


def flash(**further: Any) -> Any:
    names = ("flash_attn", "flash_attn.flash_attn_interface")
    return installed(*names, flash_attn_func=flash_attn_func, **further)


def test_what_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in LIBRARIES:
        package = "xformers" if variant is LIBRARIES[0] else "flash_attn"
        (why,) = variant.refusals(ARCH, PROBLEM)
        assert why.startswith(f"{package} is not installed")
        assert variant.refusals(None, PROBLEM) == ["no supported GPU"]
    assert "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE" in FLASH.refusals(ARCH, PROBLEM)[0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert XFORMERS.refusals(ARCH, PROBLEM) == ["no supported GPU"]


@pytest.mark.parametrize("mask", ["none", "bool", "float16", "float32"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_xformers_is_called_as_it_wants_to_be(mask: str, scale: float | None) -> None:
    problem = replace(PROBLEM, mask=mask)
    inputs = ATTENTION.make_inputs(problem, CPU, 1)._replace(scale=scale)
    with xformers():
        assert XFORMERS.refusals(ARCH, problem) == []
        made = XFORMERS.run(Call(problem, inputs))
    assert relative_error(made, ATTENTION.reference(inputs)) <= ATTENTION.tolerance(problem)
    assert XFORMERS.workspace(problem) == (0 if mask == "none" else problem.score_bytes)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_flash_attention_is_called_as_it_wants_to_be(scale: float | None) -> None:
    inputs = ATTENTION.make_inputs(PROBLEM, CPU, 1)._replace(scale=scale)
    with flash():
        assert FLASH.refusals(ARCH, PROBLEM) == []
        made = FLASH.run(Call(PROBLEM, inputs))
    assert relative_error(made, ATTENTION.reference(inputs)) <= ATTENTION.tolerance(PROBLEM)


def test_of_flash_attentions_kernels_those_run_that_the_process_has() -> None:
    with flash(USE_TRITON_ROCM=True):
        (why,) = FLASH.refusals(ARCH, PROBLEM)
        assert why.startswith("this process has its Triton kernels")
        assert IN_TRITON.refusals(ARCH, PROBLEM) == []
    with flash(USE_TRITON_ROCM=False):
        (why,) = IN_TRITON.refusals(ARCH, PROBLEM)
        assert why.startswith("this process has its compiled kernels")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"head_dim": 264}, "head_dim 264: it takes up to 256"),
        ({"head_dim": 44}, "head_dim 44 is not a multiple of 8"),
    ],
)
def test_what_their_kernels_do_not_take(changed: dict[str, Any], told: str) -> None:
    problem = replace(PROBLEM, **changed)
    with xformers(), flash():
        for variant in (XFORMERS, FLASH):
            (why,) = variant.refusals(ARCH, problem)
            assert why.startswith(told)


def test_limits_of_one_of_them() -> None:
    with xformers(), flash():
        many = replace(PROBLEM, seq_k=1 << 19)
        (why,) = XFORMERS.refusals(ARCH, many)
        assert why == "batch x seq is 1048576: it takes less than 1048576"
        assert FLASH.refusals(ARCH, many) == []
        assert FLASH.refusals(ARCH, replace(PROBLEM, mask="bool")) == ["a bool mask: it takes none"]


def test_tensors_that_they_do_not_take() -> None:
    inputs = ATTENTION.make_inputs(PROBLEM, CPU, 1)
    assert XFORMERS.input_refusals(inputs) == []
    turned = inputs.k.transpose(1, 3).contiguous().transpose(1, 3)
    assert XFORMERS.input_refusals(inputs._replace(k=turned)) == ["the last stride of k is not 1"]
    assert FLASH.input_refusals(inputs._replace(v=inputs.v.requires_grad_()))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", LIBRARIES, ids=lambda variant: variant.name)
def test_on_the_card_it_is_right_or_says_why(variant: Any) -> None:
    device = torch.device("cuda:0")
    problem = AttentionProblem(2, 8, 200, 77, 40)
    why = variant.refusals(identify(device).arch, problem)
    if why:
        pytest.skip("; ".join(why))
    made = variant.run(Call(problem, ATTENTION.make_inputs(problem, device, 1))).cpu()
    right = ATTENTION.reference(ATTENTION.make_inputs(problem, CPU, 1))
    assert relative_error(made, right) <= ATTENTION.tolerance(problem)
