"""Random FLUX.1 and FLUX.2-klein components of a few thousand parameters, and settings to go with them."""

from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, Flux2Transformer2DModel, FluxTransformer2DModel
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from fluxbatch import tiny
from fluxbatch.bench.stored import byte_tokenizer
from fluxbatch.config import ModelConfig

MAX_SEQUENCE_LENGTH = 48

FLUX1_SCHEDULER = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 8,
    "max_image_seq_len": 64,
}
FLUX2_SCHEDULER = {**FLUX1_SCHEDULER, "base_image_seq_len": 256, "max_image_seq_len": 4096}
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (8, 8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
CLIP = CLIPTextConfig(
    vocab_size=1161,
    hidden_size=32,
    intermediate_size=37,
    num_hidden_layers=2,
    num_attention_heads=4,
    projection_dim=32,
    bos_token_id=1159,
    eos_token_id=1160,
    pad_token_id=1160,
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def model_config(**changes: Any) -> ModelConfig:
    settings = {
        "name": "tiny",
        "family": "flux1",
        "dtype": "float32",
        "device": "cpu",
        "guidance": "embedded",
        "negative_prompts": True,
        "max_sequence_length": MAX_SEQUENCE_LENGTH,
    }
    return ModelConfig(**{**settings, **changes})


def loud(module: nn.Module, *, gain: float) -> nn.Module:
    """Weights of `gain` times the default spread: prompts, guidance and steps then show in the pixels."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
    return module.eval()


def flux1_transformer(*, guidance_embeds: bool = True) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 4, 8),
    )


def clip() -> CLIPTextModel:
    return CLIPTextModel(CLIP)


def t5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=506,
            d_model=32,
            d_kv=8,
            d_ff=37,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
    )


def flux1_parts(*, guidance_embeds: bool = True) -> dict[str, Any]:
    """As `FluxPipeline` takes them, without the scheduler."""
    torch.manual_seed(1)
    vae = AutoencoderKL(**VAE, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.36, shift_factor=0.12)
    return {
        "transformer": loud(flux1_transformer(guidance_embeds=guidance_embeds), gain=2.0),
        "vae": loud(vae, gain=1.5),
        "text_encoder": loud(clip(), gain=3.0),
        "text_encoder_2": t5().eval(),
        "tokenizer": CLIPTokenizer.from_pretrained(tiny.FOLDER / "tokenizer"),
        "tokenizer_2": T5Tokenizer.from_pretrained(tiny.FOLDER / "tokenizer_2"),
    }


def qwen3(*, num_layers: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=264,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """With the part of Qwen's chat template that klein uses."""
    return byte_tokenizer(CHAT_TEMPLATE)


def flux2_parts(*, num_text_layers: int = 30) -> dict[str, Any]:
    """As `Flux2KleinPipeline` takes them, without the scheduler: more text layers than klein reads, and a head."""
    torch.manual_seed(2)
    vae = loud(AutoencoderKLFlux2(**VAE), gain=1.5)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * 16,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return {
        "transformer": loud(transformer, gain=2.0),
        "vae": vae,
        "text_encoder": loud(qwen3(num_layers=num_text_layers), gain=10.0),
        "tokenizer": qwen_tokenizer(),
    }
