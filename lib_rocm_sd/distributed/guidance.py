"""Guidance split: a UNet's call for a prompt and its negative prompt, or for several pictures, is
made by the ranks in parts of its batch.

Every rank runs the same pipeline with the same seed. In each step it computes its part of the batch
and gets the others', so that all go on with the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.distributed.agreement import Agreement
from lib_rocm_sd.distributed.group import Group
from lib_rocm_sd.distributed.made import image_of, with_image
from lib_rocm_sd.modules.patches import put, take
from lib_rocm_sd.report import Report, report

NOTHING = "a call for one image, without guidance: there is nothing to split"


class GuidanceSplit:
    """Stands in for the forward of a UNet whose first argument is an image (N, C, H, W).

    `split_calls` and `whole_calls` count. What is computed for an image does not depend on the
    others of the batch, so the split is exact; whether its bits are those of the whole batch is a
    matter of what torch does with another batch size.
    """

    def __init__(self, unet: nn.Module, group: Group, tell: Report = report) -> None:
        self._theirs = unet.forward
        self._group, self._report = group, tell
        self._agreement = Agreement(group)
        self.split_calls = self.whole_calls = 0

    def __call__(self, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = sample.shape[0]
        if self._group.size == 1 or batch < 2:
            self.whole_calls += 1
            self._report.event(f"distributed: {NOTHING}")
            return self._theirs(sample, *args, **kwargs)
        prompt = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
        self._agreement.note(sample, prompt)
        self.split_calls += 1
        parts = self._group.shares(batch)
        first, last = parts[self._group.rank]
        given, named = (_cut(item, batch, first, last) for item in (args, kwargs))
        if last == first:  # more ranks than images: this one computes the first, for its shape
            first, last = 0, 1
            given, named = (_cut(item, batch, first, last) for item in (args, kwargs))
        made = self._theirs(sample[first:last], *given, **named)
        sizes = [last - first for first, last in parts]
        image = image_of(made)[: sizes[self._group.rank]]
        return with_image(made, self._group.concatenate(image, sizes, 0))

    def settle(self) -> None:
        """Raises ValueError where the ranks' calls did not belong together."""
        self._agreement.look(to_the_end=True)


@contextmanager
def guidance_split(unet: nn.Module, group: Group, tell: Report = report) -> Iterator[GuidanceSplit]:
    """Split the calls of a diffusers pipeline's UNet over the group inside the `with` block.

    Every rank calls the pipeline with the same arguments and the same seed. A call for one image,
    as pipelines make without guidance, is made by each rank for itself, and told once.
    """
    split = GuidanceSplit(unet, group, tell)
    patch = put(unet, "forward", split)
    try:
        yield split
        split.settle()
    finally:
        take(patch)


def _cut(thing: Any, batch: int, first: int, last: int) -> Any:
    """All tensors in it that have a part for each image of the batch, cut to some images."""
    if isinstance(thing, torch.Tensor):
        return thing[first:last] if thing.ndim and thing.shape[0] == batch else thing
    if isinstance(thing, Mapping):
        return {key: _cut(item, batch, first, last) for key, item in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)([_cut(item, batch, first, last) for item in thing])
    return thing
