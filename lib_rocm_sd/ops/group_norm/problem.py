"""GroupNorm without a way to run it: problems, their checks, cases.

Images are (N, C, H, W) here, in either memory format; group_norm.py says what else there is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from lib_rocm_sd.ops.base import ITEM_BYTES
from lib_rocm_sd.ops.group_norm import kernel, whole


@dataclass(frozen=True)
class ImageProblem:
    """An image, without its tensor."""

    batch: int
    channels: int
    height: int
    width: int
    dtype: str = "float16"
    channels_last: bool = True

    def __str__(self) -> str:
        sizes = f"N{self.batch} {self.channels}x{self.height}x{self.width} {self.dtype}"
        return f"{sizes} {'NHWC' if self.channels_last else 'NCHW'}"

    @property
    def pixels(self) -> int:
        """Pixels of one image and channel."""
        return self.height * self.width

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        return (self.batch, self.channels, self.height, self.width)

    @property
    def image_bytes(self) -> int:
        """Size of the image."""
        return self.batch * self.channels * self.pixels * ITEM_BYTES[self.dtype]

    @property
    def form(self) -> kernel.NormForm:
        """What our kernels are compiled for."""
        return kernel.form_of(self.dtype, self.channels, self.channels_last)

    @property
    def parts(self) -> int:
        """Parts of its statistics."""
        return kernel.parts_of(self.batch, self.channels, self.pixels, self.form)


@dataclass(frozen=True)
class ApplyProblem(ImageProblem):
    """A norm applied to an image, SiLU after it or not."""

    silu: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}{' SiLU' if self.silu else ''}"


@dataclass(frozen=True)
class GroupNormProblem(ApplyProblem):
    """All of a GroupNorm. `affine` is "none" or the dtype of gamma and beta."""

    groups: int = 32
    affine: str = "float16"
    added: bool = field(default=False, kw_only=True)
    """Something is, to each channel of each image, first."""

    def __str__(self) -> str:
        fused = ", something added" if self.added else ""
        return f"{super().__str__()} {self.groups} groups, {self.affine} gamma{fused}"


@dataclass(frozen=True)
class NormProblem(ImageProblem):
    """The norm of an image. `affine` is "none" or the dtype of gamma and beta."""

    groups: int = 32
    affine: str = "float16"

    def __str__(self) -> str:
        return f"{super().__str__()} {self.groups} groups, {self.affine} gamma"


@dataclass(frozen=True)
class FinalizeProblem:
    """A norm from statistics."""

    batch: int
    parts: int
    channels: int
    groups: int
    dtype: str = "float32"
    affine: str = "float32"

    def __str__(self) -> str:
        sizes = f"N{self.batch} {self.parts} parts C{self.channels} {self.dtype}"
        return f"{sizes} {self.groups} groups, {self.affine} gamma"


def wide_tolerance(problem: Any) -> float:
    """The same for what is float32, or float64, whatever the image's dtype is."""
    return 1e-12 if problem.dtype == "float64" else 2e-5


def small_images(problem: ImageProblem) -> tuple[Any, ...]:
    """Small images of the class (channels, dtype, layout), and one whose channels begin between
    two multiples of 16 bytes just where the real one's do; with SiLU the one, without the other.
    Where channels come last in eights, all begin at such a multiple, whatever the size. Of what
    one work-group may hold, no more than it does.
    """
    aligned = problem.channels_last and problem.channels % 8 == 0
    beyond = 5 if aligned else 3 * problem.pixels % 8
    small = replace(problem, batch=3, height=9, width=13)
    tails = replace(problem, batch=1, height=3, width=40 + beyond)
    if isinstance(problem, (NormProblem, GroupNormProblem)) and problem.channels_last:
        most = whole.holds(problem.channels, problem.pixels, problem.groups, problem.form.vector)
        small, tails = (
            replace(each, height=1, width=most) if most and most < each.pixels else each
            for each in (small, tails)
        )
    if isinstance(problem, ApplyProblem):
        return (replace(small, silu=True), replace(tails, silu=False))  # type: ignore[call-arg]
    return (small, tails)


MEASURED_PARTS = 1024
"""Parts of the statistics in a measured problem."""


def measured_image(problem: ImageProblem) -> Any:
    """The same channels at one size: no new size of an image is ever measured."""
    side = 128 if problem.channels >= 256 else 256
    return replace(problem, batch=1, height=side, width=side)


def measured_statistics(problem: FinalizeProblem) -> FinalizeProblem:
    """The same channels with parts of one number."""
    return replace(problem, batch=1, parts=MEASURED_PARTS)


MOST_TESTED = 300_000
"""Parts x channels in a self-test."""


def small_statistics(problem: FinalizeProblem) -> tuple[FinalizeProblem, ...]:
    """The same channels with few parts, and with so many that they are merged first."""
    many = kernel.DIRECT_ENTRIES * problem.groups // problem.channels + 2
    most = max(1, MOST_TESTED // problem.channels)
    sizes = ((3, 3), (2, min(many, most)))
    return tuple(replace(problem, batch=batch, parts=parts) for batch, parts in sizes)


USUAL = (
    ("VAE 1024x1024, last level", GroupNormProblem(1, 128, 1024, 1024, silu=True)),
    ("VAE 512x512, last level", GroupNormProblem(1, 128, 512, 512, silu=True)),
    ("VAE 1024x1024, third level", GroupNormProblem(1, 256, 512, 512, silu=True)),
    ("VAE 1024x1024, mid-block", GroupNormProblem(1, 512, 128, 128)),
    ("SD1.5 512x512, 64x64", GroupNormProblem(2, 320, 64, 64, channels_last=False, silu=True)),
    ("SD1.5 512x512, 32x32", GroupNormProblem(2, 640, 32, 32, channels_last=False, silu=True)),
    ("SD1.5 512x512, 8x8", GroupNormProblem(2, 2560, 8, 8, channels_last=False, silu=True)),
    ("SDXL 1024x1024, 128x128", GroupNormProblem(2, 320, 128, 128, channels_last=False, silu=True)),
    ("SDXL, 32x32, channels last", GroupNormProblem(2, 1280, 32, 32, silu=True)),
)
"""What a Stable Diffusion user meets, by name."""

ODD = (
    GroupNormProblem(1, 8, 1, 1, groups=2),
    GroupNormProblem(2, 320, 7, 9, silu=True),
    GroupNormProblem(2, 20, 5, 11, "bfloat16", True, True, 4, "float32"),
    GroupNormProblem(3, 1, 17, 31, "float16", False, False, 1, "none"),
    GroupNormProblem(1, 30, 13, 1, "float16", True, True, 3, "float32"),
    GroupNormProblem(2, 40, 61, 83, "float16", False, True, 1, "bfloat16"),
    GroupNormProblem(1, 1032, 3, 5, "bfloat16", True, True, 43, "bfloat16"),
    GroupNormProblem(1, 64, 1, 999, "bfloat16", False, True, 32, "bfloat16"),
)
"""Small shapes at which indexing errors show."""

ADDED = (
    GroupNormProblem(2, 64, 5, 7, silu=True, added=True),
    GroupNormProblem(3, 320, 8, 9, "bfloat16", silu=True, affine="none", added=True),
    GroupNormProblem(1, 1280, 3, 3, silu=False, affine="float32", added=True),
    GroupNormProblem(2, 20, 5, 11, "float16", True, True, 4, "float32", added=True),
    GroupNormProblem(2, 1920, 16, 16, silu=True, added=True),
)
"""To which something is added: small, and channels-last."""
