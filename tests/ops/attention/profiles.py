"""How scores run over the keys in random problems of attention: base-2 logits, one for each key.

They are made to move the maximum that an online softmax subtracts, in every tile or in one, for all
lanes or for one, or to move it just not.
"""

from __future__ import annotations

import math
from random import Random

LANE_KEYS: tuple[tuple[int, ...], ...] = (
    tuple(range(16)),
    tuple(range(0, 16, 2)),
    tuple(range(1, 16, 2)),
    tuple(range(8)),
    tuple(range(8, 16)),
    (4, 5, 6, 7),
    (12, 13, 14, 15),
    (2, 3, 10, 11),
    (5,),
)
"""Of each sixteen keys, those whose weights one lane holds in some matrix unit; all, and one."""
SUM_EDGES = (12, 12, 12, 16)
"""A kernel may keep what it subtracts until the sum of a lane's weights exceeds 2^12, not while one
reaches 2^16, which fp16 does not hold.
"""


class Profiles:
    """Draws one for so many keys. `words` says what it is."""

    def __init__(self, rng: Random, seq_k: int) -> None:
        self.rng, self.seq_k = rng, seq_k
        self.words: list[str] = []

    def any(self) -> list[float]:
        """One of them, and perhaps an offset for all keys."""
        rng = self.rng
        shapes = (self._slope, self._dominating, self._jump, self._jump, self._stairs, self._level)
        profile = rng.choice(shapes)()
        offset = rng.choice([0.0, 0.0, 0.0, -40.0, 100.0, -700.0])
        if offset:
            self.words.append(f"{offset:+} for all keys")
        return [x + offset for x in profile]

    def low(self) -> list[float]:
        """Scores so low that their weights vanish beside that of a score of 0."""
        offset = self.rng.choice([-20.0, -30.0, -60.0, -200.0, -2000.0])
        self.words.append(f"{offset} for all keys")
        return [offset] * self.seq_k

    def _slope(self) -> list[float]:
        slope = self.rng.choice([0.02, 0.1, 0.19, 0.37, 0.8, 3.0]) * self.rng.choice([1, 1, -1])
        self.words.append(f"logits of {slope} for each key more")
        return [slope * j for j in range(self.seq_k)]

    def _level(self) -> list[float]:
        self.words.append("equal logits")
        return [0.0] * self.seq_k

    def _dominating(self) -> list[float]:
        rng, seq_k = self.rng, self.seq_k
        key = rng.choice([0, seq_k // 2, seq_k - 1, seq_k - 1 - rng.randrange(min(16, seq_k))])
        height = rng.choice([4.0, 11.0, 12.0, 13.5, 15.5, 16.5, 20.0, 100.0, 1500.0])
        self.words.append(f"key {key} leads by 2^{height}")
        return [height if j == key else 0.0 for j in range(seq_k)]

    def _edge(self, keys: int) -> float:
        """A logit at which so many weights sum to about 2^12, or 2^16."""
        away = self.rng.choice([0.0, 1e-3, 0.01, 0.1, 0.5, 1.0, 2.0]) * self.rng.choice([-1, 1])
        return self.rng.choice(SUM_EDGES) - math.log2(max(1, keys)) + away

    def _lane(self, first: int, span: int) -> list[int]:
        """Keys of one lane among `span` ones from `first` on."""
        of_sixteen = self.rng.choice(LANE_KEYS)
        return [j for j in range(first, first + span) if j % 16 in of_sixteen]

    def _jump(self) -> list[float]:
        """Some or all keys of a tile, and perhaps all after it, are higher, near the sum's edge."""
        rng, seq_k = self.rng, self.seq_k
        span = rng.choice([16, 32, 64])
        first = rng.randrange(-(-seq_k // span)) * span
        keys = [j for j in self._lane(first, span) if j < seq_k]
        if rng.random() < 0.3:
            keys = keys[: rng.randint(1, len(keys))] if keys else keys
        height = self._edge(len(keys))
        stays = rng.random() < 0.4
        self.words.append(
            f"{len(keys)} of {span} keys from {first} on higher by 2^{height:.4g}"
            + (", so all after them" if stays else "")
        )
        high = set(keys)
        return [height if j in high or (stays and j >= first + span) else 0.0 for j in range(seq_k)]

    def _stairs(self) -> list[float]:
        """A step per tile, each just below or above the edge; up, or up and down again."""
        rng = self.rng
        span = rng.choice([16, 32, 64])
        height = self._edge(rng.choice([1, 4, 8, 16, 32]))
        turns = rng.choice([False, False, True])
        self.words.append(
            f"2^{height:.4g} higher each {span} keys" + (" and back" if turns else "")
        )
        steps = [j // span for j in range(self.seq_k)]
        return [height * (step % 2 if turns else step) for step in steps]
