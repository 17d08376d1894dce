"""What a pipeline's folder in diffusers' layout says of itself: sizes, guidance, defaults; settings are made of it.

Reads JSON and imports neither diffusers nor torch, so that a plan knows what a run will refuse. Opens no weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxbatch.config import JobConfig, ModelConfig, PlanConfig, setting
from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.pipeline_call import call_of

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
VOLATILE = ("_diffusers_version", "_name_or_path", "transformers_version")  # of a settings file, not of a model

# Shown by tests/test_whole.py to draw a row the same, whoever shares its launch: their text encoders pad to a fixed
# length, and nothing in their transformers or UNets is cut to the longest prompt of a launch. Others get rows one by
# one: Qwen-Image pads to the longest prompt, and Z-Image and Lumina cut there inside the transformer.
BATCHED = frozenset(
    {
        "StableDiffusionPipeline",
        "StableDiffusionXLPipeline",
        "StableDiffusion3Pipeline",
        "PixArtSigmaPipeline",
        "SanaPipeline",
    }
)


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """What planning and drawing need to know of a pipeline. Sizes in pixels."""

    name: str  # its class in diffusers
    digest: str  # of the settings of all its components
    size_multiple: int
    height: int
    width: int
    num_inference_steps: int
    guidance: str  # as `model.guidance`
    guidance_key: str | None  # how its call names the scale of a row
    guidance_scale: float | None
    negative_prompts: bool
    max_sequence_length: int | None  # None: its call takes none
    arguments: frozenset[str]  # of its call

    @property
    def batched(self) -> bool:
        return self.name in BATCHED


# --- the folder -------------------------------------------------------------------------------------------------------


def describe(cfg: ModelConfig) -> PipelineFacts:
    """Read `model.path`. ConfigError for what is no text-to-image pipeline that can be drawn here."""
    folder = find_folder(cfg)
    try:
        return _facts(folder, str(cfg.path))
    except OSError as error:
        raise FluxbatchError(f"model.path={cfg.path}: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise FluxbatchError(f"model.path={cfg.path}: a .json file in it is not JSON: {error}") from error


def find_folder(cfg: ModelConfig, *, weights: bool = False) -> Path:
    """The local folder; of a hub id its snapshot in the cache, with settings only or with `weights` too."""
    if not cfg.path:
        raise ConfigError(f"model.path must name a folder or a hub id for {cfg.name}, got null")
    folder = Path(cfg.path).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(cfg.path):
        raise ConfigError(f"model.path must be a folder or a hub id (org/name), got {cfg.path!r}: no such folder")
    return _snapshot(cfg, weights=weights)


def _snapshot(cfg: ModelConfig, *, weights: bool) -> Path:
    import huggingface_hub

    try:
        snapshot = huggingface_hub.snapshot_download(
            str(cfg.path),
            revision=cfg.revision,
            allow_patterns=["model_index.json", "*/*" if weights else "*/*config*.json"],
            ignore_patterns=["*.bin", "*.msgpack", "*.h5", "*.onnx*", "*.ckpt"],
            etag_timeout=5.0,
        )
    except Exception as error:  # the client's errors have no common base; without a network it answers from its cache
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FluxbatchError(f"model.path={cfg.path}: no such folder, none to be had from the hub: {first}") from error
    return Path(snapshot)


def _facts(folder: Path, place: str) -> PipelineFacts:
    index = _index(folder, place)
    name = index["_class_name"]
    arguments = call_of(name, place)
    denoiser, vae = (_settings(folder, part, place) for part in (_denoiser(index, place), "vae"))
    pixels = _latent_pixels(vae, place)
    guidance, key = _guidance(arguments, denoiser)
    sides = [_side(arguments, denoiser, axis, pixels) for axis in (0, 1)]
    length = arguments.get("max_sequence_length")
    scale = arguments.get(key) if key else None
    return PipelineFacts(
        name=name,
        digest=_digest(folder, index),
        size_multiple=pixels * max(_patch(denoiser), _packing(denoiser, vae)),
        height=sides[0],
        width=sides[1],
        num_inference_steps=_number(arguments["num_inference_steps"]) or 50,
        guidance=guidance,
        guidance_key=key,
        guidance_scale=float(scale) if isinstance(scale, int | float) else None,
        negative_prompts="negative_prompt" in arguments
        and (guidance == "classifier_free" or "true_cfg_scale" in arguments),
        max_sequence_length=(_number(length) or 512) if "max_sequence_length" in arguments else None,
        arguments=frozenset(arguments),
    )


def _index(folder: Path, place: str) -> dict[str, Any]:
    path = folder / "model_index.json"
    if not path.is_file():
        raise ConfigError(f"model.path={place}: model_index.json is missing in {folder}")
    index = json.loads(path.read_bytes())
    name = index.get("_class_name") if isinstance(index, dict) else None
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(
            f"model.path={place}: model_index.json: _class_name must be a pipeline of diffusers, got {name!r}; "
            "code that comes with a model is never run"
        )
    if _is_there(index.get("safety_checker")):
        raise ConfigError(
            f"model.path={place}: its safety_checker paints pictures black, and a black picture is never written; "
            'such a folder is drawn with "safety_checker": [null, null] in its model_index.json'
        )
    return index


def _is_there(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and part[0] is not None


def _denoiser(index: Mapping[str, Any], place: str) -> str:
    lacking = [part for part in ("vae", "scheduler") if not _is_there(index.get(part))]
    found = [part for part in ("transformer", "unet") if _is_there(index.get(part))]
    if lacking or not found:
        needs = " and ".join([*lacking, *([] if found else ["transformer or unet"])])
        raise ConfigError(f"model.path={place}: {index['_class_name']} cannot be drawn here: it has no {needs}")
    return found[0]


def _settings(folder: Path, part: str, place: str) -> dict[str, Any]:
    path = folder / part / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={place}: {part}/config.json is missing in {folder}")
    return json.loads(path.read_bytes())


def _digest(folder: Path, index: Mapping[str, Any]) -> str:
    """Of everything that is no weight: other settings, or another scheduler, are another model."""
    said = {"model_index.json": index}
    said |= {str(path.relative_to(folder)): json.loads(path.read_bytes()) for path in folder.glob("*/*config*.json")}
    lasting = {name: {key: text[key] for key in text if key not in VOLATILE} for name, text in said.items()}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()[:12]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# --- sizes ------------------------------------------------------------------------------------------------------------


def _latent_pixels(vae: Mapping[str, Any], place: str) -> int:
    """The side of one latent in pixels: diffusers' `vae_scale_factor`, as the pipelines compute it."""
    for key in ("spatial_compression_ratio", "scale_factor_spatial"):
        if _number(vae.get(key)):
            return vae[key]
    for key in ("block_out_channels", "encoder_block_out_channels"):
        if vae.get(key):
            return 2 ** (len(vae[key]) - 1)
    if vae.get("temperal_downsample"):
        return 2 ** len(vae["temperal_downsample"])
    raise ConfigError(f"model.path={place}: vae/config.json does not say how many pixels a latent stands for")


def _patch(denoiser: Mapping[str, Any]) -> int:
    patch = denoiser.get("patch_size") or denoiser.get("all_patch_size") or 1
    return max(patch) if isinstance(patch, list) else int(patch)


def _packing(denoiser: Mapping[str, Any], vae: Mapping[str, Any]) -> int:
    """Latents down and across in one token, where the pipeline packs them before the transformer does."""
    inside, latent = denoiser.get("in_channels"), vae.get("latent_channels") or vae.get("z_dim")
    packing = math.isqrt(inside // latent) if inside and latent else 1
    return packing if inside and latent and packing**2 * latent == inside else 1


def _side(arguments: Mapping[str, Any], denoiser: Mapping[str, Any], axis: int, pixels: int) -> int:
    """What the pipeline draws where it is told no size."""
    said = _number(arguments[("height", "width")[axis]])
    sample = denoiser.get("sample_size")
    latents = _number(sample[axis] if isinstance(sample, list) else sample)
    return said or (latents * pixels if latents else 1024)


# --- guidance ---------------------------------------------------------------------------------------------------------


def _guidance(arguments: Mapping[str, Any], denoiser: Mapping[str, Any]) -> tuple[str, str | None]:
    """How a row's guidance is used, and what the call names it.

    `true_cfg_scale` is the weight of a second pass wherever a pipeline has it; beside a transformer that embeds
    guidance, `guidance_scale` is what is embedded.
    """
    if denoiser.get("guidance_embeds") and "guidance_scale" in arguments:
        return "embedded", "guidance_scale"
    if "true_cfg_scale" in arguments:
        return "classifier_free", "true_cfg_scale"
    if "guidance_scale" in arguments:
        return ("classifier_free" if "negative_prompt" in arguments else "embedded"), "guidance_scale"
    return "refused", None


# --- settings ---------------------------------------------------------------------------------------------------------

ONLY: dict[str, tuple[Any, ...]] = {  # what belongs to the FLUX families' own code
    "model.base": (None,),
    "model.loras": ([],),
    "model.random_weights": (False,),
    "model.dtype": ("bfloat16", "float32"),
    "model.text_encoder_dtype": (None,),
    "model.kernels": ("auto", "diffusers"),
    "model.quantization": ("none",),
    "model.compile": ("off",),
    "model.residency": ("auto", "resident"),
    "sampler.step_cache": ("off",),
}


def settled(cfg: JobConfig) -> JobConfig:
    """The settings with what the pipeline's folder decides filled in; unchanged for the FLUX families.

    ConfigError for a setting that the pipeline does not take.
    """
    if cfg.model.family != "diffusers":
        return cfg
    for key, allowed in ONLY.items():
        if setting(cfg, key) not in allowed:
            choices = " or ".join("null" if value is None else str(value).lower() for value in allowed)
            raise ConfigError(f"{key} must be {choices} for model={cfg.model.name}, got {setting(cfg, key)}")
    facts = describe(cfg.model)
    _refuse_untaken(cfg, facts)
    sampler = replace(
        cfg.sampler,
        height=cfg.sampler.height or facts.height,
        width=cfg.sampler.width or facts.width,
        num_inference_steps=cfg.sampler.num_inference_steps or facts.num_inference_steps,
        guidance_scale=_guidance_scale(cfg, facts),
    )
    model = replace(
        cfg.model,
        pipeline=f"{facts.name} {facts.digest}",
        guidance=facts.guidance,
        negative_prompts=facts.negative_prompts,
        size_multiple=facts.size_multiple,
        max_sequence_length=cfg.model.max_sequence_length or facts.max_sequence_length or 0,
    )
    return replace(cfg, model=model, sampler=sampler, plan=_plan(cfg, facts))


def _refuse_untaken(cfg: JobConfig, facts: PipelineFacts) -> None:
    length = cfg.model.max_sequence_length
    if length and facts.max_sequence_length is None:
        raise ConfigError(f"model.max_sequence_length must be 0, got {length}: the call of {facts.name} takes none")
    if facts.guidance == "refused" and cfg.sampler.guidance_scale not in (-1.0, 0.0):
        got = f"{cfg.sampler.guidance_scale:g}"
        raise ConfigError(f"sampler.guidance_scale must not be given, got {got}: the call of {facts.name} takes none")
    now = f"{facts.name} {facts.digest}"
    if cfg.model.pipeline not in (None, now):
        raise ConfigError(f"model.pipeline must be {now}, which is in {cfg.model.path}, got {cfg.model.pipeline}")


def _guidance_scale(cfg: JobConfig, facts: PipelineFacts) -> float:
    if facts.guidance == "refused":
        return 0.0
    if cfg.sampler.guidance_scale != -1.0:
        return cfg.sampler.guidance_scale
    if facts.guidance_scale is None:
        raise ConfigError(f"sampler.guidance_scale must be given: {facts.name} has no value of its own")
    return facts.guidance_scale


def _plan(cfg: JobConfig, facts: PipelineFacts) -> PlanConfig:
    if facts.batched:
        return cfg.plan
    if cfg.plan.batch_size not in ("auto", 1):
        raise ConfigError(
            f"plan.batch_size must be 1 or auto for {facts.name}, got {cfg.plan.batch_size}: in a larger launch its "
            "rows would depend on the length of their neighbours' prompts"
        )
    return replace(cfg.plan, batch_size=1)
