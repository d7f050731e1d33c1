"""Double of modules/errors.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
report() prints and records; record_exception() records in silence.
"""

import sys
import traceback

records = []
recorded: list = []


def report(message: str, *, exc_info: bool = False) -> None:
    text = traceback.format_exc() if exc_info else ""
    records.append(f"{message}\n{text}")
    print("***", message, text, file=sys.stderr)


def display(e: Exception, task, *, full_traceback=False):
    report(f"{task or 'error'}: {type(e).__name__}: {e}", exc_info=True)


def record_exception():
    recorded.append(sys.exc_info()[1])
