"""The operations between matrix products: each in plain torch, and by its fused kernel where that can run.

The plain versions run anywhere and are what the kernels are tested against. Both compute in float32 and round once.
Legend: see the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = {FLOAT8: 448.0, torch.int8: 127.0}  # number of each 8-bit dtype
HEADS_A_PROGRAM = 8
ACTIVATE_BLOCK = 1024  # columns one program activates


@dataclass(frozen=True, slots=True)
class Rows:
    """What a matrix product reads: (R, D) in half precision, or in 8 bits with a float32 scale (R, 1) for each row."""

    values: Tensor
    scales: Tensor | None = None

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.values[rows], None if self.scales is None else self.scales[rows])


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of one launch are made up: text tokens of all images, then image tokens of all images."""

    text_tokens: int
    image_tokens: int
    batch: int

    @property
    def text_rows(self) -> int:
        return self.text_tokens * self.batch

    @property
    def rows(self) -> int:
        return (self.text_tokens + self.image_tokens) * self.batch


@dataclass(frozen=True, slots=True)
class Modulation:
    """Shift and scale of one norm, each (2, B, D): text and image stream; an expanded dimension is shared.

    `into`: the 8-bit dtype that the matrix product that follows reads, or None.
    """

    shift: Tensor
    scale: Tensor
    into: torch.dtype | None


class Activation(IntEnum):
    NONE = 0
    GELU = 1  # the tanh approximation
    SWIGLU = 2  # silu(first half) * second half


# --- residual, norm, modulation ---------------------------------------------------------------------------------------


def residual_modulate(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    modulation: Modulation,
    layout: Layout,
    *,
    eps: float,
) -> Rows:
    """`x += gate * y` in place where there is a `y`, then the modulated layer norm of x.

    x and y are (R, D), gate (2, B, D).
    """
    if not _by_kernel(x):
        return _residual_modulate_plain(x, y, gate, modulation, layout, eps=eps)
    from fluxbatch.models.fused import kernels

    rows, width = x.shape
    out = _empty_rows(rows, width, like=x, into=modulation.into)
    filled = gate if gate is not None else modulation.shift
    kernels.residual_modulate[(rows,)](
        x, x if y is None else y, filled, modulation.shift, modulation.scale, out.values, out.scales,
        filled.stride(0), filled.stride(1), modulation.shift.stride(0), modulation.shift.stride(1),
        layout.text_rows, layout.batch, width, eps,
        RESIDUAL=y is not None, EIGHT_BIT=_eight_bit(modulation.into), CLIP=x.dtype is torch.float16,
        BLOCK=_power_of_two(width), num_warps=8,
    )  # fmt: skip
    return out


def _residual_modulate_plain(
    x: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    modulation: Modulation,
    layout: Layout,
    *,
    eps: float,
) -> Rows:
    if y is not None and gate is not None:
        total = x.float() + _each_row(gate, layout) * y.float()
        x.copy_(total.clamp(-65504, 65504) if x.dtype is torch.float16 else total)
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    values = normed * (1 + _each_row(modulation.scale, layout)) + _each_row(modulation.shift, layout)
    return _stored(values, modulation.into, dtype=x.dtype)


def _each_row(vectors: Tensor, layout: Layout) -> Tensor:
    """(2, B, D) to float32 (R, D)."""
    tokens = (layout.text_tokens, layout.image_tokens)
    streams = [vectors[stream].float().repeat(number, 1) for stream, number in enumerate(tokens)]
    return torch.cat(streams)


# --- attention --------------------------------------------------------------------------------------------------------


def rotate_heads(
    qkv: Tensor, norm_weights: Tensor, rotary: tuple[Tensor, Tensor], layout: Layout, *, num_heads: int, eps: float
) -> None:
    """RMS norm and rotary embedding of queries and keys, in place.

    qkv (R, >= 3 D), norm_weights (2 streams, 2 for queries and keys, head width), rotary cos and sin float32
    (S, head width / 2). RoFormer, Su et al. 2021, arXiv:2104.09864; pairs are neighbours, as in FLUX.
    """
    if not _by_kernel(qkv):
        _rotate_heads_plain(qkv, norm_weights, rotary, layout, num_heads=num_heads, eps=eps)
        return
    from fluxbatch.models.fused import kernels

    head = norm_weights.shape[-1]
    kernels.rotate_heads[(qkv.shape[0], -(-num_heads // HEADS_A_PROGRAM))](
        qkv, norm_weights, *rotary,
        qkv.stride(0), norm_weights.stride(0), layout.text_rows, layout.batch, num_heads, eps,
        HEAD=head, HEADS=HEADS_A_PROGRAM, num_warps=4,
    )  # fmt: skip


def _rotate_heads_plain(
    qkv: Tensor, norm_weights: Tensor, rotary: tuple[Tensor, Tensor], layout: Layout, *, num_heads: int, eps: float
) -> None:
    head = norm_weights.shape[-1]
    cos, sin = (table.repeat_interleave(layout.batch, 0).unsqueeze(1) for table in rotary)
    for part in range(2):
        heads = qkv[:, part * num_heads * head : (part + 1) * num_heads * head].unflatten(1, (num_heads, head))
        x = heads.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x = x * _each_row(norm_weights[:, part].unsqueeze(1).expand(2, layout.batch, head), layout).unsqueeze(1)
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1)
        heads.copy_(turned.flatten(-2))


def attention(qkv: Tensor, layout: Layout, *, num_heads: int, head: int, cudnn: bool) -> Tensor:
    """Softmax attention inside each image: qkv (R, >= 3 D) to (R, D)."""
    width = num_heads * head
    heads = qkv[:, : 3 * width].unflatten(0, (-1, layout.batch)).unflatten(-1, (3, num_heads, head))
    query, key, value = (part.permute(1, 2, 0, 3) for part in heads.unbind(2))  # (B, H, S, head)
    if cudnn:
        mixed = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, False)[0]
    else:
        mixed = F.scaled_dot_product_attention(query, key, value)
    return mixed.permute(2, 0, 1, 3).reshape(-1, width)


# --- activations ------------------------------------------------------------------------------------------------------


def activate(attention_out: Tensor | None, mlp: Tensor | None, kind: Activation, *, into: torch.dtype | None) -> Rows:
    """[attention | activation(mlp)], what the second matrix product of a block reads. Either part may be absent.

    attention_out (R, D) contiguous; mlp (R, M), or (R, 2 M) for SwiGLU, whose rows may be part of wider ones.
    """
    known = attention_out if attention_out is not None else mlp
    assert known is not None, "there must be something to activate"
    if not _by_kernel(known):
        return _activate_plain(attention_out, mlp, kind, into=into)
    from fluxbatch.models.fused import kernels

    mlp_width = 0 if mlp is None else mlp.shape[1] // (2 if kind is Activation.SWIGLU else 1)
    width = 0 if attention_out is None else attention_out.shape[1]
    rows, total = known.shape[0], width + mlp_width
    out = _empty_rows(rows, total, like=known, into=into)
    sources = (attention_out if attention_out is not None else known, mlp if mlp is not None else known)
    shapes = (width, 0 if mlp is None else mlp.stride(0), mlp_width)
    if into is not None:
        block = _power_of_two(total)
        kernels.activate_eight_bit[(rows,)](
            *sources, out.values, out.scales, *shapes, KIND=int(kind), EIGHT_BIT=_eight_bit(into), BLOCK=block,
            num_warps=_row_warps(block), maxnreg=64,  # two programs a multiprocessor
        )  # fmt: skip
    else:
        grid = (rows, -(-total // ACTIVATE_BLOCK))
        kernels.activate[grid](*sources, out.values, *shapes, KIND=int(kind), BLOCK=ACTIVATE_BLOCK)
    return out


def _activate_plain(
    attention_out: Tensor | None, mlp: Tensor | None, kind: Activation, *, into: torch.dtype | None
) -> Rows:
    parts = [] if attention_out is None else [attention_out.float()]
    if mlp is not None and kind is Activation.GELU:
        parts.append(F.gelu(mlp.float(), approximate="tanh"))
    elif mlp is not None:
        gate, up = mlp.float().chunk(2, dim=1)
        parts.append(F.silu(gate) * up)
    values = torch.cat(parts, dim=1)
    known = attention_out if attention_out is not None else mlp
    assert known is not None
    return _stored(values, into, dtype=known.dtype)


def _stored(values: Tensor, into: torch.dtype | None, *, dtype: torch.dtype) -> Rows:
    return Rows(values.to(dtype)) if into is None else quantize_rows_plain(values, into)


def quantize_rows_plain(values: Tensor, into: torch.dtype) -> Rows:
    """float32 (R, D) to 8 bits, each row by its largest magnitude. Of a row with a NaN or infinity the scale is NaN."""
    scales = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST[into]
    if into is FLOAT8:
        return Rows((values / scales).to(FLOAT8), scales)
    return Rows(torch.floor(values / scales + 0.5).nan_to_num(0).to(into), scales + (values * 0).sum(1, keepdim=True))


def scale_products(
    products: Tensor, row_scales: Tensor, column_scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """int32 (R, N) times row_scales (R, 1) and column_scales (1, N), plus bias (N,), rounded once into `out`."""
    if not _by_kernel(products):
        values = products.float() * row_scales * column_scales
        out.copy_(values if bias is None else values + bias.float())
        return
    from fluxbatch.models.fused import kernels

    rows, width = products.shape
    kernels.scale_products[(rows, -(-width // ACTIVATE_BLOCK))](
        products, row_scales, column_scales, products if bias is None else bias, out, width,
        BIAS=bias is not None, BLOCK=ACTIVATE_BLOCK,
    )  # fmt: skip


# --- group norm of images in channels_last ----------------------------------------------------------------------------

SUMS_CHUNK = 512  # pixels whose sums one program takes
SUMS_ELEMENTS = 2048  # that it holds at once; wide images twice as many
NORM_ELEMENTS = 4096  # that one program normalises


@dataclass(frozen=True, slots=True)
class Summed:
    """An image batch (B, C, H, W) and, where a kernel made it, its groups' sums and squares (B, chunks, 2, G)."""

    x: Tensor
    bias: Tensor | None  # of the convolution before, not added to x yet
    sums: Tensor | None


def group_sums(
    x: Tensor, *, bias: Tensor | None, residual: Tensor | None = None, keep: bool = False, groups: int
) -> Summed:
    """What the next group norm needs to know of x + bias + residual. That total replaces x if asked or if it is new."""
    keep = keep or residual is not None
    left = None if keep else bias
    if not _by_kernel(x):
        total = x if bias is None or not keep else x + bias.view(-1, 1, 1)
        return Summed(total if residual is None else total + residual, left, None)
    from fluxbatch.models.fused import kernels

    batch, channels, height, width = x.shape
    chunks = -(-height * width // SUMS_CHUNK)
    sums = torch.empty(batch, chunks, 2, groups, dtype=torch.float32, device=x.device)
    total = torch.empty_like(x) if keep else x
    kernels.group_sums[(chunks, batch)](
        x, x if residual is None else residual, x if bias is None else bias, total, sums, height * width, chunks,
        RESIDUAL=residual is not None, BIAS=bias is not None, KEEP=keep, CHUNK=SUMS_CHUNK,
        STEP=max(8, SUMS_ELEMENTS // channels), CHANNELS=channels, GROUPS=groups, num_warps=8 if channels > 256 else 4,
    )  # fmt: skip
    return Summed(total, left, sums)


def group_norm(summed: Summed, weight: Tensor, shift: Tensor, *, groups: int, eps: float, silu: bool) -> Tensor:
    """Group norm, then SiLU if asked. Wu and He 2018, arXiv:1803.08494."""
    x, bias = summed.x, summed.bias
    if summed.sums is None:
        normed = F.group_norm(x if bias is None else x + bias.view(-1, 1, 1), groups, weight, shift, eps)
        return F.silu(normed) if silu else normed
    from fluxbatch.models.fused import kernels

    batch, channels, height, width = x.shape
    sums, squares = (part / (height * width * channels // groups) for part in summed.sums.sum(1).unbind(1))
    rstd = torch.rsqrt((squares - sums * sums).clamp(min=0) + eps)
    out = torch.empty_like(x)
    step = max(1, NORM_ELEMENTS // channels)
    kernels.group_norm[(-(-height * width // step), batch)](
        x, sums, rstd, weight, shift, x if bias is None else bias, out, height * width,
        SILU=silu, BIAS=bias is not None, STEP=step, CHANNELS=channels, GROUPS=groups, num_warps=4,
    )  # fmt: skip
    return out


def upsample_twice(x: Tensor) -> Tensor:
    """(B, C, H, W) to (B, C, 2 H, 2 W) by nearest neighbours, in channels_last."""
    if not _by_kernel(x):
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
    from fluxbatch.models.fused import kernels

    batch, channels, height, width = x.shape
    shape = (batch, channels, 2 * height, 2 * width)
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    step = max(1, 2048 // channels)
    kernels.upsample_twice[(-(-width // step), batch * height)](x, out, height, width, CHANNELS=channels, STEP=step)
    return out


# --- softmax and the text encoder's norms -----------------------------------------------------------------------------

SOFTMAX_MAX_WIDTH = 65536  # that one program holds


def softmax_rows(scores: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    """softmax(scale * scores) over the last dimension of float32 (R, N), in `dtype`."""
    rows, width = scores.shape
    if not _by_kernel(scores) or width > SOFTMAX_MAX_WIDTH:
        return torch.softmax(scores * scale, dim=-1).to(dtype)
    from fluxbatch.models.fused import kernels

    out = torch.empty(rows, width, dtype=dtype, device=scores.device)
    block = _power_of_two(width)
    kernels.softmax_rows[(rows,)](scores, out, width, scale, BLOCK=block, num_warps=32 if block > 8192 else 8)
    return out


def residual_rms(x: Tensor, y: Tensor | None, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """The total x + y, and its RMS norm times `weight`; x and y (..., D). Zhang and Sennrich 2019, arXiv:1910.07467."""
    if not _by_kernel(x):
        total = x if y is None else x + y
        return total, F.rms_norm(total.float(), weight.shape, weight.float(), eps).to(x.dtype)
    from fluxbatch.models.fused import kernels

    x, width = x.contiguous(), x.shape[-1]
    total = x if y is None else torch.empty_like(x)
    out = torch.empty_like(x)
    kernels.residual_rms[(x.numel() // width,)](
        x, x if y is None else y, weight, total, out, width, eps, RESIDUAL=y is not None, BLOCK=_power_of_two(width)
    )
    return total, out


def rotate_halves(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float) -> None:
    """RMS norm of each head and its rotary embedding, in place: x (B, S, H, head), cos and sin (S, head).

    Pairs are half a head apart, as in Llama and Qwen.
    """
    if not _by_kernel(x):
        normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
        low, high = normed.chunk(2, dim=-1)
        cos, sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
        x.copy_(normed * cos + torch.cat([-high, low], dim=-1) * sin)
        return
    from fluxbatch.models.fused import kernels

    batch, tokens, num_heads, head = x.shape
    grid = (batch * tokens, -(-num_heads // HEADS_A_PROGRAM))
    kernels.rotate_halves[grid](x, weight, cos, sin, tokens, num_heads, eps, HEAD=head, HEADS=HEADS_A_PROGRAM)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Shazeer 2020, arXiv:2002.05202."""
    if not _by_kernel(gate):
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)
    from fluxbatch.models.fused import kernels

    out = torch.empty_like(gate)
    kernels.swiglu[(-(-gate.numel() // 2048),)](gate, up, out, gate.numel(), BLOCK=2048)
    return out


# --- choice -----------------------------------------------------------------------------------------------------------


def _by_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _empty_rows(rows: int, width: int, *, like: Tensor, into: torch.dtype | None) -> Rows:
    values = torch.empty(rows, width, dtype=into or like.dtype, device=like.device)
    return Rows(values, torch.empty(rows, 1, dtype=torch.float32, device=like.device) if into else None)


def _eight_bit(into: torch.dtype | None) -> int:
    """The kernels' word for it."""
    return {None: 0, FLOAT8: 1, torch.int8: 2}[into]


def _row_warps(block: int) -> int:
    """Warps of a program that holds a whole row: about 32 numbers a thread."""
    return max(4, min(16, block // 1024))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
