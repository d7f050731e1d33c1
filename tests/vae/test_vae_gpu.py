"""The VAE's program on a GPU: right, the same in bands as whole, within the planned memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.report import report
from lib_rocm_sd.runtime import build
from lib_rocm_sd.vae import plan as plans
from lib_rocm_sd.vae.plan import BandPlan
from lib_rocm_sd.vae.program import Program
from lib_rocm_sd.vae.trace import Chain
from tests.vae import vae_models
from tests.vae.vae_models import error, fixed, legs_of, own

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


@pytest.mark.parametrize("size", [(1, 1), (1, 129), (1, 999), (61, 83)])
@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_odd_sizes(role: str, size: tuple[int, int]) -> None:
    x = vae_models.image(f"ldm {role}", *size).half()
    assert error(Program(on_gpu(role))(x.cuda()).cpu(), exactly(role, x)) < 2e-2


def planned(module: nn.Module, x: torch.Tensor) -> tuple[Chain, list[BandPlan]]:
    """The chain and plans within ever less memory, parking on the device and in host memory."""
    program = Program(module)
    program(x, mode="whole")
    (plans,) = program._plans.values()
    planner = plans.planner((1, *x.shape[2:]))
    whole = planner.whole()
    found = [
        planner.cheapest(int(whole.peak_bytes / divisor), host)
        for divisor in (1.5, 3, 6)
        for host in (0, 1 << 40)
    ]
    banded = [plan for plan in found if plan is not None and not plan.whole]
    return planner.chain, [whole, *banded, planner.smallest(0)]


def pixels_apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Differences in 1/255 of the range."""
    return ((one - other).float() / float(other.abs().max()) * 127.5).abs()


@pytest.mark.parametrize("size", [(150, 90), (64, 64), (61, 83), (96, 1)])
@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_bands_give_the_whole_frame_again_and_again(role: str, size: tuple[int, int]) -> None:
    """Three times each: copies that overtake the work would show as differences."""
    module = on_gpu(role)
    x = vae_models.image(f"ldm {role}", *size).half().cuda()
    links, plans = planned(module, x)
    whole = Program(module)(x, mode="whole")
    if role == "decoder":
        plans += [legs_of(module, 64, "host", hidden) for hidden in (None, "device", "host")]
    for plan in plans:
        program = fixed(module, plan, links)
        first = program(x)
        difference = pixels_apart(first, whole)
        assert float(difference.max()) <= 1, plan
        assert float((difference > 0.01).float().mean()) <= 1e-4, plan
        for _ in range(2):
            assert torch.equal(program(x), first), plan


@pytest.mark.parametrize("role", ["decoder", "encoder"])
@pytest.mark.parametrize("size", [(64, 48), (128, 40), (160, 33)])
def test_bands_are_the_whole_frame_to_the_bit(role: str, size: tuple[int, int]) -> None:
    """By our kernels, each image's by one config."""
    module = on_gpu(role)
    x = vae_models.image(f"ldm {role}", *size).half().cuda()
    program = Program(module)
    whole = program(x, mode="whole")
    in_bands = program(x, mode="banded")
    assert program.last_plan is not None and not program.last_plan.whole
    assert torch.equal(in_bands, whole)


def taken(call: Callable[[], object]) -> int:
    """The most device memory that a call takes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_no_plan_takes_more_than_it_says(role: str) -> None:
    module = on_gpu(role)
    x = vae_models.image(f"ldm {role}", 160, 160).half().cuda()
    links, plans = planned(module, x)
    for plan in plans:
        program = fixed(module, plan, links)
        program(x)
        peak = taken(lambda program=program: program(x))  # type: ignore[misc]
        print(f"{role} {plan}: {peak / 2**20:.1f} MiB taken")
        assert peak <= 1.05 * plan.peak_bytes + (1 << 20), (plan, peak >> 20)


def test_in_place_is_out_of_place_to_the_bit() -> None:
    module = on_gpu("decoder")
    x = latent(70, 45).cuda()
    links, (plan, *_) = planned(module, x)
    assert links.in_place
    both = [fixed(module, plan, like) for like in (links, None)]
    over, apart = (program(x) for program in both)
    assert torch.equal(over, apart)
    less, more = (taken(lambda program=program: program(x)) for program in both)  # type: ignore[misc]
    assert less < 0.85 * more


def test_in_halves_is_at_once_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    module = on_gpu("decoder")
    x = latent(70, 45).cuda()
    at_once = Program(module)(x, mode="whole")
    monkeypatch.setattr(plans, "HALVED_BYTES", 0)
    links, (plan, *_) = planned(module, x)
    assert links.halved
    assert torch.equal(fixed(module, plan, links)(x), at_once)


def test_a_megapixel_of_stable_diffusion_takes_less_than_800_mib() -> None:
    module = vae_models.ldm_coder("decoder", (128, 256, 512, 512), groups=32, blocks=2)
    program = Program(module.half().cuda())
    x = latent(128, 128).cuda()
    program(x, mode="whole")
    peak = taken(lambda: program(x, mode="whole"))
    assert program.last_plan is not None and program.last_plan.whole
    print(f"{peak / 2**20:.1f} MiB taken, {program.last_plan.peak_bytes / 2**20:.1f} predicted")
    assert peak <= 800 << 20
    assert peak <= 1.05 * program.last_plan.peak_bytes


def milliseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin)


def test_the_first_at_a_new_size_costs_like_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    module = vae_models.ldm_coder("decoder", (128, 256, 512, 512), groups=32, blocks=2)
    program = Program(module.half().cuda())
    for size in ((40, 40), (100, 72)):  # for large images NVIDIA's cards have another attention
        program(latent(*size).cuda())

    def compiled(*_: object) -> None:
        raise AssertionError("something is compiled for a size although another was decoded")

    monkeypatch.setattr(build, "_compile", compiled)
    for height, width in ((64, 64), (97, 72), (128, 128)):
        x = latent(height, width).cuda()
        first, second = (milliseconds(lambda x=x: program(x)) for _ in range(2))  # type: ignore[misc]
        program.prepare(height + 8, width, torch.float16, torch.device("cuda"))
        y = latent(height + 8, width).cuda()
        prepared = milliseconds(lambda y=y: program(y))  # type: ignore[misc]
        print(
            f"{8 * height} x {8 * width}: first {first:.1f} ms, second {second:.1f}, "
            f"{8 * height + 64} prepared {prepared:.1f}"
        )


@pytest.mark.parametrize("role", ["decoder", "encoder"])
def test_performance_tells_its_memory_too(role: str) -> None:
    session = Session.of("Performance")
    module = on_gpu(role)
    x = vae_models.image(f"ldm {role}", 96, 96).half().cuda()
    program = Program(module)
    reference = exactly(role, x.cpu())
    assert error(program(x, session=session).cpu(), reference) < 2e-2
    peak = taken(lambda: program(x, session=session))
    assert program.last_plan is not None
    assert peak <= 1.05 * program.last_plan.peak_bytes + (1 << 20)


def test_single_precision_by_the_users_wish() -> None:
    module = on_gpu("decoder", torch.float32)
    x = latent(24, 20).float()
    report.clear()
    assert error(Program(module)(x.cuda()).cpu(), exactly("decoder", x)) < 1e-2
    assert any("not needed" in told for told in report.snapshot()["events"])


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


def test_memory_is_given_back_when_the_module_has_left() -> None:
    module, x = on_gpu("decoder"), latent(24, 40).cuda()
    program = Program(module)
    program(x)  # the engine's own first uses are over
    program.release()
    torch.cuda.synchronize()
    with_module = torch.cuda.memory_allocated()
    program(x)
    assert torch.cuda.memory_allocated() > with_module
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    module.cpu()
    assert torch.cuda.memory_allocated() > with_module
    assert program.is_stale
    program.release()
    assert torch.cuda.memory_allocated() <= with_module - weights
