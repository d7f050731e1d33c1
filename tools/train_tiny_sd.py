"""Train models/tiny-sd from nothing: first the autoencoder, then text encoder and UNet together.

    python -m tools.train_tiny_sd --compile --out models/tiny-sd

Eight minutes on a data-centre GPU, which makes the pictures and captions while it trains. Seeded;
the learning rate follows the step count, or the clock where `--vae-seconds` or `--unet-seconds`
runs out first. Losses go to <out>/training.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional as F

from tools import tiny_model, tiny_tokenizer
from tools.shapes import Captioner, Scenes, random_scenes, render, words

KL_WEIGHT = 1e-4
EMPTY_CAPTIONS = 0.1


@dataclass
class Progress:
    """Counts steps against a limit of steps and one of seconds, and keeps the losses."""

    name: str
    steps: int
    seconds: float
    history: list[dict[str, float]] = field(default_factory=list)
    step: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    @property
    def fraction(self) -> float:
        """How much is done, 0 to 1."""
        return min(1.0, max(self.step / self.steps, self.elapsed / self.seconds))

    def __iter__(self) -> Iterator[int]:
        while self.fraction < 1:
            yield self.step
            self.step += 1

    def log(self, every: int, **losses: Tensor) -> None:
        """Keep and print the losses of one step in `every`."""
        if self.step % every == 0:
            values = {key: round(value.item(), 6) for key, value in losses.items()}
            self.history.append({"step": self.step, "seconds": round(self.elapsed, 1), **values})
            print(f"{self.name} {self.history[-1]}", flush=True)


class Averaged:
    """The exponential moving average of a module's parameters."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.mean = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the parameters; quickly in the first steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.mean, self.live, 1 - decay)

    @torch.no_grad()
    def install(self) -> None:
        """Replace the parameters by their average."""
        for live, mean in zip(self.live, self.mean, strict=True):
            live.copy_(mean)


def optimizer_of(parameters: list[Tensor], rate: float) -> torch.optim.AdamW:
    """AdamW, fused where the parameters are on a GPU."""
    return torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.99), weight_decay=0.01, fused=parameters[0].is_cuda
    )


def set_rate(
    optimizer: torch.optim.Optimizer, rate: float, progress: Progress, warmup: int
) -> None:
    """Linear warm-up, then a cosine down to zero."""
    rise = min(1.0, (progress.step + 1) / warmup)
    rate *= rise * (0.5 + 0.5 * math.cos(math.pi * progress.fraction))
    for group in optimizer.param_groups:
        group["lr"] = rate


def half(device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 autocast on a GPU, nothing on the CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def edges(picture: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of neighbouring pixels, down and across."""
    return picture.diff(dim=2), picture.diff(dim=3)


def train_autoencoder(
    vae: AutoencoderKL, args: argparse.Namespace, generator: torch.Generator
) -> list[dict[str, float]]:
    """Train in place; returns the losses."""
    device = generator.device
    average = Averaged(vae, 0.999)
    optimizer = optimizer_of(average.live, args.vae_rate)
    losses_of = torch.compile(autoencoder_loss, dynamic=False) if args.compile else autoencoder_loss
    progress = Progress("autoencoder", args.vae_steps, args.vae_seconds)
    for step in progress:
        set_rate(optimizer, args.vae_rate, progress, warmup=100)
        scenes = random_scenes(args.vae_batch, generator)
        pictures = render(scenes, generator).to(memory_format=torch.channels_last)
        noise = torch.randn(
            (args.vae_batch, 4, tiny_model.LATENT, tiny_model.LATENT),
            generator=generator,
            device=device,
        )
        with half(device):
            pixel, edge, kl = losses_of(vae, pictures, noise)
        loss = pixel + edge + KL_WEIGHT * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(average.live, 1.0)
        optimizer.step()
        average.update(step)
        progress.log(args.log_every, pixel=pixel, edge=edge, kl=kl)
    average.install()
    vae.eval().requires_grad_(False)
    return progress.history


def autoencoder_loss(
    vae: AutoencoderKL, pictures: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Means: absolute plus squared error of pixels, that of edges, KL per latent number."""
    posterior = vae.encode(pictures).latent_dist
    restored = vae.decode(posterior.mean + posterior.std * noise).sample.float()
    pixel = F.l1_loss(restored, pictures) + F.mse_loss(restored, pictures)
    down, across = (F.l1_loss(a, b) for a, b in zip(edges(restored), edges(pictures), strict=True))
    return pixel, down + across, posterior.kl().float().mean() / noise[0].numel()


@torch.no_grad()
def encode_pool(
    vae: AutoencoderKL, count: int, batch: int, generator: torch.Generator
) -> tuple[Scenes, Tensor]:
    """`count` scenes and their latents, float16 (count, 4, 32, 32), not yet scaled."""
    scenes, latents = [], []
    for _ in range(0, count, batch):
        part = random_scenes(batch, generator)
        pictures = render(part, generator).to(memory_format=torch.channels_last)
        with half(generator.device):
            latents.append(vae.encode(pictures).latent_dist.mean.half())
        scenes.append(part)
    return Scenes.concatenated(scenes), torch.cat(latents)


class Denoiser(nn.Module):
    """Text encoder and UNet as one module, so that they train and compile together."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.text = tiny_model.text_encoder(vocabulary_size)
        self.unet = tiny_model.unet()

    def forward(self, latents: Tensor, timesteps: Tensor, ids: Tensor) -> Tensor:
        """Predicted velocity, the shape of `latents`."""
        states = self.text(ids).last_hidden_state
        return self.unet(latents, timesteps, encoder_hidden_states=states).sample


def train_denoiser(
    model: Denoiser,
    pool: tuple[Scenes, Tensor],
    args: argparse.Namespace,
    generator: torch.Generator,
) -> list[dict[str, float]]:
    """Train in place on the pool's scaled latents; returns the losses."""
    device, (scenes, latents) = generator.device, pool
    alphas = tiny_model.scheduler().alphas_cumprod.to(device)
    captioner = Captioner(tiny_tokenizer.word_ids(words()), device)
    average = Averaged(model, 0.999)
    optimizer = optimizer_of(average.live, args.unet_rate)
    forward = torch.compile(model, dynamic=False) if args.compile else model
    progress = Progress("denoiser", args.unet_steps, args.unet_seconds)
    for step in progress:
        set_rate(optimizer, args.unet_rate, progress, warmup=300)
        index = torch.randint(len(latents), (args.unet_batch,), generator=generator, device=device)
        clean = latents[index].float()
        ids = captioner(scenes[index])
        dropped = torch.rand(args.unet_batch, generator=generator, device=device) < EMPTY_CAPTIONS
        ids = torch.where(dropped[:, None], captioner.empty(args.unet_batch), ids)
        noise = torch.randn(clean.shape, generator=generator, device=device)
        times = torch.randint(len(alphas), (args.unet_batch,), generator=generator, device=device)
        alpha = alphas[times].view(-1, 1, 1, 1)
        signal, sigma = alpha.sqrt(), (1 - alpha).sqrt()
        noisy = (signal * clean + sigma * noise).contiguous(memory_format=torch.channels_last)
        with half(device):
            predicted = forward(noisy, times, ids)
        loss = F.mse_loss(predicted.float(), signal * noise - sigma * clean)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(average.live, 1.0)
        optimizer.step()
        average.update(step)
        progress.log(args.log_every, loss=loss)
    average.install()
    return progress.history


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile", action="store_true", help="compile both models with torch.compile"
    )
    parser.add_argument("--vae-steps", type=int, default=30_000)
    parser.add_argument("--vae-seconds", type=float, default=170.0)
    parser.add_argument("--vae-batch", type=int, default=64)
    parser.add_argument("--vae-rate", type=float, default=1.5e-3)
    parser.add_argument(
        "--pool", type=int, default=131_072, help="number of encoded pictures to train on"
    )
    parser.add_argument("--unet-steps", type=int, default=30_000)
    parser.add_argument("--unet-seconds", type=float, default=300.0)
    parser.add_argument("--unet-batch", type=int, default=256)
    parser.add_argument("--unet-rate", type=float, default=1e-3)
    parser.add_argument("--log-every", type=int, default=100)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Train and save. Returns 0."""
    args = arguments(argv)
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = torch.device(args.device)
    generator = torch.Generator(device).manual_seed(args.seed)

    vae = tiny_model.autoencoder().to(device, memory_format=torch.channels_last)
    losses = {"autoencoder": train_autoencoder(vae, args, generator)}
    scenes, latents = encode_pool(vae, args.pool, min(args.pool, 1024), generator)
    scale = 1.0 / latents[:20_000].float().std().item()
    vae.register_to_config(scaling_factor=round(scale, 5))
    latents.mul_(vae.config.scaling_factor)
    print(f"{len(latents)} latents, scaling factor {scale:.5f}", flush=True)

    model = Denoiser(len(tiny_tokenizer.vocabulary_of(words())))
    model.to(device).unet.to(memory_format=torch.channels_last)
    losses["denoiser"] = train_denoiser(model, (scenes, latents), args, generator)
    tiny_model.save(args.out, words(), vae, model.text, model.unet)
    facts = {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
    }
    facts.pop("out")
    text = json.dumps({"torch": torch.__version__, "arguments": facts, "losses": losses}, indent=1)
    (args.out / "training.json").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
