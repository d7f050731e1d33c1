"""A model's attention through the engine: each form of a call, and what goes to ComfyUI's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lib_rocm_sd import report
from lib_rocm_sd.hosts import attention as host_attention
from lib_rocm_sd.hosts.attention import NotOursError, call_of
from lib_rocm_sd.hosts.comfyui.attention import KEY
from lib_rocm_sd.hosts.comfyui.host import tally
from lib_rocm_sd.hosts.comfyui.model import optimized
from tests.comfyui.conftest import left
from tests.comfyui.play import Engine

B, H, SQ, SK, D = 2, 4, 9, 7, 8


def tensors(apart: bool, kv_heads: int = H) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [(B, H, SQ, D), (B, kv_heads, SK, D), (B, kv_heads, SK, D)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return made if apart else [t.transpose(1, 2).flatten(2) for t in made]


def mask(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(1))


def override() -> Any:
    return optimized(Model(), "Auto", True).model_options["transformer_options"][KEY]


class Model:
    """All that `optimized` asks of a ModelPatcher."""

    def __init__(self, options: Any = None) -> None:
        self.model_options: dict[str, Any] = {"transformer_options": options or {}}

    def clone(self) -> Model:
        made = Model()
        made.model_options = copy.deepcopy(self.model_options)
        return made


MASKS = {
    "no mask": None,
    "queries and keys": mask(SQ, SK),
    "a batch of one": mask(1, SQ, SK),
    "batch": mask(B, SQ, SK),
    "heads": mask(B, H, SQ, SK),
    "broadcast": mask(1, 1, 1, SK),
    "boolean": mask(B, 1, SQ, SK) > -1,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "heads apart"])
@pytest.mark.parametrize("out_apart", [False, True], ids=["out together", "out apart"])
def test_each_form_gives_what_comfyuis_gives(
    comfy: Any, card: Engine, name: str, apart: bool, out_apart: bool
) -> None:
    q, k, v = tensors(apart)
    options: dict[str, Any] = {"skip_reshape": apart, "skip_output_reshape": out_apart}
    theirs = comfy.attention.attention_pytorch
    expected = theirs(q, k, v, H, mask=MASKS[name], **options)
    options["transformer_options"] = {KEY: override(), "block": ("input", 1)}
    made = theirs(q, k, v, H, MASKS[name], **options)
    assert made.shape == expected.shape
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)
    assert len(card.seen) == tally.ours["attention"] == 1 and not tally.left
    inputs = card.seen[0][0]
    assert [t.data_ptr() for t in inputs[:3]] == [t.data_ptr() for t in (q, k, v)]  # no copies


SHAPES = {
    "q in tiles (HyperTile)": ((8, 64, 320), (2, 256, 320), (2, 256, 320)),
    "v by heads (SD 3)": ((2, 93, 256), (2, 93, 256), (2, 93, 8, 32)),
    "k and v by heads (SD 3.5)": ((2, 93, 256), (2, 93, 8, 32), (2, 93, 8, 32)),
    "other widths of k": ((2, 12, 64), (2, 12, 32), (2, 12, 32)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_read_as_comfyuis_functions_read_them(
    comfy: Any, card: Engine, name: str
) -> None:
    q, k, v = (mask(*shape) + place for place, shape in enumerate(SHAPES[name]))
    theirs = comfy.attention.attention_pytorch
    expected = theirs(q, k, v, 8)
    made = theirs(q, k, v, 8, transformer_options={KEY: override()})
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)
    assert tally.ours["attention"] == 1 and not tally.left
    assert [t.data_ptr() for t in card.seen[0][0][:3]] == [t.data_ptr() for t in (q, k, v)]


def test_v_may_be_a_part_of_one_tensor(comfy: Any, card: Engine) -> None:
    """As SD 3's: a view of what one layer made, by heads."""
    qkv = mask(2, 93, 3, 8, 32)
    q, k = (qkv[:, :, place].flatten(2) for place in (0, 1))
    expected = comfy.attention.attention_pytorch(q, k, qkv[:, :, 2], 8)
    made = override()(None, q, k, qkv[:, :, 2], heads=8)
    torch.testing.assert_close(made, expected, atol=2e-6, rtol=1e-5)
    assert card.seen[0][0].v.data_ptr() == qkv[:, :, 2].data_ptr()


@pytest.mark.parametrize("apart", [False, True], ids=["together", "heads apart"])
def test_fewer_heads_of_keys_serve_several_of_queries(card: Engine, apart: bool) -> None:
    q, k, v = tensors(apart, kv_heads=2)
    made = override()(None, q, k, v, H, skip_reshape=apart, enable_gqa=True)
    q, k, v = (t if apart else t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
    k, v = (t[:, [0, 0, 1, 1]] for t in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(made, expected.transpose(1, 2).flatten(2), atol=2e-6, rtol=1e-5)


def test_a_scale_is_heeded(card: Engine) -> None:
    q, k, v = tensors(True)
    made = override()(None, q, k, v, heads=H, skip_reshape=True, scale=0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5)
    torch.testing.assert_close(made, expected.transpose(1, 2).flatten(2), atol=2e-6, rtol=1e-5)


# --- what goes to ComfyUI's own


def handed(**options: Any) -> tuple[Any, ...]:
    """What ComfyUI's function is given: the very arguments."""
    got: list[Any] = []

    def theirs(*args: Any, **kwargs: Any) -> str:
        got.append((args, kwargs))
        return "ComfyUI's"

    q, k, v = tensors(True)
    dtype = options.pop("dtype", torch.float32)
    given = [t.to(dtype) for t in (q, k, v)]
    assert override()(theirs, *given, H, skip_reshape=True, **options) == "ComfyUI's"
    ((args, kwargs),) = got
    assert all(mine is got for mine, got in zip(given, args, strict=False)) and args[3] == H
    assert kwargs == {"skip_reshape": True, **options}
    ((what, why),) = tally.left
    assert (what, tally.left[what, why]) == ("attention", 1)
    assert f"attention: {why}" in "\n".join(report.snapshot()["events"])
    return (why,)


def test_without_a_card_it_is_comfyuis(comfy: Any) -> None:
    assert handed() == ("no GPU: this is the CPU",)


def test_float32_is_comfyuis(comfy: Any, card: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_attention, "HALVES", (torch.float16, torch.bfloat16))
    assert handed() == ("it is in float32, and ours takes float16 and bfloat16",)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dropout_p": 0.1}, "dropout_p, which is not known here"),
        ({"mask": torch.ones(SQ, SK, dtype=torch.bool)}, "bool mask (9, 7) is not clear"),
        ({"mask": torch.zeros(B * H, SQ, SK)}, "the mask must broadcast"),
        ({"mask": torch.zeros(SK)}, "float32 mask (7,) is not clear"),
        ({"mask": torch.ones(B, 1, 1, 1, dtype=torch.int32)}, "int32 mask is not clear"),
    ],
    ids=["an unknown word", "a boolean mask", "a mask by heads", "a mask of keys", "numbers"],
)
def test_what_it_has_no_words_for(
    comfy: Any, card: Engine, options: dict[str, Any], why: str
) -> None:
    assert why in handed(**options)[0]
    assert not card.seen


def test_what_no_kernel_takes(comfy: Any, card: Engine) -> None:
    card.why_not = ("head_dim 8 is not there", "no such tile")
    assert handed() == ("head_dim 8 is not there; no such tile",)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("launch failed"), MemoryError("out of memory"), KeyError("x"), OSError("gone")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_ours_costs_no_picture(comfy: Any, card: Engine, error: Exception) -> None:
    card.fails = error
    assert handed()[0].startswith(f"ours failed: {type(error).__name__}")


def test_a_reason_is_told_once(comfy: Any) -> None:
    q, k, v = tensors(False)
    one = override()
    for _ in range(3):
        one(lambda *args, **kwargs: None, q, k, v, H)
    assert left() == {"attention: no GPU: this is the CPU": 3}
    assert len(report.snapshot()["events"]) == 1


def test_shapes_that_are_none() -> None:
    q, k, v = tensors(True)
    with pytest.raises(NotOursError, match=r"q, k and v are \(2, 4, 9, 8\)"):
        call_of(q, k, v, H)
    q, k, v = tensors(False)
    with pytest.raises(NotOursError, match=r"q, k and v are \(2, 9, 32\)"):
        call_of(q, k[..., 1:], v, H)
    with pytest.raises(NotOursError, match="q, k and v are"):
        call_of(q, k, v, 64, enable_gqa=True)


# --- one model, not another


def test_only_the_clone_has_it(comfy: Any, card: Engine) -> None:
    base = comfy.base.BaseModel({"query_dim": 32, "heads": 4, "dim_head": 8})
    given = comfy.patcher.ModelPatcher(base, None, None)
    given.model_options["transformer_options"]["patches"] = {"attn1_patch": [1]}
    made = optimized(given, "Memory", True)
    assert given.model_options == {"transformer_options": {"patches": {"attn1_patch": [1]}}}
    options = made.model_options["transformer_options"]
    assert options["patches"] == {"attn1_patch": [1]}
    assert made.clone().model_options["transformer_options"][KEY] is options[KEY]
    x = mask(2, 9, 32)
    with torch.no_grad():
        before = base.apply_model(x, None, transformer_options={})
        assert not card.seen
        after = base.apply_model(x, None, transformer_options=options)
    torch.testing.assert_close(after, before, atol=2e-6, rtol=1e-5)
    assert card.seen[0][1].level == "Memory"


def test_it_can_be_chosen_anew_and_left_out() -> None:
    first = optimized(Model(), "Auto", True)
    again = optimized(first, "Performance", True)
    key = "transformer_options"
    assert again.model_options[key][KEY].session.level == "Performance"
    assert first.model_options[key][KEY].session.level == "Auto"
    assert KEY not in optimized(first, "Auto", False).model_options[key]


def test_anothers_override_stays(comfy: Any) -> None:
    def another(*args: Any, **kwargs: Any) -> None: ...

    made = optimized(Model({KEY: another}), "Auto", True)
    assert made.model_options["transformer_options"][KEY] is another
    assert "the model has another override already (another of" in next(iter(left()))


def test_what_is_no_model_comes_back(comfy: Any) -> None:
    thing = object()
    assert optimized(thing, "Auto", True) is thing
    assert "the node failed: AttributeError" in next(iter(left()))
