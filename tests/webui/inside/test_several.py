"""Several GPUs in generations: the second card is a process on the CPU."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accordion_help import events, script
from conftest import FakeGpu, Start, WebUI
from unet_help import AUTO, WITHOUT, begin, unet_of, untouched
from vae_help import HALF, coders, distance, same

SEVERAL = (*AUTO, "Auto")
VAE_TOO = (True, "Auto", "Auto", 0, "Auto", "Auto")
NEAR = 0.12
STEPS = 8
LIMIT_S = 600.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setenv("ROCM_SD_SEVERAL_TEST", "cpu")
    made = FakeGpu()
    made.norms = True
    return made


def session_of(webui: WebUI) -> Any:
    return webui.library("hosts.webui.several").session


def row_of(webui: WebUI, *args: Any, name: str = "Several GPUs") -> Any:
    options = webui.library("hosts.ui.options").parse(*(args or SEVERAL))[0]
    rows = webui.library("hosts.webui.status").look(options).rows
    return next((row for row in rows if row.operation == name), None)


def prepared(start: Start, gpu: FakeGpu, **more: Any) -> WebUI:
    """A WebUI whose second card is there; what it takes alone is not measured for long."""
    webui = begin(start, gpu, **more)
    shares = webui.library("cards.shares")
    shares.WARM, shares.MEASURED = 0, 1
    webui.txt2img(*SEVERAL)
    wait(webui)
    return webui


def wait(webui: WebUI) -> None:
    end = time.monotonic() + LIMIT_S
    for member in session_of(webui).team.members:
        while member._replica is not None and not member.is_there:
            member.look()
            assert time.monotonic() < end
            time.sleep(0.01)


def divide_all(webui: WebUI, monkeypatch: Any) -> list[Any]:
    """Divide each call that can be, and wait for each first result; the ways from now on."""
    teams, shares = webui.library("cards.team"), webui.library("cards.shares")
    ways: list[Any] = []
    whole = teams.Team.compute

    def compute(team: Any, *args: Any) -> Any:
        wait(webui)
        made = whole(team, *args)
        ways.append(team.way if not team.why else team.why)
        return made

    def way(self: Any, kind: Any, rows: int, usable: list[bool], new: bool = True) -> Any:
        return shares.divide(rows, [1.0, 1.0], [1, 0]) if all(usable) else (rows, 0)

    decodings = webui.library("cards.decoding")
    picture = decodings.Decoding.compute

    def decode(decoding: Any, *args: Any) -> Any:
        wait(webui)
        return picture(decoding, *args)

    monkeypatch.setattr(teams.Team, "compute", compute)
    monkeypatch.setattr(decodings.Decoding, "compute", decode)
    monkeypatch.setattr(shares.Shares, "way", way)
    return ways


def test_a_generation(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    expected = begin(start).txt2img(steps=STEPS)
    webui = prepared(start, gpu)
    alone = webui.txt2img(*AUTO, steps=STEPS)
    assert "forward" not in vars(unet_of(webui))
    assert session_of(webui).team is None and row_of(webui, *AUTO) is None
    webui.txt2img(*SEVERAL)
    wait(webui)
    ways = divide_all(webui, monkeypatch)
    both = webui.txt2img(*SEVERAL, steps=STEPS)
    assert ways.count((1, 1)) >= STEPS - 3 and len(ways) == STEPS
    assert distance(both, alone) < NEAR and not same(both, expected)
    assert both.info == alone.info
    row = row_of(webui)
    assert row.runs == "prompt on cpu, negative prompt on cpu" and row.why == ()
    told = webui.library("hosts.webui.public").status()["several"]
    assert told["on"] and told["rows"] == [1, 1]
    assert told["cards"][0]["device"] == "cpu" and told["cards"][0]["sent_bytes"] > 10_000

    pid = session_of(webui).team.members[0].pid
    batch = webui.txt2img(*SEVERAL, steps=STEPS, batch_size=2, n_iter=2)
    assert (2, 2) in ways and len(batch.images) == 4 and row_of(webui).runs.startswith("prompt")
    assert session_of(webui).team.members[0].pid == pid
    assert same(webui.txt2img(False, steps=STEPS), expected) and untouched(webui)
    gone(pid)
    assert not webui.errors_reported


def test_choosing_it_starts_the_other_card(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    """Before the next picture, which sends its weights after the first step."""
    webui = begin(start, gpu)
    controls = script(webui).controls
    (_, prepare) = events(webui, controls[5]._id, "change")
    prepare(*AUTO, "Off", "")
    assert session_of(webui).team is None
    prepare(*SEVERAL, "")
    wait(webui)
    (member,) = session_of(webui).team.members
    assert member.is_there and "forward" not in vars(unet_of(webui))
    ways = divide_all(webui, monkeypatch)
    webui.txt2img(*SEVERAL, steps=STEPS)
    assert session_of(webui).team.members == [member] and (1, 1) in ways

    def fail(*given: Any) -> Any:
        raise ValueError("planted")

    pid: Any = member.pid
    # Other cards come with the next picture: one on its way keeps these.
    prepare(*AUTO, "Auto", "1")
    assert session_of(webui).team.members == [member] and member.is_there
    webui.txt2img(*AUTO)
    gone(pid)
    monkeypatch.setattr(webui.library("hosts.webui.several"), "chosen", fail)
    prepare(*SEVERAL, "")
    assert session_of(webui).trouble == "ValueError: planted"
    monkeypatch.undo()

    session = session_of(webui)
    session.end()
    prepare(*SEVERAL, "")  # while a picture is made without it
    session.before_step(None)
    program = SimpleNamespace(decoding=None)
    session.lend(program)
    assert "forward" not in vars(unet_of(webui)) and program.decoding is None
    assert not session.told()["on"]
    webui.errors_reported.clear()


def gone(pid: int) -> None:
    end = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("family", ["ldm", "sgm"])
def test_the_vaes_pictures(start: Start, gpu: FakeGpu, monkeypatch: Any, family: str) -> None:
    gpu.convs = True
    webui = prepared(start, gpu, family=family)
    decodings = webui.library("cards.decoding")
    monkeypatch.setattr(decodings, "LEAST_PIXELS", 128)
    size = {"width": 64, "height": 264, "steps": 2}
    alone = webui.txt2img(*VAE_TOO[:-1], **size)
    webui.txt2img(*SEVERAL, steps=2)
    wait(webui)
    divide_all(webui, monkeypatch)

    def row() -> Any:
        return row_of(webui, *VAE_TOO, name="Several GPUs, VAE")

    for _ in range(2):  # its weights are sent, and its first picture is compared
        webui.txt2img(*VAE_TOO, **size)
        assert row().runs == "one card"
        wait(webui)
    both = webui.txt2img(*VAE_TOO, batch_size=2, **size)
    decoding = session_of(webui).team.decoding
    assert decoding.divided == 2  # the WebUI decodes one after the other
    assert row().runs == "2 of 3 bands on cpu, 1 of 3 bands on cpu" and row().why == ()
    assert (both.decoded[0][:1] - alone.decoded[0]).abs().max() < NEAR
    assert both.info.partition("Size")[2] == alone.info.partition("Size")[2]
    told = webui.library("hosts.webui.public").status()["several"]["vae"]
    assert told == {"bands": [2, 1], "why": ""}

    decode_as_a_preview_and_as_a_picture(webui)
    assert decoding.divided == 3  # live previews are one card's

    webui.txt2img(*VAE_TOO, steps=2)
    assert row().runs == "one card" and row().why == (decodings.SMALL,)
    webui.txt2img(*SEVERAL, steps=2)
    why = row_of(webui, name="Several GPUs, VAE").why
    assert why == ("the VAE is not ours: VAE is Off",)
    assert same(webui.txt2img(*VAE_TOO[:-1], **size), alone)
    assert row_of(webui, *VAE_TOO[:-1], name="Several GPUs, VAE") is None
    assert not webui.errors_reported


def decode_as_a_preview_and_as_a_picture(webui: WebUI) -> None:
    session = webui.library("hosts.webui.vae").session
    session.begin()
    session.establish(webui.library("hosts.ui.options").parse(*VAE_TOO)[0])
    decoder, image = coders(webui)[0], torch.zeros(1, 4, 33, 8, dtype=HALF)

    def decode() -> None:
        with torch.no_grad():
            decoder(image)

    preview = threading.Thread(target=decode)
    preview.start()
    preview.join()
    decode()
    session.end()


def test_sdxl_refiner_reasons_and_unloading(start: Start, gpu: FakeGpu, monkeypatch: Any) -> None:
    webui = prepared(start, gpu, family="sgm")
    ways = divide_all(webui, monkeypatch)
    webui.txt2img(*SEVERAL, steps=STEPS)
    assert (1, 1) in ways
    ways.clear()
    webui.txt2img(*SEVERAL, steps=STEPS, refiner_checkpoint="model-7")
    assert webui.library("cards.team").ANOTHER in ways

    webui.shared.opts.set("upcast_attn", True)
    webui.txt2img(*SEVERAL)
    assert row_of(webui).runs == "one card"
    assert row_of(webui).why[0].startswith("attention is computed in float32")
    webui.shared.opts.set("upcast_attn", False)

    unet = unet_of(webui)
    theirs: list[Any] = []
    unet.forward = lambda *args, **kwargs: (
        theirs.append(1),
        type(unet).forward(unet, *args, **kwargs),
    )[1]
    webui.txt2img(*SEVERAL)
    assert theirs and "has been replaced" in row_of(webui).why[0]
    del unet.forward
    pid = session_of(webui).team.members[0].pid
    webui.library("hosts.webui.register").unload()
    assert "forward" not in vars(unet_of(webui))
    gone(pid)


@pytest.mark.double_only("on a CPU nothing is moved")
def test_low_vram(start: Start, gpu: FakeGpu) -> None:
    webui = begin(start, gpu, args="--medvram")
    webui.txt2img(*SEVERAL)
    assert row_of(webui).why == (webui.library("hosts.webui.several").MOVED,)
    assert session_of(webui).team is None


def test_one_card(start: Start, monkeypatch: Any) -> None:
    made = FakeGpu()
    made.norms = True
    webui = begin(start, made)
    before = webui.txt2img(*WITHOUT)
    assert same(webui.txt2img(*WITHOUT, "Auto"), before)
    assert row_of(webui).runs == "one card" and row_of(webui).why == ("this is not a GPU",)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    several = webui.library("hosts.webui.several")
    monkeypatch.setattr(several.host, "device", lambda: torch.device("cuda"))
    (row,) = several.rows(webui.library("hosts.ui.options").parse(*SEVERAL)[0])
    assert row.why == ("there is one card, AMD Radeon RX 7900 XTX: nothing to divide with",)


def test_nonsense(start: Start, gpu: FakeGpu, capsys: Any) -> None:
    webui = begin(start, gpu)
    webui.txt2img(*AUTO, "perhaps", "first")
    said = capsys.readouterr().out
    assert "Several GPUs is 'perhaps', expected one of Off, Auto; Off is used" in said
    assert "Cards (numbers, empty: all) is 'first', expected numbers; all are used" in said


@pytest.mark.parametrize(
    ("opts", "lengths", "starts"),
    [
        ({"batch_cond_uncond": False}, (77, 77), "prompt and negative prompt are computed one"),
        ({}, (154, 77), "prompt and negative prompt have different lengths"),
        ({}, (77, 77), "the UNet is called for one picture and one prompt"),
    ],
)
def test_nothing_to_divide(
    start: Start, gpu: FakeGpu, opts: Any, lengths: tuple[int, int], starts: str
) -> None:
    """A call of one row, as the WebUI makes it in each of these cases."""
    webui = begin(start, gpu)
    session, teams = session_of(webui), webui.library("cards.team")
    for name, value in opts.items():
        setattr(webui.shared.opts, name, value)
    session._team = teams.Team(torch.device("cpu"), [], lambda device: None)
    session._team.why = teams.NOTHING_TO_SPLIT
    texts = [torch.zeros(1, length, 24) for length in lengths]
    params = webui.script_callbacks.CFGDenoiserParams(
        torch.zeros(1), None, None, 0, 3, {"crossattn": texts[0]}, {"crossattn": texts[1]}
    )
    session._note_pair(params)
    (why,) = session.why()
    assert why.startswith(starts)
    session._team = None
