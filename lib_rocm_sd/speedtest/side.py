"""What a speed test needs of the program around it: a WebUI, or nothing but this repository."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lib_rocm_sd.engine.session import Session
from lib_rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    import torch

PROMPT = "a red circle left of a blue square"
SEED = 0
"""Seed of every whole image, so that the images of two machines show the same."""

Attention = Callable[..., Any]
"""q (B, Sq, H, D), k and v (B, Sk, H, D), strided views: the output (B, Sq, H*D)."""


class Busy(RocmSdError):  # noqa: N818 - nothing went wrong
    """No test can start now; `str()` says why."""


class Cancelled(RocmSdError):  # noqa: N818 - nothing went wrong
    """The test was cancelled."""


@dataclass(frozen=True)
class Picture:
    """A whole image (PIL.Image.Image, RGB). `seconds`: from prompt to image, `it_per_s` of its
    steps alone (NaN: not known). `peak_mib`: the most device memory (NaN: the device cannot tell).
    """

    image: Any
    seconds: float
    it_per_s: float
    peak_mib: float


@dataclass(frozen=True)
class Denoiser:
    """A host's UNet. `call(*args, **kwargs)` is a step, with what `arguments(size)` gives for two
    latents of size x size pixels. Within `theirs()` nothing of this extension works. Within
    `ours()` the UNet's blocks are ours, or entering it raises ValueError with a reason. `dtype`: of
    the latents, such as "float16". `note`: what else is to be known of the steps.
    """

    call: Callable[..., Any]
    arguments: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    theirs: Callable[[], AbstractContextManager[Any]]
    ours: Callable[[], AbstractContextManager[Any]]
    dtype: str
    note: str = ""


class HostSide(Protocol):
    """The program around a speed test. All but `busy` is called in the test's own thread.

    One that is not a WebUI may have a `host_name`.
    """

    @property
    def device(self) -> torch.device:
        """What the host computes on."""
        ...

    @property
    def session(self) -> Session:
        """By which level, and with how much memory, ours runs."""
        ...

    def busy(self) -> str:
        """Why no test may start now, such as that a picture is being made; empty if one may."""
        ...

    def queue(self) -> AbstractContextManager[Any]:
        """What keeps the host from making pictures meanwhile; held while the test runs.

        Entering it raises Busy where that cannot be had at once.
        """
        ...

    def attention_methods(self) -> dict[str, Attention]:
        """The host's own attention, by its name; empty where that cannot be called alone."""
        ...

    def vae(self) -> Any:
        """The host's decoder module on `device`, or None. Raises ValueError with a reason."""
        ...

    def unet(self) -> Denoiser | None:
        """The host's UNet, on `device`. Raises ValueError with a reason."""
        ...

    def image(
        self,
        steps: int,
        size: int,
        enabled: bool,
        progress: Callable[[float], None],
        cancelled: Callable[[], bool],
        unet: bool = False,
    ) -> Picture:
        """PROMPT with SEED at size x size pixels, with this extension on or off, and where it is on
        with the UNet's blocks ours or not.

        `progress` is told 0 to 1. Raises Cancelled soon after `cancelled()` is true, ValueError
        with a reason ("no checkpoint is loaded"); "out of memory" is passed on.
        """
        ...

    def output_directory(self) -> Path | None:
        """Where results are kept, whether it exists or not; None for nowhere."""
        ...
