"""Turn latents into 8-bit pixels on the device. Knows nothing of files or failures.

Legend: B rows, L packed latent tokens, C channels, H W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fluxbatch.models import Model
from fluxbatch.pipeline.transfer import finite_rows
from fluxbatch.records import Bucket

# Sixteen images of 256x256 at once took 1.5 ms each on a CPU, four at once 0.35: larger buffers leave the cache and go
# back to the system after each use.
CPU_MAX_PIXELS = 512 * 512


def decode(model: Model, latents_BLC: Tensor, *, bucket: Bucket, max_pixels: int) -> tuple[Tensor, Tensor, torch.dtype]:
    """Pixels (B, H, W, 3) uint8, finite flags (B,) and the VAE's dtype, in launches of at most `max_pixels` each.

    Upsampling kernels count elements in 32 bits, so a batch that denoises well may not decode at once. Every launch
    has the same size; the last is padded with its last row.
    """
    rows = latents_BLC.shape[0]
    if latents_BLC.device.type == "cpu":
        max_pixels = min(max_pixels, CPU_MAX_PIXELS)
    size = launch_size(rows, max_rows=max(1, max_pixels // (bucket.height * bucket.width)))
    pixels, finite = [], []
    for first in range(0, rows, size):
        decoded = model.decode(padded(latents_BLC[first : first + size], size), bucket=bucket)
        if tuple(decoded.shape) != (size, 3, bucket.height, bucket.width):
            raise ValueError(f"the decoder gave images {tuple(decoded.shape)} for {size} rows")
        pixels.append(to_uint8(decoded))
        finite.append(finite_rows(decoded))
    return torch.cat(pixels)[:rows], torch.cat(finite)[:rows], decoded.dtype


def launch_size(rows: int, *, max_rows: int) -> int:
    """Rows of each launch: as few launches as `max_rows` allows, all of one size, with the least padding."""
    num_launches = -(-rows // max_rows)
    return -(-rows // num_launches)


def to_uint8(pixels_BCHW: Tensor) -> Tensor:
    """[-1, 1] to 0..255 in (B, H, W, C), rounded as diffusers' image processor does."""
    return unit_to_uint8((pixels_BCHW * 0.5).add_(0.5).clamp_(0, 1))


def unit_to_uint8(unit_BCHW: Tensor) -> Tensor:
    """[0, 1] to 0..255 in (B, H, W, C)."""
    levels_BCHW = unit_BCHW.float().mul_(255).round_().to(torch.uint8)
    return torch.stack(levels_BCHW.unbind(1), dim=-1)  # twice as fast on a CPU as permute and contiguous


def padded(rows: Tensor, size: int) -> Tensor:
    """(B, ...) to (size, ...): the last row again and again."""
    missing = size - rows.shape[0]
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows
