"""Transformers written as others write them: names, fused layers and packed numbers, by the published layouts.

Written apart from what reads them; where a library's own writer can be had, tests compare with it.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, Tensor]


def write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata=metadata)
    return path


# --- names ------------------------------------------------------------------------------------------------------------


def bfl(state: Tensors, *, family: str) -> Tensors:
    """diffusers' names to Black Forest Labs': QKV fused, shift above scale in the last layer."""
    out: Tensors = {}
    for key in state:
        put = _bfl_flux1 if family == "flux1" else _bfl_flux2
        put(out, key, state)
    return out


COMMON = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "proj_out": "final_layer.linear",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
}
FLUX1 = {
    **COMMON,
    "time_text_embed.timestep_embedder": "time_in",
    "time_text_embed.text_embedder": "vector_in",
    "time_text_embed.guidance_embedder": "guidance_in",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
FLUX2 = {
    **COMMON,
    "time_guidance_embed.timestep_embedder": "time_in",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
SINGLE1 = {"norm.linear": "modulation.lin", "proj_out": "linear2"}
SINGLE2 = {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"}
SINGLE_NORMS = {"attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm"}


def _bfl_flux1(out: Tensors, key: str, state: Tensors) -> None:
    if ".attn.to_q." in key and key.startswith("single"):
        names = [key, *(key.replace("attn.to_q", other) for other in ("attn.to_k", "attn.to_v", "proj_mlp"))]
        stem = key.replace("single_transformer_blocks", "single_blocks").replace("attn.to_q", "linear1")
        out[stem] = torch.cat([state[name] for name in names])
    elif not (key.startswith("single") and any(part in key for part in ("attn.to_", "proj_mlp"))):
        _bfl_any(out, key, state, top=FLUX1, single=SINGLE1)


def _bfl_flux2(out: Tensors, key: str, state: Tensors) -> None:
    _bfl_any(out, key, state, top=FLUX2, single=SINGLE2)


def _bfl_any(out: Tensors, key: str, state: Tensors, *, top: dict[str, str], single: dict[str, str]) -> None:
    layer, _, word = key.rpartition(".")
    parts = layer.split(".")
    if key.startswith("norm_out"):
        scale, shift = state[key].chunk(2)
        out[f"final_layer.adaLN_modulation.1.{word}"] = torch.cat([shift, scale])
    elif key.startswith("single_transformer_blocks"):
        name = {**single, **SINGLE_NORMS}[".".join(parts[2:])]
        out[f"single_blocks.{parts[1]}.{name}.{_word(name, word)}"] = state[key]
    elif key.startswith("transformer_blocks"):
        inner = ".".join(parts[2:])
        for first, rest, name in (
            ("attn.to_q", ("attn.to_k", "attn.to_v"), "img_attn.qkv"),
            ("attn.add_q_proj", ("attn.add_k_proj", "attn.add_v_proj"), "txt_attn.qkv"),
        ):
            if inner == first:
                stacked = [state[key], *(state[key.replace(first, other)] for other in rest)]
                out[f"double_blocks.{parts[1]}.{name}.{word}"] = torch.cat(stacked)
            if inner in (first, *rest):
                return
        out[f"double_blocks.{parts[1]}.{top[inner]}.{_word(top[inner], word)}"] = state[key]
    elif parts[-1].startswith("linear_"):  # of an embedder
        ends = {"linear_1": "in_layer", "linear_2": "out_layer"}
        out[f"{top['.'.join(parts[:-1])]}.{ends[parts[-1]]}.{word}"] = state[key]
    else:
        out[f"{top[layer]}.{word}"] = state[key]


def _word(name: str, word: str) -> str:
    return "scale" if name.endswith("_norm") else word


# --- numbers ----------------------------------------------------------------------------------------------------------


def swizzle(scales: Tensor) -> Tensor:
    """(N, G) to cuBLAS' tiles of 128 rows by 4 groups, padded with zeros; 2-D as Comfy stores it."""
    rows, groups = scales.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-groups // 4) * 4, dtype=torch.float32)
    padded[:rows, :groups] = scales.float()
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape).to(scales.dtype)


def nvfp4(weight: Tensor, *, high_nibble_first: bool = True, swizzled: bool = True, pad: int = 16) -> Tensors:
    """Quantised to two numbers a byte, the nearest E2M1 each."""
    rows, columns = (-(-side // pad) * pad for side in weight.shape)
    padded = torch.zeros(rows, columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    scale = (padded.abs().max() / (448 * 6)).clamp(min=1e-12)
    groups = padded.view(rows, -1, 16)
    scales = (groups.abs().amax(dim=-1) / 6 / scale).to(torch.float8_e4m3fn)
    normal = groups / (scales.float() * scale).clamp(min=1e-30)[:, :, None]
    code = (normal[..., None] - E2M1).abs().argmin(dim=-1).view(rows, columns).to(torch.uint8)
    even, odd = code[:, ::2], code[:, 1::2]
    packed = (even << 4) | odd if high_nibble_first else (odd << 4) | even
    return {
        "weight": packed,
        "weight_scale": swizzle(scales) if swizzled else scales,
        "weight_scale_2": scale,
        "input_scale": torch.tensor(0.0134),
    }


def nvfp4_values(tensors: Tensors, *, high_nibble_first: bool = True, swizzled: bool = True) -> Tensor:
    """What they mean, number by number."""
    packed, scales = tensors["weight"], tensors["weight_scale"].float()
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    codes = [packed >> 4, packed & 15] if high_nibble_first else [packed & 15, packed >> 4]
    values = E2M1[torch.stack(codes, dim=-1).view(rows, columns).long()]
    n = torch.arange(rows)[:, None]
    g = torch.arange(columns // 16)[None]
    if swizzled:
        tile = (n // 128) * -(-(columns // 16) // 4) + g // 4
        scale = scales.flatten()[tile * 512 + (n % 32) * 16 + (n % 128 // 32) * 4 + g % 4]
    else:
        scale = scales
    return values * (scale * tensors["weight_scale_2"]).repeat_interleave(16, dim=1)


def fp8(weight: Tensor, *, per_row: bool = False, legacy: bool = False) -> Tensors:
    """One scale, or one a row (N, 1)."""
    amax = weight.float().abs().amax(dim=1, keepdim=True) if per_row else weight.float().abs().max()
    scale = amax / 448
    names = ("scale_weight", "scale_input") if legacy else ("weight_scale", "input_scale")
    return {
        "weight": (weight.float() / scale).to(torch.float8_e4m3fn),
        names[0]: scale,
        names[1]: torch.tensor(0.08),
    }


def fp8_values(tensors: Tensors) -> Tensor:
    return tensors["weight"].float() * tensors.get("weight_scale", tensors.get("scale_weight"))


Spell = Callable[[Tensor], Tensors]
Mean = Callable[[Tensors], Tensor]


def quantised(tensors: Tensors, which: Callable[[str], bool], spell: Spell, mean: Mean) -> tuple[Tensors, Tensors]:
    """The layers that `which` names spelled anew, and beside it the plain tensors that this means."""
    stored, meant = dict(tensors), dict(tensors)
    for key, weight in tensors.items():
        if key.endswith(".weight") and weight.ndim == 2 and which(key):
            words = spell(weight)
            del stored[key]
            stored |= {f"{key.removesuffix('weight')}{word}": tensor for word, tensor in words.items()}
            meant[key] = mean(words)[: weight.shape[0], : weight.shape[1]]
    return stored, meant


def comfy_metadata(stored: Tensors) -> dict[str, str]:
    layers: dict[str, Any] = {}
    for key, tensor in stored.items():
        if key.endswith(".weight") and tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
            layers[key.removesuffix(".weight")] = {
                "format": "nvfp4" if tensor.dtype is torch.uint8 else "float8_e4m3fn"
            }
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
