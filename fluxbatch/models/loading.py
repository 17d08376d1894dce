"""From settings to components: where a model lies, which device and dtype each part gets, stored or random weights.

Everything that can be refused is refused before a weight is read. Safetensors only; no pickles, no remote code.
Knows nothing of prompts, sampling or what the parts compute.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import torch.nn.functional as F
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import nn

from fluxbatch import tiny
from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.models.trust import refuse_code

logger = logging.getLogger("fluxbatch")

GIB = 2**30
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


# --- device and dtypes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """The one decision about device and dtypes. Every part of a model computes on the same device."""

    device: torch.device
    dtype: torch.dtype  # of the transformer
    text_encoder_dtype: torch.dtype
    vae_dtype: torch.dtype
    windowed: bool = False  # the text encoder's layers live on the host: residency.py
    staged: bool = False  # the transformer is quantised block by block on its way from the host

    @property
    def text_encoder_device(self) -> torch.device:
        """Where the text encoder's weights are read to."""
        return torch.device("cpu") if self.windowed else self.device

    @property
    def transformer_device(self) -> torch.device:
        """Where the transformer's weights are read to."""
        return torch.device("cpu") if self.staged else self.device


def place(cfg: ModelConfig) -> Placement:
    """Device and dtypes from the settings; ConfigError for what this machine cannot do."""
    device = _device(cfg.device)
    dtype = _dtype(cfg.dtype)
    if device.type == "cpu" and dtype is torch.float16 and not _runs_float16(device):
        raise ConfigError("model.dtype must be float32 or bfloat16 here, got float16: this CPU's torch cannot run it")
    range_safe = _wide_dtype(device) if dtype is torch.float16 else dtype
    return Placement(
        device=device,
        dtype=dtype,
        text_encoder_dtype=_dtype(cfg.text_encoder_dtype) if cfg.text_encoder_dtype else range_safe,
        vae_dtype=_dtype(cfg.vae_dtype) if cfg.vae_dtype else range_safe,
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _device(name: str) -> torch.device:
    """With its index: the libraries that load onto it want one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda:0" if name == "cuda" else name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device={name} needs a CUDA device, and torch {torch.__version__} sees none here")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(f"model.device={name} must be below cuda:{torch.cuda.device_count()}, the devices seen here")
    return device


def _wide_dtype(device: torch.device) -> torch.dtype:
    """For T5, Qwen3 and the VAEs beside a float16 transformer: their activations exceed 65504, whatever the GPU."""
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32


def _runs_float16(device: torch.device) -> bool:
    try:
        x = torch.ones(1, 1, 4, 8, dtype=torch.float16, device=device)
        F.layer_norm(F.linear(F.scaled_dot_product_attention(x, x, x), x[0, 0]), (4,))
    except RuntimeError:
        return False
    return True


# --- where a model lies -----------------------------------------------------------------------------------------------


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


# --- components -------------------------------------------------------------------------------------------------------


def stored(
    component: Any, folder: Path, *, subfolder: str, dtype: torch.dtype, device: torch.device, **options: Any
) -> Any:
    """One component with its stored weights, straight onto the device in its dtype. `component` is its class."""
    start_s = time.perf_counter()
    try:
        module, info = component.from_pretrained(
            folder,
            subfolder=subfolder,
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except NotImplementedError as error:  # what diffusers comes to when a tensor was never filled
        raise FluxbatchError(f"model.path={folder}: {subfolder} lacks tensors that its config.json asks for") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise FluxbatchError(f"model.path={folder}: {subfolder} cannot be loaded: {first_line(error)}") from error
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:  # the libraries fill such tensors with random numbers and go on
        raise FluxbatchError(f"model.path={folder}: {subfolder} lacks {len(absent)} tensors, among them {absent[0]}")
    log_component(subfolder, module, start_s=start_s)
    return module.eval()


def weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of one component: one, or those that its index names."""
    whole = folder / f"{stem}.safetensors"
    if whole.is_file():
        return [whole]
    shards = read_json(folder / f"{whole.name}.index.json")["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]


def stored_tokenizer(tokenizer: Any, folder: Path, *, subfolder: str) -> Any:
    try:
        return tokenizer.from_pretrained(folder / subfolder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FluxbatchError(f"model.path={folder}: {subfolder} cannot be loaded: {first_line(error)}") from error


def random(build: Callable[[], Any], *, name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """One component with the library's default initialisation, built on the device in its dtype: no second copy.

    Seeded, so that every process of a job has the same weights.
    """
    start_s = time.perf_counter()
    module = initialised(build, dtype=dtype, device=device)
    if device.type != "meta":  # there it is only asked for its shapes
        log_component(name, module, start_s=start_s)
    return module


def initialised(build: Callable[[], Any], *, dtype: torch.dtype, device: torch.device) -> Any:
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return build().eval()
    finally:
        torch.set_default_dtype(before)


def blueprint(
    transformer: Any, vae: Any, *, full_size: Mapping[str, dict[str, Any]], cfg: ModelConfig, placement: Placement
) -> dict[str, Any]:
    """A transformer with one block of each kind, and the VAE, as their settings describe them; no weight is read.

    `transformer` and `vae` are the classes, `full_size` their settings where the weights would be random.
    """
    folder = None if cfg.random_weights else model_folder(cfg)
    stored = {name: read_json(folder / name / "config.json") for name in ("transformer", "vae")} if folder else {}
    settings = {**full_size, **stored}
    one_each = {**settings["transformer"], "num_layers": 1, "num_single_layers": 1}
    return {
        "transformer": initialised(
            lambda: transformer.from_config(one_each), dtype=placement.dtype, device=placement.device
        ),
        "vae": initialised(
            lambda: vae.from_config(settings["vae"]), dtype=placement.vae_dtype, device=placement.device
        ),
    }


def random_config(table: dict[str, dict[str, Any]], cfg: ModelConfig) -> dict[str, Any]:
    if cfg.name not in table:
        raise ConfigError(f"model.random_weights=true has full-size settings for {', '.join(table)}, got {cfg.name}")
    return table[cfg.name]


def log_component(name: str, module: nn.Module, *, start_s: float) -> None:
    tensors = [*module.parameters(), *module.buffers()]
    first = next(module.parameters())
    gib = sum(t.numel() * t.element_size() for t in tensors) / GIB
    if first.is_cuda:
        torch.cuda.synchronize(first.device)  # its copies, or its random numbers, may still be on their way
    load_s = time.perf_counter() - start_s
    logger.info(
        "%s: %s, %.2f M parameters, %s on %s, %.3f GiB in %.1f s (%.2f GiB/s)",
        name,
        type(module).__name__,
        sum(t.numel() for t in tensors) / 1e6,
        str(first.dtype).removeprefix("torch."),
        first.device,
        gib,
        load_s,
        gib / load_s,
    )


def quiet_libraries() -> None:
    """No progress bars in a job's log, no advice: what matters is said in our own words, once."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --- speed ------------------------------------------------------------------------------------------------------------


def fix_cpu_threads(cfg: ModelConfig) -> None:
    """CPU kernels round differently where they cut a tensor among threads: their number decides bits."""
    if _device(cfg.device).type == "cpu":
        torch.set_num_threads(cfg.cpu_threads)
        logger.info(
            "cpu: %d thread(s) inside an operator, the same on every machine (model.cpu_threads)", cfg.cpu_threads
        )


def decode_row_by_row_on_cpu(vae: Any) -> None:
    """CPU kernels cut a batch among threads anywhere, and round differently near a cut: whole rows keep their bits."""
    if vae.device.type == "cpu":
        vae.enable_slicing()
