"""Run in a process of its own: a real ComfyUI's Wan VAE by the node's stand-in, on the CPU.

Arguments: ComfyUI's checkout. Prints what came of each call as JSON.
"""

import json
import sys

checkout, sys.argv[1:] = sys.argv[1], ["--cpu"]
sys.path.insert(0, checkout)

import comfy.options

comfy.options.enable_args_parsing()

import torch
from comfy.ldm.wan.vae import WanVAE

from lib_rocm_sd.hosts.comfyui import vae as ours


def main() -> None:
    """Decodes and encodes a picture and a video, with ours and without."""
    ours.Coder.unfit = lambda *_: ""  # type: ignore[method-assign]  # there is no GPU here
    torch.manual_seed(0)
    sizes = {"dim": 16, "z_dim": 16, "dim_mult": [1, 2], "num_res_blocks": 1}
    model = WanVAE(**sizes, temperal_downsample=[True]).eval().requires_grad_(False)
    for name, tensor in model.named_parameters():
        share = 0.3 if "gamma" in name or tensor.ndim < 2 else tensor[0].numel() ** -0.5
        tensor.copy_(torch.randn_like(tensor) * share + ("gamma" in name))
    wish = ours.NodeWish()
    stage = ours.FirstStage(model, wish)
    calls = {
        "decode": (torch.randn(1, 16, 1, 7, 5), torch.randn(1, 16, 3, 7, 5)),
        "encode": (torch.randn(1, 3, 1, 14, 10), torch.randn(1, 3, 5, 14, 10)),
    }
    found = {}
    for (key, given), role in zip(calls.items(), ("decoder", "encoder"), strict=True):
        apart = []
        for each in given:
            right, made = getattr(model, key)(each), getattr(stage, key)(each)
            apart.append(float((made - right).abs().max() / right.abs().max()))
        coder = ours.coder_of(model, role, wish)
        reasons = ["cannot be looked at"] if coder is None else list(coder.program.reasons)
        found[role] = {"picture": apart[0], "video": apart[1], "reasons": reasons}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
