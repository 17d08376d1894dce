"""Where a model's weights live: all on the GPU, or the text encoder's layers in page-locked host memory.

Each layer then comes to the GPU just before it computes, while the one before it computes: the GPU holds two of them.
Same weights, same kernels, same launches: the embeddings are the same bits. Knows nothing of prompts or batches.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError, FluxbatchError, first_line
from fluxbatch.models import homes, memory
from fluxbatch.models.checkpoints import convert
from fluxbatch.models.checkpoints.header import read_header
from fluxbatch.models.homes import LAYOUTS
from fluxbatch.models.loading import Placement
from fluxbatch.models.precision import PRECISIONS, bytes_per_weight, is_block_matrix

logger = logging.getLogger("fluxbatch")

GIB = 2**30
STAGING_GIB = 1.0  # one block as it was stored, and its numbers on their way to 8 bits
WORKING_GIB = 6.0  # beside the weights: a decode of two 1024x1024 images (4.1), a step (0.9), embeddings, compilation
ALIGNMENT = 256  # bytes, of a tensor inside a layer's buffer, as CUDA's own allocations
STREAMED_LAYER = re.compile(r"(?:^|\.)(?:encoder\.block|layers)\.(\d+)\.")

Shapes = dict[str, tuple[int, ...]]  # a component's tensors by name
Build = Callable[[ModelConfig, Placement], Mapping[str, Any]]


# --- the choice -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the weights take, in GiB: each component on the GPU, and of the text encoder what could live on the host."""

    components: dict[str, float]
    transformer_as_loaded: float  # before quantisation
    streamed: float  # all layers of the text encoder
    window: float  # the two that are on the GPU

    def loaded(self, *, windowed: bool) -> float:
        return sum(self.components.values()) - (self.streamed - self.window if windowed else 0.0)

    def peak(self, *, windowed: bool) -> float:
        """While loading. Windowed, a transformer is quantised block by block from the host, else when all is loaded."""
        quantised = self.transformer_as_loaded - self.components["transformer"]
        return self.loaded(windowed=windowed) + (min(STAGING_GIB, quantised) if windowed else quantised)


def settle(
    cfg: ModelConfig, placement: Placement, *, random: Build, text_encoder: str, num_layers: int | None = None
) -> Placement:
    """The placement with its residency decided; on a GPU the memory budget is enforced from here on.

    `random` builds the family's components, `text_encoder` is the one whose layers may be streamed, of which only the
    first `num_layers` are used. ConfigError where the weights do not fit into the budget.
    """
    if placement.device.type != "cuda":
        return _placed(cfg, placement, windowed=cfg.residency == "windowed")
    limit = memory.budget(placement.device, wanted_gib=cfg.memory_budget_gib)
    memory.enforce(limit, placement.device)
    shapes = _random_shapes(cfg, placement, random) if cfg.random_weights else _stored_shapes(cfg)
    straight = homes.checkpoint_file(cfg) is not None and PRECISIONS[cfg.quantization].weights is not None
    needs = footprint(
        shapes, cfg=cfg, placement=placement, text_encoder=text_encoder, num_layers=num_layers, straight=straight
    )
    windowed = is_windowed(cfg, needs, budget_gib=limit.budget_gib)
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in needs.components.items())
    logger.info(
        "weights: %s GiB; residency %s: %.2f GiB on the GPU, %.2f on the host; budget %.1f GiB",
        parts,
        "windowed" if windowed else "resident",
        needs.loaded(windowed=windowed),
        needs.streamed if windowed else 0.0,
        limit.budget_gib,
    )
    return _placed(cfg, placement, windowed=windowed)


def _placed(cfg: ModelConfig, placement: Placement, *, windowed: bool) -> Placement:
    return replace(placement, windowed=windowed, staged=windowed and cfg.quantization != "none")


def is_windowed(cfg: ModelConfig, needs: Footprint, *, budget_gib: float) -> bool:
    """`auto` is resident where the weights and room to work fit; ConfigError where the weights alone do not."""
    resident = max(needs.loaded(windowed=False) + WORKING_GIB, needs.peak(windowed=False)) <= budget_gib
    windowed = cfg.residency == "windowed" or (cfg.residency == "auto" and not resident)
    least_gib = needs.peak(windowed=windowed)
    if least_gib > budget_gib:
        got = "null" if cfg.memory_budget_gib is None else f"{cfg.memory_budget_gib:g}"
        here = f", which is {budget_gib:.1f} here" if cfg.memory_budget_gib is None else ""
        raise ConfigError(
            f"model.memory_budget_gib must be at least {least_gib:.1f} for the weights of {cfg.name} with "
            f"model.residency={cfg.residency}, got {got}{here}"
        )
    return windowed


def footprint(
    shapes: Mapping[str, Shapes],
    *,
    cfg: ModelConfig,
    placement: Placement,
    text_encoder: str,
    num_layers: int | None = None,
    straight: bool = False,
) -> Footprint:
    """What tensors of these shapes will take in the dtypes that they will have.

    `straight`: the transformer is quantised while its file is read.
    """
    transformer = shapes["transformer"]
    components = {"transformer": _gib(transformer, placement.dtype, quantization=cfg.quantization)}
    layers: dict[int, Shapes] = {}
    for name in LAYOUTS[cfg.family].weights:
        if name == "transformer":
            continue
        dtype = placement.vae_dtype if name == "vae" else placement.text_encoder_dtype
        used = shapes[name]
        if name == text_encoder:
            used = {key: shape for key, shape in used.items() if _is_used(key, num_layers)}
            for key, shape in used.items():
                if layer := STREAMED_LAYER.search(key):
                    layers.setdefault(int(layer[1]), {})[key] = shape
        components[name] = _gib(used, dtype)
    sizes = [_gib(layer, placement.text_encoder_dtype) for layer in layers.values()]
    return Footprint(
        components=components,
        transformer_as_loaded=_gib(transformer, placement.dtype, quantization=cfg.quantization if straight else "none"),
        streamed=sum(sizes),
        window=min(2 * max(sizes, default=0.0), sum(sizes)),
    )


def _is_used(name: str, num_layers: int | None) -> bool:
    layer = STREAMED_LAYER.search(name)
    return not name.startswith("lm_head") and not (layer and num_layers and int(layer[1]) >= num_layers)


def _gib(shapes: Shapes, dtype: torch.dtype, *, quantization: str = "none") -> float:
    of_blocks = bytes_per_weight(quantization, dtype)
    itemsize = {name: of_blocks if is_block_matrix(name, shape) else dtype.itemsize for name, shape in shapes.items()}
    return sum(prod(shape) * itemsize[name] for name, shape in shapes.items()) / GIB


def _random_shapes(cfg: ModelConfig, placement: Placement, random: Build) -> dict[str, Shapes]:
    parts = random(cfg, replace(placement, device=torch.device("meta"), windowed=False, staged=False))
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    return {name: {key: tuple(p.shape) for key, p in module.named_parameters()} for name, module in modules.items()}


def _stored_shapes(cfg: ModelConfig) -> dict[str, Shapes]:
    folder, file = homes.model_folder(cfg), homes.checkpoint_file(cfg)
    weights = dict(LAYOUTS[cfg.family].weights)
    shapes = {}
    if file is not None:  # in diffusers' names and as it will be dequantised
        shapes["transformer"] = convert.fit(file, cfg=cfg, folder=folder).shapes()
        del weights["transformer"]
    return shapes | {name: _component_shapes(folder, name, stem) for name, stem in weights.items()}


def _component_shapes(folder: Path, name: str, stem: str) -> Shapes:
    try:
        return {key: shape for path in homes.weight_files(folder / name, stem) for key, shape in header(path).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FluxbatchError(f"model.path={folder}: {name} cannot be loaded: {first_line(error)}") from error


def header(path: Path) -> Shapes:
    """The tensors of a safetensors file, of which only the first bytes are read."""
    return {name: entry.shape for name, entry in read_header(path).entries.items()}


# --- the transformer --------------------------------------------------------------------------------------------------


def staged(transformer: Any, placement: Placement) -> Any:
    """A transformer that was made on the device, where it waits to be quantised."""
    return transformer.to(placement.transformer_device)


# --- the stream -------------------------------------------------------------------------------------------------------


def housed(module: Any, layers: Iterable[nn.Module], placement: Placement) -> Any:
    """The text encoder where its residency wants it. Its layers must be called one after another, as they stand."""
    if placement.windowed:
        LayerStream(list(layers), placement.device)
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.device != placement.device:
                tensor.data = tensor.data.to(placement.device)
        if placement.device.type == "cuda":
            torch.cuda.empty_cache()
    return module


class LayerStream:
    """Owns an encoder's layers in page-locked host memory, and room for two of them on the device.

    Even layers have their place in the one room, odd ones in the other; a layer's tensors always point at its place,
    whoever's weights stand there. Nothing waits on the host.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        largest = max(_packed_bytes(_tensors(layer)) for layer in layers)
        self._rooms = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        on_gpu = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if on_gpu else None
        self._filled = [torch.cuda.Event() for _ in self._rooms] if on_gpu else []  # by the copies, one a room
        self._read = [torch.cuda.Event() for _ in self._rooms] if on_gpu else []  # by the layers
        self._host: list[Tensor] = []
        for index, layer in enumerate(layers):
            self._host.append(_pack(_tensors(layer), into=self._rooms[index % 2]))
            layer.register_forward_pre_hook(partial(self._before, index))
            layer.register_forward_hook(partial(self._after, index))

    def _before(self, index: int, _layer: nn.Module, _inputs: Any) -> None:
        """Wait for this layer, on the device, and start the copy of the next."""
        if index == 0:
            self._fill(0)
        if self._copies is not None:
            torch.cuda.current_stream(self._device).wait_event(self._filled[index % 2])
        if index + 1 < len(self._host):
            self._fill(index + 1)

    def _after(self, index: int, _layer: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._copies is not None:
            self._read[index % 2].record(torch.cuda.current_stream(self._device))

    def _fill(self, index: int) -> None:
        host, room = self._host[index], self._rooms[index % 2]
        with torch.cuda.stream(self._copies):
            if self._copies is not None:
                self._copies.wait_event(self._read[index % 2])  # else it would overwrite a layer that still computes
            room[: len(host)].copy_(host, non_blocking=True)
            if self._copies is not None:
                self._filled[index % 2].record(self._copies)


def _tensors(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()]


def _packed_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def _pack(tensors: Sequence[Tensor], *, into: Tensor) -> Tensor:
    """The tensors' bytes in one buffer on the host; they themselves become views of `into`, laid out alike."""
    host = torch.empty(_packed_bytes(tensors), dtype=torch.uint8, pin_memory=into.device.type == "cuda")
    start = 0
    for tensor in tensors:
        place = slice(start, start + tensor.nbytes)
        host[place].view(tensor.dtype).view(tensor.shape).copy_(tensor.data)
        start += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        tensor.data = into[place].view(tensor.dtype).view(tensor.shape)
    return host
