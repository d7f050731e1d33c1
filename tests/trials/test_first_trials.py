"""What is tried ahead, by real children on the stand-in HIP library: as install.py has it done, and
as the doctor does when it is asked to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lib_rocm_sd import cache, first_trials
from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.catalog import unet as usual_unet
from lib_rocm_sd.catalog import vae as usual
from lib_rocm_sd.commands import doctor, selftest
from lib_rocm_sd.device import DeviceInfo
from lib_rocm_sd.ops.attention.kernel import SHIPPED_HEAD_DIMS
from lib_rocm_sd.ops.conv.kernel import VAE_KINDS
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ACTIVATIONS
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.shipped import AT_START, SD3_PART, UNETS, shipped
from lib_rocm_sd.trials import recorder, stamp
from lib_rocm_sd.trials.conductor import Conductor
from lib_rocm_sd.trials.place import Place
from lib_rocm_sd.trials.subject import subjects
from lib_rocm_sd.trials.verdicts import DANGEROUS
from tests.trials import scaling

pytestmark = pytest.mark.usefixtures("ready")
GFX = scaling.ROW.gfx
CARD = "Fake RX 7900 XTX (gfx1100)"


@pytest.fixture
def place(hip_file: Path) -> Place:
    return scaling.place(hip_file)


def try_all(place: Place, *factors: float, **how: Any) -> list[str]:
    said: list[str] = []
    listed = [scaling.subject(factor) for factor in factors]
    first_trials.try_all(place, how.pop("limit_s", 60.0), said.append, listed=listed, **how)
    return said


def test_all_is_tried_and_a_note_is_left(place: Place) -> None:
    shown: list[str] = []
    (said,) = try_all(place, 2.0, 3.0, shown=shown.append)
    assert [line.split(", about")[0] for line in shown] == [
        "trying kernels, 1 of 2",
        "trying kernels, 2 of 2",
    ]
    assert said.startswith(f"{CARD}: 2 of 2 kernels passed, that took ")
    assert stamp.is_whole(GFX)
    assert not stamp.is_there("gfx1030")
    stamp.drop(GFX)
    assert not stamp.is_there(GFX)


def test_a_fault_is_said_and_the_next_start_asks_no_more(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", f"abort:{scaling.LAUNCHES + 1}")
    first, fault, halted = try_all(place, 2.0, 3.0, 4.0, 5.0)
    assert f"{CARD}: 1 of 4 kernels passed" in first
    assert fault.startswith("not used: scaling, rocm_sd: Scaling(count=128, factor=3.0")
    assert "tried in a process of its own: faulted: " in fault
    assert "Memory access fault by GPU node-1" in fault
    assert "we stopped testing kernels on this card" in halted
    assert stamp.is_whole(GFX)


def test_what_time_does_not_suffice_for_is_left_to_the_webui(place: Place) -> None:
    first, left = try_all(place, 2.0, 3.0, limit_s=-1.0)
    assert "0 of 2 kernels passed" in first
    assert left == "The other 2 are tried later, in the background."
    assert not stamp.is_there(GFX)


def test_where_no_child_can_be_started_the_rest_is_not_asked(place: Place) -> None:
    def none() -> Any:
        raise OSError("no such interpreter")

    def conductor(here: Place, **how: Any) -> Conductor:
        return Conductor(here, spawn=none, **how)

    factors = [float(factor) for factor in range(2, 9)]
    first, *reasons, left = try_all(place, *factors, conductor=conductor)
    assert "0 of 7 kernels passed" in first
    assert len(reasons) == first_trials.MOST_REASONS
    assert all("no such interpreter" in reason for reason in reasons)
    assert left == "The other 4 are tried later, in the background."
    assert not stamp.is_there(GFX)


def test_another_torch_and_other_kernels_have_no_note(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp.put(GFX, whole=False)
    assert stamp.is_there(GFX)
    assert not stamp.is_whole(GFX)
    monkeypatch.setattr(stamp.source, "digest", lambda: "changed")
    assert not stamp.is_there(GFX)
    monkeypatch.undo()
    cache.reset()
    monkeypatch.setattr(stamp.torch_build, "installed", lambda: None)
    assert not stamp.is_there(GFX)


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx942"])
def test_what_is_tried_ahead_is_what_is_compiled_ahead(gfx: str) -> None:
    row = by_gfx(gfx)
    assert row is not None
    compiled = shipped(row, AT_START)
    by_part = {part: first_trials.classes(part, row) for part in AT_START}
    attention, vae, *unets = (by_part.pop(part) for part in ("attention", "vae", *UNETS))
    assert not by_part
    unet = list({each.identity: each for each in (*unets[0], *unets[1])}.values())
    every = (*attention, *vae, *unet)
    assert {each.identity for each in first_trials.all_classes(row)} == {
        each.identity for each in every
    }
    assert {spec for each in every for spec in each.specs} <= set(compiled)
    assert {each.first.head_dim for each in attention} == set(SHIPPED_HEAD_DIMS)
    assert vae == subjects(usual.work(), row), "left out, since it is not compiled ahead"
    kinds = {each.op.name for each in vae}
    assert {*(CONVS[kind].name for kind in VAE_KINDS), "attention"} <= kinds
    in_vae = {spec for spec, part in compiled.items() if part == "vae"}
    tried = {spec for each in vae for spec in each.specs}
    assert len(in_vae & tried) > len(in_vae) / 2
    missed = set(compiled) - in_vae - {spec for each in every for spec in each.specs}
    assert all(dict(spec.defines)["BF16_HALVES"] for spec in missed)
    asked = subjects(usual_unet.work(arch=row), row)
    assert {each.identity for each in unet} == {each.identity for each in asked}, (
        "left out, since it is not compiled ahead"
    )
    assert {each.op.name for each in unet} == {op.name for op, _ in usual_unet.work()}


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx1201", "gfx942"])
def test_what_another_level_launches_is_tried_by_the_doctor(gfx: str) -> None:
    row = by_gfx(gfx)
    assert row is not None
    further = first_trials.further_classes(row)
    linear = [each.first for each in further if each.op.name == "linear"]
    shapes = {(len(p.columns), p.residual, p.gate) for p in linear}
    alone, added, gated = (1, False, False), (1, True, False), (1, False, True)
    several = {(2, False, False), (3, False, False)}
    assert shapes - several == {alone, added, gated}
    asked = [each for each in further if each.op in CONVS.values()]
    convs = {each.variant.name for each in asked if each.first.in_rows}
    other = "rocm_sd" if row.matrix == "mfma" else "torch + rocm_sd"
    assert convs == {other, "torch NCHW + rocm_sd"}
    over_time = [each for each in asked if each.first.dtype == "bfloat16"]
    assert {each.first.shortcut for each in over_time} == {"none", "identity", "conv"}
    upscalers = [each for each in asked if each.first.epilogue]
    assert {each.first.epilogue for each in upscalers} == set(ACTIVATIONS)
    specs = {spec for each in upscalers for spec in each.specs if "EPILOGUE" in dict(spec.defines)}
    assert len(specs) == 22 and specs <= set(shipped(row, ("upscaler", "upscaler SwinIR")))
    assert not specs & set(shipped(row, AT_START))
    of_sd3 = {"layer norm modulated", "rms norm of heads"}
    others = {each.op.name for each in further if each.op not in CONVS.values()}
    assert others == {"linear", *of_sd3, "attention", "layer norm", "rms norm"}
    norms = [each for each in first_trials.classes(SD3_PART, row) if each.op.name in of_sd3]
    assert {each.identity for each in norms} < {each.identity for each in further}
    ahead = {each.identity for each in first_trials.all_classes(row)}
    assert not ahead & {each.identity for each in further}


@pytest.mark.parametrize("gfx", ["gfx1100", "gfx942"])
def test_a_trial_launches_what_its_class_names(gfx: str) -> None:
    """Linear layers, whose tails have fewer parts; a trial has no other kernel's code."""
    row = by_gfx(gfx)
    assert row is not None
    every = [*first_trials.all_classes(row), *first_trials.further_classes(row)]
    linear = [each for each in every if each.op is LINEAR]
    assert any(dict(spec.defines).get("SPLIT") for each in linear for spec in each.specs)
    for each in linear:
        found = recorder.recordings(each.op, each.variant, each.config, each.problem)
        assert {start.spec for one in found for start in one.starts} <= set(each.specs), each


# -- the doctor


def test_the_doctor_tries_each_class_also_after_a_fault_and_shows_what_came_of_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "abort:1")
    said: list[str] = []
    written: list[list[dict[str, Any]]] = []
    listed = [scaling.subject(2.0), scaling.subject(3.0)]
    found = selftest.try_again(place, said.append, written.append, listed=listed)
    assert found and all(verdict.outcome in DANGEROUS for verdict in found)
    assert "save your work" in said[0]
    assert [line[:19] for line in said[1:]] == ["   1 of 2  FAULTED ", "   2 of 2  FAULTED "]
    assert [len(rows) for rows in written] == [1, 2]

    monkeypatch.setenv("ROCM_SD_FAKE_HIP", "right:0")
    selftest.try_again(place, said.append, written.append, listed=listed[:1])
    rows = doctor.latest_verdicts([DeviceInfo(0, "Fake RX 7900 XTX", "hip", GFX, place.arch)])
    wrong, right = doctor._trials(rows)  # and no halt, since the last that was asked passed
    assert "FAULTED  scaling, rocm_sd: Scaling(count=128, factor=3.0" in wrong
    assert "Memory access fault" in wrong
    assert right.startswith(CARD)
    assert "passed  scaling" in right
    assert "of 1.0e-06 allowed" in right
    assert doctor.latest_verdicts([DeviceInfo(0, "Another card", "hip", GFX, place.arch)]) == []
    assert list(doctor._trials([])) == ["none was made on the devices above"]


@pytest.mark.parametrize("gfx", ["gfx1030", "gfx1100", "gfx942"])
def test_attentions_gradients_are_tried_for_each_head_dim(gfx: str) -> None:
    """In fp16, in which the WebUI trains; no class of theirs is among what pictures need."""
    row = by_gfx(gfx)
    assert row is not None
    found = first_trials.gradient_classes(row)
    backward = [each for each in found if each.op.name == "attention backward"]
    forward = [each for each in found if each.op.name == "attention and lse"]
    assert [len(each.specs) for each in backward] == [2] * 4 and len(found) - len(forward) == 4
    for classes in (backward, forward):
        assert {each.first.head_dim for each in classes} == {40, 64, 80, 160}
    assert all(dict(each.specs[0].defines)["LEAVES_LSE"] == 1 for each in forward)
    pictures = {each.identity for each in first_trials.all_classes(row)}
    assert not pictures & {each.identity for each in found}
