"""torch and its `functional`, imported when something of them is first used.

So ops can be listed, and asked which kernels they launch, where there is no torch, or where nobody
wants to wait for it: install.py, `compile`, `inspect`. Where torch is there already, as in a host,
these are torch's own modules.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.modules.get("torch"):
    import torch as torch
    import torch.nn.functional as F  # noqa: N812 - the name that every torch user knows
else:

    class _Later(ModuleType):
        """Stands for a module that is not imported yet; its users then get the module itself."""

        def __getattr__(self, name: str) -> Any:
            module = importlib.import_module(self.__name__)
            house = __name__.partition(".")[0]
            for user in [m for title, m in sys.modules.items() if title.startswith(house)]:
                for key in [key for key, value in vars(user).items() if value is self]:
                    setattr(user, key, module)
            return getattr(module, name)

    torch, F = _Later("torch"), _Later("torch.nn.functional")


def is_there() -> bool:
    """Whether torch is imported. Who asks what a torch can do where there is none supposes a new
    one: so kernels are compiled ahead.
    """
    return bool(sys.modules.get("torch"))
