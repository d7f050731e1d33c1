"""The attention kernel called again and again with tensors that differ only in where they lie.

Between Python and the launch stand then few microseconds: sizes, strides and what follows from them
are packed once, and a call fills in the addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lib_rocm_sd.ops.attention.kernel import AttentionParams
from lib_rocm_sd.ops.attention.problem import AttentionInputs

Prepare = Callable[[ctypes.Structure], Callable[[], None]]
"""Makes a launch of one kernel to be repeated with these arguments."""


@dataclass
class _Packet:
    """Arguments, and the launch that reads them. In use by one call at a time."""

    params: Any
    launch: Callable[[], None]
    scale: float | None


class BoundCall:
    """Callable like `Variant.run`, without a mask. `first`: its arguments, but for addresses.

    `set_scale(params, scale)` writes what follows from the scale. `rows_aligned`: by their strides
    all rows are, if the first ones are. Threads may call it at once: each has its own packet.
    """

    def __init__(
        self,
        first: AttentionParams,
        shape: tuple[int, int, int],
        rows_aligned: bool,
        prepare: Prepare,
        set_scale: Callable[[Any, float | None], None],
    ) -> None:
        self._first = first
        self._shape = shape
        self._rows_aligned = rows_aligned
        self._prepare = prepare
        self._set_scale = set_scale
        self._free: list[_Packet] = []

    def __call__(
        self,
        launch: Any,
        config: Any,
        problem: Any,
        inputs: AttentionInputs,
    ) -> torch.Tensor:
        q, k, v, _, scale = inputs
        out = q.new_empty(self._shape)
        try:
            packet = self._free.pop()
        except IndexError:
            packet = self._packet(scale)
        if packet.scale != scale:
            self._set_scale(packet.params, scale)
            packet.scale = scale
        params = packet.params
        params.q = q_at = q.data_ptr()
        params.k = k_at = k.data_ptr()
        params.v = v_at = v.data_ptr()
        params.out = out.data_ptr()
        params.aligned = self._rows_aligned and not (q_at | k_at | v_at) & 15
        packet.launch()
        self._free.append(packet)
        return out

    def _packet(self, scale: float | None) -> _Packet:
        params = AttentionParams.from_buffer_copy(self._first)
        self._set_scale(params, scale)
        return _Packet(params, self._prepare(params), scale)
