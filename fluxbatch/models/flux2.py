"""FLUX.2-klein 4B and 9B, distilled and base, stage by stage, on diffusers' components.

Numerically what diffusers' `Flux2KleinPipeline` computes for each row, with three quarters of the text encoder.
Knows nothing of where rows come from or go to.

Legend: N prompts, S text tokens, B batch, L packed latent tokens, C channels, h w token rows and columns, H W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from fluxbatch.config import ModelConfig
from fluxbatch.klein import SCHEDULER, TEXT_ENCODER_LAYERS, text_encoder_layers
from fluxbatch.models import Decode, Flow, PromptEmbeds, Schedule, Tokens, homes, loading, residency, tuning
from fluxbatch.models.aot.parts import Part
from fluxbatch.models.checkpoints import convert
from fluxbatch.models.fused.decoder import FusedDecoder
from fluxbatch.models.fused.flux2 import FusedFlux2
from fluxbatch.models.fused.qwen3 import fuse_layers
from fluxbatch.models.precision import PRECISIONS
from fluxbatch.models.schedule import flow_schedule, flux2_mu
from fluxbatch.models.tokens import RandomTokenizer, tokenize_fixed
from fluxbatch.records import Bucket

# Full-size settings for random weights. Transformers: diffusers `scripts/convert_flux2_to_diffusers.py`; base models
# have the distilled ones' architecture. Encoders: Qwen/Qwen3-4B and -8B, of which the first 27 layers are built.
# VAE: AutoencoderKLFlux2's defaults; its batch norm starts at mean 0, variance 1.
_TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 128,
    "attention_head_dim": 128,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "eps": 1e-6,
    "guidance_embeds": False,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "max_position_embeddings": 40960,
}
_KLEIN_4B: dict[str, Any] = {
    "transformer": {
        **_TRANSFORMER,
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
    },
    "text_encoder": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728},
}
_KLEIN_9B: dict[str, Any] = {
    "transformer": {
        **_TRANSFORMER,
        "num_layers": 8,
        "num_single_layers": 24,
        "num_attention_heads": 32,
        "joint_attention_dim": 12288,
    },
    "text_encoder": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
}
RANDOM = {
    "flux2_klein_4b": _KLEIN_4B,
    "flux2_klein_9b": _KLEIN_9B,
    "flux2_klein_base_4b": _KLEIN_4B,
    "flux2_klein_base_9b": _KLEIN_9B,
}


class Flux2:
    """The stages of FLUX.2-klein. Only base models are guided: by a second pass, weighted row by row.

    `text_encoder` is a Qwen3 model without its head; it loses the layers behind the last one of `text_encoder_layers`.
    """

    def __init__(
        self,
        *,
        transformer: Any,
        vae: Any,
        text_encoder: Any,
        tokenizer: Any,
        scheduler_config: Mapping[str, Any],
        cfg: ModelConfig,
        text_encoder_layers: Sequence[int] = TEXT_ENCODER_LAYERS,
        fused: FusedFlux2 | None = None,
        decoder: FusedDecoder | None = None,
    ) -> None:
        self.name = cfg.name
        self.device: torch.device = vae.device
        self.dtype: torch.dtype = transformer.dtype
        self.max_sequence_length = cfg.max_sequence_length
        self.text_encoder_layers = tuple(text_encoder_layers)
        self._transformer = transformer
        self._fused = fused
        self._vae = vae
        self._decode: Decode = decoder or (lambda latents: vae.decode(latents, return_dict=False)[0])
        self._text_encoder = text_encoder and keep_first_layers(text_encoder, max(self.text_encoder_layers))
        self._tokenizer = tokenizer
        self._scheduler_config = scheduler_config
        self._token_side = 2 * 2 ** (len(vae.config.block_out_channels) - 1)  # pixels: 2 latents of 8 each
        self._schedules: dict[Bucket, Schedule] = {}
        self._position_ids: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        loading.decode_row_by_row_on_cpu(vae)

    @classmethod
    def load(cls, cfg: ModelConfig) -> Self:
        placed, layers = loading.place(cfg), _text_encoder_layers(cfg)
        placement = residency.settle(cfg, placed, random=_random, text_encoder="text_encoder", num_layers=max(layers))
        use_fused = tuning.use_fused(cfg, placement)
        parts = (_random if cfg.random_weights else _stored)(cfg, placement)
        if use_fused:
            parts |= _fused(parts, cfg, placement)
        else:
            tuning.prepare_plain(parts["transformer"], parts["vae"], cfg=cfg, placement=placement)
        return cls(**parts, text_encoder_layers=layers, cfg=cfg)

    @classmethod
    def blueprint(cls, cfg: ModelConfig) -> tuple[Self, list[Part]]:
        """What a launch calls, without weights, and the parts of it that packages are made of."""
        placement = loading.place(cfg)
        full = {"vae": {}, **(loading.random_config(RANDOM, cfg) if cfg.random_weights else {})}
        parts = loading.blueprint(
            Flux2Transformer2DModel, AutoencoderKLFlux2, full_size=full, cfg=cfg, placement=placement
        )
        ahead = tuning.blueprint_parts(**parts, cfg=cfg, placement=placement)
        return cls(**parts, text_encoder=None, tokenizer=None, scheduler_config=SCHEDULER, cfg=cfg), ahead

    def blank_embeds(self, size: int) -> PromptEmbeds:
        shape = (size, self.max_sequence_length, self._transformer.config.joint_attention_dim)
        return {"prompt_embeds": torch.zeros(shape, dtype=self.dtype, device=self.device)}

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        """Each prompt as one turn of Qwen3's chat, thinking off."""
        texts = [self._chat(prompt) for prompt in prompts]
        ids, mask, truncated = tokenize_fixed(self._tokenizer, texts, max_length=self.max_sequence_length)
        return Tokens(tensors={"input_ids": ids, "attention_mask": mask}, truncated=truncated)

    @torch.no_grad()
    def encode(self, tokens: dict[str, Tensor]) -> PromptEmbeds:
        """Three hidden states side by side, (N, S, 3 D). The transformer attends to padding, so S never changes."""
        states = self._text_encoder(
            input_ids=tokens["input_ids"],
            attention_mask=causal_mask(tokens["attention_mask"]),
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        features = torch.cat([states[layer] for layer in self.text_encoder_layers], dim=-1)
        return {"prompt_embeds": features.to(self.dtype)}

    def noise_shape(self, *, height: int, width: int) -> tuple[int, ...]:
        return (self._transformer.config.in_channels, *self._grid(height, width))

    def schedule(self, bucket: Bucket) -> Schedule:
        if bucket not in self._schedules:
            rows, columns = self._grid(bucket.height, bucket.width)
            self._schedules[bucket] = flow_schedule(
                self._scheduler_config,
                num_inference_steps=bucket.num_inference_steps,
                mu=flux2_mu(rows * columns, bucket.num_inference_steps),
                device=self.device,
            )
        return self._schedules[bucket]

    def pack(self, noise: Tensor) -> Tensor:
        """(B, C, h, w) to (B, h * w, C)."""
        return noise.flatten(2).permute(0, 2, 1)

    @torch.no_grad()
    def flow(self, *, embeds: PromptEmbeds, guidance: Tensor, bucket: Bucket) -> Flow:
        text_ids, image_ids = self._ids(bucket)
        timesteps = self.schedule(bucket).timesteps
        if self._fused is not None:
            conditions = self._fused.conditions(
                prompt_embeds=embeds["prompt_embeds"], timesteps=timesteps, text_ids=text_ids, image_ids=image_ids
            )
            return partial(self._fused.transformer.velocity, conditions=conditions)

        return tuning.plain_flow(
            self._transformer,
            timesteps,
            text=embeds["prompt_embeds"],
            guidance=None,
            txt_ids=text_ids,
            img_ids=image_ids,
        )

    def cfg_scale(self, guidance: Tensor) -> Tensor:
        return guidance

    @torch.no_grad()
    def decode(self, latents: Tensor, *, bucket: Bucket) -> Tensor:
        rows, columns = self._grid(bucket.height, bucket.width)
        packed = latents.permute(0, 2, 1).unflatten(2, (rows, columns))
        natural = _unpatchify(self._unnormalise(packed.float()))
        return self._decode(natural.to(self._vae.dtype))

    def _chat(self, prompt: str) -> str:
        return self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Image tokens down and across."""
        return height // self._token_side, width // self._token_side

    def _ids(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Positions (time, row, column, word) of text (S, 4) and image tokens (L, 4). The same for every row."""
        grid = self._grid(bucket.height, bucket.width)
        if grid not in self._position_ids:
            zero = torch.zeros(1, device=self.device, dtype=torch.int64)
            rows, columns, words = (torch.arange(n, device=self.device) for n in (*grid, self.max_sequence_length))
            text = torch.cartesian_prod(zero, zero, zero, words)
            self._position_ids[grid] = (text, torch.cartesian_prod(zero, rows, columns, zero))
        return self._position_ids[grid]

    def _unnormalise(self, latents: Tensor) -> Tensor:
        """Undo the VAE's batch norm, in float32: half precision would round its statistics a second time."""
        norm = self._vae.bn
        std = torch.sqrt(norm.running_var.float() + self._vae.config.batch_norm_eps)
        return latents * std.view(1, -1, 1, 1) + norm.running_mean.float().view(1, -1, 1, 1)


def causal_mask(attention_mask: Tensor) -> Tensor:
    """(N, S) of ones and zeros to (N, 1, S, S) bool: each token sees itself and the real tokens before it.

    transformers would make one too, after asking the device whether any prompt is padded: that stops the host until
    the device is idle, and chooses another kernel for a launch without padding, so that bits depend on neighbours.
    """
    real = attention_mask.bool()
    tokens = real.shape[1]
    return real[:, None, None, :] & torch.ones(tokens, tokens, dtype=torch.bool, device=real.device).tril()


def keep_first_layers(text_encoder: Any, num_layers: int) -> Any:
    """Drop what no feature comes from. Without its final norm too, the last state is the layer's own, as diffusers'."""
    text_encoder.layers = text_encoder.layers[:num_layers]
    text_encoder.config.num_hidden_layers = num_layers
    text_encoder.norm = nn.Identity()
    return text_encoder


def _unpatchify(latents: Tensor) -> Tensor:
    """(B, 4 C, h, w) to the VAE's (B, C, 2 h, 2 w)."""
    batch, channels, rows, columns = latents.shape
    patches = latents.reshape(batch, channels // 4, 2, 2, rows, columns).permute(0, 1, 4, 2, 5, 3)
    return patches.reshape(batch, channels // 4, 2 * rows, 2 * columns)


def _housed(qwen3: Qwen3Model, placement: loading.Placement) -> Qwen3Model:
    return residency.housed(qwen3, qwen3.layers, placement)


def _fused(parts: dict[str, Any], cfg: ModelConfig, placement: loading.Placement) -> dict[str, Any]:
    """The transformer's weights, and on CUDA the text encoder and the VAE's decoder, taken over by fused operations."""
    cudnn = tuning.cudnn_attention(parts["transformer"].config.attention_head_dim, placement)
    fused = FusedFlux2.take_over(
        parts["transformer"],
        precision=PRECISIONS[cfg.quantization],
        cudnn_attention=cudnn,
        device=placement.device,
    )
    tuning.log_fused(fused.transformer.blocks, cfg)
    if placement.device.type != "cuda":
        return {"fused": fused}
    fuse_layers(parts["text_encoder"])
    return {"fused": fused, "decoder": FusedDecoder.of(parts["vae"])}


def _stored(cfg: ModelConfig, placement: loading.Placement) -> dict[str, Any]:
    folder = homes.model_folder(cfg)
    part = partial(loading.stored, folder=folder, device=placement.device)
    return {
        "transformer": convert.stored_transformer(Flux2Transformer2DModel, cfg=cfg, folder=folder, placement=placement),
        "text_encoder": _housed(
            part(
                Qwen3Model,
                subfolder="text_encoder",
                dtype=placement.text_encoder_dtype,
                device=placement.text_encoder_device,
                config=_first_layers_config(homes.read_json(folder / "text_encoder" / "config.json")),
            ),
            placement,
        ),
        "vae": part(AutoencoderKLFlux2, subfolder="vae", dtype=placement.vae_dtype),
        "tokenizer": loading.stored_tokenizer(Qwen2Tokenizer, folder, subfolder="tokenizer"),
        "scheduler_config": homes.read_json(folder / "scheduler" / "scheduler_config.json"),
    }


def _text_encoder_layers(cfg: ModelConfig) -> tuple[int, ...]:
    if cfg.random_weights:
        return TEXT_ENCODER_LAYERS
    return text_encoder_layers(homes.read_json(homes.model_folder(cfg) / "text_encoder" / "config.json"))


def _first_layers_config(settings: dict[str, Any]) -> Qwen3Config:
    """The encoder's settings cut to the layers that are used, so that the others are never read."""
    num_layers = max(text_encoder_layers(settings))
    if settings.get("layer_types"):
        settings = {**settings, "layer_types": settings["layer_types"][:num_layers]}
    return Qwen3Config(**{**settings, "num_hidden_layers": num_layers})


def _random(cfg: ModelConfig, placement: loading.Placement) -> dict[str, Any]:
    settings = loading.random_config(RANDOM, cfg)
    part = partial(loading.random, device=placement.device)
    return {  # the text encoder first: windowed, it leaves the device before the transformer comes
        "text_encoder": _housed(
            part(
                lambda: Qwen3Model(Qwen3Config(**settings["text_encoder"])),
                name="text_encoder",
                dtype=placement.text_encoder_dtype,
            ),
            placement,
        ),
        "transformer": residency.staged(
            part(lambda: Flux2Transformer2DModel(**settings["transformer"]), name="transformer", dtype=placement.dtype),
            placement,
        ),
        "vae": part(AutoencoderKLFlux2, name="vae", dtype=placement.vae_dtype),
        "tokenizer": RandomTokenizer(vocab_size=151936, eos_token_id=151645, pad_token_id=151643, model_max_length=512),
        "scheduler_config": SCHEDULER,
    }
