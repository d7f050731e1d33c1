"""Looking at modules that others wrote: known children, plain settings, nothing replaced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

_CONV_CLASSES = {"torch.nn.modules.conv.Conv2d", "diffusers.models.lora.LoRACompatibleConv"}
_LINEAR_CLASSES = {"torch.nn.modules.linear.Linear", "diffusers.models.lora.LoRACompatibleLinear"}
_OURS = "lib_rocm_sd"


class UnknownModuleError(ValueError):
    """The module has a structure that is not known; `reasons` say what."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__(f"this module cannot be run: {'; '.join(reasons)}")
        self.reasons = reasons


class Findings:
    """Collects reasons while a module is read. Each method returns what it can.

    `family` is the Python module, or package, that must define the classes of all blocks.
    """

    def __init__(self, family: str) -> None:
        self.reasons: list[str] = []
        self._family = family

    def add(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)

    def block(
        self,
        module: Any,
        name: str,
        classes: Iterable[str],
        children: Iterable[str],
        *,
        own_forward: bool = True,
        root: bool = False,
    ) -> bool:
        """True if `module` is of one of `classes`; notes children other than `children`.

        `own_forward` False: the class's forward may come from elsewhere, as optimizers of attention
        set it. `root`: forward hooks are the caller's business.
        """
        if not isinstance(module, nn.Module):
            self.add(f"{name} is missing")
            return False
        cls = type(module)
        at_home = f"{cls.__module__}.".startswith(f"{self._family}.") or cls is nn.Module
        if cls.__name__ not in set(classes) or not at_home:
            self.add(f"{name} is a {cls.__name__} of {cls.__module__}")
            return False
        own = {key for key, child in module._modules.items() if child is not None}
        for key in sorted(own - set(children)):
            self.add(f"{name} has a {key}")
        parameters = module._parameters | module._buffers
        for key in sorted(key for key, value in parameters.items() if value is not None):
            self.add(f"{name} has a parameter {key} of its own")
        self.untouched(module, name, root=root)
        if own_forward:
            self._class_forward(cls, name)
        return True

    def untouched(self, module: nn.Module, name: str, *, root: bool = False) -> None:
        """Notes hooks, and a forward set on the instance unless it is the class's own."""
        for key in ("forward", "_conv_forward"):
            own = module.__dict__.get(key)
            ours = str(getattr(own, "__module__", "")).startswith(_OURS)
            if own is not None and not ours and not is_the_classs(own, module, key):
                self.add(f"{name}.{key} has been replaced")
        if not root and (module._forward_hooks or module._forward_pre_hooks):
            self.add(f"{name} has forward hooks")

    def _class_forward(self, cls: type, name: str) -> None:
        """Notes a forward that another module has put into the class."""
        owner = next((base for base in cls.__mro__ if "forward" in base.__dict__), None)
        if owner is None:
            return
        source = str(getattr(owner.__dict__["forward"], "__module__", ""))
        if source != owner.__module__ and not source.startswith(_OURS):
            self.add(f"{name}: {cls.__name__}.forward has been replaced by {source}")

    def conv(self, module: Any, name: str, kernel: int = 3, stride: int = 1) -> nn.Conv2d | None:
        """`module` if it is a plain convolution; padding 1 for 3x3, 0 for 1x1 and stride 2."""
        if not isinstance(module, nn.Conv2d) or _path(module) not in _CONV_CLASSES:
            self.add(f"{name} is {_described(module)}, not a Conv2d")
            return None
        padding = 1 if (kernel, stride) == (3, 1) else 0
        expected = {
            "kernel_size": (kernel, kernel),
            "stride": (stride, stride),
            "padding": (padding, padding),
            "dilation": (1, 1),
            "groups": 1,
            "padding_mode": "zeros",
        }
        self._plain(module, name, expected)
        return module

    def projection(self, module: Any, name: str) -> nn.Module | None:
        """`module` if it is a Linear or a 1x1 convolution."""
        if isinstance(module, nn.Conv2d):
            return self.conv(module, name, kernel=1)
        if not isinstance(module, nn.Linear) or _path(module) not in _LINEAR_CLASSES:
            self.add(f"{name} is {_described(module)}, not a Linear")
            return None
        self._plain(module, name, {})
        return module

    def group_norm(self, module: Any, name: str) -> nn.GroupNorm | None:
        """`module` if it is a GroupNorm with weight and bias."""
        if type(module) is not nn.GroupNorm:
            self.add(f"{name} is {_described(module)}, not a GroupNorm")
            return None
        self._plain(module, name, {"affine": True})
        return module

    def silu(self, module: Any, name: str) -> None:
        """Notes an activation other than SiLU."""
        if type(module) is not nn.SiLU:
            self.add(f"{name} is {_described(module)}, not SiLU")

    def no_dropout(self, module: Any, name: str) -> None:
        """Notes a dropout that would drop something now."""
        if module is None or type(module) is nn.Identity:
            return
        if type(module) is not nn.Dropout or (module.training and module.p > 0):
            self.add(f"{name} is {_described(module)}: not a dropout at rest")

    def settings(self, module: Any, name: str, expected: dict[str, Any]) -> None:
        """Notes attributes that exist and differ from what is `expected`."""
        for key, value in expected.items():
            actual = getattr(module, key, value)
            if actual != value:
                self.add(f"{name}.{key} is {actual}")

    def _plain(self, module: nn.Module, name: str, expected: dict[str, Any]) -> None:
        self.untouched(module, name)
        self.settings(module, name, expected)
        if getattr(module, "lora_layer", None) is not None:
            self.add(f"{name} has a LoRA layer")
        children = [key for key, child in module._modules.items() if child is not None]
        extra = {key for key, value in module._parameters.items() if value is not None}
        for key in [*children, *sorted(extra - {"weight", "bias"})]:
            self.add(f"{name} has a {key}")
        if module._parameters.get("weight") is None:
            self.add(f"{name} has no weight of its own")


def is_the_classs(method: Any, module: nn.Module, key: str = "forward") -> bool:
    """True for a method as the class has it, bound to `module`: so an undone change is left."""
    own = getattr(method, "__func__", None)
    return own is getattr(type(module), key, None) and method.__self__ is module


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _described(module: Any) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"
