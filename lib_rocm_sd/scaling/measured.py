"""What the model of time starts from, and where each figure was measured.

Figures of an NVIDIA H200 stand in docs/results; tests compare them with the files. Those of two
H200s are from the issue that asked for several GPUs, and are in no file.
"""

from __future__ import annotations

from dataclasses import dataclass

H200 = "NVIDIA H200, docs/results/"
TWO_H200 = "two NVIDIA H200, NVLink, eager fp16 diffusers UNets, one process for each"


@dataclass(frozen=True)
class Step:
    """A UNet's call for a prompt and its negative prompt.

    `device_ms`: what the device works, `submit_ms`: what the CPU takes to submit it, by `launches`.
    `fixed_share`: of the device's time, what does not fall with the batch. `edges`, `norms`,
    `keys`: exchanges of patch parallel, and `edge_bytes`, `key_bytes`: what one rank of two sends
    in them. `units`: into how many rows of the smallest image it can be parted.
    """

    name: str
    device_ms: float
    submit_ms: float
    launches: int
    fixed_share: float
    edges: int
    norms: int
    keys: int
    edge_bytes: int
    key_bytes: int
    image_bytes: int
    units: int
    source: str


SD15_FIXED = 0.51
"""A step takes f + n p for n pictures: 1/133.0 s for one and 1/53.56 s for four, in the WebUI with
the UNet's blocks (webui-unet-h200.json), so f is half of a step for one."""
SDXL_FIXED = 0.093
"""ComfyUI's split of SDXL takes 1/1.80 to 1/1.86 of the time on two cards (the issue; which ones is
not known): (f + p) / (f + 2 p) = 1/1.83."""

STEPS = (
    Step(
        *("SD 1.5 512x512, blocks", 6.457, 4.334, 742, SD15_FIXED),
        *(52, 61, 16, 4629504, 46202880, 32768, 8),
        H200 + "unet-h200.json: rocm_sd Auto",
    ),
    Step(
        *("SD 1.5 512x512, eager", 11.943, 27.895, 1175, SD15_FIXED),
        *(52, 61, 16, 4629504, 46202880, 32768, 8),
        H200 + "unet-h200.json: eager",
    ),
    Step(
        *("SDXL 1024x1024, blocks", 30.746, 8.720, 1682, SDXL_FIXED),
        *(40, 46, 70, 8194048, 419430400, 131072, 32),
        H200 + "unet-h200.json: rocm_sd Auto",
    ),
    Step(
        *("SDXL 1024x1024, eager", 41.676, 69.753, 2353, SDXL_FIXED),
        *(40, 46, 70, 8194048, 419430400, 131072, 32),
        H200 + "unet-h200.json: eager",
    ),
    Step(
        *("SDXL 2048x2048, eager", 214.2, 69.753, 2353, SDXL_FIXED / 5),
        *(40, 46, 70, 16388096, 1677721600, 524288, 64),
        "not measured: 1024x1024's device time, 16 times its self-attention (10 of 183.6 us and 60 "
        "of 35.3 us, attention-h200.json: sdpa) and 4 times the rest; the same launches",
    ),
)
"""Exchanges and bytes were counted by running patch parallel without data."""

VAE_MS = {512: 8.208, 1024: 27.672, 2048: 125.573, 4096: 795.538}
"""One decode, whole frame or bands, by pictures' size: vae-h200.json, rocm_sd Auto."""


@dataclass(frozen=True)
class Picture:
    """What users ask for: seconds on one card, of which `steps` steps of `step_s`, and the VAE's
    (vae-h200.json).
    """

    name: str
    seconds: float
    steps: int
    step_s: float
    vae_s: float
    fixed_share: float
    share: float
    source: str

    @property
    def rest_s(self) -> float:
        """Text encoder, VAE, and all that is no step."""
        return max(self.seconds - self.steps * self.step_s, 0.0)


PICTURES = (
    Picture(
        *("SD 1.5 512x512, 20 steps", 0.23651, 20, 1 / 133.005, 0.008208, SD15_FIXED, 0.6),
        H200 + "webui-unet-h200.json: 512, UNet Auto",
    ),
    Picture(
        *(
            "SD 1.5 512x512, 4 pictures",
            0.69344,
            20,
            1 / 53.559,
            4 * 0.008208,
            SD15_FIXED / 4,
            0.15,
        ),
        H200 + "webui-unet-h200.json: 512x4, UNet Auto",
    ),
    Picture(
        *("SD 1.5 1024x1024, 20 steps", 0.83369, 20, 1 / 36.535, 0.027672, SDXL_FIXED, 0.25),
        H200 + "webui-unet-h200.json: 1024, UNet Auto; SDXL's fixed share is assumed",
    ),
)
"""`share` of all requests is assumed."""


@dataclass(frozen=True)
class Pair:
    """A step on one card and, split by guidance, on two. ms."""

    name: str
    one_ms: float
    two_ms: float
    step: str


PAIRS = (
    Pair("SD 1.5", 18.3, 25.8, "SD 1.5 512x512, eager"),
    Pair("SDXL", 53.9, 47.4, "SDXL 1024x1024, eager"),
)
"""Measured on TWO_H200, in a prototype whose processes handed over through Python."""


@dataclass(frozen=True)
class Link:
    """Between two cards, each way at once: bytes per second, and what a small message takes."""

    name: str
    gb_s: float
    latency_us: float
    source: str


LINKS = (
    Link("NVLink (H200)", 386.0, 13.0, "measured on two H200s, a copy (the issue)"),
    Link("xGMI (MI300X)", 48.0, 15.0, "64 GB/s each way by AMD's data sheet, 3/4 of it assumed"),
    Link("PCIe 5.0 x16", 47.0, 20.0, "63 GB/s by the standard, 3/4 of it assumed"),
    Link("PCIe 4.0 x16", 24.0, 20.0, "31.5 GB/s by the standard, 3/4 of it assumed"),
    Link("Ethernet 100 Gbit/s", 11.0, 30.0, "12.5 GB/s, 7/8 of it assumed, with RDMA"),
    Link("Ethernet 10 Gbit/s", 1.1, 60.0, "1.25 GB/s, 7/8 of it assumed"),
)
CARDS = (2, 4, 8, 16, 32, 64)
