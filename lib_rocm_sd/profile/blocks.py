"""The parts of a pipeline as ranges: text encoders, the UNet's blocks, the VAE."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lib_rocm_sd.modules import patches
from lib_rocm_sd.ranges import named

PREFIX = "part: "
TEXT = ("text_encoder", "text_encoder_2")
LISTS = (("down_blocks", "down"), ("up_blocks", "up"))


@contextmanager
def parts_named(pipeline: Any) -> Iterator[None]:
    """Within this, each part is a range. Only modules that are never ours get hooks."""
    with ExitStack() as stack:
        for module, name in _modules(pipeline):
            stack.enter_context(_hooked(module, PREFIX + name))
        vae = getattr(pipeline, "vae", None)
        if vae is not None:
            stack.enter_context(_wrapped(vae, "decode", f"{PREFIX}VAE decode"))
        yield


def _modules(pipeline: Any) -> Iterator[tuple[nn.Module, str]]:
    for name in TEXT:
        module = getattr(pipeline, name, None)
        if isinstance(module, nn.Module):
            yield module, name.replace("_", " ")
    unet = getattr(pipeline, "unet", None)
    if isinstance(unet, nn.Module):
        yield unet, "UNet, the rest"
        for attribute, word in LISTS:
            for place, block in enumerate(getattr(unet, attribute, ())):
                yield block, f"UNet {word} {place}"
        middle = getattr(unet, "mid_block", None)
        if isinstance(middle, nn.Module):
            yield middle, "UNet middle"


@contextmanager
def _hooked(module: nn.Module, name: str) -> Iterator[None]:
    opened: list[Any] = []

    def begin(module: nn.Module, given: Any) -> None:
        scope = named(name)
        scope.__enter__()
        opened.append(scope)

    def end(module: nn.Module, given: Any, made: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    hooks = (
        module.register_forward_pre_hook(begin),
        module.register_forward_hook(end, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _wrapped(owner: Any, name: str, label: str) -> Iterator[None]:
    call = getattr(owner, name)

    def within(*args: Any, **kwargs: Any) -> Any:
        with named(label):
            return call(*args, **kwargs)

    patch = patches.put(owner, name, within)
    try:
        yield
    finally:
        patches.take(patch)
