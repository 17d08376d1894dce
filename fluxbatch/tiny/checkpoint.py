"""What a later run goes on from, in files small enough to be carried. Knows names of tensors, not what they compute."""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 15 << 20
VAE_NUMBERS = ("scaling_factor", "shift_factor")


@dataclass(frozen=True)
class Checkpoint:
    """Averaged weights of the network before distillation, and the VAE. Optimiser moments are not kept: they fill again
    within the warm-up."""

    model: str
    network: dict[str, Tensor]
    vae: dict[str, Tensor]
    vae_numbers: dict[str, float]
    steps: int = 0
    samples: int = 0
    trained_s: float = 0.0

    def save(self, folder: Path) -> None:
        """Halves the floats; a cut-off write leaves the earlier checkpoint."""
        buffer = io.BytesIO()
        torch.save(vars(self) | {"network": _halves(self.network), "vae": _halves(self.vae)}, buffer)
        save_pieces(buffer.getvalue(), folder, "checkpoint")

    @classmethod
    def load(cls, folder: Path) -> "Checkpoint":
        content = load_pieces(folder, "checkpoint")
        if content is None:
            raise SystemExit(f"--from must be a folder with checkpoint.00, or `nothing`, got {folder}")
        return cls(**torch.load(io.BytesIO(content), weights_only=True))


def _halves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole numbers (how many batches a norm has seen) stay."""
    plain = {name: value.detach().cpu() for name, value in tensors.items()}
    return {name: value.half() if value.is_floating_point() else value for name, value in plain.items()}


def vae_numbers(vae: Any) -> dict[str, float]:
    return {name: vae.config[name] for name in VAE_NUMBERS if vae.config.get(name) is not None}


def save_pieces(content: bytes, folder: Path, name: str) -> None:
    """NAME.00, NAME.01, ...: written aside first, then renamed together; what a longer content had beyond goes."""
    pieces = [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]
    for number, piece in enumerate(pieces):
        (folder / f".{name}.{number:02d}").write_bytes(piece)
    for number in range(len(pieces)):
        os.replace(folder / f".{name}.{number:02d}", folder / f"{name}.{number:02d}")
    for old in _pieces(folder, name)[len(pieces) :]:
        old.unlink()


def load_pieces(folder: Path, name: str) -> bytes | None:
    pieces = _pieces(folder, name)
    return b"".join(piece.read_bytes() for piece in pieces) if pieces else None


def _pieces(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}.[0-9][0-9]"))
