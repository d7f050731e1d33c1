"""A VAE's pictures by several cards: each makes its rows of every image on the way (vae/shared.py).

GroupNorm and attention need all rows, so the cards exchange something at each step of a decode, and
no card's part can be made up for later: if one fails, one's own card decodes the whole picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.engine.memory import empty_cache, free_bytes, is_recording
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.several.board import Board, board_bytes, row_bytes
from lib_rocm_sd.several.clock import Clock
from lib_rocm_sd.several.member import Member, NotDividedError, missing
from lib_rocm_sd.several.memory import Shared
from lib_rocm_sd.several.replica import DECODER, SHARED_BYTES
from lib_rocm_sd.several.shares import Shares, Way
from lib_rocm_sd.several.subject import Subject
from lib_rocm_sd.several.together import TogetherProgram
from lib_rocm_sd.vae.bands import Interrupted
from lib_rocm_sd.vae.plan import BandPlan
from lib_rocm_sd.vae.policy import limit_bytes
from lib_rocm_sd.vae.program import Request, is_finite
from lib_rocm_sd.vae.shared import parts_of, units
from lib_rocm_sd.vae.steps import Rows
from lib_rocm_sd.vae.trace import Chain

LEAST_PIXELS = 64 * 64
"""Smallest latent image that is divided, in pixels: below it, exchanges take what is gained."""
LEAST_UNITS = 2
SMALL = "the picture is small"
BANDED = "one card makes it in bands that take little memory"
PEAK_SHARE = 1.5
"""Peak memory of a card's part over its share of a whole picture's: nothing is written in place."""
WIDE = "the picture is too wide to be exchanged"
AMID = "the VAE's weights have changed amid a generation, and are not sent twice"
NO_ROOM = "this card has too little memory for its part"
NOT_FINITE = "a picture by several cards had NaN or infinity"
MOST_REASONS = 3
_NUMBERS = count()
Alone = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """Equal for decodes that take equally long."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: int
    part: str = DECODER


class _FailedError(Exception):
    """Another card gave up; it has said why."""


class Decoding:
    """By `home` and `members`, those of a team. Not thread-safe."""

    def __init__(self, home: torch.device, members: Sequence[Member]) -> None:
        self._home, self._members = home, members
        self.why = ""
        """Why one card made the last picture; empty where several did, or none was made."""
        self.way: Way = ()
        """Each card's share of the last picture, one's own first, in rows of 16 of the latent."""
        self.divided = 0
        """How many pictures several cards made."""
        self.shares = Shares(warm=1, measured=1)  # a generation has few decodes, and many steps
        self._clock = Clock(home, self.shares)
        self._board: Shared | None = None
        self._number = -1
        """Number of the board: a name may come again."""
        self._sent: list[Member] = []
        """Who was sent weights since `begin`."""

    def begin(self) -> None:
        """The next pictures are begun."""
        self._sent = []

    def close(self) -> None:
        """Give the shared memory back, and forget what was measured."""
        self.why, self.way = "", ()
        self.shares.forget()
        if self._board is not None:
            self._board.close()
            self._board = None

    def compute(
        self,
        program: TogetherProgram,
        subject: Subject,
        request: Request,
        plan: BandPlan,
        alone: Alone,
    ) -> torch.Tensor:
        """What `alone()` gives, on several cards where that is faster.

        `plan`: how one card would make it. `subject`: the module that `program` is of.
        """
        image = request.image
        try:
            links = program.chain_of(image)
            self._prepare(subject, image, links, lambda: self._fits(program, request, plan))
        except NotDividedError as reason:
            self.why, self.way = str(reason), ()
            return alone()
        kind = Kind(tuple(image.shape), links.dtype, program.scale)
        rows = units(links)
        usable = [True, *(m.may(kind) and m.has(subject) for m in self._members)]
        self.way = self.shares.way(kind, rows, usable)
        if sum(map(bool, self.way)) > 1:
            made = self._together(kind, program, request, links)
            if made is not None and is_finite(made):
                self.why = ""
                self.divided += len(image)
                return made
            if made is not None:
                return self._again(kind, request, alone)
            self.why, self.way = self._failures(kind), ()
            request.session.report.event(f"one card makes the VAE's pictures: {self.why}")
            empty_cache(self._home)
            return alone()
        made = self._whole(kind, subject, image, alone)
        self.why = self._failures(kind) or self.shares.alone(kind, rows)
        return made

    def _again(self, kind: Kind, request: Request, alone: Alone) -> torch.Tensor:
        """By one card. Only if its picture is finite, not being so was the cards' fault."""
        self.why, self.way = NOT_FINITE, ()
        made = alone()
        if is_finite(made):
            self._bar(kind, NOT_FINITE)
            self.why = self._failures(kind)
            request.session.report.event(f"one card makes the VAE's pictures: {self.why}")
        return made

    def _prepare(
        self, subject: Subject, image: torch.Tensor, links: Chain, fits: Callable[[], bool]
    ) -> None:
        """Raises NotDividedError."""
        for member in self._members:
            member.look()
            member.drain()
        pixels = image.shape[2] * image.shape[3]
        if not len(image) or pixels < LEAST_PIXELS or units(links) < LEAST_UNITS:
            raise NotDividedError(SMALL)
        if is_recording(self._home):
            raise NotDividedError("somebody records this decode")
        cards = 1 + len(self._members)
        row = max(size.width * size.channels for size in links.sizes) * links.itemsize
        if row > row_bytes(board_bytes(cards), cards):
            raise NotDividedError(WIDE)
        subject.look()
        if subject.reasons:
            raise NotDividedError("; ".join(subject.reasons[:MOST_REASONS]))
        if not fits():
            raise NotDividedError(BANDED)
        self._send(subject)

    def _fits(self, program: TogetherProgram, request: Request, plan: BandPlan) -> bool:
        """Whether this card's part, of equal ones, is within what one card may take."""
        if plan.whole:
            return True
        session, device = request.session, request.image.device
        limit = limit_bytes(request.wish, free_bytes(device, session.headroom_bytes))
        if limit is None or request.wish.mode == "banded":
            return False
        whole = program.whole_bytes(request.image, session)
        return PEAK_SHARE * whole / (1 + len(self._members)) <= limit

    def _send(self, subject: Subject) -> None:
        """See that the replicas have these weights; once in a generation they may be sent."""
        there = [m for m in self._members if m.is_there and not m.without(DECODER)]
        lacking = [member for member in there if not member.has(subject)]
        if any(member in self._sent for member in lacking):
            raise NotDividedError(AMID)
        for member in lacking:
            self._sent.append(member)
            member.give(subject)
        if not any(member.has(subject) for member in there):
            raise NotDividedError(missing(self._members, DECODER))

    def _whole(
        self, kind: Kind, subject: Subject, image: torch.Tensor, alone: Alone
    ) -> torch.Tensor:
        """By one's own card. Those that are new to this kind make the picture beside it."""
        tried: list[Member] = []
        rows = 0
        for member in self._members:
            if member.wants_trial(kind) and member.has(subject):
                rows = _compared_rows(image)
                asked = {"scale": kind.scale, "rows": rows}
                if member.try_(kind, {"image": image[:1]}, rows * _row_bytes(image), asked):
                    tried.append(member)
        with self._clock.of(kind, self.way):
            made = alone()
        for member in tried:
            member.expect(made[:1, :, :rows])
        return made

    def _together(
        self, kind: Kind, program: TogetherProgram, request: Request, links: Chain
    ) -> torch.Tensor | None:
        """By all that have a share; None where one of them fails."""
        cards = [card for card, share in enumerate(self.way) if share]
        members = [self._members[card - 1] for card in cards[1:]]
        parts = parts_of(links, _bounds([self.way[card] for card in cards]))
        try:
            with self._clock.of(kind, self.way) as clock:
                ranks = self._begun(kind, request.image, members, parts)
                made = program.together(
                    *(request.image, parts, ranks, request.session),
                    *(request.progress, request.interrupt),
                )
                for card, member in zip(cards[1:], members, strict=True):
                    clock.took(card, member.took(kind) or 0.0)
                clock.took(0, ranks.busy_ms)
        except BaseException as error:
            for member in members:
                if not member.is_there:
                    member.say(kind, "stop")
            if isinstance(error, Interrupted) or not isinstance(error, Exception):
                raise
            if not isinstance(error, _FailedError):
                self._bar(kind, _why(error))
            return None
        return made

    def _begun(
        self, kind: Kind, image: torch.Tensor, members: Sequence[Member], parts: Sequence[Rows]
    ) -> Board:
        """The others have been asked; what one exchanges with them. Raises _FailedError."""
        board = self._the_board()
        asked: dict[str, Any] = {
            "scale": kind.scale,
            "parts": parts,
            "board": [self._number, board.name, board.size],
        }
        for rank, member in enumerate(members, 1):
            if not member.begin(kind, {"image": image}, 0, {**asked, "rank": rank}):
                raise _FailedError

        def meet() -> None:
            """Each other one goes on when all have written; of two, this one need not wait."""
            if len(members) == 1 and not members[0].say(kind, "go"):
                raise _FailedError
            if not all([member.arrived(kind) for member in members]):
                raise _FailedError
            if len(members) > 1 and not all([member.say(kind, "go") for member in members]):
                raise _FailedError

        return Board(board, 0, len(parts), self._home, meet)

    def _the_board(self) -> Shared:
        """Raises OSError."""
        if self._board is None:
            self._board = Shared(board_bytes(1 + len(self._members)))
            self._number = next(_NUMBERS)
            if self._home.type == "cuda":
                self._board.pin(self._home)
        return self._board

    def _bar(self, kind: Kind, why: str) -> None:
        """Let one card make such pictures from now on."""
        for member in self._members:
            member.bar(kind, why)

    def _failures(self, kind: Kind) -> str:
        members = [member for member in self._members if not member.may(kind)]
        return "; ".join(f"{member.device}: {member.why_not(kind)}" for member in members)


class SeveralProgram(TogetherProgram):
    """A Program whose images several cards make while there is a `decoding`."""

    def __init__(self, module: nn.Module) -> None:
        self.decoding: Decoding | None = None
        self.subject: Subject | None = None
        """The module, as what may be copied; wanted where there is a `decoding`."""
        super().__init__(module)

    def _run(self, request: Request, plan: BandPlan, links: Chain, strict: bool) -> torch.Tensor:
        def alone() -> torch.Tensor:
            return super(SeveralProgram, self)._run(request, plan, links, strict)

        decoding, subject = self.decoding, self.subject
        if decoding is None or subject is None:
            return alone()
        return decoding.compute(self, subject, request, plan, alone)


def _why(error: Exception) -> str:
    if is_out_of_memory(error):
        return NO_ROOM
    return f"ours failed: {type(error).__name__}: {error}"


def _bounds(shares: Sequence[int]) -> list[Rows]:
    ends = [sum(shares[: rank + 1]) for rank in range(len(shares))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _row_bytes(image: torch.Tensor) -> int:
    """More than a row of the picture takes: of three channels, eight times as wide, in float32."""
    return 4 * 3 * 8 * image.shape[3]


def _compared_rows(image: torch.Tensor) -> int:
    """Rows of a picture that are compared: all, unless they are more than may be sent back."""
    return min(8 * image.shape[2], SHARED_BYTES // 2 // _row_bytes(image))
