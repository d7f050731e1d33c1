"""The scenarios, as data: the request, the scripts beside it, and what it must differ from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.webui_matrix.values import Drawing, Embeds, FileOf, Model, Side, Text

Arguments = Mapping[str | int, Any] | Sequence[Any]
"""Of one script: changes by label or number, or the list as it is."""

PROMPT = "a photo of an astronaut riding a horse, (detailed:1.2)"
PLAIN: dict[str, Any] = {
    "prompt": PROMPT,
    "negative_prompt": "blurry",
    "seed": 1234,
    "sampler_name": "Euler",
    "cfg_scale": 7,
}
QUIET: dict[str, Arguments] = {
    "lora block weight": {"LoRA Block Weight": False},
    "negpip": {"NegPiP": False},
}
"""Scripts that act unless they are told not to."""
OFF_FIRST = ("off", "on", "off", "on")
ON_FIRST = ("on", "off", "on", "off")


@dataclass(frozen=True)
class Scenario:
    """One kind of picture, made with ours off and on.

    With ours off it must differ from `against`, by default the same request without scripts and
    options, or the plain picture if there are none: else losing the effect would not be seen.
    `needs` is an extension's folder, in Forge also of one that it has built in. `warm`: the picture
    depends on the one before (torch's own generator), so one more goes first.
    """

    name: str
    body: Mapping[str, Any] = field(default_factory=dict)
    scripts: Mapping[str, Arguments] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    against: Mapping[str, Any] | None = None
    order: tuple[str, ...] = OFF_FIRST
    warm: bool = False

    @property
    def reference(self) -> Mapping[str, Any]:
        if self.against is not None:
            return self.against
        return self.body if self.scripts or self.options else {}


BIG = {"width": Side(1.5)}
HIRES = {
    "enable_hr": True,
    "hr_scale": 1.5,
    "hr_upscaler": "Latent",
    "denoising_strength": 0.6,
    "hr_additional_modules": ["Use same choices"],  # Forge fails without it, others ignore it
}
FROM_PICTURE = {"init_images": [Drawing("noise")], "denoising_strength": 0.75}
LONG = "a photo of an astronaut riding a horse through a field of wheat under a wide sky, " * 8

CONTROLNET = "sd-webui-controlnet"
CIRCLES = {
    "enabled": True,
    "module": "none",
    "image": Drawing("circles"),
    "weight": 1.0,
    "resize_mode": "Just Resize",
}
CANNY = {**CIRCLES, "model": Model("ControlNet model", "canny")}
T2I = {**CIRCLES, "model": Model("ControlNet model", "t2iadapter")}
IP_ADAPTER = {
    "enabled": True,
    "module": "ip-adapter_clip_h",
    "model": Model("ControlNet model", "ip-adapter"),
    "ipadapter_input": [Embeds(1024)],
    "weight": 1.0,
}


def reference_unit(module: str) -> dict[str, Any]:
    noise = Drawing("noise")
    return {**CIRCLES, "module": module, "image": noise, "threshold_a": 0.5}


def control(name: str, *units: Mapping[str, Any], **more: Any) -> Scenario:
    return Scenario(name, scripts={"controlnet": units}, needs=CONTROLNET, **more)


def animated(name: str, pattern: str, frames: int) -> Scenario:
    folder = "sd-webui-animatediff"
    asked = {
        "model": FileOf(folder, f"model/{pattern}"),
        "enable": True,
        "video_length": frames,
        "batch_size": frames,
        "closed_loop": "N",
        "format": ["PNG", "Frame"],
    }
    return Scenario(name, {"steps": 6}, {"animatediff": [asked]}, needs=folder)


def scripted(
    name: str, needs: str, script: str, changes: Mapping[str | int, Any], **more: Any
) -> Scenario:
    return Scenario(name, scripts={script: changes}, needs=needs, **more)


TILED = "multidiffusion-upscaler-for-automatic1111"
TILES: dict[str | int, Any] = {
    "Enable Tiled Diffusion": True,
    "Latent tile width": Side(1 / 8),
    "Latent tile height": Side(1 / 8),
    "Latent tile overlap": Side(1 / 32),
}
TILED_VAE: dict[str | int, Any] = {
    "Enable Tiled VAE": True,
    "Encoder Tile Size": Side(1 / 2),
    "Decoder Tile Size": Side(1 / 16),
}
INCANTATIONS = "sd-webui-incantations"

EXTENSIONS = (
    control("ip: ip-adapter", IP_ADAPTER),
    control("ip: ip-adapter, on first", IP_ADAPTER, order=ON_FIRST),
    control("ip: ip-adapter and controlnet", IP_ADAPTER, CANNY),
    control("ref: reference_only", reference_unit("reference_only"), warm=True),
    control("ref: reference_adain+attn", reference_unit("reference_adain+attn"), warm=True),
    control("ref: and controlnet", CANNY, reference_unit("reference_only"), warm=True),
    control("cn: controlnet", CANNY),
    control("cn: a part of the steps", {**CANNY, "guidance_start": 0.2, "guidance_end": 0.7}),
    control(
        "cn: controlnet counts more", {**CANNY, "control_mode": "ControlNet is more important"}
    ),
    control("cn: with hires", CANNY, body=HIRES, order=ON_FIRST),
    control("cn: t2i adapter", T2I),
    animated("ad: animatediff v2, 8 frames", "*v2*", 8),
    animated("ad: animatediff v1, 4 frames", "*v15.*", 4),
    scripted("td: tiled diffusion", TILED, "tiled diffusion", TILES, body=BIG),
    scripted("tv: tiled vae", TILED, "tiled vae", TILED_VAE, body=BIG, order=ON_FIRST),
    scripted(
        "rp: regional prompter",
        "sd-webui-regional-prompter",
        "regional prompter",
        {"Regional Prompter": True},
        body={"prompt": "a red horse BREAK a blue astronaut"},
    ),
    scripted(
        "khr: kohya hires fix",
        "sd-webui-kohya-hiresfix",
        "kohya hires.fix",
        {"Enable extension": True, "Stop at#0": 0.4, "Stop at#1": 0.5},
        body=BIG,
        order=ON_FIRST,
    ),
    scripted("fu: freeu v1", "sd-webui-freeu", "freeu", {"Enable": True, 4: "Version 1"}),
    scripted("fu: freeu v2", "sd-webui-freeu", "freeu", {"Enable": True}, order=ON_FIRST),
    scripted(
        "dt: dynamic thresholding",
        "sd-dynamic-thresholding",
        "dynamic thresholding (cfg scale fix)",
        {"Enable Dynamic Thresholding (CFG Scale Fix)": True},
        body={"cfg_scale": 15},
    ),
    scripted(
        "np: negative weights in the prompt",
        "sd-webui-negpip",
        "negpip",
        {"NegPiP": True},
        body={"prompt": f"{PROMPT}, (horse:-1.2)"},
    ),
    Scenario(
        "lbw: lora block weight",
        {"prompt": Text(PROMPT + " <lora:{}:1:lbw=OUTALL>", (Model("LoRA", "plain"),))},
        {"lora block weight": {"LoRA Block Weight": True}},
        needs="sd-webui-lora-block-weight",
    ),
    scripted(
        "inc: perturbed attention",
        INCANTATIONS,
        "incantations",
        {"Active#2": True, "PAG Scale": 3.0},
    ),
    scripted("inc: saliency", INCANTATIONS, "incantations", {"Active#1": True}, order=ON_FIRST),
    scripted(
        "sag: self attention guidance",
        "sd_webui_SAG",
        "self attention guidance",
        {"Enabled": True, "SAG Mask Threshold": 0.9},
    ),
    scripted(
        "cc: vectorscope",
        "sd-webui-vectorscope-cc",
        "vectorscope cc",
        {"Enable": True, "Alt. (Stronger Effects)": True, "Brightness": 3.0},
    ),
    scripted(
        "at: asymmetric tiling",
        "asymmetric-tiling-sd-webui",
        "asymmetric tiling",
        {"Active": True},
        order=ON_FIRST,
    ),
    scripted(
        "co: cutoff",
        "sd-webui-cutoff",
        "cutoff",
        {"Enabled": True, "Target tokens (comma separated)": "red, blue"},
        body={"prompt": "a red horse, a blue astronaut"},
    ),
)

FORGE_CONTROLNET = "sd_forge_controlnet"
FORGE_CANNY = {**CANNY, "module": "None"}
FORGE_NOISE = {**FORGE_CANNY, "image": Drawing("noise")}
FORGE_IP_ADAPTER = {
    **FORGE_NOISE,
    "module": "CLIP-ViT-H (IPAdapter)",
    "model": Model("ControlNet model", "ip-adapter"),
}


def forge_reference(module: str) -> dict[str, Any]:
    return {**FORGE_NOISE, "module": module, "model": "None", "threshold_a": 0.5}


def forge_control(name: str, *units: Mapping[str, Any], **more: Any) -> Scenario:
    more = {"needs": FORGE_CONTROLNET, **more}
    return Scenario(name, scripts={"controlnet": units}, **more)


SDS = "integrated (sd 1.x, sd 2.x, sdxl)"
FORGE = (
    forge_control("fcn: controlnet", FORGE_CANNY),
    forge_control(
        "fcn: a part of the steps", {**FORGE_CANNY, "guidance_start": 0.2, "guidance_end": 0.7}
    ),
    forge_control(
        "fcn: controlnet counts more",
        {**FORGE_CANNY, "control_mode": "ControlNet is more important"},
        order=ON_FIRST,
    ),
    forge_control("fcn: canny of a picture", {**FORGE_NOISE, "module": "canny"}),
    forge_control("fcn: with hires", FORGE_CANNY, body=HIRES, order=ON_FIRST),
    forge_control(
        "fcn: with hires alone",
        {**FORGE_CANNY, "hr_option": "High res only"},
        body=HIRES,
    ),
    forge_control("fcn: two, batch of 2", FORGE_CANNY, FORGE_CANNY, body={"batch_size": 2}),
    forge_control("fcn: img2img", FORGE_CANNY, body=FROM_PICTURE, order=ON_FIRST, warm=True),
    forge_control(
        "fcn: and lora",
        FORGE_CANNY,
        body={"prompt": Text(PROMPT + " <lora:{}:1>", (Model("LoRA", "plain"),))},
    ),
    forge_control("fcn: t2i adapter", {**T2I, "module": "None"}),
    forge_control("fip: ip-adapter", FORGE_IP_ADAPTER, needs="sd_forge_ipadapter"),
    forge_control(
        "fip: ip-adapter and controlnet",
        FORGE_IP_ADAPTER,
        FORGE_CANNY,
        needs="sd_forge_ipadapter",
        order=ON_FIRST,
    ),
    *(
        forge_control(
            f"fref: {module}",
            forge_reference(module),
            needs="forge_preprocessor_reference",
            warm=True,
        )
        for module in ("reference_only", "reference_adain", "reference_adain+attn")
    ),
    forge_control(
        "fref: and controlnet",
        FORGE_CANNY,
        forge_reference("reference_only"),
        needs="forge_preprocessor_reference",
        warm=True,
    ),
    scripted(
        "ffu: freeu",
        "sd_forge_freeu",
        f"freeu {SDS}",
        {0: True, "B1": 1.3, "B2": 1.4, "S1": 0.9, "S2": 0.2},
    ),
    scripted(
        "fdt: dynamic thresholding",
        "sd_forge_dynamic_thresholding",
        "dynamicthresholding (cfg-fix) integrated",
        {"Enabled": True},
        body={"cfg_scale": 15},
    ),
    scripted(
        "fkhr: kohya hires fix",
        "sd_forge_kohya_hrfix",
        "kohya hrfix integrated",
        {0: True, "End Percent": 0.6},
        body=BIG,
        order=ON_FIRST,
    ),
    scripted(
        "fpag: perturbed attention",
        "sd_forge_perturbed_attention",
        "perturbedattentionguidance integrated",
        {0: True, "Scale": 30.0},
    ),
    scripted(
        "fsag: self attention guidance", "sd_forge_sag", f"selfattentionguidance {SDS}", {0: True}
    ),
    scripted(
        "fsa: style align, batch of 2",
        "sd_forge_stylealign",
        "stylealign integrated",
        {"Share attention in batch": True},
        body={"batch_size": 2},
        order=ON_FIRST,
    ),
    scripted(
        "fmd: multidiffusion",
        "sd_forge_multidiffusion",
        "multidiffusion integrated",
        {
            "Enabled": True,
            "Tile Width": Side(1),
            "Tile Height": Side(1),
            "Tile Overlap": Side(1 / 4),
        },
        body=BIG,
    ),
    scripted(
        "foom: vae in tiles",
        "sd_forge_neveroom",
        "never oom integrated",
        {"Enabled for VAE (always tiled)": True},
        body={"width": Side(2)},
    ),
    scripted(
        "foom: weights stay in main memory",
        "sd_forge_neveroom",
        "never oom integrated",
        {"Enabled for UNet (always maximize offload)": True},
        body={"seed": 4321},
        against={},
    ),
)
"""Of what Forge has built in, in its extensions-builtin."""


def lora(name: str, *order: str) -> Scenario:
    prompt = Text(PROMPT + " <lora:{}:1>", (Model("LoRA", name),))
    return Scenario(f"lora: {name}", {"prompt": prompt}, order=order or OFF_FIRST)


def sampler(name: str, scheduler: str = "Automatic") -> Scenario:
    body = {"sampler_name": name, "scheduler": scheduler}
    return Scenario(f"sampler: {name}, {scheduler}", body)


LORAS = ("plain", "locon", "loconcp", "dora", "loha", "lokr", "glora", "oft", "boft", "full")
TWO = Text(
    PROMPT + " <lora:{}:0.6> <lora:{}:-0.5>", (Model("LoRA", "plain"), Model("LoRA", "locon"))
)
NATIVE = (
    Scenario("plain", {"seed": 4321}),
    *(lora(name) for name in LORAS),
    *(lora(name, *ON_FIRST) for name in ("norm", "ia3")),
    Scenario("lora: two at once", {"prompt": TWO}, order=ON_FIRST),
    Scenario(
        "hypernetwork",
        {"prompt": Text(PROMPT + " <hypernet:{}:1>", (Model("hypernetwork", ""),))},
    ),
    Scenario("embedding", {"prompt": Text(PROMPT + ", {}", (Model("embedding", ""),))}),
    Scenario("vae: another", options={"sd_vae": Model("VAE", "")}, order=ON_FIRST),
    Scenario("clip skip", options={"CLIP_stop_at_last_layers": 2}),
    Scenario("hires: latent", HIRES),
    Scenario(
        "refiner",
        {"refiner_checkpoint": Model("checkpoint", "-b"), "refiner_switch_at": 0.5},
        order=ON_FIRST,
    ),
    Scenario("tiling", {"tiling": True}),
    Scenario("img2img", FROM_PICTURE, warm=True),
    Scenario(
        "inpainting",
        {**FROM_PICTURE, "mask": Drawing("mask"), "inpainting_fill": 1},
        against=FROM_PICTURE,
        warm=True,
    ),
    Scenario("tome", options={"token_merging_ratio": 0.5}),
    Scenario("hypertile", BIG, options={"hypertile_enable_unet": True}),
    Scenario("prompt: AND", {"prompt": f"{PROMPT} AND a red house :0.7"}),
    Scenario("prompt: 150 tokens", {"prompt": LONG}),
    Scenario("prompt: editing", {"prompt": "a photo of a [horse:house:0.5]"}),
    Scenario("prompt: no negative", {"negative_prompt": "", "cfg_scale": 1}),
    Scenario("variation", {"subseed": 7, "subseed_strength": 0.4}),
    Scenario("batch 3 x 2", {"batch_size": 3, "n_iter": 2, "steps": 5}, order=ON_FIRST),
    Scenario("size: odd", {"width": Side(65 / 64, 8), "height": Side(97 / 64, 8)}),
    sampler("Euler a"),
    sampler("DPM++ 2M", "Karras"),
    sampler("DPM++ SDE", "Karras"),
    sampler("DPM++ 3M SDE", "Exponential"),
    sampler("Heun", "SGM Uniform"),
    sampler("UniPC"),
    sampler("DDIM"),
    sampler("PLMS"),
    sampler("LCM"),
    sampler("Restart"),
)
