"""The settings: one plain dataclass a group in conf/, and what is read off them: run folder, row rules, fingerprint.

What a value must keep to is `config_rules`'. Opens no file, imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING

from fluxbatch.records import RowRules
from fluxbatch.step_cache import StepCache
from fluxbatch.storage import objects

OUTPUTS = ("parquet", "webdataset", "folder")
IMAGE_FORMATS = ("png", "jpeg", "webp")
MAX_SIDE = {"png": 2**31 - 1, "jpeg": 65_500, "webp": 16_383}  # what libjpeg and libwebp refuse beyond
LOGGERS = ("tensorboard", "wandb", "mlflow")
FAMILIES = ("flux1", "flux2", "diffusers")
GUIDANCE = ("embedded", "classifier_free", "none", "refused")
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "fp8", "int8", "fp8_weight_only", "int8_weight_only", "nvfp4")
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


def setting(cfg: JobConfig, key: str) -> Any:
    """The value under a dotted key."""
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value


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


def amounts(text: str) -> dict[str, float]:
    """`GPU:0.5,CPU:4` by name; ValueError where one is no number."""
    parts = (part.rpartition(":") for part in text.split(","))
    return {name.strip(): float(number) for name, _, number in parts}


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
