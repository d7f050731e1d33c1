"""Mistakes that a list made from the kernels' source plants: each barrier, wait for loads, tail,
limit, fill and stride of each file, removed or shifted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lib_rocm_sd.arch import KERNELS_DIR
from lib_rocm_sd.ops.attention.kernel import LENGTHS
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.conv.problem import ConvProblem
from lib_rocm_sd.ops.group_norm.problem import FinalizeProblem, GroupNormProblem
from lib_rocm_sd.ops.layer_norm.biased import BiasedProblem
from lib_rocm_sd.ops.layer_norm.heads import ROTARIES, HeadsProblem
from lib_rocm_sd.ops.layer_norm.modulated import ModulatedProblem
from lib_rocm_sd.ops.layer_norm.problem import LayerNormProblem
from lib_rocm_sd.ops.layer_norm.rms import RmsProblem
from lib_rocm_sd.ops.linear.problem import LinearProblem
from tests.verify import simt
from tests.verify.amdgpu import gradients
from tests.verify.amdgpu.case import Case

KINDS: dict[str, tuple[re.Pattern[str], str]] = {
    "barrier": (re.compile(r"\bbarrier\(\);"), "(void)0;"),
    "loads": (re.compile(r"\bloads_landed\(\);"), "(void)0;"),
    "tail": (
        re.compile(
            r"(?<= )< (seq_k\(\)"
            r"|(?:\(int\)p\.\w+|p\.\w+|last|rows|count|vectors|batch\.valid)\b(?!\w* *\*))"
        ),
        r"<= \1",
    ),
    "limit": (re.compile(r"(\bmin2\([^;]*?) - 1\)"), r"\1)"),
    "fill": (re.compile(r"(\? x(?:\.word\[i\])?) : (?:0|-infinity\(\));"), r"\1 : 0x7e007e00;"),
    "zeros": (re.compile(r"= Words<4>\{\{0, 0, 0, 0\}\}"), "= Words<4>{{0x7e007e00, 0, 0, 0}}"),
    "stride": (re.compile(r"\* p\.\w*stride\w*(\[\d\])?"), "* 0"),
    "lane": (re.compile(r"\blane_id\(\) ([/%]) "), r"(lane_id() + 1) \1 "),
}
"""What marks a place, and what takes its place. A fill becomes NaN: what meets a zero may be any
finite number.
"""


class Place(NamedTuple):
    """The `number`-th of its kind in a file."""

    name: str
    kind: str
    number: int
    text: str
    found: str

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}-{self.number}"

    def planted(self) -> Path:
        """A copy of kernels/ with the mistake."""
        pattern, instead = KINDS[self.kind]
        text = (KERNELS_DIR / self.name).read_text(encoding="utf-8")
        found = list(pattern.finditer(text))[self.number]
        old = text[: found.end()]
        return simt.planted(self.name, old, text[: found.start()] + found.expand(instead))


def files() -> list[str]:
    """All kernels and their headers but what only the development card runs."""
    found = [*KERNELS_DIR.glob("*.hip"), *(KERNELS_DIR / "common").glob("*.h")]
    return sorted(path.relative_to(KERNELS_DIR).as_posix() for path in found)


def places() -> Iterator[Place]:
    """Every place of every kind."""
    for name in files():
        text = (KERNELS_DIR / name).read_text(encoding="utf-8")
        for kind, (pattern, _) in KINDS.items():
            for number, found in enumerate(pattern.finditer(text)):
                line = text[text.rfind("\n", 0, found.start()) + 1 : text.find("\n", found.end())]
                if "//" not in line[: line.find(found[0])]:
                    yield Place(name, kind, number, line.strip(), found[0])


def _attention(gfx: str) -> Iterator[Case]:
    """Queries on their own read by 16 bytes and by halves with a mask; shared; tiles in parts;
    fetched ahead.
    """
    plain = AttentionProblem(2, 2, 77, 131, 40, "float16", "none")
    yield Case(gfx, "attention", plain, values="growing", layout="mixed", scale=-0.3)
    masked = replace(plain, seq_q=33, mask="float32")
    yield Case(gfx, "attention", masked, layout="mixed and odd", mask_of="turned")
    yield Case(gfx, "attention", replace(masked, head_dim=512, seq_k=128), mask_of="whole")
    ahead = 3 if gfx != "gfx1030" else 2  # which fetches no tile ahead
    yield Case(gfx, "attention", plain, ahead)
    yield Case(gfx, "attention", replace(plain, seq_k=128), ahead)
    yield Case(gfx, "attention", replace(plain, head_dim=160, seq_k=128), 1)
    yield Case(gfx, "attention", replace(plain, seq_k=37), values="infinite")
    yield Case(gfx, "attention and lse", replace(plain, seq_q=33))


def _attention_and_lengths(gfx: str) -> Iterator[Case]:
    """The same, and one in which images have their own numbers of keys."""
    yield from _attention(gfx)
    yield Case(gfx, "attention", AttentionProblem(2, 1, 17, 77, 40, "float16", LENGTHS))


def _attention_backward(gfx: str) -> Iterator[Case]:
    """Rests of work-groups and of tiles; a mask; rows that are no tiles of sixteen."""
    plain = AttentionProblem(1, 2, 37, 77, 40)
    yield Case(gfx, "attention backward", plain, layout="misaligned")
    masked = replace(plain, batch=2, seq_q=19, seq_k=35, mask="float32")
    yield Case(gfx, "attention backward", masked)
    yield Case(gfx, "attention backward", replace(plain, seq_q=131, seq_k=131, head_dim=64))
    yield Case(gfx, "attention backward", replace(plain, head_dim=136))


def _conv(gfx: str) -> Iterator[Case]:
    plain = ConvProblem("3x3", 2, 9, 18, 96, 80, "float16", True, "identity", 80, True)
    yield Case(gfx, "conv", plain, layout="wide")
    yield Case(gfx, "conv", ConvProblem("upsample", 2, 7, 18, 32, 80), layout="band")
    yield Case(
        gfx,
        "conv",
        ConvProblem("3x3", 1, 3, 18, 32, 128, "float16", True, "conv", 160, False, True),
    )
    yield Case(gfx, "conv", ConvProblem("3x3", 2, 9, 33, 32, 3, "float16", True, embedding=True))
    over = ConvProblem("3x3", 2, 11, 19, 16, 16, "float16", True, "identity", 16, in_place=True)
    yield Case(gfx, "conv", over)


def _rows(gfx: str) -> Iterator[Case]:
    """Weights as they lie: ragged images and blocks of channels, both shortcuts, chunks of both."""
    plain = ConvProblem("3x3", 2, 5, 18, 64, 24, "float16", True, in_rows=True)
    through = replace(plain, shortcut="conv", shortcut_channels=96, out_channels=32)
    yield Case(gfx, "conv", through)
    yield Case(gfx, "conv", replace(plain, batch=1, height=3, out_channels=4))
    same = replace(plain, shortcut="identity", shortcut_channels=32, out_channels=32)
    yield Case(gfx, "conv", replace(same, statistics=True), layout="wide")
    yield Case(gfx, "conv", plain)


def _conv_of_both(gfx: str) -> Iterator[Case]:
    yield from _rows(gfx)
    yield from _conv(gfx)


def _split(gfx: str) -> Iterator[Case]:
    few = ConvProblem("3x3", 2, 3, 3, 640, 24, "float16", True, statistics=True, embedding=True)
    yield Case(gfx, "conv", few)
    both = replace(few, out_channels=80, shortcut="identity", shortcut_channels=80)
    yield Case(gfx, "conv", both, layout="wide")


def _units(gfx: str) -> Iterator[Case]:
    yield from _attention(gfx)
    yield from _conv(gfx)


def _norm(gfx: str) -> Iterator[Case]:
    last = GroupNormProblem(2, 520, 11, 13, "float16", True, True, 8, "float16")
    yield Case(gfx, "group norm", last)
    yield Case(gfx, "group norm", GroupNormProblem(2, 6, 61, 127, "float16", False, True, 2))
    yield Case(gfx, "group norm", GroupNormProblem(2, 6, 5, 11, "float16", False, True, 2))
    yield Case(gfx, "finalize", FinalizeProblem(1, 200, 301, 7))
    finish = ConvProblem("3x3", 2, 2, 55, 16, 264, "float16", False, "identity", 264, True)
    yield Case(gfx, "finish pass", finish)
    yield Case(gfx, "group norm", last, layout="misaligned")
    phases = replace(finish, kind="upsample", width=27, shortcut="none", embedding=True)
    yield Case(gfx, "finish pass", phases)


def _whole_norm(gfx: str) -> Iterator[Case]:
    """Fewer pixels than rows, some of which no work-item has; several waves to a group."""
    few = GroupNormProblem(1, 40, 1, 33, "float16", True, True, 2, "float16")
    yield Case(gfx, "whole group norm", few)
    yield Case(gfx, "whole group norm", replace(few, width=203), layout="normed")
    yield Case(gfx, "whole group norm", replace(few, width=199))
    yield Case(gfx, "whole group norm", replace(few, batch=2, added=True))


def _layer_norm(gfx: str) -> Iterator[Case]:
    """Rows apart that are held by work-items of which some are idle, made by several waves, and
    read twice with a rest.
    """
    held = LayerNormProblem((19, 328), added=True)
    yield Case(gfx, "layer norm", held, layout="apart")
    yield Case(gfx, "layer norm", replace(held, shape=(1, 40)))
    yield Case(gfx, "layer norm", replace(held, shape=(2, 3136)))
    twice = replace(held, shape=(3, 2051))
    yield Case(gfx, "layer norm", twice, layout="apart")
    yield Case(gfx, "layer norm", replace(twice, added=False))
    yield Case(gfx, "layer norm", BiasedProblem((19, 328), keeps=True), layout="apart")
    yield Case(gfx, "layer norm", BiasedProblem((3, 2051), keeps=True), layout="apart")
    yield Case(gfx, "layer norm", ModulatedProblem((3, 2, 328), added=True), layout="apart")
    yield Case(gfx, "layer norm", RmsProblem((19, 328), silu=True), layout="apart")


def _heads(gfx: str) -> Iterator[Case]:
    some = HeadsProblem(2, 2, 1, 3, 40)
    yield Case(gfx, "rms norm of heads", some)
    for rotary in ROTARIES[1:]:
        turned = replace(some, rotary=rotary, own_rotary=True, normed=(True, False, False, True))
        yield Case(gfx, "rms norm of heads", turned, layout="apart")


def _softmax(gfx: str) -> Iterator[Case]:
    problem = AttentionProblem(1, 1, 3, 131, 16)
    yield Case(gfx, "softmax", problem, scale=-0.3)
    yield Case(gfx, "softmax", replace(problem, seq_k=4092))
    yield Case(gfx, "softmax", replace(problem, seq_k=8188))
    yield Case(gfx, "softmax", replace(problem, seq_q=1, seq_k=65540))


def _pack(gfx: str) -> Iterator[Case]:
    yield Case(gfx, "conv", ConvProblem("3x3", 1, 5, 17, 32, 48))


def _linear(gfx: str) -> Iterator[Case]:
    """The smallest sizes, k whole and in parts; a strip that ends with work-groups without rows."""
    small, few = (2, 3) if gfx != "gfx1030" else (1, 2)
    problem = LinearProblem(59, 136, (24, 56, 8), residual=True, in_place=True)
    yield Case(gfx, "linear", problem, small, "wide")
    yield Case(gfx, "linear", LinearProblem(17, 136, (56,), gate=True), few)
    yield Case(gfx, "linear", LinearProblem(16 * 9, 40, (8,)), few)
    parts = replace(problem, rows=17, columns=(24, 136, 8), in_place=False)
    yield Case(gfx, "linear", parts, few * 2 + 1, "wide")
    yield Case(gfx, "linear", replace(parts, rows=15, k=192, columns=(8,)), few * 2 + 1)
    gated = LinearProblem(65, 16, (40,), residual=True, gate=True, in_place=True)
    yield Case(gfx, "linear gate", gated, layout="wide")


CASES: dict[str, Callable[[str], Iterator[Case]]] = {
    "attention.hip": _attention,
    "attention_backward.hip": _attention_backward,
    "common/attention_backward.h": _attention_backward,
    "common/attention_layout.h": _attention,
    "common/attention_softmax.h": _attention,
    "common/attention_tiles.h": _attention_and_lengths,
    "common/conv.h": _conv_of_both,
    "common/conv_rows.h": _rows,
    "common/group_norm.h": _norm,
    "common/mma.h": _units,
    "common/pair_sums.h": gradients.few_of_both,
    "common/platform.h": _attention,
    "common/reduce.h": _attention,
    "common/tile.h": _attention,
    "conv3x3.hip": _conv,
    "conv_sum.hip": _split,
    "group_norm_backward.hip": gradients.few_group_norms,
    "group_norm_silu.hip": _norm,
    "group_norm_whole.hip": _whole_norm,
    "layer_norm.hip": _layer_norm,
    "layer_norm_backward.hip": gradients.few_layer_norms,
    "linear.hip": _linear,
    "norm_gradients.hip": gradients.few_of_both,
    "pack.hip": _pack,
    "rms_norm.hip": _heads,
    "softmax.hip": _softmax,
    "upsample_conv.hip": _conv,
}
"""What is executed with a mistake in a file, until one case shows it."""


class Excused(NamedTuple):
    """A place whose line has `text`, and that ends with `last` itself if that is said; and why no
    case here shows a mistake in it.
    """

    name: str
    kind: str
    text: str
    why: str
    last: str = ""


STAGED = "only the development card stages O in LDS: tests/verify/simt has it"
NO_KEYS = "a tile behind the last key repeats the last row, weighs nothing and costs only time"
UNUSED = "LLVM leaves out a load that is not used: tests/verify/simt/test_simt_planted.py has it"
NOT_STORED = "sums of a column past the last are not stored"
NOT_USED = "what is not held is not asked for: the limit keeps an index legal that is not used"
LAYOUT = "test_another_units_layout_gives_wrong_results has this line"
TWICE = "other work-items write the same values there, or none"
SAME = "what is past the end repeats the first pixel, which the same work-item writes"
NOTHING = "what is past the end adds nothing"
EXCUSED = (
    Excused("attention.hip", "tail", "first_k < seq_k(); first_k += BLOCK_K", NO_KEYS),
    Excused("attention.hip", "tail", "next_k = first_k + BLOCK_K < seq_k()", NO_KEYS),
    Excused("attention.hip", "tail", "*(Words<4>*)(first + (u32)(t * 16 + n)", STAGED),
    Excused("common/attention_backward.h", "limit", "min2(first_d, HEAD_DIM - 1)", NOT_STORED),
    Excused("common/mma.h", "lane", "first_of_row()", "all sixteen lanes have the same sum"),
    Excused("group_norm_silu.hip", "tail", "active = row < rows", TWICE, "rows"),
    Excused("group_norm_silu.hip", "tail", "i < batch.valid", SAME),
    Excused(
        "group_norm_silu.hip", "tail", "entry < last; entry +=", "entries past the end are none"
    ),
    Excused("group_norm_whole.hip", "tail", "active = row < rows", TWICE),
    Excused("common/pair_sums.h", "tail", "begun < last; begun +=", NOTHING),
    Excused("group_norm_backward.hip", "tail", "begun < p.group_channels", NOTHING),
    Excused("group_norm_backward.hip", "tail", "active = row < rows &&", TWICE, "rows"),
    Excused("layer_norm_backward.hip", "tail", "begun < last; begun +=", NOTHING),
    Excused("layer_norm_backward.hip", "tail", "active = row < rows &&", TWICE, "rows"),
    Excused("layer_norm_backward.hip", "tail", "active = wanted < p.rows", TWICE),
    Excused("layer_norm.hip", "tail", "squares * p.share < p.eps ? p.eps", "both sides are eps"),
    Excused("layer_norm.hip", "tail", "if (place.active && vector(i) < vectors)", TWICE),
    Excused("attention.hip", "limit", "min2(first_d, HEAD_DIM - 1)", NOT_STORED),
    Excused("common/attention_tiles.h", "limit", "min2(d, max2(kHeldD, 1) - 1)", NOT_USED),
    Excused("common/tile.h", "limit", "tile + min2(row, rows - 1)", UNUSED),
    Excused("common/mma.h", "lane", "(lane_id() + 8 * (lane_id() / 16)) % 16", LAYOUT),
    Excused("common/conv.h", "limit", "first_row = min2(max2(top", "no group begins behind x"),
)


def fits(excused: Excused, place: Place) -> bool:
    same = excused[:2] == place[:2] and excused.text in place.text
    return same and place.found.endswith(excused.last)


def excuse(place: Place) -> Excused | None:
    """Why the mistake at this place is not planted."""
    return next((each for each in EXCUSED if fits(each, place)), None)


NOTHING_MARKED = {
    *("common/attention_layout.h", "common/group_norm.h", "common/platform.h", "common/reduce.h"),
    *("conv3x3.hip", "pack.hip", "upsample_conv.hip"),
}
"""Files without barriers, waits, tails, limits, fills, strides and functions of lanes."""
