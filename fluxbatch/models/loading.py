"""From settings to components: which device and dtype each part gets, and its stored or random weights.

What can be refused is refused before a weight is read. Safetensors only; no pickles, no remote code.
Knows nothing of prompts, sampling or what the parts compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn

from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError, FluxbatchError, first_line
from fluxbatch.models.homes import model_folder, read_json

logger = logging.getLogger("fluxbatch")

GIB = 2**30


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
