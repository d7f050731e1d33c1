"""`python -m lib_rocm_sd replay FILE`: captured calls through every variant, against float64.

Needs no GPU: what came out where a call was captured is compared too. With one, each kernel passes
its self-test before it gets a captured call.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib_rocm_sd.commands.support import as_table

if TYPE_CHECKING:
    from lib_rocm_sd.engine.call_file import Call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="what `capture` has written")
    parser.add_argument("--device", default="", help="cpu, or cuda:N (default: a GPU if there is)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON too")


def main(args: argparse.Namespace) -> int:
    """0 if all results are within tolerance, 1 if one is not, 2 where FILE cannot be read."""
    import torch

    from lib_rocm_sd.engine.call_file import CallFileError, read

    device = torch.device(args.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    try:
        calls = enumerate(read(args.file))
        rows = [row for number, call in calls for row in _rows(number, call, device)]
    except (CallFileError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    heads = ("call", "op", "problem", "computed by", "error", "tolerance", "")
    keys = ("call", "op", "problem", "by", "error", "tolerance", "verdict")
    print(as_table([heads, *(tuple(row[key] for key in keys) for row in rows)]))
    if args.json:
        about = {"file": args.file.name, "device": str(device), "rows": rows}
        args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    wrong = sum(row["verdict"].startswith("WRONG") for row in rows)
    print(f"{len(rows)} results, {wrong} wrong")
    return int(bool(wrong))


def _rows(number: int, call: Call, device: Any) -> Iterator[dict[str, Any]]:
    """What was captured, then each variant here."""
    import torch

    from lib_rocm_sd.device import identify
    from lib_rocm_sd.engine import selftest
    from lib_rocm_sd.engine.engine import engine
    from lib_rocm_sd.ops.registry import ops

    op = next((op for op in ops() if op.name == call.op), None)
    if op is None:
        raise ValueError(f"this version has no op {call.op}")
    cpu = torch.device("cpu")
    with torch.no_grad():
        inputs = call.inputs(cpu)
        problem, reference = op.problem_of(inputs), op.reference(inputs)
        about = {"call": number, "op": op.name, "problem": call.problem}

        def row(by: str, output: Any) -> dict[str, Any]:
            wanted = op.output_dtype(problem) if op.output_dtype else inputs[0].dtype
            found = selftest.compare(output, wanted, reference, op.tolerance(problem), problem)
            verdict = f"WRONG: {found.reason}" if found.reason else "right"
            figures = {"error": float(f"{found.error:.3g}"), "tolerance": found.tolerance}
            return {**about, "by": by, **figures, "verdict": verdict}

        where = f"captured: {call.how['variant']}, {call.how['config']}, {call.how['name']}"
        yield row(where, call.output(cpu))
        checks = engine.checks(problem, device, op)
        launch = engine.launcher(device)
        for variant in op.variants:
            given = call.inputs(device)
            check, why = checks.get(variant.name), variant.input_refusals(given)
            if check is None or check.reason or why:
                continue  # not for this device, or barred by its self-test: doctor tells
            config = variant.defaults(identify(device).arch, problem)[0]
            yield row(f"{variant.name} on {device}", variant.run(launch, config, problem, given))
