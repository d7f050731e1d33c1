"""Double of modules/processing.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
One generation, with the script hooks in the real order. The sampler is a plain Euler loop with
classifier-free guidance, in place of sd_samplers_kdiffusion.py.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from modules import (
    devices,
    errors,
    images,
    infotext_utils,
    paths,
    script_callbacks,
    scripts,
    sd_models,
    sd_unet,
    shared,
)
from modules.sd_samplers_common import (
    InterruptedException,
    decode_first_stage,
    images_tensor_to_samples,
    store_latent,
)
from modules.shared import cmd_opts, opts, state

opt_f = 8


def _stop_if_asked():
    if state.interrupted or state.skipped:
        raise InterruptedException


class DecodedSamples(list):
    already_decoded = True


@dataclass(repr=False)
class StableDiffusionProcessing:
    sd_model: Any = None
    prompt: str = "a red circle"
    negative_prompt: str = ""
    seed: int = 1
    batch_size: int = 1
    n_iter: int = 1
    steps: int = 3
    cfg_scale: float = 5.0
    width: int = 64
    height: int = 64
    override_settings: dict = field(default_factory=dict)
    override_settings_restore_afterwards: bool = True
    extra_generation_params: dict = field(default_factory=dict)
    refiner_checkpoint: str | None = None
    sampler_name: str | None = None
    do_not_save_samples: bool = False
    is_api: bool = field(default=False, init=False)
    scripts_value: Any = field(default=None, init=False)
    script_args_value: tuple = field(default=(), init=False)
    scripts_setup_complete: bool = field(default=False, init=False)

    def __post_init__(self):
        self.comments: dict = {}
        self.iteration = 0
        self.decoded: list = []

    def close(self):
        self.sd_model = None

    @property
    def scripts(self):
        return self.scripts_value

    @scripts.setter
    def scripts(self, value):
        self.scripts_value = value
        self._set_up()

    @property
    def script_args(self):
        return self.script_args_value

    @script_args.setter
    def script_args(self, value):
        self.script_args_value = value
        self._set_up()

    def _set_up(self):
        if self.scripts_value and self.script_args_value and not self.scripts_setup_complete:
            self.setup_scripts()

    def setup_scripts(self):
        self.scripts_setup_complete = True
        self.scripts.setup_scrips(self, is_ui=not self.is_api)

    def comment(self, text):
        self.comments[text] = 1

    def init(self, all_prompts, all_seeds, all_subseeds):
        pass

    def sample(
        self,
        conditioning,
        unconditional_conditioning,
        seeds,
        subseeds,
        subseed_strength,
        prompts,
    ):
        raise NotImplementedError

    def _noise(self, seeds, height, width):
        shape = (4, height // opt_f, width // opt_f)
        made = [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
        return torch.stack(made).to(devices.dtype_unet)

    def _denoise(self, x, start, cond, uncond):
        """Euler from step `start` on; may be interrupted; the refiner changes the model."""
        latent = x
        try:
            for step in range(start, self.steps):
                _stop_if_asked()
                if self.refiner_checkpoint and step == self.steps // 2:
                    sd_models.reload_model_weights(info=self.refiner_checkpoint)
                    cond = shared.sd_model.get_learned_conditioning(self.prompts)
                    uncond = shared.sd_model.get_learned_conditioning(self.negative_prompts)
                sigma = 1.0 - step / self.steps
                t = torch.full((2 * len(x),), sigma)
                script_callbacks.cfg_denoiser_callback(
                    script_callbacks.CFGDenoiserParams(
                        *(latent, None, t, step, self.steps, cond, uncond),
                        denoiser=SimpleNamespace(p=self, step=step - start),
                    )
                )
                both = shared.sd_model.apply_model(
                    torch.cat([latent, latent]), t, torch.cat([cond, uncond])
                )
                positive, negative = both.chunk(2)
                guided = negative + self.cfg_scale * (positive - negative)
                latent = latent - guided * (0.1 / self.steps)
                state.sampling_step = step
                store_latent(latent)
        except InterruptedException:
            pass
        return latent


@dataclass(repr=False)
class StableDiffusionProcessingTxt2Img(StableDiffusionProcessing):
    enable_hr: bool = False
    hr_scale: float = 2.0
    hr_upscaler: str | None = None
    denoising_strength: float = 0.75

    def sample(
        self,
        conditioning,
        unconditional_conditioning,
        seeds,
        subseeds,
        subseed_strength,
        prompts,
    ):
        x = self._noise(seeds, self.height, self.width)
        self._before_every(x, conditioning, unconditional_conditioning)
        samples = self._denoise(x, 0, conditioning, unconditional_conditioning)
        if not self.enable_hr or state.interrupted:
            return samples
        if self.hr_upscaler is None:
            samples = torch.nn.functional.interpolate(
                samples, scale_factor=self.hr_scale, mode="nearest"
            )
        else:
            samples = self._upscaled(decode_latent_batch(self.sd_model, samples))
        noise = self._noise(seeds, samples.shape[2] * opt_f, samples.shape[3] * opt_f)
        self._before_every(samples, conditioning, unconditional_conditioning)
        start = self.steps - int(self.steps * self.denoising_strength)
        mixed = samples + noise * self.denoising_strength
        samples = self._denoise(mixed, start, conditioning, unconditional_conditioning)
        return decode_latent_batch(self.sd_model, samples, check_for_nans=True)

    def _upscaled(self, decoded_samples):
        """By an upscaler of pictures: from each its latents."""
        made = []
        for sample in torch.clamp((torch.stack(list(decoded_samples)) + 1.0) / 2.0, 0.0, 1.0):
            pixels = (255.0 * np.moveaxis(sample.float().cpu().numpy(), 0, 2)).astype(np.uint8)
            width, height = (int(side * self.hr_scale) for side in (self.width, self.height))
            image = images.resize_image(
                0, Image.fromarray(pixels), width, height, upscaler_name=self.hr_upscaler
            )
            made.append(np.moveaxis(np.array(image).astype(np.float32) / 255.0, 2, 0))
        return images_tensor_to_samples(torch.from_numpy(np.array(made)))

    def _before_every(self, x, c, uc):
        if self.scripts is not None:
            self.scripts.process_before_every_sampling(p=self, x=x, noise=x, c=c, uc=uc)


@dataclass(repr=False)
class StableDiffusionProcessingImg2Img(StableDiffusionProcessing):
    init_images: list = field(default_factory=list)
    resize_mode: int = 0
    denoising_strength: float = 0.75

    def init(self, all_prompts, all_seeds, all_subseeds):
        image = self.init_images[0].convert("RGB")
        image = images.resize_image(self.resize_mode, image, self.width, self.height)
        pixels = np.asarray(image, dtype=np.float32) / 255.0
        image = torch.from_numpy(np.moveaxis(pixels, 2, 0).copy())[None]
        self.init_latent = images_tensor_to_samples(image, model=self.sd_model)

    def sample(
        self,
        conditioning,
        unconditional_conditioning,
        seeds,
        subseeds,
        subseed_strength,
        prompts,
    ):
        height, width = (size * opt_f for size in self.init_latent.shape[2:])
        x = self._noise(seeds, height, width)
        if self.scripts is not None:
            self.scripts.process_before_every_sampling(
                p=self, x=self.init_latent, noise=x, c=conditioning, uc=unconditional_conditioning
            )
        start = self.steps - int(self.steps * self.denoising_strength)
        mixed = self.init_latent.to(x.dtype) + x * self.denoising_strength
        return self._denoise(mixed, start, conditioning, unconditional_conditioning)


class Processed:
    def __init__(
        self,
        p,
        images_list,
        seed=-1,
        info="",
        subseed=None,
        all_prompts=None,
        all_negative_prompts=None,
        all_seeds=None,
        all_subseeds=None,
        index_of_first_image=0,
        infotexts=None,
        comments="",
    ):
        self.images = images_list
        self.infotexts = infotexts or [info]
        self.info = self.infotexts[0]
        self.decoded = p.decoded
        self.comments = "".join(f"{comment}\n" for comment in p.comments)
        self.extra_generation_params = p.extra_generation_params


def decode_latent_batch(model, batch, target_device=None, check_for_nans=False):
    samples = DecodedSamples()
    if check_for_nans:
        devices.test_for_nans(batch, "unet")
    for i in range(batch.shape[0]):
        sample = decode_first_stage(model, batch[i : i + 1])[0]
        if check_for_nans:
            try:
                devices.test_for_nans(sample, "vae")
            except devices.NansException:
                if not opts.auto_vae_precision or devices.dtype_vae == torch.float32:
                    raise
                devices.dtype_vae = torch.float32
                model.first_stage_model.to(devices.dtype_vae)
                sample = decode_first_stage(model, batch[i : i + 1])[0]
        samples.append(sample if target_device is None else sample.to(target_device))
    return samples


def create_infotext(
    p,
    all_prompts,
    all_seeds,
    all_subseeds,
    comments=None,
    iteration=0,
    position_in_batch=0,
    use_main_prompt=False,
    index=None,
    all_negative_prompts=None,
):
    if index is None:
        index = position_in_batch + iteration * p.batch_size
    params = {
        "Steps": p.steps,
        "CFG scale": p.cfg_scale,
        "Seed": all_seeds[index],
        "Size": f"{p.width}x{p.height}",
        **p.extra_generation_params,
    }
    for key, value in params.items():
        try:
            if isinstance(value, list):
                params[key] = value[index]
            elif callable(value):
                params[key] = value(**locals())
        except Exception:
            errors.report(f'Error creating infotext for key "{key}"', exc_info=True)
            params[key] = None
    text = ", ".join(f"{k}: {infotext_utils.quote(v)}" for k, v in params.items() if v is not None)
    return f"{p.prompt}\n{text}"


def process_images(p):
    if p.scripts is not None:
        p.scripts.before_process(p)
    stored = {k: opts.data[k] for k in p.override_settings if k in opts.data}
    try:
        if "sd_model_checkpoint" not in p.override_settings:
            sd_models.reload_model_weights()
        for key, value in p.override_settings.items():
            opts.set(key, value, is_api=True, run_callbacks=False)
            if key == "sd_model_checkpoint":
                sd_models.reload_model_weights()
        p.sd_model = shared.sd_model
        return process_images_inner(p)
    finally:
        if p.override_settings_restore_afterwards:
            for key, value in stored.items():
                setattr(opts, key, value)


def process_images_inner(p):
    devices.torch_gc()
    total = p.batch_size * p.n_iter
    all_prompts, all_negative = [p.prompt] * total, [p.negative_prompt] * total
    all_seeds = [p.seed + i for i in range(total)]
    if p.scripts is not None:
        p.scripts.process(p)
    images, infotexts = [], []
    with torch.no_grad(), p.sd_model.ema_scope():
        with devices.autocast():
            p.init(all_prompts, all_seeds, all_seeds)
        sd_unet.apply_unet()
        for n in range(p.n_iter):
            p.iteration = n
            if state.interrupted:
                break
            sd_models.reload_model_weights()
            p.sd_model = shared.sd_model
            part = slice(n * p.batch_size, (n + 1) * p.batch_size)
            p.prompts, p.negative_prompts = all_prompts[part], all_negative[part]
            seeds = all_seeds[part]
            batch = {"batch_number": n, "prompts": p.prompts, "seeds": seeds, "subseeds": seeds}
            if p.scripts is not None:
                p.scripts.before_process_batch(p, **batch)
                p.scripts.process_batch(p, **batch)
            cond = shared.sd_model.get_learned_conditioning(p.prompts)
            uncond = shared.sd_model.get_learned_conditioning(p.negative_prompts)
            if n == 0:
                info = create_infotext(p, all_prompts, all_seeds, all_seeds)
                processed = Processed(p, [], info=info)
                if not cmd_opts.no_prompt_history:
                    Path(paths.data_path, "params.txt").write_text(processed.info, encoding="utf-8")
            with devices.without_autocast() if devices.unet_needs_upcast else devices.autocast():
                samples = p.sample(cond, uncond, seeds, seeds, 0, p.prompts)
            if p.scripts is not None:
                ps = scripts.PostSampleArgs(samples)
                p.scripts.post_sample(p, ps)
                samples = ps.samples
            if not getattr(samples, "already_decoded", False):
                devices.test_for_nans(samples, "unet")
                samples = decode_latent_batch(
                    p.sd_model, samples, target_device=devices.cpu, check_for_nans=True
                )
            decoded = torch.clamp((torch.stack(list(samples)).float() + 1.0) / 2.0, 0.0, 1.0)
            p.decoded.append(decoded)
            if p.scripts is not None:
                p.scripts.postprocess_batch(p, decoded, batch_number=n)
                listed = scripts.PostprocessBatchListArgs(list(decoded))
                p.scripts.postprocess_batch_list(p, listed, batch_number=n)
                decoded = listed.images
            for i, sample in enumerate(decoded):
                array = (255.0 * np.moveaxis(sample.cpu().numpy(), 0, 2)).astype(np.uint8)
                text = create_infotext(
                    p, all_prompts, all_seeds, all_seeds, iteration=n, position_in_batch=i
                )
                image = Image.fromarray(array)
                image.info["parameters"] = text
                if opts.samples_save and not p.do_not_save_samples:
                    folder = Path(paths.data_path, "outputs", "txt2img-images")
                    folder.mkdir(parents=True, exist_ok=True)
                    image.save(folder / f"{len(list(folder.iterdir())):05}.png")
                images.append(image)
                infotexts.append(text)
    devices.torch_gc()
    res = Processed(p, images, infotexts=infotexts)
    if p.scripts is not None:
        p.scripts.postprocess(p, res)
    return res
