"""The picture as a network reads it, and its result as the caller gets it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from lib_rocm_sd.upscaler.steps import Entry, Exit, padded
from lib_rocm_sd.vae.steps import Rows


class PictureRows:
    """Image 0 (N, rows, W, C) of a picture (N, C, H, W) with any strides, made when it is read."""

    def __init__(self, picture: torch.Tensor, entry: Entry, dtype: torch.dtype) -> None:
        self._entry, self._dtype = entry, dtype
        beyond = [-side % entry.multiple for side in picture.shape[3:1:-1]]
        sides = (0, beyond[0], 0, beyond[1])
        reflects = entry.reflects and any(beyond)
        self._picture = F.pad(picture, sides, "reflect") if reflects else picture

    def read(self, rows: Rows) -> torch.Tensor:
        """Contiguous, padded to whole tiles of channels."""
        entry = self._entry
        part = self._picture[:, :, rows[0] * entry.unshuffle : rows[1] * entry.unshuffle]
        if entry.mean:
            wide = torch.promote_types(self._dtype, torch.float32)
            mean = torch.tensor(entry.mean, dtype=wide, device=part.device)[:, None, None]
            part = (part.to(wide) - mean) * entry.span
        if entry.unshuffle > 1:
            part = F.pixel_unshuffle(part, entry.unshuffle)
        part = part.permute(0, 2, 3, 1).to(self._dtype)
        return F.pad(part, (0, padded(part.shape[3]) - part.shape[3])).contiguous()

    def release(self, below: int) -> None:
        return


class ResultRows:
    """The result (N, C, H, W), made when its first rows are there. `picture`: what came in."""

    def __init__(self, make: Callable[[], torch.Tensor], end: Exit, picture: torch.Tensor) -> None:
        self._make, self._end, self._picture = make, end, picture
        self._result: torch.Tensor | None = None

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Rows (N, n, W, C or more) of the last image from `first` on. Everything is a view, and a
        sum is made where it stays: the result is the largest image of all.
        """
        if self._result is None:
            self._result = self._make()
        end, factor, (count, width) = self._end, self._end.shuffle, rows.shape[1:3]
        # (N, C, n, factor, W, factor), in which a pixel shuffle is an order of dimensions
        values = rows[..., : end.channels * factor**2].unflatten(3, (end.channels, factor, factor))
        values = values.permute(0, 3, 1, 4, 2, 5)
        out = self._result[:, :, first * factor : (first + count) * factor]
        out = out.unflatten(3, (width, factor)).unflatten(2, (count, factor))
        if end.base:
            # Rows of this image are those of the picture: nothing enlarges in between.
            wide = torch.promote_types(rows.dtype, torch.float32)
            base = self._picture[:, :, first : first + count].to(wide)
            torch.add(values, base[:, :, :, None, :, None], out=out)
        elif end.mean:
            wide = torch.promote_types(rows.dtype, torch.float32)
            mean = torch.tensor(end.mean, dtype=wide, device=rows.device)
            torch.add(mean[:, None, None, None, None], values, alpha=1 / end.span, out=out)
        else:
            out.copy_(values)
