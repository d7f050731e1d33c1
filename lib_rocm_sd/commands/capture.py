"""`python -m lib_rocm_sd capture FILE -- COMMAND`: run a host, and keep calls of our ops in a file.

Nothing is recorded as a graph meanwhile, since a replayed graph makes no calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from lib_rocm_sd.checks import UsageError
from lib_rocm_sd.ops.registry import FAMILIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", default="", help=f"a name or one of {', '.join(FAMILIES)}; or all")
    parser.add_argument("--block", default="", help="only the UNet's block of this name, or in it")
    parser.add_argument("--calls", type=int, default=16, help="how many to keep (default: 16)")
    parser.add_argument("--skip", type=int, default=0, help="how many to let pass before")
    parser.add_argument("file", type=Path, help="to be written: NAME.safetensors")
    parser.add_argument("host", nargs=argparse.REMAINDER, help="-- and the command of the host")


def main(args: argparse.Namespace) -> int:
    """The host's exit status; 1 if no call was made."""
    from lib_rocm_sd.engine.call_file import VARIABLE, Wish
    from lib_rocm_sd.ops.registry import ops

    known = {*FAMILIES, *(op.name for op in ops())}
    command = args.host[1:] if args.host[:1] == ["--"] else args.host
    if args.op and args.op not in known:
        raise UsageError(f"no op is called {args.op}; known: {', '.join(sorted(known))}")
    if not command or args.calls < 1 or args.skip < 0:
        raise UsageError(
            "give -- and the host's command, --calls of 1 or more, --skip of 0 or more"
        )
    wish = Wish(str(args.file.resolve()), args.op, args.block, args.calls, args.skip)
    environment = {VARIABLE: json.dumps(dataclasses.asdict(wish)), "ROCM_SD_GRAPHS": "0"}
    args.file.unlink(missing_ok=True)
    try:
        status = subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
    except OSError as error:
        raise UsageError(str(error)) from error
    if not args.file.is_file():
        print("capture: no such call was made; does the host use our kernels?", file=sys.stderr)
        return status or 1
    print(f"capture: {args.file}; python -m lib_rocm_sd replay {args.file}")
    return status
