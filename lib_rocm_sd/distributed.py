"""Several GPUs, one process for each, on torch.distributed (docs/distributed.md)."""

from lib_rocm_sd.cards.batch import Stage, for_each, guidance_split, in_stages
from lib_rocm_sd.cards.group import Group, LeftOut, joined
from lib_rocm_sd.cards.ranks import RankError
from lib_rocm_sd.hosts.diffusers.patch import patch_parallel
from lib_rocm_sd.hosts.diffusers.ranks import of_pipeline, vae_bands

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
