"""What ranks need, imported and loaded once."""

from __future__ import annotations

import contextlib

import torch

torch.set_num_threads(1)
with contextlib.suppress(ImportError):
    import transformers  # noqa: F401

    from tests.distributed import blocks, ranks  # noqa: F401

    ranks.little()
