"""The cost model: which launches it counts, its cards, its arithmetic; nothing is compiled."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lib_rocm_sd import __main__
from lib_rocm_sd.arch import amd_table
from lib_rocm_sd.catalog.vae import Layer, decoder, qwen_decoder
from lib_rocm_sd.commands import estimate
from lib_rocm_sd.lab.cycles import rates_of
from lib_rocm_sd.lab.estimate import Target, estimates
from lib_rocm_sd.lab.listing import Function, Instruction
from lib_rocm_sd.lab.loops import KernelWork, analysed
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.layer_norm.rms import RmsProblem

CARDS = {gfx: arch.card for gfx, arch in amd_table().items() if arch.card}
ARCHES = amd_table()
MATRIX = {
    "dot2": "v_dot2c_f32_f16",
    "wmma_gfx11": "v_wmma_f32_16x16x16_f16",
    "wmma_gfx12": "v_wmma_f32_16x16x16_f16",
    "mfma": "v_mfma_f32_16x16x16_f16",
}


def _work(gfx: str, matrix: int, vector: int, before: int = 0) -> KernelWork:
    """A kernel of `before` instructions and a loop."""
    arch = ARCHES[gfx]
    names = ["v_nop"] * before + [MATRIX[arch.matrix]] * matrix + ["v_nop"] * vector
    code = [*(Instruction((name,)) for name in names), Instruction(("s_cbranch_scc0",), before)]
    return analysed(Function("f", (*code, Instruction(("s_endpgm",)))), arch)


def _target(gfx: str, work: KernelWork) -> Target:
    return Target(ARCHES[gfx], CARDS[gfx], lambda spec: work)


def test_cards_agree_with_their_peaks() -> None:
    for gfx, card in CARDS.items():
        arch = ARCHES[gfx]
        target = _target(gfx, _work(gfx, 1, 0))
        assert target.peak_tflops == pytest.approx(card.peak_tflops, rel=0.01), gfx
        names = [part.removeprefix("Instinct ") for part in arch.names]
        assert any(name in card.name for name in names), gfx


def test_rates_and_cards_speak_of_the_same_matrix_units() -> None:
    for arch in ARCHES.values():
        rates = rates_of(arch)
        per_clock = 8192 / rates.tile_cycles * rates.simds_per_cu
        share = 0.5 if arch.family == "CDNA4" else 1.0  # whose peak is 16x16x32's
        assert per_clock == rates.half_operations * share


@pytest.mark.parametrize("size", [(128, 128), (61, 83)])
def test_the_launches_are_those_of_the_recipe(size: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    from lib_rocm_sd.vae.steps import ConvStep
    from lib_rocm_sd.vae.trace import chain
    from tests.vae import vae_models

    recipe = vae_models.standard("decoder")
    sizes = chain(recipe, 1, *size, torch.float16).sizes
    launches = [layer.problem for layer in decoder(*size)]
    assert len(launches) == len(recipe.steps)
    for index, (launch, step) in enumerate(zip(launches, recipe.steps, strict=True)):
        before, after = sizes[index], sizes[index + 1]
        if isinstance(launch, AttentionProblem):
            assert not isinstance(step, ConvStep)
            projections = 8 * launch.seq_q * launch.head_dim**2
            assert launch.flops + projections == step.flops(*size)
            continue
        assert isinstance(step, ConvStep) and isinstance(launch, ConvProblem)
        assert launch.kind == step.kind
        assert (launch.height, launch.width) == (before.height, before.width)
        assert launch.out_size == (after.height, after.width)
        assert (launch.in_channels, launch.out_channels) == (before.channels, step.out_channels)
        following = recipe.steps[index + 1] if index + 1 < len(launches) else None
        assert launch.norm == (step.norm is not None)
        assert launch.statistics == (getattr(following, "norm", None) is not None)
        kinds = {(False, False): "none", (True, False): "identity", (True, True): "conv"}
        assert launch.shortcut == kinds[step.residual, step.shortcut is not None]
        if step.residual:
            assert launch.shortcut_channels == sizes[index - 1].channels
        if index > 0:  # conv_in's four channels are stored as sixteen
            (row,) = estimates([Layer("", launch)], _target("gfx1201", _work("gfx1201", 16, 64)))
            assert row.gflop == step.flops(after.height, after.width) * 1e-9


CONV = ConvProblem("3x3", 1, 128, 128, 256, 256, norm=True)


def test_arithmetic_follows_from_tiles_and_the_loop() -> None:
    work = _work("gfx1201", 16, 64)  # 256 matrix cycles and 64 others
    (row,) = estimates([Layer("conv", CONV)], _target("gfx1201", work))
    assert row.bound == 0.8 and row.padding == 1.0
    ideal_ms = CONV.flops * 1e-9 / 195.0
    rounding = row.compute_ms / (ideal_ms / 0.8)
    assert 0.99 < rounding < 1.3  # full rounds of work-groups
    assert row.serial_ms == row.compute_ms
    assert row.overlapped_ms == pytest.approx(0.8 * row.compute_ms)
    moved = 2 * (2 * 128 * 128 * 256 + 9 * 256 * 256)
    assert row.memory_ms == pytest.approx(moved / 640e6)


def test_what_stands_in_the_loop_around_counts_once_per_chunk() -> None:
    names = ["v_nop"] * 64 + ["v_wmma_f32_16x16x16_f16"] * 16
    back = [Instruction(("s_cbranch_scc0",), 64), Instruction(("s_cbranch_scc0",), 0)]
    code = (*(Instruction((name,)) for name in names), *back, Instruction(("s_endpgm",)))
    work = analysed(Function("f", code), ARCHES["gfx1201"])
    (row,) = estimates([Layer("conv", CONV)], _target("gfx1201", work))
    in_loop = 9 * 16 * 16 * 16  # products, tiles of 4x4, cycles
    assert row.bound == pytest.approx(in_loop / (in_loop + 256 // 32 * 64))


def test_what_stands_before_the_loop_counts_once_per_wave() -> None:
    bare, more = (
        estimates([Layer("conv", CONV)], _target("gfx1201", _work("gfx1201", 16, 64, before)))[0]
        for before in (0, 1000)
    )
    waves = more.compute_ms / bare.compute_ms
    in_loop = 9 * 16 * 16 * 16 * 320 / 256  # products, tiles of 4x4, cycles, vector instructions
    assert waves == pytest.approx((in_loop + 1000) / in_loop, rel=1e-6)


def test_a_slow_memory_decides() -> None:
    target = _target("gfx1201", _work("gfx1201", 16, 0))
    target = replace(target, card=replace(target.card, bandwidth_gb_s=1.0))
    (row,) = estimates([Layer("conv", CONV)], target)
    assert row.ms == row.memory_ms > 10 * row.compute_ms


def test_few_channels_are_padded_to_tiles() -> None:
    last = Layer("last", ConvProblem("3x3", 1, 128, 128, 128, 3, norm=True))
    (row,) = estimates([last], _target("gfx1100", _work("gfx1100", 16, 0)))
    assert row.padding == pytest.approx(16 / 3)


@pytest.mark.parametrize("gfx", CARDS)
def test_attention_and_what_is_around_it(gfx: str) -> None:
    rows = estimates(
        [Layer("a", AttentionProblem(1, 1, 16384, 16384, 512))], _target(gfx, _work(gfx, 8, 0))
    )
    products, around = rows
    assert products.padding == 1.0 and products.gflop == pytest.approx(549.76, abs=0.01)
    rate = products.gflop / products.compute_ms / CARDS[gfx].peak_tflops
    assert 0.2 < rate <= 1.01
    assert around.config == "library" and around.ms > around.memory_ms


def test_the_command_says_that_it_estimates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[KernelSpec] = []

    def target_of(arch: object, card: object) -> Target:
        def work_of(spec: KernelSpec) -> KernelWork:
            asked.append(spec)
            return _work("gfx1201", 16, 64)

        return replace(_target("gfx1201", _work("gfx1201", 16, 64)), work_of=work_of)

    monkeypatch.setattr(estimate, "target_of", target_of)
    command = ["inspect", "--estimate", "vae", "--arch", "gfx1201,gfx1033"]
    assert __main__.main(command) == 0
    table, without, assumptions = capsys.readouterr().out.rstrip().split("\n\n")
    assert table.startswith("gfx1201, RX 9070 XT") and "): estimated " in table
    assert without == "gfx1033: no card's figures are listed here, no estimate"
    assert assumptions.startswith("Estimate, not a measurement") and "highest clock" in assumptions
    assert {spec.entry for spec in asked} == {"conv3x3", "upsample_conv", "attention_forward"}
    assert __main__.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "estimate" and len(found["assumptions"]) > 5
    (card,) = found["cards"]
    assert card["estimated_ms"] == pytest.approx(sum_of(card), abs=0.01)
    assert card["estimated_overlapped_ms"] < card["estimated_ms"] == card["estimated_serial_ms"]


def test_a_decode_over_time_has_its_norms_and_the_products_that_384_channels_need() -> None:
    target = _target("gfx1201", _work("gfx1201", 16, 64))
    (attention,) = (each for each in qwen_decoder(128, 128) if each.channels)
    norm = next(each for each in qwen_decoder(128, 128) if isinstance(each.problem, RmsProblem))
    _, around, normed = estimates([attention, norm], target)
    assert around.gflop == pytest.approx(2 * 4 * 128**2 * 384 * 512 * 1e-9)
    assert normed.ms == pytest.approx(target.bytes_ms(2 * 2 * 128**2 * 384))
    document, text = estimate.decode_of(target, by=qwen_decoder)
    assert len(document["launches"]) == len(qwen_decoder(128, 128)) + 1
    assert "conv_out, norm" in text


def test_an_upscaled_picture_is_the_sum_of_its_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = _target("gfx1201", _work("gfx1201", 16, 64))
    monkeypatch.setattr(estimate, "target_of", lambda arch, card: target)
    assert __main__.main(["inspect", "--estimate", "upscaler", "--arch", "gfx1201", "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out)["cards"]
    deep, *others = card["pictures"]
    names = [picture["upscaler"] for picture in card["pictures"]]
    assert names == ["RRDBNet x4", "SRVGGNetCompact x4", "SwinIR-M x4", "SwinIR-L x4"]
    assert sum(row["count"] for row in deep["launches"]) == 1 + 23 * 15 + 1 + 2 + 2
    for picture in (deep, *others):
        total = sum(
            row["count"] * max(row["compute_ms"], row["memory_ms"]) for row in picture["launches"]
        )
        assert picture["estimated_ms"] == pytest.approx(total, rel=1e-3)
    assert 9000 < deep["gflop"] < 9500
    for picture, blocks in zip(others[1:], (36, 54), strict=True):
        named = {row["name"].split()[0]: 0 for row in picture["launches"]}
        for row in picture["launches"]:
            named[row["name"].split()[0]] += row["count"]
        assert named["attention"] == blocks // 2 * (1 + 4)  # a shifted block has four calls
        assert named["layer"] == 2 * blocks + 2


def sum_of(card: dict[str, list[dict[str, float]]]) -> float:
    return sum(max(row["compute_ms"], row["memory_ms"]) for row in card["launches"])


def test_what_cannot_be_estimated_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        estimate, "target_of", lambda arch, card: _target("gfx1100", _work("gfx1100", 0, 4))
    )
    assert __main__.main(["inspect", "--estimate", "vae", "--arch", "gfx1100"]) == 1
    assert "gfx1100: no estimate: no loop with matrix" in capsys.readouterr().out
