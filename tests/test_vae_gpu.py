"""The VAE's program on a GPU: right, the same in bands as whole, within the planned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.vae.plan import Plan
from lib_rocm_sd.vae.program import Program
from tests import vae_models
from tests.vae_models import error, legs_of, own

pytestmark = pytest.mark.gpu

WIDTHS = (64, 128, 128)


def on_gpu(role: str, dtype: torch.dtype = torch.float16) -> nn.Module:
    return vae_models.ldm_coder(role, WIDTHS, groups=32).to("cuda", dtype)


def latent(height: int, width: int, batch: int = 1) -> torch.Tensor:
    return vae_models.image("ldm decoder", height, width, batch).half()


def exactly(role: str, x: torch.Tensor) -> torch.Tensor:
    """The same weights, rounded to fp16, in float64 on the CPU."""
    return own(vae_models.ldm_coder(role, WIDTHS, groups=32).half().double(), x.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_worse_than_torchs_own_half(dtype: torch.dtype) -> None:
    module = on_gpu("decoder", dtype)
    x = latent(24, 40, batch=2).to(dtype)
    ours, theirs = Program(module)(x.cuda()), own(module, x.cuda())
    exact = own(module.cpu().double(), x.double())
    assert error(ours.cpu(), exact) <= 2 * error(theirs.cpu(), exact)


@pytest.mark.parametrize("size", [(1, 1), (1, 129), (61, 83)])
@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_odd_sizes(role: str, size: tuple[int, int]) -> None:
    x = vae_models.image(f"ldm {role}", *size).half()
    assert error(Program(on_gpu(role))(x.cuda()).cpu(), exactly(role, x)) < 2e-2


def planned(module: nn.Module, x: torch.Tensor) -> tuple[Program, list[Plan]]:
    """A program, and plans within ever less memory, parking on the device and in host memory."""
    program = Program(module)
    program(x)
    whole: Any = program.last_plan
    plans: Any = program._plans
    planner = plans._planner((1, *x.shape[2:]))
    found = [
        planner.cheapest(int(whole.peak_bytes / divisor), host)
        for divisor in (1.5, 3, 6)
        for host in (0, 1 << 40)
    ]
    found = [plan for plan in found if plan is not None and not plan.whole]
    return program, [whole, *found, planner.smallest(0)]


class _Fixed:
    def __init__(self, plan: Plan, links: Any) -> None:
        self._plan = plan, links

    def plan(self, *_: object) -> tuple[Plan, Any]:
        return self._plan


@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_bands_give_the_whole_frame_again_and_again(role: str) -> None:
    """Three times each: copies that overtake the work would show as differences."""
    module = on_gpu(role)
    x = vae_models.image(f"ldm {role}", 150, 90).half().cuda()
    program, plans = planned(module, x)
    plain: Any = program._plans
    links = plain._planner((1, *x.shape[2:])).chain
    whole = program(x)
    scale = float(whole.abs().max())
    if role == "decoder":
        plans += [legs_of(module, 64, "host", hidden) for hidden in (None, "device", "host")]
    for plan in plans:
        program._plans = _Fixed(plan, links)  # type: ignore[assignment]
        first = program(x)
        difference = ((first - whole).float() / scale * 127.5).abs()
        assert float(difference.max()) <= 1, plan
        assert float((difference > 0.01).float().mean()) <= 1e-4, plan
        for _ in range(2):
            assert torch.equal(program(x), first), plan


def test_no_plan_takes_more_than_it_says() -> None:
    module = on_gpu("decoder")
    x = latent(160, 160).cuda()
    program, plans = planned(module, x)
    plain: Any = program._plans
    links = plain._planner((1, *x.shape[2:])).chain
    for plan in plans:
        program._plans = _Fixed(plan, links)  # type: ignore[assignment]
        program(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        program(x)
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= 1.1 * plan.peak_bytes + (8 << 20), (plan, peak >> 20)


def test_never_black() -> None:
    module = on_gpu("decoder")
    for name, parameter in module.named_parameters():
        if name.endswith("conv2.weight"):
            parameter.data.mul_(1e5)
    x = latent(24, 24)
    exact = own(module.cpu().double(), x.double())
    module.half().cuda()
    program = Program(module)
    assert error(program(x.cuda()).cpu(), exact) < 2e-2
    assert program.scales.stream < 1


def test_to_the_cpu_and_back() -> None:
    module = on_gpu("decoder")
    x = latent(16, 16)
    program = Program(module)
    first = program(x.cuda())
    module.cpu()
    assert error(program(x), exactly("decoder", x)) < 2e-2
    module.cuda()
    assert torch.equal(program(x.cuda()), first)
    with torch.no_grad():
        module.get_parameter("conv_out.bias").add_(1)
    assert error(program(x.cuda()), first + 1) < 2e-2
