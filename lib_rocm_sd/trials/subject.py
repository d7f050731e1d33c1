"""A kernel class as something to be tried: what names it, what it is made of, its verdict's key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lib_rocm_sd import cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec, Op, Variant
from lib_rocm_sd.report import config_fields
from lib_rocm_sd.runtime import build
from lib_rocm_sd.trials.place import Place, launching


@dataclass(frozen=True)
class Subject:
    """`problem`: one of the class. `specs`: all kernels that the class launches for it."""

    op: Op[Any, Any]
    variant: Variant[Any, Any]
    config: Any
    problem: Any
    specs: tuple[KernelSpec, ...]

    @classmethod
    def of(
        cls, op: Op[Any, Any], variant: Variant[Any, Any], config: Any, problem: Any, arch: Arch
    ) -> Subject:
        """The class of `problem`."""
        each = (problem, *op.test_problems(problem))
        specs = [spec for one in each for spec in variant.specs(arch, one, config)]
        return cls(op, variant, config, problem, tuple(dict.fromkeys(specs)))

    @property
    def first(self) -> Any:
        """The problem that names the class."""
        return self.op.test_problems(self.problem)[0]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for one class."""
        return (self.op.name, self.variant.name, self.config, self.first, self.specs)

    def __str__(self) -> str:
        fields = config_fields(self.config)
        config = " ".join(str(value) for value in fields.values()) if fields else ""
        title = f"{self.op.name}, {self.variant.name}: {self.first}"
        return f"{title} [{config}]" if config else title

    def codes(self, arch: Arch, compiles: bool) -> dict[KernelSpec, bytes]:
        """The machine code. Raises CompileError; also where it would have to be compiled first and
        `compiles` is False.
        """
        return {spec: _code(spec, arch, compiles) for spec in self.specs}

    def key(self, place: Place, codes: Mapping[KernelSpec, bytes]) -> str:
        """Of the verdict."""
        digests = (hashlib.sha256(codes[spec]).hexdigest() for spec in self.specs)
        what = (self.op.name, self.variant.name, repr(self.config), repr(self.first))
        return cache.key_of("verdict 1", place.key, launching(self.op.family), *what, *digests)


def subjects(work: Iterable[tuple[Op[Any, Any], Any]], arch: Arch) -> list[Subject]:
    """The classes that ops and problems come to where nothing was measured, each once."""
    found: dict[Any, Subject] = {}
    for op, problem in work:
        able = [v for v in op.variants if v.ours and not v.refusals(arch, problem)]
        for variant in sorted(able, key=lambda v: -v.preference)[:1]:
            config = variant.defaults(arch, problem)[0]
            each = Subject.of(op, variant, config, problem, arch)
            found.setdefault(each.identity, each)
    return list(found.values())


def _code(spec: KernelSpec, arch: Arch, compiles: bool) -> bytes:
    if not compiles:
        found = build.cached(spec, arch)
        if found is None:
            raise CompileError("cache", f"{spec} was not compiled yet")
        return found.code
    return build.build(spec, arch).code
