"""Double of ldm/util.py.

The surface was read in Stability-AI/stablediffusion cf1d67a.
"""

from inspect import isfunction


def default(val, d):
    if val is not None:
        return val
    return d() if isfunction(d) else d
