"""The name under which docs/diffusers.md has `served`: see attention.py."""

from lib_rocm_sd.hosts.attention import Serving, served

__all__ = ["Serving", "served"]
