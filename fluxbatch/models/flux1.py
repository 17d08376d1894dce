"""FLUX.1-dev, -schnell and the embedded tiny model, stage by stage, on diffusers' components.

Numerically what diffusers' `FluxPipeline` computes for each row. Knows nothing of where rows come from or go to.

Legend: N prompts, S text tokens, B batch, L packed latent tokens, C channels, h w latent sides, H W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from fluxbatch.config import ModelConfig
from fluxbatch.models import Decode, Flow, PromptEmbeds, Schedule, Tokens, homes, loading, residency, tuning
from fluxbatch.models.aot.parts import Part
from fluxbatch.models.checkpoints import convert
from fluxbatch.models.fused.decoder import FusedDecoder
from fluxbatch.models.fused.flux1 import FusedFlux1
from fluxbatch.models.precision import PRECISIONS
from fluxbatch.models.schedule import flow_schedule, flux1_mu
from fluxbatch.models.tokens import RandomTokenizer, tokenize_fixed
from fluxbatch.records import Bucket

# Full-size settings for random weights. Transformer: black-forest-labs/flux `util.py` and diffusers' class defaults
# (which are schnell's). Encoders: openai/clip-vit-large-patch14 and google/t5-v1_1-xxl. VAE: the FLUX.1 repositories.
_TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "axes_dims_rope": (16, 56, 56),
}
_DYNAMIC_SHIFT = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
RANDOM: dict[str, dict[str, Any]] = {
    "flux1_dev": {
        "transformer": {**_TRANSFORMER, "guidance_embeds": True},
        "scheduler": {"shift": 3.0, **_DYNAMIC_SHIFT, "base_image_seq_len": 256, "max_image_seq_len": 4096},
    },
    "flux1_schnell": {
        "transformer": {**_TRANSFORMER, "guidance_embeds": False},
        "scheduler": {"shift": 1.0, "use_dynamic_shifting": False},
    },
}
CLIP_L: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "eos_token_id": 49407,
}
T5_XXL: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
}


class Flux1:
    """The stages of FLUX.1. Guidance goes into the transformer, one value a row; a negative prompt is a second pass."""

    def __init__(
        self,
        *,
        transformer: Any,
        vae: Any,
        text_encoder: Any,
        text_encoder_2: Any,
        tokenizer: Any,
        tokenizer_2: Any,
        scheduler_config: Mapping[str, Any],
        cfg: ModelConfig,
        true_cfg_scale: float,
        fused: FusedFlux1 | None = None,
        decoder: FusedDecoder | None = None,
    ) -> None:
        self.name = cfg.name
        self.device: torch.device = vae.device
        self.dtype: torch.dtype = transformer.dtype
        self.max_sequence_length = cfg.max_sequence_length
        self.true_cfg_scale = true_cfg_scale
        self._transformer = transformer
        self._fused = fused
        self._vae = vae
        self._decode: Decode = decoder or (lambda latents: vae.decode(latents, return_dict=False)[0])
        self._text_encoder = text_encoder
        self._text_encoder_2 = text_encoder_2
        self._tokenizer = tokenizer
        self._tokenizer_2 = tokenizer_2
        self._scheduler_config = scheduler_config
        self._token_side = 2 * 2 ** (len(vae.config.block_out_channels) - 1)  # pixels: 2 latents of 8 each
        self._schedules: dict[Bucket, Schedule] = {}
        self._position_ids: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        loading.decode_row_by_row_on_cpu(vae)

    @classmethod
    def load(cls, cfg: ModelConfig, *, true_cfg_scale: float) -> Self:
        placement = residency.settle(cfg, loading.place(cfg), random=_random, text_encoder="text_encoder_2")
        use_fused = tuning.use_fused(cfg, placement)
        parts = (_random if cfg.random_weights else _stored)(cfg, placement)
        if use_fused:
            parts |= _fused(parts, cfg, placement)
        else:
            tuning.prepare_plain(parts["transformer"], parts["vae"], cfg=cfg, placement=placement)
        return cls(**parts, cfg=cfg, true_cfg_scale=true_cfg_scale)

    @classmethod
    def blueprint(cls, cfg: ModelConfig) -> tuple[Self, list[Part]]:
        """What a launch calls, without weights, and the parts of it that packages are made of."""
        placement = loading.place(cfg)
        full = {"vae": VAE, **(loading.random_config(RANDOM, cfg) if cfg.random_weights else {})}
        parts = loading.blueprint(FluxTransformer2DModel, AutoencoderKL, full_size=full, cfg=cfg, placement=placement)
        ahead = tuning.blueprint_parts(**parts, cfg=cfg, placement=placement)
        without = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
        return cls(**parts, **without, scheduler_config={}, cfg=cfg, true_cfg_scale=1.0), ahead

    def blank_embeds(self, size: int) -> PromptEmbeds:
        config, tokens = self._transformer.config, self.max_sequence_length
        shapes = {
            "prompt_embeds": (size, tokens, config.joint_attention_dim),
            "pooled_prompt_embeds": (size, config.pooled_projection_dim),
        }
        return {name: torch.zeros(shape, dtype=self.dtype, device=self.device) for name, shape in shapes.items()}

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        clip_ids, _, _ = tokenize_fixed(self._tokenizer, prompts, max_length=self._tokenizer.model_max_length)
        t5_ids, _, truncated = tokenize_fixed(self._tokenizer_2, prompts, max_length=self.max_sequence_length)
        return Tokens(tensors={"clip_ids": clip_ids, "t5_ids": t5_ids}, truncated=truncated)

    @torch.no_grad()
    def encode(self, tokens: dict[str, Tensor]) -> PromptEmbeds:
        """CLIP's pooled output (N, D) and T5's last states (N, S, D). FLUX.1 masks no padding, so neither is masked."""
        pooled = self._text_encoder(tokens["clip_ids"]).pooler_output
        states = self._text_encoder_2(tokens["t5_ids"])[0]
        return {"prompt_embeds": states.to(self.dtype), "pooled_prompt_embeds": pooled.to(self.dtype)}

    def noise_shape(self, *, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self._grid(height, width)
        return (self._transformer.config.in_channels // 4, 2 * rows, 2 * columns)

    def schedule(self, bucket: Bucket) -> Schedule:
        if bucket not in self._schedules:
            rows, columns = self._grid(bucket.height, bucket.width)
            self._schedules[bucket] = flow_schedule(
                self._scheduler_config,
                num_inference_steps=bucket.num_inference_steps,
                mu=flux1_mu(rows * columns, self._scheduler_config),
                device=self.device,
            )
        return self._schedules[bucket]

    def pack(self, noise: Tensor) -> Tensor:
        """(B, C, h, w) to (B, h/2 * w/2, 4 C): each token is a patch of 2 x 2."""
        batch, channels, height, width = noise.shape
        patches = noise.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(batch, (height // 2) * (width // 2), channels * 4)

    @torch.no_grad()
    def flow(self, *, embeds: PromptEmbeds, guidance: Tensor, bucket: Bucket) -> Flow:
        text_ids, image_ids = self._ids(bucket)
        timesteps = self.schedule(bucket).timesteps
        given = guidance if self._transformer.config.guidance_embeds else None
        if self._fused is not None:
            conditions = self._fused.conditions(
                prompt_embeds=embeds["prompt_embeds"],
                pooled=embeds["pooled_prompt_embeds"],
                guidance=given,
                timesteps=timesteps,
                text_ids=text_ids,
                image_ids=image_ids,
            )
            return partial(self._fused.transformer.velocity, conditions=conditions)

        return tuning.plain_flow(
            self._transformer,
            timesteps,
            text=embeds["prompt_embeds"],
            guidance=given,
            pooled_projections=embeds["pooled_prompt_embeds"],
            txt_ids=text_ids,
            img_ids=image_ids,
        )

    def cfg_scale(self, guidance: Tensor) -> Tensor:
        return torch.full_like(guidance, self.true_cfg_scale)

    @torch.no_grad()
    def decode(self, latents: Tensor, *, bucket: Bucket) -> Tensor:
        natural = self._unpack(latents.to(self._vae.dtype), bucket)
        natural = natural / self._vae.config.scaling_factor + self._vae.config.shift_factor
        return self._decode(natural)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Image tokens down and across."""
        return height // self._token_side, width // self._token_side

    def _ids(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Positions of text (S, 3), all zero, and of image tokens (L, 3): 0, row, column. The same for every row."""
        grid = self._grid(bucket.height, bucket.width)
        if grid not in self._position_ids:
            rows, columns = (torch.arange(side, device=self.device, dtype=torch.float32) for side in grid)
            zero = torch.zeros(1, device=self.device)
            text = torch.zeros(self.max_sequence_length, 3, device=self.device)
            self._position_ids[grid] = (text, torch.cartesian_prod(zero, rows, columns))
        return self._position_ids[grid]

    def _unpack(self, latents: Tensor, bucket: Bucket) -> Tensor:
        batch, _, channels = latents.shape
        rows, columns = self._grid(bucket.height, bucket.width)
        patches = latents.reshape(batch, rows, columns, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
        return patches.reshape(batch, channels // 4, 2 * rows, 2 * columns)


def _housed(t5: T5EncoderModel, placement: loading.Placement) -> T5EncoderModel:
    return residency.housed(t5, t5.encoder.block, placement)


def _fused(parts: dict[str, Any], cfg: ModelConfig, placement: loading.Placement) -> dict[str, Any]:
    """The transformer's weights, and on CUDA the VAE's decoder, taken over by the fused operations."""
    cudnn = tuning.cudnn_attention(parts["transformer"].config.attention_head_dim, placement)
    fused = FusedFlux1.take_over(
        parts["transformer"],
        precision=PRECISIONS[cfg.quantization],
        cudnn_attention=cudnn,
        device=placement.device,
    )
    tuning.log_fused(fused.transformer.blocks, cfg)
    if placement.device.type != "cuda":
        return {"fused": fused}
    return {"fused": fused, "decoder": FusedDecoder.of(parts["vae"])}


def _stored(cfg: ModelConfig, placement: loading.Placement) -> dict[str, Any]:
    folder = homes.model_folder(cfg)
    part = partial(loading.stored, folder=folder, device=placement.device)
    text, vae = placement.text_encoder_dtype, placement.vae_dtype
    return {
        "transformer": convert.stored_transformer(FluxTransformer2DModel, cfg=cfg, folder=folder, placement=placement),
        "text_encoder": part(CLIPTextModel, subfolder="text_encoder", dtype=text),
        "text_encoder_2": _housed(
            part(T5EncoderModel, subfolder="text_encoder_2", dtype=text, device=placement.text_encoder_device),
            placement,
        ),
        "vae": part(AutoencoderKL, subfolder="vae", dtype=vae),
        "tokenizer": loading.stored_tokenizer(CLIPTokenizer, folder, subfolder="tokenizer"),
        "tokenizer_2": loading.stored_tokenizer(T5Tokenizer, folder, subfolder="tokenizer_2"),
        "scheduler_config": homes.read_json(folder / "scheduler" / "scheduler_config.json"),
    }


def _random(cfg: ModelConfig, placement: loading.Placement) -> dict[str, Any]:
    settings = loading.random_config(RANDOM, cfg)
    part = partial(loading.random, device=placement.device)
    text, vae = placement.text_encoder_dtype, placement.vae_dtype
    return {  # the text encoder first: windowed, it leaves the device before the transformer comes
        "text_encoder_2": _housed(
            part(lambda: T5EncoderModel(T5Config(**T5_XXL)), name="text_encoder_2", dtype=text), placement
        ),
        "transformer": residency.staged(
            part(lambda: FluxTransformer2DModel(**settings["transformer"]), name="transformer", dtype=placement.dtype),
            placement,
        ),
        "text_encoder": part(lambda: CLIPTextModel(CLIPTextConfig(**CLIP_L)), name="text_encoder", dtype=text),
        "vae": part(lambda: AutoencoderKL(**VAE), name="vae", dtype=vae),
        "tokenizer": RandomTokenizer(vocab_size=49408, eos_token_id=49407, pad_token_id=49407, model_max_length=77),
        "tokenizer_2": RandomTokenizer(vocab_size=32128, eos_token_id=1, pad_token_id=0, model_max_length=512),
        "scheduler_config": settings["scheduler"],
    }
