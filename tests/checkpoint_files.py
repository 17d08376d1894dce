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


# --- SVDQuant, number by number: where each one lies among the registers of a warp ------------------------------------


def pack_codes(codes: Tensor) -> Tensor:
    """(N, K) of 0 to 15 to int8 (N, K/2): tiles of 128 x 64, 16 rows at a time, 8 columns a lane."""
    rows, columns = codes.shape
    n, k = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = (n // 128) * (columns // 64) + k // 64
    lane = n % 8 * 4 + k % 32 // 8
    place = (((tile * 8 + n % 128 // 16) * 32 + lane) * 4 + n % 16 // 8 * 2 + k % 64 // 32) * 8 + k % 8
    flat = torch.empty(rows * columns, dtype=torch.uint8)
    flat[place.flatten()] = codes.flatten().to(torch.uint8)
    return (flat[::2] | flat[1::2] << 4).view(torch.int8).view(rows, columns // 2)


def pack_scales(scales: Tensor) -> Tensor:
    """(N, G) in half precision to (G, N): 0 1 8 9, 2 3 10 11, ... of each 16 rows."""
    rows, groups = scales.shape
    n, g = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    within = n % 128 // 16 * 16 + n % 8 // 2 * 4 + n % 16 // 8 * 2 + n % 2
    return _scatter(scales, (n // 128 * groups + g) * 128 + within).view(groups, rows)


def pack_micro_scales(scales: Tensor) -> Tensor:
    """(N, G) in E4M3 to (G, N): 0 32 64 96, 8 40 72 104, ... four groups of each."""
    rows, groups = scales.shape
    n, g = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    within = (n % 8 * 4 + n % 32 // 8) * 4 + n % 128 // 32
    return _scatter(scales, ((n // 128 * (groups // 4) + g // 4) * 128 + within) * 4 + g % 4).view(groups, rows)


def pack_low_rank(factor: Tensor, *, down: bool) -> Tensor:
    """`down` (R, K) to (K, R), `up` (N, R) to itself: tiles of 16 x 16, two numbers a register."""
    rows, columns = factor.shape
    a, b = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = (b // 16) * (rows // 16) + a // 16 if down else (a // 16) * (columns // 16) + b // 16
    lane = a % 8 * 4 + b % 8 // 2
    within = (lane * 2 + a % 16 // 8) * 4 + b % 16 // 8 * 2 + b % 2
    return _scatter(factor, tile * 256 + within).view((columns, rows) if down else (rows, columns))


def pack_awq(codes: Tensor) -> Tensor:
    """(N, K) of 0 to 15 to int32 (N/4, K/2): 0 8 16 24, 1 9 17 25, ... of 32 columns; 64 columns of 4 rows in turn."""
    rows, columns = codes.shape
    n, k = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    word = ((n // 4 * (columns // 64) + k // 64) * 4 + n % 4) * 16 + k % 64 // 32 * 8 + k % 8
    flat = _scatter(codes.to(torch.uint8), word * 4 + k % 32 // 8)
    return (flat[::2] | flat[1::2] << 4).view(torch.int32).view(rows // 4, columns // 2)


def _scatter(values: Tensor, place: Tensor) -> Tensor:
    flat = torch.empty(values.numel(), dtype=values.dtype)
    flat[place.flatten()] = values.flatten()
    return flat


def _padded(tensor: Tensor, *sides: int, fill: float = 0.0) -> Tensor:
    out = torch.full(sides, fill, dtype=tensor.dtype)
    out[tuple(slice(side) for side in tensor.shape)] = tensor
    return out


def svdquant(weight: Tensor, bias: Tensor, *, fp4: bool, after_gelu: bool, seed: int) -> tuple[Tensors, Tensor, Tensor]:
    """A layer quantised by SVDQuant, and the weight and bias that an ordinary layer with its meaning has, in float64.

    As deepcompressor: the largest parts in a low rank, the rest smoothed and quantised, INT4 after a GELU shifted.
    """
    rows, columns = weight.shape
    n, k, rank = -(-rows // 128) * 128, -(-columns // 128) * 128, 16
    smooth = torch.rand(columns, generator=torch.Generator().manual_seed(seed)).add(0.5).bfloat16()
    u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
    up = _padded((u * s)[:, :rank], rows, rank).bfloat16()
    down = _padded(v[:rank], rank, columns).bfloat16()
    rest = (weight.double() - up.double() @ down.double()) * smooth.double()
    group = 16 if fp4 else 64
    groups = _padded(rest, n, k).view(n, k // group, group)
    outer = (torch.rand(n, generator=torch.Generator().manual_seed(seed + 1)) + 0.5).bfloat16()
    tensor_scale = torch.tensor([0.01]).bfloat16()
    amax = groups.abs().amax(dim=-1).clamp(min=1e-6)
    if fp4:
        over = (outer.double() * tensor_scale.double())[:, None]
        scales = (amax / 6 / over).to(torch.float8_e4m3fn)
        real = (scales.double() * over).clamp(min=1e-9)
        codes = (groups[..., None] / real[:, :, None, None] - E2M1.double()).abs().argmin(dim=-1)
        numbers = E2M1.double()[codes]
    else:
        scales = (amax / 7).bfloat16()
        real = scales.double()
        numbers = (groups / real[:, :, None]).round().clamp(-8, 7)
        codes = numbers.int() & 15
    meant = (numbers * real[:, :, None]).view(n, k)[:rows, :columns] / smooth.double()
    stored_bias = (bias.double() - (meant.sum(dim=1) * 0.171875 if after_gelu and not fp4 else 0)).bfloat16()
    tensors = {
        "qweight": pack_codes(codes.view(n, k)),
        "wscales": pack_micro_scales(scales) if fp4 else pack_scales(scales),
        "smooth": pack_scales(_padded(smooth, k)[:, None]).flatten(),  # zeros as padding: nothing may divide by them
        "smooth_orig": pack_scales(_padded(smooth, k)[:, None]).flatten(),
        "lora_down": pack_low_rank(_padded(down, rank, k), down=True),
        "lora_up": pack_low_rank(_padded(up, n, rank), down=False),
        "bias": pack_scales(_padded(stored_bias, n)[:, None]).flatten(),
    }
    if fp4:
        tensors |= {"wcscales": pack_scales(outer[:, None]).flatten(), "wtscale": tensor_scale}
    shifted = meant.sum(dim=1) * 0.171875 if after_gelu and not fp4 else 0
    return tensors, meant + up.double() @ down.double(), stored_bias.double() + shifted


def awq(weight: Tensor, bias: Tensor, *, chunks: int) -> tuple[Tensors, Tensor, Tensor]:
    """A modulation in four bits, and what it means: a channel's parts side by side, 1 in each scale."""
    rows, columns = weight.shape
    groups = columns // 64
    mixed = weight.double().view(chunks, rows // chunks, columns).transpose(0, 1).reshape(rows, groups, 64)
    scales = (mixed.abs().amax(dim=-1) / 7).bfloat16()
    codes = (mixed / scales.double()[:, :, None]).round().clamp(-7, 8).int() + 7
    zeros = (-7 * scales.float()).bfloat16()
    meant = codes * scales.double()[:, :, None] + zeros.double()[:, :, None]
    ones = torch.zeros(chunks)
    ones[[1, chunks - 2]] = 1
    stored_bias = (bias.view(chunks, -1).t() + ones).bfloat16()
    stored_groups = -(-groups // 16) * 16
    tensors = {
        "qweight": pack_awq(codes.view(rows, columns)),
        "wscales": _padded(scales.t().contiguous(), stored_groups, rows),
        "wzeros": _padded(zeros.t().contiguous(), stored_groups, rows),
        "bias": stored_bias.flatten(),
    }
    plain = meant.view(rows // chunks, chunks, columns).transpose(0, 1).reshape(rows, columns)
    return tensors, plain, (stored_bias.double() - ones).t().flatten()


def nunchaku(state: Tensors, *, fp4: bool) -> tuple[Tensors, Tensors]:
    """A FLUX.1 as Nunchaku writes it, QKV fused and `proj_out` of single blocks split; and the state that it means."""
    stored: Tensors = {}
    meant = dict(state)
    for layer in dict.fromkeys(key.rpartition(".")[0] for key in state):
        stem, _, inner = layer.partition("transformer_blocks.")
        block, _, name = inner.partition(".")
        block = f"{stem}transformer_blocks.{block}"
        if not inner:
            stored |= {key: tensor for key, tensor in state.items() if key.rpartition(".")[0] == layer}
        elif name.startswith("attn.norm_"):
            stored[f"{block}.{name.removeprefix('attn.')}.weight"] = state[f"{layer}.weight"]
        elif name in ("norm.linear", "norm1.linear", "norm1_context.linear"):
            chunks = 3 if name == "norm.linear" else 6
            words, weight, bias = awq(state[f"{layer}.weight"], state[f"{layer}.bias"], chunks=chunks)
            stored |= {f"{layer}.{word}": tensor for word, tensor in words.items()}
            meant |= {f"{layer}.weight": weight.float(), f"{layer}.bias": bias.float()}
        elif name in NUNCHAKU_NAMES:
            _svdquant_layers(stored, meant, block, name, fp4=fp4)
        elif name == "proj_out":
            _split_proj_out(stored, meant, block, fp4=fp4)
    return stored, meant


NUNCHAKU_NAMES = {
    "attn.to_q": ("qkv_proj", ("attn.to_q", "attn.to_k", "attn.to_v")),
    "attn.add_q_proj": ("qkv_proj_context", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
    "attn.to_out.0": ("out_proj", ("attn.to_out.0",)),
    "attn.to_add_out": ("out_proj_context", ("attn.to_add_out",)),
    "ff.net.0.proj": ("mlp_fc1", ("ff.net.0.proj",)),
    "ff.net.2": ("mlp_fc2", ("ff.net.2",)),
    "ff_context.net.0.proj": ("mlp_context_fc1", ("ff_context.net.0.proj",)),
    "ff_context.net.2": ("mlp_context_fc2", ("ff_context.net.2",)),
    "proj_mlp": ("mlp_fc1", ("proj_mlp",)),
}


def _svdquant_layers(stored: Tensors, meant: Tensors, block: str, name: str, *, fp4: bool) -> None:
    theirs, parts = NUNCHAKU_NAMES[name]
    weights, biases = ([meant[f"{block}.{part}.{word}"] for part in parts] for word in ("weight", "bias"))
    after_gelu = theirs.endswith("fc2")
    words, weight, bias = svdquant(
        torch.cat(weights), torch.cat(biases), fp4=fp4, after_gelu=after_gelu, seed=len(stored)
    )
    stored.update({f"{block}.{theirs}.{word}": tensor for word, tensor in words.items()})
    for part, w, b in zip(parts, weight.chunk(len(parts)), bias.chunk(len(parts)), strict=True):
        meant[f"{block}.{part}.weight"], meant[f"{block}.{part}.bias"] = w.float(), b.float()


def _split_proj_out(stored: Tensors, meant: Tensors, block: str, *, fp4: bool) -> None:
    whole, bias = meant[f"{block}.proj_out.weight"], meant[f"{block}.proj_out.bias"]
    width = whole.shape[0]
    halves = {"out_proj": (whole[:, :width], torch.zeros(width)), "mlp_fc2": (whole[:, width:], bias)}
    weights, biases = [], []
    for theirs, (part, part_bias) in halves.items():
        words, weight, meant_bias = svdquant(part, part_bias, fp4=fp4, after_gelu=theirs == "mlp_fc2", seed=len(stored))
        stored.update({f"{block}.{theirs}.{word}": tensor for word, tensor in words.items()})
        weights.append(weight)
        biases.append(meant_bias)
    meant[f"{block}.proj_out.weight"] = torch.cat(weights, dim=1).float()
    meant[f"{block}.proj_out.bias"] = (biases[0] + biases[1]).float()
