"""The two forwards against the WebUI's own, called on the host's modules."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from conftest import FakeGpu, Start, WebUI


@pytest.fixture
def webui(start: Start, gpu: FakeGpu) -> WebUI:
    return start(gpu=gpu, ui=False)


def cross(webui: WebUI, family: str = "ldm", dtype: torch.dtype = torch.float32) -> Any:
    """CrossAttention of SD1.5's first level in small: 2 heads of 40, text of width 24."""
    cls = dict(webui.targets)[f"{family} CrossAttention"]
    torch.manual_seed(3)
    return cls(query_dim=80, context_dim=24, heads=2, dim_head=40).to(dtype).eval()


def block(webui: WebUI, family: str = "ldm", channels: int = 32) -> Any:
    torch.manual_seed(4)
    return dict(webui.targets)[f"{family} AttnBlock"](channels).eval()


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((3, 50, 80), generator=generator)
    return x.to(dtype), torch.randn((3, 77, 24), generator=generator).to(dtype)


@torch.no_grad()
def theirs(webui: WebUI, module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What the WebUI computes with its default forwards."""
    now = webui.forwards
    webui.sd_hijack.undo_optimizations()
    try:
        return module(*args, **kwargs)
    finally:
        for (_, cls), forward in zip(webui.targets, now, strict=True):
            cls.forward = forward  # type: ignore[attr-defined]


@torch.no_grad()
def ours(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return module(*args, **kwargs)


def left_to_host(webui: WebUI) -> int:
    return webui.library("hosts.webui.attention").calls.left.total()


def test_cross_attention(webui: WebUI, gpu: FakeGpu) -> None:
    for family, context in product(("ldm", "sgm"), (True, False)):
        module, (x, text) = cross(webui, family), inputs()
        if not context:
            module.to_k, module.to_v = module.to_q, torch.nn.Linear(80, 80, bias=False)
        args = (x, text) if context else (x,)
        before = len(gpu.seen)
        torch.testing.assert_close(ours(module, *args), theirs(webui, module, *args))
        assert len(gpu.seen) > before
    assert left_to_host(webui) == 0


def test_queries_keys_and_values_are_views(webui: WebUI, gpu: FakeGpu) -> None:
    module, (x, text) = cross(webui), inputs()
    made = []
    for layer in (module.to_q, module.to_k, module.to_v):
        layer.register_forward_hook(lambda layer, args, output: made.append(output))
    ours(module, x, text)
    for given, output in zip(gpu.seen[-1], made, strict=True):
        assert given.data_ptr() == output.data_ptr()
        assert given.shape == (3, output.shape[1], 2, 40)
        assert given.stride() == (output.stride(0), output.stride(1), 40, 1)


def test_scale_is_the_modules(webui: WebUI) -> None:
    module, (x, text) = cross(webui), inputs()
    plain = ours(module, x, text)
    module.scale = 0.5
    torch.testing.assert_close(ours(module, x, text), theirs(webui, module, x, text))
    assert not torch.allclose(ours(module, x, text), plain)


def test_hypernetworks(webui: WebUI, gpu: FakeGpu) -> None:
    module, (x, text) = cross(webui), inputs()
    plain = ours(module, x, text)
    hypernetwork = webui.hypernetworks.hypernetwork
    loaded = webui.shared.loaded_hypernetworks
    loaded += [hypernetwork.Hypernetwork("a", 24, 1), hypernetwork.Hypernetwork("b", 24, 2)]
    loaded.append(hypernetwork.Hypernetwork("of another width", 768, 3))
    result = ours(module, x, text)
    torch.testing.assert_close(result, theirs(webui, module, x, text))
    assert not torch.allclose(result, plain)
    assert left_to_host(webui) == 0


def test_upcast_attn(webui: WebUI, gpu: FakeGpu) -> None:
    """All become float32, which our kernel does not take: a named fallback does."""
    gpu.floats = False
    report = webui.library("report")
    module, (x, text) = cross(webui, dtype=torch.bfloat16), inputs(torch.bfloat16)
    report.begin()
    plain = ours(module, x, text)
    assert report.summary() == "attention: rocm_sd"
    webui.shared.opts.upcast_attn = True
    report.begin()
    before = len(gpu.seen)
    result = ours(module, x, text)
    assert result.dtype == plain.dtype == torch.bfloat16
    assert report.summary() == "attention: sdpa"
    assert "float32" in report.text()
    assert len(gpu.seen) == before
    torch.testing.assert_close(result, theirs(webui, module, x, text), rtol=0.05, atol=0.05)
    assert left_to_host(webui) == 0


def test_upcast_attn_in_the_vae(webui: WebUI, gpu: FakeGpu) -> None:
    gpu.floats = False
    webui.shared.opts.upcast_attn = True
    module = block(webui).to(torch.bfloat16)
    x = torch.randn((1, 32, 4, 4), dtype=torch.bfloat16)
    result = ours(module, x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, theirs(webui, module, x), rtol=0.05, atol=0.05)


def test_autocast_is_off_while_upcast(webui: WebUI, gpu: FakeGpu) -> None:
    seen = []
    functional = webui.library("functional")
    whole = functional.attention

    def note(q: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append((q.dtype, torch.is_autocast_enabled()))
        return whole(q, *args)

    functional.attention = note
    module, (x, text) = cross(webui), inputs()
    with torch.autocast("cuda"):
        inside = torch.is_autocast_enabled()
        ours(module, x, text)
        webui.shared.opts.upcast_attn = True
        ours(module, x, text)
    assert seen == [(torch.float32, inside), (torch.float32, False)]


def keep(*shape: int) -> torch.Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(6)) < 0.7
    mask[..., 0] = True
    return mask


def test_ldm_masks(webui: WebUI) -> None:
    module, (x, text) = cross(webui), inputs()
    for shape in ((3, 77), (3, 1, 77), (3, 7, 11)):
        mask = keep(*shape)
        expected = theirs(webui, module, x, text, mask)
        torch.testing.assert_close(ours(module, x, text, mask=mask), expected)
        assert not torch.allclose(ours(module, x, text), expected)
    assert left_to_host(webui) == 0


def test_sgm_masks(webui: WebUI) -> None:
    module, (x, text) = cross(webui, "sgm"), inputs()
    sdp = webui.sd_hijack_optimizations.scaled_dot_product_attention_forward
    for shape in ((3, 2, 50, 77), (1, 1, 50, 77), (3, 1, 1, 77)):
        additive = torch.randn(shape, generator=torch.Generator().manual_seed(8))
        for mask in (keep(*shape), additive):
            with torch.no_grad():
                expected = sdp(module, x, text, mask)
            torch.testing.assert_close(ours(module, x, text, mask), expected)
    assert left_to_host(webui) == 0


def test_unclear_mask_is_left_to_the_host(webui: WebUI) -> None:
    """Doggettx, which the WebUI would have used, ignores masks."""
    module, (x, text) = cross(webui), inputs()
    doggettx = webui.sd_hijack_optimizations.split_cross_attention_forward
    with torch.no_grad():
        expected = doggettx(module, x, text)
    assert torch.equal(ours(module, x, text, mask=keep(3, 5)), expected)
    assert left_to_host(webui) == 1


def test_other_keyword_arguments_are_ignored_as_by_the_host(webui: WebUI) -> None:
    module, (x, text) = cross(webui, "sgm"), inputs()
    extras = {"additional_tokens": None, "n_times_crossframe_attn_in_self": 0}
    assert torch.equal(ours(module, x, text, **extras), ours(module, x, text))


def test_attn_block(webui: WebUI, gpu: FakeGpu) -> None:
    drawn = torch.randn((2, 32, 5, 7), generator=torch.Generator().manual_seed(7))
    for family, layout in product(("ldm", "sgm"), (torch.contiguous_format, torch.channels_last)):
        module, x = block(webui, family), drawn.to(memory_format=layout)
        gpu.seen.clear()
        torch.testing.assert_close(ours(module, x), theirs(webui, module, x))
        assert all(t.shape == (2, 35, 1, 32) and t.stride(3) == 1 for t in gpu.seen[-1])
    assert left_to_host(webui) == 0


def test_attn_block_hands_the_convolutions_nchw(webui: WebUI) -> None:
    module = block(webui)
    seen = []
    module.proj_out.register_forward_hook(lambda layer, args, output: seen.append(args[0]))
    assert ours(module, torch.randn(2, 32, 5, 7)).is_contiguous()
    assert seen[0].is_contiguous()


@pytest.mark.parametrize("family", ["ldm", "sgm"])
@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyError, AssertionError])
def test_an_error_of_ours_ends_in_the_hosts_own_path(
    webui: WebUI, family: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def explode(*args: Any) -> torch.Tensor:
        raise error("planted")

    webui.library("functional").attention = explode
    module, (x, text) = cross(webui, family), inputs()
    vae, image = block(webui, family), torch.randn(1, 32, 4, 4)
    hosts = webui.sd_hijack_optimizations
    with torch.no_grad():
        expected = hosts.split_cross_attention_forward(module, x, text)
        decoded = hosts.cross_attention_attnblock_forward(vae, image)
    for _ in range(3):
        assert torch.equal(ours(module, x, text), expected)
    assert torch.equal(ours(vae, image), decoded)
    assert webui.is_ours()
    assert left_to_host(webui) == 4
    assert caplog.text.count("was left to the WebUI's own attention") == 1
    assert caplog.text.count("Traceback") == 1
    assert "in explode" in caplog.text


def test_the_hosts_path_follows_the_settings(webui: WebUI) -> None:
    """What is "the host's own" is asked anew after each hijack."""
    webui.library("functional").attention = None
    module, (x, text) = cross(webui), inputs()
    first = ours(module, x, text)
    hosts = webui.sd_hijack
    hosts.optimizers[:] = [item for item in hosts.optimizers if item.name != "Doggettx"]
    hosts.apply_optimizations()
    second = ours(module, x, text)
    sdp = webui.sd_hijack_optimizations.scaled_dot_product_attention_forward
    with torch.no_grad():
        assert torch.equal(second, sdp(module, x, text))
    assert not torch.equal(first, second)


def test_a_broken_host_optimizer_leaves_the_default(webui: WebUI) -> None:
    def explode() -> None:
        raise RuntimeError("the host's")

    webui.library("functional").attention = None
    webui.library("hosts.webui.host").choice(without=webui.ours).apply = explode
    module, (x, text) = cross(webui), inputs()
    assert torch.equal(ours(module, x, text), theirs(webui, module, x, text))
    assert webui.is_ours()


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, MemoryError])
def test_out_of_memory_is_passed_on(webui: WebUI, error: type[Exception]) -> None:
    def explode(*args: Any) -> torch.Tensor:
        raise error("planted")

    webui.library("functional").attention = explode
    module, (x, text) = cross(webui), inputs()
    with pytest.raises(error):
        ours(module, x, text)
    assert left_to_host(webui) == 0


def test_interruption_is_passed_on(webui: WebUI) -> None:
    interrupted = webui.sd_samplers_common.InterruptedException

    def stop(*args: Any) -> torch.Tensor:
        raise interrupted

    webui.library("functional").attention = stop
    module, (x, text) = cross(webui), inputs()
    with pytest.raises(interrupted):
        ours(module, x, text)


def test_errors_outside_the_core_are_the_hosts(webui: WebUI) -> None:
    module, (x, text) = cross(webui), inputs()
    with pytest.raises(RuntimeError):
        ours(module, x, text[:, :, :7])
    module.to_out = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        ours(module, x, text)
    assert left_to_host(webui) == 0


def test_nan_reaches_the_hosts_check(webui: WebUI) -> None:
    module, (x, text) = cross(webui), inputs()
    x[0, 0, 0] = float("nan")
    result = ours(module, x, text)
    assert result[0, 0].isnan().all()
    assert not result[1:].isnan().any()


def test_a_class_that_borrowed_our_forward(webui: WebUI) -> None:
    """Some extensions take CrossAttention.forward by value for a class of their own."""
    module, (x, text) = cross(webui), inputs()

    class Theirs(torch.nn.Module):
        forward = webui.targets[0][1].forward  # type: ignore[attr-defined]

    copy = Theirs()
    copy.__dict__.update(module.__dict__)
    expected = ours(module, x, text)
    assert torch.equal(ours(copy, x, text), expected)
    webui.library("functional").attention = None
    torch.testing.assert_close(ours(copy, x, text), expected)
    for undo in (lambda: webui.ours.step_aside(True), webui.ours.undo):
        undo()
        torch.testing.assert_close(ours(copy, x, text), expected)
        assert not webui.is_ours()
