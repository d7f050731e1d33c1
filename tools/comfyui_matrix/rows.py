"""Workflows with a feature each, as data; links to what differs between ways are holes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.comfyui_process import Workflow

MOTION = "random-motion.safetensors"
"""The file that the probe writes."""
Link = Any
"""[node, output], or a hole."""


@dataclass(frozen=True)
class Hole:
    """What `workflow` links in its place."""

    name: str


OWN, MODEL, FINAL, VAE = Hole("own"), Hole("model"), Hole("final"), Hole("vae")
"""The model without ours; the one that a feature is added to; the one that is sampled with."""
POSITIVE, NEGATIVE, LATENT, DECODED = ["1", 1], ["1", 2], ["2", 0], ["4", 0]
SIDE, KIND, STEPS = Hole("side"), Hole("kind"), Hole("steps")


def node(name: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": name, "inputs": inputs}


@dataclass(frozen=True)
class Row:
    """`nodes` are added; `model`, `positive` and so on are what the sampler is then given, `image`
    what is shown. `needs`: custom nodes, by their folder. `kinds`: the models that it is for.
    """

    name: str
    nodes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    model: Link = MODEL
    positive: Link = field(default_factory=lambda: POSITIVE)
    latent: Link = field(default_factory=lambda: LATENT)
    image: Link = field(default_factory=lambda: DECODED)
    needs: str = ""
    kinds: tuple[str, ...] = ()
    size: Mapping[str, Any] = field(default_factory=dict)
    changes: bool = True


@dataclass(frozen=True)
class Way:
    """Where our nodes are: none, before the feature's or after them."""

    name: str
    ours: bool = False
    last: bool = False


WITHOUT, FIRST, LAST = Way("without"), Way("first", True), Way("last", True, True)
SAMPLING = {"cfg": 7.0, "sampler_name": "euler", "scheduler": "normal"}
_AGAIN = {**SAMPLING, "seed": 3, "steps": STEPS, "denoise": 0.6}
_PROMPTS = {"positive": POSITIVE, "negative": NEGATIVE}


def _patched(name: str, node_name: str, **inputs: Any) -> Row:
    """A node that gives a changed clone of the model."""
    return Row(name, {"20": node(node_name, model=MODEL, **inputs)}, model=["20", 0])


_PIPE = node("ToBasicPipe", model=FINAL, clip=["21", 0], vae=VAE, **_PROMPTS)
_HALVES = {"noise_seed": 1, "latent_image": LATENT, "steps": STEPS, **SAMPLING, **_PROMPTS}
_SCALED = node("ImageScaleBy", image=DECODED, upscale_method="bilinear", scale_by=2.0)
_ADAPTER = {"20": node("RandomImageAdapter", model=OWN, seed=4)}
_APPLIED = {"model": MODEL, "ipadapter": ["20", 0], "pos_embed": ["20", 1], "neg_embed": ["20", 2]}
_APPLIED |= {"weight": 1.0, "start_at": 0.0, "end_at": 1.0, "embeds_scaling": "V only"}
_MASK = node("SolidMask", value=0.3, width=64, height=64)


def _image_adapter(name: str, **more: Any) -> Row:
    nodes = {**_ADAPTER, "21": _MASK, "22": node("IPAdapterEmbeds", **_APPLIED, **more)}
    return Row(name, nodes, ["22", 0], needs="ComfyUI_IPAdapter_plus")


def _animated(name: str, frames: int, **more: Any) -> Row:
    window = {"context_length": 8, "context_stride": 1, "context_overlap": 2}
    nodes = {
        "20": node("ADE_LoadAnimateDiffModel", model_name=MOTION),
        "21": node("ADE_ApplyAnimateDiffModelSimple", motion_model=["20", 0]),
        "22": node("ADE_UseEvolvedSampling", model=MODEL, m_models=["21", 0], **more),
        "23": node("ADE_StandardUniformContextOptions", **window),
    }
    nodes["22"]["inputs"]["beta_schedule"] = "autoselect"
    needs = "ComfyUI-AnimateDiff-Evolved"
    size = {"batch_size": frames}
    return Row(name, nodes, ["22", 0], needs=needs, kinds=("SD 1.5",), size=size)


_DETAILED = {
    **{"guide_size": SIDE, "guide_size_for": True, "max_size": SIDE, "feather": 5},
    **{"noise_mask": True, "force_inpaint": True, "wildcard": "", "cycle": 1},
}
_SEGMENTS = {"combined": False, "crop_factor": 1.5, "bbox_fill": False, "drop_size": 1}
_TILES = {
    **{"mode_type": "Linear", "tile_width": SIDE, "tile_height": SIDE, "mask_blur": 8},
    **{"tile_padding": 32, "seam_fix_mode": "None", "seam_fix_denoise": 1.0},
    **{"seam_fix_width": 64, "seam_fix_mask_blur": 8, "seam_fix_padding": 16},
    **{"force_uniform_tiles": True, "tiled_decode": False, "batch_size": 1},
}
ROWS = (
    Row("plain", changes=False),
    Row("three at a time", size={"batch_size": 3}, changes=False),
    Row("a size that is no multiple of 64", size={"width": Hole("odd")}, changes=False),
    Row(
        "ControlNet",
        {
            "20": node("RandomControlNet", kind=KIND, seed=5),
            "21": node("RandomImage", side=SIDE, seed=6),
            "22": node(
                "ControlNetApplyAdvanced",
                **{**_PROMPTS, "control_net": ["20", 0], "image": ["21", 0], "strength": 1.0},
                **{"start_percent": 0.0, "end_percent": 1.0},
            ),
        },
        positive=["22", 0],
    ),
    _patched("LoRA", "RandomLora", seed=8),
    _patched("FreeU", "FreeU_V2", b1=1.3, b2=1.4, s1=0.9, s2=0.2),
    _patched("HyperTile", "HyperTile", tile_size=32, swap_size=2, max_depth=1, scale_depth=False),
    _patched(
        "Kohya's DeepShrink",
        "PatchModelAddDownscale",
        **{"block_number": 2, "downscale_factor": 2.0, "start_percent": 0.0, "end_percent": 0.7},
        **{"downscale_after_skip": True, "downscale_method": "bicubic"},
        upscale_method="bicubic",
    ),
    _patched("PAG", "PerturbedAttentionGuidance", scale=3.0),
    _patched("SAG", "SelfAttentionGuidance", scale=0.5, blur_sigma=2.0),
    _patched("ToMe", "TomePatchModel", ratio=0.5),
    _patched("cross-attention times", "UNetCrossAttentionMultiply", q=1.0, k=1.2, v=1.5, out=1.0),
    _image_adapter("IPAdapter", weight_type="linear"),
    _image_adapter("IPAdapter, style", weight_type="style transfer"),
    _image_adapter("IPAdapter, masked", weight_type="linear", attn_mask=["21", 0]),
    _animated("AnimateDiff", 8),
    _animated("AnimateDiff, in windows", 12, context_options=["23", 0]),
    Row(
        "the second half of the steps without ours",
        {
            "20": node(
                "KSamplerAdvanced",
                **{**_HALVES, "model": FINAL, "add_noise": "enable", "start_at_step": 0},
                **{"end_at_step": 2, "return_with_leftover_noise": "enable"},
            ),
            "21": node(
                "KSamplerAdvanced",
                **{**_HALVES, "latent_image": ["20", 0], "model": OWN, "add_noise": "disable"},
                **{"start_at_step": 2, "end_at_step": 1000},
                return_with_leftover_noise="disable",
            ),
            "22": node("VAEDecode", samples=["21", 0], vae=VAE),
        },
        image=["22", 0],
        changes=False,
    ),
    Row(
        "again at twice the size",
        {
            "20": node(
                "LatentUpscaleBy", samples=["3", 0], upscale_method="bilinear", scale_by=2.0
            ),
            "21": node("KSampler", model=FINAL, latent_image=["20", 0], **_AGAIN, **_PROMPTS),
            "22": node("VAEDecode", samples=["21", 0], vae=VAE),
        },
        image=["22", 0],
    ),
    Row(
        "decoded in tiles",
        {
            "20": node(
                "VAEDecodeTiled",
                **{"samples": ["3", 0], "vae": VAE, "tile_size": 64, "overlap": 32},
                **{"temporal_size": 64, "temporal_overlap": 8},
            )
        },
        image=["20", 0],
    ),
    Row(
        "Impact's detailer",
        {
            "20": node("SolidMask", value=1.0, width=SIDE, height=SIDE),
            "21": node("NoClip"),
            "22": node("MaskToSEGS", mask=["20", 0], contour_fill=False, **_SEGMENTS),
            "23": node(
                "DetailerForEach",
                **{"image": DECODED, "segs": ["22", 0], "model": FINAL, "clip": ["21", 0]},
                **{"vae": VAE, **_PROMPTS, **_AGAIN, **_DETAILED},
            ),
        },
        image=["23", 0],
        needs="ComfyUI-Impact-Pack",
    ),
    Row(
        "Impact's iterative upscale",
        {
            "20": _PIPE,
            "21": node("NoClip"),
            "22": node(
                "PixelKSampleUpscalerProviderPipe",
                **{**_AGAIN, "basic_pipe": ["20", 0], "scale_method": "bilinear"},
                **{"use_tiled_vae": False, "tile_size": 512},
            ),
            "23": node(
                "IterativeLatentUpscale",
                **{"samples": ["3", 0], "upscale_factor": 1.5, "steps": 2, "temp_prefix": ""},
                **{"upscaler": ["22", 0], "step_mode": "simple"},
            ),
            "24": node("VAEDecode", samples=["23", 0], vae=VAE),
        },
        image=["24", 0],
        needs="ComfyUI-Impact-Pack",
    ),
    Row(
        "Ultimate SD Upscale",
        {
            "20": _SCALED,
            "21": node(
                "UltimateSDUpscaleNoUpscale",
                **{"upscaled_image": ["20", 0], "model": FINAL, "vae": VAE},
                **{**_PROMPTS, **_AGAIN, **_TILES},
            ),
        },
        image=["21", 0],
        needs="ComfyUI_UltimateSDUpscale",
    ),
)


def workflow(row: Row, way: Way, kind: str, side: int, steps: int) -> Workflow:
    """The row's workflow for a model and a size."""
    own = ["1", 0]
    source = ["10", 0] if way.ours and not way.last else own
    holes: dict[str, Any] = {"own": own, "model": source, "side": side, "odd": side + 8}
    holes |= {"kind": kind, "steps": steps, "vae": ["11", 0] if way.ours else ["1", 3]}
    final = holes[row.model.name] if isinstance(row.model, Hole) else row.model
    holes["final"] = ["10", 0] if way.last else final
    sampled = {"model": FINAL, "positive": row.positive, "negative": NEGATIVE}
    sampled |= {"latent_image": row.latent, "seed": 1, "steps": STEPS, "denoise": 1.0, **SAMPLING}
    made: dict[str, Any] = {
        "1": node("RandomModels", kind=KIND, seed=0),
        "2": node(
            "EmptyLatentImage", **{"width": SIDE, "height": SIDE, "batch_size": 1, **row.size}
        ),
        "3": node("KSampler", **sampled),
        "4": node("VAEDecode", samples=["3", 0], vae=VAE),
        **row.nodes,
        "5": node("SaveImage", images=row.image, filename_prefix="matrix"),
    }
    if way.ours:
        asked = final if way.last else own
        level = {"level": "Auto", "attention": True, "unet": "Auto"}
        made["10"] = node("RocmSdModel", model=asked, **level)
        coder = {"level": "Auto", "mode": "Auto", "budget_mib": 0, "decode": True, "encode": True}
        made["11"] = node("RocmSdVae", vae=["1", 3], **coder)
        made["12"] = node("RocmSdStatus", after=row.image)
    return {key: _filled(each, holes) for key, each in made.items()}


def _filled(thing: Any, holes: Mapping[str, Any]) -> Any:
    """The same with what is in the place of each hole."""
    if isinstance(thing, Hole):
        return holes[thing.name]
    if isinstance(thing, dict):
        return {key: _filled(value, holes) for key, value in thing.items()}
    return thing
