"""The VAE: from nothing, its decoder alone, and pixels to tokens. Knows both families' ways to scale latents.

B images, C latent channels, H W pixels, L tokens of 2 x 2 latents.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fluxbatch.tiny.optim import Recorder
from fluxbatch.tiny.render import render

Vae = Any  # AutoencoderKL or AutoencoderKLFlux2: diffusers' lazy imports hide their attributes from mypy
WARM_UP_STEPS = 100
LATENT_NOISE = 0.06  # standard deviations; a guess, not measured
KL_WEIGHT = 1e-3


@dataclass(frozen=True)
class Size:
    """Pictures of one size that the VAE is trained on."""

    height: int
    width: int
    num_pictures: int
    batch_size: int
    share: float  # of the steps


SIZES = (Size(128, 128, 16_384, 96, 0.75), Size(192, 192, 4_096, 48, 0.25))
SMOKE_SIZES = (Size(64, 64, 32, 4, 1.0),)


def encode_pixels(vae: Vae, pixels: Tensor) -> Tensor:
    """Pixels (B, 3, H, W) in 0..1 -> the mean of their latents (B, C, H/8, W/8), as the encoder gives them."""
    pixels = (pixels * 2 - 1).to(vae.dtype).contiguous(memory_format=torch.channels_last)
    return vae.encode(pixels).latent_dist.mean


def decode(vae: Vae, latents: Tensor) -> Tensor:
    """The encoder's latents -> pixels in 0..1."""
    return (vae.decode(latents.to(vae.dtype)).sample / 2 + 0.5).clamp(0, 1)


def packed(latents: Tensor) -> Tensor:
    """Both families' order: (B, C, H, W) -> (B, H/2 * W/2, 4C)."""
    batch, channels, height, width = latents.shape
    tiles = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(batch, height // 2 * (width // 2), channels * 4).contiguous()


def scaled(vae: Vae, tokens: Tensor) -> Tensor:
    """Packed latents (B, L, 4C) as the transformer sees them: FLUX.1 has two numbers, FLUX.2 a batch norm."""
    if hasattr(vae, "bn"):
        std = torch.sqrt(vae.bn.running_var.float() + vae.config.batch_norm_eps)
        return ((tokens - vae.bn.running_mean.float()) / std).to(tokens.dtype)
    return (tokens - vae.config.shift_factor) * vae.config.scaling_factor


@torch.no_grad()
def calibrate(vae: Vae, latents: Tensor) -> None:
    """Sets what `scaled` subtracts and divides by, from latents (B, C, h, w) of many pictures."""
    tokens = packed(latents.float())
    if hasattr(vae, "bn"):
        vae.bn.running_mean.copy_(tokens.mean((0, 1)))
        vae.bn.running_var.copy_(tokens.var((0, 1)))
    else:
        vae.register_to_config(scaling_factor=1 / float(tokens.std()), shift_factor=float(tokens.mean()))


@torch.no_grad()
def psnr(vae: Vae, pixels: Tensor) -> float:
    """Peak signal-to-noise ratio of the round trip in dB."""
    error = (decode(vae, encode_pixels(vae, pixels)).float() - pixels).square().mean()
    return float(-10 * error.log10())


class Pictures:
    """Fixed pictures of one size on the device, as bytes."""

    def __init__(self, size: Size, rows: Tensor, textures: Tensor) -> None:
        self.size = size
        chosen = rows[torch.arange(size.num_pictures) % len(rows)].to(textures.device)
        parts = [render(part, textures, height=size.height, width=size.width) for part in chosen.split(64)]
        self.pixels = torch.cat([(part * 255).round().byte() for part in parts])

    def draw(self) -> Tensor:
        chosen = torch.randint(len(self.pixels), (self.size.batch_size,), device=self.pixels.device)
        return self.pixels[chosen].float() / 255


def train_whole(vae: Vae, pictures: list[Pictures], *, seconds: float, say: Callable[[str], None]) -> None:
    """Encoder and decoder: rebuilt pixels, and latents near the unit normal (Kingma and Welling, arXiv:1312.6114)."""

    def loss(wanted: Tensor) -> Tensor:
        latents = vae.encode(_channels_last(wanted * 2 - 1)).latent_dist
        mean, logvar = latents.mean.float(), latents.logvar.float()
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        drawn = vae.decode(latents.mean + latents.std * torch.randn_like(latents.std)).sample
        return _difference(drawn, wanted) + KL_WEIGHT * divergence

    _train(vae, list(vae.parameters()), loss, pictures, seconds=seconds, rate=1.2e-3, say=say)


def train_decoder(vae: Vae, pictures: list[Pictures], *, seconds: float, say: Callable[[str], None]) -> None:
    """The decoder alone, from slightly noisy latents: what a transformer has learned of the latents stays valid."""

    def loss(wanted: Tensor) -> Tensor:
        with torch.no_grad():
            latents = vae.encode(_channels_last(wanted * 2 - 1)).latent_dist.mean.float()
        amount = LATENT_NOISE * torch.rand(len(latents), 1, 1, 1, device=latents.device) * latents.std()
        return _difference(vae.decode(_channels_last(latents + amount * torch.randn_like(latents))).sample, wanted)

    _train(vae, list(vae.decoder.parameters()), loss, pictures, seconds=seconds, rate=4e-4, say=say)


def _train(
    vae: Vae,
    parameters: list[nn.Parameter],
    loss: Callable[[Tensor], Tensor],
    pictures: list[Pictures],
    *,
    seconds: float,
    rate: float,
    say: Callable[[str], None],
) -> None:
    """Adam with a rate that falls to nothing over `seconds`."""
    device = pictures[0].pixels.device
    vae.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    learning_rate = torch.zeros((), device=device)
    adam = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.98), fused=True, capturable=learning_rate.is_cuda
    )
    recorder = Recorder(say)
    steps = [recorder.record(functools.partial(_step, loss, some, adam, parameters)) for some in pictures]
    shares, order = torch.tensor([some.size.share for some in pictures]), torch.Generator().manual_seed(0)
    start, done = time.monotonic(), 0
    while (progress := (time.monotonic() - start) / seconds) < 1:
        learning_rate.fill_(rate * math.cos(math.pi / 2 * progress) * min(1.0, (done + 1) / WARM_UP_STEPS))
        steps[int(torch.multinomial(shares, 1, generator=order))]()
        done += 1
        if done % 20 == 0 and learning_rate.is_cuda:
            torch.cuda.synchronize()
    vae.requires_grad_(False)
    say(f"VAE: {done} steps, {time.monotonic() - start:.0f} s")


def _step(
    loss: Callable[[Tensor], Tensor], pictures: Pictures, adam: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> None:
    wanted = pictures.draw()
    with torch.autocast(wanted.device.type, torch.bfloat16, enabled=wanted.is_cuda, cache_enabled=False):
        value = loss(wanted)
    adam.zero_grad(set_to_none=True)
    value.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
    adam.step()


def _difference(drawn: Tensor, wanted: Tensor) -> Tensor:
    """L1 of pixels and of their gradients, and a squared error; drawn in -1..1, wanted in 0..1."""
    error = drawn.float() / 2 + 0.5 - wanted
    across, down = error.diff(dim=-1).abs().mean(), error.diff(dim=-2).abs().mean()
    return error.abs().mean() + 0.5 * (across + down) + 2 * error.square().mean()


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)
