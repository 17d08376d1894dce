"""Writes a trained network and its VAE as a model folder, and packs it for the way home. Trains and judges nothing."""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fluxbatch.tiny.checkpoint import save_pieces
from fluxbatch.tiny.flow import GUIDANCE_RANGE
from fluxbatch.tiny.vae import Vae

DEFAULTS = {"width": 128, "height": 128, "num_inference_steps": 20, "guidance_scale": 3.5}


def write_model(folder: Path, *, source: Path, net: Any, vae: Vae, sizes: Sequence[tuple[int, int]]) -> int:
    """Float16 safetensors in diffusers' layout; returns the folder's bytes. `net` and `vae` are float16 afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    pipeline = net.pipeline(source, vae).to(dtype=torch.float16)
    pipeline.save_pretrained(folder, safe_serialization=True)
    defaults = DEFAULTS | {
        "max_sequence_length": net.text_tokens,
        "buckets": [[width, height] for height, width in sizes],
    }
    defaults |= {"guidance_range": GUIDANCE_RANGE} if net.guided else {"guidance_scale": 1.0}
    (folder / "defaults.json").write_text(json.dumps(defaults, indent=1))
    _forget_paths(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _forget_paths(folder: Path) -> None:
    """diffusers writes down where each part was loaded from; that is of this machine only."""
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text())
        if content.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(content, indent=1))


def defaults(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "defaults.json").read_text())


def weights_digest(folder: Path) -> str:
    """Tells one model folder's weights from another's."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*/*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def pack_model(folder: Path, out: Path) -> None:
    """model.tar.00, ...: `cat model.tar.* | tar x` gives the folder `model`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, "model")
    save_pieces(buffer.getvalue(), out, "model.tar")
