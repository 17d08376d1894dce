"""Dequantised numbers, bit for bit those of the libraries that write such files.

The digests are of what comfy-kitchen 0.2.40 and torchao 0.18.0 made of the same bytes in float32 (signed zeros as they
came); where those packages are installed, the tests at the end ask them again.
"""

import hashlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxbatch.models.checkpoints.convert import Weight
from fluxbatch.models.checkpoints.fp8 import Fp8
from fluxbatch.models.checkpoints.nvfp4 import Nvfp4, Order, scale_shape

SIZES = [(100, 80), (384, 1024), pytest.param((4096, 4096), marks=pytest.mark.slow)]
ORDERS = {
    "comfy": Order(high_nibble_first=True, swizzled_scales=True),
    "modelopt": Order(high_nibble_first=False, swizzled_scales=False),
    "torchao": Order(high_nibble_first=False, swizzled_scales=True),
    "sglang": Order(high_nibble_first=True, swizzled_scales=False),
}
NVFP4_DIGESTS = {
    ("comfy", (100, 80)): "a2d7ca71c4f6cb2d",
    ("comfy", (384, 1024)): "c5339b7c582f71d1",
    ("comfy", (4096, 4096)): "fc254a13ff9facab",
    ("modelopt", (100, 80)): "3abe3eedece827b9",
    ("modelopt", (384, 1024)): "ee99f3bc332e47ec",
    ("modelopt", (4096, 4096)): "80318ce3d7fbce6a",
    ("torchao", (100, 80)): "9818458b7e57602b",
    ("torchao", (384, 1024)): "173711b0134126a5",
    ("torchao", (4096, 4096)): "b09712740265e6f7",
    ("sglang", (100, 80)): "d80d9ac48e015cbe",
    ("sglang", (384, 1024)): "c0cdc36f1682a714",
    ("sglang", (4096, 4096)): "90c3cb5e7771599c",
}
FP8_DIGESTS = {
    ("tensor", (100, 80)): "91b44a3746c687bf",
    ("tensor", (384, 1024)): "bfe2bbcbaef528b1",
    ("tensor", (4096, 4096)): "eab587f0ab9f09ac",
    ("rows", (100, 80)): "65e5f279015446d2",
    ("rows", (384, 1024)): "d0609089d06ad45f",
    ("rows", (4096, 4096)): "5833ab663247d2a6",
}


def scrambled(count: int, *, salt: int) -> Tensor:
    """The same bytes everywhere, every value among them."""
    return ((torch.arange(count) * 2654435761 + salt) >> 11).remainder(251).to(torch.uint8)


def e4m3(*shape: int, salt: int) -> Tensor:
    """Positive, no NaN."""
    count = torch.Size(shape).numel()
    return (scrambled(count, salt=salt).int() % 127).to(torch.uint8).view(torch.float8_e4m3fn).view(shape)


def packed(size: tuple[int, int], order: Order) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = size
    codes = scrambled(rows * columns // 2, salt=5).view(rows, columns // 2)
    shape = scale_shape(rows, columns) if order.swizzled_scales else (rows, columns // 16)
    return codes, e4m3(*shape, salt=77), torch.tensor(3.7e-4)


def fp8_weight(size: tuple[int, int], scaling: str) -> tuple[Tensor, Tensor]:
    sign = (scrambled(size[0] * size[1], salt=3) & 1).view(size) << 7
    weight = (e4m3(*size, salt=9).view(torch.uint8) | sign).view(torch.float8_e4m3fn)
    rows = torch.linspace(1e-4, 3e-2, size[0])[:, None]
    return weight, rows if scaling == "rows" else torch.tensor(2.3e-3)


def digest(values: Tensor) -> str:
    assert values.dtype is torch.float32
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:16]


def whole(weight: Weight, num_rows: int) -> Tensor:
    """Asked for in uneven parts."""
    cuts = [0, 1, num_rows // 3, num_rows]
    return torch.cat([weight.rows(first, last) for first, last in pairwise(cuts)])


def our_nvfp4(size: tuple[int, int], order: Order) -> Tensor:
    codes, scales, scale = packed(size, order)
    return whole(Nvfp4(codes, scales=scales, scale=scale, order=order), size[0])


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("size", SIZES)
def test_nvfp4_has_the_bits_of_comfy_kitchen_and_torchao(name: str, size: tuple[int, int]) -> None:
    assert digest(our_nvfp4(size, ORDERS[name])) == NVFP4_DIGESTS[name, size]


@pytest.mark.parametrize("scaling", ["tensor", "rows"])
@pytest.mark.parametrize("size", SIZES)
def test_fp8_has_the_bits_of_comfy_kitchen_and_torchao(scaling: str, size: tuple[int, int]) -> None:
    weight, scale = fp8_weight(size, scaling)
    for shape in (scale.shape, (scale.numel(),)):
        assert digest(whole(Fp8(weight, scale=scale.view(shape)), size[0])) == FP8_DIGESTS[scaling, size]


def test_the_wrong_order_gives_other_numbers() -> None:
    codes, scales, scale = packed((384, 1024), ORDERS["comfy"])
    right = our_nvfp4((384, 1024), ORDERS["comfy"])
    for name in ("modelopt", "torchao", "sglang"):
        wrong = whole(Nvfp4(codes, scales=scales, scale=scale, order=ORDERS[name]), 384)
        assert (wrong - right).norm() / right.norm() > 0.5


# --- the libraries themselves, where they are installed ---------------------------------------------------------------


def nvfp4_by_library(name: str, size: tuple[int, int], comfy: Any, nvfp4_tensor: Any) -> Tensor:
    codes, scales, scale = packed(size, ORDERS[name])
    if name == "comfy":
        return comfy.dequantize_nvfp4(codes, scale, scales, torch.float32)
    if name == "sglang":  # the only one without a function of its own: the other nibble order of ModelOpt's
        codes = comfy.float_utils.swap_nibbles(codes)
    swizzled = ORDERS[name].swizzled_scales
    tensor = nvfp4_tensor(codes, scales, 16, torch.float32, per_tensor_scale=scale, is_swizzled_scales=swizzled)
    return tensor.dequantize(torch.float32)


def fp8_by_library(scaling: str, size: tuple[int, int], comfy: Any, primitives: Any) -> Tensor:
    weight, scale = fp8_weight(size, scaling)
    if scaling == "tensor":
        return comfy.dequantize_per_tensor_fp8(weight, scale, torch.float32)
    return primitives._dequantize_affine_float8(weight, scale)


@pytest.mark.parametrize("size", SIZES)
def test_the_digests_are_the_libraries(size: tuple[int, int]) -> None:
    comfy = pytest.importorskip("comfy_kitchen")
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization import quant_primitives

    for name in ORDERS:
        assert digest(nvfp4_by_library(name, size, comfy, NVFP4Tensor)) == NVFP4_DIGESTS[name, size]
    for scaling in ("tensor", "rows"):
        assert digest(fp8_by_library(scaling, size, comfy, quant_primitives)) == FP8_DIGESTS[scaling, size]


@pytest.mark.parametrize("size", SIZES)
def test_what_comfy_kitchen_writes_is_read_back(size: tuple[int, int]) -> None:
    """Padded to 16 where it must be; the relative error of four bits on Gaussian weights."""
    comfy = pytest.importorskip("comfy_kitchen")
    weight = torch.randn(size, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().max() / (448 * 6)
    codes, scales = comfy.quantize_nvfp4(weight, scale, pad_16x=True)
    ours = whole(Nvfp4(codes, scales=scales, scale=scale, order=ORDERS["comfy"]), codes.shape[0])
    assert torch.equal(ours, comfy.dequantize_nvfp4(codes, scale, scales, torch.float32))
    part = ours[: size[0], : size[1]]
    assert 0.08 < (part - weight).norm() / weight.norm() < 0.11
