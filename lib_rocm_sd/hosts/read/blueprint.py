"""A UNet, or a VAE's decoder, as data, so that another process can build one like it: the classes
of its modules, their plain attributes, the shapes of their weights. Nothing is pickled, and no
constructor is called.

What cannot be said so, or was changed by somebody, is a reason why there is no copy.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.engine.memory import version_of
from lib_rocm_sd.hosts.read.findings import Findings
from lib_rocm_sd.modules.watch import CONV_SETTINGS, INNER, Watch

FAMILIES = ("ldm", "sgm")
"""The packages whose modules are known."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OURS = "lib_rocm_sd"
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_KEPT_BESIDE = ("network_", "fp16_")
"""How attributes begin that the WebUI keeps on layers: networks' and float8's backups."""
_NOTED = ("weighted_forward", "last_z_shape")
"""Attributes that compute nothing; a decoder notes in the last what it was called with."""
_GLOBALS = ("th", "timestep_embedding")
"""Names in a UNet's Python module through which its forward computes."""

UNET, DECODER = "UNet", "VAE's decoder"
"""What there may be copies of, each by itself."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Blueprint:
    """`rows`: one for each module, the root first, JSON-able. `packages`: the folders of those that
    the classes are in. Equal ones build equal modules.
    """

    rows: list[Row]
    packages: dict[str, list[str]]


@dataclass(frozen=True)
class Manner:
    """How a copy computes: as the host's own session does. `switches`: torch's."""

    level: str
    headroom: int
    graphs: bool | None
    switches: Mapping[str, Any]


def never(function: Any) -> bool:
    """`idle` of `read` where nobody's function is known to be."""
    return False


def read(
    module: nn.Module,
    hosts_own: Sequence[str] = (),
    name: str = "the UNet",
    idle: Callable[[Any], bool] = never,
) -> tuple[Blueprint | None, list[str]]:
    """The blueprint of `module`, or the reasons why there is none. `name`: what they call it.

    `hosts_own`: Python modules of the host whose forwards, put into classes, and whose globals
    compute what the classes' own do. `idle(function)`: whether what somebody has put in torch.cat's
    place passes on all that it is given, for now.
    """
    family = type(module).__module__.partition(".")[0]
    if family not in FAMILIES:
        return None, [f"{name} is of {family or 'an unknown kind'}, of which there is no copy"]
    reasons = dict.fromkeys(_global_reasons(module, family, hosts_own, idle))
    rows: list[Row] = []
    for path, part in module.named_modules():
        where = path or name
        reasons |= dict.fromkeys(_reasons(where, part, part is module, family, hosts_own))
        try:
            rows.append(_row(path, part, hosts_own))
        except ValueError as error:
            reasons[f"{where}: {error}"] = None
    if reasons:
        return None, list(reasons)
    return Blueprint(rows, _packages(module)), []


def _plain(value: Any) -> Any:
    """`value` for JSON; ValueError where it is nothing plain."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, (Sequence, Set)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(item) for key, item in value.items()}}
    raise ValueError(f"a {type(value).__name__}")


def _row(path: str, module: nn.Module, hosts_own: Sequence[str]) -> Row:
    cls = type(module)
    attributes = {}
    for name, value in vars(module).items():
        kept_beside = name.startswith(_KEPT_BESIDE) or name in (*INNER, *_NOTED)
        if name in _OF_ALL_MODULES or kept_beside:
            continue
        try:
            attributes[name] = _plain(value)
        except ValueError as error:
            if path or _is_mentioned(name, cls, hosts_own):
                raise ValueError(f"its {name} is {error}") from None
    return {
        "path": path,
        "class": [cls.__module__, cls.__qualname__],
        "attributes": attributes,
        "children": [[name, child is not None] for name, child in module._modules.items()],
        "parameters": {name: _shape(tensor) for name, tensor in module._parameters.items()},
        "buffers": {name: _shape(tensor) for name, tensor in module._buffers.items()},
    }


def _is_mentioned(name: str, cls: type, hosts_own: Sequence[str]) -> bool:
    """Whether an attribute's name is in the files that this class's forward is from. Else it is
    somebody's note: sd-webui-controlnet leaves `cond_mark` on a UNet (hook.py).
    """
    homes = {base.__module__ for base in cls.__mro__ if base not in (nn.Module, object)}
    for home in {*homes, *hosts_own} & {*sys.modules}:
        try:
            source = inspect.getsource(sys.modules[home])
        except (OSError, TypeError):
            return True
        if re.search(rf"\b{re.escape(name)}\b", source):
            return True
    return False


def _shape(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    if tensor.dtype not in DTYPES:
        raise ValueError(f"its weights are {str(tensor.dtype).removeprefix('torch.')}")
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise ValueError(f"a weight is a {type(tensor).__name__}")
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _reasons(
    name: str, module: nn.Module, is_root: bool, family: str, hosts_own: Sequence[str]
) -> Iterator[str]:
    """Who has changed what this module computes."""
    cls = type(module)
    root = cls.__module__.partition(".")[0]
    if root not in (family, "torch", *FAMILIES):
        yield f"{name} is a {cls.__name__} of {cls.__module__}"
        return
    if not is_root:
        findings = Findings(family, hosts_own)
        findings.untouched(module, name)
        yield from findings.reasons
    if module.training:
        yield f"{name} is in training"
    for key in INNER:
        owner = next((base for base in cls.__mro__ if key in vars(base)), None)
        if owner is None:
            continue
        source = str(getattr(vars(owner)[key], "__module__", ""))
        expected = source == owner.__module__ or source in hosts_own or source.startswith(_OURS)
        if not expected:
            yield f"{cls.__name__}.{key} has been replaced by {source or 'somebody'}"


def _global_reasons(
    unet: nn.Module, family: str, hosts_own: Sequence[str], idle: Callable[[Any], bool]
) -> Iterator[str]:
    """Who has put something else into the Python module of the UNet's class."""
    home = type(unet).__module__
    for name in _GLOBALS:
        value = getattr(sys.modules.get(home), name, None)
        if value is None or value is torch:
            continue
        where = home_of(value if callable(value) else type(value))
        of_cat = home_of(getattr(type(value), "cat", None), where)
        if not all(w in hosts_own or w.partition(".")[0] == family for w in (where, of_cat)):
            yield f"{name} of {home} has been replaced by {where or 'somebody'}"
        cat = _cat_of(value)
        if cat is not None and not idle(cat):
            by = home_of(getattr(cat, "func", cat)) or "somebody"
            yield f"torch.cat of {home} has been replaced by {by}"


def home_of(function: Any, default: str = "") -> str:
    """The Python module that it is from."""
    return str(getattr(function, "__module__", default))


def _cat_of(value: Any) -> Any:
    """What somebody has put in torch.cat's place, into the host's stand-in for torch (FreeU)."""
    return None if isinstance(value, ModuleType) else getattr(value, "__dict__", {}).get("cat")


def _packages(unet: nn.Module) -> dict[str, list[str]]:
    """The folders of all packages around the modules' classes, but torch's."""
    packages: dict[str, list[str]] = {}
    for home in {type(module).__module__ for module in unet.modules()}:
        parts = home.split(".")
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            folders = getattr(sys.modules.get(name), "__path__", None)
            if parts[0] != "torch" and folders is not None:
                packages[name] = [str(folder) for folder in folders]
    return dict(sorted(packages.items()))


def build(
    rows: Sequence[Row], packages: Mapping[str, Sequence[str]], device: torch.device
) -> nn.Module:
    """The module, at rest, with memory for its weights on `device`; these have no values yet.

    Raises ImportError and AttributeError where a class is not there.
    """
    _lay_out(packages)
    modules: dict[str, nn.Module] = {}
    for row in rows:
        module = modules[row["path"]] = _module(row, device)
        parent, _, name = row["path"].rpartition(".")
        if row["path"]:
            modules[parent]._modules[name] = module
    unet = modules[""]
    home = sys.modules[type(unet).__module__]
    if getattr(home, "th", None) is torch:
        home.th = Resizing()  # type: ignore[attr-defined]
    return unet


def tensors(module: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers, in the blueprint's order."""
    return [own[name] for own, name in _slots(module)]


def _slots(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where its parameters and buffers are."""
    return [
        (own, name)
        for part in module.modules()
        for own in (part._parameters, part._buffers)
        for name, tensor in own.items()
        if tensor is not None
    ]


class Resizing:
    """torch, but `cat` of two images of different sizes makes the first as large as the second, as
    the WebUI has it for pictures whose sides are no multiples of 64.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def cat(images: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """torch.cat."""
        if len(images) == 2 and images[0].shape[-2:] != images[1].shape[-2:]:
            first = nn.functional.interpolate(images[0], images[1].shape[-2:], mode="nearest")
            images = (first, images[1])
        return torch.cat(list(images), dim)


def _value_of(value: Any) -> Any:
    """What `_plain` was given."""
    if isinstance(value, list):
        return [_value_of(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "tuple":
        return tuple(_value_of(item) for item in inner)
    return {key: _value_of(item) for key, item in inner.items()}


def _module(row: Row, device: torch.device) -> nn.Module:
    home, name = row["class"]
    cls = attrgetter(name)(importlib.import_module(home))
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    vars(module).update({name: _value_of(value) for name, value in row["attributes"].items()})
    module.training = False
    for name, shape in row["parameters"].items():
        tensor = _empty(shape, device)
        module._parameters[name] = None if tensor is None else nn.Parameter(tensor, False)
    for name, shape in row["buffers"].items():
        module._buffers[name] = _empty(shape, device)
    for name, _ in row["children"]:
        module._modules[name] = None
    return module


def _empty(shape: Any, device: torch.device) -> torch.Tensor | None:
    if shape is None:
        return None
    return torch.empty(shape[0], dtype=getattr(torch, shape[1]), device=device)


def _lay_out(packages: Mapping[str, Sequence[str]]) -> None:
    """Make the packages importable without what they import themselves: sgm's own import training
    code, of which the WebUI has stand-ins only.
    """
    for name, folders in packages.items():
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = list(folders)
            sys.modules[name] = package
            parent, _, last = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], last, package)


_VERSION = attrgetter("_version")
Fact = tuple[int, int | None, int]
"""A tensor's identity, version and place: another one where its values may be others."""


class Subject:
    """A module that is to be computed on several cards, looked at before each call.

    `hosts_own`, `idle`: see `read`. `part`: UNET or DECODER.
    """

    def __init__(
        self,
        module: nn.Module,
        manner: Callable[[], Manner],
        hosts_own: Sequence[str] = (),
        part: str = UNET,
        idle: Callable[[Any], bool] = never,
    ) -> None:
        self.module, self.part = module, part
        self._manner, self._hosts_own, self._idle = manner, hosts_own, idle
        self.reasons: list[str] = []
        """Why there can be no copy of it now."""
        self.facts: list[Fact] = []
        """One fact per tensor, as last looked at."""
        self.leaves: list[nn.Module] = []
        """Modules with weights."""
        self.manner = manner()
        self._known: list[list[Any]] = []
        self._watch: Watch | None = None
        self._blueprint: Blueprint | None = None
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._read_kinds: list[tuple[Hashable, ...]] = []
        self._around: tuple[Hashable, ...] = ()

    @property
    def blueprint(self) -> Blueprint:
        assert self._blueprint is not None
        return self._blueprint

    def is_same(self) -> bool:
        """Whether it still computes what it did when it was looked at, but for its weights."""
        same = self._watch is not None and self._watch.same()
        return same and self._surroundings() == self._around

    def look(self) -> None:
        """See what it is now; read again only what has changed."""
        self.manner, same = self._manner(), self.is_same()
        if same and not self.reasons:
            columns = self._columns()
            if columns == self._known:
                return
            self._know(columns)
        if not same or self._kinds() != self._read_kinds:
            self._around = self._surroundings()
            self._read()
            self._know([] if self.reasons else self._columns())

    def _know(self, columns: list[list[Any]]) -> None:
        self._known, self.facts = columns, list(zip(*columns, strict=True))

    def _columns(self) -> list[list[Any]]:
        """The facts as columns. It is made in each step: no line of Python for each tensor."""
        tensors = self.tensors()
        versions: list[int | None]
        try:
            versions = list(map(_VERSION, tensors))
        except RuntimeError:  # some count none
            versions = list(map(version_of, tensors))
        return [list(map(id, tensors)), versions, list(map(torch.Tensor.data_ptr, tensors))]

    def _kinds(self) -> list[tuple[Hashable, ...]]:
        return [(t.dtype, t.shape) for t in self.tensors()]

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers as they are now, in the blueprint's order."""
        return [own[name] for own, name in self._slots]

    def _read(self) -> None:
        modules = list(self.module.modules())
        self.leaves = [m for m in modules if m._parameters.get("weight") is not None]
        self._slots = _slots(self.module)
        self._read_kinds = self._kinds()
        blueprint, self.reasons = read(self.module, self._hosts_own, f"the {self.part}", self._idle)
        if any(version_of(tensor) is None for tensor in self.tensors()):
            self.reasons.append("its weights were made in inference mode")
        if blueprint != self._blueprint:  # else the old one stays: it is known by identity
            self._blueprint = blueprint
        convs = [m for m in modules if isinstance(m, nn.Conv2d)]
        watched: list[tuple[dict[str, Any], str, Any]]
        watched = [(vars(m), key, vars(m).get(key)) for m in convs for key in CONV_SETTINGS]
        watched += [(vars(m), "training", m.training) for m in modules]
        self._watch = Watch(modules, watched)

    def _surroundings(self) -> tuple[Hashable, ...]:
        """What the module's own forward names beside those within."""
        home = sys.modules.get(type(self.module).__module__)
        functions = [getattr(home, name, None) for name in _GLOBALS]
        cats = [cat for cat in map(_cat_of, functions) if cat is not None]
        return (*map(id, [*functions, *cats]), *map(self._idle, cats))
