"""Matrix products of the blocks, in the model's dtype or in FP8. Knows nothing of blocks.

FP8: e4m3 with one scale a row of the input (dynamic, made by whoever produced it) and one a row of the weight; float32
accumulation and half-precision output. Legend: see the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxbatch.models.fused.ops import Rows, quantize_rows_plain


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. `weight` (out, in); in FP8 with `scales` float32 (1, out)."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype  # of the output
    scales: Tensor | None = None

    @classmethod
    def packed(cls, *modules: nn.Linear, float8: bool) -> Linear:
        """Several layers of one input as one product. The modules lose their weights: nothing is held twice."""
        weight = torch.cat([module.weight.data for module in modules])
        bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
        for module in modules:
            module.weight = module.bias = None  # type: ignore[assignment]
        if not float8:
            return cls(weight, bias, weight.dtype)
        rows = quantize_weight(weight)
        assert rows.scales is not None
        return cls(rows.values, bias, weight.dtype, rows.scales.t().contiguous())

    def __call__(self, x: Rows, *, out: Tensor | None = None) -> Tensor:
        """(R, in) to (R, out), into `out` where it is given."""
        if self.scales is not None:
            return self._float8(x, out)
        if out is None:
            return F.linear(x.values, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x.values, self.weight.t(), out=out)
        return torch.addmm(self.bias, x.values, self.weight.t(), out=out)

    def _float8(self, x: Rows, out: Tensor | None) -> Tensor:
        assert x.scales is not None and self.scales is not None, "an FP8 product reads FP8 rows"
        if not x.values.is_cuda:
            return self._float8_plain(x, out)
        if out is None:
            out = torch.empty(x.values.shape[0], self.weight.shape[0], dtype=self.dtype, device=x.values.device)
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

    def _float8_plain(self, x: Rows, out: Tensor | None) -> Tensor:
        assert x.scales is not None and self.scales is not None
        y = (x.values.float() @ self.weight.float().t()) * x.scales * self.scales
        y = (y if self.bias is None else y + self.bias.float()).to(self.dtype)
        return y if out is None else out.copy_(y)


def quantize_weight(weight: Tensor, *, rows_at_once: int = 4096) -> Rows:
    """Each output row by its largest magnitude, a part at a time: no float32 copy of the whole."""
    parts = [quantize_rows_plain(part.float()) for part in weight.split(rows_at_once)]
    scales: Sequence[Tensor] = [part.scales for part in parts if part.scales is not None]
    return Rows(torch.cat([part.values for part in parts]), torch.cat(list(scales)))
