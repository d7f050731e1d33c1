"""The attention kernel called again and again with tensors that differ only in where they lie.

Between Python and the launch stand then few microseconds: sizes, strides and what follows from them
are packed once, and a call fills in the addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.kernel import AttentionParams
from lib_rocm_sd.ops.base import Call
from lib_rocm_sd.ops.bound import Bound, Packet, Prepare
from lib_rocm_sd.ops.lazily import torch


class BoundCall(Bound[AttentionParams]):
    """Callable like `Variant.run`, without a mask. `first`: its arguments, but for addresses.

    `set_scale(params, scale)` writes what follows from the scale. `rows_aligned`: by their strides
    all rows are, if the first ones are. A packet's state is the scale that it has.
    """

    __slots__ = ("_rows_aligned", "_set_scale", "_shape")

    def __init__(
        self,
        first: AttentionParams,
        shape: tuple[int, int, int],
        rows_aligned: bool,
        prepare: Prepare,
        set_scale: Callable[[Any, float | None], None],
    ) -> None:
        super().__init__(first, prepare)
        self._shape = shape
        self._rows_aligned = rows_aligned
        self._set_scale = set_scale

    def __call__(self, call: Call[Any, AttentionInputs]) -> torch.Tensor:
        q, k, v, _, scale = call.inputs
        out = q.new_empty(self._shape)
        try:
            packet = self.free.pop()
        except IndexError:
            packet = self._packet(scale)
        if packet.state != scale:
            self._set_scale(packet.params, scale)
            packet.state = scale
        params = packet.params
        params.q = q_at = q.data_ptr()
        params.k = k_at = k.data_ptr()
        params.v = v_at = v.data_ptr()
        params.out = out.data_ptr()
        params.aligned = self._rows_aligned and not (q_at | k_at | v_at) & 15
        packet.launch()
        self.free.append(packet)
        return out

    def _packet(self, scale: float | None) -> Packet[AttentionParams]:
        packet = self.new()
        self._set_scale(packet.params, scale)
        packet.state = scale
        return packet
