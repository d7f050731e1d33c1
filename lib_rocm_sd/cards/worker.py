"""What a replica's process does: it builds a UNet and a VAE's decoder, takes their weights, and
computes calls of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd import cache, first_trials, functional, policy
from lib_rocm_sd.cards.memory import Board, Shared, settle
from lib_rocm_sd.cards.ranks import Ranks
from lib_rocm_sd.cards.replica import kind_of
from lib_rocm_sd.cards.shares import WARM
from lib_rocm_sd.cards.vae_rows import TogetherProgram
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.memory import empty_cache
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.hosts.read.blueprint import DECODER, UNET, build, tensors
from lib_rocm_sd.trials.gate import put_before
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import UnetTakeover
from lib_rocm_sd.vae.steps import Rows

Message = dict[str, Any]
PREPARE_S = 120.0
"""So long a card is left out of pictures at most, for its kernels to be compiled and tried; the
rest follows beside them. Less than Limits.start_s.
"""
_ATTENTIONS = ("CrossAttention", "MemoryEfficientCrossAttention")


class Worker:
    """On one device. `opening`: the first message. `look(waited_s)`: asked while a call waits for
    the others who compute it; raises RankError where they have stopped.
    """

    def __init__(self, opening: Message, look: Callable[[float], None]) -> None:
        cache.set_directory(opening["cache"])  # a card of the host's kind finds all that it needs
        self._device = torch.device(opening["device"])
        self._shared = Shared(int(opening["bytes"]), opening["memory"])
        self._look = look
        self.unet: CopiedUnet | None = None
        self.decoder: CopiedDecoder | None = None
        self._board: tuple[int, Shared] | None = None
        self._trusts = self._calls = False
        self._rehearsed: dict[str, torch.Tensor] = {}
        """Inputs of the last call, where it was the UNet's."""

    def answer(self, message: Message) -> Message:
        """What a message asks for, done."""
        does: dict[str, Callable[[Message], Message]] = {
            "open": self._open,
            "build": self._build,
            "weights": self._weights,
            "call": self._call,
            "compare": self._compare,
        }
        self._calls = message["kind"] == "call"
        try:
            return does[message["kind"]](message)
        finally:
            self._calls = False

    def _open(self, message: Message) -> Message:
        if self._device.type == "cuda":
            info = identify(self._device)
            if info.reasons:
                return {"kind": "unusable", "reason": "; ".join(info.reasons)}
            torch.cuda.set_device(self._device)
            self._shared.pin(self._device)
            self._prepare(message["home"])
        return {"kind": "ready", "pinned": self._shared.is_pinned, **self._memory()}

    def _prepare(self, home: Sequence[str]) -> None:
        """Launch only what was tried. Of a card of another kind than the host's, `home`, that is
        had before a picture needs it: what the catalog has is compiled and tried.
        """
        gate = put_before(engine, print, lambda: self._calls)
        if list(home) != kind_of(self._device):
            gate.expect(self._device, engine.launcher(self._device), first_trials.all_classes)
            gate.wait(PREPARE_S)

    def _memory(self) -> Message:
        if self._device.type != "cuda":
            return {"free": None}
        return {"free": torch.cuda.mem_get_info(self._device)[0]}

    def _build(self, message: Message) -> Message:
        """The blueprint lies in shared memory, as JSON. What was there before is given back."""
        is_decoder = message["part"] == DECODER
        if is_decoder:
            self.decoder = None
        elif self.unet is not None:
            self.unet.give_back()
            self.unet = None
        empty_cache(self._device)
        text = bytes(self._shared.tensor(0, (message["bytes"],), torch.uint8).numpy())
        plan = json.loads(text)
        _mirror(message["switches"])
        session = Session.of(message["level"], message["headroom"])
        self._trust(plan["passed"] if plan["kind"] == kind_of(self._device) else [])
        if not is_decoder:  # else what is recorded of the UNet would be recorded again
            engine.renew()
        module = build(plan["rows"], plan["packages"], self._device)
        if is_decoder:
            self.decoder = CopiedDecoder(module, session)
        else:
            self.unet = CopiedUnet(module, session, message["graphs"])
        return {"kind": "built", **self._memory()}

    def _trust(self, passed: Sequence[Sequence[str]]) -> None:
        """Leave out these self-tests, which the host's card has passed."""
        self._trusts = bool(passed)
        engine.trust(map(tuple, passed))

    def _weights(self, message: Message) -> Message:
        """Pieces of tensors: the tensor's number, its first element, how many, where they lie."""
        copy = self.decoder if message["part"] == DECODER else self.unet
        assert copy is not None
        for place, first, count, offset in message["pieces"]:
            tensor = copy.tensors[place]
            piece = self._shared.tensor(offset, (count,), tensor.dtype)
            with torch.no_grad():
                if count == tensor.numel():
                    tensor.copy_(piece.view(tensor.shape), non_blocking=True)
                else:
                    rows, start = (number // tensor[0].numel() for number in (count, first))
                    tensor[start : start + rows].copy_(
                        piece.view(rows, *tensor.shape[1:]), non_blocking=True
                    )
        settle(self._device)
        if message["last"] and isinstance(copy, CopiedUnet):
            copy.filled()
        return {"kind": "taken"}

    def _call(self, message: Message) -> Message:
        inputs = {}
        for name, dtype, shape, offset in message["inputs"]:
            tensor = self._shared.tensor(offset, shape, getattr(torch, dtype))
            inputs[name] = tensor.to(self._device, non_blocking=True, copy=True)
        begin = time.perf_counter()
        self._rehearsed = inputs if message["part"] == UNET else {}
        if message["part"] == UNET:
            result = self._of_unet(inputs)
        elif "parts" in message:
            return {"kind": "made", "ms": self._rows_of_decoder(inputs["image"], message)}
        else:
            assert self.decoder is not None
            result = self.decoder.picture(inputs["image"], message["scale"], message["rows"])
        out = self._shared.tensor(message["out"], result.shape, result.dtype)
        out.copy_(result, non_blocking=True)
        settle(self._device)
        took_ms = 1000 * (time.perf_counter() - begin)
        dtype = str(result.dtype).removeprefix("torch.")
        return {"kind": "made", "shape": list(result.shape), "dtype": dtype, "ms": took_ms}

    def _compare(self, message: Message) -> Message:
        """A result with the host's own. One that is wrong, of kernels that were not tested on this
        card, is made again by those that pass. After one that is right, the calls that plan and
        record are made before the host divides any.
        """
        result, expected = (
            self._shared.tensor(offset, shape, getattr(torch, dtype))
            for offset, dtype, shape in (message["result"], message["expected"])
        )
        why = _difference(result, expected, message["most"])
        again = bool(why) and self._trusts
        if again:
            self._trust([])
            engine.renew()
        for _ in range(WARM if self._rehearsed and not why else 0):  # nobody waits for these
            self._of_unet(self._rehearsed)
        settle(self._device)
        return {"kind": "compared", "why": why, "again": again}

    def _of_unet(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Where memory is short, what the decoder keeps beside its weights is given back first."""
        assert self.unet is not None
        try:
            return self.unet.call(inputs)
        except (RuntimeError, MemoryError) as error:
            if self.decoder is None or not is_out_of_memory(error):
                raise
        self.decoder.release()
        return self.unet.call(inputs)

    def _rows_of_decoder(self, image: torch.Tensor, message: Message) -> float:
        """This process's part of a picture that several make; what it took, in ms."""
        assert self.decoder is not None
        parts = [(first, last) for first, last in message["parts"]]
        ranks = Board(
            *(self._attached(*message["board"]), message["rank"], len(parts), self._device),
            *(message["turn"], self._look),
        )
        self.decoder.together(image, message["scale"], parts, ranks)
        return ranks.busy_ms

    def _attached(self, number: int, name: str, size: int) -> Shared:
        """The memory that processes exchange parts in."""
        if self._board is None or self._board[0] != number:
            if self._board is not None:
                self._board[1].close()
            self._board = number, Shared(size, name)
            if self._device.type == "cuda":
                self._board[1].pin(self._device)
        return self._board[1]


class CopiedUnet:
    """`module`, whose weights come into `tensors`; its blocks are ours once they are there."""

    def __init__(self, module: nn.Module, session: Session, graphs: bool | None) -> None:
        self.tensors = tensors(module)
        self._module = module
        self._ours = UnetTakeover([module], session, _Hook(graphs))
        _replace_attention(module, session)

    def filled(self) -> None:
        """All weights have come."""
        if not self._ours.is_on:
            self._ours.take_over()

    def call(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """What it gives, autocast as the WebUI has it around a UNet in half precision."""
        dtype = next((t.dtype for t in self.tensors if t.ndim > 1), torch.float32)
        half = dtype != torch.float32
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        with torch.no_grad(), torch.autocast(device.type, dtype) if half else nullcontext():
            return self._module(**inputs)  # type: ignore[no-any-return]

    def give_back(self) -> None:
        """Let go of what is kept beside the weights, for good."""
        self._ours.give_back()


class CopiedDecoder:
    """`module`, whose weights come into `tensors`: its program sees that they are others."""

    def __init__(self, module: nn.Module, session: Session) -> None:
        self.tensors = tensors(module)
        self._session = session.of_part("VAE decode")
        self._program = TogetherProgram(module)

    def picture(self, image: torch.Tensor, scale: int, rows: int) -> torch.Tensor:
        """The first `rows` of what it gives for `image`, all of it made here."""
        self._begin(scale)
        picture = self._program(image, session=self._session)
        self._tidy()
        return picture[:, :, :rows].contiguous()

    def together(
        self, image: torch.Tensor, scale: int, parts: Sequence[Rows], ranks: Ranks
    ) -> None:
        """Make this process's rows."""
        self._begin(scale)
        with torch.no_grad():
            self._program.together(image, parts, ranks, self._session)
        self._tidy()

    def release(self) -> None:
        """Give back what is kept beside the weights."""
        self._program.release()
        if self.tensors:
            empty_cache(self.tensors[0].device)

    def _begin(self, scale: int) -> None:
        self._program.look()
        self._program.take_scale(scale)

    def _tidy(self) -> None:
        if self._session.level == policy.MEMORY.name:
            self.release()


class _Hook(Hook):
    """Hook of a UNet that nobody but us touches."""

    compares = False

    def __init__(self, graphs: bool | None) -> None:
        self._graphs = graphs

    @property
    def graphs(self) -> bool | None:
        return self._graphs


def _difference(result: torch.Tensor, expected: torch.Tensor, most: float) -> str:
    """Why a result is not what it should be, by more than `most`: root of the mean square of the
    difference over that of what is expected; empty where it is.
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return f"it makes {list(result.shape)} of {result.dtype}, not {list(expected.shape)}"
    there, here = result.double(), expected.double()
    finite = here.isfinite()
    if not torch.equal(finite, there.isfinite()):
        return "its first result has other places that are not finite"
    there, here = there[finite], here[finite]
    scale = max(_rms(here), 1e-6)
    error = _rms(there - here) / scale
    if error <= most:
        return ""
    return f"its first result differs from this card's by {error:.2g} (rms)"


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def switches() -> dict[str, Any]:
    """torch's own that change what it computes."""
    return {
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.backends.cudnn.deterministic,
        "conv_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _mirror(theirs: dict[str, Any]) -> None:
    """Set what `switches` gave."""
    torch.backends.cudnn.benchmark = theirs["benchmark"]
    torch.backends.cudnn.deterministic = theirs["deterministic"]
    torch.backends.cudnn.allow_tf32 = theirs["conv_tf32"]
    torch.backends.cuda.matmul.allow_tf32 = theirs["matmul_tf32"]
    if theirs["algorithms"] != torch.are_deterministic_algorithms_enabled():
        # Imports torch's compiler, which takes four seconds; a step of the host's waits.
        torch.use_deterministic_algorithms(theirs["algorithms"], warn_only=True)


def _replace_attention(unet: nn.Module, session: Session) -> None:
    """Attention of blocks that are not ours: by the engine, not by a matrix of all scores."""

    def forward(
        self: Any, x: torch.Tensor, context: Any = None, mask: Any = None, **others: Any
    ) -> Any:
        context = x if context is None else context
        layers = ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        q, k, v = (layer(source).unflatten(-1, (self.heads, -1)) for layer, source in layers)
        scale = getattr(self, "scale", None)
        return self.to_out(functional.attention(q, k, v, mask, scale, session))

    for cls in {type(module) for module in unet.modules()}:
        if cls.__name__ in _ATTENTIONS:
            cls.forward = forward  # type: ignore[method-assign]
