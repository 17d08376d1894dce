"""The decoder of FLUX's VAEs in channels_last with fused group norms: what diffusers' `Decoder` computes.

Convolutions run without their bias, which the pass that follows adds; a residual add is one pass with the statistics
of the next norm. Legend: B images, C channels, H W pixels, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxbatch.models.fused import ops
from fluxbatch.models.fused.ops import Summed

SCORE_ROWS = 4096  # queries of the middle attention at once: their scores are what takes memory


@dataclass(frozen=True, slots=True)
class FusedDecoder:
    """Decodes with a diffusers VAE's own weights, turned to channels_last."""

    decoder: Any
    post_quant_conv: nn.Conv2d | None
    groups: int

    @classmethod
    def of(cls, vae: Any) -> FusedDecoder:
        vae.decoder.to(memory_format=torch.channels_last)
        return cls(vae.decoder, vae.post_quant_conv, vae.decoder.conv_norm_out.num_groups)

    def __call__(self, latents: Tensor) -> Tensor:
        """(B, C, h, w) to (B, 3, H, W), both in the VAE's dtype."""
        decoder, middle = self.decoder, self.decoder.mid_block
        if self.post_quant_conv is not None:
            latents = self.post_quant_conv(latents)
        x = decoder.conv_in(latents.contiguous(memory_format=torch.channels_last))
        summed = self._resnet(middle.resnets[0], self._sums(x))
        summed = self._attention(middle.attentions[0], summed)
        summed = self._resnet(middle.resnets[1], summed)
        for block in decoder.up_blocks:
            for resnet in block.resnets:
                summed = self._resnet(resnet, summed)
            for upsampler in block.upsamplers or ():
                larger = _convolve(ops.upsample_twice(summed.x), upsampler.conv)
                summed = self._sums(larger, bias=upsampler.conv.bias, keep=True)
        return decoder.conv_out(self._norm(decoder.conv_norm_out, summed, silu=True))

    def _resnet(self, block: Any, summed: Summed) -> Summed:
        hidden = _convolve(self._norm(block.norm1, summed, silu=True), block.conv1)
        hidden = self._norm(block.norm2, self._sums(hidden, bias=block.conv1.bias), silu=True)
        hidden = _convolve(hidden, block.conv2)
        return self._sums(hidden, bias=block.conv2.bias, residual=_shortcut(block, summed.x))

    def _attention(self, block: Any, summed: Summed) -> Summed:
        """One head over all pixels."""
        x = summed.x
        tokens = self._norm(block.group_norm, summed, silu=False).permute(0, 2, 3, 1).flatten(1, 2)
        mixed = attend(block.to_q(tokens), block.to_k(tokens), block.to_v(tokens))
        out = block.to_out[0](mixed).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
        return self._sums(out, residual=x)

    def _sums(
        self, x: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None, keep: bool = False
    ) -> Summed:
        return ops.group_sums(x, bias=bias, residual=residual, keep=keep, groups=self.groups)

    def _norm(self, norm: nn.GroupNorm, summed: Summed, *, silu: bool) -> Tensor:
        return ops.group_norm(summed, norm.weight, norm.bias, groups=self.groups, eps=norm.eps, silu=silu)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention of one head (B, N, C), wider than fused attention kernels take; scores in float32."""
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value)
    out = torch.empty_like(query)
    for image in range(query.shape[0]):
        for first in range(0, query.shape[1], SCORE_ROWS):
            rows = slice(first, first + SCORE_ROWS)
            scores = torch.mm(query[image, rows], key[image].t(), out_dtype=torch.float32)
            weights = ops.softmax_rows(scores, scale=query.shape[-1] ** -0.5, dtype=value.dtype)
            torch.mm(weights, value[image], out=out[image, rows])
    return out


def _convolve(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Without the bias."""
    return F.conv2d(x, conv.weight, None, conv.stride, conv.padding)


def _shortcut(block: Any, x: Tensor) -> Tensor:
    """A 1 x 1 convolution where the width changes, as a matrix product."""
    if block.conv_shortcut is None:
        return x
    conv = block.conv_shortcut
    return F.linear(x.permute(0, 2, 3, 1), conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)
