"""NVFP4: two E2M1 numbers a byte, an E4M3 scale for each 16 of them, a float32 scale for all. Knows no file.

Comfy and Black Forest Labs' FLUX.2 files: high nibble first, scales in the 128x4 tiles that cuBLAS reads. ModelOpt: low
nibble first, scales row by row. torchao writes the low nibble first with either. Legend: N rows, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Order:
    """How a file lays NVFP4 out."""

    high_nibble_first: bool
    swizzled_scales: bool

    def __str__(self) -> str:
        nibble = "high" if self.high_nibble_first else "low"
        return f"{nibble} nibble first, {'swizzled' if self.swizzled_scales else 'linear'} scales"


COMFY = Order(high_nibble_first=True, swizzled_scales=True)
MODELOPT = Order(high_nibble_first=False, swizzled_scales=False)


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """What swizzled scales of a weight (N, K) are padded to."""
    return -(-rows // 128) * 128, -(-columns // GROUP // 4) * 4


def unswizzle(scales: Tensor, *, rows: int, groups: int) -> Tensor:
    """Scales in cuBLAS' tiles of 128 rows by 4 groups to (rows, groups).

    https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    tiles_down, tiles_across = -(-rows // 128), -(-groups // 4)
    tiles = scales.reshape(tiles_down, tiles_across, 32, 4, 4)  # row % 32, row // 32 within the tile, group
    return tiles.permute(0, 3, 2, 1, 4).reshape(tiles_down * 128, tiles_across * 4)[:rows, :groups]


class Nvfp4:
    """A weight (N, K) whose rows are dequantised when asked for."""

    def __init__(
        self, weight: Tensor, *, scales: Tensor, scale: Tensor, order: Order, input_scale: Tensor | None = None
    ) -> None:
        """`weight` uint8 (N, K/2), `scales` E4M3 as stored, `scale` one float32; `input_scale` (K,) is AWQ's."""
        rows, groups = weight.shape[0], 2 * weight.shape[1] // GROUP
        linear = unswizzle(scales, rows=rows, groups=groups) if order.swizzled_scales else scales
        self._weight = weight
        self._scales = linear.float() * scale.float().reshape(())
        self._input_scale = input_scale
        self._pairs = _pairs(high_nibble_first=order.high_nibble_first).to(weight.device)

    def rows(self, first: int, last: int) -> Tensor:
        """These rows in float32, (last - first, K)."""
        values = self._pairs[self._weight[first:last].int()]  # (n, K/2, 2)
        grouped = values.view(last - first, -1, GROUP) * self._scales[first:last, :, None]
        weight = grouped.view(last - first, -1)
        return weight if self._input_scale is None else weight * self._input_scale.float()


def _pairs(*, high_nibble_first: bool) -> Tensor:
    """Both numbers of each byte, in the order of the columns, (256, 2)."""
    code = torch.tensor(E2M1)
    byte = torch.arange(256)
    high, low = code[byte >> 4], code[byte & 15]
    return torch.stack((high, low) if high_nibble_first else (low, high), dim=-1)
