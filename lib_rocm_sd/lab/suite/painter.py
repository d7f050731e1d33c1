"""What makes the suite's pictures: a pipeline of diffusers, taken apart into what a picture's time
is made of.

A model of Stable Diffusion's shapes with random weights has no tokenizer: its text encoder is given
tokens drawn from the prompt. Its speed is a checkpoint's; its pictures show nothing.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from lib_rocm_sd.lab import model_cases, models
from lib_rocm_sd.lab.suite.workloads import (
    HIRES_SHARE,
    NEGATIVE_PROMPT,
    SD15,
    SDXL,
    SEED,
    Workload,
)
from lib_rocm_sd.lab.timing import wait
from lib_rocm_sd.lab.upscaler_models import RRDBNet, level, settle

TOKENS, FACTOR = 77, 8
_TEXT = {
    SD15: ({"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},),
    SDXL: (
        {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_attention_heads": 20,
            "num_hidden_layers": 32,
            "projection_dim": 1280,
            "hidden_act": "gelu",
        },
    ),
}
"""CLIP's text encoders, as diffusers' folders configure them."""
_SMALL_TEXT = {"intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}


@dataclass
class Shot:
    """Pictures made at once, and where their time went, in seconds of wall time; the device had
    nothing left to do at each border. `steps`: each; `cpu`: of this process during the steps.
    `trouble`: why the pictures show nothing.
    """

    images: list[Any] = field(default_factory=list)
    trouble: str = ""
    text: float = 0.0
    steps: list[float] = field(default_factory=list)
    decode: float = 0.0
    upscale: float = 0.0
    host: float = 0.0
    cpu: float = 0.0

    @property
    def seconds(self) -> float:
        return self.text + sum(self.steps) + self.decode + self.upscale + self.host


class Painter:
    """A pipeline by which a workload's pictures are made. `model`: SD15 or SDXL."""

    def __init__(self, pipeline: Any, model: str, encoders: Sequence[Any] = ()) -> None:
        """`encoders`: of a model with random weights."""
        self.pipeline, self.model, self._encoders = pipeline, model, list(encoders)

    @property
    def random(self) -> bool:
        return bool(self._encoders)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.pipeline.unet.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.pipeline.unet.dtype
        return dtype

    def in_float32(self) -> Painter:
        """A copy with the same weights in float32."""
        pipeline = copy.copy(self.pipeline)
        for name, part in self.pipeline.components.items():
            if isinstance(part, torch.nn.Module):
                setattr(pipeline, name, copy.deepcopy(part).float())
        encoders = [copy.deepcopy(encoder).float() for encoder in self._encoders]
        return Painter(pipeline, self.model, encoders)

    def on(self, device: torch.device) -> Painter:
        """A copy on another device."""
        pipeline = copy.copy(self.pipeline)
        for name, part in self.pipeline.components.items():
            setattr(pipeline, name, copy.deepcopy(part))
            if isinstance(part, torch.nn.Module):
                getattr(pipeline, name).to(device)
        encoders = [copy.deepcopy(encoder).to(device) for encoder in self._encoders]
        return Painter(pipeline, self.model, encoders)

    def with_lora(self) -> Painter:
        """A copy whose UNet has an adapter of PEFT, not fused."""
        pipeline = copy.copy(self.pipeline)
        pipeline.unet = copy.deepcopy(self.pipeline.unet)
        model_cases.add_lora(pipeline.unet)
        pipeline.unet.to(self.device, self.dtype).requires_grad_(False)
        return Painter(pipeline, self.model, self._encoders)

    @torch.no_grad()
    def paint(self, workload: Workload, prompts: Sequence[str]) -> Shot:
        """`workload.batch` pictures, of the prompts in turn. All begin with the same latent."""
        shot, device = Shot(), self.device
        wait(device)
        begin = time.perf_counter()
        if workload.kind == "decode":
            latents = self._noise(workload)
        else:
            prompts = [prompts[place % len(prompts)] for place in range(workload.batch)]
            texts = self._encode(prompts)
            wait(device)
            shot.text = time.perf_counter() - begin
            latents = self._denoise(workload, texts, shot)
        wait(device)
        middle = time.perf_counter()
        image = self._decode(latents)
        wait(device)
        shot.decode = time.perf_counter() - middle
        shot.images = self.pipeline.image_processor.postprocess(image, output_type="pil")
        known = shot.text + sum(shot.steps) + shot.decode
        shot.host = max(time.perf_counter() - begin - known, 0.0)
        shot.trouble = _trouble(image)
        return shot

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images of latents. As diffusers' pipelines do, SDXL's VAE computes in float32 where its
        config says that it overflows in fp16.
        """
        vae = self.pipeline.vae
        dtype, latents = vae.dtype, latents / vae.config.scaling_factor
        upcast = self.model == SDXL and dtype == torch.float16 and vae.config.force_upcast
        if not upcast:
            image: torch.Tensor = vae.decode(latents)[0]
            return image
        try:
            image = vae.to(torch.float32).decode(latents.float())[0]
        finally:
            vae.to(dtype)
        return image

    def _denoise(self, workload: Workload, texts: dict[str, Any], shot: Shot) -> torch.Tensor:
        """Latents of the pictures; each step's time goes to `shot`."""
        marks: list[float] = []

        def mark(_: Any, step: int, time_step: Any, values: dict[str, Any]) -> dict[str, Any]:
            wait(self.device)
            marks.append(time.perf_counter())
            return values

        options = {
            **texts,
            "guidance_scale": workload.guidance,
            "num_inference_steps": workload.steps,
            "output_type": "latent",
            "callback_on_step_end": mark,
        }
        size = {"height": workload.height, "width": workload.width}
        cpu, begin = time.process_time(), time.perf_counter()
        made = self.pipeline(latents=self._noise(workload), **size, **options).images
        if workload.kind == "hires":
            shot.steps += _between(begin, marks)
            marks.clear()
            larger = torch.nn.functional.interpolate(made, scale_factor=2.0)
            begin = time.perf_counter()
            generator = torch.Generator("cpu").manual_seed(SEED)
            options |= {"strength": HIRES_SHARE, "generator": generator}
            made = self._image_to_image()(image=larger, **options).images
        shot.steps += _between(begin, marks)
        shot.cpu = time.process_time() - cpu
        latents: torch.Tensor = made
        return latents

    def _image_to_image(self) -> Any:
        import diffusers

        name = type(self.pipeline).__name__.replace("Pipeline", "Img2ImgPipeline")
        with_parts = getattr(diffusers, name)(**self.pipeline.components)
        with_parts.set_progress_bar_config(disable=True)
        return with_parts

    def _noise(self, workload: Workload) -> torch.Tensor:
        """One latent for all pictures, drawn on the CPU in float32."""
        shape = (1, 4, workload.height // FACTOR, workload.width // FACTOR)
        noise = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(SEED))
        return noise.repeat(workload.batch, 1, 1, 1).to(self.device, self.dtype)

    def _encode(self, prompts: list[str]) -> dict[str, Any]:
        """What the pipeline is given for prompts and the negative prompt."""
        if not self._encoders:
            negative = [NEGATIVE_PROMPT] * len(prompts)
            made = self.pipeline.encode_prompt(
                prompt=prompts,
                device=self.device,
                num_images_per_prompt=1,
                do_classifier_free_guidance=True,
                negative_prompt=negative,
            )
        else:
            every = [NEGATIVE_PROMPT] * len(prompts) + prompts
            tokens = torch.stack([_tokens(prompt) for prompt in every]).to(self.device)
            texts = [each(tokens, output_hidden_states=True) for each in self._encoders]
            states = torch.cat([text.hidden_states[-2] for text in texts], -1)
            made = states.chunk(2)[::-1]
            if self.model == SDXL:
                made = (*made, *texts[-1].text_embeds.chunk(2)[::-1])
        return dict(zip(_EMBEDS, made, strict=False))


_EMBEDS = (
    "prompt_embeds",
    "negative_prompt_embeds",
    "pooled_prompt_embeds",
    "negative_pooled_prompt_embeds",
)


def _between(begin: float, marks: Sequence[float]) -> list[float]:
    """Seconds of each step."""
    return [after - before for before, after in zip([begin, *marks], marks, strict=False)]


def _trouble(image: torch.Tensor) -> str:
    return "" if image.isfinite().all() else "the picture has values that are not finite"


def _tokens(prompt: str) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(prompt.encode()))
    return torch.randint(0, 49_000, (TOKENS,), generator=generator)


class Enlarger:
    """A Painter for an upscaler: RRDBNet x4 of ESRGAN's size with random weights. Its `pipeline`
    has nothing but the `upscaler`.
    """

    random = True

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        self.device, self.dtype = device, dtype
        self.pipeline = SimpleNamespace(upscaler=module.to(device, dtype))

    def in_float32(self) -> Enlarger:
        """A copy with the same weights in float32."""
        module = copy.deepcopy(self.pipeline.upscaler)
        return Enlarger(module, torch.float32, self.device)

    @torch.no_grad()
    def paint(self, workload: Workload, prompts: Sequence[str]) -> Shot:
        """A picture with four times as many pixels each way as one drawn from SEED."""
        shape = (workload.batch, 3, workload.height, workload.width)
        values = torch.rand(shape, generator=torch.Generator("cpu").manual_seed(SEED))
        wait(self.device)
        begin = time.perf_counter()
        made = self.pipeline.upscaler(values.to(self.device, self.dtype))
        wait(self.device)
        shot = Shot(upscale=time.perf_counter() - begin, trouble=_trouble(made))
        pixels = (made.float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        shot.images = [Image.fromarray(each) for each in pixels]
        shot.host = time.perf_counter() - begin - shot.upscale
        return shot


# -- models ---------------------------------------------------------------------------------------


def enlarger(device: torch.device, dtype: torch.dtype, small: bool) -> Enlarger:
    """An upscaler with random weights; `small`: of few channels."""
    torch.manual_seed(SEED)
    module = RRDBNet(width=16, blocks=1) if small else RRDBNet()
    return Enlarger(level(settle(module)), dtype, device)


def random_painter(
    model: str, device: torch.device, dtype: torch.dtype, small: bool = False
) -> Painter:
    """A pipeline of the shapes of SD15 or SDXL with random weights; `small`: of few channels."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    is_xl = model == SDXL
    spec = model_cases.SDXL if is_xl else model_cases.SD15
    config = {**spec.config, **(spec.small if small else {})}
    unet = model_cases.made(spec.kind, config, model_cases.Draw.of(device, dtype)).eval()
    unet.register_to_config(sample_size=128 if is_xl else 64)  # type: ignore[operator]
    vae = models.autoencoder(device, dtype, small)
    vae.register_to_config(scaling_factor=0.13025 if is_xl else 0.18215)
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        timestep_spacing="leading",
    )
    parts: dict[str, Any] = {"vae": vae, "unet": unet, "scheduler": scheduler}
    parts |= {"text_encoder": None, "tokenizer": None}
    if is_xl:
        parts |= {"text_encoder_2": None, "tokenizer_2": None}
        pipeline: Any = diffusers.StableDiffusionXLPipeline(**parts, add_watermarker=False)
    else:
        parts |= {"safety_checker": None, "feature_extractor": None}
        pipeline = diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    encoders = []
    for place, options in enumerate(_TEXT[model]):
        if small:
            width = config["cross_attention_dim"] // len(_TEXT[model])
            options = {**options, **_SMALL_TEXT, "hidden_size": width, "projection_dim": 16}
        kind: Any = CLIPTextModelWithProjection if place else CLIPTextModel
        torch.manual_seed(SEED + place)
        encoder = kind(CLIPTextConfig(**options)).to(device, dtype).eval()
        encoders.append(encoder.requires_grad_(False))
    return Painter(pipeline, model, encoders)
