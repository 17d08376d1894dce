"""Qwen3's decoder layers with fused operations between their matrix products; their modules and weights stay.

What transformers' `Qwen3DecoderLayer` computes, rounded less often. Legend: B prompts, S tokens, H heads, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fluxbatch.models.fused import ops


def fuse_layers(text_encoder: Any) -> None:
    """Replace the forward of each layer of a `Qwen3Model`. Hooks that move a layer's weights still work."""
    for layer in text_encoder.layers:
        layer.forward = partial(_layer, layer)


def _layer(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **unused: Any,
) -> Tensor:
    """(B, S, D) to (B, S, D); the mask is (B, 1, S, S), cos and sin (1, S, head)."""
    assert position_embeddings is not None, "Qwen3Model gives them to every layer"
    norm, after = layer.input_layernorm, layer.post_attention_layernorm
    _, normed = ops.residual_rms(hidden_states, None, norm.weight, eps=norm.variance_epsilon)
    mixed = _attention(layer.self_attn, normed, attention_mask, position_embeddings)
    total, normed = ops.residual_rms(hidden_states, mixed, after.weight, eps=after.variance_epsilon)
    active = ops.swiglu(layer.mlp.gate_proj(normed), layer.mlp.up_proj(normed))
    return total + layer.mlp.down_proj(active)


def _attention(block: Any, x: Tensor, mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    query, key, value = (
        layer(x).unflatten(-1, (-1, block.head_dim)) for layer in (block.q_proj, block.k_proj, block.v_proj)
    )
    cos, sin = (table[0].contiguous() for table in position_embeddings)  # positions are the same in every prompt
    ops.rotate_halves(query, block.q_norm.weight, cos, sin, eps=block.q_norm.variance_epsilon)
    ops.rotate_halves(key, block.k_norm.weight, cos, sin, eps=block.k_norm.variance_epsilon)
    mixed = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=block.scaling,
        enable_gqa=True,
    )
    return block.o_proj(mixed.transpose(1, 2).flatten(2))
