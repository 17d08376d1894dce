"""FP8 weights with one scale, one a row, or none. Knows no file. Legend: N rows, K columns."""

from __future__ import annotations

from torch import Tensor


class Fp8:
    """A weight (N, K) in E4M3 or E5M2 whose rows are dequantised when asked for."""

    def __init__(self, weight: Tensor, *, scale: Tensor | None) -> None:
        """`scale` float32 of one element, or of N."""
        self._weight = weight
        self._scale = None if scale is None else scale.float().reshape(-1, 1).expand(weight.shape[0], 1)

    def rows(self, first: int, last: int) -> Tensor:
        """These rows in float32, (last - first, K)."""
        values = self._weight[first:last].float()
        return values if self._scale is None else values * self._scale[first:last]
