"""A whole fused transformer: embeddings of a launch once, then a velocity for each of its steps.

What does not change between steps (text rows, rotary tables, every block's modulation) is made once a launch. Knows
nothing of sampling. Legend: see the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fluxbatch.models.fused.blocks import Blocks, DoubleBlock, Rotary, StepModulations
from fluxbatch.models.fused.linear import Linear
from fluxbatch.models.fused.ops import Layout, Rows
from fluxbatch.models.precision import Precision


@dataclass(frozen=True, slots=True)
class Conditions:
    """All that a launch's steps share: rows of text (T * B, D), rotary tables, and N steps' modulations."""

    layout: Layout
    text_rows: Tensor
    rotary: Rotary
    modulations: Sequence[StepModulations]


@dataclass(frozen=True, slots=True)
class FusedTransformer:
    """The blocks between the layers that lead in and out, which stay in the model's dtype."""

    x_embedder: Linear
    context_embedder: Linear
    blocks: Blocks
    proj_out: Linear

    def embed_text(self, embeds: Tensor) -> Tensor:
        """(B, T, D_text) to rows (T * B, D)."""
        return self.context_embedder(rows_of(embeds))

    def velocity(self, latents: Tensor, step: int, conditions: Conditions) -> Tensor:
        """The flow at (B, L, C) latents."""
        layout = conditions.layout
        x = torch.empty(layout.rows, self.blocks.width, dtype=latents.dtype, device=latents.device)
        x[: layout.text_rows] = conditions.text_rows
        self.x_embedder(rows_of(latents), out=x[layout.text_rows :])
        rows = self.blocks(x, conditions.modulations[step], conditions.rotary, layout)
        velocity = self.proj_out(Rows(rows[layout.text_rows :]))
        return velocity.unflatten(0, (layout.image_tokens, layout.batch)).transpose(0, 1).contiguous()


def brought(blocks: Iterable[nn.Module], device: torch.device) -> Iterator[Any]:
    """Blocks as they are asked for, on the device: quantised before the next one comes, they fit a small card."""
    for block in blocks:
        yield block.to(device)


def rows_of(tokens: Tensor) -> Rows:
    """(B, S, C) to (S * B, C)."""
    return Rows(tokens.transpose(0, 1).flatten(0, 1))


def rotary_tables(pos_embed: nn.Module, ids: Tensor) -> Rotary:
    """diffusers' tables repeat each angle for its pair; one of each is enough."""
    cos, sin = pos_embed(ids)
    return cos[:, ::2].float().contiguous(), sin[:, ::2].float().contiguous()


def each_step(silu_temb: Tensor, linear: nn.Module, *, num_steps: int, parts: int) -> Tensor:
    """One adaLN layer for all steps at once: (N * B, D) to (N, B, parts, D)."""
    return linear(silu_temb).unflatten(1, (parts, -1)).unflatten(0, (num_steps, -1))


def norm_weights(queries: Any, keys: Any) -> Tensor:
    return torch.stack([queries.weight.data, keys.weight.data])


def double_block(attention: Any, *, mlp_in: Sequence[Any], mlp_out: Sequence[Any], precision: Precision) -> DoubleBlock:
    """A double block from diffusers' attention, whose layers have the same names in both families, and its MLPs.

    The MLP's layers come as that of the text stream and that of the image stream.
    """
    packed = partial(Linear.packed, precision=precision)
    return DoubleBlock(
        qkv=(
            packed(attention.add_q_proj, attention.add_k_proj, attention.add_v_proj),
            packed(attention.to_q, attention.to_k, attention.to_v),
        ),
        attention_out=(packed(attention.to_add_out), packed(attention.to_out[0])),
        mlp_in=(packed(mlp_in[0]), packed(mlp_in[1])),
        mlp_out=(packed(mlp_out[0]), packed(mlp_out[1])),
        qk_norm=torch.stack(
            [
                norm_weights(attention.norm_added_q, attention.norm_added_k),
                norm_weights(attention.norm_q, attention.norm_k),
            ]
        ),
    )
