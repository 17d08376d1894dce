"""The two objectives, flow matching and guidance distillation, for either family. Knows tensors, no files of a run.

Rectified flow, Liu et al. 2022, arXiv:2209.03003; logit-normal times, Esser et al. 2024, arXiv:2403.03206;
guidance distillation, Meng et al. 2022, arXiv:2210.03142, as FLUX.1-dev has it.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# B batch, S text tokens, L packed latent tokens, C channels of a packed token

EMPTY_SHARE = 0.10  # captions replaced by the empty one, so that guidance has something to point away from
EMPTY_SHARE_UNGUIDED = 0.02  # where there is none: an empty prompt is still to draw a picture of this language
UNIFORM_SHARE = 0.15  # noise levels drawn evenly instead of logit-normally: the ends of the schedule matter too
# Noise levels drawn evenly from HIGH_NOISE to 1, where nothing but the caption says which thing goes where. Below, the
# latents give it away: with 13 % of its samples up there, a model drew 12 % of the pairs of shapes in one step from
# sigma 1, 42 % from .9 and 70 % from .8; sampling decides in the first five of its 20 steps.
HIGH_NOISE, HIGH_NOISE_SHARE = 0.85, 0.35
GUIDANCE_RANGE = (1.0, 5.0)
# Guidance input g means a classifier-free scale of 1 + (g - 1) * this: 2.25 at FLUX's usual 3.5. Larger scales
# oversaturate a small palette.
GUIDANCE_STRENGTH = 0.5
# the shipped scheduler's: exp(mu) is the timestep shift, mu linear in the number of latent tokens
BASE_SHIFT, MAX_SHIFT, BASE_TOKENS, MAX_TOKENS = 0.5, 1.15, 64, 1024

Rotary = tuple[Tensor, Tensor]
TokenIds = tuple[Tensor, ...]  # one (B, S) a text encoder
Text = tuple[Tensor, ...]  # whatever `embed` hands to `velocity`


class Network(Protocol):
    """Transformer and text encoders of one family."""

    guided: bool

    def embed(self, ids: TokenIds) -> Text: ...

    def velocity(self, latents: Tensor, *, sigma: Tensor, guidance: Tensor, text: Text, rotary: Rotary) -> Tensor: ...


@dataclass(frozen=True)
class Bucket:
    """Training data of one size, all of it on the device."""

    height: int
    width: int
    batch_size: int
    latents: Tensor  # (N, L, C), bf16 on a GPU
    ids: TokenIds  # (N, S) int16
    rotary: Rotary


@dataclass(frozen=True)
class Noised:
    """One batch between data and noise: (1 - sigma) * clean + sigma * noise."""

    latents: Tensor
    target: Tensor  # noise - clean
    sigma: Tensor
    ids: TokenIds


def draw(bucket: Bucket, *, empty: TokenIds, empty_share: float) -> Noised:
    """A random batch; every draw is made on the device, so that a captured graph draws anew at each replay."""
    device, batch = bucket.latents.device, bucket.batch_size
    chosen = torch.randint(len(bucket.latents), (batch,), device=device)
    clean = bucket.latents[chosen].float()
    noise, sigma = torch.randn_like(clean), draw_sigma(batch, num_tokens=clean.shape[1], device=device)
    blank = torch.rand(batch, 1, device=device) < empty_share
    ids = tuple(torch.where(blank, none, some[chosen].long()) for none, some in zip(empty, bucket.ids, strict=True))
    return Noised(torch.lerp(clean, noise, sigma[:, None, None]), noise - clean, sigma, ids)


def draw_sigma(batch: int, *, num_tokens: int, device: torch.device) -> Tensor:
    """Noise levels (B,): a share of high ones; the rest one from each of equal slices of the scheduler's shifted
    distribution."""
    slices = (torch.arange(batch, device=device) + torch.rand(batch, device=device)) / batch
    logit_normal = torch.sigmoid(math.sqrt(2) * torch.erfinv((2 * slices - 1).clamp(-0.9999, 0.9999)))
    even = torch.rand(batch, device=device) < UNIFORM_SHARE
    plain = torch.where(even, torch.rand(batch, device=device), logit_normal)
    mu = BASE_SHIFT + (MAX_SHIFT - BASE_SHIFT) * (num_tokens - BASE_TOKENS) / (MAX_TOKENS - BASE_TOKENS)
    shift = math.exp(mu)
    shifted = (shift * plain / (1 + (shift - 1) * plain)).clamp(1e-4, 1.0)
    high = torch.rand(batch, device=device) < HIGH_NOISE_SHARE
    return torch.where(high, 1 - (1 - HIGH_NOISE) * torch.rand(batch, device=device), shifted)


def flow_loss(net: Network, bucket: Bucket, *, empty: TokenIds) -> Tensor:
    batch = draw(bucket, empty=empty, empty_share=EMPTY_SHARE if net.guided else EMPTY_SHARE_UNGUIDED)
    unguided = torch.ones_like(batch.sigma)
    velocity = net.velocity(
        batch.latents, sigma=batch.sigma, guidance=unguided, text=net.embed(batch.ids), rotary=bucket.rotary
    )
    return F.mse_loss(velocity.float(), batch.target)


def distillation_loss(net: Network, bucket: Bucket, *, empty: TokenIds, teacher: Network, empty_text: Text) -> Tensor:
    """The student learns, as a function of its guidance input, what two passes of the teacher give. Both read the
    student's text: only the teacher's transformer is asked, which needs no kernels of its own."""
    batch = draw(bucket, empty=empty, empty_share=EMPTY_SHARE / 2)
    low, high = GUIDANCE_RANGE
    guidance = low + (high - low) * torch.rand_like(batch.sigma)
    text = net.embed(batch.ids)
    with torch.no_grad():
        scale = 1 + (guidance - 1) * GUIDANCE_STRENGTH
        target = guided(teacher, batch, bucket, texts=(text, empty_text), scale=scale)
    velocity = net.velocity(batch.latents, sigma=batch.sigma, guidance=guidance, text=text, rotary=bucket.rotary)
    return F.mse_loss(velocity.float(), target)


def guided(teacher: Network, batch: Noised, bucket: Bucket, *, texts: tuple[Text, Text], scale: Tensor) -> Tensor:
    """Classifier-free guidance, Ho and Salimans 2022, arXiv:2207.12598; texts with and without a caption."""
    unguided = torch.ones_like(batch.sigma)
    conditional, unconditional = (
        teacher.velocity(
            batch.latents,
            sigma=batch.sigma,
            guidance=unguided,
            text=tuple(part.detach().expand(len(unguided), *part.shape[1:]) for part in text),
            rotary=bucket.rotary,
        ).float()
        for text in texts
    )
    return torch.lerp(unconditional, conditional, scale[:, None, None])
