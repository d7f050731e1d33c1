"""Several GPUs: further cards of a WebUI (docs/several-gpus.md), ranks of torch.distributed."""
