"""What settings must keep to, checked once at the door; past it they are trusted. Opens no file, imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from fluxbatch.config import (
    DTYPES,
    FAMILIES,
    GUIDANCE,
    IMAGE_FORMATS,
    LOGGERS,
    OUTPUTS,
    QUANTIZATIONS,
    SEED_MAX,
    SEED_MIN,
    JobConfig,
    ModelConfig,
    RunConfig,
    amounts,
    output_dir,
    setting,
)
from fluxbatch.errors import ConfigError
from fluxbatch.step_cache import CHOICES
from fluxbatch.storage import objects

INT32_MAX = 2**31 - 1  # more of anything is a slip of the finger

Rule = tuple[str, Callable[[Any], bool], str]


def _is_int(value: Any, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _at_least(low: int) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: _is_int(value, low, INT32_MAX)), f"must be a whole number >= {low}"


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in choices), f"must be one of {', '.join(choices)}"


def _dtype_or_null(value: Any) -> bool:
    return value is None or value in DTYPES


def _are_amounts(text: str) -> bool:
    try:
        return all(name and 0 < number < math.inf for name, number in amounts(text).items())
    except ValueError:
        return False


def _is_step_cache(value: Any) -> bool:
    if not isinstance(value, list):
        return value in CHOICES
    return value[:1] == [0] and all(_is_int(step, 0, INT32_MAX) for step in value) and sorted(set(value)) == value


def _is_text_or_texts(value: Any) -> bool:
    return all(isinstance(part, str) for part in (value if isinstance(value, list) else [value or ""]))


def _is_devices(value: Any) -> bool:
    words = value if isinstance(value, list) else str(value).split(",")
    device = re.compile(r"(cuda:)?\d+|cpu|(GPU|MIG)-[\w/-]+")
    return value is None or words == ["all"] or (bool(words) and all(device.fullmatch(str(word)) for word in words))


RULES: tuple[Rule, ...] = (
    ("manifest.path", _is_text_or_texts, "must be a path or a list of paths"),
    ("manifest.size_policy", *_one_of("reject", "floor")),
    ("manifest.on_duplicate", *_one_of("refuse", "keep_first")),
    ("manifest.memory_gib", lambda v: 0.1 <= v <= 1e6, "must be a number from 0.1 to a million"),
    ("model.family", *_one_of(*FAMILIES)),
    ("model.dtype", *_one_of(*DTYPES)),
    ("model.text_encoder_dtype", _dtype_or_null, f"must be null or one of {', '.join(DTYPES)}"),
    ("model.text_encoder_dtype", lambda v: v != "float16", "must not be float16: T5 and Qwen3 overflow in it"),
    ("model.vae_dtype", _dtype_or_null, f"must be null or one of {', '.join(DTYPES)}"),
    ("model.vae_dtype", lambda v: v != "float16", "must not be float16: the VAE overflows in it and draws black"),
    ("model.loras", lambda v: all(lora.path for lora in v), "must name a file in each path"),
    ("model.loras", lambda v: all(math.isfinite(lora.weight) for lora in v), "must have finite numbers as weights"),
    ("model.device", lambda v: bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", v)), "must be auto, cpu, cuda or cuda:N"),
    ("model.cpu_threads", *_at_least(1)),
    ("model.kernels", *_one_of("auto", "fused", "diffusers")),
    ("model.quantization", *_one_of(*QUANTIZATIONS)),
    ("model.compile", *_one_of("off", "regional", "aot")),
    ("model.aot_missing", *_one_of("refuse", "build")),
    ("model.guidance", *_one_of(*GUIDANCE)),
    ("model.max_sequence_length", lambda v: _is_int(v, 1, 512), "must be a whole number from 1 to 512"),
    ("model.encode_batch_size", *_at_least(1)),
    ("model.decode_max_pixels", *_at_least(1)),
    ("model.residency", *_one_of("auto", "resident", "windowed")),
    ("model.memory_budget_gib", lambda v: v is None or 0 < v < 1e6, "must be null or a number of GiB > 0"),
    ("model.size_multiple", *_at_least(1)),
    ("model.max_pixels", *_at_least(1)),
    ("sampler.height", *_at_least(1)),
    ("sampler.width", *_at_least(1)),
    ("sampler.num_inference_steps", *_at_least(1)),
    ("sampler.guidance_scale", lambda v: 0 <= v < math.inf, "must be a finite number >= 0"),
    ("sampler.true_cfg_scale", lambda v: 0 <= v < math.inf, "must be a finite number >= 0"),
    ("sampler.seed", lambda v: _is_int(v, SEED_MIN, SEED_MAX), "must be from -2^63 to 2^64-1"),
    (
        "sampler.step_cache",
        _is_step_cache,
        f"must be one of {', '.join(CHOICES)}, or steps such as [0,1,3,5] from 0 up",
    ),
    ("sampler.step_cache_order", lambda v: _is_int(v, 1, 2), "must be 1 or 2"),
    ("plan.batch_size", lambda v: v == "auto" or _is_int(v, 1, INT32_MAX), "must be auto or a whole number >= 1"),
    ("plan.shard_size", *_at_least(1)),
    ("plan.tail", *_one_of("pad")),
    ("pipeline.mode", *_one_of("double_buffered", "serial")),
    ("pipeline.depth", *_at_least(1)),
    ("pipeline.encode_window", *_at_least(1)),
    ("pipeline.prompt_cache", *_at_least(0)),
    ("pipeline.compress_workers", *_at_least(0)),
    ("output.kind", *_one_of(*OUTPUTS)),
    ("output.image_format", *_one_of(*IMAGE_FORMATS)),
    ("output.quality", lambda v: _is_int(v, 1, 100), "must be a whole number from 1 to 100"),
    ("output.png_level", lambda v: _is_int(v, 0, 9), "must be a whole number from 0 to 9"),
    ("output.row_group_mib", lambda v: _is_int(v, 1, 99), "must be a whole number from 1 to 99"),
    ("run.engine", *_one_of("local", "ray")),
    (
        "run.ray_resources",
        lambda v: v is None or _are_amounts(v),
        "must be null or amounts > 0 by name: GPU:1,CPU:4",
    ),
    ("run.ray_wait_s", lambda v: 0 <= v < math.inf, "must be a finite number of seconds >= 0"),
    ("run.max_shard_attempts", *_at_least(1)),
    ("run.devices", _is_devices, "must be null, all, or a list of GPU indices, UUIDs and cpu (0,1,3)"),
    ("run.max_restarts", *_at_least(0)),
    ("run.on_change", *_one_of("refuse", "redo")),
    ("run.grace_s", lambda v: 0 <= v < math.inf, "must be a finite number of seconds >= 0"),
    ("run.stage_timeout_s", lambda v: 0 <= v < math.inf, "must be a finite number of seconds >= 0 (0: no limit)"),
    ("run.max_failed_fraction", lambda v: 0 <= v <= 1, "must be from 0 to 1"),
    ("run.gpu_hour_price", lambda v: v is None or 0 <= v < math.inf, "must be null or a finite number >= 0"),
    ("telemetry.interval_s", lambda v: 0 < v < math.inf, "must be a number of seconds > 0"),
    ("telemetry.progress", *_one_of("auto", "bar", "lines", "off")),
    ("telemetry.loggers", lambda v: set(v) <= set(LOGGERS), f"must be a list of {', '.join(LOGGERS)}"),
)


def check(cfg: JobConfig) -> None:
    """Refuse an impossible value with its dotted key, the rule and the value. Past this door, settings are trusted."""
    for key, holds, rule in RULES:
        value = setting(cfg, key)
        if not _keeps(holds, value) and not _is_left_to_pipeline(cfg, key, value):
            raise ConfigError(f"{key} {rule}, got {value!r}")
    _check_text(cfg)
    _check_place(cfg)
    _check_sizes(cfg)
    _check_loras(cfg.model)
    _check_ranks(cfg.run)


def _keeps(holds: Callable[[Any], bool], value: Any) -> bool:
    try:
        return holds(value)
    except (AttributeError, TypeError, ValueError):  # an interpolation can put a whole group where a list belongs
        return False


PIPELINES_OWN = {  # what stands in conf/model/diffusers.yaml until model_folder.py has filled it in
    "sampler.height": 0,
    "sampler.width": 0,
    "sampler.num_inference_steps": 0,
    "sampler.guidance_scale": -1.0,
}


def _is_left_to_pipeline(cfg: JobConfig, key: str, value: Any) -> bool:
    if cfg.model.family != "diffusers":
        return False
    if key == "model.max_sequence_length":  # its call says itself what it takes
        return _is_int(value, 0, INT32_MAX)
    return key in PIPELINES_OWN and value == PIPELINES_OWN[key]


TEXT_KEYS = (
    "manifest.path", "output.dir", "model.path", "model.base", "model.compile_cache", "run.name", "run.reuse_from",
)  # fmt: skip


def _check_text(cfg: JobConfig) -> None:
    for key in TEXT_KEYS:
        if "\\udc" in ascii(setting(cfg, key)):  # how Python carries a byte that is no UTF-8
            raise ConfigError(f"{key} must be UTF-8, got {setting(cfg, key)!a}")


def _check_place(cfg: JobConfig) -> None:
    """An object store has no folders that could be created in one step, and no files that grow."""
    if not isinstance(output_dir(cfg), objects.ObjectPath):
        return
    if cfg.output.kind == "folder":
        raise ConfigError("output must be parquet or webdataset where output.dir is an object store, got folder")
    if cfg.telemetry.loggers:
        raise ConfigError(
            f"telemetry.loggers must be [] where output.dir is an object store, got {cfg.telemetry.loggers}"
        )


def _check_sizes(cfg: JobConfig) -> None:
    if cfg.model.family == "diffusers" and cfg.model.pipeline is None:
        return  # its folder has not been read yet
    multiple = cfg.model.size_multiple
    for key in ("sampler.height", "sampler.width"):
        value = setting(cfg, key)
        if value % multiple:
            low = value // multiple * multiple
            nearest = ", ".join(str(side) for side in (low, low + multiple) if side)
            raise ConfigError(
                f"{key} must be a multiple of {multiple} for {cfg.model.name}, got {value}; nearest {nearest}"
            )
    if cfg.sampler.height * cfg.sampler.width > cfg.model.max_pixels:
        size = f"{cfg.sampler.height}x{cfg.sampler.width}"
        raise ConfigError(
            f"sampler.height x sampler.width must be <= model.max_pixels={cfg.model.max_pixels}, got {size}"
        )


def _check_loras(model: ModelConfig) -> None:
    if model.loras and model.random_weights:
        raise ConfigError(f"model.loras must be empty with model.random_weights=true, got {model.loras[0].path}")


def _check_ranks(run: RunConfig) -> None:
    if run.engine == "ray" and run.devices is not None:
        raise ConfigError(f"run.devices must be null with run.engine=ray, which takes all GPUs, got {run.devices}")
    if run.rank is None and run.world_size is None:
        return
    if run.rank is None or run.world_size is None:
        raise ConfigError(f"run.rank and run.world_size must be given together, got {run.rank} and {run.world_size}")
    if not 0 <= run.rank < run.world_size:
        raise ConfigError(f"run.rank must be from 0 to run.world_size - 1, got {run.rank} of {run.world_size}")
