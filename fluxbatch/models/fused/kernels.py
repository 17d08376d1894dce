"""Triton kernels for the memory-bound work between matrix products. Only `ops.py` calls them, and only on CUDA.

One program a row (or a row's heads): every reduction stays inside a program, so a row's bits depend on no other row.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE, FLOAT8, INT8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # of EIGHT_BIT: how a row is stored
FLOAT8_MAX = tl.constexpr(448.0)  # largest float8_e4m3fn
INT8_MAX = tl.constexpr(127.0)
TINY = tl.constexpr(1e-12)  # keeps the scale of an all-zero row finite


@triton.jit
def _store_row(out_ptr, scale_ptr, row, columns, mask, values, width, EIGHT_BIT: tl.constexpr):
    """A row as it is, or in 8 bits with its own scale. Whole numbers hold no NaN, so their scale takes it."""
    target = out_ptr + row.to(tl.int64) * width + columns
    if EIGHT_BIT == FLOAT8:
        scale = tl.maximum(tl.max(tl.abs(values), 0), TINY) / FLOAT8_MAX
        tl.store(scale_ptr + row, scale)
        tl.store(target, (values / scale).to(tl.float8e4nv), mask=mask)
    elif EIGHT_BIT == INT8:
        scale = tl.maximum(tl.max(tl.abs(values), 0), TINY) / INT8_MAX
        tl.store(scale_ptr + row, scale + tl.sum(values * 0.0, 0))
        tl.store(target, tl.floor(values / scale + 0.5).to(tl.int8), mask=mask)
    else:
        tl.store(target, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def residual_modulate(
    x_ptr, y_ptr, gate_ptr, shift_ptr, scale_ptr, out_ptr, out_scale_ptr,
    gate_stream, gate_image, mod_stream, mod_image, text_rows, batch, width, eps,
    RESIDUAL: tl.constexpr, EIGHT_BIT: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x += gate * y in place, then (1 + scale) * layer_norm(x) + shift. One program a row."""
    row = tl.program_id(0)
    stream = (row >= text_rows).to(tl.int64)
    image = (row % batch).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    place = row.to(tl.int64) * width + columns
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        y = tl.load(y_ptr + place, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + stream * gate_stream + image * gate_image + columns, mask=mask, other=0.0)
        x += gate.to(tl.float32) * y
        if CLIP:
            x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        stored = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + place, stored, mask=mask)
        x = stored.to(tl.float32)
    mean = tl.sum(x, 0) / width
    centred = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / width
    modulation = stream * mod_stream + image * mod_image + columns
    shift = tl.load(shift_ptr + modulation, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + modulation, mask=mask, other=0.0).to(tl.float32)
    values = centred * tl.rsqrt(variance + eps) * (1.0 + scale) + shift
    _store_row(out_ptr, out_scale_ptr, row, columns, mask, values, width, EIGHT_BIT)


@triton.jit
def rotate_heads(
    qkv_ptr, norm_ptr, cos_ptr, sin_ptr,
    row_stride, norm_stream, text_rows, batch, num_heads, eps,
    HEAD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """RMS norm and rotary embedding of queries and keys, in place. One program a row and HEADS heads of both."""
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HEAD // 2)
    token = row // batch
    cos = tl.load(cos_ptr + token * (HEAD // 2) + half)[None, :]
    sin = tl.load(sin_ptr + token * (HEAD // 2) + half)[None, :]
    mask = (heads < num_heads)[:, None]
    lanes = tl.arange(0, HEAD)
    stream = (row >= text_rows).to(tl.int64)
    for part in tl.static_range(2):  # queries, keys
        place = qkv_ptr + row.to(tl.int64) * row_stride + ((part * num_heads + heads) * HEAD)[:, None] + lanes[None, :]
        x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + stream * norm_stream + part * HEAD + lanes).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 1) / HEAD + eps)[:, None] * weight[None, :]
        real, imaginary = tl.split(tl.reshape(x, (HEADS, HEAD // 2, 2)))
        turned = tl.join(real * cos - imaginary * sin, imaginary * cos + real * sin)
        tl.store(place, tl.reshape(turned, (HEADS, HEAD)).to(qkv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activated(
    attention_ptr, mlp_ptr, row, columns, attention_width, mlp_stride, mlp_width, KIND: tl.constexpr
):  # fmt: skip
    """Columns of [attention | activation(mlp)]. KIND: 0 no mlp, 1 GELU (tanh), 2 SwiGLU of two halves."""
    is_attention = columns < attention_width
    source = attention_ptr + row.to(tl.int64) * attention_width + columns
    values = tl.load(source, mask=is_attention, other=0.0).to(tl.float32)
    if KIND > 0:
        is_mlp = (columns >= attention_width) & (columns < attention_width + mlp_width)
        place = mlp_ptr + row.to(tl.int64) * mlp_stride + (columns - attention_width)
        x = tl.load(place, mask=is_mlp, other=0.0).to(tl.float32)
        if KIND == 1:
            inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
            x = x * tl.sigmoid(2.0 * inner)  # 0.5 * (1 + tanh(z)) is sigmoid(2 z)
        else:
            x = x * tl.sigmoid(x) * tl.load(place + mlp_width, mask=is_mlp, other=0.0).to(tl.float32)
        values += x
    return values


@triton.jit
def activate(
    attention_ptr, mlp_ptr, out_ptr, attention_width, mlp_stride, mlp_width, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[attention | activation(mlp)], one program a row and BLOCK columns."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = attention_width + mlp_width
    values = _activated(attention_ptr, mlp_ptr, row, columns, attention_width, mlp_stride, mlp_width, KIND)
    target = out_ptr + row.to(tl.int64) * width + columns
    tl.store(target, values.to(out_ptr.dtype.element_ty), mask=columns < width)


@triton.jit
def activate_eight_bit(
    attention_ptr, mlp_ptr, out_ptr, out_scale_ptr, attention_width, mlp_stride, mlp_width,
    KIND: tl.constexpr, EIGHT_BIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same in 8 bits, one program a whole row."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    width = attention_width + mlp_width
    values = _activated(attention_ptr, mlp_ptr, row, columns, attention_width, mlp_stride, mlp_width, KIND)
    _store_row(out_ptr, out_scale_ptr, row, columns, columns < width, values, width, EIGHT_BIT)


@triton.jit
def scale_products(
    products_ptr, row_scale_ptr, column_scale_ptr, bias_ptr, out_ptr, width, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Whole-number products times their row's and their column's scale (+ bias); one program a row, BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    products = tl.load(products_ptr + row * width + columns, mask=mask, other=0).to(tl.float32)
    values = products * tl.load(row_scale_ptr + row) * tl.load(column_scale_ptr + columns, mask=mask, other=0.0)
    if BIAS:
        values += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def group_sums(
    x_ptr, residual_ptr, bias_ptr, total_ptr, sums_ptr, pixels, num_chunks,
    RESIDUAL: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Sum and sum of squares of each group of x (+ bias + residual) over a chunk of one image's pixels.

    KEEP stores that total too. Channels are innermost.
    """
    image = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, CHANNELS)
    sums = tl.zeros((STEP, CHANNELS), tl.float32)
    squares = tl.zeros((STEP, CHANNELS), tl.float32)
    for offset in range(0, CHUNK, STEP):
        rows = tl.program_id(0) * CHUNK + offset + tl.arange(0, STEP)
        mask = (rows < pixels)[:, None]
        place = image * pixels * CHANNELS + rows.to(tl.int64)[:, None] * CHANNELS + columns[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
        if RESIDUAL:
            x += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        if KEEP:
            stored = x.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + place, stored, mask=mask)
            x = stored.to(tl.float32)
        x = tl.where(mask, x, 0.0)
        sums += x
        squares += x * x
    target = sums_ptr + (image * num_chunks + tl.program_id(0)) * 2 * GROUPS + tl.arange(0, GROUPS)
    tl.store(target, tl.sum(tl.reshape(tl.sum(sums, 0), (GROUPS, CHANNELS // GROUPS)), 1))
    tl.store(target + GROUPS, tl.sum(tl.reshape(tl.sum(squares, 0), (GROUPS, CHANNELS // GROUPS)), 1))


@triton.jit
def group_norm(
    x_ptr, mean_ptr, rstd_ptr, weight_ptr, shift_ptr, bias_ptr, out_ptr, pixels,
    SILU: tl.constexpr, BIAS: tl.constexpr,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Normalise x (+ bias), STEP pixels of one image, with its groups' statistics; then SiLU."""
    image = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * STEP + tl.arange(0, STEP)
    columns = tl.arange(0, CHANNELS)
    mask = (rows < pixels)[:, None]
    group = image * GROUPS + columns // (CHANNELS // GROUPS)
    factor = tl.load(rstd_ptr + group) * tl.load(weight_ptr + columns).to(tl.float32)
    centre = tl.load(mean_ptr + group)
    if BIAS:
        centre -= tl.load(bias_ptr + columns).to(tl.float32)
    offset = tl.load(shift_ptr + columns).to(tl.float32) - centre * factor
    place = image * pixels * CHANNELS + rows.to(tl.int64)[:, None] * CHANNELS + columns[None, :]
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) * factor[None, :] + offset[None, :]
    if SILU:
        x = x * tl.sigmoid(x)
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def upsample_twice(x_ptr, out_ptr, height, width, CHANNELS: tl.constexpr, STEP: tl.constexpr):
    """Nearest neighbour: each pixel to four. One program STEP pixels of one line; channels are innermost."""
    line = tl.program_id(1).to(tl.int64)  # of all images
    across = tl.program_id(0) * STEP + tl.arange(0, STEP)
    columns = tl.arange(0, CHANNELS)
    mask = (across < width)[:, None]
    x = tl.load(x_ptr + (line * width + across)[:, None] * CHANNELS + columns[None, :], mask=mask)
    for down in tl.static_range(2):
        for right in tl.static_range(2):
            pixel = (line * 2 + down) * 2 * width + 2 * across + right
            tl.store(out_ptr + pixel[:, None] * CHANNELS + columns[None, :], x, mask=mask)


@triton.jit
def softmax_rows(scores_ptr, out_ptr, width, scale, BLOCK: tl.constexpr):
    """softmax(scale * scores), one program a row, from float32 to the output's dtype."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    scores = tl.load(scores_ptr + row * width + columns, mask=mask, other=float("-inf")) * scale
    weights = tl.exp(scores - tl.max(scores, 0))
    weights = weights / tl.sum(weights, 0)
    tl.store(out_ptr + row * width + columns, weights.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def residual_rms(
    x_ptr, y_ptr, weight_ptr, total_ptr, out_ptr, width, eps, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """total = x + y, then weight * rms_norm(total). One program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    place = row * width + columns
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(y_ptr + place, mask=mask, other=0.0).to(tl.float32)
        stored = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + place, stored, mask=mask)
        x = stored.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    values = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * weight
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotate_halves(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, tokens, num_heads, eps, HEAD: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """RMS norm of each head and the rotary embedding whose pairs are half a head apart, in place."""
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HEAD // 2)
    mask = (heads < num_heads)[:, None]
    place = x_ptr + (row.to(tl.int64) * num_heads + heads)[:, None] * HEAD + half[None, :]
    low = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(place + HEAD // 2, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD + eps)[:, None]
    low = low * rstd * tl.load(weight_ptr + half).to(tl.float32)[None, :]
    high = high * rstd * tl.load(weight_ptr + HEAD // 2 + half).to(tl.float32)[None, :]
    angle = (row % tokens) * HEAD + half
    cos = tl.load(cos_ptr + angle).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle).to(tl.float32)[None, :]
    tl.store(place, (low * cos - high * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(place + HEAD // 2, (high * cos + low * sin).to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu(gate_ptr, up_ptr, out_ptr, total, BLOCK: tl.constexpr):
    """silu(gate) * up of two separate matrices."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < total
    gate = tl.load(gate_ptr + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)
