"""What ranks decide each for itself, without any other: shares, rows, who is gone, who fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.cards import batch, group, image_rows, meeting, shares
from lib_rocm_sd.cards.group import Group, _fit, _weights
from lib_rocm_sd.cards.meeting import SILENT_BEATS, Member, Pulse
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.hosts.diffusers import patch
from lib_rocm_sd.hosts.diffusers.ranks import SharedProgram, parted
from tests.clock import Clock
from tests.vae.vae_models import coder, image

MEMBERS = [Member(rank, "here", f"cuda:{rank}", f"GPU-{rank}", "card", 10 << 30) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("count", "weights", "least", "parts"),
    [
        (7, (1, 1), 0, [(0, 4), (4, 7)]),
        (1, (1, 1, 1), 0, [(0, 1), (1, 1), (1, 1)]),
        (0, (1, 1), 0, [(0, 0), (0, 0)]),
        (10, (3, 1), 0, [(0, 8), (8, 10)]),
        (8, (100, 1, 1), 2, [(0, 4), (4, 6), (6, 8)]),
        (5, (1,), 2, [(0, 5)]),
    ],
)
def test_shares(count: int, weights: tuple[float, ...], least: int, parts: Any) -> None:
    assert shares.split(count, weights, least) == parts


@pytest.mark.parametrize(
    ("count", "weights", "least"), [(5, (1, 1, 1), 2), (5, (), 0), (5, (1, 0), 0), (5, (1, -1), 0)]
)
def test_shares_that_there_are_not(count: int, weights: tuple[float, ...], least: int) -> None:
    with pytest.raises(ValueError, match="cannot be split|weights have to be"):
        shares.split(count, weights, least)


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_each_image_are_all_rows_once(size: int) -> None:
    for height in range(16, 131):
        check_rows(height, size)


def check_rows(height: int, size: int) -> None:
    units = -(-height // 8)
    if units < 2 * size:
        with pytest.raises(ValueError, match=f"enough for {units // 2} ranks"):
            image_rows.row_split(height, 9, 8, [1.0] * size)
        return
    split = image_rows.row_split(height, 9, 8, [1.0] * size)
    image = height
    for level in range(4):
        parts = split.of(image)
        assert parts[0][0] == 0 and parts[-1][1] == image
        assert all(one[1] == other[0] for one, other in zip(parts, parts[1:], strict=False))
        assert all(first % (8 >> level) == 0 for first, _ in parts)
        assert all(last - first >= 2 for first, last in parts[:-1])
        width = -(-9 // 2**level)
        counts = [(last - first) * width for first, last in parts]
        assert all(split.tokens(rank, counts[rank]) == counts for rank in range(size))
        image = -(-image // 2)
    with pytest.raises(ValueError, match="no image of the UNet has"):
        split.of(height + 1)
    with pytest.raises(ValueError, match="no image of the UNet has"):
        split.tokens(0, 7919)


def test_a_unet_that_cannot_be_split_says_why() -> None:
    (why,) = patch.obstacles(nn.Conv2d(3, 3, 5, dilation=2))
    assert "is no UNet2DConditionModel" in why
    found = patch._of_convolution(nn.Conv2d(3, 3, 5, dilation=2, padding_mode="circular"))
    assert found == ["kernel 5, stride 1, padding 0", "dilation 2, padding mode circular"]
    assert not patch._of_convolution(nn.Conv2d(3, 3, 3, stride=2, padding=1))
    assert not patch._of_convolution(nn.Conv2d(3, 3, 1))


def test_what_a_batch_has_is_cut_and_all_else_is_not() -> None:
    image, scalar, single = torch.arange(8).view(4, 2), torch.tensor(3), torch.zeros(1, 5)
    given = {"a": [image, (image, None)], "b": scalar, "c": single, "d": "text"}
    cut = batch._cut(given, 4, 1, 3)
    assert torch.equal(cut["a"][0], image[1:3]) and torch.equal(cut["a"][1][0], image[1:3])
    assert cut["b"] is scalar and cut["c"] is single and cut["d"] == "text"


class Store:
    """The few calls of torch's store that a pulse makes."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.gone = False

    def set(self, key: str, value: str) -> None:
        self._check()
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._check()
        return self.kept[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._check()
        return all(key in self.kept for key in keys)

    def _check(self) -> None:
        if self.gone:
            raise RuntimeError("connection reset")


class Beaten:
    """Three pulses on one store, beaten by the test."""

    def __init__(self) -> None:
        self.clock, self.store, self.calls = Clock(), Store(), [5, 5, 5]
        names = ["rank 0", "rank 1", "rank 2"]
        self.pulses = [
            Pulse(self.store, rank, names, 20.0, lambda: self.calls[0], print, self.clock)
            for rank in range(3)
        ]

    def pass_s(self, seconds: float, *beating: int) -> None:
        for _ in range(int(seconds)):
            self.clock.turn(1.0)
            for rank in beating:
                self.pulses[rank].beat()


def test_who_is_silent_is_gone_and_who_left_is_not() -> None:
    beaten = Beaten()
    beaten.pass_s(30, 0, 1, 2)
    assert not beaten.pulses[0].why(4)
    beaten.pass_s(6, 0, 2)
    assert beaten.pulses[0].why(4).startswith("rank 1 died: no sign of life for 5.0 s")
    assert not beaten.pulses[0].why(7)
    beaten.pulses[1].stop()
    beaten.pass_s(60, 0, 2)
    assert not beaten.pulses[0].why(4)
    beaten.pulses[2].stop("failed: MemoryError: out of memory")
    beaten.pass_s(1, 0)
    assert beaten.pulses[0].why(4) == "rank 2 failed: MemoryError: out of memory"


def test_who_failed_is_named_though_the_store_has_gone_with_it() -> None:
    beaten = Beaten()
    beaten.pass_s(2, 0, 1, 2)
    beaten.pulses[1].stop("failed: ValueError: no such prompt")
    beaten.pass_s(1, 0)
    beaten.store.gone = True
    beaten.pass_s(6, 0, 2)
    assert beaten.pulses[0].why(4) == "rank 1 failed: ValueError: no such prompt"
    assert "the store does not answer" in beaten.pulses[2].why(4)
    beaten.pulses[0].stop()


@pytest.mark.parametrize("ends", ["left", "failed: RankError: rank 0 failed", "silent"])
def test_who_has_the_store_stays_until_the_others_have_read_why_it_ends(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beaten = Beaten()
    waited: list[float] = []
    beaten.pass_s(2, 0, 1, 2)
    beaten.pulses[2].stop()

    def wait(seconds: float) -> None:
        """Meanwhile rank 1 goes on for two seconds, and then ends."""
        waited.append(seconds)
        beaten.clock.turn(seconds)
        if sum(waited) < 2:
            beaten.pulses[1].beat()
        elif ends != "silent":
            beaten.pulses[1].stop(ends)

    monkeypatch.setattr("lib_rocm_sd.cards.meeting.time.sleep", wait)
    beaten.pulses[0].stop("failed: MemoryError: out of memory")
    beaten.pulses[0].stay()
    least = 2 if ends != "silent" else 2 + SILENT_BEATS * beaten.pulses[0].beat_s
    assert least <= sum(waited) < least + 1
    assert beaten.pulses[1].why(4) == "rank 0 failed: MemoryError: out of memory"


def test_who_is_behind_is_named() -> None:
    beaten = Beaten()
    beaten.store.set("pulse/1", "1 4")
    beaten.pass_s(1, 0)
    assert beaten.pulses[0]._behind() == "rank 1 did not come: 4 exchanges of 5"
    beaten.store.set("pulse/1", "2 5")
    beaten.pass_s(1, 0)
    assert not beaten.pulses[0]._behind()
    beaten.pulses[2].stop()
    beaten.pass_s(1, 0)
    assert beaten.pulses[0]._behind() == "rank 2 has left before"


PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "5"}


def test_a_place_by_the_launchers_variables() -> None:
    assert meeting.place(PLACE) == meeting.Place(1, 2, 1, "host", 5)
    assert meeting.place({**PLACE, "LOCAL_RANK": "0"}).local_rank == 0


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start this by torchrun"),
        ({**PLACE, "RANK": "2"}, "RANK 2 is not one of 2"),
        ({**PLACE, "MASTER_PORT": "x"}, "MASTER_PORT is no number: 'x'"),
    ],
)
def test_a_place_that_there_is_not(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        meeting.place(variables)


def test_members_that_fit_and_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert _fit(MEMBERS, MEMBERS[0]) == MEMBERS
    twin = replace(MEMBERS[1], card="GPU-0")
    assert "have the same device" in meeting.twice([MEMBERS[0], twin])
    assert not meeting.twice([MEMBERS[0], replace(twin, machine="there")])
    bad = [replace(one, unfit="wrong") for one in MEMBERS]
    assert _fit([bad[0], MEMBERS[1]], MEMBERS[1]) == [MEMBERS[1]]
    with pytest.raises(ValueError, match="rank 0 .*: wrong; rank 1 .*: wrong"):
        _fit(bad, bad[0])
    with pytest.raises(ValueError, match="some have none"):
        _fit([MEMBERS[0], Member(1, "here", "cpu")], MEMBERS[0])


def test_shares_by_memory_by_weights_and_nonsense() -> None:
    small = replace(MEMBERS[1], free_bytes=5 << 30)
    weights = _weights("memory", [MEMBERS[0], small], 2)
    assert Group(MEMBERS, 0, torch.device("cpu"), weights).shares(12) == [(0, 8), (8, 12)]
    assert _weights("memory", [Member(0, "here", "cpu")], 1) == [1.0]
    assert _weights([3.0, 1.0], [MEMBERS[1]], 2) == [1.0]
    for share in ("much", [1.0], [1.0, 0.0], []):
        with pytest.raises(ValueError, match="share "):
            _weights(share, MEMBERS, 2)


def test_a_device_that_multiplies_wrongly_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert not meeting.computes_right(cpu)
    right = torch.Tensor.__matmul__

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return right(a, b) + (a.dtype == torch.float32)

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert "multiplies wrongly" in meeting.computes_right(cpu)


class Full:
    """The first of two ranks, whose memory ends at the first exchange of rows."""

    rank, size, members = 0, 2, MEMBERS

    def shares(self, count: int, least: int) -> Any:
        return shares.split(count, [1, 1], least)

    def start_gather(self, own: torch.Tensor) -> Any:
        waiting: Any = SimpleNamespace(wait=lambda: [own, own])
        return waiting

    def concatenate(self, *given: Any) -> Any:
        raise MemoryError("out of memory")

    exchange = concatenate


def test_a_rank_without_memory_does_not_go_on_alone() -> None:
    module = coder("diffusers decoder")
    group: Any = Full()
    program = SharedProgram(module, group)
    with pytest.raises(RankError, match=r"rank 0 \(here, card\) has too little memory"):
        program(image("diffusers decoder", 32, 4), mode="whole")


@pytest.mark.parametrize("shape", [(1, 4, 16, 16), (2, 77, 96), (1, 4, 128, 128)])
def test_other_noise_is_told_from_other_rounding(shape: tuple[int, ...]) -> None:
    def drawn(seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))

    first = drawn(0)
    rounded = (first * 1.001).bfloat16()
    own = [group.lengths(each)[None] for each in (first, rounded, first * 3)]
    assert not group.differ(torch.stack(own))
    for seed in range(1, 20):
        pair = [group.lengths(first)[None], group.lengths(drawn(seed))[None]]
        assert group.differ(torch.stack(pair))
    assert not group.differ(torch.stack([group.lengths(torch.zeros(4))[None]] * 2))


def test_ranks_of_stages() -> None:
    assert parted(2) == [(0,), (1,)]
    assert parted(5) == [(0,), (1, 2, 3), (4,)]
    with pytest.raises(ValueError, match="two ranks or more"):
        parted(1)
