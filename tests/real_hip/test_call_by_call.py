"""HIP's double says what HIP 5.7.1 says, to each call with good and bad arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from lib_rocm_sd.arch import table
from lib_rocm_sd.runtime import process
from tests.real_hip import calls
from tests.real_hip.debian import LIMIT_S, Card
from tests.trials.scaling import SPEC
from tests.verify import hip_library
from tests.verify.amdgpu import launch

STRICTER = {
    **{f"{way}, kind {kind}": 1 for way in ("write", "read") for kind in (0, 3, 4, -1)},
    **{"stream 0": 1, "launch lds 16": 1, "launch size 8": 1, "launch size 40": 1},
}
"""What HIP takes, and what would be a mistake of ours."""
UNKNOWN = {"launch block (128, 1, 1)": 719}
"""What HIP refuses by a code object's metadata, which the double does not read."""


@pytest.mark.parametrize("card", [("trixie", "gfx1100")], indirect=True, ids=["trixie"])
def test_the_double_says_what_hip_says(card: Card, tmp_path: Path) -> None:
    codes = [launch.built(SPEC, table()[gfx]) for gfx in (card.row.gfx, "gfx1030")]
    files = [str(tmp_path / str(place)) for place in range(len(codes))]
    for file, code in zip(files, codes, strict=True):
        Path(file).write_bytes(code)
    done = process.run([sys.executable, calls.__file__, card.library, *files], limit_s=LIMIT_S)
    assert not done.trouble, done.output
    real, words = json.loads(done.output.splitlines()[-1])
    assert card.paper.wrong == [] and len(real) > 250
    library = hip_library.opened(hip_library.built(tmp_path))
    library.test_set_machine(hip_library.MACHINES[card.row.gfx])
    double, said = calls.answers(library, *codes)
    assert said == words
    for name, status in {**STRICTER, **dict.fromkeys(UNKNOWN, 0)}.items():
        for each in (name, f"last error of {name}"):
            assert double.pop(each) == status
            assert real.pop(each) == UNKNOWN.get(name, 0)
    assert double == real
