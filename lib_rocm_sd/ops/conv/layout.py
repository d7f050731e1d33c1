"""Where images lie: pixel after pixel, perhaps as some channels of an image that has more."""

from __future__ import annotations

from lib_rocm_sd.ops.base import reasons
from lib_rocm_sd.ops.lazily import torch

MOST_ROW_VALUES = 1 << 25
"""Most values in a row of an image, pixel stride included: a tile's rows have 32-bit addresses."""


def pixel_stride(image: torch.Tensor) -> int | None:
    """Values from one pixel of (N, H, W, C) to the next where the pixels are dense, else None.

    Dense: the last stride is 1, the pixel stride S at least C and a multiple of 8, a row's is
    W * S, an image's H * W * S; the memory begins at a multiple of 16 bytes.
    """
    batch, height, width, channels = image.shape
    aligned = image.data_ptr() % 16 == 0
    if channels and channels % 8 == 0 and image.is_contiguous():
        return channels if aligned and width * channels <= MOST_ROW_VALUES else None
    between = ((width, 1), (height, width), (batch, height * width))  # of pixel, row, image
    strides = image.stride()[2::-1]
    # The stride of what there is only one of says nothing.
    steps = [s // pixels for (size, pixels), s in zip(between, strides, strict=True) if size > 1]
    step = steps[0] if steps else (channels + 7) // 8 * 8
    exact = all(
        stride == pixels * step
        for (size, pixels), stride in zip(between, strides, strict=True)
        if size > 1
    )
    aligned = aligned and step % 8 == 0
    fits = step >= channels and width * step <= MOST_ROW_VALUES
    return step if exact and aligned and fits and image.stride(3) == 1 else None


def is_in_place(shortcut: torch.Tensor | None, out: torch.Tensor | None) -> bool:
    """True if the output is to be written over the shortcut."""
    if shortcut is None or out is None or not _one_storage(shortcut, out):
        return False
    return shortcut.storage_offset() == out.storage_offset()


def check_out(
    out: torch.Tensor, shape: tuple[int, ...], x: torch.Tensor, shortcut: torch.Tensor | None
) -> None:
    """ValueError, with shapes and strides, where the output cannot be written to `out`."""
    usable = out.ndim == 4 and tuple(out.shape) == shape
    usable = usable and out.dtype == x.dtype and out.device == x.device
    apart = shortcut is None or not usable or not overlap(out, shortcut)
    same = shortcut is not None and is_in_place(shortcut, out)
    same = same and shortcut is not None and pixel_stride(shortcut) == pixel_stride(out)
    wrong = reasons(
        (not usable, f"out must be {shape}, {x.dtype} on {x.device}"),
        (usable and pixel_stride(out) is None, "out is no dense row of pixels"),
        (usable and overlap(out, x), "out overlaps x"),
        (not apart and not same, "out overlaps the shortcut and does not begin where it begins"),
    )
    if wrong:
        where = f"{tuple(out.shape)}, strides {out.stride()}, {out.dtype} on {out.device}"
        raise ValueError(f"{'; '.join(wrong)}: out {where}")


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two images share memory; other channels of the same pixels are not shared."""
    if not _one_storage(one, other):
        return False
    first, second = sorted((one, other), key=lambda image: image.storage_offset())
    distance = second.storage_offset() - first.storage_offset()
    if distance >= _extent(first):
        return False
    step = pixel_stride(first)
    if step is None or step != pixel_stride(second):
        return True
    place = distance % step
    return place < first.shape[3] or place + second.shape[3] > step


def _one_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By identity, which tensors without memory have as well."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _extent(image: torch.Tensor) -> int:
    """Values from the first to after the last."""
    sizes = zip(image.shape, image.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)
