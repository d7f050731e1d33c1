"""What a VAE launches, so that it can be compiled ahead. Needs no torch, so that install.py can
use it.
"""

from __future__ import annotations

from lib_rocm_sd.arch import Arch
from lib_rocm_sd.ops.attention import kernel as attention_kernel
from lib_rocm_sd.ops.base import KernelSpec
from lib_rocm_sd.ops.conv import kernel as conv_kernel
from lib_rocm_sd.ops.group_norm import kernel as group_norm_kernel

DTYPE = "float16"
ATTENTION_HEAD_DIM = 512
"""Head dimension of the mid-block's attention, which has one head."""


def shipped_specs(arch: Arch) -> list[KernelSpec]:
    """All kernels of Stable Diffusion's decoders and encoders in fp16, whole and in bands."""
    attention = _attention_specs(arch)
    return list(dict.fromkeys((*conv_kernel.vae_specs(arch), *_norm_specs(arch), *attention)))


def _norm_specs(arch: Arch) -> list[KernelSpec]:
    """Statistics before and after attention, their merge, norms; self-tests apply SiLU as well."""
    form = group_norm_kernel.form_of(DTYPE, ATTENTION_HEAD_DIM, channels_last=True)
    config = group_norm_kernel.configs(arch)[0]
    return [spec for silu in (True, False) for spec in group_norm_kernel.specs(form, silu, config)]


def _attention_specs(arch: Arch) -> list[KernelSpec]:
    """The usual config, and the one that a small picture takes."""
    space = attention_kernel.ordered(arch, DTYPE, ATTENTION_HEAD_DIM)
    configs = (space[0], attention_kernel.narrower(arch, space))
    return [
        attention_kernel.spec(DTYPE, ATTENTION_HEAD_DIM, "none", config)
        for config in configs
        if config
    ]
