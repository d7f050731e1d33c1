"""A Forge's attention functions in our hands: each form of a call, and what goes to Forge's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib_rocm_sd import report
from lib_rocm_sd.hosts import attention as host_attention
from lib_rocm_sd.hosts.webui.attention import Function, calls, of_functions, packed, spatial
from tests.comfyui.play import CARD, FLOATS, Engine

B, H, S, D = 2, 4, 9, 8


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The CPU is a card of ours."""
    made = Engine()
    monkeypatch.setattr(host_attention, "identify", lambda device: CARD)
    monkeypatch.setattr(host_attention, "HALVES", FLOATS)
    monkeypatch.setattr(host_attention, "engine", made)
    return made


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.report, "_events", {})
    calls.clear()


def ours(compute: Any = packed, aside: bool = False) -> Function:
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return "Forge's", args, kwargs

    return Function(theirs, compute, SimpleNamespace(stands_aside=aside))


def tensors(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def attention(q: Any, k: Any, v: Any, mask: Any = None) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("apart", [False, True], ids=["together", "heads apart"])
@pytest.mark.parametrize("masked", [None, (S, S), (1, S, S), (B, H, S, S)], ids=str)
def test_a_call(card: Engine, apart: bool, masked: tuple[int, ...] | None) -> None:
    q, k, v = tensors(B, H, S, D)
    mask = None if masked is None else torch.randn(masked)
    given = (q, k, v) if apart else [t.transpose(1, 2).flatten(2) for t in (q, k, v)]
    made = ours()(*given, H, mask, skip_reshape=apart)
    expected = attention(q, k, v, mask).transpose(1, 2).flatten(2)
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)
    assert not calls.left.total() and len(card.seen) == 1
    assert card.seen[0][1].part == "UNet"


def test_the_vaes(card: Engine) -> None:
    q, k, v = tensors(B, 16, 4, 5)
    made = ours(spatial)(q, k, v)
    rows = attention(*(t.flatten(2).transpose(1, 2) for t in (q, k, v)))
    expected = rows.transpose(1, 2).reshape(q.shape)
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)
    assert made.is_contiguous() and card.seen[0][1].part == "VAE"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a mask by batch": ({"mask": torch.zeros(B, S, S)}, "mask (2, 9, 9) is not clear"),
    "a boolean mask": ({"mask": torch.ones(B, S, dtype=torch.bool)}, "bool mask (2, 9)"),
    "an unknown word": ({"dropout_p": 0.1}, "dropout_p, which is not known here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_to_forge(card: Engine, case: str) -> None:
    options, why = REFUSED[case]
    q, k, v = tensors(B, S, H * D)
    name, args, kwargs = ours()(q, k, v, H, **options)
    assert name == "Forge's" and args[0] is q and args[3] == H and kwargs == options
    assert calls.left.total() == 1 and not card.seen
    (event,) = report.snapshot()["events"]
    assert event.startswith("a call was left to the WebUI's own attention: ") and why in event


def test_gradients_are_forges(card: Engine) -> None:
    q, k, v = tensors(B, S, H * D)
    assert ours()(q.requires_grad_(), k, v, H)[0] == "Forge's"
    assert "gradients are wanted" in report.snapshot()["events"][0]


def test_images_of_two_sizes_are_forges(card: Engine) -> None:
    q, k, _ = tensors(1, 8, 4, 4)
    assert ours(spatial)(q, k, torch.zeros(1, 8, 4, 5))[0] == "Forge's"


def test_without_a_card_it_is_forges() -> None:
    assert ours()(*tensors(B, S, H * D), H)[0] == "Forge's"
    assert "no GPU" in report.snapshot()["events"][0]


@pytest.mark.parametrize("error", [RuntimeError("launch failed"), MemoryError("out of memory")])
def test_an_error_costs_no_picture(card: Engine, error: Exception) -> None:
    card.fails = error
    one = ours()
    for _ in range(3):
        assert one(*tensors(B, S, H * D), H)[0] == "Forge's"
    assert calls.left.total() == 3
    (event,) = report.snapshot()["events"]
    assert f"ours failed: {type(error).__name__}" in event


def test_standing_aside_it_is_forges_without_a_word(card: Engine) -> None:
    assert ours(aside=True)(*tensors(B, S, H * D), H)[0] == "Forge's"
    assert not calls.left.total() and not report.snapshot()["events"]


def test_forges_own_called_alone() -> None:
    def of_unet(q: Any, k: Any, v: Any, heads: int) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        return attention(q, k, v).transpose(1, 2).flatten(2)

    def of_vae(q: Any, k: Any, v: Any) -> torch.Tensor:
        rows = attention(*(t.flatten(2).transpose(1, 2) for t in (q, k, v)))
        return rows.transpose(1, 2).reshape(q.shape) + 1.0

    for heads, added in ((2, 0.0), (1, 1.0)):
        q, k, v = tensors(B, 16, heads, D)
        expected = attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(2)
        torch.testing.assert_close(of_functions(of_unet, of_vae)(q, k, v), expected + added)
        torch.testing.assert_close(of_functions(of_unet, None)(q, k, v), expected)


def test_a_models_own_override_is_forges(card: Engine) -> None:
    q, k, v = (t.transpose(1, 2).flatten(2) for t in tensors(B, H, S, D))
    options = {"optimized_attention_override": lambda function, *args: "another's"}
    assert ours()(q, k, v, H, transformer_options=options)[0] == "Forge's"
    assert isinstance(ours()(q, k, v, H, transformer_options={}), torch.Tensor)
