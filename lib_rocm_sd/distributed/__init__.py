"""Several GPUs, one process for each, on torch.distributed (docs/distributed.md)."""

from lib_rocm_sd.distributed.errors import LeftOut, RankError
from lib_rocm_sd.distributed.group import Group, joined
from lib_rocm_sd.distributed.guidance import guidance_split
from lib_rocm_sd.distributed.patch import patch_parallel
from lib_rocm_sd.distributed.prompts import for_each
from lib_rocm_sd.distributed.stages import Stage, in_stages, of_pipeline
from lib_rocm_sd.distributed.vae import vae_bands

__all__ = [
    "Group",
    "LeftOut",
    "RankError",
    "Stage",
    "for_each",
    "guidance_split",
    "in_stages",
    "joined",
    "of_pipeline",
    "patch_parallel",
    "vae_bands",
]
