"""`python -m lib_rocm_sd replay FILE`: captured calls through every variant, against float64.

Needs no GPU: what came out where a call was captured is compared too. With one, each kernel passes
its self-test before it gets a captured call.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.commands.support import add_device, as_table, device_of
from lib_rocm_sd.lab.rows import write_json
from lib_rocm_sd.ops.base import Call

if TYPE_CHECKING:
    from lib_rocm_sd.engine.call_file import CapturedCall
    from lib_rocm_sd.ops.base import Op


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="what `capture` has written")
    add_device(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON too")


def main(args: argparse.Namespace) -> int:
    """0 if all results are within tolerance, 1 if one is not."""
    from lib_rocm_sd.engine.call_file import CallFileError, read

    device = device_of(args)
    try:
        calls = enumerate(read(args.file))
        rows = [row for number, call in calls for row in _rows(number, call, device)]
    except (CallFileError, OSError) as error:
        raise UsageError(str(error)) from error
    heads = ("call", "op", "problem", "computed by", "error", "tolerance", "")
    keys = ("call", "op", "problem", "by", "error", "tolerance", "verdict")
    print(as_table([heads, *(tuple(row[key] for key in keys) for row in rows)]))
    if args.json:
        finite = [
            {**row, "error": row["error"] if math.isfinite(row["error"]) else None} for row in rows
        ]
        write_json(args.json, {"file": args.file.name, "device": str(device), "rows": finite})
    wrong = sum(row["verdict"].startswith("WRONG") for row in rows)
    print(f"{len(rows)} results, {wrong} wrong")
    return int(bool(wrong))


def _rows(number: int, call: CapturedCall, device: Any) -> Iterator[dict[str, Any]]:
    """What was captured, then each variant here."""
    import torch

    from lib_rocm_sd.engine.call_file import CallFileError
    from lib_rocm_sd.ops.registry import op_named

    op = op_named(call.op)
    if op is None:
        raise CallFileError(f"this version has no op {call.op}")
    cpu = torch.device("cpu")
    with torch.no_grad():
        inputs = call.inputs(cpu)
        judged = partial(_judged, op, inputs, op.reference(inputs))
        about = {"call": number, "op": op.name, "problem": call.problem}
        where = ", ".join(filter(None, map(call.how.get, ("block", "variant", "config", "name"))))
        yield {**about, "by": f"captured: {where}", **judged(call.output(cpu))}
        for by, output in _computed(op, call, op.problem_of(inputs), device):
            yield {**about, "by": f"{by} on {device}", **judged(output)}


def _computed(
    op: Op[Any, Any], call: CapturedCall, problem: Any, device: Any
) -> Iterator[tuple[str, Any]]:
    """What each variant makes of a call on `device`, or the error that it raises. Variants that do
    not take it are left out.
    """
    from lib_rocm_sd.device import identify
    from lib_rocm_sd.engine import selftest
    from lib_rocm_sd.engine.engine import engine

    launch, checks = engine.launcher(device), engine.checks(problem, device, op)
    for variant in op.variants:
        inputs, check = call.inputs(device), checks.get(variant.name)
        if check is None or variant.input_refusals(inputs):
            continue
        if check.reason:
            yield variant.name, RuntimeError(f"its self-test: {check.reason}")
            continue
        config = variant.defaults(identify(device).arch, problem)[0]
        try:
            output = variant.run(Call(problem, inputs, launch, config))
        except selftest.FAILURES as error:
            if selftest.is_out_of_memory(error):
                raise
            output = error
        yield variant.name, output


def _judged(op: Op[Any, Any], inputs: Any, reference: Any, output: Any) -> dict[str, Any]:
    """How far `output` is from `reference`; or the error that there is in its place."""
    from lib_rocm_sd.engine import selftest

    problem = op.problem_of(inputs)
    tolerance = op.tolerance(problem)
    if isinstance(output, Exception):
        verdict = f"WRONG: {selftest.describe(output)}"
        return {"error": math.inf, "tolerance": tolerance, "verdict": verdict}
    dtype = op.output_dtype(problem) if op.output_dtype else inputs[0].dtype
    check = selftest.compare(output, dtype, reference, tolerance, problem)
    verdict = f"WRONG: {check.reason}" if check.reason else "right"
    return {"error": float(f"{check.error:.3g}"), "tolerance": tolerance, "verdict": verdict}
