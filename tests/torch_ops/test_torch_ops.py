"""Each operator over the ops' small cases: values, schema, shapes for tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lib_rocm_sd import followed, functional
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.registry import ops
from lib_rocm_sd.torch_ops import OPS, register
from lib_rocm_sd.torch_ops.table import DOORS
from tests.test_layers import _reached, graph
from tests.torch_ops.operators import CONV, call_of, small_cases, tensors

CASES = [pytest.param(op, problem, id=f"{op.name}: {problem}") for op, problem in small_cases()]
STEPS = {
    *("group norm statistics", "group norm finalize", "group norm apply"),
    *("layer norm biased", "layer norm modulated", "rms norm of heads", "rms norm"),
}
needs_opcheck = pytest.mark.skipif(
    not hasattr(torch.library, "opcheck"), reason="this torch has no opcheck (before 2.4)"
)


@pytest.fixture(autouse=True)
def nothing_followed() -> Any:
    with torch.no_grad():
        yield


def test_every_op_but_steps_of_others_is_an_operator() -> None:
    assert {op.name for op in ops()} - set(DOORS) == STEPS
    called = {call_of(op, problem)[0].__name__ for op, problem in small_cases()}
    assert called == {f"{row.name}.default" for row in OPS}


@pytest.mark.parametrize(("op", "problem"), CASES)
def test_it_is_right(op: Op[Any, Any], problem: Any) -> None:
    operator, arguments, inputs = call_of(op, problem)
    made, exact = tensors(operator(*arguments)), tensors(op.reference(inputs))
    for ours, right in zip(made, exact, strict=True):
        assert ours.shape == right.shape
        if ours.numel():
            most = op.tolerance(problem) * float(right.abs().max())
            assert float((ours.double() - right).abs().max()) <= most


@needs_opcheck
@pytest.mark.parametrize(("op", "problem"), CASES)
def test_torchs_own_checks_pass(op: Op[Any, Any], problem: Any) -> None:
    operator, arguments, _ = call_of(op, problem)
    found = torch.library.opcheck(operator, arguments)
    assert set(found.values()) == {"SUCCESS"}


def _one_each() -> dict[str, Any]:
    """The smallest case of each operator but conv_and_norm, whose gradients take long to trace."""
    found: dict[str, Any] = {}
    for op, problem in small_cases():
        name = f"{op.name}, added" if getattr(problem, "added", False) else op.name
        if name not in found and op.family != "conv":  # nothing is called while tests are collected
            found[name] = (op, problem)
    found["conv"] = (CONVS["3x3"], CONV)
    return found


@needs_opcheck
@pytest.mark.parametrize(("op", "problem"), _one_each().values(), ids=_one_each())
def test_torchs_own_checks_pass_with_gradients(op: Op[Any, Any], problem: Any) -> None:
    operator, arguments, _ = call_of(op, problem)
    given = [
        item.float().requires_grad_() if isinstance(item, torch.Tensor) else item
        for item in arguments
    ]
    with torch.enable_grad():
        found = torch.library.opcheck(operator, tuple(given))
    assert set(found.values()) == {"SUCCESS"}, operator


@pytest.mark.parametrize(("op", "problem"), CASES)
def test_the_meta_device_gives_shapes(op: Op[Any, Any], problem: Any) -> None:
    operator, arguments, _ = call_of(op, problem)
    meta = [item.to("meta") if isinstance(item, torch.Tensor) else item for item in arguments]
    for told, made in zip(tensors(operator(*meta)), tensors(operator(*arguments)), strict=True):
        assert told.device.type == "meta"
        assert (told.shape, told.dtype) == (made.shape, made.dtype)
        many = [place for place, size in enumerate(made.shape) if size > 1 and made.numel()]
        assert [told.stride(place) for place in many] == [made.stride(place) for place in many]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mistake_is_told_with_shapes_dtypes_and_devices(device: str) -> None:
    q, k = (torch.empty(1, 3, 2, size, device=device) for size in (8, 16))
    with pytest.raises(ValueError, match=r"q \(1, 3, 2, 8\) torch.float32 cpu, k \(1, 3, 2, 16\)"):
        torch.ops.rocm_sd.attention(q, k, k)
    with pytest.raises(ValueError, match="kind 5x5 is none of 3x3"):
        torch.ops.rocm_sd.conv(q, k, None, "5x5")
    with pytest.raises(ValueError, match=r"x must be \(N, H, W, C\).*float32"):
        torch.ops.rocm_sd.group_norm_of(q[0], None, None, 1)


CONV_MISTAKES = {
    "3 biases": ((8, 4, 3, 3), torch.ones(3), r"bias must be \(Co\): .*bias \(3,\) torch.float32"),
    "16 biases": ((8, 4, 3, 3), torch.ones(16), r"bias must be \(Co\): .*bias \(16,\)"),
    "1 bias": ((8, 4, 3, 3), torch.ones(1), r"bias must be \(Co\): .*bias \(1,\)"),
    "a scalar": ((8, 4, 3, 3), torch.tensor(1.0), r"bias must be \(Co\): .*bias \(\)"),
    "whole numbers": ((8, 4, 3, 3), torch.ones(8).long(), r"bias must be a float: .*int64"),
    "a 1x1 weight": ((8, 4, 1, 1), None, r"weight must be \(Co, Ci, 3, 3\)"),
    "channels": ((8, 5, 3, 3), None, "4 channels for a weight of 5"),
}
NO_WEIGHT = {
    "bias_1": dict(bias_1=torch.ones(8)),
    "weight_2": dict(weight_2=torch.ones(8, 4), bias_2=torch.ones(8)),
    "bias_2": dict(weight_1=torch.ones(8, 4), bias_2=torch.ones(8)),
}


@pytest.fixture(params=["called", "fake", "meta", "followed"])
def given(request: pytest.FixtureRequest) -> Any:
    """What puts a tensor where an operator sees it."""
    if request.param == "fake":
        with FakeTensorMode() as mode:
            yield mode.from_tensor
    elif request.param == "followed":
        with torch.enable_grad():
            yield lambda t: t.clone().requires_grad_(t.is_floating_point())
    else:
        yield lambda t: t.to("meta" if request.param == "meta" else "cpu")


@pytest.mark.parametrize("name", CONV_MISTAKES)
def test_a_convolutions_mistakes(name: str, given: Any) -> None:
    shape, bias, told = CONV_MISTAKES[name]
    x, weight = given(torch.ones(1, 5, 6, 4)), given(torch.ones(shape))
    bias = None if bias is None else given(bias)
    gamma = given(torch.ones(8))
    for call in (
        lambda: torch.ops.rocm_sd.conv(x, weight, bias),
        lambda: torch.ops.rocm_sd.conv_and_norm(x, weight, bias, gamma, gamma, 4),
    ):
        with pytest.raises(ValueError, match=told) as found:
            call()
        assert "x (1, 5, 6, 4) torch.float32 cpu" in str(found.value)
        assert f"weight {shape} torch.float32 cpu" in str(found.value)


@pytest.mark.parametrize("name", NO_WEIGHT)
def test_a_bias_without_its_weight(name: str, given: Any) -> None:
    others = {key: given(t) for key, t in NO_WEIGHT[name].items()}
    x, weight = given(torch.ones(3, 4)), given(torch.ones(8, 4))
    with pytest.raises(ValueError, match=rf"{name} without weight.*: x \(3, 4\) torch.float32 cpu"):
        torch.ops.rocm_sd.linear(x, weight, **others)


def test_rows_keep_their_shape() -> None:
    x, weight = torch.randn(2, 3, 8), torch.randn(4, 8)
    made = torch.ops.rocm_sd.linear(x, weight, residual=torch.ones(2, 3, 4))
    assert torch.allclose(made, x @ weight.t() + 1, atol=1e-5)
    assert torch.ops.rocm_sd.linear(x[:, :0], weight).shape == (2, 0, 4)


def test_of_nothing_two_tensors_come_too() -> None:
    x = torch.empty(0, 8)
    y, total = torch.ops.rocm_sd.layer_norm_added(x, x, None, None)
    assert y.shape == total.shape == (0, 8)
    image, gamma = torch.empty(0, 5, 6, 4), torch.ones(20)
    y, norm = torch.ops.rocm_sd.conv_and_norm(image, torch.ones(20, 4, 3, 3), None, gamma, gamma, 5)
    assert (y.shape, norm.shape) == ((0, 5, 6, 24), (0, 20, 2))


def test_autocast_has_no_say() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        made = torch.ops.rocm_sd.linear(x, weight)
    assert torch.equal(made, functional.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        x.requires_grad_()
        made = torch.ops.rocm_sd.linear(x, weight)
        (found,) = torch.autograd.grad(made, x, torch.ones_like(made))
    assert made.dtype == found.dtype == torch.float32
    assert torch.allclose(found, weight.sum(0), atol=1e-6)


def test_no_webui_registers_them() -> None:
    imports = dict(graph())
    for host in ("hosts.webui", "hosts.comfyui"):
        imports["a host"] = {name for name in imports if name.startswith(host)}
        found = _reached("a host", imports)
        assert "functional" in found
        assert not [name for name in found if name.startswith("torch_ops")]


@pytest.mark.filterwarnings("ignore:.*impl_abstract:FutureWarning")
def test_an_older_torch_has_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what 2.1 to 2.3 offer, of which the newest still has all but one name."""
    if not hasattr(torch.library, "impl_abstract"):
        monkeypatch.setattr(torch.library, "impl_abstract", torch.library.register_fake, False)
    monkeypatch.setattr(register, "KEEPS_WHOLE", False)
    monkeypatch.setattr(register, "_WITH_KEYSET", False)
    monkeypatch.setattr(followed, "_any_wants", None)
    library = register.registered(OPS, "rocm_sd_older")
    attention = torch.ops.rocm_sd_older.attention
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    assert attention(q.to("meta"), q.to("meta"), q.to("meta")).shape == (1, 3, 16)
    with torch.enable_grad():
        made = attention(q, q, q)
        (found,) = torch.autograd.grad(made.sum(), q)
        (right,) = torch.autograd.grad(functional.attention(q, q, q).sum(), q)
    assert torch.allclose(found, right, atol=1e-6)
    assert not attention(q, q, q).requires_grad
    del library
