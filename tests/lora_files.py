"""Random LoRAs of the tiny random models, in every spelling that diffusers reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
RANK = 4


def factors(rows: int, columns: int, *, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """Up and down, large enough to show in a picture."""
    return torch.randn(rows, rank) * 0.3, torch.randn(rank, columns) * 0.3


def pair(layer: str, rows: int, columns: int, *, words: tuple[str, str] = ("lora_B", "lora_A")) -> Tensors:
    up, down = factors(rows, columns)
    return {f"{layer}.{words[0]}.weight": up, f"{layer}.{words[1]}.weight": down}


def kohya(layer: str, rows: int, columns: int, *, alpha: float | None = 2.0) -> Tensors:
    told = {} if alpha is None else {f"{layer}.alpha": torch.tensor(alpha)}
    return pair(layer, rows, columns, words=("lora_up", "lora_down")) | told


DIFFUSERS_FLUX1 = {  # layers of the tiny FLUX.1: width 32
    "transformer_blocks.0.attn.to_q": (32, 32),
    "transformer_blocks.0.attn.add_k_proj": (32, 32),
    "transformer_blocks.0.attn.to_out.0": (32, 32),
    "transformer_blocks.0.ff.net.0.proj": (128, 32),
    "transformer_blocks.0.ff_context.net.2": (32, 128),
    "transformer_blocks.0.norm1.linear": (192, 32),
    "single_transformer_blocks.0.attn.to_v": (32, 32),
    "single_transformer_blocks.0.proj_out": (32, 160),
    "x_embedder": (32, 16),
}
DIFFUSERS_FLUX2 = {
    "transformer_blocks.0.attn.to_q": (32, 32),
    "transformer_blocks.0.attn.add_v_proj": (32, 32),
    "transformer_blocks.0.ff.linear_in": (192, 32),
    "transformer_blocks.0.ff_context.linear_out": (32, 96),
    "single_transformer_blocks.0.attn.to_qkv_mlp_proj": (288, 32),
    "single_transformer_blocks.0.attn.to_out": (32, 128),
    "context_embedder": (32, 48),
}

FLUX2_BLOCKS = {layer: sides for layer, sides in DIFFUSERS_FLUX2.items() if "blocks" in layer}


def peft(layers: dict[str, tuple[int, int]], *, prefix: str = "transformer.") -> Tensors:
    return {key: value for layer, sides in layers.items() for key, value in pair(prefix + layer, *sides).items()}


def with_alphas() -> Tensors:
    tensors = peft(DIFFUSERS_FLUX1)
    return tensors | {f"transformer.{layer}.alpha": torch.tensor(3.0) for layer in DIFFUSERS_FLUX1}


def old_diffusers() -> Tensors:
    words = ("lora.up", "lora.down")
    return {
        key: value
        for layer, sides in DIFFUSERS_FLUX1.items()
        for key, value in pair(f"transformer.{layer}", *sides, words=words).items()
    }


def kohya_flux1(*, joint: str = "_", head: str = "lora_unet_") -> Tensors:
    """sd-scripts' names; with dots and another head those of ComfyUI. linear1 is known at full width only."""
    layers = {
        ("double_blocks", "0", "img_attn", "qkv"): (96, 32),
        ("double_blocks", "0", "txt_attn", "proj"): (32, 32),
        ("double_blocks", "0", "img_mlp", "0"): (128, 32),
        ("double_blocks", "0", "txt_mod", "lin"): (192, 32),
        ("single_blocks", "0", "linear2"): (32, 160),
        ("single_blocks", "0", "modulation", "lin"): (96, 32),
    }
    found: Tensors = {}
    for words, sides in layers.items():
        found |= kohya(head + joint.join(words), *sides, alpha=None if "linear2" in words else 2.0)
    return found


def kohya_sparse() -> Tensors:
    """QKV whose three parts have ranks of their own, side by side."""
    up = torch.block_diag(*(torch.randn(32, 2) for _ in range(3)))
    layer = "lora_unet_double_blocks_0_img_attn_qkv"
    return {f"{layer}.lora_up.weight": up, f"{layer}.lora_down.weight": torch.randn(6, 32) * 0.3,
            f"{layer}.alpha": torch.tensor(6.0)}  # fmt: skip


def xlabs() -> Tensors:
    words = ("up", "down")
    return {
        **pair("double_blocks.0.processor.qkv_lora1", 96, 32, words=words),
        **pair("double_blocks.0.processor.proj_lora2", 32, 32, words=words),
    }


def kohya_flux2() -> Tensors:
    return {
        **kohya("lora_unet_double_blocks_0_txt_attn_qkv", 96, 32),
        **kohya("lora_unet_double_blocks_0_img_mlp_0", 192, 32, alpha=None),
        **kohya("lora_unet_single_blocks_0_linear1", 288, 32),
        **kohya("lora_unet_single_blocks_0_linear2", 32, 128),
    }


def ai_toolkit(words: tuple[str, str] = ("lora_B", "lora_A")) -> Tensors:
    layers = {
        "double_blocks.0.img_attn.qkv": (96, 32),
        "double_blocks.0.txt_attn.proj": (32, 32),
        "double_blocks.0.img_mlp.2": (32, 96),
        "single_blocks.0.linear1": (288, 32),
        "double_stream_modulation_img.lin": (192, 32),
    }
    return {
        key: value
        for layer, sides in layers.items()
        for key, value in pair(f"diffusion_model.{layer}", *sides, words=words).items()
    }


ALPHAS = {"r": RANK, "lora_alpha": 8, "alpha_pattern": {"transformer_blocks.0.attn.to_q": 2}, "rank_pattern": {},
          "target_modules": list(DIFFUSERS_FLUX1)}  # fmt: skip
METADATA = {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in ALPHAS.items()})}

STYLES: dict[str, tuple[str, Callable[[], Tensors], dict[str, str]]] = {
    "PEFT": ("flux1", lambda: peft(DIFFUSERS_FLUX1), {}),
    "PEFT with settings": ("flux1", lambda: peft(DIFFUSERS_FLUX1), METADATA),
    "diffusers with alphas": ("flux1", with_alphas, {}),
    "old diffusers": ("flux1", old_diffusers, {}),
    "Kohya": ("flux1", kohya_flux1, {}),
    "Kohya, sparse": ("flux1", kohya_sparse, {}),
    "ComfyUI": ("flux1", lambda: kohya_flux1(joint=".", head="diffusion_model."), {}),
    "XLabs": ("flux1", xlabs, {}),
    "PEFT, FLUX.2": ("flux2", lambda: peft(DIFFUSERS_FLUX2), {}),
    "base_model, FLUX.2": ("flux2", lambda: peft(FLUX2_BLOCKS, prefix="base_model.model."), {}),
    "Kohya, FLUX.2": ("flux2", kohya_flux2, {}),
    "ai-toolkit, FLUX.2": ("flux2", ai_toolkit, {}),
}


def write_lora(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> Path:
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        path,
        metadata={"format": "pt"} | (metadata or {}),
    )
    return path
