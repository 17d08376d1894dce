"""Fill diffusers' transformer from a checkpoint: layer by layer, dequantised once, a few rows of float32 at a time.

A layer's numbers are made in float32, its LoRAs are added, and it is rounded once: to the model's dtype, or straight to
the 8 bits that are wanted. The result and the layer that is being read are all that is in memory. Everything that can
be refused is refused from the header: files that lack layers, have others, or of other sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError, FluxbatchError, first_line
from fluxbatch.models import homes, loading
from fluxbatch.models.checkpoints import svdquant
from fluxbatch.models.checkpoints.fp8 import Fp8
from fluxbatch.models.checkpoints.header import read_header
from fluxbatch.models.checkpoints.names import AFTER_GELU, Group, groups, modulation_chunks
from fluxbatch.models.checkpoints.nvfp4 import Nvfp4
from fluxbatch.models.checkpoints.recognise import AWQ, FP8, NVFP4, SVDQUANT, UNUSED, Checkpoint, Module, recognise
from fluxbatch.models.eight_bit import EightBitLinear
from fluxbatch.models.fused.ops import quantize_rows_plain
from fluxbatch.models.loading import Placement
from fluxbatch.models.lora import Loras, read_loras
from fluxbatch.models.precision import PRECISIONS, Precision, is_block_matrix

logger = logging.getLogger("fluxbatch")

CHUNK_ELEMENTS = 2**22  # numbers that are in float32 at a time: 16 MiB, and what making them takes
PADDING = {NVFP4: 16, SVDQUANT: svdquant.TILE}  # both sides of a weight may be filled up to a multiple of this

Shapes = dict[str, tuple[int, ...]]  # a transformer's tensors by name


@dataclass(frozen=True)
class Fitted:
    """A checkpoint that holds every tensor of a transformer, and nothing else."""

    checkpoint: Checkpoint
    skeleton: Any  # the transformer, on the meta device
    groups: tuple[Group, ...]

    def shapes(self) -> Shapes:
        return _shapes(self.skeleton)


def fit(file: Path, *, cfg: ModelConfig, folder: Path) -> Fitted:
    """The file beside the components' folder, whose transformer/config.json it must fit.

    ConfigError where it does not; no tensor is read.
    """
    try:
        checkpoint = recognise(file)
    except OSError as error:
        raise FluxbatchError(f"model.path={file}: {first_line(error)}") from error
    if checkpoint.family != cfg.family:
        raise ConfigError(
            f"model.path must be of FLUX.{cfg.family[-1]} for model={cfg.name}, "
            f"got {file}, which is of FLUX.{checkpoint.family[-1]}"
        )
    skeleton = _skeleton(cfg.family, homes.read_json(folder / "transformer" / "config.json"))
    found = tuple(_groups(checkpoint, skeleton))
    _refuse_gaps(checkpoint, found)
    _refuse_strangers(checkpoint, found)
    for group in found:
        _refuse_misfits(group, checkpoint, _shapes(skeleton))
    return Fitted(checkpoint, skeleton, found)


def stored_transformer(component: Any, *, cfg: ModelConfig, folder: Path, placement: Placement) -> Any:
    """diffusers' transformer, of the class `component`, with its stored weights: the folder's, or those of a file."""
    file, dtype, device = homes.checkpoint_file(cfg), placement.dtype, placement.transformer_device
    if file is not None:
        return _from_file(file, cfg=cfg, folder=folder, dtype=dtype, device=device)
    module = loading.stored(component, folder, subfolder="transformer", dtype=dtype, device=device)
    if cfg.loras:
        _fuse(module, read_loras(cfg, _shapes(module)), folder)
    return module


def _from_file(file: Path, *, cfg: ModelConfig, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The file's weights in `dtype`, those of the blocks in 8 bits where that is wanted."""
    start_s = time.perf_counter()
    fitted = fit(file, cfg=cfg, folder=folder)
    logger.info("model.path=%s: %s", file, fitted.checkpoint)
    loras = read_loras(cfg, fitted.shapes())
    module = _room(fitted.skeleton.to(dtype), PRECISIONS[cfg.quantization], dtype).to_empty(device=device)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    try:
        with torch.no_grad():
            for group in fitted.groups:
                _fill(group, tensors, fitted.checkpoint, device, loras)
    except (OSError, ValueError) as error:
        raise FluxbatchError(f"model.path={file}: {first_line(error)}") from error
    loading.log_component("transformer", module, start_s=start_s)
    return module.eval()


def _room(skeleton: Any, precision: Precision, dtype: torch.dtype) -> Any:
    """The skeleton with layers of 8 bits in the place of those that will be held so."""
    if precision.weights is None:
        return skeleton
    for name in [name for name, shape in _shapes(skeleton).items() if is_block_matrix(name, shape)]:
        layer = skeleton.get_submodule(name.removesuffix(".weight"))
        weight = layer.weight.to(precision.weights)
        scales = torch.empty(len(weight), 1, dtype=torch.float32, device="meta")
        bias = None if layer.bias is None else layer.bias.data
        skeleton.set_submodule(name.removesuffix(".weight"), EightBitLinear(weight, scales, bias, dtype))
    return skeleton


def transformer_shapes(cfg: ModelConfig, folder: Path) -> Shapes:
    """Of the transformer that the folder's settings describe; nothing is built."""
    return _shapes(_skeleton(cfg.family, homes.read_json(folder / "transformer" / "config.json")))


def _skeleton(family: str, settings: dict[str, Any]) -> Any:
    from diffusers import Flux2Transformer2DModel, FluxTransformer2DModel  # seconds to import

    component = FluxTransformer2DModel if family == "flux1" else Flux2Transformer2DModel
    with torch.device("meta"):
        module = component.from_config(settings)
    assert not list(module.buffers()), "buffers would stay empty"
    return module


def _shapes(module: nn.Module) -> Shapes:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


# --- does it fit ------------------------------------------------------------------------------------------------------


def _groups(checkpoint: Checkpoint, skeleton: Any) -> Iterator[Group]:
    return groups(
        checkpoint.modules.keys(),
        dict.fromkeys(name.rpartition(".")[0] for name in _shapes(skeleton)),
        family=checkpoint.family,
        naming=checkpoint.naming,
        num_blocks=(len(skeleton.transformer_blocks), len(skeleton.single_transformer_blocks)),
    )


def _refuse_gaps(checkpoint: Checkpoint, found: Sequence[Group]) -> None:
    lacking = [source for group in found for source in group.sources if source not in checkpoint.modules]
    if lacking:
        raise ConfigError(
            f"model.path must hold the whole transformer of model.base, got {checkpoint.header.path}, which lacks "
            f"{len(lacking)} of its layers, among them {lacking[0]}"
        )


def _refuse_strangers(checkpoint: Checkpoint, found: Sequence[Group]) -> None:
    used = {source for group in found for source in group.sources}
    strangers = [name for name in checkpoint.modules if name not in used]
    if strangers:
        raise ConfigError(
            f"model.path must hold the transformer of model.base, got {checkpoint.header.path}, which has "
            f"{len(strangers)} other layers, among them {strangers[0]}"
        )


def _refuse_misfits(group: Group, checkpoint: Checkpoint, shapes: Shapes) -> None:
    has_bias = f"{group.targets[0]}.bias" in shapes
    for source, wanted in zip(group.sources, _wanted(group, shapes), strict=True):
        module = checkpoint.modules[source]
        held = _weight_shape(module)
        if len(held) != len(wanted) or not all(_fits(module.layout, h, w) for h, w in zip(held, wanted, strict=True)):
            raise ConfigError(
                f"model.path must have the sizes of model.base's transformer, got {checkpoint.header.path}: "
                f"{source} is {list(held)}, not {list(wanted)}"
            )
        if not _bias_fits(module, wanted[0] if has_bias else None):
            told = list(module.entries["bias"].shape) if "bias" in module.entries else "none"
            raise ConfigError(
                f"model.path must have {f'a bias of {wanted[0]}' if has_bias else 'no bias'} in {source}, "
                f"got {checkpoint.header.path}, which has {told}"
            )


def _bias_fits(module: Module, wanted: int | None) -> bool:
    bias = module.entries.get("bias")
    if bias is None or wanted is None:
        return bias is None and wanted is None
    return _fits(module.layout, bias.numel, wanted)


def _wanted(group: Group, shapes: Shapes) -> Iterator[tuple[int, ...]]:
    """The shape that each source's weight must have."""
    first = shapes[f"{group.targets[0]}.weight"]
    rows = sum(shapes[f"{target}.weight"][0] for target in group.targets)
    for width in _widths(group, first):
        yield (rows, width) if len(first) == 2 else (rows,)


def _widths(group: Group, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Columns of each source. Of two, the first is the attention's output projection: square."""
    columns = shape[1] if len(shape) == 2 else 1
    return (columns,) if len(group.sources) == 1 else (shape[0], columns - shape[0])


def _weight_shape(module: Module) -> tuple[int, ...]:
    """Of the numbers, as the file holds them."""
    names = ("weight", "scale", "qweight")
    shape = next(module.entries[name].shape for name in names if name in module.entries)
    if module.layout in (NVFP4, SVDQUANT):
        return shape[0], 2 * shape[1]
    return (4 * shape[0], 2 * shape[1]) if module.layout == AWQ else shape


def _fits(layout: str, held: int, wanted: int) -> bool:
    padding = PADDING.get(layout, 1)
    return held in (wanted, -(-wanted // padding) * padding)


# --- LoRA in a folder's transformer ---------------------------------------------------------------------------------


def _fuse(module: Any, loras: Loras, folder: Path) -> None:
    """Add the changes to the weights, from their stored numbers: rounded once, also where those are wider."""
    files = [read_header(path) for path in homes.weight_files(folder / "transformer", "diffusion_pytorch_model")]
    for layer in loras.changes:
        name = f"{layer}.weight"
        weight, file = module.get_parameter(name).data, next(file for file in files if name in file.entries)
        narrowed = file.entries[name].dtype != "BF16" and weight.dtype is not torch.float32
        stored = file.read(name).to(weight.device) if narrowed else weight
        for rows in _chunks(*weight.shape):
            weight[rows].copy_(loras.added(layer, stored[rows], first=rows.start))


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // columns)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


# --- fill -------------------------------------------------------------------------------------------------------------


class Weight(Protocol):
    """The numbers of one layer."""

    def rows(self, first: int, last: int) -> Tensor:
        """Rows of a weight, (last - first, K), or numbers of a vector, on the device that the layer was read to."""


class Plain:
    """A weight that is stored as it is."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def rows(self, first: int, last: int) -> Tensor:
        return self._weight[first:last]


def _fill(
    group: Group, tensors: Mapping[str, Tensor], checkpoint: Checkpoint, device: torch.device, loras: Loras
) -> None:
    shape = tuple(tensors[f"{group.targets[0]}.weight"].shape)
    rows = sum(tensors[f"{target}.weight"].shape[0] for target in group.targets)
    widths = _widths(group, shape)
    sources = [_read(checkpoint, name, device, columns=n) for name, n in zip(group.sources, widths, strict=True)]
    biases = [bias.float()[:rows] for _, bias in sources if bias is not None]
    bias = torch.stack(biases).sum(dim=0) if biases else None  # of both halves of a fused product
    for target, into, start, count in _segments(group, tensors):
        for part in _chunks(count, sum(widths)):
            first, last = start + part.start, start + part.stop
            halves = [_matrix(weight.rows(first, last))[:, :n] for (weight, _), n in zip(sources, widths, strict=True)]
            whole = halves[0] if len(halves) == 1 else torch.cat([half.float() for half in halves], dim=1)
            at = slice(into + part.start, into + part.stop)
            _store(tensors, target, at, loras.added(target, whole, first=at.start))
        if bias is not None:
            tensors[f"{target}.bias"][into : into + count].copy_(bias[start : start + count])


def _store(tensors: Mapping[str, Tensor], target: str, rows: slice, values: Tensor) -> None:
    """float32 rows of a weight, rounded to what holds it."""
    weight, scales = tensors[f"{target}.weight"], tensors.get(f"{target}.scales")
    if scales is None:
        _matrix(weight)[rows].copy_(values)
        return
    eight_bit = quantize_rows_plain(values, weight.dtype)
    weight[rows].copy_(eight_bit.values)
    assert eight_bit.scales is not None
    scales[rows].copy_(eight_bit.scales)


def _segments(group: Group, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int, int]]:
    """Target, its first row, the source's first row, and how many."""
    start = 0
    for target in group.targets:
        count = tensors[f"{target}.weight"].shape[0]
        if group.halves_swapped:
            half = count // 2
            yield target, 0, start + half, half
            yield target, half, start, half
        else:
            yield target, 0, start, count
        start += count


def _matrix(parameter: Tensor) -> Tensor:
    return parameter.view(parameter.shape[0], -1)


def _read(checkpoint: Checkpoint, name: str, device: torch.device, *, columns: int) -> tuple[Weight, Tensor | None]:
    """A layer's weight and bias, where they are dequantised."""
    module = checkpoint.modules[name]
    tensors = {word: checkpoint.header.read(f"{module.key}.{word}") for word in module.entries if word not in UNUSED}
    if module.layout == SVDQUANT:
        four_bit = svdquant.SvdQuant(tensors, columns=columns, after_gelu=name.endswith(AFTER_GELU))
        return four_bit, four_bit.bias
    if module.layout == AWQ:
        modulation = svdquant.Awq(tensors, chunks=modulation_chunks(name))
        return modulation, modulation.bias
    tensors = {word: tensor.to(device) for word, tensor in tensors.items()}
    return _weight(module, tensors, checkpoint), tensors.get("bias")


def _weight(module: Module, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> Weight:
    weight = tensors["weight"] if "weight" in tensors else tensors["scale"]
    if module.layout == FP8:
        return Fp8(weight, scale=tensors.get("weight_scale", tensors.get("scale_weight")))
    if module.layout == NVFP4:
        assert checkpoint.order is not None
        return Nvfp4(
            weight,
            scales=tensors["weight_scale"],
            scale=tensors["weight_scale_2"],
            order=checkpoint.order,
            input_scale=tensors.get("pre_quant_scale"),
        )
    return Plain(weight)
