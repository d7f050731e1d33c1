"""tinygrad's forms of instructions as tables: which one some bits are, and each field as a number.

Its own decoder tries one form after the other and makes an object of each operand: that took more
time than most kernels take to be executed. test_amdgpu_forms.py compares the two.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from tests.verify.amdgpu.rdna2 import Encoded, Field

_HIGH = 23
"""Of the first word, the bits from here on choose among forms."""
_WORDS_BEHIND = ("_LIT", "_DPP8", "_DPP16", "_SDWA")
_LITERAL, _SDWA, _DPP16 = 255, 249, 250


class Place(NamedTuple):
    """Where a field is. The number is (bits << shift) + first."""

    name: str
    low: int
    mask: int
    shift: int
    first: int


def decode(window: bytes, family: str) -> Any:
    """tinygrad's object for the instruction at the beginning of these bytes. Raises ValueError."""
    word = int.from_bytes(window[:4], "little")
    for form in _candidates(family, word >> _HIGH):
        if _fits(form, window):
            return _made(form, window)
    raise ValueError(f"unknown {family} format, {word:#010x}")


@cache
def _candidates(family: str, high: int) -> list[Any]:
    """The forms whose fixed bits are not other than these."""
    from tinygrad.renderer.amd import _load_formats
    from tinygrad.renderer.amd.dsl import FixedBitField

    found = []
    for form in _load_formats()[family]:
        fixed = [f for _, f in form._fields if isinstance(f, FixedBitField) and f.hi < 32]
        mask = sum(f.mask << f.lo for f in fixed) >> _HIGH
        value = sum(f.default << f.lo for f in fixed) >> _HIGH
        if high & mask == value:
            found.append(form)
    return found


def _fits(form: Any, window: bytes) -> bool:
    fixed, value, words, choices = _tests(form)
    bits = int.from_bytes(window, "little")
    if len(window) < words or bits & fixed != value:
        return False
    return all(bits >> low & mask in allowed for low, mask, allowed in choices)


@cache
def _tests(form: Any) -> tuple[int, int, int, tuple[tuple[int, int, frozenset[int]], ...]]:
    """Which bits are fixed and what they are, how many bytes that takes, and which numbers some
    other bits may be.
    """
    from tinygrad.renderer.amd import _VARIANT_SRC0
    from tinygrad.renderer.amd.dsl import EnumBitField, FixedBitField

    fields = [field for _, field in form._fields]
    fixed = [each for each in fields if isinstance(each, FixedBitField)]
    choices = [
        (each.lo, each.mask, frozenset(int(op.value) for op in each.allowed))
        for each in fields
        if isinstance(each, EnumBitField) and each.allowed is not None
    ]
    codes = (code for end, code in _VARIANT_SRC0.items() if form.__name__.endswith(end))
    choices += [(0, 0x1FF, frozenset([code])) for code in codes][:1]
    words = max(each.lo // 32 + 1 for each in fields)
    mask = sum(each.mask << each.lo for each in fixed)
    return mask, sum(each.default << each.lo for each in fixed), 4 * words, tuple(choices)


def _made(form: Any, window: bytes) -> Any:
    raw = object.__new__(form)
    raw._raw = int.from_bytes(window[: form._base_size], "little")
    other = _longer(form, raw)
    return raw if other is None else _made(other, window)


def _longer(form: Any, raw: Any) -> Any:
    """The form with another word behind it that an operand asks for; None where there is none."""
    from tinygrad.renderer.amd.dsl import _get_variant

    pair, sources = _asking(form)
    if any(part in getattr(raw, name).name for name in pair for part in ("FMAMK", "FMAAK")):
        return _get_variant(form, "_LIT")
    for _, low, mask, shift, first in sources:
        code = ((raw._raw >> low & mask) << shift) + first
        if code in (_LITERAL, _SDWA, _DPP16):
            short = "_SDWA" if raw._is_cdna() else "_DPP8"
            suffix = {_LITERAL: "_LIT", _SDWA: short, _DPP16: "_DPP16"}[code]
            return _get_variant(form, suffix)
    return None


@cache
def _asking(form: Any) -> tuple[tuple[str, ...], tuple[Place, ...]]:
    """The two opcodes of a pair, and the operands; nothing of a form with another word."""
    from tinygrad.renderer.amd.dsl import SrcField

    if any(part in form.__name__ for part in _WORDS_BEHIND):
        return (), ()
    operands = {name for name, field in form._fields if isinstance(field, SrcField)}
    pair = tuple(name for name in ("opx", "opy") if hasattr(form, name))
    return pair, tuple(place for place in places(form) if place.name in operands)


@cache
def places(form: Any) -> tuple[Place, ...]:
    """The fields of a form, tinygrad's or ours."""
    if issubclass(form, Encoded):
        fields = {
            name: field
            for each in reversed(form.__mro__)
            for name, field in vars(each).items()
            if isinstance(field, Field)
        }
        return tuple(
            Place(name, f.low, f.mask, f.scale.bit_length() - 1, f.first)
            for name, f in fields.items()
        )
    return tuple(_place(name, field) for name, field in form._fields)


def _place(name: str, field: Any) -> Place:
    from tinygrad.renderer.amd.dsl import AlignedSGPRField, SrcField

    shift = field._align.bit_length() - 1 if isinstance(field, AlignedSGPRField) else 0
    first = field._valid_range[0] if isinstance(field, SrcField) else 0
    return Place(name, field.lo, field.mask, shift, first)


def numbers(raw: Any) -> dict[str, int]:
    """Each field as the number that stands for it; a register as its 9-bit source code."""
    bits = raw.bits if isinstance(raw, Encoded) else raw._raw
    form: Any = type(raw)
    found = {
        name: ((bits >> low & mask) << shift) + first
        for name, low, mask, shift, first in places(form)
    }
    if "vdsty" in found:  # of a pair: the other one's lowest bit, turned
        found["vdsty"] = 256 + (found["vdsty"] << 1 | ~found["vdstx"] & 1)
    return found
