"""A FLUX.2 on disk as its users have it: the transformer as one NVFP4 file, all other components in a folder.

Random numbers throughout, never zeros: valid for speed and memory. The file is laid out as Black Forest Labs do (their
names, high nibble first, swizzled scales), every matrix of the blocks in NVFP4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from fluxbatch.models import flux2, loading
from fluxbatch.models.checkpoints.names import DOUBLE, SINGLE, TOP
from fluxbatch.models.checkpoints.nvfp4 import scale_shape

SPREAD = 0.02  # standard deviation of a weight
E2M1_RMS = 2.93  # of sixteen equally likely codes, the scales of their groups being 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def write_flux2(folder: Path, settings: Mapping[str, dict[str, Any]], *, distilled: bool, device: torch.device) -> Path:
    """`settings` of transformer, text_encoder and vae. Returns the file; `model.base` is `folder`. OSError."""
    loading.quiet_libraries()
    torch.manual_seed(0)
    transformer = _meta_transformer(settings["transformer"])
    transformer.save_config(folder / "transformer")
    for name, build in {
        "text_encoder": lambda: Qwen3Model(Qwen3Config(**settings["text_encoder"])),
        "vae": lambda: AutoencoderKLFlux2(**settings.get("vae", {})),
    }.items():
        loading.initialised(build, dtype=torch.bfloat16, device=device).save_pretrained(folder / name)
    _write_json(folder / "scheduler" / "scheduler_config.json", flux2.SCHEDULER)
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(folder / "tokenizer")
    index = {"_class_name": "Flux2KleinPipeline", "is_distilled": distilled}
    _write_json(folder / "model_index.json", index)
    file = folder / "transformer-nvfp4.safetensors"
    save_file(_transformer_tensors(transformer, device), file)
    return file


def _meta_transformer(settings: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return Flux2Transformer2DModel(**settings)


def _transformer_tensors(transformer: Any, device: torch.device) -> dict[str, Tensor]:
    """Under Black Forest Labs' names, on the host."""
    shapes = {name.removesuffix(".weight"): tuple(p.shape) for name, p in transformer.named_parameters()}
    out: dict[str, Tensor] = {}
    for source, targets in TOP["flux2"].items():
        if targets[0] in shapes:
            out[f"{source}.weight"] = _plain(_stacked(shapes, targets), device)
    blocks = (
        ("double_blocks", "transformer_blocks", DOUBLE, len(transformer.transformer_blocks)),
        ("single_blocks", "single_transformer_blocks", SINGLE, len(transformer.single_transformer_blocks)),
    )
    for theirs, ours, table, count in blocks:
        for number in range(count):
            for source, targets in table["flux2"].items():
                shape = _stacked(shapes, tuple(f"{ours}.{number}.{target}" for target in targets))
                name = f"{theirs}.{number}.{source}"
                if len(shape) == 2:
                    out |= {f"{name}.{word}": tensor for word, tensor in _nvfp4(*shape, device).items()}
                else:
                    out[f"{name}.scale"] = torch.ones(shape, dtype=torch.bfloat16)
    return out


def _stacked(shapes: Mapping[str, tuple[int, ...]], targets: tuple[str, ...]) -> tuple[int, ...]:
    return (sum(shapes[target][0] for target in targets), *shapes[targets[0]][1:])


def _plain(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return (torch.randn(shape, device=device) * SPREAD).bfloat16().cpu()


def _nvfp4(rows: int, columns: int, device: torch.device) -> dict[str, Tensor]:
    """Any byte is two E2M1 numbers, so random bytes are a weight; the scales of its groups are spread around 1."""
    scales = torch.empty(scale_shape(rows, columns), device=device).uniform_(0.75, 1.25)
    return {
        "weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device).cpu(),
        "weight_scale": scales.to(torch.float8_e4m3fn).cpu(),
        "weight_scale_2": torch.tensor(SPREAD / E2M1_RMS),
        "input_scale": torch.tensor(0.0134),
    }


def byte_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """Bytes and Qwen's special tokens: what klein's pipeline needs of a tokenizer, without a vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], chat_template=chat_template
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
