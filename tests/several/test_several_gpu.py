"""Two processes on the card that is there, which users are not offered: it plays both parts.
What is measured says what the way there and back costs, and nothing of two cards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from lib_rocm_sd.cards.decoding import SeveralProgram
from lib_rocm_sd.cards.replica import Replica
from lib_rocm_sd.cards.shares import divide
from lib_rocm_sd.cards.team import SeveralStandIn, Team
from lib_rocm_sd.cards.worker import switches
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.read.blueprint import DECODER, Manner, Subject
from lib_rocm_sd.unet.takeover import take_over
from lib_rocm_sd.vae.program import Program
from tests import doubles
from tests.vae.vae_models import ldm_coder

pytestmark = pytest.mark.gpu
HALF = torch.float16
STEPS = 30
LIMIT_S = 600.0


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def unet(gpu: torch.device) -> Any:
    """As wide as SD 1.5's first levels; 60 MB of weights."""
    torch.manual_seed(3)
    kind = doubles.module_of(doubles.UNET).UNetModel
    made = kind(channels=320, heads=8, d_head=40, context_dim=768)
    made = made.eval().requires_grad_(False).to(gpu, HALF)
    made.dtype = HALF
    return made


@pytest.fixture(scope="module")
def decoder(gpu: torch.device) -> Any:
    """As wide as Stable Diffusion's."""
    made = ldm_coder("decoder", (128, 256, 512, 512), blocks=2)
    return made.requires_grad_(False).to(gpu, HALF)


@pytest.fixture(scope="module")
def team(gpu: torch.device, unet: Any) -> Iterator[Team]:
    made = Team(gpu, [gpu], lambda device: Replica(device, gpu))
    made.begin()
    yield made
    made.close()


@pytest.fixture
def step(gpu: torch.device, unet: Any, team: Team) -> Iterator[Callable[..., torch.Tensor]]:
    """A step of the team's. Blocks are ours in both processes."""
    taken = take_over(unet, Session())
    team.begin()  # blocks that are taken over lay their weights anew
    subject = Subject(unet, lambda: Manner("Auto", 0, None, switches()))
    stand_in = SeveralStandIn(subject, team, lambda: "", lambda leaves: "")
    stand_in.put_in()

    def compute(rows: int = 2, side: int = 64, alone: bool = False) -> torch.Tensor:
        given = inputs(gpu, rows, side)
        with torch.no_grad(), torch.autocast("cuda", HALF):
            made: torch.Tensor = type(unet).forward(unet, **given) if alone else unet(**given)
        return made

    yield compute
    stand_in.take_out()
    taken.give_back()


def inputs(gpu: torch.device, rows: int, side: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(gpu, HALF)

    return {
        "x": draw(rows, 4, side, side),
        "timesteps": torch.full((rows,), 0.5, device=gpu),
        "context": draw(rows, 77, 768),
    }


def evenly(kind: Any, rows: int, usable: Sequence[bool], new: bool = True) -> tuple[int, ...]:
    """Whatever is faster: on one card, that is mostly one process."""
    return divide(rows, [1.0, 1.0], [1, 0]) if all(usable) else (rows, 0)


def divided(team: Team, step: Callable[..., torch.Tensor], rows: int, **more: Any) -> torch.Tensor:
    """A step that both processes compute, whatever takes longer."""
    team.shares.way = evenly  # type: ignore[method-assign]
    end = time.monotonic() + LIMIT_S
    while True:
        made = step(rows, **more)
        if not team.why:
            return made
        assert time.monotonic() < end, team.why
        time.sleep(0.02)


def error(made: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (made.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt())


@pytest.mark.parametrize(("rows", "side"), [(2, 64), (5, 32), (2, 33)])
def test_both_together(team: Team, step: Any, rows: int, side: int) -> None:
    made = divided(team, step, rows, side=side)
    alone = step(rows, side=side, alone=True)
    assert error(made, alone) < 5e-3
    first = team.way[0]
    assert error(made[:first], alone[:first]) < 5e-3
    print(f"\n{rows} rows of {side}x{side}: rms {error(made, alone):.1e}, way {team.way}")


def test_weights_are_followed(team: Team, step: Any, unet: Any) -> None:
    divided(team, step, 2)
    sent = team.members[0].sent_bytes
    team.begin()
    with torch.no_grad():
        unet.out[2].weight.mul_(-1)
    made = divided(team, step, 2)
    assert error(made, step(2, alone=True)) < 5e-3
    assert team.members[0].sent_bytes - sent == unet.out[2].weight.numel() * 2


def test_what_it_costs(team: Team, step: Any, gpu: torch.device, unet: Any) -> None:
    """Printed: a step alone and divided on one card, sending the weights, and whether memory is
    pinned.
    """
    divided(team, step, 2)
    times = {}
    for name, way in (("one process", True), ("two processes, one card", False)):
        for _ in range(5):
            step(2, alone=way)
        torch.cuda.synchronize(gpu)
        begin = time.perf_counter()
        for _ in range(STEPS):
            step(2, alone=way)
        torch.cuda.synchronize(gpu)
        times[name] = 1000 * (time.perf_counter() - begin) / STEPS
    replica = team.members[0]._replica
    assert replica is not None and replica._shared.is_pinned
    tensors = [parameter for parameter in unet.parameters()]
    begin = time.perf_counter()
    sent = replica.fill(tensors, range(len(tensors)))
    past_s = time.perf_counter() - begin
    each = team.shares.of(next(iter(team.shares._kinds))).speeds
    print(f"\n{times}; weights: {sent / past_s / 1e9:.2f} GB/s; rows a ms: {each}")
    assert not team.why


@pytest.mark.parametrize(("height", "width"), [(64, 64), (90, 64), (128, 128)])
def test_a_picture(team: Team, decoder: Any, gpu: torch.device, height: int, width: int) -> None:
    """Printed: whether both give one process's bits, and what a decode takes."""
    program, alone, decoding = SeveralProgram(decoder), Program(decoder), team.decoding
    program.decoding = decoding
    program.subject = Subject(decoder, lambda: Manner("Auto", 0, None, switches()), part=DECODER)
    team.begin()
    decoding.shares.way = evenly  # type: ignore[method-assign]
    generator = torch.Generator("cpu").manual_seed(height)
    image = torch.randn((1, 4, height, width), generator=generator).to(gpu, HALF)
    in_a_row, end = 0, time.monotonic() + LIMIT_S
    while in_a_row < 5:  # first results are compared with this card's
        before = decoding.divided
        made = program(image)
        in_a_row = in_a_row + 1 if decoding.divided > before else 0
        assert time.monotonic() < end, decoding.why
        time.sleep(0.02)
    expected = alone(image)
    assert error(made, expected) < 5e-3
    times = []
    for one in (alone, program):
        for _ in range(3):
            made = one(image)
        torch.cuda.synchronize(gpu)
        begin = time.perf_counter()
        for _ in range(5):
            made = one(image)
        torch.cuda.synchronize(gpu)
        times.append(1000 * (time.perf_counter() - begin) / 5)
    assert not decoding.why and error(made, expected) < 5e-3
    same = torch.equal(made, expected)
    print(
        f"\n{height}x{width}: same bits {same}; one process {times[0]:.1f} ms, two {times[1]:.1f}"
    )
