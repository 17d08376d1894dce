"""The LoRA files that a job names: whether they can be opened, and the digest that stands for each. Reads no tensor.

A job is another one once a file's content is another; where the file lies does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError, FluxbatchError

PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")


def lora_paths(cfg: ModelConfig) -> list[Path]:
    """The files of a job's LoRAs. ConfigError where one may not be opened."""
    return [lora_path(cfg, index) for index in range(len(cfg.loras))]


def lora_path(cfg: ModelConfig, index: int) -> Path:
    """The file of one LoRA. ConfigError where it is none that may be opened."""
    named = cfg.loras[index].path
    path = Path(named).expanduser()
    rule = f"model.loras[{index}].path must be a .safetensors file, got {named}"
    if path.suffix in PICKLES:
        raise ConfigError(f"{rule}: pickles are never opened")
    if not path.is_file():
        raise ConfigError(f"{rule}: no such file")
    if path.suffix not in (".safetensors", ".sft"):
        raise ConfigError(f"{rule}: {path.suffix or 'no suffix'} is unknown")
    return path


def lora_digests(cfg: ModelConfig) -> list[dict[str, Any]] | None:
    """What stands for the LoRAs in a fingerprint, in their order: SHA-256 and weight. None where there are none."""
    if not cfg.loras:
        return None
    files = zip(cfg.loras, lora_paths(cfg), strict=True)
    return [{"sha256": _sha256(path, _stamp(path)), "weight": lora.weight} for lora, path in files]


def _stamp(path: Path) -> tuple[int, ...]:
    """Another one whenever the file may have changed."""
    with _named(path):
        stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@cache
def _sha256(path: Path, stamp: tuple[int, ...]) -> str:
    """Read once: a start asks several times what its settings are, a rank that waits for the plan at each look."""
    with _named(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FluxbatchError(f"{path}: {error.strerror}") from error
