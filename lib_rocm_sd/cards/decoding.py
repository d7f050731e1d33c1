"""A VAE's pictures by several cards: each makes its rows of every image on the way (vae_rows.py).

GroupNorm and attention need all rows, so the cards exchange something at each step of a decode, and
no card's part can be made up for later: if one fails, one's own card decodes the whole picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.cards.card import Card, NotDividedError, Work, missing
from lib_rocm_sd.cards.memory import Board, Shared, board_bytes, row_bytes, settle
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.cards.replica import SHARED_BYTES
from lib_rocm_sd.cards.shares import Shares, parts
from lib_rocm_sd.cards.vae_rows import TogetherProgram, parts_of, units
from lib_rocm_sd.engine.memory import empty_cache, free_bytes, is_recording
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.hosts.read.blueprint import DECODER, Subject
from lib_rocm_sd.vae.bands import Interrupted
from lib_rocm_sd.vae.plan import BandPlan
from lib_rocm_sd.vae.policy import limit_bytes
from lib_rocm_sd.vae.program import Request, is_finite
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
"""Tells boards apart, and their turns, each greater than those before it."""
Alone = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """Equal for decodes that take equally long."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: int
    part: str = DECODER


class Decoding(Work):
    """The pictures of a team. Shares are in rows of 16 of the latent image."""

    def __init__(self, home: torch.device, members: Sequence[Card]) -> None:
        # A generation has few decodes, and many steps.
        super().__init__(home, members, Shares(warm=1))
        self._board: Shared | None = None
        self._number = -1
        """Number of the board: a name may come again."""

    def close(self) -> None:
        """Give the shared memory back, and forget what was measured."""
        self.leave()
        self.shares.forget()
        self._close_board()

    def _close_board(self) -> None:
        if self._board is not None:
            settle(self.home)
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
        self._look()
        try:
            links = program.chain_of(image)
            self._check(subject, image, links, lambda: self._fits(program, request, plan))
            why = self._send(subject)
        except NotDividedError as reason:
            self.leave(str(reason))
            return alone()
        kind = Kind(tuple(image.shape), links.dtype, program.scale)
        rows = units(links)
        usable = [True, *(m.may(kind) and m.has(subject) for m in self.members)]
        self.way = self.shares.way(kind, rows, usable, self.may_be_new)
        if sum(map(bool, self.way)) > 1:
            picture = self._together(kind, program, request, links)
            if picture is not None and is_finite(picture):
                self.why = ""
                self.divided += len(image)
                return picture
            if picture is not None:
                return self._again(kind, request, alone)
            self.leave(self.failures(kind))
            request.session.report.event(f"one card makes the VAE's pictures: {self.why}")
            empty_cache(self.home)
            return alone()
        picture = self._whole(kind, subject, image, alone)
        self.why = why or self.failures(kind) or self.shares.alone(kind, rows)
        return picture

    def _again(self, kind: Kind, request: Request, alone: Alone) -> torch.Tensor:
        """By one card. Only if its picture is finite, not being so was the cards' fault."""
        self.leave(NOT_FINITE)
        picture = alone()
        if is_finite(picture):
            self._bar(kind, NOT_FINITE)
            self.why = self.failures(kind)
            request.session.report.event(f"one card makes the VAE's pictures: {self.why}")
        return picture

    def _check(
        self, subject: Subject, image: torch.Tensor, links: Chain, fits: Callable[[], bool]
    ) -> None:
        """Raises NotDividedError."""
        pixels = image.shape[2] * image.shape[3]
        if not len(image) or pixels < LEAST_PIXELS or units(links) < LEAST_UNITS:
            raise NotDividedError(SMALL)
        if is_recording(self.home):
            raise NotDividedError("somebody records this decode")
        cards = 1 + len(self.members)
        # An edge's row of an image, and statistics of all its rows: 16 bytes a channel of 4 rows.
        most = max((s.width * links.itemsize + 4 * s.height) * s.channels for s in links.sizes)
        if most > row_bytes(board_bytes(cards), cards):
            raise NotDividedError(WIDE)
        subject.look()
        if subject.reasons:
            raise NotDividedError("; ".join(subject.reasons[:MOST_REASONS]))
        if not fits():
            raise NotDividedError(BANDED)

    def _fits(self, program: TogetherProgram, request: Request, plan: BandPlan) -> bool:
        """Whether this card's part, of equal ones, is within what one card may take."""
        if plan.whole:
            return True
        session, device = request.session, request.image.device
        limit = limit_bytes(request.wish, free_bytes(device, session.headroom_bytes))
        if limit is None or request.wish.mode == "banded":
            return False
        whole = program.whole_bytes(request.image, session)
        return PEAK_SHARE * whole / (1 + len(self.members)) <= limit

    def _send(self, subject: Subject) -> str:
        """Have these weights sent to replicas without them, once in a generation. Why none has
        them; empty where some do. Raises NotDividedError.
        """
        there = [m for m in self.members if m.is_there and not m.without(DECODER)]
        lacking = [member for member in there if not member.has(subject)]
        if any(member in self._sent for member in lacking):
            raise NotDividedError(AMID)
        for member in lacking:
            self._sent.append(member)
            member.give(subject)
        has = any(member.has(subject) for member in self.members)
        return "" if has else missing(self.members, DECODER)

    def _whole(
        self, kind: Kind, subject: Subject, image: torch.Tensor, alone: Alone
    ) -> torch.Tensor:
        """By one's own card. Those that are new to this kind make the picture beside it."""
        trials: list[Card] = []
        rows = 0
        for member in self.members:
            if member.wants_trial(kind) and member.has(subject):
                # All of the picture's, unless they are more than may be sent back.
                rows = min(8 * image.shape[2], SHARED_BYTES // 3 // _row_bytes(image))
                more = {"scale": kind.scale, "rows": rows}
                out_bytes = rows * _row_bytes(image)
                if member.begin(kind, {"image": image[:1]}, out_bytes, more, trial=True):
                    trials.append(member)
        with self._clock.of(kind, self.way):
            picture = alone()
        for member in trials:
            member.expect(picture[:1, :, :rows])
        return picture

    def _together(
        self, kind: Kind, program: TogetherProgram, request: Request, links: Chain
    ) -> torch.Tensor | None:
        """By all that have a share; None where one of them fails."""
        cards = [card for card, share in enumerate(self.way) if share]
        members = [self.members[card - 1] for card in cards[1:]]
        rows = parts_of(links, parts(tuple(self.way[card] for card in cards)))
        try:
            with self._spending(kind, self.way), self._clock.of(kind, self.way) as clock:
                ranks = self._begun(kind, request.image, members, rows)
                picture = program.together(
                    *(request.image, rows, ranks, request.session),
                    *(request.progress, request.interrupt),
                )
                for card, member in zip(cards[1:], members, strict=True):
                    with suppress(RankError):  # the picture is whole
                        clock.took(card, member.took(kind))
                clock.took(0, ranks.busy_ms)
        except BaseException as error:
            for member in members:
                if not member.is_there:
                    with suppress(RankError):
                        member.stop(kind)
            if not all(member.is_there for member in members):
                self._close_board()  # one that has not stopped yet may still write into it
            if isinstance(error, Interrupted) or not isinstance(error, Exception):
                raise
            if not isinstance(error, RankError):  # else it has said why
                ours = f"ours failed: {type(error).__name__}: {error}"
                self._bar(kind, NO_ROOM if is_out_of_memory(error) else ours)
            return None
        return picture

    def _begun(
        self, kind: Kind, image: torch.Tensor, members: Sequence[Card], parts: Sequence[Rows]
    ) -> Board:
        """The others have been asked; what one exchanges with them. Raises RankError."""
        board = self._the_board()
        turn = next(_NUMBERS)
        more: dict[str, Any] = {
            "scale": kind.scale,
            "parts": parts,
            "board": [self._number, board.name, board.size],
            "turn": turn,
        }
        for rank, member in enumerate(members, 1):
            if not member.begin(kind, {"image": image}, 0, {**more, "rank": rank}):
                raise RankError(member.why_not(kind))

        def look(waited_s: float) -> None:
            for member in members:
                member.waited(kind, waited_s)

        return Board(board, 0, len(parts), self.home, turn, look)

    def _the_board(self) -> Shared:
        """Raises OSError."""
        if self._board is None:
            self._board = Shared(board_bytes(1 + len(self.members)))
            self._number = next(_NUMBERS)
            if self.home.type == "cuda":
                self._board.pin(self.home)
        return self._board

    def _bar(self, kind: Kind, why: str) -> None:
        """Let one card make such pictures from now on."""
        for member in self.members:
            member.bar(kind, why)


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


def _row_bytes(image: torch.Tensor) -> int:
    """More than a row of the picture takes: of three channels, eight times as wide, in float32."""
    return 4 * 3 * 8 * image.shape[3]
