"""What the suite measures, as data, and what each of its workloads can be compared with.

MLPerf Inference's text-to-image makes 1024x1024 pictures by SDXL in 20 steps of Euler's sampler,
guidance 8, with one negative prompt and one latent, drawn on the CPU from seed 0, for all captions
(mlcommons/inference, text_to_image: backend_pytorch.py, tools/latent.py; its accuracy windows are
those of tools/submission, "stable-diffusion-xl"). These settings are ours, too. What the suite
prints is no MLPerf result: nobody has reviewed it, and random weights have no accuracy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

SEED = 0
STEPS = 20
SMALL_STEPS = 3
GUIDANCE = 8.0
NEGATIVE_PROMPT = "normal quality, low quality, worst quality, low res, blurry, nsfw, nude"
PROMPTS = (
    "a red circle left of a blue square",
    "a big yellow star on a blue background",
    "a small white circle inside a red square on a green background",
    "an orange heart above a purple ring on a black background",
)
CLIP_WINDOW = (31.68631873, 31.81331801)
FID_WINDOW = (23.01085758, 23.95007626)
"""MLPerf's, for SDXL in float32 over 5,000 captions of COCO 2014."""
LATENCY_LIMIT_S = 20.0
"""MLPerf's for SDXL in its server scenario; the share of pictures that kept it is told."""
MLPERF = "the settings of MLPerf Inference's text-to-image (SDXL, 1024x1024); no MLPerf result"
HIRES_SHARE = 0.7
"""Denoising strength of a hires fix, as the WebUI begins with."""


@dataclass(frozen=True)
class Workload:
    """One thing that users do. `width`, `height`: of the picture in pixels; of a hires fix, of the
    first pass, and of an upscaler, of what it is given. `kind`: "picture", "hires", "lora",
    "decode" or "upscale". `like`: what it can be compared with.
    """

    name: str
    model: str
    width: int
    height: int
    kind: str = "picture"
    batch: int = 1
    steps: int = STEPS
    guidance: float = GUIDANCE
    like: str = ""

    def settings(self) -> dict[str, Any]:
        """What has to be alike in two results that are compared."""
        return asdict(self)

    def small(self) -> Workload:
        """The same with an eighth of the pixels each way, or less, and few steps: for a CPU. It is
        named so, and like nothing that others measure.
        """
        part = 16 if self.kind in ("decode", "upscale") else 8
        width, height = (max(side // part, 64) for side in (self.width, self.height))
        steps = min(self.steps, SMALL_STEPS)
        name = f"{self.name}, reduced to {width}x{height}"
        if self.kind not in ("decode", "upscale"):
            name += f" and {steps} steps"
        return replace(self, name=name, width=width, height=height, steps=steps, like="")


SD15, SDXL, ESRGAN = "SD 1.5", "SDXL", "ESRGAN"
WORKLOADS = (
    Workload("SD 1.5 512x512", SD15, 512, 512),
    Workload("SD 1.5 512x512, 4 at once", SD15, 512, 512, batch=4),
    Workload("SD 1.5 768x512", SD15, 768, 512),
    Workload("SD 1.5 512x512, hires fix", SD15, 512, 512, kind="hires"),
    Workload("SD 1.5 512x512, LoRA", SD15, 512, 512, kind="lora"),
    Workload("SD 1.5 decode 1024x1024", SD15, 1024, 1024, kind="decode"),
    Workload("SD 1.5 decode 2048x2048", SD15, 2048, 2048, kind="decode"),
    Workload("SD 1.5 decode 4096x4096", SD15, 4096, 4096, kind="decode"),
    Workload("ESRGAN x4, 512x512 to 2048x2048", ESRGAN, 512, 512, kind="upscale"),
    Workload("SDXL 1024x1024", SDXL, 1024, 1024, like=MLPERF),
    Workload("SDXL 1024x1024, 4 at once", SDXL, 1024, 1024, batch=4, like=MLPERF),
    Workload("SDXL 1024x1024, LoRA", SDXL, 1024, 1024, kind="lora"),
)
QUICK = ("SD 1.5 512x512", "SD 1.5 decode 1024x1024", "SDXL 1024x1024")
COCO = ("SD 1.5 512x512", "SDXL 1024x1024")
PRESETS: dict[str, tuple[str, ...]] = {
    "quick": QUICK,
    "standard": tuple(workload.name for workload in WORKLOADS),
    "coco": COCO,
}
TURNS = {"quick": 2, "standard": 3, "coco": 1}
PICTURES = {"quick": 2, "standard": 3, "coco": 1}
"""Timed in a turn of each way."""
