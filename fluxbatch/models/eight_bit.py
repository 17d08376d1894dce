"""A layer whose weight is held in 8 bits, and dequantised where diffusers' own modules use it. Knows no model.

E4M3 or whole numbers, with one float32 scale a row. Legend: R rows of the input, N rows of the weight, K columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxbatch.models.fused.ops import quantize_rows_plain

ROWS_AT_ONCE = 4096  # that are in float32 while they are quantised


class EightBitLinear(nn.Module):
    """y = x W^T + b in `dtype`. Buffers, not parameters: nothing may take them for numbers in the model's dtype."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`weight` (N, K), `scales` float32 (N, 1), `bias` (N,) in `dtype`."""
        super().__init__()
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    @classmethod
    def of(cls, linear: nn.Linear, into: torch.dtype) -> EightBitLinear:
        """A layer quantised: each row by its largest magnitude, a part at a time, no float32 copy of the whole."""
        weight = linear.weight.data
        parts = [quantize_rows_plain(part.float(), into) for part in weight.split(ROWS_AT_ONCE)]
        scales = torch.cat([part.scales for part in parts if part.scales is not None])
        bias = None if linear.bias is None else linear.bias.data
        return cls(torch.cat([part.values for part in parts]), scales, bias, weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantized(self.weight, self.scales, self.dtype), self.bias)


def dequantized(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """An 8-bit weight (N, K) times its rows' float32 scales (N, 1), rounded once: every dtype holds 8-bit numbers."""
    return torch.mul(weight.to(dtype), scales, out=torch.empty(weight.shape, dtype=dtype, device=weight.device))
