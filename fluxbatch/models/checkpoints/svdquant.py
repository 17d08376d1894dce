"""SVDQuant's four-bit layers and AWQ's modulations, as Nunchaku packs them, unfolded to ordinary weights.

A layer computes `(x / smooth) @ (q * scales).T + x @ down @ up.T + bias`, so its weight is `(q * scales) / smooth +
up @ down`. Everything is computed on the CPU: a file means the same weights for every card. Knows no file.

The order of the numbers is that of the registers of a tensor core: deepcompressor `backend/nunchaku/utils.py` and
`backend/tinychat/utils.py`. Legend: N rows, K columns, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fluxbatch.models.checkpoints.nvfp4 import E2M1

TILE = 128  # rows and columns of a weight are filled up to multiples of this
RANK_TILE = 16
CHUNK_ROWS = 8 * TILE  # unpacked at a time; the weight itself is whole in float32
INT4_GROUP, FP4_GROUP, AWQ_GROUP = 64, 16, 64
GELU_SHIFT = 0.171875  # added to what GELU gave, so that INT4 needs no sign: `gemm_w4a4_launch_impl.cuh`


class SvdQuant:
    """A weight (N, K) with its bias; INT4 where its scales are half precision, FP4 where they are E4M3."""

    def __init__(self, tensors: Mapping[str, Tensor], *, columns: int, after_gelu: bool) -> None:
        """`columns` without padding; `after_gelu`: the input is a GELU's output, which INT4 kernels shift."""
        fp4 = tensors["wscales"].dtype is torch.float8_e4m3fn
        rows = tensors["qweight"].shape[0]
        meaning = torch.tensor(E2M1 if fp4 else [*range(8), *range(-8, 0)], dtype=torch.float32)
        scales = _scales(tensors, rows=rows, fp4=fp4)
        smooth = unpack_vector(tensors["smooth"]).float()[:columns]
        self._weight = torch.empty(rows, columns)
        for first in range(0, rows, CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            numbers = meaning[unpack_codes(tensors["qweight"][part]).int()].unflatten(1, (scales.shape[1], -1))
            self._weight[part] = (numbers * scales[part, :, None]).flatten(1)[:, :columns] / smooth
        self.bias = unpack_vector(tensors["bias"]).float() if "bias" in tensors else None
        if after_gelu and not fp4 and self.bias is not None:
            self.bias = self.bias + self._weight.sum(dim=1) * GELU_SHIFT
        down = unpack_low_rank(tensors["lora_down"], down=True).float()[:, :columns]
        self._weight.addmm_(unpack_low_rank(tensors["lora_up"], down=False).float(), down)

    def rows(self, first: int, last: int) -> Tensor:
        """These rows in float32, (last - first, K)."""
        return self._weight[first:last]


class Awq:
    """A modulation (N, K) with its bias. Stored a channel after the other, its shifts, scales and gates side by side,
    and each scale with the 1 that diffusers adds later."""

    def __init__(self, tensors: Mapping[str, Tensor], *, chunks: int) -> None:
        """`chunks`: 6 in double blocks, 3 in single ones."""
        codes = unpack_awq_codes(tensors["qweight"])
        rows, columns = codes.shape
        groups = columns // AWQ_GROUP
        scales, zeros = (tensors[name][:groups].float().t()[:, :, None] for name in ("wscales", "wzeros"))
        weight = (codes.float().view(rows, groups, AWQ_GROUP) * scales + zeros).view(rows, columns)
        self._weight = weight.view(rows // chunks, chunks, columns).transpose(0, 1).reshape(rows, columns)
        bias = tensors["bias"].float().view(rows // chunks, chunks).t().clone()
        bias[[1, -2] if chunks > 3 else [1]] -= 1
        self.bias = bias.flatten()

    def rows(self, first: int, last: int) -> Tensor:
        """These rows in float32, (last - first, K)."""
        return self._weight[first:last]


def _scales(tensors: Mapping[str, Tensor], *, rows: int, fp4: bool) -> Tensor:
    """Of each group, (N, groups), with the outer scales of FP4 in it."""
    if not fp4:
        return unpack_scales(tensors["wscales"], rows=rows).float()
    scales = unpack_micro_scales(tensors["wscales"], rows=rows).float()
    if "wtscale" in tensors:
        scales = scales * tensors["wtscale"].float().reshape(())
    if "wcscales" in tensors:
        scales = scales * unpack_vector(tensors["wcscales"]).float()[:, None]
    return scales


# --- packing, undone --------------------------------------------------------------------------------------------------


def nibbles(packed: Tensor) -> Tensor:
    """The two numbers of each byte, the low one first, in a new last dimension."""
    bytes_ = packed.contiguous().view(torch.uint8)
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1)


def unpack_codes(packed: Tensor) -> Tensor:
    """int8 (N, K/2) to the codes, uint8 (N, K)."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    # tile down and across; 16 rows of it; row and 8 columns that a lane holds; which 8 rows; which 32 columns; column
    lanes = nibbles(packed).view(rows // TILE, columns // 64, 8, 8, 4, 2, 2, 8)
    return lanes.permute(0, 2, 5, 3, 1, 6, 4, 7).reshape(rows, columns)


def unpack_scales(packed: Tensor, *, rows: int) -> Tensor:
    """Half precision scales to (N, groups)."""
    lanes = packed.reshape(rows // TILE, -1, 8, 4, 2, 2)  # tile, group, 16 rows, pair of rows, which 8 rows, row
    return lanes.permute(0, 2, 4, 3, 5, 1).reshape(rows, -1)


def unpack_micro_scales(packed: Tensor, *, rows: int) -> Tensor:
    """E4M3 scales to (N, groups)."""
    lanes = packed.reshape(rows // TILE, -1, 8, 4, 4, 4)  # tile, 4 groups, row, which 8 rows, which 32 rows, group
    return lanes.permute(0, 4, 3, 2, 1, 5).reshape(rows, -1)


def unpack_vector(packed: Tensor) -> Tensor:
    """A bias or the smoothing, (N,), packed like the scales of one group."""
    return unpack_scales(packed, rows=packed.numel()).flatten()


def unpack_low_rank(packed: Tensor, *, down: bool) -> Tensor:
    """(K, R) to `down` (R, K), or (N, R) to `up` (N, R)."""
    channels, rank = packed.shape
    lanes = packed.reshape(channels // RANK_TILE, rank // RANK_TILE, 8, 4, 2, 2, 2)
    tiles = lanes.permute(0, 1, 4, 2, 5, 3, 6).reshape(channels // RANK_TILE, rank // RANK_TILE, RANK_TILE, RANK_TILE)
    if down:
        return tiles.permute(1, 2, 0, 3).reshape(rank, channels)
    return tiles.permute(0, 2, 1, 3).reshape(channels, rank)


def unpack_awq_codes(packed: Tensor) -> Tensor:
    """int32 (N/4, K/2) to the codes, uint8 (N, K)."""
    rows, columns = 4 * packed.shape[0], 2 * packed.shape[1]
    words = nibbles(packed).reshape(rows // 4, columns // 64, 4, 16, 4)  # 4 codes a word of 16 bits
    in_order = words.permute(0, 2, 1, 3, 4).reshape(-1, 8, 4)
    return in_order.transpose(1, 2).reshape(rows, columns)
