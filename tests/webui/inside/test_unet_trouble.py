"""What keeps the UNet's blocks from being ours, and what people and programs are told of it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from accordion_help import TITLE, refresh
from conftest import FakeGpu, Start, WebUI
from unet_help import (
    AUTO,
    BLOCKS,
    begin,
    blocks_shown,
    bytes_of,
    ours,
    recording,
    session_of,
    shown,
    steps_of,
    unet_of,
    untouched,
)
from vae_help import HALF, distance, same


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.norms = True
    return made


def transformer_blocks(webui: WebUI) -> list[Any]:
    name = "BasicTransformerBlock"
    return [module for module in unet_of(webui).modules() if type(module).__name__ == name]


def test_all_are_ours(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    (row,) = blocks_shown(webui)
    assert (
        row.operation == "UNet blocks" and row.runs == "our blocks, starting with the next picture"
    )
    assert (
        refresh(webui, *AUTO)[0] == f"{TITLE}: Auto · attention on gfx1100 · UNet ready · VAE off"
    )
    webui.txt2img(*AUTO)
    assert [(row.operation, row.runs, row.why) for row in blocks_shown(webui)] == [
        ("UNet, residual blocks", "7 of 7 are ours", ()),
        ("UNet, transformers", "3 of 3 are ours", ()),
        ("UNet, transformer blocks", "3 of 3 are ours", ()),
        ("UNet, upsampling", "1 of 1 are ours", ()),
        ("UNet, downsampling", "1 of 1 are ours", ()),
        ("UNet, first and last layers", "2 of 2 are ours", ()),
        ("UNet, launches", "one by one", ("graphs are for GPUs",)),
    ]
    title, _, status = refresh(webui, *AUTO)
    assert title == f"{TITLE}: Auto · attention on gfx1100 · UNet · VAE off"
    assert "UNet, transformer blocks" in status
    title, _, status = refresh(webui, True, "Auto", "Off", 0, "Off")
    assert "UNet" not in title and "UNet is Off" in status
    assert not webui.errors_reported


def test_recorded_blocks(start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a CPU that records, as a card does; the setting holds from the next picture on."""
    webui = begin(start, gpu)
    launched = webui.txt2img(*AUTO)
    webui = begin(start, gpu)
    desk = recording(monkeypatch)
    assert same(webui.txt2img(*AUTO), launched)
    assert desk.recorded > 10 and desk.replayed > desk.recorded
    assert shown(webui, "launches").runs == "GPU graphs, one call per block"
    replayed = desk.replayed
    webui.shared.opts.set("rocm_sd_graphs", "Off")
    assert same(webui.txt2img(*AUTO), launched)
    assert desk.replayed == replayed
    assert shown(webui, "launches").why == ("graphs are off",)
    assert not webui.errors_reported


def test_nothing_is_recorded_where_models_are_moved(
    start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What graphs keep would stay on the card, where --medvram leaves room for the VAE."""
    webui = begin(start, gpu)
    webui.shared.sd_model.lowvram = True
    desk = recording(monkeypatch)
    webui.txt2img(*AUTO)
    assert not desk.recorded and "--medvram" in shown(webui, "launches").why[0]
    webui.shared.opts.set("rocm_sd_graphs", "On")
    webui.txt2img(*AUTO)
    assert desk.recorded
    assert not webui.errors_reported


def test_attention_of_another_extension(start: Start, gpu: FakeGpu) -> None:
    """As IP-Adapter does; the norms around it and the feed-forward stay ours."""

    def adapted(x: Any, context: Any = None, mask: Any = None) -> Any:
        return x * 0

    webui = begin(start)
    transformer_blocks(webui)[1].attn2.forward = adapted
    theirs = webui.txt2img()
    webui = begin(start, gpu)
    transformer_blocks(webui)[1].attn2.forward = adapted
    on = webui.txt2img(*AUTO)
    row = shown(webui, "transformer blocks")
    assert row.runs == "3 of 3 are ours"
    why = "attn2.forward has been replaced (adapted of test_unet_trouble.py)"
    assert row.why == (f"1 of 3: {why}",)
    assert distance(on, theirs) < 0.12


def test_a_block_of_another_extension(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    block = unet_of(webui).middle_block[0]
    block.forward = lambda x, emb: type(block).forward(block, x, emb)
    result = webui.txt2img(*AUTO)
    row = shown(webui, "residual blocks")
    assert row.runs == "6 of 7 are ours" and row.why[0].startswith("1 of 7: ")
    assert "has been replaced" in row.why[0]
    assert f"{BLOCKS - 1} of {BLOCKS} blocks" in result.info
    assert refresh(webui, *AUTO)[0].endswith("UNet 16 of 17 · VAE off")
    del block.forward
    webui.txt2img(*AUTO)
    assert ours(webui) == BLOCKS


def test_a_block_that_fails_is_the_webuis_until_the_next_picture(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = begin(start, gpu)
    module = webui.library("unet.blocks")
    whole, calls = module.compute.downsample, []

    def fails(*args: Any) -> Any:
        calls.append(1)
        raise ValueError("planted")

    monkeypatch.setattr(module.compute, "downsample", fails)
    result = webui.txt2img(*AUTO)
    assert len(calls) == 1 and f"{BLOCKS - 1} of {BLOCKS} blocks" in result.info
    assert shown(webui, "downsampling").why == ("1 of 1: ours failed: ValueError: planted",)
    monkeypatch.setattr(module.compute, "downsample", whole)
    assert f"{BLOCKS} of {BLOCKS} blocks" in webui.txt2img(*AUTO).info


def test_out_of_memory_is_the_webuis_to_see(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = begin(start, gpu)
    module = webui.library("unet.blocks")

    def fails(*args: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("planted")

    monkeypatch.setattr(module.compute, "downsample", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        webui.txt2img(*AUTO)
    monkeypatch.undo()
    expected = begin(start).txt2img()
    webui = begin(start, gpu)
    assert same(webui.txt2img(False), expected)


def test_a_take_over_that_fails(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    expected = begin(start).txt2img(steps=6)
    gpu.convs = True  # else nothing of ours is in the infotext
    webui = begin(start, gpu)
    webui.shared.opts.set("cross_attention_optimization", "Doggettx")
    kind = webui.library("unet.takeover").UnetTakeover
    whole, calls = kind._take, []

    def fails(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) in (9, 18):
            raise RuntimeError("planted")
        whole(self, *args)

    monkeypatch.setattr(kind, "_take", fails)
    before = bytes_of(webui)
    result = webui.txt2img(*AUTO, steps=6)
    assert untouched(webui) and bytes_of(webui) == before
    assert 'ROCm SD UNet: "Auto, left to the WebUI"' in result.info
    assert len(calls) == 18  # before the picture and at its beginning, not in each step
    assert same(result, expected)
    (row,) = blocks_shown(webui)
    assert row.why == ("ours failed: RuntimeError: planted",)
    assert webui.library("hosts.webui.public").status()["unet"]["trouble"] == row.why[0]
    webui.txt2img(*AUTO)
    assert ours(webui) == BLOCKS and not session_of(webui).trouble
    assert not webui.errors_reported


def test_what_could_not_be_given_back_is_given_back_later(
    start: Start, gpu: FakeGpu, monkeypatch: Any
) -> None:
    webui = begin(start, gpu)
    before = bytes_of(webui)
    webui.txt2img(*AUTO)
    weights = webui.library("unet.weights")
    whole, calls = weights.restride, []

    def fails(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise torch.cuda.OutOfMemoryError("planted")
        whole(*args)

    monkeypatch.setattr(weights, "restride", fails)
    webui.txt2img(False)
    assert untouched(webui) and bytes_of(webui) == before
    assert not session_of(webui).trouble


@pytest.mark.parametrize("flag", ["", "--no-half"])
def test_float32(start: Start, gpu: FakeGpu, flag: str) -> None:
    expected = begin(start, dtype=torch.float32).txt2img()
    webui = begin(start, gpu, dtype=torch.float32)
    webui.shared.cmd_opts.no_half = bool(flag)
    result = webui.txt2img(*AUTO)
    why = "its weights are float32" + (" by --no-half" if flag else "")
    assert [row.why[0].split(": ", 1)[1] for row in blocks_shown(webui)] == [why] * 6
    assert 'ROCm SD UNet: "Auto, left to the WebUI"' in result.info and untouched(webui)
    webui.shared.cmd_opts.no_half = False
    assert same(webui.txt2img(False), expected)


def test_norms_that_upcast_sampling_has_widened(start: Start, gpu: FakeGpu) -> None:
    """The WebUI turns modules to float32 in their forwards; those that it has not, may be ours."""
    webui = begin(start, gpu)
    webui.shared.cmd_opts.upcast_sampling = True
    unet_of(webui).middle_block[0].in_layers[0].float()
    session_of(webui).begin()
    session_of(webui).establish(webui.library("hosts.ui.options").Options(unet="Auto"))
    row = shown(webui, "residual blocks")
    assert row.runs == "6 of 7 are ours"
    why = "1 of 7: its weights are bfloat16, float32 by --upcast-sampling"
    assert row.why == (why,)


def test_a_hypernetwork(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    webui.txt2img(*AUTO)
    webui.shared.loaded_hypernetworks.append(object())
    assert shown(webui, "transformer blocks").why == ("3 of 3: a hypernetwork is loaded",)
    assert not shown(webui, "residual blocks").why


def test_another_optimizer_by_name(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = begin(start, gpu)
    webui.shared.opts.set("cross_attention_optimization", "Doggettx")
    seen, used = steps_of(webui, monkeypatch), len(gpu.seen)
    result = webui.txt2img(*AUTO)
    assert seen and len(gpu.seen) == used
    assert "ROCm SD:" not in result.info
    assert f"Auto, {BLOCKS} of {BLOCKS} blocks" in result.info
    why = shown(webui, "transformer blocks").why
    assert why[0].startswith("3 of 3: ")


def test_attention_excluded_in_the_settings(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    webui.shared.opts.set("rocm_sd_operations", ["UNet blocks"])
    used = len(gpu.seen)
    webui.txt2img(*AUTO)
    assert ours(webui) == BLOCKS and len(gpu.seen) == used
    assert shown(webui, "transformer blocks").why == ("3 of 3: attention is the WebUI's own",)


def test_networks_in_the_forwards(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = begin(start, gpu)
    networks: Any = ModuleType("networks")
    networks.loaded_networks = [SimpleNamespace(name="a")]
    networks.network_apply_weights = lambda layer: None
    monkeypatch.setitem(sys.modules, "networks", networks)
    webui.shared.opts.lora_functional = True
    seen = steps_of(webui, monkeypatch)
    result = webui.txt2img(*AUTO)
    assert not seen and 'ROCm SD UNet: "Auto, left to the WebUI"' in result.info
    assert "lora_functional" in shown(webui, "residual blocks").why[0]
    assert shown(webui, "residual blocks").runs == "0 of 7 are ours"


def test_another_unet_in_its_place(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """TensorRT's extension and its like: the checkpoint's own UNet is not called."""
    webui = begin(start, gpu)
    webui.txt2img(*AUTO)
    webui.sd_unet.current_unet = object()
    result = webui.txt2img(*AUTO)
    assert untouched(webui) and "left to the WebUI" in result.info
    (row,) = blocks_shown(webui)
    assert row.why == ("the SD Unet in Settings > Stable Diffusion runs the steps",)
    webui.sd_unet.current_unet = None
    webui.txt2img(*AUTO)
    assert ours(webui) == BLOCKS


def test_kernels_that_cannot_be_used(start: Start, gpu: FakeGpu) -> None:
    gpu.norms = False
    webui = begin(start, gpu)
    result = webui.txt2img(*AUTO)
    assert untouched(webui) and "ROCm SD UNet" in result.info
    (row,) = blocks_shown(webui)
    assert row.runs == "the WebUI's own code" and row.why == ("there is no layer norm",)
    assert "UNet" not in refresh(webui, *AUTO)[0]


def test_without_a_gpu_nothing_changes(start: Start) -> None:
    expected = begin(start, cuda=False).txt2img()
    webui = start(cuda=False, dtype=HALF, whole=True)
    result = webui.txt2img(*AUTO)
    assert same(result, expected) and untouched(webui) and "ROCm SD" not in result.info
    (row,) = blocks_shown(webui)
    assert row.runs == "the WebUI's own code" and "no GPU" in row.why[0]


def test_no_checkpoint(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    webui.txt2img(*AUTO)
    webui.sd_models.model_data.sd_model = None
    session_of(webui).establish(webui.library("hosts.ui.options").Options(unet="Auto"))
    (row,) = blocks_shown(webui)
    assert row.why == ("no checkpoint is loaded",)


def test_a_model_of_another_kind(start: Start, gpu: FakeGpu) -> None:
    """SD 3 has no UNet of ldm's or sgm's."""
    webui = begin(start, gpu)
    webui.shared.sd_model.model.diffusion_model = torch.nn.Linear(2, 2)
    for _ in range(2):
        session_of(webui).begin()
        session_of(webui).establish(webui.library("hosts.ui.options").Options(unet="Auto"))
        (row,) = blocks_shown(webui)
        assert row.why == ("this checkpoint's UNet has no block of a known kind",)
        assert row.runs == "the WebUI's own code"


def test_status_for_programs(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu)
    status = webui.library("hosts.webui.public").status
    assert status()["unet"]["blocks"] == []
    attn2 = transformer_blocks(webui)[0].attn2
    attn2.forward = lambda x, context=None, mask=None: x * 0
    webui.txt2img(*AUTO)
    found = status()["unet"]
    assert found["usable"] is True or found["usable"] is None
    assert not found["trouble"] and [row["total"] for row in found["blocks"]] == [7, 3, 3, 1, 1, 2]
    (row,) = [row for row in found["blocks"] if row["kind"] == "transformer block"]
    why = "attn2.forward has been replaced (<lambda> of test_unet_trouble.py)"
    assert row["ours"] == 3 and row["partly"] == {why: 1}
    webui.txt2img(False)
    assert status()["unet"]["blocks"] == []


def test_a_block_that_is_not_what_the_webui_computes_is_said(
    start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROCM_SD_SPOT_CHECK", raising=False)
    webui = begin(start, gpu)
    fine = webui.txt2img(*AUTO)
    assert "differed" not in fine.info and not fine.comments
    assert session_of(webui)._taken.spot.compared and ours(webui) == BLOCKS
    assert same(webui.txt2img(*AUTO), fine)

    compute = webui.library("unet.compute")
    own = compute.downsample
    with monkeypatch.context() as wrong:
        wrong.setattr(compute, "downsample", lambda *given: 2 * own(*given))
        told = webui.txt2img(*AUTO)
        assert f"{BLOCKS - 1} of {BLOCKS} blocks" in told.info and "a check differed" in told.info
        assert " differed by 100.0% (rounding explains " in told.comments
        assert "Steps before this was noticed may differ by as much" in told.comments
        row = shown(webui, "downsampling")
        assert row.runs == "0 of 1 are ours" and " differed by 100.0%" in "".join(row.why)
    assert same(webui.txt2img(*AUTO), fine) and ours(webui) == BLOCKS


def test_nothing_is_compared_where_the_setting_is_off(
    start: Start, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROCM_SD_SPOT_CHECK", raising=False)
    webui = begin(start, gpu)
    webui.shared.opts.set("rocm_sd_spot_check", False)
    webui.txt2img(*AUTO)
    assert not session_of(webui)._taken.spot.compared
