"""FLUX.1's transformer, fused: what diffusers' `FluxTransformer2DModel` computes. Legend: see the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fluxbatch.models.fused.blocks import Blocks, DoubleBlock, SingleBlock, StepModulations
from fluxbatch.models.fused.linear import Linear
from fluxbatch.models.fused.ops import Activation, Layout
from fluxbatch.models.fused.transformer import (
    Conditions,
    FusedTransformer,
    brought,
    double_block,
    each_step,
    norm_weights,
    rotary_tables,
)
from fluxbatch.models.precision import Precision


@dataclass(frozen=True, slots=True)
class FusedFlux1:
    """Takes over the weights of a diffusers transformer, which cannot run any more afterwards."""

    transformer: FusedTransformer
    time_text_embed: nn.Module
    pos_embed: nn.Module
    double_norms: list[tuple[nn.Module, nn.Module]]  # adaLN layers of text and image stream
    single_norms: list[nn.Module]
    final_norm: nn.Module

    @classmethod
    def take_over(cls, module: Any, *, precision: Precision, cudnn_attention: bool, device: torch.device) -> FusedFlux1:
        norms = [(block.norm1_context.linear, block.norm1.linear) for block in module.transformer_blocks]
        blocks = Blocks(
            doubles=[_double(block, precision) for block in brought(module.transformer_blocks, device)],
            singles=[_single(block, precision) for block in brought(module.single_transformer_blocks, device)],
            num_heads=module.config.num_attention_heads,
            head=module.config.attention_head_dim,
            activation=Activation.GELU,
            activations=precision.activations,
            cudnn_attention=cudnn_attention,
        )
        module.to(device)  # what is left of it
        transformer = FusedTransformer(
            x_embedder=Linear.packed(module.x_embedder),
            context_embedder=Linear.packed(module.context_embedder),
            blocks=blocks,
            proj_out=Linear.packed(module.proj_out),
        )
        singles = [block.norm.linear for block in module.single_transformer_blocks]
        return cls(transformer, module.time_text_embed, module.pos_embed, norms, singles, module.norm_out.linear)

    def conditions(
        self,
        *,
        prompt_embeds: Tensor,
        pooled: Tensor,
        guidance: Tensor | None,
        timesteps: Tensor,
        text_ids: Tensor,
        image_ids: Tensor,
    ) -> Conditions:
        """Embeddings (B, T, D_text) and (B, D_pooled), guidance float32 (B,), timesteps float32 (N,) 1000 to 0."""
        batch, text_tokens = prompt_embeds.shape[:2]
        silu_temb = F.silu(self._time_embedding(pooled, guidance, timesteps))
        return Conditions(
            layout=Layout(text_tokens, image_ids.shape[0], batch),
            text_rows=self.transformer.embed_text(prompt_embeds),
            rotary=rotary_tables(self.pos_embed, torch.cat([text_ids, image_ids])),
            modulations=self._modulations(silu_temb, num_steps=timesteps.shape[0]),
        )

    def _time_embedding(self, pooled: Tensor, guidance: Tensor | None, timesteps: Tensor) -> Tensor:
        """(N * B, D), rounded where diffusers rounds."""
        batch, steps, dtype = pooled.shape[0], timesteps.shape[0], pooled.dtype
        times = (timesteps.to(dtype) / 1000 * 1000).repeat_interleave(batch)
        pooled = pooled.repeat(steps, 1)
        if guidance is None:
            return self.time_text_embed(times, pooled)
        return self.time_text_embed(times, (guidance.to(dtype) * 1000).repeat(steps), pooled)

    def _modulations(self, silu_temb: Tensor, *, num_steps: int) -> list[StepModulations]:
        doubles = [
            torch.stack([each_step(silu_temb, norm, num_steps=num_steps, parts=6) for norm in pair], dim=1)
            for pair in self.double_norms
        ]
        singles = [_both(each_step(silu_temb, norm, num_steps=num_steps, parts=3)) for norm in self.single_norms]
        final = _both(each_step(silu_temb, self.final_norm, num_steps=num_steps, parts=2).flip(2))  # scale comes first
        return [
            StepModulations([double[step] for double in doubles], [single[step] for single in singles], final[step])
            for step in range(num_steps)
        ]


def _both(mods: Tensor) -> Tensor:
    """(N, B, parts, D) for two streams that share it: (N, 2, B, parts, D)."""
    return mods.unsqueeze(1).expand(-1, 2, -1, -1, -1)


def _double(block: Any, precision: Precision) -> DoubleBlock:
    streams = (block.ff_context, block.ff)
    return double_block(
        block.attn,
        mlp_in=[mlp.net[0].proj for mlp in streams],
        mlp_out=[mlp.net[2] for mlp in streams],
        precision=precision,
    )


def _single(block: Any, precision: Precision) -> SingleBlock:
    attention = block.attn
    return SingleBlock(
        inner=Linear.packed(attention.to_q, attention.to_k, attention.to_v, block.proj_mlp, precision=precision),
        outer=Linear.packed(block.proj_out, precision=precision),
        qk_norm=norm_weights(attention.norm_q, attention.norm_k).expand(2, -1, -1),
    )
