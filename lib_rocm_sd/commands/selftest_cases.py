"""All that `doctor --self-test` runs: each kernel of ours with each config of its search space.

Sizes are a few whole tiles and tails, so that float64 on the CPU takes no more than a moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.op import ATTENTION, ATTENTION_AND_LSE
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.attention_backward import kernel as backward_kernel
from lib_rocm_sd.ops.attention_backward.op import ATTENTION_BACKWARD
from lib_rocm_sd.ops.base import Op
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.conv.op import CONVS
from lib_rocm_sd.ops.conv.problem import ACTIVATIONS, ConvProblem
from lib_rocm_sd.ops.group_norm.op import APPLY, FINALIZE, GROUP_NORM_SILU, NORM, STATISTICS
from lib_rocm_sd.ops.group_norm.problem import (
    ApplyProblem,
    FinalizeProblem,
    GroupNormProblem,
    ImageProblem,
    NormProblem,
)
from lib_rocm_sd.ops.group_norm_backward.op import GROUP_NORM_BACKWARD
from lib_rocm_sd.ops.group_norm_backward.problem import GroupNormBackwardProblem
from lib_rocm_sd.ops.layer_norm.biased import BiasedProblem
from lib_rocm_sd.ops.layer_norm.heads import ROTARIES, HeadsProblem
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedProblem
from lib_rocm_sd.ops.layer_norm.op import (
    LAYER_NORM,
    LAYER_NORM_BIASED,
    LAYER_NORM_MODULATED,
    RMS_NORM_HEADS,
)
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.layer_norm_backward.op import LAYER_NORM_BACKWARD
from lib_rocm_sd.ops.layer_norm_backward.problem import LayerNormBackwardProblem
from lib_rocm_sd.ops.linear.op import LINEAR
from lib_rocm_sd.ops.linear.problem import LinearProblem
from lib_rocm_sd.ops.registry import ops
from lib_rocm_sd.trials.subject import Subject

HEAD_DIMS = (*attention_kernel.SHIPPED_HEAD_DIMS, 72, 96, 256)
LENGTHS = ((77, 131), (513, 1031))
"""Queries and keys: one block and a tail; many."""


def cases(arch: Arch) -> list[Subject]:
    """All for one GPU, what does not run on it left out; each once. An op of which nothing is said
    below has what vouches for its own cases.
    """
    cases: dict[object, Subject] = {}
    work = [*_problems()]
    here = {op.name for op, *_ in work}
    others = (op for op in ops() if op.name not in here)
    work += [(op, p, True) for op in others for case in op.cases for p in op.test_problems(case)]
    for op, problem, every in work:
        for variant in op.variants:
            if not variant.ours or variant.refusals(arch, problem):
                continue
            configs = variant.configs(arch, problem)
            for config in configs if every else configs[:1]:
                specs = tuple(variant.specs(arch, problem, config))
                key = (op.name, variant.name, config, problem)
                cases[key] = Subject(op, variant, config, problem, specs)
    return list(cases.values())


def _problems() -> Iterator[tuple[Op[Any, Any], Any, bool]]:
    """Op, problem, and whether by every config or the default only."""
    for problem, every in _attention():
        yield ATTENTION, problem, every
    for problem in _attention_backward():
        yield ATTENTION_AND_LSE, problem, True
        yield ATTENTION_BACKWARD, problem, True
    for conv, every in _convolutions():
        yield CONVS[conv.kind], conv, every
    yield from _norms()
    for rows in _layer_norms():
        yield LAYER_NORM, rows, True
        biased = BiasedProblem(rows.shape, rows.dtype, False, rows.affine, keeps=rows.added)
        yield LAYER_NORM_BIASED, biased, True
        if len(rows.shape) == 3:
            modulated = ModulatedProblem(rows.shape, rows.dtype, rows.added, rows.dtype)
            yield LAYER_NORM_MODULATED, modulated, True
    for head_dim in (64, 128, 40):
        for dtype in ("float16", "bfloat16"):
            for words in (33, 0):
                for rotary in ROTARIES:
                    plain = HeadsProblem(2, 77, words, 3, head_dim, dtype, rotary=rotary)
                    yield RMS_NORM_HEADS, plain, True
    for linear in _linears():
        yield LINEAR, linear, True
    yield from _of_training()


def _attention() -> Iterator[tuple[AttentionProblem, bool]]:
    plain = AttentionProblem(2, 3, *LENGTHS[0], 64, "float16", "none")
    for head_dim in HEAD_DIMS:
        for seq_q, seq_k in LENGTHS:
            yield replace(plain, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim), True
        yield replace(plain, head_dim=head_dim, dtype="bfloat16"), True
    for mask in (*attention_kernel.MASK_KINDS[1:], attention_kernel.LENGTHS):
        for head_dim in (40, 64, 160, 512):
            yield replace(plain, head_dim=head_dim, mask=mask), False
    for seq_k in (8, 4100, 8200, 20000, 40000):  # rows of scores, held or read twice
        yield AttentionProblem(1, 1, 3, seq_k, 512, "float16", "none"), False


def _attention_backward() -> Iterator[AttentionProblem]:
    plain = AttentionProblem(2, 3, *LENGTHS[0], 64, "float16", "none")
    for head_dim in (*backward_kernel.SHIPPED_HEAD_DIMS, 72, 256):
        for dtype in backward_kernel.DTYPES:
            yield replace(plain, head_dim=head_dim, dtype=dtype)
    for mask in attention_kernel.MASK_KINDS[1:]:
        yield replace(plain, mask=mask)


def _convolutions() -> Iterator[tuple[ConvProblem, bool]]:
    first = ConvProblem("3x3", 1, 21, 35, 16, 128)
    for statistics in (True, False):
        for channels in (512, 128):
            yield replace(first, out_channels=channels, statistics=statistics), True
        for form in _forms(replace(first, in_channels=64, norm=True, statistics=statistics)):
            for channels in (512, 256, 128):
                wide = form.shortcut_channels and channels
                yield replace(form, out_channels=channels, shortcut_channels=wide), True
        for channels in (256, 128):  # the output lies where a wider shortcut was
            over = replace(first, in_channels=channels, norm=True, statistics=statistics)
            over = replace(over, shortcut="conv", shortcut_channels=2 * channels, in_place=True)
            yield replace(over, out_channels=channels), True
        yield replace(first, kind="3x3 stride 2", out_channels=512, statistics=statistics), True
        upsample = replace(first, kind="upsample", in_channels=64, statistics=statistics)
        yield replace(upsample, out_channels=512), True
    for channels in (3, 8):
        yield replace(first, in_channels=128, norm=True, out_channels=channels), True
    deep = replace(first, height=5, width=9, in_channels=640, out_channels=160, embedding=True)
    for form in _forms(replace(deep, norm=True)):  # the channels of such small images are split
        yield replace(form, shortcut_channels=form.shortcut_channels and 160), True
    yield replace(deep, kind="3x3 stride 2 padded", statistics=True), True
    yield replace(deep, kind="upsample", statistics=True), True
    yield from _epilogues(replace(first, in_channels=64))
    yield from _in_rows(replace(deep, embedding=False, in_rows=True))
    for kind in conv_kernel.KINDS:
        half = ConvProblem(kind, 2, 20, 19, 64, 40, "bfloat16")
        yield half, True
        yield replace(half, norm=kind == "3x3", statistics=True), True


def _epilogues(plain: ConvProblem) -> Iterator[tuple[ConvProblem, bool]]:
    """An upscaler's."""
    for activation in ACTIVATIONS[:-1]:
        for channels in (3, 32, 64):
            yield replace(plain, out_channels=channels, epilogue=activation), True
    added = replace(plain, out_channels=64, shortcut="identity", shortcut_channels=64)
    for activation in ("none", "gate"):
        yield replace(added, in_channels=192, epilogue=activation), True
    yield replace(plain, kind="upsample", out_channels=64, epilogue="leaky relu"), True


def _in_rows(deep: ConvProblem) -> Iterator[tuple[ConvProblem, bool]]:
    """A UNet's, whose weights are read as they lie."""
    yield replace(deep, norm=True, statistics=True, embedding=True), True
    for shortcut, channels in (("none", 0), ("identity", deep.out_channels), ("conv", 320)):
        yield replace(deep, norm=True, shortcut=shortcut, shortcut_channels=channels), True
    yield replace(deep, kind="3x3 stride 2 padded"), True
    yield replace(deep, kind="upsample"), True
    yield replace(deep, in_channels=4, out_channels=320), True
    for norm in (True, False):
        yield replace(deep, in_channels=320, out_channels=4, norm=norm), True


def _forms(plain: ConvProblem) -> Iterator[ConvProblem]:
    yield plain
    yield replace(plain, shortcut="identity", shortcut_channels=1)
    yield replace(plain, shortcut="conv", shortcut_channels=1)


def _norms() -> Iterator[tuple[Op[Any, Any], Any, bool]]:
    for channels_last in (True, False):
        for dtype in ("float16", "bfloat16"):
            image = ImageProblem(2, 64, 61, 67, dtype, channels_last)
            yield STATISTICS, image, True
            sizes = (2, 64, 61, 67, dtype, channels_last)
            for silu in (True, False):
                yield APPLY, ApplyProblem(*sizes, silu), True
                yield GROUP_NORM_SILU, GroupNormProblem(*sizes, silu, 32, dtype), True
    # What one launch makes: 128 channels in runs of 32, by each number of pixels that are held.
    for pixels in (64, 490, 1010, 1500, 4000):
        for dtype in ("float16", "bfloat16"):
            small = NormProblem(2, 128, 1, pixels, dtype, True, 32, dtype)
            yield NORM, small, False
            for silu in (True, False):
                fields = (*small.shape, dtype, True, silu)
                yield GROUP_NORM_SILU, GroupNormProblem(*fields, affine=dtype), False
    odd = GroupNormProblem(1, 42, 19, 37, "float16", True, True, 6, "float32")
    yield GROUP_NORM_SILU, odd, True
    for parts in (1, 2100):  # the latter are merged first
        yield FINALIZE, FinalizeProblem(2, parts, 64, 16), True


def _layer_norms() -> Iterator[LayerNormProblem]:
    for channels in (1000, 320, 768, 4096):  # four to six vectors held; the last by several waves
        for dtype in ("float16", "bfloat16"):
            for added in (True, False):
                yield LayerNormProblem((2, 77, channels), dtype, added, dtype)
    for channels in (2051, 20_000):  # read twice
        yield LayerNormProblem((5, channels), "float16", True, "float32")


def _linears() -> Iterator[LinearProblem]:
    """Many rows, then so few that k is split over work-groups; tails in all three sizes."""
    for rows, k, columns in ((147, 328, 136), (19, 2568, 264), (2, 1288, 40)):
        for dtype in ("float16", "bfloat16"):
            plain = LinearProblem(rows, k, (columns,), dtype)
            yield plain
            yield replace(plain, gate=True)
            yield replace(plain, bias=False, columns=(columns, 24, 56))
            yield replace(plain, columns=(columns, 24, 56, 24))
            yield replace(plain, residual=True, in_place=True)


def _of_training() -> Iterator[tuple[Op[Any, Any], Any, bool]]:
    """What nothing but training launches: gradients of norms."""
    for dtype in ("float16", "bfloat16"):
        for added in (True, False):
            for channels in (1000, 320, 768):  # four to six vectors held
                rows = LayerNormBackwardProblem((2, 77, channels), dtype, added, dtype)
                yield LAYER_NORM_BACKWARD, rows, True
        for channels_last in (True, False):
            for silu in (True, False):
                fields = (2, 64, 61, 67, dtype, channels_last, silu)
                yield GROUP_NORM_BACKWARD, GroupNormBackwardProblem(*fields, affine=dtype), True
    long = LayerNormBackwardProblem((5, 2051), "float16", True, "float32")
    yield LAYER_NORM_BACKWARD, long, True
