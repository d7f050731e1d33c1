"""Runs random calls of tests/ops/random/draw.py, or one again:

python -m tests.ops.random.solve PLACE FAMILY SIZES SEED

PLACE is a row of arch.json under the SIMT shim, or gpu for this machine's GPU; SIZES is small or
large. What is done around torch's own products is solved on a GPU only: on the CPU these are wrong
for bf16 beside infinity and beside what lies between rows (oneDNN, torch 2.13).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import torch

from lib_rocm_sd.arch import Arch, by_gfx
from lib_rocm_sd.device import identify
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.base import Op, Variant
from lib_rocm_sd.ops.conv.inputs import ConvInputs
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm.formula import applied
from lib_rocm_sd.ops.keys import tensors_of
from lib_rocm_sd.ops.linear.formula import computed
from lib_rocm_sd.ops.linear.inputs import LinearInputs
from lib_rocm_sd.ops.linear.torch import LibraryLinear, finished
from lib_rocm_sd.runtime import launcher
from tests.ops.attention.judge import UNITS, Errors
from tests.ops.attention_backward import judge as of_attention
from tests.ops.random.draw import FAMILIES, LARGE, SMALL, Sizes, draw, inputs_of
from tests.ops.running import compute
from tests.verify.simt.launch import ShimLaunch

GPU = "gpu"
CPU = torch.device("cpu")
SIZES = {"small": SMALL, "large": LARGE}
MANY = 256
"""Elements from which on the largest error is no luck."""
IN_SINGLE = 2e-6
OF_A_ROUNDED_IMAGE = 2e-3
"""Of a convolution's norm: ways that round the image otherwise have another one."""
Tensors = tuple["torch.Tensor | None", ...]


@dataclass(frozen=True)
class Call:
    """One problem, who computes it by which config, and what its tensors are drawn by. Where they
    lie, the problem may be another one than `drawn`.
    """

    family: str
    seed: int
    op: Op[Any, Any]
    problem: Any
    variant: Variant[Any, Any]
    config: Any
    drawn: Any
    rng: Random

    def inputs(self, device: torch.device) -> tuple[Any, str]:
        """The same each time."""
        return inputs_of(self.op, self.drawn, deepcopy(self.rng), device)

    def faults(self, launch: Any, device: torch.device) -> list[str]:
        """What is wrong with the result, and what this call is."""
        beside, story = self.inputs(CPU)
        inputs, _ = self.inputs(device)
        with torch.no_grad():
            exact = _every(self.op.reference(inputs))
            known = launch.knows(*_tensors(inputs)) if hasattr(launch, "knows") else nullcontext()
            refused = self.variant.input_refusals(inputs)
            with known:
                made = compute(self.op, self.variant, launch, self.config, inputs)
            if self.op is ATTENTION_BACKWARD:
                found = of_attention.faults(made, inputs)
            else:
                found = self._compared(_every(made), _every(self._theirs(beside)), exact)
        told = f"{self.family} {self.seed}: {self.variant.name} {self.config}, {self.problem}"
        return [f"{told}; {story}: {fault}" for fault in (*found, *refused)]

    def _theirs(self, inputs: Any) -> Any:
        """Torch's on the CPU; of a gate by torch's operators after a product that was rounded, of
        an image that is normalised after that was.
        """
        if isinstance(self.variant, LibraryLinear):
            product = computed(LinearInputs(inputs.x, inputs.weight, inputs.bias), torch.float32)
            return finished(product.to(inputs.x.dtype), inputs)
        if isinstance(inputs, ConvInputs) and inputs.norm is not None:
            image = applied(inputs.x.permute(0, 3, 1, 2), inputs.norm, True)
            inputs = inputs._replace(x=image.permute(0, 2, 3, 1), norm=None)
        return compute(self.op, self.op.variants[-1], None, None, inputs)

    def _compared(self, made: Tensors, theirs: Tensors, exact: Tensors) -> list[str]:
        """A library's product is rounded before what is added, and its convolutions by transforms
        (Winograd) take what is not finite further in its image. An image's channels beyond the last
        are zero where all is finite, and nobody's otherwise.
        """
        rounds = 2
        if self.variant.name != "rocm_sd":
            rounds = 4
            pairs = zip(made, exact, strict=True)
            exact = tuple(_not_finite_with(*pair) for pair in pairs)
        found, (image, *_), single = [], made, IN_SINGLE
        if isinstance(self.problem, ConvProblem) and image is not None:
            channels = self.problem.out_channels
            beyond = image[..., channels:].isfinite().all() and image[..., channels:].any()
            found += ["values in channels beyond the last"] if beyond else []
            made, theirs, exact = (_first(each, channels) for each in (made, theirs, exact))
            single = OF_A_ROUNDED_IMAGE
        for mine, own, right in zip(made, theirs, exact, strict=True):
            found += _faults(mine, own, right, rounds, single)
        return found


def _not_finite_with(made: torch.Tensor | None, exact: torch.Tensor | None) -> torch.Tensor | None:
    """`exact`, in rows or images that are not finite NaN wherever `made` is not finite either."""
    if made is None or exact is None or exact.isfinite().all():
        return exact
    spoilt = ~exact.isfinite().flatten(1).all(1)
    return exact.masked_fill(~made.isfinite() & spoilt.view(-1, *[1] * (exact.ndim - 1)), math.nan)


def _first(images: Tensors, channels: int) -> Tensors:
    """The image without channels beyond `channels`; the rest."""
    image, *others = images
    return (None if image is None else image[..., :channels], *others)


def call_of(family: str, sizes: Sizes, seed: int, arch: Arch, libraries: bool = True) -> Call:
    """One of our ways to compute the problem of this seed; `libraries`: also around torch's."""
    for turn in count():
        op, drawn, rng = draw(family, sizes, seed, turn)
        tensors = deepcopy(rng)
        inputs, _ = inputs_of(op, drawn, rng, CPU)
        problem = op.problem_of(inputs)
        ways = [each for each in op.variants if each.ours and not each.refusals(arch, problem)]
        ways = [each for each in ways if libraries or each.name == "rocm_sd"]
        if ways:
            break
    variant = rng.choice(ways)
    config = rng.choice(variant.configs(arch, problem))
    return Call(family, seed, op, problem, variant, config, drawn, tensors)


def _every(result: Any) -> Tensors:
    return result if isinstance(result, tuple) else (result,)


def _tensors(inputs: Any) -> list[torch.Tensor]:
    found = tensors_of(inputs)
    if isinstance(inputs, ConvInputs):
        found += [inputs.weights.weight, inputs.weights.bias_on(inputs.x.device)]
        found += [t for t in (inputs.through,) if t is not None]
        following = inputs.next_norm
        found += [] if following is None else [following.gamma, following.beta]
    return found


def _faults(
    made: torch.Tensor | None,
    theirs: torch.Tensor | None,
    exact: torch.Tensor | None,
    rounds: int,
    single: float,
) -> list[str]:
    """Of one result: another dtype or shape, NaN or infinity where float64 has none or the other
    way round, an error of more than `rounds` times torch's own. What is float32 may be off by
    `single` of the largest.
    """
    if made is None or theirs is None or exact is None:
        return [] if made is theirs is exact is None else ["a result is there, or is not"]
    made, exact = made.cpu(), exact.cpu()
    if made.shape != exact.shape or made.dtype != theirs.dtype:
        return [f"{tuple(made.shape)} {made.dtype}, not {tuple(exact.shape)} {theirs.dtype}"]
    good = exact.isfinite()
    if not torch.equal(made.isfinite(), good):
        misplaced = int((made.isfinite() != good).sum())
        return [
            f"{misplaced} elements NaN or infinite where float64 is not, or the other way round"
        ]
    if not good.any():
        return []
    right, known = exact[good], good & theirs.isfinite()  # torch's on a CPU may spread NaN
    size = float(right.abs().max())
    ours, torchs = Errors.of(made[good], right), Errors(UNITS.get(made.dtype, 0.0) * size, 0.0)
    if known.any():
        torchs = Errors.of(theirs[known], exact[known])
    slack = single * (1 + size) if made.dtype == torch.float32 else 1e-7
    if right.numel() < MANY:
        slack += UNITS.get(made.dtype, 0.0) * size
    if not ours.largest <= rounds * torchs.largest + slack or not math.isfinite(ours.largest):
        return [f"{ours}, torch's own {torchs}, largest value {size:.3g}"]
    return []


def solve(place: str, family: str, sizes: Sizes, seeds: Sequence[int]) -> list[str]:
    """What is wrong with any of them."""
    device = torch.device("cuda:0" if place == GPU else "cpu")
    arch = identify(device).arch if place == GPU else by_gfx(place)
    if arch is None:
        raise ValueError(f"{place} is no GPU that is known here")
    calls = [call_of(family, sizes, seed, arch, place == GPU) for seed in seeds]
    launch: Callable[[int], Any]
    if place == GPU:
        on_gpu = launcher.launcher_for(device, arch)
        specs = {s for c in calls for s in c.variant.specs(arch, c.problem, c.config)}
        assert isinstance(on_gpu, launcher.Launcher)
        on_gpu.build(sorted(specs, key=str))

        def launch(seed: int) -> Any:
            return on_gpu
    else:

        def launch(seed: int) -> Any:
            return ShimLaunch(arch, seed)

    return [fault for each in calls for fault in each.faults(launch(each.seed), device)]


def main() -> None:
    """One call, told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place")
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("sizes", choices=SIZES)
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    found = solve(given.place, given.family, SIZES[given.sizes], [given.seed])
    print("\n".join(found) or "right")


if __name__ == "__main__":
    main()
