"""Which sizes at the edges of tiles are executed: python -m tests.verify.amdgpu.boundaries [gfx ..]

A mistake in an index often shows only where a size is a multiple of a tile, one more or one less,
or where there are one, two or more than two of something. Prints for each op which of these cases
have: of each size, by each tile that a kernel cuts it into, and of images, heads, rows and weights
beside whatever can be fused. `missing` is what none has, but for NOWHERE.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd
from typing import Any, NamedTuple

from lib_rocm_sd.ops.attention.ours import THREADS as SOFTMAX_THREADS
from lib_rocm_sd.ops.attention.ours import held_of
from lib_rocm_sd.ops.attention_backward.ours import MatrixBackward
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.conv.ours import MatrixConv
from lib_rocm_sd.ops.group_norm import kernel as norm_kernel
from lib_rocm_sd.ops.group_norm import whole as whole_norm
from lib_rocm_sd.ops.group_norm_backward import kernel as group_norm_backward
from lib_rocm_sd.ops.layer_norm import kernel as layer_norm_kernel
from lib_rocm_sd.ops.layer_norm.heads import THREADS as HEADS_THREADS
from lib_rocm_sd.ops.layer_norm_backward import gradients as norm_gradients
from lib_rocm_sd.ops.layer_norm_backward import kernel as layer_norm_backward
from lib_rocm_sd.ops.linear import kernel as linear_kernel
from tests.verify.amdgpu import cases, drawn, edges, gradients, judge
from tests.verify.amdgpu.case import Case

GPUS = ("gfx1030", "gfx1100", "gfx1201", "gfx942")
"""One of each matrix unit."""
COUNTS = ("1", "2", "3+")


class Seen(NamedTuple):
    """`mark`: one of `wanted`, which are to be seen of `what`, or another."""

    what: str
    mark: str
    wanted: tuple[str, ...]


def _count(what: str, number: int) -> Seen:
    return Seen(what, str(number) if number < 3 else "3+", COUNTS)


def _rest(what: str, size: int, tile: int, unit: int = 1) -> Iterator[Seen]:
    """What is left of a size by a tile, both multiples of `unit`."""
    left, units = size % tile // unit, tile // unit
    marks = {"0": 0, "+1": 1, "-1": units - 1}
    wanted = tuple(mark for mark, rest in marks.items() if rest < units and (mark != "-1" or rest))
    yield Seen(what, "", wanted)
    yield from (Seen(what, mark, wanted) for mark in wanted if left == marks[mark])


def _cut(what: str, size: int, tile: int, unit: int = 1, by: bool = False) -> Iterator[Seen]:
    """A rest, and how many tiles. `by`: of each size of a tile the rest alone."""
    yield from _rest(f"{what} by {tile}" if by else what, size, tile, unit)
    yield _count(f"{what}: tiles", -(-size // tile))


def _attention(case: Case) -> Iterator[Seen]:
    p, config = case.problem, judge._config(case)
    with_lse = case.op == "attention and lse"
    yield from _cut("queries", p.seq_q, config.block_q, by=not with_lse)
    ahead = " ahead" * (config.ahead and not with_lse)
    yield from _cut(f"keys{ahead}", p.seq_k, config.block_k, by=not with_lse)
    if p.mask != "none":
        yield from _cut("queries of a mask", p.seq_q, config.block_q)
        yield from _cut("keys of a mask", p.seq_k, config.block_k)


def _attention_backward(case: Case) -> Iterator[Seen]:
    p = case.problem
    config = MatrixBackward().configs(case.arch, p)[case.config]
    sizes = {"queries": p.seq_q, "keys": p.seq_k}
    for own, other in (("queries", "keys"), ("keys", "queries")):
        each = config.of(own)
        ahead = " ahead" * each.ahead
        yield from _cut(f"own {own}", sizes[own], each.rows, by=True)
        yield from _cut(f"{other} beside own {own}{ahead}", sizes[other], each.block, by=True)
        if p.mask != "none":
            yield from _rest(f"own {own} of a mask", sizes[own], each.rows)
            yield from _rest(f"other {other} of a mask", sizes[other], each.block)


def _softmax(case: Case) -> Iterator[Seen]:
    keys = case.problem.seq_k
    if held_of(keys):
        yield from _cut("keys held", keys, 4 * SOFTMAX_THREADS, 4)
    else:
        yield from _rest("keys read twice", keys, 4)


def _conv(case: Case) -> Iterator[Seen]:
    p = case.problem
    config = MatrixConv(p.kind).configs(case.arch, p)[case.config]
    rows, columns = p.out_size
    if case.layout == "band":
        rows = drawn._BANDS[p.kind][1]
    co = conv_kernel.padded(p.out_channels)
    cut = conv_kernel.tiling("3x3" if p.in_rows else p.kind, rows, columns, co, config)
    step = "stride 2" if p.kind in conv_kernel.STRIDED else p.kind
    kind = f", {step}{' as they lie' * p.in_rows}"
    for more in (kind, " with statistics") if p.statistics else (kind,):
        yield from _cut(f"columns{more}", cut.columns, 16)
        yield from _cut(f"rows{more}", cut.rows, config.rows)
    yield from _rest(f"rows by {config.rows}", cut.rows, config.rows)
    lie = " as they lie" * p.in_rows
    yield from _cut(f"channels out{lie}", p.out_channels, config.block_co, by=True)
    chunk = config.chunk_c or conv_kernel.chunk_of(p.in_channels, p.kind)
    yield _count(f"chunks of {chunk} channels", p.in_channels // chunk)
    if p.through:
        yield _count("chunks of the shortcut's channels", -(-p.through // chunk))
    if config.splits > 1:
        yield from _rest("chunks by splits", p.in_channels // chunk, config.splits)
        yield from _cut("pixels that are summed", rows * columns, conv_kernel.SUM_PIXELS)
        yield from _cut("channels that are summed", co, conv_kernel.SUM_CHANNELS, 16)


def _finish(case: Case) -> Iterator[Seen]:
    p, config = case.problem, norm_kernel.configs(case.arch)[case.config]
    vectors = -(-p.out_channels // 8)
    cut = norm_kernel.finish_tiling(p.batch, 8 * vectors, *p.out_size)
    yield from _cut("columns", p.out_size[1], config.threads // cut.width * config.unroll)
    yield from _cut("vectors of channels", vectors, cut.width)


PASSES = {"group norm": ("statistics", "apply"), gradients.GROUP: ("sums", "apply")}
"""Over an image; the first makes parts."""


def _group_norm(case: Case) -> Iterator[Seen]:
    p, config = case.problem, norm_kernel.configs(case.arch)[case.config]
    yield from _passes(p, norm_kernel.tiling, config, PASSES[case.op])
    yield from _rest("channels of a group", p.channels // p.groups, 8)


def _passes(p: Any, tiling: Any, config: Any, names: tuple[str, str]) -> Iterator[Seen]:
    for name in names:
        cut = tiling(p.batch, p.channels, p.pixels, p.form, config, name == names[0])
        last = "" if p.channels_last else ", channels first"
        yield from _cut(f"{name}: pixels by part{last}", p.pixels, cut.part_pixels)
        if not p.channels_last:
            yield from _rest(f"{name}: pixels by vector", p.pixels, 8)
            continue
        vectors, rows = -(-p.channels // p.form.vector), config.threads // cut.width
        yield from _cut(f"{name}: vectors of channels", vectors, cut.width)
        for each, by in ((rows, "row"), (rows * config.unroll, "batch")):
            if name == names[0]:  # parts of the other are whole batches
                yield from _rest(f"{name}: pixels of a part by {by}", cut.part_pixels, each)


def _finalize(case: Case) -> Iterator[Seen]:
    p, config = case.problem, norm_kernel.configs(case.arch)[case.config]
    each = p.channels // p.groups
    fewer = norm_kernel.merged_parts(p.parts, each)
    if fewer < p.parts:
        yield from _rest("parts that are merged", p.parts, -(-p.parts // fewer))
    yield from _cut("statistics of a group", fewer * each, config.threads)


UNET = tuple(str(width // 32) for width in (320, 640, 960, 1280, 1920, 2560))
"""Channels of a group in Stable Diffusion's UNets."""


def _whole(case: Case) -> Iterator[Seen]:
    p, config = case.problem, whole_norm.CONFIGS[case.config]
    cut = whole_norm.tiling(p.channels, p.groups, p.form.vector)
    each = p.channels // p.groups
    yield from _cut("pixels", p.pixels, config.threads // cut.width)
    beyond = {0: "all", 1: "all but one"}.get(config.pixels(cut.width) - p.pixels, "")
    yield Seen(f"pixels held by {config.threads} x {config.held}", beyond, ("all", "all but one"))
    yield Seen("channels of a group", str(each), UNET)
    yield Seen("channels that a group and a vector share", str(gcd(each, 8)), ("1", "2", "4", "8"))
    yield _count("groups of a work-group", cut.run // each)
    yield _count("work-groups of an image", cut.blocks)


def _layer_norm(case: Case) -> Iterator[Seen]:
    p, config = case.problem, layer_norm_kernel.CONFIGS[case.config]
    cut = layer_norm_kernel.tiling(p.channels, config)
    yield from _cut("rows", p.rows, config.threads // cut.lanes)
    if cut.held:
        yield from _rest(f"channels, {cut.held} vectors held", p.channels, 8 * cut.lanes, 8)
    else:
        yield from _rest("channels read twice", p.channels, 8)


def _heads(case: Case) -> Iterator[Seen]:
    yield from _cut("rows of heads", case.problem.rows, HEADS_THREADS // case.problem.lanes)


def _linear(case: Case) -> Iterator[Seen]:
    p, config = case.problem, judge.linear_config(case)
    cut = linear_kernel.tiling(p.rows, p.k, p.columns, p.gate, config)
    yield from _cut("rows", p.rows, config.block_rows, by=True)
    gate = " of a gate" * p.gate
    for count in p.columns:
        yield from _cut(f"columns{gate}", count, config.block_out // (1 + p.gate), 8, by=True)
    yield from _cut("k", p.k, config.chunk_k, 8, by=True)
    yield from _cut("blocks of rows", -(-p.rows // config.block_rows), cut.together)
    if cut.parts > 1:
        yield from _cut("chunks of a part", -(-p.k // config.chunk_k), cut.part_chunks)
        yield from _summed("values", p.rows * p.all_columns)


def _summed(what: str, values: int) -> Iterator[Seen]:
    yield from _cut(what, values, 8 * linear_kernel.SUM_THREADS, 8)


def _layer_norm_gradients(case: Case) -> Iterator[Seen]:
    p = case.problem
    (config,) = layer_norm_backward.configs(case.arch, p.channels)
    yield from _layer_norm(replace(case, config=layer_norm_kernel.CONFIGS.index(config)))
    if not p.wanted and p.affine == "none":
        return
    cut = layer_norm_backward.parts_tiling(p.rows, p.channels)
    together = layer_norm_backward.PART_THREADS // cut.width
    yield from _cut("rows by part", p.rows, cut.part_rows)
    for each, by in ((together, "row"), (together * layer_norm_backward.UNROLL, "batch")):
        yield from _rest(f"rows of a part by {by}", cut.part_rows, each)
    yield from _cut("vectors of channels", p.channels // cut.vector, cut.width)
    yield from _added(p.channels, cut.parts)


def _added(channels: int, parts: int) -> Iterator[Seen]:
    """The last step of both norms' gradients."""
    few = "few" if parts <= norm_gradients.FEW_PARTS else "many"
    yield from _cut(f"channels of {few} parts", channels, norm_gradients.width_of(parts))


def _group_norm_gradients(case: Case) -> Iterator[Seen]:
    p = case.problem
    (config,) = group_norm_backward.configs(case.arch, p.channels, p.pixels, p.groups, p.form)
    yield from _passes(p, group_norm_backward.tiling, config.steps, PASSES[case.op])
    each, sizes = p.channels // p.groups, (p.batch, p.channels, p.pixels, p.form, config.steps)
    parts = group_norm_backward.tiling(*sizes, True).parts
    yield from _cut("channels of a group", each, group_norm_backward.combined_width(parts, each))
    yield from _rest("channels of a group by vector", each, 8)


OPS: dict[str, Callable[[Case], Iterator[Seen]]] = {
    "attention": _attention,
    "attention and lse": _attention,
    "attention backward": _attention_backward,
    "softmax": _softmax,
    "conv": _conv,
    "finish": _finish,
    "finish pass": _finish,
    "group norm": _group_norm,
    "finalize": _finalize,
    "whole group norm": _whole,
    "layer norm": _layer_norm,
    "linear": _linear,
    "rms norm of heads": _heads,
    "linear gate": lambda case: _summed("values", case.problem.rows * case.problem.all_columns),
    gradients.LAYER: _layer_norm_gradients,
    gradients.GROUP: _group_norm_gradients,
}
FUSED = (
    *("mask", "kind", "shortcut", "statistics", "in_place", "embedding", "in_rows", "norm"),
    *("added", "channels_last", "silu", "wanted", "bias", "residual"),
)
"""What a problem may have beside its sizes, and reads or writes for each image, head or weight."""


def _counted(problem: Any) -> Iterator[Seen]:
    """How many images, heads or weights, beside each thing that is fused."""
    fields = vars(problem)
    numbers = {name: fields[name] for name in ("batch", "heads") if name in fields}
    if "columns" in fields and not problem.gate:
        numbers["weights"] = len(problem.columns)
    for name, number in numbers.items():
        yield _count(name, number)
        for fused in (name for name in FUSED if name in fields):
            yield _count(f"{name}, {fused} {fields[fused]}", number)


def every(gfx: str) -> Iterator[Case]:
    """All cases of a GPU."""
    for makes in (cases.ALL, gradients.ALL, edges.ALL):
        for make in makes.values():
            yield from make(gfx)


Table = dict[tuple[str, str], tuple[set[str], set[str]]]


def table(gfx: str) -> Table:
    """By op and size: which marks are wanted, and which are had."""
    found: Table = {}
    for case in every(gfx):
        op = "finish" if case.op == "finish pass" else case.op
        for what, mark, wanted in (*OPS[case.op](case), *_counted(case.problem)):
            both = found.setdefault((op, what), (set(), set()))
            both[0].update(wanted)
            both[1].add(mark)
    return found


EVEN = "an even number, by sixteen or by an even number of rows"
AS_MANY = "as many parts as each has pixels, at least 8192"
NOWHERE = {
    **{
        f"conv, {of}, upsample as they lie: {rest}": EVEN
        for of in ("rows", "columns")
        for rest in ("+1", "-1")
    },
    **{f"conv, channels out by {n}: +1": "more have a wider work-group" for n in (32, 64)},
    "finish, vectors of channels: +1": "no fewer than 32,264 channels",
    "linear, chunks of a part: tiles: 1": "then k is not in parts",
    **{
        f"{op}, {name}: pixels by part, channels first: +1": AS_MANY
        for op, names in PASSES.items()
        for name in names
    },
}
"""What no problem has, and why."""


def missing(gfx: str) -> list[str]:
    """What no case of a GPU has and some problem could have."""
    return [
        f"{op}, {what}: {mark}"
        for (op, what), (wanted, had) in sorted(table(gfx).items())
        for mark in sorted(wanted - had)
        if f"{op}, {what}: {mark}" not in NOWHERE
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gfx", nargs="*", default=GPUS)
    for gfx in parser.parse_args().gfx:
        for (op, what), (wanted, had) in sorted(table(gfx).items()):
            without = ", ".join(sorted(wanted - had))
            print(f"{gfx} {op}, {what}: {', '.join(sorted(had & wanted))}", end="")
            print(f"; without {without}" if without else "")


if __name__ == "__main__":
    main()
