"""Where a model's components lie: a folder, the hub's cache or the embedded models, complete and of the right kind.

What can be refused is refused before a weight is read. Knows names and settings files; opens no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import LocalEntryNotFoundError

from fluxbatch import tiny
from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError, FluxbatchError, first_line
from fluxbatch.models.trust import refuse_code

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WEIGHT_SUFFIXES = (".safetensors", ".sft", ".bin", ".ckpt", ".pt", ".pth", ".gguf")  # all but the first two refused


@dataclass(frozen=True)
class Layout:
    """What a family's folder holds, as diffusers saves it."""

    pipeline: str  # `_class_name` in model_index.json
    tokenizers: tuple[str, ...]
    weights: dict[str, str]  # subfolder: stem of its safetensors file
    configs: tuple[str, ...] = ()  # subfolders of which only the settings are needed

    def without_transformer(self) -> Layout:
        """Of the folder beside a transformer that is a file of its own."""
        others = {name: stem for name, stem in self.weights.items() if name != "transformer"}
        return replace(self, weights=others, configs=("transformer",))


LAYOUTS = {
    "flux1": Layout(
        pipeline="FluxPipeline",
        tokenizers=("tokenizer", "tokenizer_2"),
        weights={
            "text_encoder": "model",
            "text_encoder_2": "model",
            "transformer": "diffusion_pytorch_model",
            "vae": "diffusion_pytorch_model",
        },
    ),
    "flux2": Layout(
        pipeline="Flux2KleinPipeline",
        tokenizers=("tokenizer",),
        weights={
            "text_encoder": "model",
            "transformer": "diffusion_pytorch_model",
            "vae": "diffusion_pytorch_model",
        },
    ),
}


@dataclass(frozen=True)
class Home:
    """What holds a model's components, as a setting names it."""

    key: str
    path: str | None
    layout: Layout
    cfg: ModelConfig

    def __str__(self) -> str:
        return f"{self.key}={self.path}"


def checkpoint_file(cfg: ModelConfig) -> Path | None:
    """`model.path` where it is one file with a transformer; None where it is a folder or a hub id."""
    if cfg.path is None or cfg.random_weights:
        return None
    path = Path(cfg.path).expanduser()
    if path.suffix in WEIGHT_SUFFIXES and not path.exists():
        raise ConfigError(f"model.path must be a folder, a hub id or a file, got {cfg.path}: no such file")
    return path if path.is_file() else None


def model_folder(cfg: ModelConfig) -> Path:
    """The local folder of the model's components, complete and of the right kind.

    A folder that exists is taken as it is. Otherwise a hub id is looked for in the local cache; the network is used
    only for what is not there, and never under HF_HUB_OFFLINE. Its transformer may be a file elsewhere.
    """
    home = _home(cfg)
    try:
        folder = _find_folder(home)
        missing = _missing_file(folder, home.layout)
        if missing is not None:
            raise ConfigError(f"{home.key}={home.path or folder}: {missing} is missing in {folder}")
        refuse_code(folder, index=read_json(folder / "model_index.json"))
        _check_kind(folder, home)
    except OSError as error:  # a permission, a stale mount
        raise FluxbatchError(f"{home}: {first_line(error)}") from error
    except ValueError as error:
        raise FluxbatchError(f"{home}: a .json file in it is not JSON: {error}") from error
    return folder


def _home(cfg: ModelConfig) -> Home:
    layout = LAYOUTS[cfg.family]
    if checkpoint_file(cfg) is not None:
        return Home("model.base", cfg.base, layout.without_transformer(), cfg)
    if cfg.base is not None:
        raise ConfigError(f"model.base must be null where model.path is no file, got {cfg.base}")
    return Home("model.path", cfg.path, layout, cfg)


def _find_folder(home: Home) -> Path:
    if home.path is None:
        return _embedded_folder(home)
    local = Path(home.path).expanduser()
    if local.is_dir():
        return local
    if not HUB_ID.fullmatch(home.path):
        raise ConfigError(f"{home.key} must be a folder or a hub id (org/name), got {home.path!r}: no such folder")
    return _hub_folder(home)


def _embedded_folder(home: Home) -> Path:
    name = home.cfg.name
    if name not in tiny.FOLDERS:
        beside = f" beside the file {home.cfg.path}" if home.key == "model.base" else ""
        raise ConfigError(f"{home.key} must name a folder or a hub id for {name}{beside}, got null")
    folder = tiny.FOLDERS[name]
    if not folder.is_dir():
        raise ConfigError(
            f"model={name} has no weights in {folder} yet: `python -m fluxbatch.tiny.train --model {home.cfg.family} "
            "--from vae --minutes 10 --out OUT` on a GPU makes them, and `python -m fluxbatch.tiny.install OUT` puts "
            "them there"
        )
    return folder


def _hub_folder(home: Home) -> Path:
    cached = _cached_snapshot(home)
    if cached is not None and _missing_file(cached, home.layout) is None:
        return cached
    if huggingface_hub.constants.is_offline_mode():
        lacks = f"lacks {_missing_file(cached, home.layout)}" if cached else "does not hold it"
        raise ConfigError(
            f"{home}: no such folder, the local cache {huggingface_hub.constants.HF_HUB_CACHE} {lacks}, "
            "and HF_HUB_OFFLINE forbids the network"
        )
    try:
        return Path(_snapshot(home, local_files_only=False))
    except Exception as error:  # the client's errors (network, permission, no such repository) have no common base
        raise FluxbatchError(
            f"{home}: no such folder, not in the local cache, and not to be had from the hub: {first_line(error)}"
        ) from error


def _cached_snapshot(home: Home) -> Path | None:
    try:
        return Path(_snapshot(home, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _snapshot(home: Home, *, local_files_only: bool) -> str:
    assert home.path is not None
    subfolders = ("scheduler", *home.layout.tokenizers, *home.layout.weights)
    configs = (f"{name}/config.json" for name in home.layout.configs)
    return huggingface_hub.snapshot_download(
        home.path,
        revision=home.cfg.revision,
        allow_patterns=["model_index.json", *configs, *(f"{name}/*" for name in subfolders)],
        ignore_patterns=["*.bin", "*.msgpack", "*.h5", "*.onnx*"],
        etag_timeout=5.0,
        local_files_only=local_files_only,
    )


def _missing_file(folder: Path, layout: Layout) -> str | None:
    for names in _needed(layout):
        if not any((folder / name).is_file() for name in names):
            return " or ".join(names)
    return next(_missing_shards(folder, layout), None)


def _needed(layout: Layout) -> Iterator[tuple[str, ...]]:
    """Each needed file as its alternatives."""
    yield ("model_index.json",)
    yield ("scheduler/scheduler_config.json",)
    for name in layout.tokenizers:
        yield (f"{name}/tokenizer.json", f"{name}/spiece.model", f"{name}/vocab.json")
    for name in layout.configs:
        yield (f"{name}/config.json",)
    for name, stem in layout.weights.items():
        yield (f"{name}/config.json",)
        yield (f"{name}/{stem}.safetensors", f"{name}/{stem}.safetensors.index.json")


def _missing_shards(folder: Path, layout: Layout) -> Iterator[str]:
    for name, stem in layout.weights.items():
        index = folder / name / f"{stem}.safetensors.index.json"
        if index.is_file() and not (folder / name / f"{stem}.safetensors").is_file():
            shards = sorted(set(read_json(index)["weight_map"].values()))
            yield from (f"{name}/{shard}" for shard in shards if not (folder / name / shard).is_file())


def _check_kind(folder: Path, home: Home) -> None:
    """A FLUX.2 folder under a FLUX.1 name, or dev's weights under schnell's, would load and draw rubbish."""
    cfg, place = home.cfg, home.path or folder
    index = read_json(folder / "model_index.json")
    wanted = home.layout.pipeline
    if index.get("_class_name") != wanted:
        raise ConfigError(f"{home.key}={place} must be a {wanted} for model={cfg.name}, got {index.get('_class_name')}")
    held = _guidance(index, read_json(folder / "transformer" / "config.json"), family=cfg.family)
    if held != cfg.guidance:
        raise ConfigError(f"model.guidance must be {held} for the weights in {place}, got {cfg.guidance}")


def _guidance(index: dict[str, Any], transformer: dict[str, Any], *, family: str) -> str:
    if family == "flux1":
        return "embedded" if transformer.get("guidance_embeds") else "none"
    return "none" if index.get("is_distilled") else "classifier_free"


def read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict), path
    return content


def weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of one component: one, or those that its index names."""
    whole = folder / f"{stem}.safetensors"
    if whole.is_file():
        return [whole]
    shards = read_json(folder / f"{whole.name}.index.json")["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]
