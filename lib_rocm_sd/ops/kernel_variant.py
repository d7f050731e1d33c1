"""What all variants that launch kernels of ours have in common."""

from __future__ import annotations

from abc import abstractmethod

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import I, P, Variant
from lib_rocm_sd.ops.gradients import gradient_refusals


class KernelVariant(Variant[P, I]):
    """Needs a GPU that has a row in the arch table, and computes no gradients."""

    name = "rocm_sd"
    ours = True
    preference = 20

    def refusals(self, arch: Arch | None, problem: P) -> list[str]:
        return ["no supported GPU"] if arch is None else self.kernel_refusals(arch, problem)

    @abstractmethod
    def kernel_refusals(self, arch: Arch, problem: P) -> list[str]:
        """Why the kernels cannot run `problem` on this GPU."""

    def input_refusals(self, inputs: I) -> list[str]:
        return gradient_refusals(*inputs)
