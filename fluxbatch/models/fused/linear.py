"""Matrix products of the blocks: in the model's dtype, in FP8, in INT8, or with weights that are held in 8 bits.

8 bits: E4M3 or whole numbers with one scale a row of the weight, and in FP8 and INT8 one a row of the input (dynamic,
made by whoever produced it). FP8 accumulates in float32, INT8 exactly in int32; the output is rounded once. Knows
nothing of blocks. Legend: see the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fluxbatch.models.eight_bit import EightBitLinear, dequantized
from fluxbatch.models.fused.ops import Rows, scale_products
from fluxbatch.models.precision import EXACT, Precision

LEAST_INT8_ROWS = 17  # that torch._int_mm takes on CUDA


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. `weight` (out, in); in 8 bits with `scales` float32 (1, out)."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype  # of the output
    scales: Tensor | None = None
    weight_only: bool = False  # dequantised where it is used

    @classmethod
    def packed(cls, *modules: Any, precision: Precision = EXACT) -> Linear:
        """Several layers of one input as one product. The modules lose their weights: nothing is held twice."""
        bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
        if precision.weights is None:
            weight = torch.cat([module.weight.data for module in modules])
            packed = cls(weight, bias, weight.dtype)
        else:
            parts = [_quantized(module, precision.weights) for module in modules]
            weight, scales = (
                torch.cat(tensors) for tensors in zip(*((p.weight, p.scales) for p in parts), strict=True)
            )
            packed = cls(weight, bias, parts[0].dtype, scales.t().contiguous(), precision.weight_only)
        for module in modules:
            module.weight = module.bias = None
        return packed

    def __call__(self, x: Rows, *, out: Tensor | None = None) -> Tensor:
        """(R, in) to (R, out), into `out` where it is given."""
        if self.scales is None:
            return _product(x.values, self.weight, self.bias, out)
        if self.weight_only:
            return _product(x.values, dequantized(self.weight, self.scales.t(), self.dtype), self.bias, out)
        if out is None:
            out = torch.empty(x.values.shape[0], self.weight.shape[0], dtype=self.dtype, device=x.values.device)
        return self._int8(x, out) if self.weight.dtype is torch.int8 else self._float8(x, out)

    def _float8(self, x: Rows, out: Tensor) -> Tensor:
        assert x.scales is not None and self.scales is not None, "an FP8 product reads FP8 rows"
        if not x.values.is_cuda:
            return self._float8_plain(x, out)
        return torch._scaled_mm(
            x.values,
            self.weight.t(),
            x.scales,
            self.scales,
            bias=self.bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
            out=out,
        )

    def _float8_plain(self, x: Rows, out: Tensor) -> Tensor:
        assert x.scales is not None and self.scales is not None
        y = (x.values.float() @ self.weight.float().t()) * x.scales * self.scales
        return out.copy_(y if self.bias is None else y + self.bias.float())

    def _int8(self, x: Rows, out: Tensor) -> Tensor:
        assert x.scales is not None and self.scales is not None, "an INT8 product reads INT8 rows"
        scale_products(int8_product(x.values, self.weight), x.scales, self.scales, self.bias, out)
        return out


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 (R, K) times int8 (N, K) to int32 (R, N), exactly. K and N are multiples of 8, as FLUX' widths are."""
    rows = x.shape[0]
    if x.is_cuda and rows < LEAST_INT8_ROWS:
        x = F.pad(x, (0, 0, 0, LEAST_INT8_ROWS - rows))
    return torch._int_mm(x, weight.t())[:rows]


def _quantized(module: Any, into: torch.dtype) -> EightBitLinear:
    """A layer in 8 bits: made so, or read so from a file."""
    return module if isinstance(module, EightBitLinear) else EightBitLinear.of(module, into)
