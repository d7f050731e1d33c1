"""Every op once. A new op is a folder beside this file, its kernel, and one line here.

Needs no torch until an op itself is asked for, so that install.py can list kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.base import KernelSpec

if TYPE_CHECKING:
    from lib_rocm_sd.ops.base import Op


@dataclass(frozen=True)
class Family:
    """Ops that share a folder and kernels. `name`: of the folder, and on the command line."""

    name: str
    title: str

    @property
    def kernel(self) -> Any:
        """What its kernels are compiled with and called with: the folder's kernel.py, no torch."""
        return importlib.import_module(f"lib_rocm_sd.ops.{self.name}.kernel")

    @property
    def ops(self) -> tuple[Op[Any, Any], ...]:
        """Its ops: OPS of the folder's op.py."""
        found: tuple[Op[Any, Any], ...] = importlib.import_module(
            f"lib_rocm_sd.ops.{self.name}.op"
        ).OPS
        return found

    def shipped_specs(self, arch: Arch) -> list[KernelSpec]:
        """What is compiled ahead for `arch`."""
        return list(self.kernel.shipped_specs(arch))


FAMILIES = {
    family.name: family
    for family in (
        Family("attention", "Attention"),
        Family("attention_backward", "Attention, backward"),
        Family("conv", "Convolution"),
        Family("group_norm", "Group norm"),
        Family("layer_norm", "Layer norm"),
        Family("linear", "Linear layer"),
        Family("layer_norm_backward", "Layer norm, gradients"),
        Family("group_norm_backward", "Group norm, gradients"),
    )
}


def ops() -> Iterator[Op[Any, Any]]:
    """All ops, of all families."""
    for family in FAMILIES.values():
        yield from family.ops


def op_named(name: str) -> Op[Any, Any] | None:
    """The op of this name; None where there is none."""
    return next((op for op in ops() if op.name == name), None)
