"""What a replica's process does: it builds a UNet and a VAE's decoder, takes their weights, and
computes calls of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import lib_rocm_sd.hosts.read  # noqa: F401 - knows the hosts' classes
from lib_rocm_sd import functional
from lib_rocm_sd.device import identify
from lib_rocm_sd.engine.engine import engine
from lib_rocm_sd.engine.memory import empty_cache
from lib_rocm_sd.engine.selftest import is_out_of_memory
from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.several import rebuilt
from lib_rocm_sd.several.board import Board
from lib_rocm_sd.several.decoder import CopiedDecoder
from lib_rocm_sd.several.memory import Shared, settle
from lib_rocm_sd.several.replica import DECODER
from lib_rocm_sd.trials.gate import put_before
from lib_rocm_sd.unet.hook import Hook
from lib_rocm_sd.unet.takeover import UnetTakeover

Message = dict[str, Any]
_ATTENTIONS = ("CrossAttention", "MemoryEfficientCrossAttention")


class _Hook(Hook):
    """Hook of a UNet that nobody but us touches."""

    compares = False

    def __init__(self, graphs: bool | None) -> None:
        self._graphs = graphs

    @property
    def graphs(self) -> bool | None:
        return self._graphs


class Worker:
    """On one device. `opening`: the first message. `meet(number)`: amid the call of that number,
    waits until all who compute it have written their parts of an exchange; raises where they stop.
    """

    def __init__(self, opening: Message, meet: Callable[[int], None]) -> None:
        self._device = torch.device(opening["device"])
        self._shared = Shared(int(opening["bytes"]), opening["memory"])
        self._session = Session()
        self._unet: nn.Module | None = None
        self._tensors: list[torch.Tensor] = []
        self._taken: UnetTakeover | None = None
        self._graphs: bool | None = None
        self._meet = meet
        self._decoder: CopiedDecoder | None = None
        self._board: tuple[int, Shared] | None = None

    def answer(self, message: Message) -> Message:
        """What a message asks for, done."""
        does: dict[str, Callable[[Message], Message]] = {
            "open": self._open,
            "build": self._build,
            "weights": self._weights,
            "call": self._call,
        }
        return does[message["kind"]](message)

    def _open(self, message: Message) -> Message:
        if self._device.type == "cuda":
            info = identify(self._device)
            if info.reasons:
                return {"kind": "unusable", "reason": "; ".join(info.reasons)}
            torch.cuda.set_device(self._device)
            self._shared.pin(self._device)
            put_before(engine, print)
        return {"kind": "ready", "pinned": self._shared.is_pinned, **self._memory()}

    def _memory(self) -> Message:
        if self._device.type != "cuda":
            return {"free": None}
        return {"free": torch.cuda.mem_get_info(self._device)[0]}

    def _build(self, message: Message) -> Message:
        """The blueprint lies in shared memory, as JSON. What was there before is given back."""
        part = message["part"]
        self._forget(part)
        text = bytes(self._shared.tensor(0, (message["bytes"],), torch.uint8).numpy())
        plan = json.loads(text)
        _mirror(message["switches"])
        session = Session.of(message["level"], message["headroom"])
        engine.renew()
        module = rebuilt.build(plan["rows"], plan["packages"], self._device)
        if part == DECODER:
            self._decoder = CopiedDecoder(module, session)
        else:
            self._graphs, self._session = message["graphs"], session
            _replace_attention(module, session)
            self._unet, self._tensors = module, rebuilt.tensors(module)
        return {"kind": "built", **self._memory()}

    def _forget(self, part: str) -> None:
        if part == DECODER:
            self._decoder = None
        elif self._taken is not None:
            self._taken.give_back()
        if part != DECODER:
            self._unet = self._taken = None
            self._tensors = []
        empty_cache(self._device)

    def _weights(self, message: Message) -> Message:
        """Pieces of tensors: the tensor's number, its first element, how many, where they lie."""
        decoder = self._decoder if message["part"] == DECODER else None
        tensors = self._tensors if decoder is None else decoder.tensors
        for place, first, count, offset in message["pieces"]:
            tensor = tensors[place]
            piece = self._shared.tensor(offset, (count,), tensor.dtype)
            with torch.no_grad():
                if count == tensor.numel():
                    tensor.copy_(piece.view(tensor.shape), non_blocking=True)
                else:
                    rows = count // tensor[0].numel()
                    start = first // tensor[0].numel()
                    tensor[start : start + rows].copy_(
                        piece.view(rows, *tensor.shape[1:]), non_blocking=True
                    )
        settle(self._device)
        if not message["last"]:
            return {"kind": "taken"}
        if decoder is None and self._unet is not None and self._taken is None:
            self._taken = UnetTakeover([self._unet], self._session, _Hook(self._graphs))
            self._taken.take_over()
        return {"kind": "taken"}

    def _call(self, message: Message) -> Message:
        given = {}
        for name, dtype, shape, offset in message["inputs"]:
            tensor = self._shared.tensor(offset, shape, getattr(torch, dtype))
            given[name] = tensor.to(self._device, non_blocking=True, copy=True)
        begin = time.perf_counter()
        if message["part"] != DECODER:
            made = self._of_unet(given)
        elif "parts" in message:
            return {"kind": "made", "ms": self._rows_of_decoder(given["image"], message)}
        else:
            assert self._decoder is not None
            made = self._decoder.picture(given["image"], message["scale"], message["rows"])
        out = self._shared.tensor(message["out"], made.shape, made.dtype)
        out.copy_(made, non_blocking=True)
        settle(self._device)
        took_ms = 1000 * (time.perf_counter() - begin)
        dtype = str(made.dtype).removeprefix("torch.")
        return {"kind": "made", "shape": list(made.shape), "dtype": dtype, "ms": took_ms}

    def _of_unet(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """Where memory is short, what the decoder keeps beside its weights is given back first."""
        assert self._unet is not None
        with torch.no_grad(), self._autocast():
            try:
                made: torch.Tensor = self._unet(**given)
            except (RuntimeError, MemoryError) as error:
                if self._decoder is None or not is_out_of_memory(error):
                    raise
            else:
                return made
            self._decoder.release()
            return self._unet(**given)  # type: ignore[no-any-return]

    def _rows_of_decoder(self, image: torch.Tensor, message: Message) -> float:
        """This process's part of a picture that several make; what it took, in ms."""
        assert self._decoder is not None
        parts = [(first, last) for first, last in message["parts"]]
        ranks = Board(
            *(self._attached(*message["board"]), message["rank"], len(parts), self._device),
            lambda: self._meet(message["number"]),
        )
        self._decoder.together(image, message["scale"], parts, ranks)
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

    def _autocast(self) -> AbstractContextManager[Any]:
        """As the WebUI has it around a UNet in half precision."""
        dtype = next((t.dtype for t in self._tensors if t.ndim > 1), torch.float32)
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=dtype)


def switches() -> dict[str, Any]:
    """torch's own that change what it computes."""
    return {
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.backends.cudnn.deterministic,
        "conv_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _mirror(found: dict[str, Any]) -> None:
    torch.backends.cudnn.benchmark = found["benchmark"]
    torch.backends.cudnn.deterministic = found["deterministic"]
    torch.backends.cudnn.allow_tf32 = found["conv_tf32"]
    torch.backends.cuda.matmul.allow_tf32 = found["matmul_tf32"]
    torch.use_deterministic_algorithms(found["algorithms"], warn_only=True)


def _replace_attention(unet: nn.Module, session: Session) -> None:
    """Attention of blocks that are not ours: by the engine, not by a matrix of all scores."""

    def forward(
        self: Any, x: torch.Tensor, context: Any = None, mask: Any = None, **others: Any
    ) -> Any:
        context = x if context is None else context
        layers = ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        q, k, v = (layer(given).unflatten(-1, (self.heads, -1)) for layer, given in layers)
        scale = getattr(self, "scale", None)
        return self.to_out(functional.attention(q, k, v, mask, scale, session))

    for cls in {type(module) for module in unet.modules()}:
        if cls.__name__ in _ATTENTIONS:
            cls.forward = forward  # type: ignore[method-assign]
