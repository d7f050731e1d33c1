"""Random problems for attention, each from one seed: what two tests and a command draw from.

A problem is hard on purpose: sizes at the edges of tiles, views of all sorts over storages whose
unused elements are NaN, masks that leave out whole tiles, and scores made to move the maximum that
an online softmax subtracts, or to move it just not. The same seed gives the same problem on every
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.dtypes import DTYPES
from tests.ops.attention.layouts import lay_out, layouts_of
from tests.ops.attention.profiles import Profiles

LOG2_E = math.log2(math.e)
TIE_SCALES = (None, -1.0, 0.125, 1e-4)


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for, besides its config. As text: float16:40:none."""

    dtype: str
    head_dim: int
    mask: str = "none"

    def __str__(self) -> str:
        return f"{self.dtype}:{self.head_dim}:{self.mask}"

    @classmethod
    def parse(cls, text: str) -> Kind:
        dtype, head_dim, mask = text.split(":")
        return cls(dtype, int(head_dim), mask)


@dataclass(frozen=True)
class Sizes:
    """How large problems get. `long_k`: keys of the few that have many."""

    name: str
    most_q: int
    most_k: int
    long_k: int
    most_heads: int


SMALL = Sizes("small", 100, 200, 520, 2)
LARGE = Sizes("large", 400, 700, 9000, 4)
TINY = Sizes("tiny", 70, 140, 140, 1)
SIZES = {sizes.name: sizes for sizes in (SMALL, LARGE, TINY)}


@dataclass(frozen=True)
class Drawn:
    """One problem: q, k, v (B, S, H, D), mask, scale. `story` says in words what is special.

    `whole`: many independent roundings come together, so torch's own error is a fair measure.
    """

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float | None]
    story: str
    whole: bool


def noise(shape: Sequence[int], seed: int, device: torch.device) -> torch.Tensor:
    """Nearly normal numbers up to 3.46, float32, from integers only: the same on every device."""
    count = math.prod(shape)
    x = torch.arange(count, dtype=torch.int64, device=device) + (seed << 32)
    for multiplier, shift in ((0x5851F42D4C957F2D, 29), (0x14057B7EF767814F, 31)):
        x = x * multiplier
        x = x ^ ((x >> shift) & 0x7FFFFFFF)
    fields = (x & 0xFFFF) + ((x >> 16) & 0xFFFF) + ((x >> 32) & 0xFFFF) + ((x >> 48) & 0xFFFF)
    return ((fields - 2 * 0xFFFF).float() * (math.sqrt(3) / 0x10000)).view(*shape)


def draw(kind: Kind, seed: int, sizes: Sizes, device: torch.device) -> Drawn:
    """The problem of this seed."""
    return _Draw(kind, seed, sizes, device).drawn()


class _Draw:
    """One problem while it is made. `rng` decides; tensors take their noise from numbers of it."""

    def __init__(self, kind: Kind, seed: int, sizes: Sizes, device: torch.device) -> None:
        self.kind, self.sizes, self.device = kind, sizes, device
        self.rng = Random(f"{kind} {sizes.name} {seed}")
        self.problem = self._problem()
        self.dtype = DTYPES[kind.dtype]
        self.scale: float | None = None
        self.whole = True
        self.mild = True
        self.ties = False
        self.behind = False
        self.words: list[str] = []

    # -- shapes ---------------------------------------------------------------------------------

    def _length(self, most: int) -> int:
        """Small, anything, or a tile's edge and its neighbours."""
        rng = self.rng
        way = rng.random()
        if way < 0.15:
            return rng.randint(1, 9)
        if way < 0.45:
            return rng.randint(1, most)
        edge = rng.choice([16, 32, 64, 128, 256])
        return max(1, min(most, edge * rng.randint(1, 4) + rng.choice([-1, 0, 1])))

    def _problem(self) -> AttentionProblem:
        rng, kind, sizes = self.rng, self.kind, self.sizes
        seq_q, seq_k = self._length(sizes.most_q), self._length(sizes.most_k)
        heads, batch = rng.randint(1, sizes.most_heads), rng.choice([1, 1, 2, 3])
        if rng.random() < 0.06:
            seq_q, seq_k = min(seq_q, 40), rng.randint(sizes.long_k // 2, sizes.long_k)
            heads, batch = min(heads, 2), 1
        elif rng.random() < 0.15:
            seq_k = seq_q
        return AttentionProblem(batch, heads, seq_q, seq_k, kind.head_dim, kind.dtype, kind.mask)

    def noise(self, *shape: int) -> torch.Tensor:
        return noise(shape, self.rng.getrandbits(30), self.device)

    # -- scores ---------------------------------------------------------------------------------

    def _scores(self) -> tuple[torch.Tensor, torch.Tensor]:
        rng = self.rng
        way = rng.random()
        if way < 0.35:
            return self._plain()
        if way < 0.42:
            return self._huge()
        return self._profiled()

    def _plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Independent numbers, and any scale."""
        p, rng = self.problem, self.rng
        self.scale = rng.choice([None, None, None, 0.05, -0.1, 0.0, 1e-6, -1.0, 0.7, 3.0])
        self.words.append(f"independent scores, scale {self.scale}")
        q = self.noise(p.batch, p.seq_q, p.heads, p.head_dim)
        k = self.noise(p.batch, p.seq_k, p.heads, p.head_dim)
        spread = abs(self.scale or p.head_dim**-0.5) * math.sqrt(p.head_dim)
        self.whole = 0.1 < spread < 2.0
        self.mild = self.scale != 0.0  # the kernel takes 1e-30, and infinity x 0 is NaN
        return q, k

    def _huge(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of +-60000: a tiny scale makes weights of their sums, or ties decide."""
        p, rng = self.problem, self.rng
        size = 60000.0
        q_shape, k_shape = ((p.batch, s, p.heads, p.head_dim) for s in (p.seq_q, p.seq_k))
        way = rng.random()
        if way < 0.7:
            q, k = (size * self.noise(*shape).sign() for shape in (q_shape, k_shape))
            if way < 0.2:  # float32 does not hold these scores: no NaN is all that can be asked
                self.words.append("all of q and k +-60000, scale None")
                self.whole = False
                return q, k
            self.scale = rng.choice([1.0, -1.0]) * rng.uniform(0.3, 1.5) / size**2
            self.scale /= math.sqrt(p.head_dim)
            self.words.append(f"all of q and k +-60000, scale {self.scale:.3g}")
            self.whole = p.head_dim >= 40  # else there are few different scores
            return q, k
        # One column of q and k: its products are exact, so those that tie share the weight.
        q = torch.zeros(q_shape, device=self.device)
        k = torch.zeros(k_shape, device=self.device)
        column = rng.randrange(p.head_dim)
        q[..., column] = size
        k[..., column] = size * (self.noise(*k_shape[:3]) > rng.choice([-1.0, 0.0, 1.5]))
        self.scale = rng.choice(TIE_SCALES)
        self.ties = True
        self.words.append(f"ties of q and k {size:.0f} in column {column}, scale {self.scale}")
        self.whole = False
        return q, k

    def _profiled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Base-2 logits that follow a profile over the keys, with or without noise on them.

        Two columns of k hold the profile, its halves and the rest that they round off.
        """
        p, rng = self.problem, self.rng
        self.scale = rng.choice([None, None, 0.2, 0.03, 1.5, -0.3])
        scale = p.head_dim**-0.5 if self.scale is None else self.scale
        over_keys = Profiles(rng, p.seq_k)
        self.behind = p.mask != "none" and p.seq_k > 32 and rng.random() < 0.3
        drawn = over_keys.low() if self.behind else over_keys.any()
        profile = torch.tensor(drawn, dtype=torch.float64)
        self.words += over_keys.words
        gain = rng.choice([0.0, 0.01, 0.3, 1.0])
        self.words.append(f"noise {gain}, scale {self.scale}")
        unit = torch.tensor(1 / (scale * LOG2_E), dtype=torch.float64).to(self.dtype).double()
        high = (profile / (unit * scale * LOG2_E)).to(self.dtype)
        low = (profile / (unit * scale * LOG2_E) - high.double()).to(self.dtype)
        q = self.noise(p.batch, p.seq_q, p.heads, p.head_dim)
        q *= gain / (abs(scale) * math.sqrt(p.head_dim))
        k = self.noise(p.batch, p.seq_k, p.heads, p.head_dim)
        first, second = rng.sample(range(p.head_dim), 2)
        k[..., first] = high.float().to(self.device)[None, :, None]
        k[..., second] = low.float().to(self.device)[None, :, None]
        share = self._share()[None, :, None].to(self.device) * unit.item()
        q[..., first], q[..., second] = share, share
        self.whole = False
        return q, k

    def _share(self) -> torch.Tensor:
        """How much of the profile each query sees."""
        p, rng = self.problem, self.rng
        who = rng.choice(["all", "all", "one query", "all but one", "every other", "reversed"])
        query = rng.randrange(p.seq_q)
        share = torch.ones(p.seq_q)
        if who == "one query":
            share = torch.zeros(p.seq_q)
            share[query] = 1.0
        elif who == "all but one":
            share[query] = 0.0
        elif who == "every other":
            share[rng.randrange(2) :: 2] = 0.0
        elif who == "reversed":
            share[rng.randrange(2) :: 2] = -1.0
        self.words.append(f"for {who}" + (f" {query}" if "one" in who else ""))
        return share

    # -- values, mask, layout -------------------------------------------------------------------

    def _values(self) -> torch.Tensor:
        p, rng = self.problem, self.rng
        v = self.noise(p.batch, p.seq_k, p.heads, p.head_dim)
        way = rng.choice(["", "", "", "", "ones", "around 100", "extreme", "small", "one key"])
        if way == "ones":
            v = torch.ones_like(v)
        elif way == "around 100":
            v = v + 100.0
        elif way == "extreme":
            v = v.sign() * (60000.0 if p.dtype == "float16" else 1e30)
        elif way == "small":
            v = v * 1e-3
        elif way == "one key":
            key = rng.randrange(p.seq_k)
            v[:, :key], v[:, key + 1 :] = 0.0, 0.0
        if way:
            self.words.append(f"values: {way}")
        self.whole &= way in ("", "small")  # signs alone cancel in steps
        return v

    def _mask(self) -> torch.Tensor | None:
        p, rng = self.problem, self.rng
        if p.mask == "none":
            return None
        full = (p.batch, p.heads, p.seq_q, p.seq_k)
        shape = [size if rng.random() < 0.6 else 1 for size in full[:3]] + [p.seq_k]
        if rng.random() < 0.08:
            shape = [*shape[:2], p.seq_q, 1]
        keep = self._kept(shape)
        if p.mask == "bool":
            mask = keep
        else:
            out, size = self._left_out(), rng.choice([0.0, 0.5, 0.5, 3.0])
            if self.ties:  # float32 holds nothing beside such scores
                out, size = -math.inf, 0.0
            self.whole &= out == -math.inf
            self.mild &= size < 1.0  # so that no weight is zero in halves and not in float64
            self.words.append(f"bias {size}, left out {out:.3g}")
            mask = (size * self.noise(*shape)).masked_fill(~keep, out).to(DTYPES[p.mask])
        self.words.append(f"mask {tuple(shape)}")
        return self._mask_view(mask)

    def _left_out(self) -> float:
        info = torch.finfo(DTYPES[self.problem.mask])
        return self.rng.choice([-math.inf, -math.inf, -math.inf, -1e4, -60000.0, info.min])

    def _kept(self, shape: Sequence[int]) -> torch.Tensor:
        rng, seq_k = self.rng, self.problem.seq_k
        keep = self.noise(*shape) > rng.choice([-3.5, -0.5, -0.5, 1.5])
        keys = torch.arange(shape[-1], device=self.device)
        if self.behind:  # low scores, and tiles without any before them
            first = min(seq_k - 1, rng.choice([32, 64, 65, 96, 128, seq_k // 2]))
            self.words.append(f"nothing before key {first}")
            return (keys >= first).expand(shape).clone()
        if rng.random() < 0.35:
            first = rng.randint(0, seq_k)
            self.words.append(f"nothing before key {first}")
            keep &= keys >= first
        if rng.random() < 0.2:
            last = rng.randint(0, seq_k)
            self.words.append(f"nothing from key {last} on")
            keep &= keys < last
        if rng.random() < 0.15:
            queries = torch.arange(shape[-2], device=self.device)
            self.words.append("causal")
            keep &= keys <= queries[:, None]
        if rng.random() < 0.5:
            keep[..., 0] = True
        if rng.random() < 0.3:
            keep[..., rng.randrange(shape[-2]), :] = False
            self.words.append("a query without keys")
        return keep

    def _mask_view(self, mask: torch.Tensor) -> torch.Tensor:
        way = self.rng.choice(["", "", "transposed", "every other", "fewer dimensions"])
        if way == "transposed":
            return mask.mT.contiguous().mT
        if way == "every other":
            return torch.stack([mask, ~mask if mask.dtype == torch.bool else -mask], -1)[..., 0]
        if way == "fewer dimensions" and mask.shape[0] == 1 and mask.shape[1] == 1:
            return mask[0, 0]
        return mask

    def _plant(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """NaN or infinity at a few places."""
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            name, x = rng.choice([("q", q), ("k", k), ("v", v)])
            place = tuple(rng.randrange(size) for size in x.shape)
            x[place] = rng.choice([math.nan, math.inf, -math.inf])
            self.words.append(f"{name}{list(place)} is {x[place].item()}")

    def drawn(self) -> Drawn:
        rng, p = self.rng, self.problem
        q, k = self._scores()
        v = self._values()
        mask = self._mask()
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        if self.whole and self.mild and rng.random() < 0.3:
            self.whole = False
            self._plant(q, k, v)
        names = layouts_of(rng)
        q, k, v = (lay_out(x, name) for x, name in zip((q, k, v), names, strict=True))
        enough = min(p.seq_q, p.seq_k) >= 16 and q.numel() >= 1000
        self.whole &= enough and "repeated" not in " ".join(names)
        self.words.append(f"layouts {', '.join(names)}")
        return Drawn((q, k, v, mask, self.scale), f"{p}: {'; '.join(self.words)}", self.whole)
