"""FLUX.2-klein's transformer, fused: what diffusers' `Flux2Transformer2DModel` computes. Legend: see the package."""

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
class FusedFlux2:
    """Takes over the weights of a diffusers transformer, which cannot run any more afterwards."""

    transformer: FusedTransformer
    time_guidance_embed: nn.Module
    pos_embed: nn.Module
    double_norms: tuple[nn.Module, nn.Module]  # modulation of text and image stream, the same in every block
    single_norm: nn.Module
    final_norm: nn.Module

    @classmethod
    def take_over(cls, module: Any, *, precision: Precision, cudnn_attention: bool, device: torch.device) -> FusedFlux2:
        blocks = Blocks(
            doubles=[_double(block, precision) for block in brought(module.transformer_blocks, device)],
            singles=[_single(block, precision) for block in brought(module.single_transformer_blocks, device)],
            num_heads=module.config.num_attention_heads,
            head=module.config.attention_head_dim,
            activation=Activation.SWIGLU,
            activations=precision.activations,
            cudnn_attention=cudnn_attention,
        )
        module.to(device)  # what is left of it
        return cls(
            transformer=FusedTransformer(
                x_embedder=Linear.packed(module.x_embedder),
                context_embedder=Linear.packed(module.context_embedder),
                blocks=blocks,
                proj_out=Linear.packed(module.proj_out),
            ),
            time_guidance_embed=module.time_guidance_embed,
            pos_embed=module.pos_embed,
            double_norms=(module.double_stream_modulation_txt.linear, module.double_stream_modulation_img.linear),
            single_norm=module.single_stream_modulation.linear,
            final_norm=module.norm_out.linear,
        )

    def conditions(
        self, *, prompt_embeds: Tensor, timesteps: Tensor, text_ids: Tensor, image_ids: Tensor
    ) -> Conditions:
        """Embeddings (B, T, D_text), timesteps float32 (N,) from 1000 to 0. Modulation is the same for every image."""
        batch, text_tokens = prompt_embeds.shape[:2]
        times = timesteps.to(prompt_embeds.dtype) / 1000 * 1000
        silu_temb = F.silu(self.time_guidance_embed(times, None))
        text, image = (rotary_tables(self.pos_embed, ids) for ids in (text_ids, image_ids))
        return Conditions(
            layout=Layout(text_tokens, image_ids.shape[0], batch),
            text_rows=self.transformer.embed_text(prompt_embeds),
            rotary=(torch.cat([text[0], image[0]]), torch.cat([text[1], image[1]])),
            modulations=self._modulations(silu_temb, num_steps=timesteps.shape[0], batch=batch),
        )

    def _modulations(self, silu_temb: Tensor, *, num_steps: int, batch: int) -> list[StepModulations]:
        streams = [each_step(silu_temb, norm, num_steps=num_steps, parts=6) for norm in self.double_norms]
        double = torch.stack(streams, dim=1).expand(-1, -1, batch, -1, -1)
        single, final = (
            each_step(silu_temb, norm, num_steps=num_steps, parts=parts).unsqueeze(1).expand(-1, 2, batch, -1, -1)
            for norm, parts in ((self.single_norm, 3), (self.final_norm, 2))
        )
        final = final.flip(3)  # its scale comes first
        blocks = self.transformer.blocks
        return [
            StepModulations([double[step]] * len(blocks.doubles), [single[step]] * len(blocks.singles), final[step])
            for step in range(num_steps)
        ]


def _double(block: Any, precision: Precision) -> DoubleBlock:
    streams = (block.ff_context, block.ff)
    return double_block(
        block.attn,
        mlp_in=[mlp.linear_in for mlp in streams],
        mlp_out=[mlp.linear_out for mlp in streams],
        precision=precision,
    )


def _single(block: Any, precision: Precision) -> SingleBlock:
    attention = block.attn
    return SingleBlock(
        inner=Linear.packed(attention.to_qkv_mlp_proj, precision=precision),
        outer=Linear.packed(attention.to_out, precision=precision),
        qk_norm=norm_weights(attention.norm_q, attention.norm_k).expand(2, -1, -1),
    )
