"""Atomic accesses to global memory: one lane after the other, in the order of waves and lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.verify.amdgpu import vmem
from tests.verify.amdgpu.decode import Instruction
from tests.verify.amdgpu.errors import OutOfBoundsError, UnsupportedError
from tests.verify.amdgpu.operands import vgpr
from tests.verify.amdgpu.salu import Step
from tests.verify.amdgpu.state import LDS, LOAD, STORE, Waves

Array = np.ndarray[Any, Any]
Change = Callable[[Any, Any], Any]
_OLD_NAME = re.compile(r"([SU]?)(SWAP|CMPSWAP|ADD|SUB|MIN|MAX|AND|OR|XOR|INC|DEC)(_X2)?")
_NEW_NAME = re.compile(r"(SWAP|CMPSWAP|ADD|SUB|MIN|MAX|AND|OR|XOR|INC|DEC)_([BUI])(32|64)")
_CHANGES: dict[str, Change] = {  # what memory holds, what the lane brings
    "SWAP": lambda held, own: own,
    "ADD": lambda held, own: held + own,
    "SUB": lambda held, own: held - own,
    "MIN": min,
    "MAX": max,
    "AND": lambda held, own: held & own,
    "OR": lambda held, own: held | own,
    "XOR": lambda held, own: held ^ own,
    "INC": lambda held, own: held + type(held)(1) if held < own else type(held)(0),
    "DEC": lambda held, own: own if held == 0 or held > own else held - type(held)(1),
}


def compile_atomic(ins: Instruction, place: int, space: vmem.Space) -> Step | None:
    """The step; None where the instruction is another's. Raises UnsupportedError."""
    match = re.match(r"(GLOBAL|FLAT)_ATOMIC_(.*)", ins.name)
    if match is None:
        return None
    operation, dtype = _parsed(match[2])
    size = np.dtype(dtype).itemsize
    address, words = vmem._address(ins), size // 4
    first = vmem._data_register(ins, load=False)
    count = words * (2 if operation == "CMPSWAP" else 1)
    reads = [vgpr(first + each, "u32") for each in range(count)]
    returned = vmem._data_register(ins, load=True) if _returns(ins) else -1
    counter = LOAD if returned >= 0 or ins.family == "cdna" else STORE
    is_flat = match[1] == "FLAT"

    def step(b: Waves) -> None:
        at = address(b)
        data = np.stack([read(b)[b.exec] for read in reads], axis=1).view(dtype)
        b.issue(counter)
        if is_flat:
            b.issue(LDS)
        if b.exec.any():
            try:
                space.races.atomic(b, ins, at[b.exec], size, counter)
                before = _changed(space, at[b.exec], data, operation, dtype)
            except OutOfBoundsError as error:
                raise vmem._named(error, b) from None
            vmem._count(space, place, b, at, size, store=True)
            for word in range(words if returned >= 0 else 0):
                b.vl[returned + word][b.exec] = before.view(np.uint32)[:, word]
        for word in range(words if returned >= 0 else 0):
            b.expect_v(returned + word, counter)

    return step


def _parsed(name: str) -> tuple[str, Any]:
    """Operation and kind of number."""
    if name == "ADD_F32":
        return "ADD", np.float32
    if match := _OLD_NAME.fullmatch(name):
        return match[2], _integer(match[1] == "S", bool(match[3]))
    if match := _NEW_NAME.fullmatch(name):
        return match[1], _integer(match[2] == "I", match[3] == "64")
    raise UnsupportedError(f"atomic {name}")


def _integer(signed: bool, wide: bool) -> Any:
    return np.dtype(f"{'i' if signed else 'u'}{8 if wide else 4}").type


def _returns(ins: Instruction) -> bool:
    """Whether a register takes what memory held before."""
    if ins.family == "rdna4":
        return bool(ins.get("th") & 1)
    return bool(ins.get("sc0" if ins.family == "cdna" else "glc"))


def _changed(space: vmem.Space, at: Array, data: Array, operation: str, dtype: Any) -> Array:
    """(n,) addresses; (n, 1) operands, or (n, 2) of what is new and what is compared. Gives what
    each lane found, (n, 1).
    """
    size = np.dtype(dtype).itemsize
    if (at % np.uint64(size)).any():
        raise UnsupportedError("an atomic access that is not aligned")
    found = np.empty((len(at), 1), dtype)
    space.memory.load(at, size)  # all at once, so that an error names its lane
    for lane in range(len(at)):
        one = slice(lane, lane + 1)
        found[one] = space.memory.load(at[one], size).view(dtype)
        held, own = found[lane, 0], data[lane, 0]
        if operation == "CMPSWAP":
            after = own if held == data[lane, 1] else held
        else:
            after = _CHANGES[operation](held, own)
        space.memory.store(at[one], np.array([[after]], dtype).view(np.uint8))
    return found
