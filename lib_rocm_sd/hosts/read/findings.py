"""Looking at modules that others wrote: known children, plain settings, nothing replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping
from types import BuiltinFunctionType, ModuleType
from typing import Any, TypeVar

from torch import nn

from lib_rocm_sd.dit.parts import Called, Layer
from lib_rocm_sd.modules.patches import is_the_classs, named
from lib_rocm_sd.modules.watch import (
    CONV_SETTINGS,
    FUNCTIONS,
    INNER,
    functions_of,
    globals_of,
    hooks_of_all,
    names_in,
    names_of,
)

CONV_CLASSES = {
    "torch.nn.modules.conv.Conv2d",
    "torch.nn.modules.conv.Conv3d",
    "diffusers.models.lora.LoRACompatibleConv",
    "comfy.ops.disable_weight_init.Conv2d",
    "comfy.ops.disable_weight_init.Conv3d",
    "ldm_patched.modules.ops.disable_weight_init.Conv2d",
    "backend.operations.ForgeOperations.Conv2d",
}
FORGES_LINEAR = "backend.operations.ForgeOperations.Linear"
"""Not torch's, but with the same parameters and sizes."""
CAUSAL_CONV_CLASSES = {
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage.QwenImageCausalConv3d",
    "diffusers.models.autoencoders.autoencoder_kl_wan.WanCausalConv3d",
    "comfy.ldm.wan.vae.CausalConv3d",
}
LINEAR_CLASSES = {
    "torch.nn.modules.linear.Linear",
    "diffusers.models.lora.LoRACompatibleLinear",
    "comfy.ops.disable_weight_init.Linear",
    "ldm_patched.modules.ops.disable_weight_init.Linear",
    "modules.models.sd3.mmdit.QkvLinear",
    FORGES_LINEAR,
}
CASTING_LAYER_NORM = "comfy.ops.manual_cast.LayerNorm"
CASTING_CLASSES = {
    "comfy.ops.manual_cast.Linear",
    "comfy.ops.fp8_ops.Linear",
    "comfy.ops.scaled_fp8_ops.<locals>.scaled_fp8_op.Linear",
    CASTING_LAYER_NORM,
}
"""Those that always cast their weights, as of a checkpoint in fp8, and what derives from them."""
GGUF_LAYER_NORM = "GGMLOps.LayerNorm"
"""That of city96/ComfyUI-GGUF (795e4515, ops.py), which without a weight calls ComfyUI's."""
FP32_LAYER_NORM = "diffusers.models.normalization.FP32LayerNorm"
"""Its weights may be float32 where all others are not."""
LAYER_NORM_CLASSES = {
    "torch.nn.modules.normalization.LayerNorm",
    FP32_LAYER_NORM,
    "comfy.ops.disable_weight_init.LayerNorm",
    "ldm_patched.modules.ops.disable_weight_init.LayerNorm",
    "backend.operations.ForgeOperations.LayerNorm",
}
RMS_NORM_CLASSES = {
    "torch.nn.modules.normalization.RMSNorm",
    "diffusers.models.normalization.RMSNorm",
    "comfy.ops.disable_weight_init.RMSNorm",
    "comfy.ops.manual_cast.RMSNorm",
    "comfy.ldm.flux.layers.RMSNorm",
    "backend.nn.flux.RMSNorm",
    "comfy.ldm.modules.diffusionmodules.mmdit.RMSNorm",
    "modules.models.sd3.mmdit.RMSNorm",
}
_SCALES = ("weight", "scale")
CASTING_RMS_NORMS = ("comfy", "backend")
"""Packages whose RMSNorms cast their weights to the dtype of their input."""
GROUP_NORM_CLASSES = {
    "torch.nn.modules.normalization.GroupNorm",
    "comfy.ops.disable_weight_init.GroupNorm",
    "ldm_patched.modules.ops.disable_weight_init.GroupNorm",
    "backend.operations.ForgeOperations.GroupNorm",
}
FORGES_CAST = "parameters_manual_cast"
CASTS = ("comfy_cast_weights", "ldm_patched_cast_weights", FORGES_CAST)
"""What ComfyUI, reForge and Forge call a layer's flag that says so."""
CHANGES = ("forge_online_loras", "scale_weight")
"""What a layer of Forge's has where its weights are not what is computed with."""
WEIGHT_FUNCTIONS = ("weight_function", "bias_function")
"""Lists of what ComfyUI's, reForge's and a newer Forge Neo's layers do with their weights in each
call.
"""
QUANTISED = ("gguf_cls", "quant_state", "bnb_quantized")
"""What a packed weight has."""
GROUP_NORM_32 = ("GroupNorm32", "modules.diffusionmodules.util")
"""ldm's and sgm's GroupNorm, which computes in float32: its name, and how its module ends."""
OF_LAYERS = ("networks", "modules.devices")
"""Python modules of A1111's that replace forwards of torch's layers: by one networks are applied to
weights first, by the other weights of another dtype are cast.
"""
_OVER_FRAMES = {"stride": (1, 1, 1), "dilation": (1, 1, 1), "groups": 1, "padding_mode": "zeros"}
OURS = "lib_rocm_sd"
_Leaf = TypeVar("_Leaf", bound=nn.Module)
_first: dict[tuple[int, str], tuple[Any, Any]] = {}
"""What a name of a Python module was when code that names it was first read."""
AROUND: dict[tuple[str, type[nn.Module]], Callable[[Findings, Any, str, Any], Any]] = {}
"""What reads a layer around another, which was read, by its class and that of what it stands for.
hosts/read/peft.py says so when it is imported.
"""
_PLAIN = (bool, int, float, str, tuple, type(None))
"""Attributes of these types are settings, which can be compared."""
_BRINGS = "brings its weights from elsewhere in each call"
_CALLED = "layers that bring or make their weights in each call are called as they are"


class Findings:
    """Collects reasons while a module is read. Each method returns what it can.

    A leaf is read as what `path` leads to in `owner`, "" being the owner itself. Reasons call it by
    that path within `within`.

    `family` is the Python module, or package, that must define the classes of all blocks.
    `hosts_own`: Python modules whose forwards in these classes compute what the classes' own do.
    `watched` has what may be set anew on an instance: its attributes, the name and the value.
    """

    def __init__(self, family: str, hosts_own: Iterable[str] = ()) -> None:
        self.reasons: list[str] = []
        self.watched: list[tuple[dict[str, Any], str, Any]] = []
        self.functions: list[tuple[Any, str]] = []
        """Those of classes that are no modules, each an owner and a name."""
        self.partly: list[str] = []
        """Why modules within are called as they are, where the rest could be read."""
        self.casting: set[nn.Module] = set()
        """Norms whose weights need not lie where the others do."""
        self.family = family
        self._hosts_own = frozenset(hosts_own)

    def part(self) -> Findings:
        """Empty ones of the same family, for a module within."""
        return Findings(self.family, self._hosts_own)

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
        own: Iterable[str] = (),
    ) -> bool:
        """True if `module` is of one of `classes`; notes children other than `children`, parameters
        and buffers other than its `own`.

        `own_forward` False: the class's forward may come from elsewhere, as optimizers of attention
        set it. `root`: forward hooks are the caller's business.
        """
        if not isinstance(module, nn.Module):
            self.add(f"{name} is missing")
            return False
        cls = type(module)
        at_home = f"{cls.__module__}.".startswith(f"{self.family}.") or cls is nn.Module
        if cls.__name__ not in set(classes) or not at_home:
            self.add(f"{name} is a {cls.__name__} of {cls.__module__}")
            return False
        below = {key for key, child in module._modules.items() if child is not None}
        for key in sorted(below - set(children)):
            self.add(f"{name} has a {key}")
        tensors = module._parameters | module._buffers
        for key in sorted({key for key in tensors if tensors[key] is not None} - set(own)):
            self.add(f"{name} has a parameter {key} of its own")
        self.untouched(module, name, root=root)
        attributes, named = vars(module), names_of(cls)
        settings = (key for key in attributes if isinstance(attributes[key], _PLAIN))
        self.watch(module, *(key for key in settings if key in named))
        if own_forward:
            self.class_forward(cls, name)
        return True

    def untouched(self, module: nn.Module, name: str, *, root: bool = False) -> None:
        """Notes hooks, and a forward set on the instance unless it is the class's own, or ours."""
        for key in (*INNER, *functions_of(type(module))):
            own = module.__dict__.get(key)
            ours = str(getattr(own, "__module__", "")).startswith(OURS)
            if own is not None and not ours and not is_the_classs(own, module, key):
                self.add(f"{name}.{key} has been replaced ({named(own)})")
        if not root and (module._forward_hooks or module._forward_pre_hooks):
            self.add(f"{name} has forward hooks")

    def class_forward(self, cls: type, name: str) -> None:
        """Notes a forward that another module has put into the class, or what it calls; and what it
        names, if that is not what was there when it was first seen.
        """
        for key in functions_of(cls):
            owner = next((base for base in cls.__mro__ if key in base.__dict__), None)
            if owner is None:
                continue
            source = str(getattr(owner.__dict__[key], "__module__", ""))
            if not self._may_be(source, owner.__module__):
                self.add(f"{name}: {cls.__name__}.{key} has been replaced by {source}")
            self._globals(owner.__dict__[key], name)

    def _may_be(self, source: str, home: str) -> bool:
        known = source in (home, *OF_LAYERS) or source in self._hosts_own
        return known or source.startswith(OURS)

    def _globals(self, function: Any, name: str) -> None:
        for table, key in globals_of(function):
            _first.setdefault((id(table), key), (table, table[key]))
        table, code = getattr(function, "__globals__", {}), getattr(function, "__code__", None)
        for key in names_in(code) if code is not None else ():
            now, where = table.get(key), str(table.get("__name__", "its module"))
            _, first = _first.get((id(table), key), (table, now))
            if now is not first and not self._is_at_home(now, where):
                self.add(f"{name}: {key} of {where} has been replaced ({named(now)})")

    def _is_at_home(self, thing: Any, where: str) -> bool:
        """Whether it is of the package of the module `where`, or an imported module: what was seen
        first may have been another's.
        """
        if isinstance(thing, ModuleType):
            return sys.modules.get(thing.__name__) is thing
        home = str(getattr(thing, "__module__", "?"))
        return home.partition(".")[0] == where.partition(".")[0] or self._may_be(home, where)

    def everywhere(self) -> None:
        """Notes what others have put into torch itself: hooks on all modules, other functions."""
        if hooks_of_all():
            self.add("a hook is set on all modules (register_module_forward_hook)")
        for key in ("__call__", "_call_impl"):
            call = getattr(nn.Module, key)
            if call.__module__ != nn.Module.__module__:
                self.add(f"torch.nn.Module.{key} has been replaced ({named(call)})")
        for name in FUNCTIONS:
            function = getattr(nn.functional, name)
            source = str(getattr(function, "__module__", ""))
            own = isinstance(function, BuiltinFunctionType) or source.partition(".")[0] == "torch"
            if not own and source not in self._hosts_own:
                self.add(f"torch.nn.functional.{name} has been replaced ({named(function)})")

    def function(self, owner: Any, key: str, name: str) -> None:
        """Watches a function of a class, or of a Python module; notes one that another has put
        there, or that is not what was there when it was first seen.
        """
        self.functions.append((owner, key))
        function = getattr(owner, key, None)
        _, first = _first.setdefault((id(owner), key), (owner, function))
        away = isinstance(owner, type) and getattr(function, "__module__", "") != owner.__module__
        if away or function is not first:
            self.add(f"{name}: {owner.__name__}.{key} has been replaced ({named(function)})")
        self._globals(function, name)

    def code(self, cls: type, name: str, known: frozenset[str]) -> None:
        """Notes names in the code of a class's forwards beyond those that are `known`."""
        for key in ("forward", "_forward"):
            code = getattr(getattr(cls, key, None), "__code__", None)
            more = sorted(names_in(code) - known) if code is not None else []
            if more:
                self.add(f"{name}: {cls.__name__}.{key} does more than is known: {', '.join(more)}")

    def conv(
        self,
        owner: Any,
        path: str,
        within: str = "",
        kernel: int = 3,
        stride: int = 1,
        padding: int | None = None,
    ) -> nn.Conv2d | None:
        """What is there if it is a plain convolution.

        `padding`: by default 1 for 3x3, 0 for 1x1 and for stride 2.
        """
        if padding is None:
            padding = 1 if (kernel, stride) == (3, 1) else 0
        expected = {
            "kernel_size": (kernel, kernel),
            "stride": (stride, stride),
            "padding": (padding, padding),
            "dilation": (1, 1),
            "groups": 1,
            "padding_mode": "zeros",
        }
        place = _at(owner, path, within)
        return self._leaf(place, nn.Conv2d, CONV_CLASSES, expected, CONV_SETTINGS)

    def conv_over_frames(self, owner: Any, path: str, within: str = "") -> nn.Conv3d | None:
        """What is there if it is a plain convolution of each pixel's 3 frames."""
        expected = {**_OVER_FRAMES, "kernel_size": (3, 1, 1), "padding": (1, 0, 0)}
        place = _at(owner, path, within)
        return self._leaf(place, nn.Conv3d, CONV_CLASSES, expected, CONV_SETTINGS)

    def causal_conv(
        self, owner: Any, path: str, within: str = "", kernel: int = 3
    ) -> nn.Conv3d | None:
        """What is there if it is a convolution that pads sides evenly and time in front."""
        pad = kernel // 2
        expected = {
            **_OVER_FRAMES,
            "kernel_size": (kernel,) * 3,
            "padding": (0, 0, 0),
            "_padding": (pad, pad, pad, pad, 2 * pad, 0),
        }
        place, watched = _at(owner, path, within), (*CONV_SETTINGS, "_padding")
        return self._leaf(place, nn.Conv3d, CAUSAL_CONV_CLASSES, expected, watched)

    def linear(self, owner: Any, path: str, within: str = "") -> nn.Linear | None:
        """What is there if it is a plain Linear, with or without a bias."""
        return self._leaf(_at(owner, path, within), nn.Linear, LINEAR_CLASSES, {})

    def layer(self, owner: Any, path: str, within: str = "") -> Layer | None:
        """As `linear`; one that brings, or makes, its weights in each call is to be called."""
        called = self.called(_at(owner, path, within), LINEAR_CLASSES)
        return called or self.linear(owner, path, within)

    def called(self, place: tuple[Any, str], classes: Container[str]) -> Called | None:
        """A module of a known class, if its class, or itself, casts or makes its weights. Hooks and
        a forward of its own are noted: it is called on rows, and they may go by images and tokens.
        """
        module, name = place
        paths = _paths(type(module))
        casts = any(getattr(module, key, False) for key in CASTS) or _is_changed(module)
        if CASTING_CLASSES.isdisjoint(paths) and not (paths[0] in classes and casts):
            return None
        self.partly.append(_CALLED)
        self.untouched(module, name)
        self._watch_casting(module)
        return Called(module)

    def projection(self, owner: Any, path: str, within: str = "") -> nn.Module | None:
        """What is there if it is a Linear or a 1x1 convolution."""
        if isinstance(beneath(_at(owner, path, within)[0]), nn.Conv2d):
            return self.conv(owner, path, within, kernel=1)
        return self.linear(owner, path, within)

    def group_norm(self, owner: Any, path: str, within: str = "") -> nn.GroupNorm | None:
        """What is there if it is a GroupNorm with weight and bias."""
        place, watched = _at(owner, path, within), ("num_groups", "eps")
        return self._leaf(place, nn.GroupNorm, GROUP_NORM_CLASSES, {"affine": True}, watched)

    def layer_norm(self, owner: Any, path: str, within: str = "") -> nn.LayerNorm | None:
        """What is there if it is a LayerNorm of the last dimension, with weight; a bias is
        optional.
        """
        place, expected = _at(owner, path, within), {"elementwise_affine": True}
        norm = self._leaf(place, nn.LayerNorm, LAYER_NORM_CLASSES, expected, ("eps",))
        if norm is not None and len(norm.normalized_shape) != 1:
            self.add(f"{place[1]} is over {len(norm.normalized_shape)} dimensions")
        return norm

    def bare_norm(self, owner: Any, path: str, within: str = "") -> nn.LayerNorm | None:
        """What is there if it is a LayerNorm of the last dimension, without parameters."""
        module, name = _at(owner, path, within)
        first, *others = _paths(type(module))
        ggufs = first.endswith(f".{GGUF_LAYER_NORM}") and CASTING_LAYER_NORM in others
        if first not in {*LAYER_NORM_CLASSES, CASTING_LAYER_NORM} and not ggufs:
            self._other_class(module, name, "LayerNorm")
            return None
        if module.elementwise_affine or len(module.normalized_shape) != 1:
            self.add(f"{name} has a weight, or is over several dimensions")
            return None
        self._as_its_class(module, name)
        norm: nn.LayerNorm = module
        return norm

    def rms_norm(self, owner: Any, path: str, within: str = "") -> Any:
        """What is there if it is an RMSNorm of the last dimension with a weight, and no more. Where
        Flux's are ComfyUI's or Forge's, the weight is `scale`.
        """
        module, name = _at(owner, path, within)
        cls = type(module)
        if f"{cls.__module__}.{cls.__qualname__}" not in RMS_NORM_CLASSES:
            self._other_class(module, name, "RMSNorm")
            return None
        own = {key: value for key, value in module._parameters.items() if value is not None}
        if len(own) != 1 or any(key not in _SCALES or own[key].ndim != 1 for key in own):
            self.add(f"{name} has {', '.join(sorted(own)) or 'no weight'}")
            return None
        if "weight" in own:
            self._plain(module, name, {}, casts=True)
        if cls.__module__.partition(".")[0] in CASTING_RMS_NORMS:
            self.casting.add(module)
        self._as_its_class(module, name)
        return module

    def _as_its_class(self, module: nn.Module, name: str) -> None:
        """A norm without more settings than its eps, computed as its class does."""
        self.untouched(module, name)
        self.class_forward(type(module), name)
        self.watch(module, "eps")

    def _leaf(
        self,
        place: tuple[Any, str],
        kind: type[_Leaf],
        classes: Container[str],
        expected: Mapping[str, Any],
        watched: Iterable[str] = (),
    ) -> _Leaf | None:
        """The module if it is of one of `classes`, as `expected` and as its class computes it; one
        that is around another is read as what it stands for.
        """
        module, name = place
        cls, (ldms, home) = type(module), GROUP_NORM_32
        path = f"{cls.__module__}.{cls.__qualname__}"
        around = AROUND.get((path, kind))
        if around is not None:
            inner = (module.base_layer, f"{name}.base_layer")
            base = self._leaf(inner, kind, classes, expected, watched)
            return None if base is None else around(self, module, name, base)
        known = path in classes and (isinstance(module, kind) or path == FORGES_LINEAR)
        if kind is nn.GroupNorm and cls.__name__ == ldms and cls.__module__.endswith(home):
            known = isinstance(module, kind)
        if not known:
            self._other_class(module, name, kind.__name__)
            return None
        self._plain(module, name, expected)
        self.class_forward(cls, name)
        self.watch(module, *watched)
        leaf: _Leaf = module
        return leaf

    def listed(self, owner: Any, path: str, within: str = "", *counts: int) -> list[Any]:
        """The members of a ModuleList or Sequential of one of `counts`; empty, noted, if not."""
        module, name = _at(owner, path, within)
        if type(module) not in (nn.ModuleList, nn.Sequential):
            self.add(f"{name} is {_described(module)}, not a list of modules")
            return []
        self.untouched(module, name)
        if counts and len(module) not in counts:
            self.add(f"{name} has {len(module)} modules")
            return []
        return list(module)

    def torchs(
        self, owner: Any, path: str, within: str, kind: type[nn.Module], **expected: Any
    ) -> None:
        """Notes what is not a module of torch's class `kind`, called as that is, with `expected`
        settings.
        """
        module, name = _at(owner, path, within)
        if type(module) is not kind:
            self.add(f"{name} is {_described(module)}, not {kind.__name__}")
            return
        self.untouched(module, name)
        self.class_forward(kind, name)
        self.settings(module, name, expected)

    def silu(self, owner: Any, path: str, within: str = "") -> None:
        """Notes an activation other than SiLU."""
        self.torchs(owner, path, within, nn.SiLU)

    def gelu(self, owner: Any, path: str, within: str = "") -> None:
        """Notes an activation other than GELU by the approximation with tanh."""
        self.torchs(owner, path, within, nn.GELU, approximate="tanh")

    def no_dropout(self, owner: Any, path: str, within: str = "") -> None:
        """Notes a dropout that would drop something now."""
        module, name = _at(owner, path, within)
        if module is None:
            return
        if type(module) is nn.Dropout:
            self.watch(module, "training" if module.p > 0 else "p")
        if type(module) is not nn.Identity and (
            type(module) is not nn.Dropout or (module.training and module.p > 0)
        ):
            self.add(f"{name} is {_described(module)}: not a dropout at rest")
            return
        self.untouched(module, name)
        self.class_forward(type(module), name)

    def mean_of_four(self, owner: Any, path: str, within: str) -> None:
        """Notes what does not give the means of two by two pixels."""
        expected = {"kernel_size": 2, "stride": 2, "padding": 0, "ceil_mode": False}
        self.torchs(owner, path, within, nn.AvgPool2d, **expected, divisor_override=None)

    def settings(
        self, module: Any, name: str, expected: Mapping[str, Any], *, watched: bool = True
    ) -> None:
        """Notes attributes that exist and differ from what is `expected`, and watches them."""
        if watched:
            self.watch(module, *expected)
        for key, value in expected.items():
            actual = getattr(module, key, value)
            if actual != value:
                self.add(f"{name}.{key} is {actual}")

    def watch(self, module: nn.Module, *keys: str) -> None:
        """Remembers what `module` has there now: another value makes reading again necessary."""
        own = vars(module)
        self.watched += [(own, key, own.get(key)) for key in keys]

    def _other_class(self, module: Any, name: str, wanted: str) -> None:
        """Notes a module of another class than `wanted`; of the same name are a host's that cast
        their weights.
        """
        alike = type(module).__name__ == wanted
        if alike and is_quantised(module):
            self.add(f"{name} has quantised weights")
        elif alike and any(getattr(module, key, False) for key in CASTS):
            self.add(f"{name} {_BRINGS}")
        elif alike:
            self.add(f"{name} is a {type(module).__qualname__} of {type(module).__module__}")
        else:
            self.add(f"{name} is {_described(module)}, not a {wanted}")

    def _plain(
        self, module: nn.Module, name: str, expected: Mapping[str, Any], casts: bool = False
    ) -> None:
        """Notes what is not as expected. `casts`: it may cast its weights in each call."""
        self.untouched(module, name)
        self.settings(module, name, expected, watched=False)
        if getattr(module, "lora_layer", None) is not None:
            self.add(f"{name} has a LoRA layer")
        if any(getattr(module, key, False) for key in CASTS) and not casts:
            self.add(f"{name} {_BRINGS}")
        if _is_changed(module):
            self.add(f"{name} has its weights changed in each call")
        for key, value in module._parameters.items():
            if value is not None and type(value) is not nn.Parameter:
                self.add(f"{name}.{key} is a {type(value).__name__}")
        self._watch_casting(module)
        children = [key for key, child in module._modules.items() if child is not None]
        extra = {key for key, value in module._parameters.items() if value is not None}
        for key in [*children, *sorted(extra - {"weight", "bias"})]:
            self.add(f"{name} has a {key}")
        if module._parameters.get("weight") is None:
            self.add(f"{name} has no weight of its own")

    def _watch_casting(self, module: nn.Module) -> None:
        """Remembers how a layer comes by its weights."""
        own = vars(module)
        for flag in (flag for flag in CASTS if hasattr(module, flag)):
            changes = CHANGES if flag == FORGES_CAST else ()
            functions = WEIGHT_FUNCTIONS if hasattr(module, WEIGHT_FUNCTIONS[0]) else ()
            values = {key: own.get(key) for key in (flag, *changes, *functions)}
            self.watched += [
                (own, key, list(value) if isinstance(value, list) else value)  # as it is now
                for key, value in values.items()
            ]


def _paths(cls: type) -> list[str]:
    """What the class and those that it is derived from are called."""
    return [f"{each.__module__}.{each.__qualname__}" for each in cls.__mro__]


def _is_changed(module: Any) -> bool:
    """Whether a layer computes with something else than its weights."""
    return any(getattr(module, key, None) is not None for key in CHANGES) or any(
        getattr(module, key, None) for key in WEIGHT_FUNCTIONS
    )


def beneath(module: Any) -> Any:
    """The layer that an adapter's is around, or the module itself."""
    return getattr(module, "base_layer", module)


def eps_of(norm: Any) -> float | None:
    """An RMSNorm's; in ComfyUI's for Flux it is the only number of its forward."""
    if norm is None or hasattr(norm, "eps"):
        return getattr(norm, "eps", None)
    constants = type(norm).forward.__code__.co_consts
    return next((each for each in constants if isinstance(each, float)), None)


def is_quantised(module: Any) -> bool:
    """Whether a layer's weight is packed, as Forge's GGUF and bitsandbytes' 4 bits are."""
    weight = getattr(module, "_parameters", {}).get("weight")
    if weight is None:
        return False
    marked = any(getattr(weight, key, None) is not None for key in QUANTISED)
    return marked or not weight.is_floating_point()


def _at(owner: Any, path: str, within: str) -> tuple[Any, str]:
    """What `path` leads to in `owner`, None where a step is missing, and what to call it."""
    module = owner
    for key in path.split(".") if path else ():
        module = getattr(module, key, None)
    return module, f"{within}.{path}" if within and path else within or path


def _described(module: Any) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"
