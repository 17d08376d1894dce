"""Random pipelines of other families than FLUX, some ten thousand parameters each, and a folder of one for a job.

Shapes are diffusers' own test models', a little louder: prompts, guidance and steps must show in the pixels. Widths
are multiples of 16, as real ones are: torch's CPU kernels round the last few elements of a tensor another way, which
would make a row's bits depend on its slot.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tiny_models import CLIP, VAE, clip, loud, qwen3, qwen_tokenizer, t5
from torch import nn
from transformers import (
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Tokenizer,
)

from fluxbatch import tiny

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def vae(*, latent_channels: int = 4, **changes: Any) -> nn.Module:
    return loud(AutoencoderKL(**{**VAE, "latent_channels": latent_channels, **changes}), gain=1.5)


def clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(tiny.FOLDER / "tokenizer")


def t5_tokenizer() -> T5Tokenizer:
    return T5Tokenizer.from_pretrained(tiny.FOLDER / "tokenizer_2")


def projected_clip() -> nn.Module:
    return loud(CLIPTextModelWithProjection(CLIP), gain=3.0)


def gemma2() -> nn.Module:
    config = Gemma2Config(
        vocab_size=264,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=256,
    )
    return loud(Gemma2Model(config), gain=10.0)


def unet(*, cross_attention_dim: int, **changes: Any) -> nn.Module:
    settings: dict[str, Any] = {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "sample_size": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return loud(UNet2DConditionModel(**{**settings, "cross_attention_dim": cross_attention_dim, **changes}), gain=2.0)


def sd15() -> DiffusionPipeline:
    """With a scheduler that draws noise in each step."""
    return StableDiffusionPipeline(
        vae=vae(),
        text_encoder=loud(clip(), gain=3.0),
        tokenizer=clip_tokenizer(),
        unet=unet(cross_attention_dim=32),
        scheduler=EulerAncestralDiscreteScheduler(**BETAS),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> DiffusionPipeline:
    return StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=loud(clip(), gain=3.0),
        text_encoder_2=projected_clip(),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=unet(
            cross_attention_dim=64,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 32,
        ),
        scheduler=EulerDiscreteScheduler(**BETAS),
    )


def sd3() -> DiffusionPipeline:
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
    )
    return StableDiffusion3Pipeline(
        transformer=loud(transformer, gain=2.0),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5, shift_factor=0.06),
        text_encoder=projected_clip(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=projected_clip(),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5().eval(),
        tokenizer_3=t5_tokenizer(),
    )


def pixart() -> DiffusionPipeline:
    transformer = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=32,
        out_channels=8,
    )
    return PixArtSigmaPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5().eval(),
        vae=vae(),
        transformer=loud(transformer, gain=2.0),
        scheduler=DPMSolverMultistepScheduler(**BETAS),
    )


def sana() -> DiffusionPipeline:
    transformer = SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=8,
        sample_size=2,
    )
    blocks = ("ResBlock",) * 5 + ("EfficientViTBlock",)
    dc = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=(8,) * 6,
        decoder_block_out_channels=(8,) * 6,
        encoder_qkv_multiscales=((),) * 5 + ((5,),),
        decoder_qkv_multiscales=((),) * 5 + ((5,),),
        encoder_layers_per_block=(1,) * 6,
        decoder_layers_per_block=(1,) * 6,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    return SanaPipeline(
        tokenizer=qwen_tokenizer(),
        text_encoder=gemma2(),
        vae=loud(dc, gain=1.5),
        transformer=loud(transformer, gain=2.0),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def qwen_image() -> DiffusionPipeline:
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 264,
        "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    decoder = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1] * 4,
        latents_std=[1.2] * 4,
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=loud(decoder, gain=1.5),
        text_encoder=loud(encoder, gain=10.0),
        tokenizer=qwen_tokenizer(),
        transformer=loud(transformer, gain=2.0),
    )


def z_image() -> DiffusionPipeline:
    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 32, 32],
    )
    for pad in (transformer.x_pad_token, transformer.cap_pad_token):
        nn.init.normal_(pad)  # the class leaves them empty
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae(latent_channels=16, scaling_factor=0.36, shift_factor=0.12),
        text_encoder=loud(qwen3(num_layers=2).model, gain=10.0),
        tokenizer=qwen_tokenizer(),
        transformer=loud(transformer, gain=2.0),
    )


def lumina2() -> DiffusionPipeline:
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=24,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(512, 64, 64),
        cap_feat_dim=8,
    )
    return Lumina2Pipeline(
        transformer=loud(transformer, gain=2.0),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae(scaling_factor=0.36, shift_factor=0.12),
        text_encoder=gemma2(),
        tokenizer=qwen_tokenizer(),
    )


BUILD: dict[str, Callable[[], DiffusionPipeline]] = {
    "sd15": sd15,
    "sdxl": sdxl,
    "sd3": sd3,
    "pixart": pixart,
    "sana": sana,
    "qwen_image": qwen_image,
    "z_image": z_image,
    "lumina2": lumina2,
}
BATCHED = ("sd15", "sdxl", "sd3", "pixart", "sana")


def save(name: str, folder: Path) -> Path:
    torch.manual_seed(7)
    BUILD[name]().save_pretrained(folder)
    return folder
