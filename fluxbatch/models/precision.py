"""Which precisions the transformer's blocks can have, and what a device can do of that. Reads no weight.

`fp8` and `int8`: activations and weights in 8 bits, a scale a row of each, the product on tensor cores.
`*_weight_only`: weights in 8 bits, a scale a row, dequantised where they are used: for memory, not for time.
`nvfp4`: both in four bits, by torchao, on Blackwell. Layers between and around the blocks keep the model's dtype.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass

import torch

from fluxbatch.config import QUANTIZATIONS, ModelConfig
from fluxbatch.errors import ConfigError
from fluxbatch.models.loading import Placement

logger = logging.getLogger("fluxbatch")

# Matrices of the blocks; modulations and norms inside them keep their dtype.
BLOCK_WEIGHT = re.compile(r"^(single_)?transformer_blocks\.\d+\.(?!.*norm).*weight$")
NVFP4_BYTES = 0.5 + 1 / 16  # a number, with its group's E4M3 scale


@dataclass(frozen=True, slots=True)
class Precision:
    """How a block's matrices are held and multiplied."""

    weights: torch.dtype | None = None  # None: the model's dtype
    activations: torch.dtype | None = None  # None: the model's dtype

    @property
    def weight_only(self) -> bool:
        return self.weights is not None and self.activations is None


EXACT = Precision()
PRECISIONS = {
    "none": EXACT,
    "fp8": Precision(torch.float8_e4m3fn, torch.float8_e4m3fn),
    "int8": Precision(torch.int8, torch.int8),
    "fp8_weight_only": Precision(torch.float8_e4m3fn),
    "int8_weight_only": Precision(torch.int8),
    "nvfp4": EXACT,  # torchao packs those layers itself
}


def is_block_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a transformer's tensor, by diffusers' name, is one of those that are quantised."""
    return len(shape) == 2 and BLOCK_WEIGHT.match(name) is not None


def bytes_per_weight(quantization: str, dtype: torch.dtype) -> float:
    """Of a block's matrix once it is loaded."""
    if quantization == "nvfp4":
        return NVFP4_BYTES
    held = PRECISIONS[quantization].weights
    return (held or dtype).itemsize


# --- what a device can do ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """The device as far as precisions go."""

    name: str
    capability: tuple[int, int] | None  # of CUDA; None: a CPU

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        if device.type != "cuda":
            return cls("a CPU", None)
        return cls(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


ADA = (8, 9)
LEAST = {"fp8": ADA, "int8": (8, 0), "nvfp4": (10, 0)}
NEEDS = {
    "fp8": "FP8 products need Ada, Hopper or later",
    "int8": "our INT8 path needs Ampere or later",
    "nvfp4": "FP4 products need Blackwell; NVFP4 files are unpacked to model.dtype or to fp8 on other devices",
}


def possible(machine: Machine) -> tuple[str, ...]:
    """The precisions that this device can run."""
    if machine.capability is None:
        return tuple(name for name in QUANTIZATIONS if name != "nvfp4")
    capability = machine.capability
    return tuple(name for name in QUANTIZATIONS if capability >= LEAST.get(name, (0, 0)))


def check(cfg: ModelConfig, placement: Placement, machine: Machine) -> None:
    """ConfigError, in one sentence, where this precision cannot be had with these settings on this device."""
    wanted = cfg.quantization
    able = possible(machine)
    if wanted not in able:
        raise ConfigError(
            f"model.quantization must be one of {', '.join(able)} on {machine.name}, got {wanted}: {NEEDS[wanted]}"
        )
    if PRECISIONS[wanted].activations is not None:
        _check_fused(cfg)
        if machine.capability is None:
            _warn_of_cpu(wanted)
    if wanted == "fp8_weight_only" and cfg.compile != "off" and (machine.capability or ADA) < ADA:
        raise ConfigError(
            f"model.compile must be off with model.quantization=fp8_weight_only on {machine.name}, got {cfg.compile}: "
            "Triton reads E4M3 on Ada, Hopper or later; int8_weight_only compiles"
        )
    if wanted == "nvfp4":
        _check_nvfp4(cfg, placement)


def _check_fused(cfg: ModelConfig) -> None:
    if cfg.kernels == "diffusers" or cfg.compile != "off":
        raise ConfigError(
            f"model.quantization={cfg.quantization} needs model.kernels=auto or fused and model.compile=off, "
            f"got {cfg.kernels} and {cfg.compile}"
        )


def _warn_of_cpu(quantization: str) -> None:
    how = "in float32 from FP8 numbers" if quantization == "fp8" else "in whole numbers, by no kernel made for speed"
    logger.warning("%s: products of a CPU are computed %s, slowly", quantization, how)


def _check_nvfp4(cfg: ModelConfig, placement: Placement) -> None:
    if cfg.kernels == "fused":
        raise ConfigError("model.kernels must be auto or diffusers with model.quantization=nvfp4, got fused")
    if placement.dtype is not torch.bfloat16:
        raise ConfigError(f"model.dtype must be bfloat16 with model.quantization=nvfp4, got {cfg.dtype}")
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("model.quantization=nvfp4 needs the package torchao: pip install 'fluxbatch[nvfp4]'")
