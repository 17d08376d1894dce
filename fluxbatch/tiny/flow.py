"""The network and its two objectives: flow matching, then guidance distillation. Knows tensors, no files of a run.

Rectified flow, Liu et al. 2022, arXiv:2209.03003; logit-normal times, Esser et al. 2024, arXiv:2403.03206;
guidance distillation, Meng et al. 2022, arXiv:2210.03142, as FLUX.1-dev has it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

# B batch, S text tokens, L packed latent tokens, C channels of a packed token

TEXT_TOKENS = 64  # what the T5 captions are padded to, here and in conf/model/tiny.yaml: FLUX masks no padding
EMPTY_SHARE = 0.10  # captions replaced by the empty one, so that guidance has something to point away from
UNIFORM_SHARE = 0.15  # noise levels drawn evenly instead of logit-normally: the ends of the schedule matter too
GUIDANCE_RANGE = (1.0, 5.0)
# Guidance input g means a classifier-free scale of 1 + (g - 1) * this: 2.25 at FLUX's usual 3.5. Larger scales
# oversaturate a small palette.
GUIDANCE_STRENGTH = 0.5
# the shipped scheduler's: exp(mu) is the timestep shift, mu linear in the number of latent tokens
BASE_SHIFT, MAX_SHIFT, BASE_TOKENS, MAX_TOKENS = 0.5, 1.15, 64, 1024

Rotary = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Transformer and both text encoders of the model folder, in float32; all three are trained together."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        kind = {"torch_dtype": torch.float32, "local_files_only": True}
        self.transformer = FluxTransformer2DModel.from_pretrained(folder / "transformer", **kind)
        self.clip = CLIPTextModel.from_pretrained(folder / "text_encoder", dtype=torch.float32, local_files_only=True)
        self.t5 = T5EncoderModel.from_pretrained(folder / "text_encoder_2", dtype=torch.float32, local_files_only=True)

    def embed(self, clip_ids: Tensor, t5_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, D) text tokens and (B, D) pooled."""
        return self.t5(input_ids=t5_ids)[0], self.clip(input_ids=clip_ids).pooler_output

    def velocity(
        self, latents: Tensor, *, sigma: Tensor, guidance: Tensor, text: tuple[Tensor, Tensor], rotary: Rotary
    ) -> Tensor:
        """FluxTransformer2DModel.forward without its round trips: under autocast that one casts the time to bf16,
        and it builds the rotary tables anew at each call. latents (B, L, C); sigma, guidance (B,) float32."""
        model = self.transformer
        tokens, context = model.x_embedder(latents), model.context_embedder(text[0])
        temb = model.time_text_embed(sigma * 1000, guidance * 1000, text[1])
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            context, tokens = block(
                hidden_states=tokens, encoder_hidden_states=context, temb=temb, image_rotary_emb=rotary
            )
        return model.proj_out(model.norm_out(tokens, temb))

    def rotary(self, height: int, width: int) -> Rotary:
        lines, columns = height // 16, width // 16
        ids = torch.zeros(lines, columns, 3)
        ids[..., 1] += torch.arange(lines)[:, None]
        ids[..., 2] += torch.arange(columns)[None]
        device = next(self.parameters()).device
        return self.transformer.pos_embed(torch.cat([torch.zeros(TEXT_TOKENS, 3), ids.view(-1, 3)]).to(device))

    def compile_parts(self) -> None:
        """Compiles each kind of block for the first size it meets, then once more for all other sizes."""
        blocks = (*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks)
        for part in (*blocks, self.t5, self.clip):
            part.compile()


@dataclass(frozen=True)
class Bucket:
    """Training data of one size, all of it on the device."""

    height: int
    width: int
    batch_size: int
    latents: Tensor  # (N, L, C), bf16 on a GPU
    clip_ids: Tensor  # (N, 32) int16
    t5_ids: Tensor  # (N, 40) int16
    rotary: Rotary


@dataclass(frozen=True)
class Noised:
    """One batch between data and noise: (1 - sigma) * clean + sigma * noise."""

    latents: Tensor
    target: Tensor  # noise - clean
    sigma: Tensor
    clip_ids: Tensor
    t5_ids: Tensor


def draw(bucket: Bucket, *, empty: tuple[Tensor, Tensor], empty_share: float) -> Noised:
    """A random batch; every draw is made on the device, so that a captured graph draws anew at each replay."""
    device, batch = bucket.latents.device, bucket.batch_size
    chosen = torch.randint(len(bucket.latents), (batch,), device=device)
    clean = bucket.latents[chosen].float()
    noise, sigma = torch.randn_like(clean), draw_sigma(batch, num_tokens=clean.shape[1], device=device)
    blank = torch.rand(batch, 1, device=device) < empty_share
    clip_ids = torch.where(blank, empty[0], bucket.clip_ids[chosen].long())
    t5_ids = torch.where(blank, empty[1], pad_t5(bucket.t5_ids[chosen]))
    level = sigma[:, None, None]
    return Noised(torch.lerp(clean, noise, level), noise - clean, sigma, clip_ids, t5_ids)


def pad_t5(ids: Tensor) -> Tensor:
    """T5's padding token is 0."""
    return F.pad(ids.long(), (0, TEXT_TOKENS - ids.shape[1]))


def draw_sigma(batch: int, *, num_tokens: int, device: torch.device) -> Tensor:
    """Noise levels (B,), one from each of B equal slices of the distribution, with the scheduler's shift."""
    slices = (torch.arange(batch, device=device) + torch.rand(batch, device=device)) / batch
    logit_normal = torch.sigmoid(math.sqrt(2) * torch.erfinv((2 * slices - 1).clamp(-0.9999, 0.9999)))
    even = torch.rand(batch, device=device) < UNIFORM_SHARE
    plain = torch.where(even, torch.rand(batch, device=device), logit_normal)
    mu = BASE_SHIFT + (MAX_SHIFT - BASE_SHIFT) * (num_tokens - BASE_TOKENS) / (MAX_TOKENS - BASE_TOKENS)
    shift = math.exp(mu)
    return (shift * plain / (1 + (shift - 1) * plain)).clamp(1e-4, 1.0)


def flow_loss(net: Net, bucket: Bucket, *, empty: tuple[Tensor, Tensor]) -> Tensor:
    batch = draw(bucket, empty=empty, empty_share=EMPTY_SHARE)
    text = net.embed(batch.clip_ids, batch.t5_ids)
    unguided = torch.ones_like(batch.sigma)
    velocity = net.velocity(batch.latents, sigma=batch.sigma, guidance=unguided, text=text, rotary=bucket.rotary)
    return F.mse_loss(velocity.float(), batch.target)


def distillation_loss(net: Net, bucket: Bucket, *, empty: tuple[Tensor, Tensor], teacher: Net) -> Tensor:
    """The student learns, as a function of its guidance input, what two passes of the teacher give."""
    batch = draw(bucket, empty=empty, empty_share=EMPTY_SHARE / 2)
    low, high = GUIDANCE_RANGE
    guidance = low + (high - low) * torch.rand_like(batch.sigma)
    with torch.no_grad():
        target = guided(teacher, batch, bucket, empty=empty, scale=1 + (guidance - 1) * GUIDANCE_STRENGTH)
    text = net.embed(batch.clip_ids, batch.t5_ids)
    velocity = net.velocity(batch.latents, sigma=batch.sigma, guidance=guidance, text=text, rotary=bucket.rotary)
    return F.mse_loss(velocity.float(), target)


def guided(teacher: Net, batch: Noised, bucket: Bucket, *, empty: tuple[Tensor, Tensor], scale: Tensor) -> Tensor:
    """Classifier-free guidance, Ho and Salimans 2022, arXiv:2207.12598."""
    unguided = torch.ones_like(batch.sigma)
    blank = (empty[0].expand(len(unguided), -1), empty[1].expand(len(unguided), -1))
    conditional, unconditional = (
        teacher.velocity(
            batch.latents, sigma=batch.sigma, guidance=unguided, text=teacher.embed(*ids), rotary=bucket.rotary
        ).float()
        for ids in ((batch.clip_ids, batch.t5_ids), blank)
    )
    return torch.lerp(unconditional, conditional, scale[:, None, None])
