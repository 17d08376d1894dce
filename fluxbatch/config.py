"""The settings: one plain dataclass a group in conf/, checked once at the door. Opens no file, imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING

from fluxbatch.errors import ConfigError
from fluxbatch.records import RowRules
from fluxbatch.step_cache import CHOICES, StepCache
from fluxbatch.storage import objects

OUTPUTS = ("parquet", "webdataset", "folder")
IMAGE_FORMATS = ("png", "jpeg", "webp")
MAX_SIDE = {"png": 2**31 - 1, "jpeg": 65_500, "webp": 16_383}  # what libjpeg and libwebp refuse beyond
LOGGERS = ("tensorboard", "wandb", "mlflow")
FAMILIES = ("flux1", "flux2", "diffusers")
GUIDANCE = ("embedded", "classifier_free", "none", "refused")
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "fp8", "int8", "fp8_weight_only", "int8_weight_only", "nvfp4")
INT32_MAX = 2**31 - 1  # more of anything is a slip of the finger
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1


@dataclass
class ManifestConfig:
    """Which rows: conf/manifest/."""

    path: Any = None  # a file, a folder, a glob, a URL, or a list of them
    columns: dict[str, str | None] = field(default_factory=dict)  # our name: the manifest's; None: the same
    drop_columns: list[str] = field(default_factory=list)
    allow_blank_prompts: bool = False
    size_policy: str = "reject"  # or floor
    on_duplicate: str = "refuse"  # or keep_first
    memory_gib: float = 1.0  # what the planner's sort may hold before it goes to disk


@dataclass
class ModelPreset:
    """What a row gets that says nothing, unless `sampler.*` says otherwise."""

    height: int = MISSING
    width: int = MISSING
    num_inference_steps: int = MISSING
    guidance_scale: float = MISSING


@dataclass
class LoraConfig:
    """One LoRA of the transformer: `model.loras=[{path: FILE, weight: 0.8}]`."""

    path: str = MISSING
    weight: float = 1.0


@dataclass
class ModelConfig:
    """Which model and how it is loaded: conf/model/."""

    name: str = MISSING
    family: str = MISSING  # flux1, flux2, or diffusers: any other pipeline of its
    pipeline: str | None = None  # of family diffusers: its class and a digest of its settings, read from its folder
    path: str | None = None  # a local folder in diffusers' layout, a hub id, or one file with a transformer
    base: str | None = None  # beside such a file: the folder or hub id of all other components
    revision: str | None = None
    loras: list[LoraConfig] = field(default_factory=list)  # fused into the transformer, in this order
    random_weights: bool = False  # full size from the built-in configuration; for speed only
    dtype: str = "bfloat16"
    text_encoder_dtype: str | None = None  # None: model.dtype, but bfloat16 where that is float16
    vae_dtype: str | None = None  # the same rule
    device: str = "auto"
    cpu_threads: int = 1  # inside an operator, on a CPU; decides bits, so it does not follow the machine
    kernels: str = "auto"  # fused, diffusers, or auto: fused on CUDA in half precision
    quantization: str = "none"  # of the blocks' matrices: fp8, int8, fp8_weight_only, int8_weight_only, nvfp4
    compile: str = "off"  # of diffusers' modules: regional (at the first launch of a shape) or aot (by `compile`)
    aot_missing: str = "refuse"  # packages that a run with compile=aot lacks; or build them before it begins
    compile_cache: str | None = None  # a folder for compiled kernels; None: the user's cache, or node-local
    guidance: str = MISSING  # embedded, classifier_free, none, or refused
    negative_prompts: bool = MISSING
    max_sequence_length: int = 512
    residency: str = "auto"  # resident, windowed (text encoder layers on the host), or auto: what fits
    memory_budget_gib: float | None = None  # of the GPU; None: nine tenths of what is free at the start
    encode_batch_size: int = 8  # prompts in one text-encoder launch; fixed, so that bits do not depend on neighbours
    decode_max_pixels: int = 4 * 1024 * 1024  # pixels in one VAE launch
    size_multiple: int = 16
    max_pixels: int = 4 * 1024 * 1024  # the largest image a row may ask for
    license: str = "unknown"
    preset: ModelPreset = field(default_factory=ModelPreset)


@dataclass
class SamplerConfig:
    """How a row is drawn where its own columns are silent: conf/sampler/."""

    height: int = MISSING
    width: int = MISSING
    num_inference_steps: int = MISSING
    guidance_scale: float = MISSING
    true_cfg_scale: float = 2.0  # FLUX.1 with a negative prompt: weight of the second pass
    seed: int = 0
    step_cache: Any = "off"  # an approximation: conservative, medium, aggressive, or the steps that are computed
    step_cache_order: int = 1  # of the extrapolation of the others: 1 or 2

    def __post_init__(self) -> None:
        if self.step_cache is False:  # what YAML makes of off
            self.step_cache = "off"


@dataclass
class PlanConfig:
    """How rows become batches and shards: conf/plan/."""

    batch_size: Any = "auto"  # a number, or auto
    shard_size: int = 1000
    tail: str = "pad"  # the last batch of a bucket is filled with copies that are never written


@dataclass
class PipelineConfig:
    """How the stages run: conf/pipeline/."""

    mode: str = MISSING  # double_buffered or serial
    depth: int = 2  # batches in flight at each hand-over
    encode_window: int = 8  # batches whose prompts are encoded together
    prompt_cache: int = 64  # prompt embeddings kept on the device
    compress_workers: int = 0  # 0: one a core, at most 16


@dataclass
class OutputConfig:
    """What is written and where: conf/output/."""

    kind: str = MISSING  # parquet, webdataset or folder
    dir: str | None = None  # None: outputs/<run.name>
    image_format: str = "png"
    quality: int = 95  # of JPEG and WebP
    png_level: int = 1
    embed_parameters: bool = True
    row_group_mib: int = 64


@dataclass
class RunConfig:
    """How the process behaves: conf/run/."""

    name: str | None = None  # None: the job's name, or the manifest's
    rank: int | None = None
    world_size: int | None = None
    devices: Any = None  # one process each: all, or a list of GPU indices, UUIDs and cpu
    max_restarts: int = 3  # of each of those processes, after a lost GPU or a kill
    help_ranks: bool = True  # with open shards, once the own share is done
    engine: str = "local"  # this process; or ray: a worker on each GPU of a Ray cluster
    ray_resources: str | None = None  # of a worker, as GPU:0.5,CPU:4; None: GPU:1, with model.device=cpu CPU:threads
    ray_wait_s: float = 1800.0  # how long a cluster without a free GPU is waited for
    max_shard_attempts: int = 3  # on Ray: in a row that bring no batch
    plan_only: bool = False  # end once the plan stands: thousands of GPUs need not wait for it
    retry_failed: bool = False
    on_change: str = "refuse"  # edited rows or other output-affecting settings; or redo
    reuse_from: str | None = None  # an earlier run's folder: what is unchanged is taken over from it
    grace_s: float = 25.0
    stage_timeout_s: float = 1800.0  # 0: a stage may take for ever
    deadline: str | None = None  # ISO 8601, with a zone; or seconds from the start as +3600
    max_failed_fraction: float = 0.5
    fail_on_row_errors: bool = True
    gpu_hour_price: float | None = None  # in any currency; `plan` and the report then tell the cost


@dataclass
class TelemetryConfig:
    """What is measured and shown: conf/telemetry/."""

    nvml: bool = True
    interval_s: float = 10.0
    progress: str = "auto"  # auto: a bar on a terminal, else lines; bar, lines or off
    prometheus_textfile: str | None = None
    loggers: list[str] = field(default_factory=list)  # tensorboard, wandb, mlflow


@dataclass
class VerifyConfig:
    """How thorough `verify` is: conf/verify/."""

    decode: bool = True
    repair: bool = False  # set damaged files aside, so that a run makes their rows again
    complete: bool = False  # an unfinished run is sound, but ends with 75


@dataclass
class JobConfig:
    """A whole job."""

    manifest: ManifestConfig = field(default_factory=ManifestConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    run: RunConfig = field(default_factory=RunConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)


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


def amounts(text: str) -> dict[str, float]:
    """`GPU:0.5,CPU:4` by name; ValueError where one is no number."""
    parts = (part.rpartition(":") for part in text.split(","))
    return {name.strip(): float(number) for name, _, number in parts}


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


def setting(cfg: JobConfig, key: str) -> Any:
    """The value under a dotted key."""
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check(cfg: JobConfig) -> None:
    """Refuse an impossible value with its dotted key, the rule and the value. Past this door, settings are trusted."""
    for key, holds, rule in RULES:
        value = setting(cfg, key)
        if not holds(value) and not _is_left_to_pipeline(cfg, key, value):
            raise ConfigError(f"{key} {rule}, got {value!r}")
    _check_text(cfg)
    _check_place(cfg)
    _check_sizes(cfg)
    _check_loras(cfg.model)
    _check_ranks(cfg.run)


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


def output_dir(cfg: JobConfig) -> Path:
    """The run folder, absolute: `output.dir`, else outputs/<run name>, against the current directory."""
    return place(cfg.output.dir or f"outputs/{run_name(cfg)}", key="output.dir")


def place(text: str, *, key: str) -> Path:
    """A folder, or the prefix of an object store, which answers as a path does (`objects.ObjectPath`)."""
    return cast(Path, objects.as_place(text, key=key))


def run_name(cfg: JobConfig) -> str:
    """`run.name`, else the stem of the first manifest."""
    if cfg.run.name:
        return cfg.run.name
    first = cfg.manifest.path if isinstance(cfg.manifest.path, str) else next(iter(cfg.manifest.path or ["run"]))
    return Path(str(first)).stem or "run"


def row_rules(cfg: JobConfig) -> RowRules:
    """What each manifest row must keep to under these settings."""
    return RowRules(
        height=cfg.sampler.height,
        width=cfg.sampler.width,
        num_inference_steps=cfg.sampler.num_inference_steps,
        guidance_scale=cfg.sampler.guidance_scale,
        seed=cfg.sampler.seed,
        size_multiple=cfg.model.size_multiple,
        max_pixels=cfg.model.max_pixels,
        max_side=MAX_SIDE[cfg.output.image_format],
        size_policy=cfg.manifest.size_policy,
        allow_blank_prompts=cfg.manifest.allow_blank_prompts,
        guidance=cfg.model.guidance,
        negative_prompts=cfg.model.negative_prompts,
        shared_guidance=cfg.model.family == "diffusers" and cfg.model.guidance != "refused",
    )


def step_cache(sampler: SamplerConfig) -> StepCache:
    schedule = sampler.step_cache
    return StepCache(tuple(schedule) if isinstance(schedule, list) else schedule, sampler.step_cache_order)


OUTPUT_AFFECTING = (
    "model.name", "model.pipeline", "model.path", "model.base", "model.revision", "model.random_weights", "model.dtype",
    "model.text_encoder_dtype", "model.vae_dtype", "model.kernels", "model.quantization", "model.cpu_threads",
    "model.compile", "model.guidance", "model.max_sequence_length", "model.encode_batch_size",
    "sampler.true_cfg_scale", "sampler.step_cache", "sampler.step_cache_order", "output.kind",
    "output.image_format", "output.quality", "output.png_level", "output.embed_parameters",
)  # fmt: skip


SPEED_AFFECTING = (  # what decides how long a launch takes, beside its shape and the machine
    "model.name", "model.pipeline", "model.dtype", "model.vae_dtype", "model.kernels", "model.quantization",
    "model.compile", "model.max_sequence_length", "model.decode_max_pixels", "sampler.step_cache",
)  # fmt: skip


def fingerprint(cfg: JobConfig) -> dict[str, Any]:
    """The settings that decide the bytes of a row beside the row itself; a resumed run must have the same."""
    return {key: setting(cfg, key) for key in OUTPUT_AFFECTING}
