"""What memory holds that nobody has written: a pattern that no format reads as a plain number."""

from __future__ import annotations

import torch

POISON = 0x7FFDFFFD
"""NaN as a float32, and in both halves as fp16 and as bf16. As an integer it is beyond all that
kernels count; two of it are no address.
"""


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, with its whole storage filled."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    words = len(whole) // 4
    whole[: words * 4].view(torch.int32).fill_(POISON)
    rest = POISON.to_bytes(4, "little")[: len(whole) - words * 4]
    whole[words * 4 :].copy_(torch.tensor(list(rest), dtype=torch.uint8))
    return tensor
