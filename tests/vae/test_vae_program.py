"""A VAE's coder as our own program, whole frame, against the module's own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import DEFAULT, Session
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from lib_rocm_sd.report import report
from lib_rocm_sd.vae.program import SCALES, Program
from lib_rocm_sd.vae.weights import Scales, Signature
from tests.vae import vae_models
from tests.vae.vae_models import coder, error, image, needs_half, own


@pytest.mark.parametrize("kind", vae_models.KINDS)
def test_equal_to_the_module_in_double_and_single(kind: str) -> None:
    module = coder(kind).double()
    x = image(kind, batch=2).double()
    expected = own(module, x)
    program = Program(module)
    assert error(program(x), expected) < 1e-12
    assert program.last_plan is not None and program.last_plan.whole
    assert error(Program(module.float())(x.float()), expected) < 1e-5


@needs_half
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ldm decoder", "ldm encoder", "diffusers decoder"])
def test_half_is_no_worse_than_the_modules_own_half(kind: str, dtype: torch.dtype) -> None:
    module = coder(kind).to(dtype)
    x = image(kind, 16, 16).to(dtype)
    theirs, ours = own(module, x), Program(module)(x)
    assert ours.dtype == dtype
    exact = own(module.double(), x.double())
    assert error(ours, exact) <= 2 * error(theirs, exact)


@pytest.mark.parametrize("size", [(1, 1), (1, 37), (23, 1), (31, 43)])
def test_odd_sizes(size: tuple[int, int]) -> None:
    for kind in ("ldm decoder", "ldm encoder"):
        module = coder(kind).double()
        x = image(kind, *size).double()
        assert error(Program(module)(x), own(module, x)) < 1e-12


def test_sizes_that_do_not_divide_by_the_encoders_factor() -> None:
    module = coder("ldm encoder").double()
    x = image("ldm encoder", 20, 20).double()[:, :, :70, :53]
    assert error(Program(module)(x), own(module, x)) < 1e-12


def test_a_picture_too_small_to_encode_is_a_callers_mistake() -> None:
    with pytest.raises(ValueError, match=r"1 x 9 is too small: down\.0\.downsample"):
        Program(coder("ldm encoder"))(torch.zeros(1, 3, 1, 9))


def test_strides_and_dtypes_of_the_input_do_not_matter() -> None:
    module = coder("ldm decoder")
    x = image("ldm decoder", 8, 12, batch=2)
    expected = Program(module)(x)
    padded = torch.nn.functional.pad(x, (2, 3, 1, 4))[:, :, 1:9, 2:14]
    for same in (padded, x.to(memory_format=torch.channels_last), x.double()):
        assert torch.equal(Program(module)(same), expected)
    assert expected.is_contiguous() and expected.shape == (2, 3, 32, 48)


def test_the_input_is_left_alone_and_gradients_are_not_wanted() -> None:
    module, x = coder("ldm decoder"), image("ldm decoder").requires_grad_()
    before = x.detach().clone()
    assert not Program(module)(x).requires_grad
    assert torch.equal(x.detach(), before)


def test_an_empty_batch_gives_an_empty_batch() -> None:
    assert Program(coder("ldm decoder"))(torch.zeros(0, 4, 5, 6)).shape == (0, 3, 20, 24)


def test_autocast_changes_nothing() -> None:
    module, x = coder("ldm decoder"), image("ldm decoder")
    expected = Program(module)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(Program(module)(x), expected)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(4, 5, 6), r"\(N, 4, H, W\): \(4, 5, 6\)"),
        (torch.zeros(1, 5, 6, 7), r"\(N, 4, H, W\): \(1, 5, 6, 7\)"),
        (torch.zeros(1, 4, 6, 7, dtype=torch.int32), "torch.int32"),
        (torch.zeros(1, 4, 6, 7, device="meta"), "image is on meta, the weights are on cpu"),
    ],
)
def test_callers_mistakes(x: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Program(coder("ldm decoder"))(x)


@pytest.mark.parametrize("budget", [0, -1, float("nan"), float("inf"), 1.5, "1 GiB", True])
def test_a_nonsense_budget_is_a_callers_mistake(budget: Any) -> None:
    with pytest.raises(ValueError, match="memory budget"):
        Program(coder("ldm decoder"))(image("ldm decoder"), budget_bytes=budget)


def test_an_unknown_level_is_a_callers_mistake() -> None:
    session = Session(replace(DEFAULT.policy, name="Fast"))
    with pytest.raises(ValueError, match="no optimization level"):
        Program(coder("ldm decoder"))(image("ldm decoder"), session=session)


def test_a_module_that_is_not_known_says_why() -> None:
    program = Program(nn.Conv2d(4, 3, 3))
    assert "not known" in program.reasons[0]
    with pytest.raises(ValueError, match="cannot be run: Conv2d"):
        program(torch.zeros(1, 4, 8, 8))


def _scaled(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.detach().mul_(1.25)


def _like_lora(module: nn.Module) -> None:
    weight: Any = module.get_submodule("mid.block_1.conv1").weight
    with torch.no_grad():
        weight += 0.1


def _loaded(module: nn.Module) -> None:
    module.load_state_dict(vae_models.fill(coder("ldm decoder"), seed=5).state_dict())


def _replaced(module: nn.Module) -> None:
    child: Any = module.get_submodule("conv_in")
    child.weight = nn.Parameter(child.weight.detach() * 2)


def _new_layer(module: nn.Module) -> None:
    module.conv_out = vae_models.fill(nn.Conv2d(16, 3, 3, padding=1), seed=7)


def _data(module: nn.Module) -> None:
    child: Any = module.get_submodule("conv_in")
    child.weight.data = child.weight.data * 3


def _norm(module: nn.Module) -> None:
    norm: Any = module.get_submodule("norm_out")
    with torch.no_grad():
        norm.bias.add_(1)


@pytest.mark.parametrize(
    "change", [_scaled, _like_lora, _loaded, _replaced, _new_layer, _data, _norm]
)
def test_changed_weights_are_read_again(change: Callable[[nn.Module], None]) -> None:
    module = coder("ldm decoder").double()
    x = image("ldm decoder").double()
    program = Program(module)
    before = program(x)
    change(module)
    module.double()
    assert error(program(x), own(module, x)) < 1e-12
    assert error(program(x), before) > 1e-6


def test_other_dtypes_and_back() -> None:
    module, x = coder("ldm decoder"), image("ldm decoder")
    program = Program(module)
    single = program(x)
    assert program.refresh() == ()
    module.double()
    assert program(x.double()).dtype == torch.float64
    module.float()
    assert torch.equal(program(x), single)


def test_memory_of_replaced_weights_is_given_back_but_not_mistaken() -> None:
    """A weight that comes to lie where an older one lay is still seen as another."""
    module = coder("ldm decoder").double()
    x = image("ldm decoder").double()
    program = Program(module)
    child: Any = module.get_submodule("conv_in")
    for _ in range(5):
        child.weight.data = torch.randn(child.weight.shape, dtype=torch.float64)
        assert error(program(x), own(module, x)) < 1e-12


def test_weights_are_prepared_once() -> None:
    module, x = coder("ldm decoder"), image("ldm decoder")
    program = Program(module)
    program(x)
    ready = program._ready
    program(x)
    assert program._ready is ready
    program.release()
    assert program._ready == ()
    program(x)
    assert program._ready is not ready and program._ready


def test_inference_tensors_are_read_anew_each_time() -> None:
    with torch.inference_mode():
        module = coder("ldm decoder").double()
        x = image("ldm decoder").double()
    program = Program(module)
    program(x)
    with torch.inference_mode():
        _like_lora(module)
    assert error(program(x), own(module, x)) < 1e-12


def test_parameters_that_were_inference_tensors_count_as_changed() -> None:
    """Asking torch how often they were changed raises RuntimeError."""
    with torch.inference_mode():
        module = coder("ldm decoder")
    program = Program(module)
    program.refresh()
    for parameter in module.parameters():
        parameter.data = torch.zeros(parameter.shape)
    before = Signature(list(module.modules()))
    assert not before.matches() and before.matches(known=True)
    program.refresh()


def test_a_forward_replaced_later_is_noticed() -> None:
    module, x = coder("ldm decoder"), image("ldm decoder")
    program = Program(module)
    program(x)
    module.forward = lambda z: z  # type: ignore[method-assign, assignment]
    with pytest.raises(UnknownModuleError, match="forward has been replaced") as raised:
        program(x)
    why = "decoder.forward has been replaced (<lambda> of test_vae_program.py)"
    assert raised.value.reasons == program.refresh() == (why,)
    del module.forward
    assert error(program(x), own(module, x)) < 1e-5
    first: Any = module.get_submodule("conv_in")
    first.padding_mode = "circular"
    with pytest.raises(UnknownModuleError, match="padding_mode is circular"):
        program(x)
    first.padding_mode = "zeros"
    assert error(program(x), own(module, x)) < 1e-5


def loud(kind: str, gain: float, growth: float = 1.0) -> nn.Module:
    """A coder whose residual stream is `gain` times as large, and grows with each resampling."""
    module = coder(kind)
    for name, parameter in module.named_parameters():
        if any(word in name for word in ("conv2.weight", "proj_out.weight", "to_out.0.weight")):
            parameter.data.mul_(gain)
        if name == "conv_in.weight":
            parameter.data.mul_(gain)
        if "sample" in name and name.endswith("weight"):
            parameter.data.mul_(growth)
    return module


@needs_half
@pytest.mark.parametrize(("gain", "growth"), [(2e4, 1.0), (8e4, 8.0), (8e4, 32.0)])
@pytest.mark.parametrize("kind", ["ldm decoder", "ldm encoder", "diffusers decoder"])
def test_never_black(kind: str, gain: float, growth: float) -> None:
    """Values between the steps exceed fp16's 65504 by far; the output does not suffer."""
    module = loud(kind, gain, growth).half()
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    x = image(kind, 12, 12).half()
    assert not own(module, x).isfinite().all()
    exact = own(module.double(), x.double())
    program = Program(module.half())
    ours = program(x)
    assert program.scales in SCALES[1:]
    quiet = coder(kind).half()
    usual = error(own(quiet, x), own(quiet.double(), x.double()))
    assert error(ours, exact) < 4 * usual


@needs_half
def test_within_a_block_there_may_be_too_much_as_well() -> None:
    module = coder("ldm decoder")
    for name, parameter in module.named_parameters():
        if name.endswith("conv1.weight"):
            parameter.data.mul_(1e5)
    module.half()
    x = image("ldm decoder", 12, 12).half()
    assert not own(module, x).isfinite().all()
    exact = own(module.double(), x.double())
    program = Program(module.half())
    assert error(program(x), exact) < 5e-3
    assert program.scales.hidden < 1


@needs_half
def test_the_scale_is_remembered_until_the_weights_change() -> None:
    module = loud("ldm decoder", 8e4).half()
    x = image("ldm decoder", 8, 8).half()
    program = Program(module)
    program(x)
    found, tries = program.scales, []
    assert found.stream < 1
    once = program._within
    program._within = lambda *a, **k: tries.append(program.scales) or once(*a, **k)  # type: ignore[method-assign, func-returns-value]
    program(x)
    assert tries == [found]
    module.load_state_dict(coder("ldm decoder").state_dict())
    program(x)
    assert tries == [found, Scales()] and program.scales == Scales()


@needs_half
def test_of_inference_tensors_scale_and_plans_are_remembered() -> None:
    """As Forge and ComfyUI have them: what they hold is read anew, where they lie is known."""
    with torch.inference_mode():
        module = loud("ldm decoder", 8e4).half()
        x = image("ldm decoder", 8, 8).half()
    program = Program(module)
    program(x)
    found, plans, tries = program.scales, dict(program._plans), []
    assert found.stream < 1 and plans
    once = program._within
    program._within = lambda *a, **k: tries.append(program.scales) or once(*a, **k)  # type: ignore[method-assign, func-returns-value]
    program(x)
    assert tries == [found] and program._plans == plans


@needs_half
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nan_in_the_input_comes_out_and_is_reported_once(dtype: torch.dtype) -> None:
    module = coder("ldm decoder").to(dtype)
    x = image("ldm decoder", 6, 6, batch=2).to(dtype)
    clean = Program(module)(x)
    x[1, 2, 3, 4] = float("nan")
    program = Program(module)
    out = program(x)
    assert program.scales == Scales()
    assert out[1].isnan().all()
    assert torch.allclose(out[0], clean[0], atol=1e-2)
    if dtype == torch.float16:
        program(x)
        told = [event for event in report.snapshot()["events"] if "input has NaN" in event]
        assert len(told) == 1


@needs_half
def test_weights_of_nan_are_not_tried_again_and_again() -> None:
    module = coder("ldm decoder").half()
    x = image("ldm decoder", 6, 6).half()
    with torch.no_grad():
        module.get_parameter("conv_in.weight").fill_(float("nan"))
    program, tries = Program(module), []
    once = program._within
    program._within = lambda *a, **k: tries.append(program.scales) or once(*a, **k)  # type: ignore[method-assign, func-returns-value]
    assert program(x).isnan().all()
    assert program(x).isnan().all()
    assert len(tries) == 3


def _moved(module: nn.Module) -> None:
    """As a host does it that keeps a checkpoint in main memory."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def _changed(module: nn.Module) -> None:
    with torch.no_grad():
        next(module.parameters()).add_(1)


@pytest.mark.parametrize(
    "change",
    [_moved, _changed, lambda module: module.to("meta"), lambda module: module.double()],
    ids=["moved", "changed", "meta", "another dtype"],
)
def test_what_was_packed_of_other_weights_is_stale(change: Callable[[nn.Module], object]) -> None:
    module = coder("ldm decoder")
    program = Program(module)
    stale = [program.is_stale]
    program(image("ldm decoder"))
    stale.append(program.is_stale)
    change(module)
    stale.append(program.is_stale)
    program.release()
    stale.append(program.is_stale)
    assert stale == [False, False, True, False]
