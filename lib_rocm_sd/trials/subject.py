"""A kernel class as something to be tried: what names it, what it is made of, its verdict's key."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lib_rocm_sd import cache
from lib_rocm_sd.arch import Arch
from lib_rocm_sd.engine.gating import Asked
from lib_rocm_sd.errors import CompileError
from lib_rocm_sd.ops.base import KernelSpec, Op, Variant
from lib_rocm_sd.report import config_fields, flattened
from lib_rocm_sd.runtime import build
from lib_rocm_sd.trials.place import Place, launching

MOST_SUBJECTS = 256
"""Kept at a time: those of the plans that are being made."""


def digest(code: bytes) -> str:
    """The SHA-256 of machine code."""
    return hashlib.sha256(code).hexdigest()


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
        config = variant.tested_as(config)
        return cls(op, variant, config, problem, op.class_specs(arch, variant, config, problem))

    @cached_property
    def first(self) -> Any:
        """The problem that names the class."""
        return self.op.test_problems(self.problem)[0]

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """Equal for one class."""
        return (self.op.name, self.variant.name, self.config, self.first, self.specs)

    def __str__(self) -> str:
        fields = config_fields(self.config)
        config = " ".join(map(str, flattened(fields).values())) if fields else ""
        title = f"{self.op.name}, {self.variant.name}: {self.first}"
        return f"{title} [{config}]" if config else title

    def codes(self, arch: Arch) -> dict[KernelSpec, bytes]:
        """The machine code, compiled if need be. Raises CompileError."""
        return {spec: build.build(spec, arch).code for spec in self.specs}

    def digests(
        self, arch: Arch, known: dict[tuple[KernelSpec, str], str]
    ) -> dict[KernelSpec, str]:
        """Digests of its machine code. Raises CompileError where that is not compiled yet. `known`
        is looked up first, and filled.
        """
        for spec in self.specs:
            if (spec, arch.gfx) not in known:
                code = build.cached(spec, arch)
                if code is None:
                    raise CompileError("cache", f"{spec} was not compiled yet")
                known[spec, arch.gfx] = digest(code.code)
        return {spec: known[spec, arch.gfx] for spec in self.specs}

    def key(self, place: Place, digests: Mapping[KernelSpec, str]) -> str:
        """Key of the verdict. `digests`: those of the machine code, see `digest`."""
        what = (self.op.name, self.variant.name, repr(self.config), repr(self.first))
        return cache.key_of(
            "verdict 1",
            place.key,
            launching(self.op.family),
            *what,
            *map(digests.__getitem__, self.specs),
        )


class Subjects:
    """Those of what a plan asks about and then launches, each found once."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Subject] = {}

    def of(self, asked: Asked, place: Place) -> Subject:
        """The class that is asked about."""
        key = (asked.op.name, asked.variant.name, asked.config, asked.problem, place)
        subject = self._found.get(key)
        if subject is None:
            if len(self._found) >= MOST_SUBJECTS:
                self._found = {}
            fields = (asked.op, asked.variant, asked.config, asked.problem, place.arch)
            subject = self._found[key] = Subject.of(*fields)
        return subject


def subjects(
    work: Iterable[tuple[Op[Any, Any], Any]], arch: Arch, ours: bool = False
) -> list[Subject]:
    """The classes that ops and problems come to where nothing was measured, each once; none where
    that is not a kernel of ours. `ours`: those of all variants of ours.
    """
    unique: dict[Any, Subject] = {}
    for op, problem in work:
        for variant, config, specs in op.ours(arch, problem, every=ours):
            each = Subject(op, variant, config, problem, specs)
            unique.setdefault(each.identity, each)
    return list(unique.values())
