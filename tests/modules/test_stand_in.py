"""A stand-in for a module's forward: when it serves, what it leaves, that it leaves no trace."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.modules.stand_in import StandIn, UnknownModuleError, brief

X = torch.arange(3.0)


class Doubler(nn.Module):
    """Its own forward doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor, plus: float = 0.0) -> torch.Tensor:
        return x * self.weight + plus


class Negative(StandIn):
    """Ours, to be told apart, gives minus what the module gives."""

    passed_on = (MemoryError, LookupError)

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.trouble: BaseException | None = None
        self.told: list[str] = []

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        return "it adds" if "plus" in kwargs else super().refusal(*args, **kwargs)

    def serve(self, asked: tuple[torch.Tensor]) -> torch.Tensor:
        if self.trouble is not None:
            raise self.trouble
        return -2 * asked[0]

    def failed(self, error: Exception) -> str:
        return f"failed: {error}"

    def tell(self, why: str) -> None:
        self.told.append(why)


@pytest.fixture
def stand_in() -> Negative:
    """Put in."""
    made = Negative(Doubler())
    assert made.put_in() == ""
    return made


def is_ours(module: Any, x: torch.Tensor = X) -> bool:
    made = module(x)
    assert torch.equal(made.abs(), 2 * x)
    return torch.equal(made, -2 * x)


def test_it_serves_from_put_in_to_take_out(stand_in: Negative) -> None:
    module = stand_in.module
    assert is_ours(module)
    assert stand_in.put_in() == "" and is_ours(module)
    assert stand_in.is_put_in
    stand_in.take_out()
    assert not is_ours(module) and "forward" not in vars(module)
    stand_in.take_out()
    assert not is_ours(module) and not stand_in.told


def test_a_refused_call_is_the_modules_with_the_reason(stand_in: Negative) -> None:
    assert torch.equal(stand_in.module(X, plus=1.0), 2 * X + 1)
    assert stand_in.told == ["it adds"]


def test_a_failure_costs_no_result(stand_in: Negative) -> None:
    stand_in.trouble = RuntimeError("planted")
    assert not is_ours(stand_in.module)
    stand_in.trouble = UnknownModuleError(("one reason", "another"))
    assert not is_ours(stand_in.module)
    assert stand_in.told == ["failed: planted", "one reason; another"]


@pytest.mark.parametrize(
    "trouble",
    [
        torch.cuda.OutOfMemoryError("HIP out of memory"),
        RuntimeError("HIP out of memory"),
        MemoryError(),
        KeyError("what the caller is to see"),
        KeyboardInterrupt(),
    ],
    ids=lambda trouble: type(trouble).__name__,
)
def test_what_passes_through(stand_in: Negative, trouble: BaseException) -> None:
    stand_in.trouble = trouble
    with pytest.raises(type(trouble)):
        stand_in.module(X)
    assert not stand_in.told


@pytest.mark.parametrize("where", ["input", "weights"])
def test_gradients_are_the_modules(stand_in: Negative, where: str) -> None:
    x = X.clone()
    (x if where == "input" else stand_in.module).requires_grad_(True)
    assert not is_ours(stand_in.module, x)
    assert stand_in.told == ["gradients are wanted"]
    with torch.no_grad():
        assert is_ours(stand_in.module, x)


# Others


def theirs(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_a_forward_of_another_is_left_alone() -> None:
    module: Any = Doubler()
    module.forward = theirs
    made = Negative(module)
    assert made.put_in() == "theirs of test_stand_in.py"
    assert module.forward is theirs and not made.is_put_in
    made.take_out()
    assert module.forward is theirs


def test_the_classs_own_on_the_instance_is_none_of_anothers() -> None:
    """As an extension leaves it that undoes its own."""
    module: Any = Doubler()
    own = module.forward
    module.forward = own
    made = Negative(module)
    assert made.put_in() == "" and is_ours(module)
    made.take_out()
    assert module.forward is own


def test_who_came_after_us_stays(stand_in: Negative) -> None:
    module: Any = stand_in.module
    module.forward = theirs
    assert not stand_in.is_put_in
    stand_in.take_out()
    assert module.forward is theirs


def test_who_keeps_us_gets_the_modules_own(stand_in: Negative) -> None:
    module: Any = stand_in.module
    kept = module.forward
    module.forward = lambda x: kept(x)
    assert not is_ours(module)
    assert stand_in.put_in().startswith("<lambda>")
    stand_in.take_out()
    module.forward = kept  # put back when we have left
    assert not is_ours(module) and not stand_in.is_put_in
    assert stand_in.put_in() == "" and is_ours(module)
    stand_in.take_out()
    assert "forward" not in vars(module)


def _pickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("what", ["module", "tree", "forward"])
def test_a_copy_is_nobodys(stand_in: Negative, copied: Callable[[Any], Any], what: str) -> None:
    module = stand_in.module
    if what == "forward":
        other = copied(module.forward).__self__
    else:
        other = copied(nn.Sequential(module))[0] if what == "tree" else copied(module)
    assert other is not module and type(other) is Doubler
    assert not is_ours(other) and is_ours(module)
    other.weight.fill_(3.0)
    assert torch.equal(other(X), 3 * X)
    again = Negative(other)
    assert again.put_in() == "" and is_ours(other)
    again.take_out()
    assert torch.equal(copied(other)(X), 3 * X)


def test_torch_compile_traces_the_modules_own(stand_in: Negative) -> None:
    if not hasattr(torch.compiler, "is_compiling"):
        pytest.skip("this torch cannot tell that it is compiling")
    compiled = torch.compile(stand_in.module, backend="eager", fullgraph=True)
    try:
        made = compiled(X)
    except ImportError as error:
        pytest.skip(f"torch.compile cannot be used here: {error}")
    assert torch.equal(made, 2 * X)
    assert is_ours(stand_in.module)


def test_what_is_said_of_many_layers_is_said_once() -> None:
    said = [f"up.{index}.conv casts" for index in range(3)]
    assert brief([*said[:2], "alone"]) == [*said[:2], "alone"]
    assert brief(["norm has hooks", *said]) == ["norm has hooks", "up.0.conv and 2 others: casts"]
