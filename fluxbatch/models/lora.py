"""LoRA: low-rank changes of a transformer's layers, fused into its weights before those are quantised or compiled.

diffusers' own converters read the spellings (diffusers, PEFT, Kohya, ai-toolkit, XLabs). They pass over what they do
not know with a line in a log; here each tensor must have become a change of a layer, and what has not is refused by
file and key. Hu et al. 2021, arXiv:2106.09685. Legend: N rows and K columns of a weight, r rank.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError, FluxbatchError, first_line
from fluxbatch.lora_files import lora_path
from fluxbatch.models import loading
from fluxbatch.models.checkpoints.header import Header, read_header

logger = logging.getLogger("fluxbatch")

Tensors = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

FACTOR = re.compile(r"(.+?)\.(lora_A|lora_down|lora\.down|down|lora_B|lora_up|lora\.up|up)\.weight")
DOWN = ("lora_A", "lora_down", "lora.down", "down")
OF_TEXT_ENCODERS = ("text_encoder", "lora_te", "te1", "te2")  # also text_encoders.*
ENERGY_TOLERANCE = 1e-3  # relative; what float32 factors of 16-bit files round to is far below
CANNOT_CONVERT = (ValueError, KeyError, IndexError, AssertionError, AttributeError, RuntimeError, TypeError)


@dataclass(frozen=True, slots=True)
class Change:
    """factor * up @ down is added to a layer's weight: up float32 (N, r), down (r, K)."""

    up: Tensor
    down: Tensor
    factor: float

    @property
    def energy(self) -> float:
        """The squared norm of the whole change, without making it."""
        up, down = self.up.double(), self.down.double()
        return float(((up.t() @ up) * (down @ down.t())).sum()) * self.factor**2


@dataclass(frozen=True)
class Loras:
    """All changes of a job's LoRAs by layer, in the order of the setting."""

    changes: Mapping[str, Sequence[Change]] = field(default_factory=dict)

    def added(self, layer: str, weight: Tensor, *, first: int) -> Tensor:
        """Rows of a layer's weight, from row `first` on, with the changes: in float32."""
        total = weight.float()
        for change in self.changes.get(layer, ()):
            up = change.up[first : first + len(total)].to(total.device)
            total = total + (up @ change.down.to(total.device)) * change.factor
        return total


def read_loras(cfg: ModelConfig, shapes: Shapes) -> Loras:
    """The job's LoRAs for a transformer with tensors of these shapes, in diffusers' names.

    ConfigError, with file and key, for what does not belong to it.
    """
    if not cfg.loras:
        return Loras()
    loading.quiet_libraries()
    changes: dict[str, list[Change]] = {}
    for index, lora in enumerate(cfg.loras):
        found = _File(cfg, index).changes(shapes)
        for layer, change in found.items():
            changes.setdefault(layer, []).append(replace(change, factor=change.factor * lora.weight))
        logger.info("lora %s: %d layers of the transformer, weight %g", lora.path, len(found), lora.weight)
    return Loras(changes)


class _File:
    """One file, and the sentences that refuse it."""

    def __init__(self, cfg: ModelConfig, index: int) -> None:
        self._cfg, self._index = cfg, index
        self._path = lora_path(cfg, index)
        try:
            self._header = read_header(self._path)
        except OSError as error:
            raise FluxbatchError(f"{self._path}: {first_line(error)}") from error
        except ValueError as error:
            raise self._refusal("be a safetensors file", str(error)) from error

    def changes(self, shapes: Shapes) -> dict[str, Change]:
        self._refuse_strange_keys()
        tensors = {key: self._read(key) for key in self._header.entries}
        found = self._converted(tensors, key=next(iter(tensors)))
        for keys in _layers(tensors).values():
            self._check_layer(keys, tensors, found)
        for layer, change in found.items():
            self._check_shape(layer, change, shapes)
        return self._scaled(found, has_alphas=any(key.endswith(".alpha") for key in tensors))

    def _scaled(self, changes: dict[str, Change], *, has_alphas: bool) -> dict[str, Change]:
        try:
            scales = _Scales(self._header)
            if scales and has_alphas:
                raise ValueError("its metadata and its tensors both have alphas")
            return {layer: scales.applied(layer, change) for layer, change in changes.items()}
        except (ValueError, TypeError, AttributeError, re.error) as error:
            raise self._refusal("say its alphas once, in numbers", first_line(error)) from error

    def _read(self, key: str) -> Tensor:
        try:
            tensor = self._header.read(key).float()
        except (OSError, ValueError) as error:
            raise FluxbatchError(f"{self._path}: {first_line(error)}") from error
        if not tensor.isfinite().all():
            raise self._refusal("hold finite numbers", f"{key} does not")
        return tensor

    def _refuse_strange_keys(self) -> None:
        if not self._header.entries:
            raise self._refusal("be a LoRA", "it holds no tensor")
        for key in self._header.entries:
            if key.startswith(OF_TEXT_ENCODERS):
                raise self._refusal("change the transformer only", f"{key} is of a text encoder")
            if not FACTOR.fullmatch(key) and not key.endswith(".alpha"):
                raise self._refusal("hold pairs of low-rank matrices", f"{key} is none")
        for keys in _layers(self._header.entries).values():
            if len(_factors(keys)) != 2:
                raise self._refusal("hold pairs of low-rank matrices", f"{keys[0]} has no counterpart")
            up, down = (self._header.entries[_factors(keys)[goes_down]].shape for goes_down in (False, True))
            if len(up) != 2 or len(down) != 2 or up[1] != down[0]:
                told = f"{keys[0]} and its counterpart are {list(up)} and {list(down)}"
                raise self._refusal("hold pairs of low-rank matrices", told)

    def _converted(self, tensors: Tensors, *, key: str) -> dict[str, Change]:
        """By layer, as diffusers reads them; alphas and metadata are in the factor already where it reads those."""
        try:
            return _by_layer(*_read_by_diffusers(self._cfg.family, tensors))
        except CANNOT_CONVERT as error:
            raise self._refusal(self._of_family, f"{key} cannot be read: {first_line(error)}") from error

    def _check_layer(self, keys: list[str], tensors: Tensors, found: Mapping[str, Change]) -> None:
        """A layer's tensors alone become changes that stand in the whole, and lose nothing on the way."""
        alone = self._converted({key: tensors[key] for key in keys}, key=keys[0])
        if not alone or not set(alone) <= set(found):
            raise self._refusal(self._of_family, f"{keys[0]} matches no layer of it")
        held, became = _source(keys, tensors).energy, sum(found[layer].energy for layer in alone)
        if not math.isclose(held, became, rel_tol=ENERGY_TOLERANCE, abs_tol=1e-12):
            raise self._refusal("be what diffusers reads", f"diffusers makes something else of {keys[0]}")

    def _check_shape(self, layer: str, change: Change, shapes: Shapes) -> None:
        wanted = shapes.get(f"{layer}.weight")
        if wanted is None:
            raise self._refusal(self._of_family, f"{layer} is no layer of it")
        held = (change.up.shape[0], change.down.shape[1])
        if held != wanted:
            raise self._refusal(self._of_family, f"{layer} is {list(wanted)}, its change {list(held)}")

    @property
    def _of_family(self) -> str:
        return f"be a LoRA of FLUX.{self._cfg.family[-1]} and of the size of {self._cfg.name}"

    def _refusal(self, rule: str, why: str) -> ConfigError:
        return ConfigError(f"model.loras[{self._index}].path must {rule}, got {self._path}: {why}")


def _layers(found: Iterable[str]) -> dict[str, list[str]]:
    """The keys of each layer, as the file spells it."""
    layers: dict[str, list[str]] = {}
    for key in found:
        factor = FACTOR.fullmatch(key)
        layers.setdefault(factor[1] if factor else key.removesuffix(".alpha"), []).append(key)
    return layers


def _factors(keys: Sequence[str]) -> dict[bool, str]:
    """Of a layer's keys that of the factor that goes down (True) and of the one that goes up."""
    return {match[2] in DOWN: key for key in keys if (match := FACTOR.fullmatch(key))}


def _source(keys: Sequence[str], tensors: Tensors) -> Change:
    """What a layer's tensors mean by themselves."""
    factors = _factors(keys)
    up, down = tensors[factors[False]], tensors[factors[True]]
    alpha = next((float(tensors[key]) for key in keys if key.endswith(".alpha")), None)
    return Change(up, down, 1.0 if alpha is None else alpha / down.shape[0])


# --- diffusers' reading ---------------------------------------------------------------------------------------------


def _read_by_diffusers(family: str, tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Factors in PEFT's spelling, and the alphas that are not in them yet."""
    from diffusers.loaders import Flux2LoraLoaderMixin, FluxLoraLoaderMixin
    from diffusers.utils import convert_unet_state_dict_to_peft

    if family == "flux1":
        state, alphas = FluxLoraLoaderMixin.lora_state_dict(dict(tensors), return_alphas=True)
    else:
        state, alphas = Flux2LoraLoaderMixin.lora_state_dict(dict(tensors)), {}
    if state and "lora_A" not in next(iter(state)):
        state = convert_unet_state_dict_to_peft(state)
    return state, alphas or {}


def _by_layer(state: Tensors, alphas: Mapping[str, Any]) -> dict[str, Change]:
    changes = {}
    for key, down in state.items():
        if not key.endswith(".lora_A.weight"):
            continue
        layer = key.removesuffix(".lora_A.weight")
        if alphas and f"{layer}.alpha" not in alphas:  # diffusers would give it the commonest one
            raise ValueError(f"{layer} has no alpha, and others have")
        alpha = alphas.get(f"{layer}.alpha")
        factor = 1.0 if alpha is None else float(alpha) / down.shape[0]
        changes[layer.removeprefix("transformer.")] = Change(state[f"{layer}.lora_B.weight"], down, factor)
    return changes


class _Scales:
    """alpha / rank of each layer, where PEFT's settings stand in the file's metadata instead of alphas."""

    def __init__(self, header: Header) -> None:
        told = json.loads(header.metadata.get("lora_adapter_metadata", "{}"))
        self._of = {key.removeprefix("transformer."): value for key, value in told.items()}

    def __bool__(self) -> bool:
        return "lora_alpha" in self._of

    def applied(self, layer: str, change: Change) -> Change:
        return replace(change, factor=change.factor * self._scale(layer, rank=change.down.shape[0])) if self else change

    def _scale(self, layer: str, *, rank: int) -> float:
        patterns = self._of.get("alpha_pattern") or {}
        fits = (pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", layer))
        alpha = patterns.get(next(fits, None), self._of["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._of.get("use_rslora") else rank)
