"""Forms and fields of instructions by our tables, compared with tinygrad's own decoder."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version

import pytest

pytest.importorskip("tinygrad", reason="it decodes instructions")

from lib_rocm_sd.arch import by_gfx
from lib_rocm_sd.ops.base import KernelSpec
from tests import executed, noted
from tests.verify.amdgpu import decode, forms
from tests.verify.amdgpu.cases import shipped_specs
from tests.verify.amdgpu.decode import FAMILIES
from tests.verify.amdgpu.launch import built, missing
from tests.verify.amdgpu.loader import load
from tests.verify.amdgpu.test_amdgpu_kernels import GPUS

EACH = 8


def chosen(gfx: str) -> list[KernelSpec]:
    """One kernel of each entry."""
    every = sorted(shipped_specs(gfx), key=repr)
    return list({spec.entry: spec for spec in every}.values())


def parts(codes: noted.Codes, gfx: str) -> object:
    """What is decoded, our decoder, and theirs."""
    arch = by_gfx(gfx)
    assert arch is not None
    of = [codes.of(spec, arch) for spec in chosen(gfx)]
    return of, executed.texts(forms, decode), version("tinygrad")


@executed.known(by="clang", parts=parts)
@pytest.mark.parametrize("gfx", [gfx for gfx in GPUS if FAMILIES[gfx] != "rdna2"])
def test_forms_and_fields_are_tinygrads(gfx: str) -> None:
    """Of eight of each instruction in each of its forms, of one kernel of each entry."""
    from tinygrad.renderer.amd import decode_inst

    reason = missing(gfx)
    if reason:
        pytest.skip(reason)
    arch = by_gfx(gfx)
    assert arch is not None
    family = FAMILIES[gfx]
    compared: Counter[tuple[str, str]] = Counter()
    for spec in chosen(gfx):
        for ins in load(built(spec, arch), spec.entry).instructions:
            if ins.raw is None or compared[ins.form, ins.name] == EACH:
                continue
            compared[ins.form, ins.name] += 1
            theirs = decode_inst(ins.raw.to_bytes() + bytes(16), family)
            assert type(theirs) is type(ins.raw) and theirs == ins.raw
            for name, _ in theirs._fields:
                value = getattr(theirs, name)
                number = getattr(value, "offset", getattr(value, "value", value))
                assert ins.get(name, -1) == number, (name, theirs)
    assert len(compared) > 100


@pytest.mark.parametrize("word", [0xFFFFFFFF, 0xF8000000, 0xC0000000])
@pytest.mark.parametrize("family", ["rdna3", "rdna4", "cdna"])
def test_what_is_no_instruction_is_refused_like_there(family: str, word: int) -> None:
    from tinygrad.renderer.amd import detect_format

    window = word.to_bytes(4, "little") * 4
    try:
        theirs = detect_format(window, family)
    except ValueError:
        with pytest.raises(ValueError, match="unknown"):
            forms.decode(window, family)
    else:
        assert type(forms.decode(window, family)) is type(theirs.from_bytes(window))
