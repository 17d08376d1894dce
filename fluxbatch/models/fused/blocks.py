"""The blocks that FLUX.1 and FLUX.2 share: double blocks of two streams, then single blocks of one.

The residual add of each sub-layer is one pass with the norm of the next, so a block is told the modulation that
follows it. Knows nothing of embeddings, timesteps or where weights come from. Legend: see the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxbatch.models.fused import ops
from fluxbatch.models.fused.linear import Linear
from fluxbatch.models.fused.ops import Activation, Layout, Modulation, Rows

Pair = tuple[Linear, Linear]  # of the text stream and of the image stream
Rotary = tuple[Tensor, Tensor]  # cos and sin, float32 (S, head width / 2)


@dataclass(frozen=True, slots=True)
class DoubleBlock:
    """Two streams with weights of their own that attend to each other."""

    qkv: Pair
    attention_out: Pair
    mlp_in: Pair
    mlp_out: Pair
    qk_norm: Tensor  # (2 streams, 2 for queries and keys, head width)

    def weights(self) -> list[Tensor]:
        pairs = (self.qkv, self.attention_out, self.mlp_in, self.mlp_out)
        return [layer.weight for pair in pairs for layer in pair]


@dataclass(frozen=True, slots=True)
class SingleBlock:
    """One stream; attention and MLP side by side. `inner` gives queries, keys, values and the MLP's input at once."""

    inner: Linear
    outer: Linear
    qk_norm: Tensor  # (2 streams that share, 2, head width)

    def weights(self) -> list[Tensor]:
        return [self.inner.weight, self.outer.weight]


@dataclass(frozen=True, slots=True)
class StepModulations:
    """What one step's timestep says to every block: shift, scale, gate.

    doubles: a (2, B, 6, D) each; singles: a (2, B, 3, D) each; final: shift and scale, (2, B, 2, D).
    """

    doubles: Sequence[Tensor]
    singles: Sequence[Tensor]
    final: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """All blocks of a transformer, from embedded rows to the normed rows that the last layer reads."""

    doubles: Sequence[DoubleBlock]
    singles: Sequence[SingleBlock]
    num_heads: int
    head: int
    activation: Activation
    activations: torch.dtype | None  # 8 bits that products read; None: half precision
    cudnn_attention: bool
    eps: float = 1e-6  # diffusers' value in every norm of both families

    @property
    def width(self) -> int:
        return self.num_heads * self.head

    def all(self) -> list[DoubleBlock | SingleBlock]:
        return [*self.doubles, *self.singles]

    def __call__(self, x: Tensor, mods: StepModulations, rotary: Rotary, layout: Layout) -> Tensor:
        """Rows (R, D), which are overwritten, to rows (R, D)."""
        norms = [self._norm(mod) for mod in (*mods.doubles, *mods.singles)]
        norms.append(Modulation(mods.final[:, :, 0], mods.final[:, :, 1], into=None))
        rows = ops.residual_modulate(x, None, None, norms[0], layout, eps=self.eps)
        following = iter(norms[1:])
        for double, mod in zip(self.doubles, mods.doubles, strict=True):
            rows = self._double(double, x, rows, mod, next(following), rotary, layout)
        for single, mod in zip(self.singles, mods.singles, strict=True):
            rows = self._single(single, x, rows, mod, next(following), rotary, layout)
        return rows.values

    def _double(
        self, block: DoubleBlock, x: Tensor, rows: Rows, mod: Tensor, after: Modulation, rotary: Rotary, layout: Layout
    ) -> Rows:
        qkv = _each_stream(block.qkv, rows, x, layout)
        mixed = self._attend(qkv, block.qk_norm, rotary, layout)
        into = self.activations
        mixed_rows = Rows(mixed) if into is None else ops.activate(mixed, None, Activation.NONE, into=into)
        y = _each_stream(block.attention_out, mixed_rows, x, layout)
        rows = ops.residual_modulate(x, y, mod[:, :, 2], self._norm(mod[:, :, 3:]), layout, eps=self.eps)
        hidden = _each_stream(block.mlp_in, rows, x, layout)
        active = ops.activate(None, hidden, self.activation, into=self.activations)
        y = _each_stream(block.mlp_out, active, x, layout)
        return ops.residual_modulate(x, y, mod[:, :, 5], after, layout, eps=self.eps)

    def _single(
        self, block: SingleBlock, x: Tensor, rows: Rows, mod: Tensor, after: Modulation, rotary: Rotary, layout: Layout
    ) -> Rows:
        inner = block.inner(rows)
        mixed = self._attend(inner, block.qk_norm, rotary, layout)
        active = ops.activate(mixed, inner[:, 3 * self.width :], self.activation, into=self.activations)
        return ops.residual_modulate(x, block.outer(active), mod[:, :, 2], after, layout, eps=self.eps)

    def _attend(self, qkv: Tensor, qk_norm: Tensor, rotary: Rotary, layout: Layout) -> Tensor:
        ops.rotate_heads(qkv, qk_norm, rotary, layout, num_heads=self.num_heads, eps=self.eps)
        return ops.attention(qkv, layout, num_heads=self.num_heads, head=self.head, cudnn=self.cudnn_attention)

    def _norm(self, mod: Tensor) -> Modulation:
        return Modulation(mod[:, :, 0], mod[:, :, 1], into=self.activations)


def _each_stream(layers: Pair, rows: Rows, like: Tensor, layout: Layout) -> Tensor:
    """Each stream's rows through its own layer, into the two parts of one matrix."""
    out = torch.empty(layout.rows, layers[0].weight.shape[0], dtype=like.dtype, device=like.device)
    text, image = slice(0, layout.text_rows), slice(layout.text_rows, layout.rows)
    for layer, part in zip(layers, (text, image), strict=True):
        layer(rows[part], out=out[part])
    return out
