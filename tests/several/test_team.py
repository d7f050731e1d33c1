"""Calls that two cards compute: what comes of them, and when one card is left alone."""

from __future__ import annotations

import sys
import threading
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lib_rocm_sd.cards import card as cards
from lib_rocm_sd.cards import shares
from lib_rocm_sd.cards import team as teams
from lib_rocm_sd.cards.card import SENDING
from lib_rocm_sd.cards.ranks import LostError
from lib_rocm_sd.cards.replica import Made, Replica
from lib_rocm_sd.cards.team import SeveralStandIn
from tests.clock import Clock
from tests.several.help import CPU, Played, Teams, inputs, kind_of, near


@pytest.mark.parametrize(("rows", "side"), [(2, 8), (5, 8), (4, 12)])
def test_both_together_give_what_one_gives(team: Teams, rows: int, side: int) -> None:
    expected = team.alone(rows, side=side)
    made = team.divided(rows, side=side)
    assert near(made, expected) and made.dtype == expected.dtype
    assert sum(team.team.way) == rows and min(team.team.way) >= 1
    assert torch.equal(made[: team.team.way[0]], team.alone(rows, side=side)[: team.team.way[0]])


def test_sizes_that_are_no_multiples(team: Teams) -> None:
    """The replica resizes amid the UNet as the WebUI does."""
    made = team.divided(2, side=9)
    assert near(made, team.alone(2, side=9))


def test_a_first_result_is_compared(team: Teams) -> None:
    team.call()
    assert team.team.why == teams.FIRST
    team.call()
    assert team.team.why == f"cpu: {SENDING}" and team.member.has(team.subject)
    team.call()
    assert team.member.may(kind_of()) and not team.member.may(kind_of(3))
    assert team.member.sent_bytes == sum(
        p.numel() * p.element_size() for p in team.unet.parameters()
    )


def test_only_changed_weights_are_sent(team: Teams) -> None:
    team.divided()
    sent = team.member.sent_bytes
    team.team.begin()
    weight = team.unet.middle_block[0].out_layers[3].weight
    with torch.no_grad():
        weight.mul_(1.5)
    expected = team.alone()
    assert near(team.divided(), expected)
    assert team.member.sent_bytes - sent == weight.numel() * 2


def test_weights_that_change_amid_a_generation(team: Teams) -> None:
    team.divided()
    with torch.no_grad():
        team.unet.out[2].weight.mul_(-1)
    made = team.call()
    assert team.team.why == teams.AMID and torch.equal(made, team.alone())
    team.team.begin()
    assert near(team.divided(), team.alone())


def test_networks_are_applied_before_weights_are_compared(team: Teams) -> None:
    """As the WebUI's are: by the forwards of layers, so amid the call."""
    team.divided()

    def apply(leaves: list[nn.Module]) -> str:
        with torch.no_grad():
            team.unet.out[2].weight.mul_(-1)
        return ""

    team.stand_in._ready = apply
    made = team.call()
    assert team.team.why == teams.AMID and torch.equal(made, team.alone())


def test_another_unet_amid_a_generation(team: Teams, unet: Any) -> None:
    team.divided()
    other = Teams.__new__(Teams)
    vars(other).update(vars(team))
    torch.manual_seed(9)
    other.unet = type(unet)().eval().requires_grad_(False).to(torch.bfloat16)
    subject = teams.Subject(other.unet, team.subject._manner)
    other.stand_in = type(team.stand_in)(subject, team.team, lambda: "", lambda leaves: "")
    other.stand_in.put_in()
    assert torch.equal(other.call(), other.alone())
    assert team.team.why == teams.ANOTHER
    team.call()
    assert near(team.call(), team.alone()) and not team.team.why
    team.team.begin()
    assert near(other.divided(), other.alone())


def test_another_level_builds_anew(team: Teams) -> None:
    team.divided()
    sent = team.member.sent_bytes
    team.level = "Memory"
    team.team.begin()
    assert near(team.divided(), team.alone())
    assert team.member.sent_bytes == 2 * sent


def test_one_picture_without_guidance(team: Teams) -> None:
    assert torch.equal(team.call(1), team.alone(1))
    assert team.team.why == teams.NOTHING_TO_SPLIT


@pytest.mark.parametrize("ready", ["networks could not be applied", ""])
def test_what_the_host_says(team: Teams, ready: str) -> None:
    team.divided()
    team.ready, team.obstacle = ready, "" if ready else "a hypernetwork is loaded"
    assert torch.equal(team.call(), team.alone())
    assert team.team.why == (ready or "a hypernetwork is loaded")
    team.ready = team.obstacle = ""
    if ready:
        team.call()  # nobody is asked: a reason that stays would cost a part of each step
    assert near(team.call(), team.alone()) and not team.team.why


def test_calls_of_another_kind(team: Teams) -> None:
    team.divided()
    given = inputs()
    with torch.no_grad():
        team.unet(given["x"], given["timesteps"], given["context"], None)
        why = [team.team.why]
        team.unet(**given, control=given["x"])
        why.append(team.team.why)
        team.unet(given["x"], given["timesteps"], given["context"][:1])
        why.append(team.team.why)
    control, context = "the UNet is called with control", "context has not one row for each image"
    assert why == ["", control, context]


def test_a_reason_that_stays_costs_no_step_more(team: Teams, monkeypatch: Any) -> None:
    """Nobody is asked in vain again, no part is begun, and no time of a dropped part counts."""
    team.divided()
    calls: list[int] = []
    theirs = team.stand_in.theirs
    known = deepcopy(team.team.shares.of(kind_of()).recent)

    def count(**given: Any) -> Any:
        calls.append(len(given["x"]))
        return theirs(**given)

    monkeypatch.setattr(team.stand_in, "theirs", count)
    team.ready = "networks are computed in the layers"
    team.call()
    assert calls == [1, 2] and team.team.shares.of(kind_of()).recent == known
    team.call()
    team.call()
    assert calls == [1, 2, 2, 2] and team.team.why == team.ready


def test_the_first_step_of_the_next_picture(team: Teams) -> None:
    """Is divided where all weights are there; looked at before, since networks are applied then."""
    team.divided()
    team.team.begin()
    assert near(team.call(), team.alone()) and not team.team.why
    team.team.begin()
    with torch.no_grad():
        team.unet.out[2].weight.mul_(-1)
    assert torch.equal(team.call(), team.alone()) and team.team.why == teams.FIRST


def test_what_cannot_be_sent_from_here(team: Teams, monkeypatch: Any) -> None:
    """The other card's process is not at fault, and gets them with the next picture."""

    def full(*given: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(team.member._replica, "fill", full)
        for _ in range(3):
            assert torch.equal(team.call(), team.alone())
    assert team.team.why == "cpu: its weights could not be sent: out of memory here"
    pid = team.member.pid
    team.team.begin()
    assert near(team.divided(), team.alone()) and team.member.pid == pid


def test_gradients(team: Teams) -> None:
    team.divided()
    given = inputs()
    given["x"].requires_grad_(True)
    made = team.unet(**given)
    assert made.requires_grad and team.team.why == "gradients are wanted"


def hooked(unet: Any) -> str:
    unet.middle_block.register_forward_hook(lambda *given: None)
    return "middle_block has forward hooks"


def replaced(unet: Any) -> str:
    block = unet.middle_block[0]
    block.forward = lambda x, emb: type(block).forward(block, x, emb)
    return "middle_block.0.forward has been replaced"


def reclassed(unet: Any) -> str:
    kind = type(unet.middle_block[0])
    unet.middle_block[0].__class__ = type("ToMeBlock", (kind,), {"__module__": "tomesd.patch"})
    return "middle_block.0 is a ToMeBlock of tomesd.patch"


def cut(unet: Any) -> str:
    home = sys.modules[type(unet).__module__]
    th = type("Cut", (), {"__module__": "free_u", "cat": staticmethod(torch.cat)})()
    vars(home).update(th=th)
    return "th of ldm.modules.diffusionmodules.openaimodel has been replaced by free_u"


def caught(unet: Any) -> str:
    """As sd-webui-freeu does, into the host's own stand-in for torch."""
    home = sys.modules[type(unet).__module__]
    th = type("Theirs", (), {"__module__": home.__name__})()
    th.cat = partial(passed_on)
    vars(home).update(th=th)
    return "torch.cat of ldm.modules.diffusionmodules.openaimodel has been replaced by test_team"


def passed_on(tensors: Any, dim: int = 0) -> torch.Tensor:
    return torch.cat(tensors, dim)


def in_float8(unet: Any) -> str:
    unet.out[2].to(torch.float8_e4m3fn)
    return "out.2: its weights are float8_e4m3fn"


def classed(unet: Any) -> str:
    kind = type(unet.middle_block[0])
    kind.forward = lambda self, x, emb: self._forward(x, emb)
    return "ResBlock.forward has been replaced by test_team"


def held(unet: Any) -> str:
    unet.context_dim = object()
    return "the UNet: its context_dim is a object"


CHANGES = (hooked, replaced, reclassed, cut, caught, in_float8, classed, held)


@pytest.mark.parametrize("change", CHANGES)
def test_what_others_have_done(team: Teams, monkeypatch: Any, change: Any) -> None:
    """Whoever has changed what the UNet computes has all of it."""
    home = sys.modules[type(team.unet).__module__]
    kind = type(team.unet.middle_block[0])
    monkeypatch.setattr(home, "th", home.th)
    monkeypatch.setattr(kind, "forward", kind.forward)
    team.divided()
    theirs: list[Any] = []
    expected = change(team.unet)

    def make(**given: Any) -> Any:
        theirs.append(given)
        return given["x"]

    monkeypatch.setattr(team.stand_in, "theirs", make)
    team.unet(**inputs())
    assert team.team.why.startswith(expected)
    assert len(theirs[-1]["x"]) == 2
    assert len(theirs) == 1 + (change is in_float8)  # a part was begun when weights were looked at


def test_notes_and_what_passes_on_are_no_reason(team: Teams, monkeypatch: Any) -> None:
    """ControlNet leaves a tensor on the UNet, FreeU a function that does nothing until it is
    enabled; then one card computes.
    """
    home = sys.modules[type(team.unet).__module__]
    monkeypatch.setattr(home, "th", home.th)
    enabled: list[bool] = []
    team.subject._idle = lambda cat: cat.func is passed_on and not enabled
    caught(team.unet)
    team.unet.cond_mark = torch.zeros(2, 1, 1, 1)
    team.divided()
    enabled.append(True)
    team.unet(**inputs())
    assert team.team.why.startswith("torch.cat of ldm")
    enabled.clear()
    team.divided()


def test_dilation(team: Teams) -> None:
    before = team.divided()
    conv = team.unet.middle_block[0].in_layers[2]
    conv.dilation = conv.padding = (2, 2)
    team.team.begin()
    made = team.divided()
    assert near(made, team.alone()) and not near(made, before)


def test_tiling(team: Teams) -> None:
    """The WebUI sets it on each convolution; the replica's are built anew."""
    before = team.divided()
    for module in team.unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"
    team.team.begin()
    made = team.divided()
    assert near(made, team.alone()) and not near(made, before)


def test_who_takes_our_place_has_it(team: Teams) -> None:
    """ControlNet sets a forward of its own, and puts ours back after it."""
    team.divided()
    calls: list[Any] = []
    ours = team.unet.forward

    def theirs(**given: Any) -> Any:
        calls.append(given)
        return ours(**given)

    team.unet.forward = theirs
    divided = team.team.divided
    made = team.call()
    assert len(calls) == 1 and torch.equal(made, team.alone())
    assert team.team.divided == divided
    team.unet.forward = ours
    assert near(team.call(), team.alone()) and team.team.divided == divided + 1


def test_a_failure_of_ones_own_part(team: Teams, plan: Path) -> None:
    """Interrupt, or out of memory here: the next call finds the other's result, and drops it."""
    team.divided()
    theirs = team.stand_in.theirs

    def stop(**given: Any) -> Any:
        raise KeyboardInterrupt

    team.stand_in.theirs = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        team.unet(**inputs())
    team.stand_in.theirs = theirs  # type: ignore[method-assign]
    team.wait()
    made = team.call(seed=5)
    assert near(made, team.alone(seed=5)) and not team.team.why


def test_an_error_of_ones_own_part_is_the_hosts(team: Teams, monkeypatch: Any) -> None:
    team.divided()

    def fail(**given: Any) -> Any:
        raise ValueError("theirs")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="theirs"):
        patch.setattr(team.stand_in, "theirs", fail)
        team.unet(**inputs())
    team.wait()
    assert near(team.call(), team.alone()) and not team.team.why


def test_an_error_of_ours_costs_no_picture(team: Teams, monkeypatch: Any) -> None:
    team.divided()
    looked: list[Any] = []

    def fail() -> None:
        looked.append(1)
        raise ValueError("ours")

    with monkeypatch.context() as patch:
        patch.setattr(team.subject, "look", fail)
        assert torch.equal(team.call(), team.alone())
        assert torch.equal(team.call(), team.alone())
    assert team.team.why == "ours failed: ValueError: ours" and len(looked) == 1
    team.team.begin()
    assert near(team.divided(), team.alone())


def test_closing_and_beginning_again(team: Teams) -> None:
    team.divided()
    team.team.close()
    assert torch.equal(team.call(), team.alone())
    assert not team.member.is_there


def test_three_cards(unet: Any) -> None:
    """One of them goes amid a generation: two go on."""
    made = Teams(unet, lambda device: cast("Replica", Played(unet)), cards=2)
    assert near(made.divided(6), made.alone(6))
    assert min(made.team.way) >= 1 and sum(made.team.way) == 6
    assert near(made.divided(2), made.alone(2))
    assert sum(map(bool, made.team.way)) == 2  # there is a row for two of them
    made.divided(6)
    gone: Any = made.team.members[1]._replica
    gone.fails = LostError("it is gone")
    assert near(made.call(6), made.alone(6)) and made.team.why == "cpu: it is gone"
    made.team.shares.again()
    assert near(made.divided(6), made.alone(6)) and made.team.way[2] == 0
    assert not made.team.members[1].is_there and made.team.members[0].is_there


def test_shares_follow_a_card_that_is_slower(unet: Any, monkeypatch: Any) -> None:
    """By three times, until whatever held it up is gone."""
    clock, row_s = Clock(), {"here": 0.01, "there": 0.03}
    monkeypatch.setattr(shares, "time", SimpleNamespace(perf_counter=clock))
    theirs = SeveralStandIn.theirs

    def here(stand_in: Any, **given: Any) -> Any:
        clock.turn(row_s["here"] * len(given["x"]))
        return theirs(stand_in, **given)

    class Delayed(Played):
        def begin(self, given: Any, out_bytes: int, asked: Any) -> None:
            super().begin(given, out_bytes, asked)
            self.until_s = clock() + row_s["there"] * len(given["x"])

        def made(self, answer: Any) -> Made:
            clock.turn(max(self.until_s - clock(), 0.0))
            return replace(super().made(answer), ms=1000 * row_s["there"] * len(self._given["x"]))

    monkeypatch.setattr(SeveralStandIn, "theirs", here)
    made = Teams(unet, lambda device: cast("Replica", Delayed(unet)))

    def way_after(calls: int) -> tuple[int, ...]:
        for _ in range(calls):
            assert near(made.call(8), made.alone(8))
        return made.team.way

    assert way_after(16) == (6, 2)
    row_s["there"] = 0.01
    assert way_after(24) == (4, 4)


def test_a_new_way_costs_no_picture_much(team: Teams, monkeypatch: Any) -> None:
    """Its first calls plan and record; the rest of them waits for the next pictures."""
    team.warm()
    monkeypatch.setattr(cards, "MOST_SPENT_S", 0.0)
    team.call()
    assert team.team.way == (2, 0)
    monkeypatch.setattr(cards, "MOST_SPENT_S", 1e-9)
    for _ in range(2):
        team.team.begin()
        ways = []
        for _ in range(4):
            team.call()
            ways.append(team.team.way)
        assert ways == [(1, 1), (2, 0), (2, 0), (2, 0)]


def test_nobody_divides_before_all_are_there(unet: Any, monkeypatch: Any) -> None:
    """Else each card that comes is another way, to be planned and recorded by all."""
    made = Teams(unet, lambda device: cast("Replica", Played(unet)), cards=2)
    late = made.team.members[1]
    slow: Any = late._replica
    monkeypatch.setattr(slow, "poll", lambda: None)
    made.team.begin()
    with torch.no_grad():
        for _ in range(8):
            unet(**inputs(6))
            slow.asked = time.monotonic()
            assert made.team.way in ((), (6, 0, 0))
        slow.asked -= cards.PATIENCE_S
        made.prefer(6)
        unet(**inputs(6))
    assert made.team.way == (3, 3, 0)


def test_weights_that_change_while_they_are_sent(team: Teams, monkeypatch: Any) -> None:
    """What was sent is not what they are: it is sent again with the next pictures."""
    replica, goes = team.member._replica, threading.Event()
    fill = replica.fill

    def wait(*given: Any) -> int:
        sent: int = fill(*given)
        assert goes.wait(600)
        return sent

    monkeypatch.setattr(replica, "fill", wait)
    with torch.no_grad():
        team.unet(**inputs())
        team.unet(**inputs())
        assert team.team.why == f"cpu: {SENDING}"
        team.unet.out[2].weight.mul_(-1)
        goes.set()
        team.wait()
        assert torch.equal(team.call(), team.alone()) and team.team.why == teams.AMID
    team.team.begin()
    assert near(team.divided(), team.alone())


def test_off_while_weights_are_sent(unet: Any, plan: Path) -> None:
    """The process is gone at once, and the thread that sent them with it."""
    made = Teams(unet, lambda device: Replica(device, CPU, size=1 << 20))
    made.call()
    plan.write_text("weights hang")
    with torch.no_grad():
        made.unet(**inputs())
    sending, begin = made.member._sending, time.monotonic()
    made.team.close()
    assert time.monotonic() - begin < 5 and sending.is_done
    assert torch.equal(made.call(), made.alone())
