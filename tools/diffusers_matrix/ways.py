"""Ways in which others change a model, to build rows of: what is replaced, hooked or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from lib_rocm_sd.modules.patches import ABSENT
from tools.diffusers_matrix.models import Change, Scene

BY = 1.5
"""So many times what a module made is what a change makes of it."""
LAID = torch.contiguous_format


def scaled(made: Any, by: float = BY) -> Any:
    """What a module gave, `by` times."""
    if isinstance(made, torch.Tensor):
        return made * by
    if isinstance(made, tuple):
        return (made[0] * by, *made[1:])
    made.sample = made.sample * by
    return made


def wrapped(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives `BY` times what `theirs` gives."""
    return lambda *args, **kwargs: scaled(theirs(*args, **kwargs))


def of_instances(
    path: str,
    name: str = "forward",
    make: Callable[[Any], Any] = wrapped,
    *,
    first: bool = False,
    deleted: bool = False,
) -> Change:
    """Another `name` on each module of `path`, made of what it has; then what was read before.

    `first`: it was put back before, as who has undone a change leaves it. `deleted`: undone by
    deleting it.
    """

    def change(scene: Scene) -> Iterator[None]:
        modules = scene.every(path)
        for module in modules if first else ():
            setattr(module, name, getattr(module, name))
        yield
        known = [getattr(module, name) for module in modules]
        for module, theirs in zip(modules, known, strict=True):
            setattr(module, name, make(theirs))
        yield
        for module, theirs in zip(modules, known, strict=True):
            delattr(module, name) if deleted else setattr(module, name, theirs)

    return change


def of_class(find: Callable[[], Any], name: str = "forward", make: Any = wrapped) -> Change:
    """Another function `name` in a class, or in a Python module."""

    def change(scene: Scene) -> Iterator[None]:
        yield
        owner = find()
        known = vars(owner).get(name, ABSENT)
        setattr(owner, name, make(getattr(owner, name)))
        yield
        delattr(owner, name) if known is ABSENT else setattr(owner, name, known)

    return change


def of_diffusers(path: str, name: str = "forward", make: Any = wrapped) -> Change:
    """Another function `name` in what `path` names within diffusers."""

    def find() -> Any:
        return resolve_name(f"diffusers.{path}")

    return of_class(find, name, make)


def settings(path: str, **values: Any) -> Change:
    """Other values of attributes."""

    def change(scene: Scene) -> Iterator[None]:
        yield
        modules = scene.every(path)
        known = [[getattr(module, key) for key in values] for module in modules]
        for module in modules:
            for key, value in values.items():
                setattr(module, key, value)
        yield
        for module, before in zip(modules, known, strict=True):
            for key, value in zip(values, before, strict=True):
                setattr(module, key, value)

    return change


def hooks(path: str, register: Callable[[Any], Any], before: Any = None) -> Change:
    """A hook on each module of `path`; `before` registers others, which it replaces."""

    def change(scene: Scene) -> Iterator[None]:
        modules = scene.every(path)
        first = [before(module) for module in modules] if before is not None else []
        yield
        for handle in first:
            handle.remove()
        handles = [register(module) for module in modules]
        yield
        for handle in handles:
            handle.remove()
        for module in modules if before is not None else ():
            before(module)

    return change


def after(by: float = BY, **options: Any) -> Callable[[Any], Any]:
    """Registers a forward hook."""
    return lambda module: module.register_forward_hook(
        lambda module, args, made: scaled(made, by), **options
    )


def ahead(by: float = BY) -> Callable[[Any], Any]:
    """Registers a forward pre-hook."""
    return lambda module: module.register_forward_pre_hook(
        lambda module, args: (args[0] * by, *args[1:])
    )


def with_names(module: Any) -> Any:
    """Registers a hook that sees the arguments that have names."""
    return module.register_forward_hook(
        lambda module, args, kwargs, made: scaled(made), with_kwargs=True
    )


def ahead_with_names(module: Any) -> Any:
    """The same before the forward: another prompt."""

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        given = dict(kwargs)
        if given.get("encoder_hidden_states") is not None:
            given["encoder_hidden_states"] = -given["encoder_hidden_states"]
        return args, given

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def of_all(register: Callable[..., Any], kind: type[nn.Module], is_ahead: bool = False) -> Change:
    """A hook on all modules there are, which changes what those of `kind` make."""

    def made_of(module: Any, args: Any, made: Any) -> Any:
        return scaled(made) if type(module) is kind else None

    def given_to(module: Any, args: Any) -> Any:
        return (args[0] * BY, *args[1:]) if type(module) is kind else None

    def change(scene: Scene) -> Iterator[None]:
        yield
        handle = register(given_to if is_ahead else made_of)
        yield
        handle.remove()

    return change


def another(path: str, make: Callable[[Any], Any]) -> Change:
    """Another module in the place of each of `path`."""

    def change(scene: Scene) -> Iterator[None]:
        yield
        parents, key = _parents(scene, path)
        known = [getattr(parent, key) for parent in parents]
        for parent, module in zip(parents, known, strict=True):
            setattr(parent, key, make(module))
        yield
        for parent, module in zip(parents, known, strict=True):
            setattr(parent, key, module)

    return change


def _parents(scene: Scene, path: str) -> tuple[list[Any], str]:
    key = path.rpartition(".")[2]
    wanted = set(map(id, scene.every(path)))
    parents = [m for m in scene.unet.modules() if id(m._modules.get(key)) in wanted]
    return parents, key


def done(do: Callable[[Scene], Callable[[], Any]]) -> Change:
    """Whatever `do` does; what it gives undoes it."""

    def change(scene: Scene) -> Iterator[None]:
        yield
        undo = do(scene)
        yield
        undo()

    return change


def other_values(tensor: torch.Tensor) -> torch.Tensor:
    """What is written in the place of a parameter's values. The others of these are the first."""
    return -tensor.detach() if tensor.ndim > 1 else tensor.detach().flip(0)


Write = Callable[[nn.Module, str, torch.Tensor], None]
"""Makes a tensor's values those of a module's parameter."""


def written(path: str, write: Write) -> Change:
    """Other values in a parameter of every module of `path`, whose last part is its name."""
    owner, _, key = path.rpartition(".")

    def change(scene: Scene) -> Iterator[None]:
        yield
        modules = scene.every(owner)
        known = [getattr(module, key).detach().clone(memory_format=LAID) for module in modules]
        for module, before in zip(modules, known, strict=True):
            write(module, key, other_values(before))
        yield
        for module, before in zip(modules, known, strict=True):
            write(module, key, before)

    return change


def in_data(module: nn.Module, key: str, values: torch.Tensor) -> None:
    """As EMAModel.copy_to does."""
    getattr(module, key).data.copy_(values)


def in_place(module: nn.Module, key: str, values: torch.Tensor) -> None:
    with torch.no_grad():
        getattr(module, key).copy_(values)


def other_data(module: nn.Module, key: str, values: torch.Tensor) -> None:
    getattr(module, key).data = values.clone()


def other_parameter(module: nn.Module, key: str, values: torch.Tensor) -> None:
    setattr(module, key, nn.Parameter(values.clone(), requires_grad=False))


def other_entry(module: nn.Module, key: str, values: torch.Tensor) -> None:
    module._parameters[key] = nn.Parameter(values.clone(), requires_grad=False)


def loaded(module: nn.Module, key: str, values: torch.Tensor, assign: bool = False) -> None:
    module.load_state_dict({key: values.clone()}, strict=False, assign=assign)


def moved(module: nn.Module, key: str, values: torch.Tensor) -> None:
    """Its memory becomes another, in other strides, and is then written to."""
    parameter = getattr(module, key)
    data = parameter.data.clone()
    parameter.data = data.mT.contiguous().mT if data.ndim > 1 else data
    parameter.data.copy_(values)


def in_a_view(module: nn.Module, key: str, values: torch.Tensor) -> None:
    """As vector_to_parameters does: it becomes a part of a larger tensor."""
    large = torch.cat([values.flatten(), values.flatten()])
    getattr(module, key).data = large[: values.numel()].view(values.shape)


WRITES: dict[str, Write] = {
    ".data.copy_": in_data,
    "copy_ in place": in_place,
    ".data =": other_data,
    "another Parameter": other_parameter,
    "another entry of _parameters": other_entry,
    "load_state_dict": loaded,
    "load_state_dict with assign": partial(loaded, assign=True),
    "moved, then written": moved,
    "a part of a larger tensor": in_a_view,
}
