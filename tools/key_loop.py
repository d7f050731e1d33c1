"""What attention executes in one pass of its loop over the keys, all waves together: by executing
its machine code on the CPU with two lengths of keys, or by the usual way through the loop.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.lab import listing
from lib_rocm_sd.lab.cycles import Kind, Mix, work_of
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.attention.inputs import AttentionInputs
from lib_rocm_sd.ops.attention.kernel import AttentionConfig
from lib_rocm_sd.ops.attention.ours import MatrixAttention
from lib_rocm_sd.ops.attention.problem import AttentionProblem
from lib_rocm_sd.ops.base import Call, KernelSpec
from lib_rocm_sd.runtime import build, codeobject, process
from tests.verify.amdgpu import executor, launch
from tests.verify.simt.attention import draw
from tools import pairs
from tools.pairs import Chunks


def compiler_for(arch: Arch) -> str:
    """Which of the tests' compilers knows a row: the clang in PATH, else the one in ziglang."""
    found = launch.compiler()
    return "clang" if found and not found.refusals(arch) else "ziglang"


def compiler_version(arch: Arch | None = None) -> str:
    """The first words of what our kernels' compiler says of itself, without the packager's."""
    found = launch.compiler(compiler_for(arch) if arch else "clang")
    said = process.run([*found.program, "--version"], 20.0).output if found else ""
    version = re.search(r"clang version \d+\.\d+\.\d+", said)
    return version[0] if version else "clang"


def built(
    arch: Arch, dtype: str, head_dim: int, config: AttentionConfig
) -> tuple[KernelSpec, bytes]:
    """The kernel without a mask, and its code object. Raises CompileError."""
    spec = attention_kernel.spec(dtype, head_dim, "none", config)
    return spec, launch.built(spec, arch, name=compiler_for(arch))


def resources(
    arch: Arch, dtype: str, head_dim: int, config: AttentionConfig
) -> codeobject.KernelResources:
    """Of the kernel without a mask. Raises CompileError."""
    spec, code = built(arch, dtype, head_dim, config)
    (found,) = (each for each in codeobject.resources(code) if each.name == spec.entry)
    return found


def executed_pass(arch: Arch, dtype: str, head_dim: int, config: AttentionConfig) -> Mix:
    """By executing three and two tiles of keys. Raises CompileError, ExecutionError."""
    return mix_between(
        *(_executed(arch, dtype, head_dim, config, tiles * config.block_k) for tiles in (3, 2))
    )


def executed_group(
    arch: Arch, dtype: str, head_dim: int, config: AttentionConfig, seq_k: int
) -> Mix:
    """All that one work-group executes for so many keys. Raises CompileError, ExecutionError."""
    counts = _executed(arch, dtype, head_dim, config, seq_k)
    return mix_between(counts, executor.Counts(counts.wave_size, 0, (), ()))


def _executed(
    arch: Arch, dtype: str, head_dim: int, config: AttentionConfig, seq_k: int
) -> executor.Counts:
    problem = AttentionProblem(1, 1, config.block_q, seq_k, head_dim, dtype, "none")
    q, k, v = draw(problem)
    run = launch.CodeLaunch(arch)
    with run.knows(q, k, v):
        MatrixAttention().run(Call(problem, AttentionInputs(q, k, v), run, config))
    return run.counts[-1]


def mix_between(longer: executor.Counts, shorter: executor.Counts) -> Mix:
    """What one run executed more than another of the same kernel, all waves together."""
    names = longer.by_name()
    names.subtract(shorter.by_name())
    counts: Counter[Kind] = Counter()
    matrix: Counter[str] = Counter()
    slots = 0
    for name, count in names.items():
        if name == "V_DUAL":
            counts[Kind.VECTOR] += 2 * count
            slots += count
            continue
        work = work_of(name.lower())
        counts[work.kind] += count
        if work.kind is Kind.VECTOR:
            slots += work.slots * count
        elif work.kind is Kind.MATRIX:
            matrix[name.lower()] += count
    moved = [each.loaded_bytes + each.stored_bytes for each in (longer, shorter)]
    lds_bytes = longer.lds_bytes - shorter.lds_bytes
    return Mix(
        dict(counts), slots, names["V_DUAL"], lds_bytes, moved[0] - moved[1], 0, dict(matrix)
    )


def usual_pass(arch: Arch, dtype: str, head_dim: int, config: AttentionConfig) -> Mix:
    """By the usual way through the loop, times the waves. Raises CompileError, NoListingError and
    the ValueErrors of pairs.usual_pass.
    """
    spec, code = built(arch, dtype, head_dim, config)
    made = build.CodeObject(code, compiler_for(arch), False, 0.0)
    function, _ = listing.listing(spec, arch, made)
    waves = config.block // arch.wave_size
    padded = (head_dim + 15) // 16 * 16
    row_bytes = 2 * config.block_k // waves
    chunks = [
        Chunks(padded // config.chunk_d, row_bytes * min(config.chunk_d, head_dim)),
        Chunks(config.block_k // config.chunk_k, 2 * config.chunk_k * head_dim // waves),
    ]
    whole = all(each.passes == 1 for each in chunks)
    one_wave = pairs.usual_pass(function, arch, 2 * row_bytes * head_dim, () if whole else chunks)
    return replace(
        one_wave,
        counts={kind: waves * count for kind, count in one_wave.counts.items()},
        vector_slots=waves * one_wave.vector_slots,
        dual_pairs=waves * one_wave.dual_pairs,
        lds_bytes=waves * one_wave.lds_bytes,
        global_bytes=waves * one_wave.global_bytes,
        scratch_bytes=waves * one_wave.scratch_bytes,
        matrix_names={name: waves * count for name, count in one_wave.matrix_names.items()},
    )
