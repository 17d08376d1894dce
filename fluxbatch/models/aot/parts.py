"""The parts of a model that become packages, and all that one package must agree with. Knows no files.

Everything is taken from modules and arguments as they are met, whether their tensors hold numbers or are only shapes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fluxbatch import __version__

NOT_OF_A_BLOCK = ("num_layers", "num_single_layers")  # how many there are makes no block another one


@dataclass(frozen=True, slots=True)
class Part:
    """Modules of one kind, and the settings of the model that they belong to."""

    name: str
    modules: Sequence[nn.Module]
    settings: Mapping[str, Any]
    attention: str  # diffusers' back end


def parts_of(transformer: Any, vae: Any, *, attention: str) -> list[Part]:
    """Both kinds of transformer blocks, and the VAE's decoder."""
    blocks, singles = transformer.transformer_blocks, transformer.single_transformer_blocks
    return [
        Part(type(blocks[0]).__name__, list(blocks), _public(transformer.config), attention),
        Part(type(singles[0]).__name__, list(singles), _public(transformer.config), attention),
        Part(f"{type(vae).__name__}Decoder", [vae.decoder], _public(vae.config), "native"),
    ]


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_") and key not in NOT_OF_A_BLOCK}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """What a package takes beside the call's own tensors, in its order."""
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


# --- one way to call a part -------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What stands for a tensor where only its form matters. Packages take tensors without gaps."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a part, with a `Shape` in each tensor's place."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        return cls(structure, tuple(map(_shape_or_value, leaves)))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Shape))

    def example(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of this form, with numbers that no kernel chokes on."""
        leaves = [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, Shape) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs

    def __str__(self) -> str:
        return ", ".join(str(list(shape.shape)) for shape in self.shapes)


def _shape_or_value(leaf: Any) -> Any:
    return Shape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


# --- what a package must agree with -----------------------------------------------------------------------------------

Key = dict[str, Any]  # of plain values, so that it can stand in the package as JSON


def key_of(part: Part, call: Call, device: torch.device) -> Key:
    """Two packages with equal keys compute the same; whatever else may change the code is in it."""
    return {
        "part": part.name,
        "settings": {name: _plain(value) for name, value in sorted(part.settings.items())},
        "weights": [
            [name, str(Shape(tuple(tensor.shape), tensor.dtype)), _layout(tensor)]
            for name, tensor in weights_of(part.modules[0]).items()
        ],
        "arguments": [str(leaf) for leaf in call.leaves],
        "structure": str(call.structure),
        "attention": part.attention,
        "machine": _machine(device),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    return {
        "fluxbatch": __version__,
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "triton": version("triton") if importlib.util.find_spec("triton") else "none",
        "diffusers": version("diffusers"),
    }


def digest(key: Key) -> str:
    return hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]


def difference(key: Key, other: Key) -> str:
    """In what two keys differ, in words."""
    for name in ("machine", "versions"):
        mine, theirs = key[name], other.get(name, {})
        for field in mine:
            if mine[field] != theirs.get(field):
                return f"{field} {theirs.get(field)}, here {mine[field]}"
    return next((f"other {name}" for name in key if key[name] != other.get(name)), "nothing")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _layout(tensor: Tensor) -> str:
    if tensor.is_contiguous():
        return "contiguous"
    return "channels_last" if tensor.is_contiguous(memory_format=torch.channels_last) else str(tensor.stride())


def _machine(device: torch.device) -> dict[str, str]:
    """Host code is made for the processor that it is made on, device code for the GPU's generation."""
    machine = {"processor": _processor()}
    if device.type == "cuda":
        return machine | {"gpu": torch.cuda.get_device_name(device)}
    return machine | {"gpu": "none", "threads": str(torch.get_num_threads())}


@cache
def _processor() -> str:
    """Its instruction sets, as Linux tells them, in short."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"
