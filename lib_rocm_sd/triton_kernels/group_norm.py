"""GroupNorm of an image, then SiLU, in Triton: three launches. Needs Triton.

x (N, C, H, W) lies without gaps, channels-last or not. `statistics`: of each channel and part of
the pixels the mean and the sum of squared distances from it, of differences to the part's first
value, so that a large mean costs no digits. `merge`: of each group scale and shift of its channels,
merged after Chan, Golub and LeVeque (1979). `apply`: y = x * scale + shift, SiLU'd.

Within an image offsets have 32 bits; where an image begins has 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

PART_PIXELS = 1024
"""Pixels of each part but the last."""


@triton.jit(do_not_specialize=["channels", "pixels", "parts"])
def statistics(  # type: ignore[no-untyped-def]
    x, made, channels, pixels, parts, channel_step, pixel_step,
    part_pixels: tl.constexpr, block_c: tl.constexpr, block_p: tl.constexpr,
):  # fmt: skip
    """x -> made (N, parts, C, 2) of float32. A program has `block_c` channels of one part."""
    blocks = tl.cdiv(channels, block_c)
    program = tl.program_id(0)
    channel = program % blocks * block_c + tl.arange(0, block_c)
    part = program // blocks % parts
    image = (program // blocks // parts).to(tl.int64)
    first = part * part_pixels
    end = tl.minimum(pixels, first + part_pixels)
    known = channel < channels
    x += image * channels * pixels
    own = channel * channel_step
    origin = tl.load(x + own + first * pixel_step, known, other=0.0).to(tl.float32)
    total = tl.zeros([block_c], tl.float32)
    squares = tl.zeros([block_c], tl.float32)
    for begin in range(0, part_pixels, block_p):
        pixel = first + begin + tl.arange(0, block_p)
        inside = known[:, None] & (pixel < end)[None, :]
        at = own[:, None] + pixel[None, :] * pixel_step
        values = tl.load(x + at, inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, values - origin[:, None], 0.0)
        total += tl.sum(apart, 1)
        squares += tl.sum(apart * apart, 1)
    count = (end - first).to(tl.float32)
    made += (image * parts + part) * channels * 2
    place = made + channel * 2
    tl.store(place, origin + total / count, known)
    tl.store(place + 1, tl.maximum(squares - total * total / count, 0.0), known)


@triton.jit(do_not_specialize=["channels", "pixels", "parts", "width"])
def merge(  # type: ignore[no-untyped-def]
    found, gamma, beta, norm, channels, pixels, parts, width, groups, eps,
    part_pixels: tl.constexpr, block_c: tl.constexpr, block_parts: tl.constexpr,
    has_gamma: tl.constexpr, has_beta: tl.constexpr,
):  # fmt: skip
    """found (N, parts, C, 2) -> norm (N, C, 2). A program has a group of `width` channels."""
    program = tl.program_id(0)
    group = program % groups
    image = (program // groups).to(tl.int64)
    lane = tl.arange(0, block_c)
    known = lane < width
    channel = group * width + lane
    found += image * parts * channels * 2
    values = (pixels * width).to(tl.float32)
    mean = 0.0
    for begin in range(0, parts, block_parts):
        part = begin + tl.arange(0, block_parts)
        inside = (part < parts)[:, None] & known[None, :]
        share = tl.minimum(pixels - part * part_pixels, part_pixels).to(tl.float32) / values
        at = found + (part[:, None] * channels + channel[None, :]) * 2
        mean += tl.sum(tl.sum(tl.load(at, inside, other=0.0) * share[:, None], 1), 0)
    spread = 0.0
    for begin in range(0, parts, block_parts):
        part = begin + tl.arange(0, block_parts)
        inside = (part < parts)[:, None] & known[None, :]
        count = tl.minimum(pixels - part * part_pixels, part_pixels).to(tl.float32)
        at = found + (part[:, None] * channels + channel[None, :]) * 2
        apart = tl.load(at, inside, other=0.0) - mean
        own = tl.load(at + 1, inside, other=0.0) + count[:, None] * apart * apart
        spread += tl.sum(tl.sum(tl.where(inside, own, 0.0), 1), 0)
    scale = tl.zeros([block_c], tl.float32) + 1.0 / tl.sqrt(spread / values + eps)
    if has_gamma:
        scale *= tl.load(gamma + channel, known, other=0.0).to(tl.float32)
    shift = -mean * scale
    if has_beta:
        shift += tl.load(beta + channel, known, other=0.0).to(tl.float32)
    norm += image * channels * 2
    place = norm + channel * 2
    tl.store(place, scale, known)
    tl.store(place + 1, shift, known)


@triton.jit(do_not_specialize=["channels", "pixels"])
def apply(  # type: ignore[no-untyped-def]
    x, norm, out, channels, pixels, channel_step, pixel_step,
    block_c: tl.constexpr, block_p: tl.constexpr, silu: tl.constexpr,
):  # fmt: skip
    """x and norm -> out, which lies as x does. A program has `block_c` channels of `block_p`
    pixels.
    """
    blocks = tl.cdiv(channels, block_c)
    rows = tl.cdiv(pixels, block_p)
    program = tl.program_id(0)
    channel = program % blocks * block_c + tl.arange(0, block_c)
    pixel = program // blocks % rows * block_p + tl.arange(0, block_p)
    image = (program // blocks // rows).to(tl.int64)
    known = channel < channels
    norm += image * channels * 2
    place = norm + channel * 2
    scale = tl.load(place, known, other=0.0)
    shift = tl.load(place + 1, known, other=0.0)
    inside = known[:, None] & (pixel < pixels)[None, :]
    x += image * channels * pixels
    out += image * channels * pixels
    at = channel[:, None] * channel_step + pixel[None, :] * pixel_step
    y = tl.load(x + at, inside, other=0.0).to(tl.float32) * scale[:, None] + shift[:, None]
    if silu:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out + at, y.to(out.dtype.element_ty), inside)
