"""A VAE's pictures that two cards make: one card's bits, and one card alone where one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lib_rocm_sd.cards import decoding as decodings
from lib_rocm_sd.cards import vae_rows as shared
from lib_rocm_sd.cards.card import SENDING
from lib_rocm_sd.cards.decoding import Kind, SeveralProgram
from lib_rocm_sd.cards.memory import Board
from lib_rocm_sd.cards.replica import Limits, Replica
from lib_rocm_sd.cards.team import Team
from lib_rocm_sd.cards.vae_rows import TogetherProgram
from lib_rocm_sd.cards.worker import CopiedDecoder, switches
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.read.blueprint import DECODER, Manner, Subject
from lib_rocm_sd.vae.bands import Interrupted
from lib_rocm_sd.vae.program import Program
from tests.several.help import CPU, await_answers, inputs, near
from tests.vae.vae_models import ldm_coder, needs_half

pytestmark = needs_half
HALF = torch.float16
SIZES = ((1, 57, 9), (1, 32, 16), (2, 40, 24))
"""Of latent images: batch, height, width."""


def latent(batch: int = 1, height: int = 40, width: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((batch, 4, height, width), generator=generator).to(HALF)


class Pictures:
    """A decoder whose pictures a team makes."""

    def __init__(self, module: Any, start: Callable[[torch.device], Replica], cards: int) -> None:
        self.module, self.session = module, Session()
        self.team = Team(CPU, [CPU] * cards, start)
        self.program = SeveralProgram(module)
        self.program.decoding = self.team.decoding
        self.program.subject = Subject(
            module, lambda: Manner(self.session.level, 0, None, switches()), part=DECODER
        )
        self.team.begin()
        self.wait()

    @property
    def decoding(self) -> Any:
        return self.team.decoding

    def wait(self) -> None:
        await_answers(self.team)

    def make(self, image: torch.Tensor, **more: Any) -> torch.Tensor:
        made = self.program(image, session=self.session, **more)
        self.wait()
        return made

    def alone(self, image: torch.Tensor) -> torch.Tensor:
        return Program(self.module)(image)

    def warm(self, image: torch.Tensor) -> None:
        """Until the next of this kind is divided: one card's time looks long."""
        for _ in range(4):
            self.make(image)
        known = self.decoding.shares.of(Kind(tuple(image.shape), HALF, self.program.scale))
        known.times |= {way: 1e9 for way in known.times if not any(way[1:])}
        known.speeds.clear()

    def divided(self, image: torch.Tensor) -> torch.Tensor:
        self.warm(image)
        before = self.decoding.divided
        made = self.make(image)
        assert self.decoding.divided == before + len(image), self.decoding.why
        return made


@pytest.fixture
def decoder() -> Any:
    return ldm_coder("decoder", (16, 32)).requires_grad_(False).to(HALF)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodings, "LEAST_PIXELS", 64)


@pytest.fixture
def pictures(again: Any, decoder: Any) -> Iterator[Pictures]:
    made = Pictures(decoder, again, 1)
    yield made
    made.team.close()


@pytest.mark.parametrize(("batch", "height", "width"), SIZES)
def test_one_cards_bits(pictures: Pictures, batch: int, height: int, width: int) -> None:
    image = latent(batch, height, width)
    expected = pictures.alone(image)
    made = pictures.divided(image)
    assert torch.equal(made, expected) and not pictures.decoding.why
    assert sum(pictures.decoding.way) == -(-height // 16) and min(pictures.decoding.way) >= 1
    other = latent(batch, height, width, seed=1)
    assert torch.equal(pictures.make(other), pictures.alone(other))


def test_what_the_decoder_itself_gives(pictures: Pictures) -> None:
    """What its own forward notes on it changes nothing: nothing is sent again."""
    image = latent(1, 32, 16)
    made, (member,) = pictures.divided(image), pictures.team.members
    sent = member.sent_bytes
    assert near(made, pictures.module(image)) and pictures.module.last_z_shape == image.shape
    pictures.team.begin()
    assert torch.equal(pictures.make(image), made) and member.sent_bytes == sent


@pytest.mark.slow
def test_three_cards(again: Any, decoder: Any) -> None:
    made = Pictures(decoder, lambda device: Replica(device, CPU, size=1 << 20), 2)
    image = latent(1, 50, 8)
    assert torch.equal(made.divided(image), made.alone(image))
    assert min(made.decoding.way) >= 1 and sum(made.decoding.way) == 4
    short = latent(1, 30, 8)  # rows for two of them
    assert torch.equal(made.divided(short), made.alone(short))
    assert sorted(made.decoding.way) == [0, 1, 1]
    made.team.close()


def test_first_one_card_then_all(pictures: Pictures) -> None:
    """The copy's first picture is compared, and what each way takes is measured."""
    image = latent()
    member = pictures.team.members[0]
    kind = Kind(tuple(image.shape), HALF, 0)
    pictures.make(image)
    assert pictures.decoding.way == (3, 0) and pictures.decoding.why == f"cpu: {SENDING}"
    assert member.sent_bytes == sum(2 * p.numel() for p in pictures.module.parameters())
    pictures.make(image)
    assert pictures.decoding.way == (3, 0) and member.may(kind)
    for _ in range(3):
        pictures.make(image)
    assert pictures.decoding.divided == 3
    known = pictures.decoding.shares.of(kind)
    assert set(known.times) == {(3, 0), (2, 1)} and set(known.speeds) == {0, 1}
    known.times[3, 0] = 1e-9
    known.calls = dict.fromkeys(known.calls, 9) | {(1, 2): 9}
    known.times[1, 2] = 1.0
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.why.startswith("one card takes ") and pictures.decoding.divided == 3


def test_weights_that_change(pictures: Pictures) -> None:
    """Only they are sent; not twice in a generation."""
    image = latent()
    before = pictures.divided(image)
    sent = pictures.team.members[0].sent_bytes
    pictures.team.begin()
    weight = pictures.module.conv_out.weight
    with torch.no_grad():
        weight.mul_(-2)
    made = pictures.divided(image)
    assert torch.equal(made, pictures.alone(image)) and not torch.equal(made, before)
    assert pictures.team.members[0].sent_bytes - sent == 2 * weight.numel()
    with torch.no_grad():
        weight.mul_(-2)
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.why == decodings.AMID


def test_another_checkpoint(pictures: Pictures) -> None:
    pictures.divided(latent())
    pictures.team.begin()
    pictures.team.forget_weights()
    with torch.no_grad():
        pictures.module.conv_in.bias.data += 1  # no version tells of it
    pictures.program.refresh()
    pictures.program.release()
    assert torch.equal(pictures.divided(latent()), pictures.alone(latent()))


def test_an_overflow(pictures: Pictures) -> None:
    """Both make the picture again with smaller numbers between the steps."""
    with torch.no_grad():
        pictures.module.conv_in.weight.mul_(30_000)
    image = latent()
    expected = pictures.alone(image)
    assert expected.isfinite().all()
    assert torch.equal(pictures.divided(image), expected) and pictures.program.scale > 0


@pytest.mark.parametrize(
    ("shape", "why"),
    [((1, 7, 8), decodings.SMALL), ((1, 16, 64), decodings.SMALL), ((0, 40, 8), decodings.SMALL)],
)
def test_small_pictures(pictures: Pictures, shape: tuple[int, int, int], why: str) -> None:
    image = latent(*shape)
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.why == why and not pictures.team.members[0].sent_bytes


def test_bands_of_little_memory(pictures: Pictures) -> None:
    """One card's, unless half of the whole picture fits where all of it does not."""
    image = latent(1, 128, 8)
    expected = pictures.alone(image)
    assert torch.equal(pictures.make(image, mode="banded"), expected)
    assert pictures.decoding.why == decodings.BANDED
    whole = pictures.program.whole_bytes(image, pictures.session)
    for share, why in ((0.9, ""), (0.7, decodings.BANDED)):
        given = {"budget_bytes": int(share * whole)}
        for _ in range(4):
            assert torch.equal(pictures.make(image, **given), expected)
            assert not pictures.program.last_plan.whole  # type: ignore[union-attr]
        assert (pictures.decoding.why == decodings.BANDED) is bool(why)
    assert pictures.decoding.divided > 0


def test_what_others_have_done(pictures: Pictures) -> None:
    """Ours makes it, since it does not ask these; no copy is made of them."""
    pictures.module.mid.extra = object()
    image = latent()
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.why == "mid: its extra is a object"


def test_off(pictures: Pictures) -> None:
    pictures.divided(latent())
    pictures.program.decoding = None
    number = pictures.team.members[0]._replica._number  # type: ignore[union-attr]
    assert torch.equal(pictures.make(latent()), pictures.alone(latent()))
    assert pictures.team.members[0]._replica._number == number  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("memory", "cpu: out of memory on cpu"),
        ("error", "cpu: it failed: ValueError: a planted error"),
        ("amid memory", "cpu: out of memory on cpu"),
        ("amid error", "cpu: it failed: ValueError: a planted error"),
    ],
)
def test_a_card_that_fails(
    pictures: Pictures, plan: Path, monkeypatch: pytest.MonkeyPatch, fault: str, why: str
) -> None:
    """One's own card makes the whole picture in the same call, and the next ones."""
    image = latent()
    pictures.warm(image)
    plan.write_text(f"call {fault}")
    told: list[str] = []
    monkeypatch.setattr(pictures.session.report, "event", told.append)
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.why == why and pictures.decoding.way == ()
    plan.write_text("")
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.why == why
    assert told == [f"one card makes the VAE's pictures: {why}"]
    other = latent(1, 33, 8)
    assert torch.equal(pictures.divided(other), pictures.alone(other))


def test_a_wrong_first_picture(pictures: Pictures, plan: Path) -> None:
    plan.write_text("call wrong")
    pictures.make(latent())
    pictures.warm(latent())
    assert torch.equal(pictures.make(latent()), pictures.alone(latent()))
    assert pictures.decoding.why.startswith("cpu: its first result differs from this card's by 0.5")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("build memory", "cpu: out of memory"),
        ("weights error", "cpu: ValueError: a planted error"),
    ],
)
def test_no_room_for_the_decoder(pictures: Pictures, plan: Path, fault: str, why: str) -> None:
    """The card stays there for the UNet."""
    plan.write_text(fault)
    for reason in (f"cpu: {SENDING}", why, why):
        assert torch.equal(pictures.make(latent()), pictures.alone(latent()))
        assert pictures.decoding.why == reason
        pictures.team.begin()
    assert pictures.team.members[0].is_there
    assert not pictures.team.members[0].reason


@pytest.mark.slow
def test_a_process_that_dies_and_one_that_hangs(decoder: Any, plan: Path) -> None:
    made = Pictures(decoder, lambda device: Replica(device, CPU, Limits(call_s=2.0), 1 << 20), 1)
    image = latent()
    made.warm(image)
    plan.write_text("call amid die")
    assert torch.equal(made.make(image), made.alone(image))
    assert made.decoding.why == "cpu: its process ended with status 7"
    plan.write_text("")
    made.team.begin()
    made.wait()
    made.warm(image)
    plan.write_text("call amid hang")
    assert torch.equal(made.make(image), made.alone(image))
    assert made.decoding.why == "cpu: no answer amid 'call' within 2 s"
    assert torch.equal(made.make(image), made.alone(image))
    made.team.close()


def test_interrupt(pictures: Pictures) -> None:
    """Between two steps; the other card stops too, and is there for the next picture."""
    image = latent()
    pictures.warm(image)
    ticks: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        ticks.extend([(done, total)] * (done > 0))

    with pytest.raises(Interrupted):
        pictures.make(image, progress=progress, interrupt=lambda: len(ticks) > 3)
    assert [done for done, _ in ticks] == [1, 2, 3, 4] and ticks[0][1] > 10
    pictures.wait()
    assert pictures.team.members[0].is_there
    before = pictures.decoding.divided
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.divided == before + 1


def test_too_little_memory_here(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    image = latent()
    pictures.warm(image)

    def fail(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Board, "exchange", fail)
        assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.why == f"cpu: {decodings.NO_ROOM}"
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.team.members[0].is_there


def test_statistics_of_other_phases(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    """One card has four of an enlarged image by our kernel, the other one by torch."""
    image = latent()
    pictures.warm(image)
    real = shared.launch

    def launch(*given: Any) -> Any:
        y, statistics = real(*given)
        return y, None if statistics is None else statistics.transpose(1, 2)

    monkeypatch.setattr(shared, "launch", launch)
    before = pictures.decoding.divided
    made = pictures.make(image)
    assert pictures.decoding.divided == before + 1, pictures.decoding.why
    assert near(made, pictures.alone(image))


def test_a_picture_of_nan_is_made_again(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = latent()
    pictures.warm(image)
    real = TogetherProgram.together

    def together(*given: Any, **more: Any) -> torch.Tensor:
        return real(*given, **more).fill_(float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(TogetherProgram, "together", together)
        assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.why == f"cpu: {decodings.NOT_FINITE}"
    assert pictures.program.scale == 0 and pictures.team.members[0].is_there
    assert torch.equal(pictures.make(image), pictures.alone(image))


def test_an_image_of_nan_is_nobodys_fault(pictures: Pictures) -> None:
    image = latent()
    pictures.divided(image)
    bad = image.clone()
    bad[0, 0, 3, 3] = float("nan")
    assert pictures.make(bad).isnan().any() and pictures.decoding.why == decodings.NOT_FINITE
    before = pictures.decoding.divided
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.divided == before + 1, pictures.decoding.why


def test_unet_and_decoder_in_one_process(pictures: Pictures, unet: Any) -> None:
    """Each keeps its weights while the other's are sent."""
    image = latent()
    pictures.divided(image)
    (member,) = pictures.team.members
    subject = Subject(unet, lambda: Manner("Auto", 0, None, switches()))
    subject.look()
    member.give(subject)
    pictures.wait()
    assert member.begin("a step", inputs(), 1 << 16)
    made = member.fetch("a step")
    expected = type(unet).forward(unet, **inputs())
    assert made is not None and near(made.tensor, expected)
    before = pictures.decoding.divided
    assert torch.equal(pictures.make(image), pictures.alone(image))
    assert pictures.decoding.divided == before + 1


@pytest.mark.parametrize(("level", "kept"), [("Auto", True), ("Memory", False)])
def test_what_is_kept_beside_the_weights(decoder: Any, level: str, kept: bool) -> None:
    copied = CopiedDecoder(decoder, Session.of(level))
    image = latent(1, 20, 8)
    made = copied.picture(image, 0, 24)
    assert torch.equal(made, Program(decoder)(image)[:, :, :24])
    assert bool(copied._program._ready) is kept
