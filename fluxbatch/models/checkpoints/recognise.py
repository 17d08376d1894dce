"""What kind of checkpoint a file is, decided from its header and its keys; ConfigError where that is not clear.

Values are never looked at: NVFP4 in the wrong order looks like NVFP4. Reads no tensor but Comfy's own labels.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fluxbatch.errors import ConfigError
from fluxbatch.models.checkpoints import nvfp4, svdquant
from fluxbatch.models.checkpoints.header import Entry, Header, read_header

PREFIX = "model.diffusion_model."  # of the transformer in Comfy's files for everything
PLAIN, FP8, NVFP4, SVDQUANT, AWQ = "plain", "FP8", "NVFP4", "SVDQuant", "AWQ"
FLOATS = ("F64", "F32", "BF16", "F16")
FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
UNUSED = {"input_scale", "scale_input", "comfy_quant"}  # of activations, which are not quantised here; and a label
COMFY_FORMATS = {"nvfp4": NVFP4, "float8_e4m3fn": FP8, "float8_e5m2": FP8}
FUSED_QKV = ".img_attn.qkv"
LORA = ("lora_A.weight", "lora_B.weight", "lora_down.weight", "lora_up.weight", "lora.down.weight", "lora.up.weight")
SHOWN = {"bfl": "Black Forest Labs'", "diffusers": "diffusers'", "nunchaku": "Nunchaku's"}


@dataclass(frozen=True, slots=True)
class Module:
    """One layer of the file: its tensors by the last word of their keys, and how they spell a weight."""

    key: str  # what stands before that word
    entries: dict[str, Entry]
    layout: str


@dataclass(frozen=True)
class Checkpoint:
    """A transformer in one file."""

    header: Header
    family: str
    naming: str  # bfl, diffusers or nunchaku
    modules: dict[str, Module]  # by name, without the prefix
    order: nvfp4.Order | None  # where there is NVFP4

    def __str__(self) -> str:
        counts = Counter(module.layout for module in self.modules.values())
        layers = ", ".join(f"{count} {layout}" for layout, count in sorted(counts.items(), key=lambda item: -item[1]))
        order = f" ({self.order})" if self.order else ""
        return f"FLUX.{self.family[-1]} under {SHOWN[self.naming]} names, layers: {layers}{order}"


def recognise(path: Path) -> Checkpoint:
    """The checkpoint in a file. OSError where it cannot be read."""
    if path.suffix not in (".safetensors", ".sft"):
        raise ConfigError(f"model.path must be a folder, a hub id or a .safetensors file, got {path}: {_other(path)}")
    try:
        header = read_header(path)
    except ValueError as error:
        raise ConfigError(f"model.path must be a safetensors file, got {path}: {error}") from error
    named = _layers(header)
    _refuse_lora(named, path)
    family, naming = _kind(named, path)
    modules = {name: _module(name, key, entries, path) for name, (key, entries) in named.items()}
    labels = _labels(header)
    _check_labels(labels, modules, path)
    return Checkpoint(header, family, naming, modules, _order(modules, header, labeled=bool(labels)))


def _other(path: Path) -> str:
    pickles = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
    return "pickles are never opened" if path.suffix in pickles else f"{path.suffix or 'no suffix'} is unknown"


Layers = dict[str, tuple[str, dict[str, Entry]]]  # by name: what stands before the last word of its keys, and tensors


def _layers(header: Header) -> Layers:
    """The transformer's tensors by layer. What a file for everything holds beside it is left alone."""
    prefix = PREFIX if any(key.startswith(PREFIX) for key in header.entries) else ""
    found: Layers = {}
    for key, entry in header.entries.items():
        owner, _, word = key.rpartition(".")
        if key.startswith(prefix) and word != "scaled_fp8":  # that one marks the whole file
            found.setdefault(owner.removeprefix(prefix), (owner, {}))[1][word] = entry
    return found


def _refuse_lora(layers: Layers, path: Path) -> None:
    keys = [f"{name}.{word}" for name, (_, entries) in layers.items() for word in entries]
    parts = [key for key in keys if key.endswith(LORA)]
    if parts:
        raise ConfigError(
            f"model.path must be a whole model, got {path}: a LoRA, with {len(parts)} tensors such as {parts[0]}"
        )


def _kind(layers: Layers, path: Path) -> tuple[str, str]:
    """Family and naming."""
    heads = {name.split(".")[0] for name in layers}
    blocks = {"double_blocks": "bfl", "transformer_blocks": "diffusers"}
    namings = [naming for head, naming in blocks.items() if head in heads]
    if "double_stream_modulation_img" in heads:
        family = "flux2"
    elif heads & {"vector_in", "time_text_embed"}:
        family = "flux1"
    else:
        family = None
    if len(namings) != 1 or family is None:
        first = next(iter(layers), "nothing")
        raise ConfigError(f"model.path must be a transformer of FLUX.1 or FLUX.2, got {path}, which holds {first}")
    if any("qweight" in entries for _, entries in layers.values()):
        if family != "flux1" or namings != ["diffusers"]:
            raise ConfigError(f"model.path must be of FLUX.1 where it is quantised by SVDQuant, got {path}")
        return family, "nunchaku"
    return family, namings[0]


# --- layers -----------------------------------------------------------------------------------------------------------


def _module(name: str, key: str, entries: dict[str, Entry], path: Path) -> Module:
    layout = _layout(entries)
    if layout is None:
        told = ", ".join(f"{word} {entry.dtype}{list(entry.shape)}" for word, entry in sorted(entries.items()))
        raise ConfigError(f"model.path must have weights of a known layout, got {path}: {name} has {told}")
    return Module(key, entries, layout)


def _layout(entries: Mapping[str, Entry]) -> str | None:
    """How a layer spells its weight; None where we cannot read it."""
    words = set(entries) - UNUSED - {"bias"}
    if "qweight" in words:
        return _svdquant_layout(entries, words)
    weight = entries.get("weight") or entries.get("scale")
    bias = entries.get("bias")
    if weight is None or (bias is not None and bias.dtype not in (*FLOATS, *FP8_DTYPES)):
        return None
    scales = words - {"weight", "scale"}
    if weight.dtype in FLOATS and not scales:
        return PLAIN
    if weight.dtype in FP8_DTYPES and _are_fp8_scales(entries, scales, rows=weight.shape[0]):
        return FP8
    if weight.dtype == "U8" and scales - {"pre_quant_scale"} == {"weight_scale", "weight_scale_2"}:
        one = entries["weight_scale_2"].dtype == "F32" and entries["weight_scale_2"].numel == 1
        return NVFP4 if one and entries["weight_scale"].dtype == "F8_E4M3" else None
    return None


def _are_fp8_scales(entries: Mapping[str, Entry], words: set[str], *, rows: int) -> bool:
    if not words:
        return True
    known = words in ({"weight_scale"}, {"scale_weight"})
    return known and all(entries[word].dtype in FLOATS and entries[word].numel in (1, rows) for word in words)


def _svdquant_layout(entries: Mapping[str, Entry], words: set[str]) -> str | None:
    four_bit = {"qweight", "wscales", "smooth", "lora_down", "lora_up"}
    packed = entries["qweight"]
    if len(packed.shape) != 2:
        return None
    if packed.dtype == "I8" and four_bit <= words <= four_bit | {"smooth_orig", "wtscale", "wcscales"}:
        return SVDQUANT if _is_svdquant(entries, rows=packed.shape[0], columns=2 * packed.shape[1]) else None
    if packed.dtype == "I32" and words == {"qweight", "wscales", "wzeros"} and "bias" in entries:
        return AWQ if _is_awq(entries, rows=4 * packed.shape[0], columns=2 * packed.shape[1]) else None
    return None


def _is_svdquant(entries: Mapping[str, Entry], *, rows: int, columns: int) -> bool:
    scales, down, up = (entries[word] for word in ("wscales", "lora_down", "lora_up"))
    group = svdquant.FP4_GROUP if scales.dtype == "F8_E4M3" else svdquant.INT4_GROUP
    whole = rows % svdquant.TILE == columns % svdquant.TILE == 0 and scales.numel * group == rows * columns
    rank = down.shape[-1]
    low = down.shape == (columns, rank) and up.shape == (rows, rank) and rank % svdquant.RANK_TILE == 0
    return whole and low and entries["smooth"].numel == columns


def _is_awq(entries: Mapping[str, Entry], *, rows: int, columns: int) -> bool:
    whole = rows % svdquant.AWQ_GROUP == columns % svdquant.AWQ_GROUP == 0
    scales, zeros = entries["wscales"].shape, entries["wzeros"].shape
    return whole and scales == zeros and scales[1:] == (rows,) and scales[0] * svdquant.AWQ_GROUP >= columns


# --- labels and orders ------------------------------------------------------------------------------------------------


def _labels(header: Header) -> dict[str, str]:
    """Comfy's own words for layers, by name: its metadata, or a small tensor beside each. Empty in other files."""
    try:
        layers = json.loads(header.metadata.get("_quantization_metadata", "{}")).get("layers", {})
        found = {name.removeprefix(PREFIX): str(layer.get("format")) for name, layer in layers.items()}
        return found | dict(_tensor_labels(header))
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"model.path must label its layers in JSON, got {header.path}: {type(error).__name__}: {error}"
        ) from error


def _tensor_labels(header: Header) -> Iterator[tuple[str, str]]:
    for key in header.entries:
        if key.endswith(".comfy_quant"):
            label = json.loads(bytes(header.read(key).flatten().tolist()))
            yield key.removesuffix(".comfy_quant").removeprefix(PREFIX), str(label.get("format"))


def _check_labels(labels: Mapping[str, str], modules: Mapping[str, Module], path: Path) -> None:
    for name, module in modules.items():
        label = labels.get(name)
        if label is not None and COMFY_FORMATS.get(label) != module.layout:
            raise ConfigError(
                f"model.path must have layers as its labels say, got {path}: {name} is labeled {label} "
                f"and spelled as {module.layout}"
            )
        if label is None and labels and module.layout == NVFP4:
            raise ConfigError(f"model.path must label each NVFP4 layer or none, got {path}: {name} has no label")


def _order(modules: Mapping[str, Module], header: Header, *, labeled: bool) -> nvfp4.Order | None:
    """Comfy's where it labels the layers or where QKV is fused as Black Forest Labs write it, else ModelOpt's."""
    layers = {name: module for name, module in modules.items() if module.layout == NVFP4}
    if not layers:
        return None
    comfy = labeled or any(name.endswith(FUSED_QKV) for name in modules)
    named_modelopt = any("modelopt" in value.lower() for value in header.metadata.values())
    order = nvfp4.COMFY if comfy else nvfp4.MODELOPT
    doubt = f"its metadata names ModelOpt, its layers are {'labeled' if labeled else 'fused'} as Comfy's"
    if not (comfy and named_modelopt):
        misfit = next((name for name, layer in layers.items() if not _scales_fit(layer, order)), None)
        if misfit is None:
            return order
        shape = list(layers[misfit].entries["weight_scale"].shape)
        doubt = f"its other signs say {order}, and the scales of {misfit} have the shape {shape}"
    raise ConfigError(f"model.path must say how its NVFP4 is laid out, got {header.path}: {doubt}")


def _scales_fit(layer: Module, order: nvfp4.Order) -> bool:
    weight, scales = layer.entries["weight"], layer.entries["weight_scale"]
    if len(weight.shape) != 2 or 2 * weight.shape[1] % nvfp4.GROUP:
        return False
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    if order.swizzled_scales:
        padded = nvfp4.scale_shape(rows, columns)
        return scales.numel == padded[0] * padded[1]
    return scales.shape == (rows, columns // nvfp4.GROUP)
