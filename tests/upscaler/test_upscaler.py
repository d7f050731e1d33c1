"""Upscalers as our own programs: the host's result, whole and in bands, within the memory said."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.arch import amd_table
from lib_rocm_sd.catalog import upscaler as catalog
from lib_rocm_sd.catalog.vae import Layer
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.upscaler import UpscalerStandIn
from lib_rocm_sd.lab import upscaler_models
from lib_rocm_sd.modules.stand_in import UnknownModuleError
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.report import Report
from lib_rocm_sd.shipped import AT_START, SWINIR_PART, UPSCALER_PART, part_specs, shipped
from lib_rocm_sd.upscaler import program, windows
from lib_rocm_sd.upscaler.plan import Planner
from lib_rocm_sd.upscaler.program import Upscaler, chain_of
from lib_rocm_sd.upscaler.steps import ConvStep, WindowStep, read
from lib_rocm_sd.upscaler.weights import SCALES
from lib_rocm_sd.vae.bands import Interrupted, Overflow
from lib_rocm_sd.vae.plan import BandPlan
from tests.peak import Peak
from tests.upscaler.networks import KINDS, compact, network, own, picture, rrdb, span, swinir
from tests.vae.vae_models import needs_half, torchs

ODD = (21, 13)


def in_plan(module: nn.Module, chosen: Callable[[Planner], BandPlan]) -> Upscaler:
    """A program in float64 that keeps to one plan."""
    upscaler = Upscaler(module, torch.float64)

    def planned(size: tuple[int, int, int], *rest: Any, **named: Any) -> Any:
        planner = Planner(chain_of(upscaler.network, size, torch.float64), torchs)
        return chosen(planner), planner.chain

    upscaler._planned = planned  # type: ignore[method-assign]
    return upscaler


def of_height(planner: Planner, rows: int, keep: str) -> BandPlan:
    """All legs in bands of `rows` of the smallest image."""
    found = planner._plan(keep, 0)
    growth = planner.chain.network.growth
    legs = [replace(leg, rows=rows * growth[leg.stop]) for leg in found.legs]
    return replace(found, legs=tuple(legs))


@pytest.mark.parametrize("kind", KINDS)
def test_the_networks_own_result(kind: str) -> None:
    module = network(kind).double()
    x = picture(module, *((24, 12) if "basicsr x" in kind else ODD))
    upscaler = Upscaler(module, torch.float64)
    assert not upscaler.reasons
    expected = own(module, x)
    error = (upscaler(x) - expected).abs().max() / expected.abs().max()
    assert error < 1e-12
    assert upscaler.last_plan is not None and upscaler.last_plan.whole


@pytest.mark.parametrize("keep", ["device", "host"])
@pytest.mark.parametrize(
    "kind", ["x4", "x3", "x2", "plus", "compact", "span norm", "swinir", "swinir grey"]
)
def test_bands_of_any_height_give_the_whole_pictures_result(kind: str, keep: str) -> None:
    module = network(kind).double()
    x = picture(module, *ODD)
    expected = own(module, x)
    for rows in (3, 8):
        upscaler = in_plan(module, lambda planner, rows=rows: of_height(planner, rows, keep))  # type: ignore[misc]
        assert (upscaler(x) - expected).abs().max() / expected.abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["x4", "x2", "compact", "span", "swinir"])
@pytest.mark.parametrize("height, width", [(1, 1), (3, 7), (2, 33), (17, 4)])
def test_tiny_pictures(kind: str, height: int, width: int) -> None:
    module = network(kind).double()
    x = picture(module, height, width)
    upscaler = Upscaler(module, torch.float64)
    smallest = {"x2": 2, "swinir": 3}.get(kind, 1)
    if height < smallest:  # there is nothing to reflect: the host raises, too
        with pytest.raises(RuntimeError, match=r"[Pp]adding"):
            own(module, x)
        with pytest.raises(RuntimeError, match=r"[Pp]adding"):
            upscaler(x)
        return
    expected = own(module, x)
    assert (upscaler(x) - expected).abs().max() / expected.abs().max() < 1e-12


def test_a_wide_picture() -> None:
    """Of more than 16384 pixels, whole and in bands."""
    module = upscaler_models.settle(upscaler_models.SRVGGNetCompact(1, 8, 0))
    x, upscaler = picture(module, 17, 16411), Upscaler(module, torch.float32)
    whole = upscaler(x)
    assert (whole - own(module, x)).abs().max() < 1e-5
    planner = Planner(chain_of(upscaler.network, (1, 17, 16411), torch.float32), torchs)
    assert torch.equal(upscaler(x, budget_bytes=planner.smallest(0).peak_bytes), whole)
    assert upscaler.last_plan is not None and not upscaler.last_plan.whole


def test_a_batch_is_made_at_once_or_one_after_the_other() -> None:
    module = network("x4").double()
    x = picture(module, 9, 7, batch=3)
    upscaler = Upscaler(module, torch.float64)
    told: list[tuple[int, int]] = []
    expected = own(module, x)
    whole = upscaler(x, mode="whole", progress=lambda *at: told.append(at))
    banded = upscaler(x, mode="banded", progress=lambda *at: told.append(at))
    for result in (whole, banded):
        assert (result - expected).abs().max() / expected.abs().max() < 1e-12
    assert told[-1][0] == told[-1][1] > 3
    assert upscaler(x[:0]).shape == (0, 3, 36, 28)


def test_strides_and_dtypes_of_a_picture() -> None:
    module = network("compact")
    x = picture(module, 10, 12)
    upscaler = Upscaler(module, torch.float32)
    expected = own(module, x)
    turned = x.contiguous(memory_format=torch.channels_last)
    sliced = torch.cat((x, x), 3)[..., :12]
    for one in (turned, sliced):
        assert torch.allclose(upscaler(one), expected, atol=1e-5)
    assert upscaler(x.half()).dtype == torch.float16


@needs_half
@pytest.mark.parametrize("kind", ["x4", "x2", "plus", "compact", "span", "swinir"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
def test_half_is_no_further_from_float32_than_the_hosts(kind: str, weights: torch.dtype) -> None:
    module = network(kind).to(weights).float()  # the values that the file has
    x = picture(module, 11, 5)  # small: a CPU multiplies halves slowly
    right = own(module, x)
    ours = Upscaler(module.to(weights))(x)
    half = own(module.half(), x.half()).float()
    # torch on a CPU rounds a layer where ours does; which of the two ends nearer is the CPU's luck
    assert (ours - right).norm() <= max(1.1 * (half - right).norm(), 1e-5 * right.norm())
    assert (ours - right).abs().max() < 1 / 255


@needs_half
def test_a_host_with_bfloat16_has_fp16s_picture() -> None:
    """Bfloat16 has too few bits for 255 steps."""
    module = network("x4").bfloat16()
    x = picture(module, *ODD).float()
    ours = UpscalerStandIn(module, Session.of("Auto")).serve(x)
    assert (ours - own(module.float(), x)).abs().max() < 1 / 255


def test_kept_images_are_few_and_near() -> None:
    chain = chain_of(read(network("x4")), (1, 16, 16), torch.float16)
    ends = chain.cuts
    names = [chain.network.steps[image - 1].name for image in ends]
    assert names == ["model.0", "model.1.sub.0.RDB3.conv5.0", "model.1.sub.2", "model.10"]


def test_dense_blocks_have_one_buffer() -> None:
    network_ = read(network("x4"))
    assert len(network_.groups) == 6 and {len(group) for group in network_.groups} == {5}


CATALOG: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Layer]], dict[str, Any]]] = {
    "RRDBNet": (lambda: upscaler_models.RRDBNet(blocks=1), catalog.rrdb, {"blocks": 1}),
    "narrow": (
        *(lambda: upscaler_models.RRDBNet(4, 32, 1), catalog.rrdb),
        {"blocks": 1, "channels": 32},
    ),
    "ESRGAN+": (
        *(lambda: rrdb(num_filters=64, num_blocks=1, plus=True), catalog.rrdb),
        {"blocks": 1, "plus": True},
    ),
    "compact": (
        *(lambda: upscaler_models.SRVGGNetCompact(convs=3), catalog.compact),
        {"layers": 3},
    ),
    "compact ReLU": (
        *(lambda: compact(num_feat=48, num_conv=1, upscale=2, act_type="relu"), catalog.compact),
        {"layers": 1, "channels": 48, "activation": "leaky relu", "scale": 2},
    ),
    "SPAN": (lambda: span(feature_channels=48, upscale=4), catalog.span, {}),
}


@pytest.mark.parametrize("which", CATALOG)
def test_the_catalogs_layers_are_what_is_launched(which: str) -> None:
    make, layers, how = CATALOG[which]
    chain = chain_of(read(make().eval()), (1, 19, 33), torch.float16)
    trace = chain.trace(chain.last, chain.rows(chain.last), frozenset((0,)))
    assert [each.problem for each in layers(19, 33, **how)] == chain.conv_problems(trace)


def test_the_catalog_has_what_people_use() -> None:
    """Each class of a convolution, so that none is compiled amid a picture."""
    known = {op.test_problems(problem) for op, problem in catalog.work()}
    networks = [
        *(span(feature_channels=48, upscale=scale) for scale in (2, 4)),
        *(compact(num_feat=64, num_conv=2, act_type=act) for act in ("prelu", "relu", "leakyrelu")),
        *(compact(num_feat=width, num_conv=2, upscale=s) for width in (24, 48) for s in (1, 2, 4)),
        *(rrdb(num_filters=64, num_blocks=1, scale=scale) for scale in (1, 2, 3, 4)),
        rrdb(num_filters=64, num_blocks=1, in_nc=12, shuffle_factor=2),
        rrdb(num_filters=64, num_blocks=1, plus=True),
        rrdb(num_filters=32, num_blocks=1),
    ]
    for module in networks:
        for op, problem in Upscaler(module.eval()).work(40, 48):
            assert op.test_problems(problem) in known, problem


def full_swinir(large: bool, depth: int = 6) -> nn.Module:
    """One group of medium's or large's width."""
    kind = upscaler_models.SWINIR_L if large else upscaler_models.SWINIR_M
    one = {"depths": [depth], "num_heads": kind["num_heads"][:1]}
    return swinir(**{**kind, **one}).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("large", [False, True])
def test_the_catalogs_layers_of_swinir_are_what_is_launched(large: bool) -> None:
    for height, width in ((24, 40), (8, 16)):
        chain = chain_of(read(full_swinir(large)), (1, height, width), torch.float16)
        trace = chain.trace(chain.last, chain.rows(chain.last), frozenset((0,)))
        listed = [each.problem for each in catalog.swinir(height, width, large, 1)]
        convs = chain.conv_problems(trace)
        assert listed[: len(convs)] == convs
        assert {*listed[len(convs) :]} == windows.work(chain, trace).keys()


def test_the_catalog_has_what_swinir_asks_in_bands() -> None:
    known = {(op.name, op.test_problems(problem)) for op, problem in catalog.swinir_work()}
    for large in (False, True):
        upscaler = Upscaler(full_swinir(large, 2))
        planner = Planner(chain_of(upscaler.network, (1, 80, 24), torch.float16), torchs)
        for plan in (planner.whole(), of_height(planner, 16, "device")):
            asked = upscaler._work_of(planner.chain, plan)
            assert known >= {(op.name, op.test_problems(problem)) for op, problem in asked}


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx942", "gfx90a"])
def test_no_size_has_a_kernel_of_swinirs_that_is_not_compiled_ahead(gfx: str) -> None:
    arch, needed = amd_table()[gfx], set[KernelSpec]()
    for side, large in product((8, 24, 128, 512, 2048), (False, True)):
        for layer in catalog.swinir(side, side + 8, large, 1):
            ours = catalog.op_of(layer.problem).ours(arch, layer.problem)
            needed.update(spec for _, _, specs in ours for spec in specs)
    assert needed <= shipped(arch, (*AT_START, SWINIR_PART)).keys()
    others = {*part_specs(UPSCALER_PART, arch), *shipped(arch, AT_START)}
    assert {"attention.hip", "layer_norm.hip"} <= {spec.source for spec in needed - others}


def test_smaller_budgets_cost_little() -> None:
    planner = Planner(chain_of(read(network("x4")), (1, 256, 256), torch.float16), torchs)
    whole = planner.whole()
    before = whole.cost
    for divisor in (2, 3, 4):
        found = planner.cheapest(whole.peak_bytes // divisor, 0)
        assert found is not None and found.peak_bytes <= whole.peak_bytes // divisor
        assert before <= found.cost < 1.5 * whole.cost
        before = found.cost
    assert planner.cheapest(1, 1 << 40) is None
    assert planner.smallest(0).peak_bytes < whole.peak_bytes // 4


@needs_half
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["x4", "x2", "compact", "compact relu", "swinir shuffle"])
def test_no_plan_takes_more_than_it_says(kind: str, dtype: torch.dtype) -> None:
    """Measured with torch's convolutions, whose temporary images are part of the prediction, but
    for SPAN's gate.
    """
    module = network(kind)
    x = picture(module, 61, 24)
    for mode in ("whole", "banded"):
        upscaler = Upscaler(module, dtype)
        upscaler(x[..., :8, :8])
        with Peak() as peak:
            upscaler(x, mode=mode)
        chosen = upscaler.last_plan
        assert chosen is not None and peak.peak <= chosen.peak_bytes


def test_out_of_memory_ends_in_smaller_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network("x4").double()
    x = picture(module, 40, 9)
    upscaler, tried, run_plan = Upscaler(module, torch.float64), list[int](), program.run_plan

    def short(run: Any, chosen: BandPlan, *rest: Any) -> None:
        tried.append(chosen.peak_bytes)
        if len(tried) < 3:
            raise torch.OutOfMemoryError("planted")
        run_plan(run, chosen, *rest)

    monkeypatch.setattr(program, "run_plan", short)
    assert (upscaler(x) - own(module, x)).abs().max() < 1e-9
    assert tried[0] > tried[1] > tried[2]


def test_out_of_memory_of_the_smallest_bands_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host begins again with its own tiles: tests of the hosts."""
    module = network("basicsr compact").double()
    upscaler, tried = Upscaler(module, torch.float64), list[BandPlan]()

    def short(run: Any, chosen: BandPlan, *rest: Any) -> None:
        tried.append(chosen)
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(program, "run_plan", short)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        upscaler(picture(module, 90, 9))
    planner = Planner(chain_of(upscaler.network, (1, 90, 9), torch.float64), torchs)
    assert tried[0].whole and tried[-1].peak_bytes == planner.smallest(0).peak_bytes


def test_interrupt_between_bands() -> None:
    module = network("x4")
    upscaler, told = Upscaler(module, torch.float32), list[tuple[int, int]]()
    x = picture(module, 40, 9)
    with pytest.raises(Interrupted):
        upscaler(x, progress=lambda *at: told.append(at), interrupt=lambda: told[-1][0] == 2)
    assert told[-1][0] == 2 < told[-1][1]


@needs_half
def test_an_overflow_is_answered_by_smaller_values() -> None:
    module = network("x4")
    module.model[0].weight *= 3e5
    module.model[-1].weight /= 3e5
    x = picture(module, *ODD)
    upscaler = Upscaler(module)
    right = own(module, x)
    assert not own(deepcopy(module).half(), x.half()).isfinite().all()
    ours = upscaler(x)
    assert 0 < upscaler._scale < len(SCALES)
    assert (ours - right).abs().max() / right.abs().max() < 1e-2


@needs_half
def test_what_no_scale_mends_is_the_hosts() -> None:
    module = network("span")
    module.conv_1.sk.weight *= 1e8
    upscaler = Upscaler(module)
    for _ in range(2):
        with pytest.raises(Overflow):
            upscaler(picture(module, *ODD))


@needs_half
def test_nan_in_weights_and_in_a_picture() -> None:
    module = network("compact")
    x = picture(module, *ODD)
    x[0, 0, 3, 3] = float("nan")
    session = Session(report=Report())
    ours = Upscaler(module)(x, session=session)
    assert torch.equal(ours.isnan(), own(module, x).isnan())
    assert session.report.snapshot()["events"] == ["the upscaler's input has NaN or infinity"]
    module.body[2].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(Overflow):
        Upscaler(module)(picture(module, *ODD))


def _scaled(module: Any) -> None:
    module.model[0].weight.mul_(1.5)


def _moved(module: Any) -> None:
    module.model[0].weight = nn.Parameter(module.model[0].weight * 1.5, requires_grad=False)


def _slope(module: Any) -> None:
    module.model[-2].negative_slope = 0.4


def _position(module: Any) -> None:
    module.layers[0].residual_group.blocks[1].attn.relative_position_bias_table.mul_(-3)


def _eps(module: Any) -> None:
    module.norm.eps = 0.1


@pytest.mark.parametrize(
    "kind, change",
    [
        ("x4", _scaled),
        ("x4", _moved),
        ("x4", _slope),
        ("swinir", _position),
        ("swinir", _eps),
    ],
)
def test_changes_of_the_module_are_seen(kind: str, change: Callable[[Any], None]) -> None:
    module = network(kind)
    x = picture(module, *ODD)
    upscaler = Upscaler(module, torch.float32)
    before = upscaler(x)
    change(module)
    after = upscaler(x)
    assert torch.allclose(after, own(module, x), atol=1e-5)
    assert not torch.equal(before, after)


def _hook(module: Any) -> None:
    module.model[0].register_forward_hook(lambda *args: None)


def _forward(module: Any) -> None:
    module.model[1].sub[0].forward = lambda x: x


def _norm(module: Any) -> None:
    module.model[3] = nn.BatchNorm2d(16)


def _bilinear(module: Any) -> None:
    module.model[2].mode = "bilinear"


@pytest.mark.parametrize(
    "change, reason",
    [
        (_hook, "model.0 has forward hooks"),
        (_forward, "model.1.sub.0.forward has been replaced"),
        (_norm, "model.3 is a BatchNorm2d"),
        (_bilinear, "model.2 is a Upsample, not nearest"),
        (lambda module: module.to("meta"), "weights lie on meta"),
    ],
)
def test_what_is_not_known_is_a_reason(change: Callable[[Any], Any], reason: str) -> None:
    module = network("x4")
    change(module)
    upscaler = Upscaler(module)
    assert reason in "; ".join(upscaler.reasons)
    with pytest.raises(UnknownModuleError):
        upscaler(torch.rand(1, 3, 8, 8))


def _unshuffled(module: Any) -> None:
    module.start_unshuffle = 2


def _dropping(module: Any) -> None:
    module.layers[0].residual_group.blocks[1].drop_path.train()


def _approximate(module: Any) -> None:
    module.layers[1].residual_group.blocks[0].mlp.act.approximate = "tanh"


def _hooked(module: Any) -> None:
    module.layers[0].residual_group.blocks[1].mlp.act.register_forward_hook(lambda *args: None)


def _another_softmax(module: Any) -> None:
    module.layers[1].residual_group.blocks[0].attn.softmax.forward = lambda x: x


def _absolute(module: Any) -> None:
    module.absolute_pos_embed = nn.Parameter(torch.zeros(1, 256, 36))


def _smaller_windows(module: Any) -> None:
    module.layers[1].residual_group.blocks[0].window_size = 2


@pytest.mark.parametrize(
    "change, reason",
    [
        (_unshuffled, "network.start_unshuffle is 2"),
        (_dropping, "layers.0.residual_group.blocks.1.drop_path.training is True"),
        (_approximate, "mlp.act.approximate is tanh"),
        (_hooked, "layers.0.residual_group.blocks.1.mlp.act has forward hooks"),
        (_another_softmax, "attn.softmax.forward has been replaced"),
        (_absolute, "network has a parameter absolute_pos_embed of its own"),
        (_smaller_windows, "layers.1.residual_group.blocks.0.window_size is 2"),
    ],
)
def test_what_is_not_known_of_swinir_is_a_reason(
    change: Callable[[Any], None], reason: str
) -> None:
    module = network("swinir")
    change(module)
    assert reason in "; ".join(Upscaler(module).reasons)


def test_windows_need_the_rows_of_their_neighbours() -> None:
    """Windows of 4, shifted by 2 in the second of three blocks: rows 4 to 7 are made of 0 to 11."""
    steps = read(network("swinir")).steps
    step = next(step for step in steps if isinstance(step, WindowStep))
    assert step.needs((5, 6), 40) == (0, 12) and step.halo == 4
    assert step.needs((39, 40), 40) == (32, 40) and step.needs((0, 1), 4) == (0, 4)


def test_other_networks_are_named() -> None:
    assert Upscaler(nn.Conv2d(3, 3, 3)).reasons == ("Conv2d of torch.nn.modules.conv is not known",)
    dat = type("DAT", (nn.Module,), {"__module__": "spandrel.architectures.DAT"})()
    missing = "depthwise convolutions, attention between channels and means over the whole picture"
    assert Upscaler(dat).reasons[0].endswith(f"is not known: it needs {missing}")
    training = network("span")
    training.block_2.c1_r.train()
    assert "block_2.c1_r.training is True" in Upscaler(training).reasons


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (3, 8, 8), (1, 3, 0, 8), (1, 3, 8, 0)], ids=str)
def test_a_callers_mistake_names_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(.*8.*\)"):
        Upscaler(network("x4"))(torch.rand(shape))


def test_a_result_smaller_than_the_picture_is_a_reason() -> None:
    module = network("x2")
    module.shuffle_factor, module.scale = 8, 4
    assert Upscaler(module).reasons


def test_flops_are_the_networks() -> None:
    """Counted as torch counts a convolution: 2 * taps * channels for each value."""
    chain = chain_of(read(network("x4")), (1, 16, 16), torch.float16)
    convs = [step for step in chain.network.steps if isinstance(step, ConvStep)]
    pixels = [chain.pixels(image, chain.rows(image)) for image in range(1, chain.last + 1)]
    plain = sum(
        2 * n * 9 * s.layer.in_channels * s.layer.out_channels
        for s, n in zip(convs, pixels, strict=True)
    )
    assert 0.8 * plain < Planner(chain, torchs).whole().cost <= plain
