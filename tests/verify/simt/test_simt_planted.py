"""Mistakes planted in copies of the kernel's source: each must be caught."""

from __future__ import annotations

import pytest
import torch

from lib_rocm_sd.ops.attention.problem import AttentionProblem
from tests import executed
from tests.verify import simt
from tests.verify.simt.attention import Setting, compare, draw, random_mask

pytestmark = [
    pytest.mark.skipif(simt.missing() is not None, reason=str(simt.missing())),
    executed.known(by="shim"),
]

TILES, SOFTMAX = "common/attention_tiles.h", "common/attention_softmax.h"
COPIES, PARTS = "nvidia/attention_copies.h", "nvidia/attention_parts.h"
REST = "nvidia/attention_rest.h"


def places(text: str) -> list[tuple[str, int]]:
    """Where this stands in the kernel."""
    return simt.places(text, "attention.hip", TILES, SOFTMAX, COPIES, REST, PARTS)


BARRIERS = places("barrier();")
WEAKER = {
    "copies_landed<1>();": "copies_landed<2>();",
    "copies_landed<kAhead - 1>();": "copies_landed<kAhead>();",
    "copies_landed<0>();": "copies_landed<1>();",
    "copies_landed<2>();": "copies_landed<3>();",
    "copies_landed<kPending>();": "copies_landed<kPending + 1>();",
}
WAITS = [(*place, text) for text in WEAKER for place in places(text)]
AT_THE_END = ((COPIES, 1, "copies_landed<0>();"), (REST, 0, "copies_landed<0>();"))
"""What the last of these copies bring is read no more. In REST sums take their place in LDS, and
one that came late would overwrite them, which the shim does not do.
"""
Way = tuple[str, int, str, int, tuple[int, int]]
USUAL = (65, 131)
PLAIN: tuple[Way, ...] = (
    ("gfx1100", 40, "float16", 0, USUAL),
    ("gfx1200", 256, "bfloat16", 0, USUAL),
    ("gfx942", 512, "float16", 0, USUAL),
)
SHARING: tuple[Way, ...] = (("sm_90", 128, "float16", 0, (154, 300)),)
COPYING: tuple[Way, ...] = (
    ("sm_90", 40, "float16", 0, USUAL),
    ("sm_90", 64, "float16", 0, (65, 300)),
    ("sm_90", 80, "float16", 0, (65, 300)),
    ("sm_90", 128, "float16", 0, (170, 300)),
    *SHARING,
    ("sm_90", 40, "bfloat16", 2, USUAL),
    ("sm_90", 160, "float16", 2, (195, 77)),
)
IN_PARTS: tuple[Way, ...] = (("sm_90", 512, "float16", 1, (65, 600)),)
"""GPU, head_dim, dtype, config, queries and keys. Between them they have every barrier: waves with
queries of their own, shared, tiles in parts; a pipeline of copies without and with passes of whole
tiles, with the rest of keys and of values copied at once, with rings of four; tiles for few keys,
several of queries with the same keys; waves that copy parts of tiles for themselves; waves that
share few queries.
"""


SCALES = {128: -0.1}
"""By head_dim. A negative one turns Q's signs, which Q in LDS needs a barrier for."""


def ways(name: str) -> tuple[Way, ...]:
    """Those that run what stands in this file."""
    return {COPIES: COPYING, PARTS: IN_PARTS, REST: SHARING}.get(name, (*PLAIN, *COPYING))


def verdict(
    setting: Setting,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> str:
    """ "right", "wrong", or what the program said."""
    try:
        return "wrong" if compare(setting, *inputs, mask, scale) else "right"
    except simt.SimtError as error:
        return str(error)


def inputs_of(
    head_dim: int, dtype: str, seq_q: int = USUAL[0], seq_k: int = USUAL[1]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = draw(AttentionProblem(1, 1, seq_q, seq_k, head_dim, dtype))
    return q, k, v


def test_the_source_has_barriers() -> None:
    assert len(BARRIERS) >= 10 and len(WAITS) >= 4 and set(AT_THE_END) <= set(WAITS)


def caught(
    name: str, text: str, instead: str, number: int, seed: int, sanitize: str | None = None
) -> str:
    """What showed the mistake; fails where nothing does."""
    kernels_dir = simt.planted(name, text, instead, number)
    verdicts = []
    for gfx, head_dim, dtype, config, sizes in ways(name):
        setting = Setting(gfx, seed, sanitize, kernels_dir, config)
        inputs = inputs_of(head_dim, dtype, *sizes)
        verdicts.append(verdict(setting, inputs, scale=SCALES.get(head_dim)))
        if "data race" in verdicts[-1] if sanitize else verdicts[-1] != "right":
            return verdicts[-1]
    pytest.fail(f"not caught: {verdicts}")


REPAIRED = (PARTS, 0)
"""Without it the first scores are made of what nobody wrote, NaN here, so the tile is scored again
behind the next barrier: only a race shows it.
"""


@pytest.mark.parametrize(("name", "number"), [each for each in BARRIERS if each != REPAIRED])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_removed_barrier_gives_wrong_results(name: str, number: int, seed: int) -> None:
    """Seed 1 drives waves apart, seed 2 interleaves them."""
    assert "error:" not in caught(name, "barrier();", "(void)0;", number, seed)


@pytest.mark.parametrize(
    ("name", "number", "text"), [each for each in WAITS if each not in AT_THE_END]
)
def test_a_copy_not_waited_for_gives_wrong_results(name: str, number: int, text: str) -> None:
    assert caught(name, text, WEAKER[text], number, 1) == "wrong"


VOTE = "if (barrier_any(outside != 0))"
REMOVED = {"barrier();": "(void)0;", VOTE: "if (any_lane(outside != 0))"}
PART_MISTAKES = {
    "lanes read what others still wait for": ("        wave_sync();\n        slot", "        slot"),
    "each wave decides for itself": (VOTE, "barrier();\n        if (any_lane(outside != 0))"),
    "a tile is scored again without its keys": (
        "            copy_keys_at_once(slot,",
        "            if (0) copy_keys_at_once(slot,",
    ),
}


@pytest.mark.parametrize("mistake", PART_MISTAKES)
def test_a_mistake_with_parts_is_seen(mistake: str) -> None:
    """Scores grow for a few queries, so that not all waves meet weights out of bounds."""
    gfx, head_dim, dtype, config, sizes = IN_PARTS[0]
    inputs = inputs_of(head_dim, dtype, *sizes)
    inputs[1][:, 300:310] *= 16
    assert verdict(Setting(gfx, config=config), inputs) == "right"
    kernels_dir = simt.planted(PARTS, *PART_MISTAKES[mistake])
    setting = Setting(gfx, kernels_dir=kernels_dir, config=config)
    assert "error:" not in (found := verdict(setting, inputs)) and found != "right"


@pytest.mark.parametrize(
    ("name", "number", "text"), [(*place, text) for text in REMOVED for place in places(text)]
)
def test_a_removed_barrier_is_a_race(name: str, number: int, text: str) -> None:
    reason = simt.missing("thread")
    if reason:
        pytest.skip(reason)
    assert "data race" in caught(name, text, REMOVED[text], number, 1, "thread")


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 160])
def test_a_whole_tile_copied_past_the_end_is_seen(head_dim: int) -> None:
    """A pass too many in the loop of whole tiles."""
    reason = simt.missing("address,undefined")
    if reason:
        pytest.skip(reason)
    kernels_dir = simt.planted(COPIES, "(kLag + 3) * BLOCK_K", "(kLag + 2) * BLOCK_K")
    setting = Setting("sm_90", 1, "address,undefined", kernels_dir)
    report = verdict(setting, inputs_of(head_dim, "float16", 160, 300))
    assert "AddressSanitizer: heap-buffer-overflow" in report


WRONG = {
    "the tail of the keys is one too long": (
        SOFTMAX,
        "x = key_in < past ?",
        "x = key_in <= past ?",
        131,
    ),
    "a last tile that lacks one key is not masked": (
        SOFTMAX,
        "tail = first_k + BLOCK_K > seq_k();",
        "tail = first_k + BLOCK_K > seq_k() + 1;",
        127,
    ),
    "the columns after head_dim are not cleared": (
        TILES,
        "if constexpr (!kHalfTile || Unit::kSumsEight) return;",
        "return;",
        131,
    ),
    "the sum is not rescaled": (SOFTMAX, "l[t][c] *= shrink[c];", "", 131),
    "weights out of bounds are not noticed": (
        SOFTMAX,
        "if (!settled || within_limits(tallies)) break;",
        "break;",
        131,
    ),
}
"""File, text, what it becomes, number of keys."""
MOVING = ("the sum is not rescaled", "weights out of bounds are not noticed")
"""Seen where scores grow so much that the base of the weights has to move."""


@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("gfx", ["gfx1100", pytest.param("gfx942", marks=executed.always)])
def test_a_mistake_gives_wrong_results(gfx: str, mistake: str) -> None:
    name, old, new, seq_k = WRONG[mistake]
    setting = Setting(gfx, kernels_dir=simt.planted(name, old, new))
    inputs = inputs_of(40, "float16", 65, seq_k)
    if mistake in MOVING:
        inputs[1][:, 70:] *= 8
    assert verdict(setting, inputs) != "right"
    assert verdict(Setting(gfx), inputs) == "right"


@executed.always
def test_another_units_layout_gives_wrong_results() -> None:
    """RDNA3's rows of A, in RDNA4's order."""
    old = "return 8 * (lane_id() % 2) + lane_id() % 16 / 2;"
    kernels_dir = simt.planted("common/mma.h", old, "return lane_id() % 16;")
    assert verdict(Setting("gfx1100", kernels_dir=kernels_dir), inputs_of(40, "float16")) == "wrong"


OUT_OF_BOUNDS = {
    "a row of k after the last": ("common/tile.h", "min2(row, rows - 1)", "min2(row, rows)"),
    "an output row after the last": (
        "attention.hip",
        "else if (query(t) + n < (int)p.seq_q &&",
        "else if (query(t) + n <= (int)p.seq_q &&",
    ),
    "a mask's column after the last": (
        SOFTMAX,
        "+ key_in, seq_k() - 1);",
        "+ key_in, seq_k());",
    ),
    "a mask's row after the last": (
        SOFTMAX,
        "+ Unit::column(c), (int)p.seq_q - 1);",
        "+ Unit::column(c), (int)p.seq_q);",
    ),
}


@pytest.mark.parametrize("mistake", OUT_OF_BOUNDS)
def test_one_element_out_of_bounds_is_seen(mistake: str) -> None:
    reason = simt.missing("address,undefined")
    if reason:
        pytest.skip(reason)
    kernels_dir = simt.planted(*OUT_OF_BOUNDS[mistake])
    setting = Setting("gfx1200", 1, "address,undefined", kernels_dir)
    mask = random_mask((1, 1, 33, 77), "float32")
    report = verdict(setting, inputs_of(40, "float16", 33, 77), mask)
    assert "AddressSanitizer: heap-buffer-overflow" in report
