"""Whether a module is as it was when it was read, without reading it again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lib_rocm_sd.hosts.read.vae import read
from lib_rocm_sd.modules.watch import Structure
from lib_rocm_sd.vae import program as programs
from lib_rocm_sd.vae.program import Program
from lib_rocm_sd.vae.weights import Signature
from tests.vae import vae_models
from tests.vae.test_vae_read import DIFFUSERS_CHANGES, LDM_CHANGES
from tests.vae.vae_models import coder, image


@pytest.mark.parametrize("kind", vae_models.KINDS)
def test_a_module_left_alone_is_the_same(kind: str) -> None:
    module = coder(kind)
    structure = Structure(module)
    assert structure.same()
    Program(module)(image(kind))
    assert structure.same()


@pytest.mark.parametrize("name", LDM_CHANGES)
def test_what_makes_ldms_unknown_is_seen(name: str) -> None:
    _is_seen(vae_models.ldm_coder("decoder"), LDM_CHANGES[name][0])


@pytest.mark.parametrize("name", DIFFUSERS_CHANGES)
def test_what_makes_diffusers_unknown_is_seen(name: str) -> None:
    _is_seen(vae_models.diffusers_coder("decoder"), DIFFUSERS_CHANGES[name][0])


def _is_seen(module: nn.Module, change: Callable[[nn.Module], None]) -> None:
    structure, signature = Structure(module), Signature(read(module).leaves)
    assert structure.same() and signature.matches()
    change(module)
    assert not (structure.same() and signature.matches())


def test_a_class_that_is_patched_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = vae_models.ldm_coder("decoder")
    structure = Structure(module)
    for cls, name in ((type(module), "forward"), (nn.Conv2d, "_conv_forward"), (nn.Module, "new")):
        with monkeypatch.context() as patch:
            patch.setattr(cls, name, lambda *_: None, raising=False)
            assert not structure.same()
        assert structure.same() or cls is nn.Module


def test_hooks_of_the_whole_are_the_callers_business() -> None:
    module = vae_models.ldm_coder("decoder")
    structure = Structure(module)
    handle = module.register_forward_hook(lambda *_: None)
    assert structure.same()
    handle.remove()
    module.get_submodule("mid.block_1").register_forward_pre_hook(lambda *_: None)
    assert not structure.same()


def test_tensors_that_others_keep_on_a_module_are_not_kept_alive() -> None:
    module: Any = vae_models.ldm_coder("decoder")
    module.conv_in.__dict__["backup"] = torch.ones(3)
    structure = Structure(module)
    assert not structure.same() and not structure._seen
    module.conv_in.__dict__["backup"] = torch.ones(3)
    assert not structure.same()
    assert read(module).reasons == ()


def test_a_copy_is_not_the_same() -> None:
    module = vae_models.ldm_coder("decoder")
    structure = Structure(module)
    module.mid = copy.deepcopy(module.mid)
    assert not structure.same()


def test_an_unchanged_module_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = coder("ldm decoder"), image("ldm decoder")
    program = Program(module)
    calls: list[nn.Module] = []

    def counted(module: nn.Module) -> Any:
        calls.append(module)
        return read(module)

    monkeypatch.setattr(programs, "read", counted)
    program(x)
    program(x)
    assert calls == []
    first: Any = module.get_submodule("conv_in")
    first.note = "means nothing to us"
    program(x)
    assert len(calls) == 1
    program(x)
    assert len(calls) == 1


def _in_place(weight: nn.Parameter) -> None:
    weight.detach().add_(1)


def _data(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()


def _transposed(weight: nn.Parameter) -> None:
    weight.data = weight.data.transpose(2, 3)


def _moved(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(2, *weight.shape)[1]


@pytest.mark.parametrize("change", [_in_place, _data, _transposed, _moved])
def test_weights_that_change_do_not_match(change: Callable[[nn.Parameter], None]) -> None:
    module = coder("ldm decoder")
    signature = Signature(read(module).leaves)
    assert signature.matches() and signature.seems_to_match()
    weight: Any = module.get_submodule("mid.block_1.conv1").weight
    change(weight)
    assert not signature.matches()
    assert signature.seems_to_match() == (change is _transposed)
