"""Sharpens the decoder of the VAE. The encoder stays, so that latents, and all that was learned on them, stay valid."""

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fluxbatch.tiny.data import Vae, encode_pixels
from fluxbatch.tiny.optim import Recorder
from fluxbatch.tiny.render import render

# (height, width): pictures kept, batch size, share of the steps
SIZES = {(128, 128): (16_384, 96, 0.75), (192, 192): (4_096, 48, 0.25)}
SMOKE_SIZES = {(64, 64): (32, 4, 1.0)}
WARM_UP_STEPS = 100
LATENT_NOISE = 0.06  # standard deviations; a guess, not measured


def psnr(vae: Vae, pixels: Tensor) -> float:
    """Peak signal-to-noise ratio of the round trip in dB."""
    with torch.no_grad():
        error = (decode(vae, encode_pixels(vae, pixels)).float() - pixels).square().mean()
    return float(-10 * error.log10())


def decode(vae: Vae, latents: Tensor) -> Tensor:
    """Scaled latents -> pixels in 0..1."""
    raw = latents / vae.config.scaling_factor + vae.config.shift_factor
    return (vae.decode(raw.to(vae.dtype)).sample / 2 + 0.5).clamp(0, 1)


class Pictures:
    """Fixed pictures of one size with their latents, on the device."""

    def __init__(self, vae: Vae, rows: Tensor, textures: Tensor, *, height: int, width: int) -> None:
        parts = [render(part, textures, height=height, width=width) for part in rows.split(64)]
        self.pixels = torch.cat([(part * 255).round().byte() for part in parts])
        with torch.no_grad():
            self.latents = torch.cat([encode_pixels(vae, part) for part in parts])


def tune_decoder(
    vae: Vae,
    rows: Tensor,
    textures: Tensor,
    *,
    sizes: dict[tuple[int, int], tuple[int, int, float]],
    seconds: float,
    say: Callable[[str], None],
    stopping: Callable[[], bool],
) -> None:
    """L1 on pixels and on their gradients, from slightly noisy latents; Adam with a falling learning rate."""
    vae.requires_grad_(False)
    parameters = list(vae.decoder.requires_grad_(True).parameters())
    rate = torch.zeros((), device=textures.device)
    adam = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), fused=True, capturable=rate.is_cuda)
    recorder, steps, weights = Recorder(say), [], []
    for (height, width), (num, batch, share) in sizes.items():
        chosen = rows[torch.arange(num) % len(rows)].to(textures.device)
        pictures = Pictures(vae, chosen, textures, height=height, width=width)
        steps.append(recorder.record(functools.partial(_step, vae, pictures, batch, adam)))
        weights.append(share)
    start, done, order = time.monotonic(), 0, torch.Generator().manual_seed(0)
    while (progress := (time.monotonic() - start) / seconds) < 1 and not stopping():
        rate.fill_(4e-4 * (1 - progress) * min(1.0, (done + 1) / WARM_UP_STEPS))
        steps[int(torch.multinomial(torch.tensor(weights), 1, generator=order))]()
        done += 1
        if done % 20 == 0 and rate.is_cuda:
            torch.cuda.synchronize()
    vae.requires_grad_(False)
    say(f"decoder tuned for {done} steps, {time.monotonic() - start:.0f} s")


def _step(vae: Vae, pictures: Pictures, batch: int, adam: torch.optim.Optimizer) -> None:
    device = pictures.pixels.device
    chosen = torch.randint(len(pictures.pixels), (batch,), device=device)
    latents = pictures.latents[chosen].float()
    noisy = latents + LATENT_NOISE * torch.rand(batch, 1, 1, 1, device=device) * torch.randn_like(latents)
    raw = noisy / vae.config.scaling_factor + vae.config.shift_factor
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
        drawn = vae.decode(raw.contiguous(memory_format=torch.channels_last)).sample.float() / 2 + 0.5
    wanted = pictures.pixels[chosen].float() / 255
    across, down = (drawn - wanted).diff(dim=-1).abs().mean(), (drawn - wanted).diff(dim=-2).abs().mean()
    loss = (drawn - wanted).abs().mean() + 0.5 * (across + down) + 2 * (drawn - wanted).square().mean()
    adam.zero_grad(set_to_none=True)
    loss.backward()
    adam.step()
