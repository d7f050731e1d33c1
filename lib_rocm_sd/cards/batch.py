"""Ways to share pictures that need no split of an image: prompts over ranks, a UNet's call by the
rows of its batch (guidance split), stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.cards.group import Agreement, Group
from lib_rocm_sd.modules.patches import put, take
from lib_rocm_sd.report import report

NOTHING = "a call for one image, without guidance: there is nothing to split"


class GuidanceSplit:
    """Stands in for the forward of a UNet whose first argument is an image (N, C, H, W).

    `split_calls` and `whole_calls` count. What is computed for an image does not depend on the
    others of the batch, so the split is exact; whether its bits are those of the whole batch is a
    matter of what torch does with another batch size.
    """

    def __init__(self, unet: nn.Module, group: Group) -> None:
        self._theirs = unet.forward
        self._group = group
        self._agreement = Agreement(group)
        self.split_calls = self.whole_calls = 0

    def __call__(self, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = sample.shape[0]
        if self._group.size == 1 or batch < 2:
            self.whole_calls += 1
            report.event(f"distributed: {NOTHING}")
            return self._theirs(sample, *args, **kwargs)
        prompt = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
        self._agreement.note(sample, prompt)
        self.split_calls += 1
        parts = self._group.shares(batch)
        first, last = parts[self._group.rank]
        if last == first:  # more ranks than images: this one computes the first, for its shape
            first, last = 0, 1
        positional, named = (_cut(item, batch, first, last) for item in (args, kwargs))
        result = self._theirs(sample[first:last], *positional, **named)
        sizes = [last - first for first, last in parts]
        image = image_of(result)[: sizes[self._group.rank]]
        return with_image(result, self._group.concatenate(image, sizes, 0))

    def settle(self) -> None:
        """Raises ValueError where the ranks' calls did not belong together."""
        self._agreement.look(to_the_end=True)


@contextmanager
def guidance_split(unet: nn.Module, group: Group) -> Iterator[GuidanceSplit]:
    """Split the calls of a diffusers pipeline's UNet over the group inside the `with` block.

    Every rank calls the pipeline with the same arguments and the same seed. A call for one image,
    as pipelines make without guidance, is made by each rank for itself, and told once.
    """
    split = GuidanceSplit(unet, group)
    patch = put(unet, "forward", split)
    try:
        yield split
        split.settle()
    finally:
        take(patch)


def mapped(thing: Any, each: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same mappings, lists and tuples, with `each` of the tensors in them."""
    if isinstance(thing, torch.Tensor):
        return each(thing)
    if isinstance(thing, Mapping):
        return {key: mapped(item, each) for key, item in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)([mapped(item, each) for item in thing])
    return thing


def _cut(thing: Any, batch: int, first: int, last: int) -> Any:
    """All tensors in it that have a part for each image of the batch, cut to some images."""
    return mapped(thing, lambda t: t[first:last] if t.ndim and len(t) == batch else t)


def image_of(result: Any) -> torch.Tensor:
    """The image of such a result."""
    if isinstance(result, tuple):
        result = result[0]
    image: torch.Tensor = getattr(result, "sample", result)
    return image


def with_image(result: Any, image: torch.Tensor) -> Any:
    """The same kind of result, with another image."""
    if isinstance(result, tuple):
        return (image, *result[1:])
    return type(result)(sample=image) if hasattr(result, "sample") else image


def for_each(group: Group, items: Sequence[Any], make: Callable[[Any, int], Any]) -> list[Any]:
    """`make(item, index)` of all items, by the ranks; in order on rank 0, [] on the others.

    Any number of items, also fewer than ranks; each rank takes a run of them by its weight. What is
    made of an item should depend on its index (a seed), not on the rank: then it is the same for
    any number of ranks. It is pickled: give images from the host's memory.
    """
    first, last = group.shares(len(items))[group.rank]
    own = [make(items[index], index) for index in range(first, last)]
    return [picture for part in group.to_first(own) for picture in part]


@dataclass(frozen=True)
class Stage:
    """`work(thing, index)` of each picture, in turn by `ranks`."""

    name: str
    work: Callable[[Any, int], Any]
    ranks: tuple[int, ...]

    def owner(self, index: int) -> int:
        """The rank that works on picture `index`."""
        return self.ranks[index % len(self.ranks)]


def in_stages(group: Group, stages: Sequence[Stage], items: Sequence[Any]) -> list[Any]:
    """What the last stage makes of all items, in order, on rank 0; [] on the others.

    Raises ValueError where a rank has two stages: it would wait for itself.
    """
    ranks = [rank for stage in stages for rank in stage.ranks]
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(group.size)):
        raise ValueError(f"each of {group.size} ranks can have one stage: {ranks}")
    if not stages or not all(stage.ranks for stage in stages):
        raise ValueError("each stage needs a rank")
    own: dict[int, Any] = {}
    mine = [number for number, stage in enumerate(stages) if group.rank in stage.ranks]
    for number in mine:
        stage = stages[number]
        for index, item in enumerate(items):
            if stage.owner(index) != group.rank:
                continue
            thing = group.receive(stages[number - 1].owner(index)) if number else item
            result = stage.work(mapped(thing, lambda tensor: tensor.to(group.device)), index)
            result = mapped(result, torch.Tensor.cpu)
            if number + 1 < len(stages):
                group.send(result, stages[number + 1].owner(index))
            else:
                own[index] = result
    pictures: dict[int, Any] = {}
    for part in group.to_first(own):
        pictures.update(part)
    return [pictures[index] for index in sorted(pictures)]
