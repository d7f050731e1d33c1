"""The cost model's estimate of a UNet's step: its arithmetic and its sums; nothing is compiled."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from lib_rocm_sd import __main__
from lib_rocm_sd.arch import amd_table
from lib_rocm_sd.catalog import dit
from lib_rocm_sd.catalog.unet import SD15, SDXL, STEPS, Join, Layer, step
from lib_rocm_sd.commands import estimate as estimate_cli
from lib_rocm_sd.commands.estimate import PICTURES, STEP_HEADING
from lib_rocm_sd.lab import estimate
from lib_rocm_sd.lab.estimate import KINDS, Counted, Target, counted, layout_bytes
from lib_rocm_sd.lab.listing import Function, Instruction
from lib_rocm_sd.lab.loops import KernelWork, analysed
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.layer_norm.heads import HeadsProblem
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedProblem
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.linear.problem import LinearProblem
from tests.unet.steps import conv, group_norm, linear, modules_of

CARDS = {gfx: arch.card for gfx, arch in amd_table().items() if arch.card}
GFX = "gfx1201"
CARD = CARDS[GFX]
MATRIX, OTHER = 16, 64
"""Instructions of the loop below: 256 matrix cycles and 64 others."""


def work(back: bool = True) -> KernelWork:
    """A kernel that is one loop, or that has none."""
    names = ["v_wmma_f32_16x16x16_f16"] * MATRIX + ["v_nop"] * OTHER
    loop = [Instruction(("s_cbranch_scc0",), 0)] if back else []
    code = (*(Instruction((name,)) for name in names), *loop, Instruction(("s_endpgm",)))
    return analysed(Function("f", code), amd_table()[GFX])


def target(gfx: str = GFX, back: bool = True) -> Target:
    return Target(amd_table()[gfx], CARDS[gfx], lambda spec: work(back))


def one(layer: Layer, **how: Any) -> Counted:
    (found,) = counted([layer], target(**how))
    return found


def _is_product(layer: Layer) -> bool:
    return isinstance(layer.problem, LinearProblem) and not layer.problem.gate


def values(layer: Layer) -> tuple[int, int]:
    """In the input of a convolution, and in its output."""
    assert isinstance(layer.problem, ConvProblem)
    return layer.problem.in_values, layer.problem.out_values


def rate(row: Counted) -> float:
    """Of the card's peak, while arithmetic alone counts."""
    return row.gflop / row.launches[0].compute_ms / target().peak_tflops


def test_a_step_has_each_layer_once_with_its_count() -> None:
    layers = step(SD15, 512, 512)
    rows = counted(layers, target())
    assert sum(row.count for row in rows) == len(layers)
    assert len({row.layer for row in rows}) == len(rows)
    flops = sum(getattr(layer.problem, "flops", 0) for layer in layers)
    assert sum(row.gflop for row in rows) == pytest.approx(flops * 1e-9)
    assert {row.kind for row in rows} == set(KINDS)


@pytest.mark.parametrize(
    "layer",
    [
        conv(2, 64, 64, 1280, 1280),
        conv(2, 64, 64, 1280, 1280, norm=True, shortcut="conv", shortcut_channels=1280),
        conv(2, 128, 128, 640, 640, "3x3 stride 2 padded"),
        linear(16384, 1280, (1280,)),
        linear(16384, 640, (2560,), gate=True),
        linear(16384, 1280, (1280, 1280, 1280)),
        Layer(AttentionProblem(2, 16, 4096, 4096, 64)),
    ],
)
def test_a_large_layer_reaches_the_share_that_the_loop_allows(layer: Layer) -> None:
    """256 of 320 cycles, less what full rounds of work-groups leave idle."""
    row = one(layer)
    assert row.launches[0].bound == pytest.approx(0.8)
    assert row.launches[0].padding == 1.0
    assert 0.55 < rate(row) <= 0.801


def test_upsampling_computes_all_taps_of_weights_as_they_lie() -> None:
    row = one(conv(2, 64, 64, 1280, 1280, "upsample"))
    assert row.launches[0].padding == 1.0
    assert 0.55 < rate(row) <= 0.801


def test_where_a_library_convolves_the_bound_is_that_of_packed_weights() -> None:
    """Of which upsampling has four taps of nine."""
    (launch,) = one(conv(2, 64, 64, 640, 1280, "upsample"), gfx="gfx942").launches
    assert launch.padding == pytest.approx(4 / 9)
    assert "parts" not in launch.config


def test_passes_around_a_librarys_convolution_are_added() -> None:
    layer = conv(2, 64, 64, 640, 1280, norm=True, statistics=True, embedding=True)
    product, added, applied = one(layer, gfx="gfx942").launches
    bandwidth = CARDS["gfx942"].bandwidth_gb_s
    assert product.padding == 1.0
    assert added.ms == pytest.approx(2 * 2 * values(layer)[1] / bandwidth * 1e-6)
    assert applied.ms == pytest.approx(2 * 2 * values(layer)[0] / bandwidth * 1e-6)
    assert len(one(layer).launches) == 1


def test_a_small_images_norm_is_one_pass_before_a_librarys_convolution() -> None:
    """The image's one reading is counted as the norm's, which is a layer of its own."""
    first = conv(2, 16, 16, 640, 1280, norm=True, statistics=True, embedding=True)
    second = conv(2, 16, 16, 1280, 1280, norm=True, shortcut="identity", shortcut_channels=1280)
    bandwidth = CARDS["gfx942"].bandwidth_gb_s
    *others, applied = one(first, gfx="gfx942").launches
    assert "what is added" not in [launch.name for launch in others]
    assert applied.ms == pytest.approx(2 * values(first)[0] / bandwidth * 1e-6)
    *_, added, applied = one(second, gfx="gfx942").launches
    assert added.ms == applied.ms == pytest.approx(2 * 2 * values(second)[0] / bandwidth * 1e-6)


def test_a_gate_is_a_pass_over_what_the_product_made() -> None:
    product, gate = one(linear(16384, 640, (2560,), gate=True)).launches
    moved = 2 * 3 * 16384 * 2560
    assert gate.ms == gate.memory_ms == pytest.approx(moved / CARD.bandwidth_gb_s * 1e-6)
    assert product.gflop == pytest.approx(2e-9 * 16384 * 640 * 2 * 2560)


def test_parts_cost_memory_of_their_sums_and_another_launch() -> None:
    layer = conv(2, 8, 8, 1280, 1280, norm=True, shortcut="identity", shortcut_channels=1280)
    first, added = one(layer).launches
    parts = int(first.config.split(", ")[-1].removesuffix(" parts"))
    values = 2 * 8 * 8 * 1280
    read = 2 * values + 2 * 9 * 1280 * 1280
    assert first.memory_ms == pytest.approx(
        (read + 4 * parts * values) / CARD.bandwidth_gb_s * 1e-6
    )
    moved = 4 * parts * values + 2 * 2 * values
    assert added.ms == added.memory_ms == pytest.approx(moved / CARD.bandwidth_gb_s * 1e-6)
    assert one(layer).ms == first.ms + added.ms
    products = [each for each in STEPS[0] if _is_product(each)]
    products.append(linear(2, 2048, (320, 320)))
    parted = [row for row in counted(products, target()) if "parts" in row.launches[0].config]
    assert parted and all(len(row.launches) == 2 for row in parted)
    assert all(len(row.launches) == 1 for row in counted(products, target()) if row not in parted)


@pytest.mark.parametrize(
    ("layer", "values"),
    [
        (group_norm(2, 64, 64, 320, applied=False), 1),
        (group_norm(2, 64, 64, 320, applied=True), 3),
        (group_norm(2, 16, 16, 20 * 256, applied=True), 2),
        (Layer(LayerNormProblem((8192, 320))), 2),
        (Layer(ModulatedProblem((2, 4096, 320))), 2),
        (Layer(ModulatedProblem((2, 4096, 320), added=True)), 4),
        (Layer(HeadsProblem(2, 1000, 3096, 1, 320)), 6),
        (Layer(Join(2, 64, 64, 320)), 2),
    ],
)
def test_norms_and_concatenations_are_passes_over_memory(layer: Layer, values: int) -> None:
    (launch,) = one(layer).launches
    moved = 2 * values * 2 * 64 * 64 * 320
    assert launch.ms == launch.memory_ms == pytest.approx(moved / CARD.bandwidth_gb_s * 1e-6)
    assert launch.gflop == launch.compute_ms == 0.0


def test_a_slow_memory_decides() -> None:
    slow = replace(target(), card=replace(CARD, bandwidth_gb_s=1.0))
    for row in counted(STEPS[0], slow):
        assert row.ms == row.count * sum(each.memory_ms for each in row.launches)


def test_few_keys_may_leave_no_loop() -> None:
    (launch,) = one(Layer(AttentionProblem(2, 8, 4096, 77, 40)), back=False).launches
    assert 0 < launch.bound <= 1 and launch.padding == pytest.approx(80 / 77 * 48 / 40)


@pytest.mark.parametrize(("model", "side"), PICTURES)
def test_layout_changes_are_those_around_every_convolution_of_the_model(
    model: Any, side: int
) -> None:
    layers = step(model, side, side)
    moved = 0
    for kind, given, *made in (each for layer in layers for each in modules_of(layer)):
        if kind.startswith("Conv2d"):
            for shape in (given, made[0]):
                values = 1
                for size in shape:
                    values *= size
                moved += 2 * 2 * values  # halves, read and written
    assert layout_bytes(layers) == moved


def test_what_was_counted_in_bytes() -> None:
    """By hand: the 1x1 convolution of 8,192 pixels reads and makes 320 channels."""
    assert layout_bytes([linear(8192, 320, (320,), pointwise=True)]) == 4 * 2 * 8192 * 320
    assert layout_bytes([linear(8192, 320, (320,))]) == 0
    assert layout_bytes([conv(1, 8, 8, 64, 32)]) == 4 * 64 * (64 + 32)


def test_the_command_says_that_it_is_a_lower_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: set[KernelSpec] = set()

    def target_of(arch: object, card: object) -> Target:
        def work_of(spec: KernelSpec) -> KernelWork:
            asked.add(spec)
            return work()

        return replace(target(), work_of=work_of)

    monkeypatch.setattr(estimate_cli, "target_of", target_of)
    command = ["inspect", "--estimate", "unet", "--arch", "gfx1201,gfx1033"]
    assert __main__.main(command) == 0
    small, large, *transformers, without, said = capsys.readouterr().out.rstrip().split("\n\n")
    assert "a step of SD1.5 512x512, batch 2: estimated " in small and " ms or more" in small
    assert "a step of SDXL 1024x1024" in large and "layout changes that are gone: 2.97 GB" in large
    titles = [text.partition("a step of ")[2].partition(", batch")[0] for text in transformers]
    assert titles == ["SD3 1024x1024", "SD3.5 medium 1024x1024"]
    assert not any("layout changes" in text for text in transformers)
    assert without == "gfx1033: no card's figures are listed here, no estimate"
    assert said.startswith(STEP_HEADING) and "LOWER LIMIT, never measured" in STEP_HEADING
    assert {spec.source for spec in asked} == {
        *("conv3x3.hip", "upsample_conv.hip", "linear.hip", "attention.hip")
    }
    assert __main__.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "estimate" and found["assumptions"] == list(estimate.UNET_ASSUMPTIONS)
    (card,) = found["cards"]
    names = [model.name for model, _ in PICTURES] + [model.name for model in dit.MODELS]
    for each, name in zip(card["steps"], names, strict=True):
        assert each["step"].startswith(f"{name} ")
        assert each["estimated_ms"] == pytest.approx(
            sum(each["estimated_ms_by_kind"].values()), abs=0.01
        )
        layers = each["layers"]
        ms = sum(row["count"] * _ms(launch) for row in layers for launch in row["launches"])
        assert each["estimated_ms"] == pytest.approx(ms, rel=0.01)
    counts = [sum(row["count"] for row in each["layers"]) for each in card["steps"]]
    of_sd3 = len(dit.step(dit.SD3, 1024, 1024))
    assert counts[1:3] == [len(step(SDXL, 1024, 1024)), of_sd3]


def _ms(launch: dict[str, float]) -> float:
    return max(launch["compute_ms"], launch["memory_ms"])


def test_without_torch_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(arch: object, card: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(estimate_cli, "target_of", none)
    assert __main__.main(["inspect", "--estimate", "unet", "--arch", "gfx1201"]) == 2
    assert "needs torch, which is not installed" in capsys.readouterr().err
