"""ComfyUI's VAE as our program: what it gives, its memory, when it steps aside."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lib_rocm_sd import policy, report
from lib_rocm_sd.device import identify
from lib_rocm_sd.errors import DeviceOutOfMemoryError
from lib_rocm_sd.hosts.comfyui import vae as vaes
from lib_rocm_sd.hosts.comfyui.host import session_of, tally
from lib_rocm_sd.hosts.comfyui.vae import NodeWish
from lib_rocm_sd.modules import compared
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from lib_rocm_sd.vae.program import Program
from tests.comfyui.conftest import left
from tests.comfyui.play import CARD, Engine
from tests.vae.vae_models import error, fill

PARTS = {"VAE decode", "VAE encode"}


@pytest.fixture
def vae(comfy: Any) -> Iterator[Any]:
    """ComfyUI's, made and used in inference mode as ComfyUI does it."""
    with torch.inference_mode():
        weights = fill(comfy.sd.AutoencoderKL(ddconfig=comfy.sd.CONFIG, embed_dim=4)).state_dict()
        yield comfy.sd.VAE(sd=weights)


def forwards(vae: Any) -> list[Any]:
    parts = (vae.first_stage_model.decoder, vae.first_stage_model.encoder)
    return [vars(part).get("forward") for part in parts]


def wish(mode: str = "auto", level: str = "Auto", **others: Any) -> NodeWish:
    return NodeWish(mode, session=session_of(level), **others)


def latent(size: int = 8, batch: int = 1) -> torch.Tensor:
    return torch.randn((batch, 4, size, size), generator=torch.Generator("cpu").manual_seed(0))


def picture(size: int = 32) -> torch.Tensor:
    return torch.rand((1, size, size, 3), generator=torch.Generator("cpu").manual_seed(0))


def events() -> str:
    return "\n".join(report.snapshot()["events"])


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    ("asked", "whole"),
    [(wish(), True), (wish("banded"), False), (wish(budget_bytes=1 << 20), False)],
    ids=["auto", "banded", "budget"],
)
def test_it_gives_what_comfyuis_gives(
    vae: Any, card: Engine, asked: NodeWish, whole: bool, inference: bool
) -> None:
    z, image = latent(32, 2), picture(128)
    with torch.inference_mode(inference), torch.no_grad():
        decoded, encoded = vae.decode(z), vae.encode(image)
        ours = vaes.with_ours(vae, asked)
        for _ in range(2):
            assert error(ours.decode(z), decoded) < 1e-5
            assert error(ours.encode(image), encoded) < 1e-5
        assert torch.equal(vae.decode(z), decoded)
    assert dict(tally.ours) == {"VAE decode": 2, "VAE encode": 2} and not tally.left
    for role in ("decoder", "encoder"):
        made = vaes.coder_of(vae.first_stage_model, role, asked)
        assert made is not None and made.program.last_plan is not None
        assert made.program.last_plan.whole is whole
        assert not made.program._ready  # nothing of ours stays on the device


def test_an_image_that_was_compared_and_is_comfyuis_is_counted_once(
    vae: Any, card: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(compared.VARIABLE)
    monkeypatch.setattr(vaes.Coder, "_compared", lambda self, image: "differed by 5.0%")
    ours = vaes.with_ours(vae, wish())
    for _ in range(2):
        ours.decode(latent())
    assert dict(tally.ours) == {"VAE decode": 1}
    why = "a corner of the image differed by 5.0%: the host's own is used"
    assert left() == {f"VAE decode: {why}": 1}


def test_the_given_one_stays_as_it_is(vae: Any, card: Engine, comfy: Any) -> None:
    before, model = dict(vars(vae)), vae.first_stage_model
    ours = vaes.with_ours(vae, wish())
    ours.decode(latent())
    assert vars(vae) == before and forwards(vae) == [None, None]
    assert ours.patcher is vae.patcher and ours.first_stage_model is not model
    assert ours.first_stage_model.decoder is model.decoder
    assert ours.get_sd().keys() == vae.get_sd().keys()
    again = vaes.with_ours(ours, wish("banded"))
    assert again.first_stage_model.rocm_sd_model is model
    assert again.memory_used_decode.theirs is vae.memory_used_decode
    assert copy.copy(ours.first_stage_model).rocm_sd_model is model
    assert comfy.sd.VAE() is not None


def test_a_deep_copy_is_ours_with_weights_of_its_own(vae: Any, card: Engine) -> None:
    """As nodes for seamless tiling make one, to change its layers."""
    ours = vaes.with_ours(vae, wish("banded"))
    decoded = ours.decode(latent())
    made = copy.deepcopy(ours)
    assert torch.equal(made.decode(latent()), decoded) and tally.ours["VAE decode"] == 2
    assert made.first_stage_model.rocm_sd_wish is ours.first_stage_model.rocm_sd_wish
    model = made.first_stage_model.rocm_sd_model
    assert made.memory_used_decode.model is made.memory_used_encode.model is model
    assert model is not vae.first_stage_model
    for parameter in model.parameters():
        parameter.zero_()
    assert not torch.equal(made.decode(latent()), decoded)
    assert torch.equal(ours.decode(latent()), decoded) and tally.ours["VAE decode"] == 4


def test_the_estimate_of_a_deep_copy_looks_at_the_copy(vae: Any, card: Engine) -> None:
    shape, dtype = (1, 4, 8, 8), torch.float32
    ours = vaes.with_ours(vae, wish())
    made, own = copy.deepcopy(ours), vae.memory_used_decode(shape, dtype)
    made.first_stage_model.decoder.conv_in.padding_mode = "circular"
    made.decode(latent())
    assert made.memory_used_decode(shape, dtype) == own
    assert ours.memory_used_decode(shape, dtype) < own


@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_only_what_may_be_ours_is(vae: Any, card: Engine, role: str) -> None:
    ours = vaes.with_ours(vae, wish(roles=(role,)))
    ours.decode(latent())
    ours.encode(picture())
    assert set(tally.ours) == {"VAE decode" if role == "decoder" else "VAE encode"}


def test_tiles_that_are_asked_for_are_ours_each(vae: Any, card: Engine) -> None:
    tiled = vae.decode_tiled_(latent(16))
    assert error(vaes.with_ours(vae, wish()).decode_tiled_(latent(16)), tiled) < 1e-5
    assert tally.ours["VAE decode"] == 2


# --- memory


def required(comfy: Any, ours: Any, call: Any) -> float:
    comfy.management._required.clear()
    call(ours)
    (found,) = comfy.management._required
    return float(found)


@pytest.mark.usefixtures("brief_tuning")
@pytest.mark.parametrize("role", ["decoder", "encoder"])
@pytest.mark.parametrize("level", policy.LEVELS)
def test_comfyui_makes_room_for_what_is_taken(
    comfy: Any, vae: Any, card: Engine, level: str, role: str
) -> None:
    """What the level must find free to make the whole frame, or takes for its bands."""

    def call(one: Any) -> None:
        _ = one.decode(latent(64)) if role == "decoder" else one.encode(picture(256))

    own = required(comfy, vae, call)
    asked = wish(level=level)
    found = required(comfy, vaes.with_ours(vae, asked), call)
    made = vaes.coder_of(vae.first_stage_model, role, asked)
    assert made is not None and made.program.last_plan is not None
    packed = sum(tensor.numel() * 4 for tensor in made.module.parameters())
    taken = made.program.last_plan.peak_bytes
    share = {"Auto": 0.5, "Performance": 0.9, "Memory": 1.0}[level]
    assert found == packed + int(taken / share) < own


def test_bands_ask_for_less(comfy: Any, vae: Any, card: Engine) -> None:
    def call(one: Any) -> None:
        one.decode(latent(64))

    asked = [wish(), wish("banded"), wish(budget_bytes=8 << 20)]
    needs = [required(comfy, vaes.with_ours(vae, each), call) for each in asked]
    assert needs[0] > needs[1] > needs[2]


def test_a_budget_that_is_not_enough_is_told(vae: Any, card: Engine) -> None:
    vaes.with_ours(vae, wish(budget_bytes=1 << 16)).decode(latent(64))
    assert "the VAE's decoder needs" in events() and "the budget is 0 MiB" in events()


def test_comfyuis_estimate_stays_where_ours_does_not_run(
    comfy: Any, vae: Any, card: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = vae.memory_used_decode((1, 4, 8, 8), torch.float32)
    ours = vaes.with_ours(vae, wish())
    assert ours.memory_used_decode((1, 4, 8, 8), torch.float32) < own
    assert ours.memory_used_decode((1, 4, 2, 8, 8), torch.float32) == vae.memory_used_decode(
        (1, 4, 2, 8, 8), torch.float32
    )
    monkeypatch.setattr(Program, "prepare", lambda *args, **kwargs: 1 // 0)
    assert ours.memory_used_decode((1, 4, 8, 8), torch.float32) == own
    assert "its memory cannot be foreseen: ZeroDivisionError" in next(iter(left()))
    monkeypatch.setattr(vaes, "usable", lambda device: ["no compiler"])
    assert ours.memory_used_decode((1, 4, 8, 8), torch.float32) == own


def test_comfyuis_estimate_stays_while_a_vae_is_loaded_in_parts(vae: Any, card: Engine) -> None:
    """Its layers cast only after they were loaded for a decode, until they are unloaded."""
    conv, ours = vae.first_stage_model.decoder.conv_in, vaes.with_ours(vae, wish())
    own = vae.memory_used_decode((1, 4, 8, 8), torch.float32)
    conv.comfy_cast_weights = True
    ours.decode(latent())
    conv.comfy_cast_weights = False
    assert ours.memory_used_decode((1, 4, 8, 8), torch.float32) == own
    ours.decode(latent())
    assert ours.memory_used_decode((1, 4, 8, 8), torch.float32) < own


# --- progress and Cancel


def test_progress_is_shown_on_the_node(comfy: Any, vae: Any, card: Engine) -> None:
    vaes.with_ours(vae, wish("banded")).decode(latent(64))
    shown = comfy.utils._shown
    done, total = shown[-1]
    assert done == total > 1 and [value for value, _ in shown] == sorted(v for v, _ in shown)


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("mode", ["auto", "banded"])
def test_cancel_ends_a_decode_as_comfyui_does(
    comfy: Any, vae: Any, card: Engine, mode: str, hooked: bool
) -> None:
    """By what ComfyUI raises where progress is shown, or, without its hook, by our own look."""
    comfy.utils._hooked[0] = hooked
    ours = vaes.with_ours(vae, wish(mode))
    comfy.management.interrupt_current_processing()
    with pytest.raises(comfy.management.InterruptProcessingException):
        ours.decode(latent(64))
    assert not comfy.management.processing_interrupted()
    assert not tally.left and forwards(vae) == [None, None]
    assert ours.decode(latent(64)).shape == (1, 256, 256, 3)


# --- when it steps aside


def test_without_a_card_it_is_comfyuis_to_the_bit(vae: Any) -> None:
    decoded, encoded = vae.decode(latent()), vae.encode(picture())
    ours = vaes.with_ours(vae, wish())
    assert torch.equal(ours.decode(latent()), decoded)
    assert torch.equal(ours.encode(picture()), encoded)
    assert left() == {f"{part}: no GPU: this is the CPU": 1 for part in PARTS}
    assert ours.memory_used_decode((1, 4, 8, 8), torch.float32) == vae.memory_used_decode(
        (1, 4, 8, 8), torch.float32
    )


def test_float32_is_comfyuis(vae: Any, card: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vaes, "HALVES", (torch.float16,))
    decoded = vae.decode(latent())
    assert torch.equal(vaes.with_ours(vae, wish()).decode(latent()), decoded)
    assert "its weights are float32; start ComfyUI with --fp16-vae" in next(iter(left()))


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float16,)], ids=["half", "single"])
def test_streamed_weights_are_named_as_what_they_are(
    vae: Any, card: Engine, dtypes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in main memory, where no card is; what counts is where the image is."""
    device = torch.device("meta")
    monkeypatch.setattr(vaes, "HALVES", dtypes)
    monkeypatch.setattr(
        vaes, "identify", lambda where: CARD if where == device else identify(where)
    )
    decoder = vae.first_stage_model.decoder
    for layer in decoder.modules():
        if hasattr(layer, "comfy_cast_weights"):
            layer.comfy_cast_weights = True
    made = vaes.Coder(decoder, "decoder")
    why = made.refusal(latent().to(device))
    assert why.startswith("conv_in and ") and why.endswith(
        "its weights from elsewhere in each call"
    )
    assert made.refusal(latent()) == "no GPU: this is the CPU"


CHANGES: dict[str, Any] = {
    "brings its weights from elsewhere": lambda conv: setattr(conv, "comfy_cast_weights", True),
    "has its weights changed": lambda conv: setattr(conv, "weight_function", [torch.clone]),
    "conv_in.forward has been replaced": lambda conv: setattr(conv, "forward", lambda x: x),
}


@pytest.mark.parametrize("why", CHANGES)
def test_changed_layers_are_comfyuis(vae: Any, card: Engine, why: str) -> None:
    conv = vae.first_stage_model.decoder.conv_in
    ours = vaes.with_ours(vae, wish())
    first = ours.decode(latent())
    own = conv.forward
    CHANGES[why](conv)
    if "replaced" in why:
        conv.forward = own
        conv.forward = lambda x: own(x)
    assert torch.equal(ours.decode(latent()), vae.decode(latent()))
    assert any(why in told for told in left())
    for name in ("comfy_cast_weights", "weight_function", "forward"):
        vars(conv).pop(name, None)
    assert torch.equal(ours.decode(latent()), first)
    assert tally.ours["VAE decode"] == 2


def test_an_upsampling_by_another_factor_is_comfyuis(vae: Any, card: Engine) -> None:
    vae.first_stage_model.decoder.up[1].upsample.scale_factor = (1.0, 2.0, 2.0)
    vaes.with_ours(vae, wish()).decode(latent())
    assert "up.1.upsample.scale_factor is (1.0, 2.0, 2.0)" in next(iter(left()))


def test_anothers_forward_stays(vae: Any, card: Engine) -> None:
    own = vae.first_stage_model.decoder.forward
    vae.first_stage_model.decoder.forward = another = lambda z: own(z)
    decoded = vae.decode(latent())
    assert torch.equal(vaes.with_ours(vae, wish()).decode(latent()), decoded)
    assert forwards(vae)[0] is another
    assert "its forward has been replaced" in next(iter(left()))


@pytest.mark.parametrize(
    "failure",
    [RuntimeError("launch failed"), KeyError("x"), UnknownModuleError(("it changed",))],
    ids=lambda failure: type(failure).__name__,
)
def test_an_error_of_ours_costs_no_picture(
    vae: Any, card: Engine, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise failure

    decoded = vae.decode(latent())
    monkeypatch.setattr(Program, "__call__", fails)
    assert torch.equal(vaes.with_ours(vae, wish()).decode(latent()), decoded)
    assert len(left()) == 1 and forwards(vae) == [None, None]


@pytest.mark.parametrize("kind", [DeviceOutOfMemoryError, torch.cuda.OutOfMemoryError])
def test_out_of_memory_leads_to_comfyuis_tiles(
    vae: Any, card: Engine, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ComfyUI's own decode has run out of it, whatever the error's class."""
    run, seen = Program.__call__, []

    def fails(self: Program, image: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.append(image.shape[2])
        if image.shape[2] == 16:
            raise kind("out of memory")
        return run(self, image, **kwargs)

    monkeypatch.setattr(Program, "__call__", fails)
    made = vaes.with_ours(vae, wish()).decode(latent(16))
    assert seen == [16, 8, 8] and made.shape == (1, 64, 64, 3)


def test_what_is_no_vae_comes_back(comfy: Any, vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = comfy.sd.VAE()
    assert vaes.with_ours(empty, wish()) is empty
    del vae.memory_used_decode
    assert vaes.with_ours(vae, wish()) is vae
    assert "VAE: the node failed: AttributeError" in next(iter(left()))
