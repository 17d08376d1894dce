"""Any other text-to-image pipeline of diffusers, called whole: its text encoders, sampler and VAE are its own affair.

What is ours: one CPU generator a row, the rows' prompts encoded one by one, and a look at what goes into the VAE's
decoder and comes out of it. Knows nothing of where rows come from or go to.

Legend: B rows of one call, C channels, H W pixels.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import diffusers
import torch
import transformers
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn

from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError, FluxbatchError, first_line
from fluxbatch.model_folder import PipelineFacts, describe, find_folder
from fluxbatch.models import Seams, Tokens, loading, memory
from fluxbatch.models.trust import refuse_code
from fluxbatch.pipeline_call import CALLBACKS
from fluxbatch.records import Bucket, Request

logger = logging.getLogger("fluxbatch")

HOMES: dict[str, Any] = {"diffusers": diffusers, "transformers": transformers}


class WholePipeline:
    """A diffusers pipeline on its device. One thread at a time may draw with it; `tokenize` may be another one."""

    def __init__(
        self,
        pipeline: Any,
        facts: PipelineFacts,
        *,
        name: str,
        max_sequence_length: int | None,
        true_cfg_scale: float,
    ) -> None:
        self.name = name
        self.device: torch.device = pipeline.vae.device
        self.dtype: torch.dtype = (getattr(pipeline, "transformer", None) or pipeline.unet).dtype
        self.vae_dtype: torch.dtype = pipeline.vae.dtype
        self.sampler = type(pipeline.scheduler).__name__.removesuffix("Scheduler")
        self._pipeline = pipeline
        self._facts = facts
        self._max_sequence_length = max_sequence_length
        self._true_cfg_scale = true_cfg_scale
        self._decode = pipeline.vae.decode
        self._encode_prompt: Any = pipeline.encode_prompt if facts.batched else None
        # The launch thread's tokenizer cannot be called here too: one that is busy raises "Already borrowed".
        self._tokenizer = copy.deepcopy(_longest_tokenizer(pipeline))
        pipeline.set_progress_bar_config(disable=True)

    @classmethod
    def load(cls, cfg: ModelConfig, *, true_cfg_scale: float) -> Self:
        placement = loading.place(cfg)
        if placement.device.type == "cuda":
            memory.enforce(memory.budget(placement.device, wanted_gib=cfg.memory_budget_gib), placement.device)
        facts = describe(cfg)
        pipeline = _stored(facts, find_folder(cfg, weights=True), placement)
        own = getattr(pipeline, "vae_scale_factor", 1)
        if facts.size_multiple % own:
            raise ConfigError(
                f"model.path={cfg.path}: {facts.name} has latents of {own} pixels, which do not divide the "
                f"{facts.size_multiple} that follow from its settings"
            )
        logger.info(
            "%s: %s, %s, %s", cfg.name, facts.name, type(pipeline.scheduler).__name__,
            "rows share a call" if facts.batched else "a call a row",
        )  # fmt: skip
        length = cfg.max_sequence_length or facts.max_sequence_length
        return cls(pipeline, facts, name=cfg.name, max_sequence_length=length, true_cfg_scale=true_cfg_scale)

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        """No tokens: the call makes them. Only which prompts are longer than the longest text encoder reads.

        Words that a chat template adds are not counted.
        """
        if self._tokenizer is None:
            return Tokens({}, (False,) * len(prompts))
        limit = self._max_sequence_length or self._tokenizer.model_max_length
        lengths = [len(self._tokenizer(prompt, verbose=False).input_ids) for prompt in prompts]
        return Tokens({}, tuple(length > limit for length in lengths))

    def noise_shape(self, *, height: int, width: int) -> tuple[int, ...]:
        """None: the call draws it, from each row's generator."""
        return (0,)

    def draw(self, rows: Sequence[Request], *, bucket: Bucket, seams: Seams) -> Tensor:
        """Pixels (B, 3, H, W) in [0, 1]: what the pipeline gives for each row alone, with its seed on the CPU."""

        def step_ended(*_: object) -> dict[str, Any]:
            seams.before_step()
            return {}

        self._pipeline.vae.decode = self._seen_by(seams)
        if self._facts.batched:
            none = inspect.signature(self._pipeline.__call__).parameters["negative_prompt"].default
            self._pipeline.encode_prompt = _row_by_row(self._encode_prompt, rows, no_negative=none)
        seams.before_step()
        return self._pipeline(
            **self._arguments(rows, bucket),
            generator=[torch.Generator("cpu").manual_seed(row.seed) for row in rows],
            **{CALLBACKS[0] if CALLBACKS[0] in self._facts.arguments else CALLBACKS[1]: step_ended},
            output_type="pt",
            return_dict=False,
        )[0]

    def _seen_by(self, seams: Seams) -> Callable[..., Any]:
        """The VAE's decoder as the pipeline calls it, through the seams."""

        def decode(latents: Tensor, *arguments: Any, return_dict: bool = True, **options: Any) -> Any:
            def launch(part: Tensor) -> Tensor:
                return self._decode(part.to(self.vae_dtype), *arguments, **options, return_dict=False)[0]

            image = seams.decode(launch, latents)
            return DecoderOutput(sample=image) if return_dict else (image,)

        return decode

    def _arguments(self, rows: Sequence[Request], bucket: Bucket) -> dict[str, Any]:
        facts = self._facts
        arguments: dict[str, Any] = {
            "prompt": [row.prompt for row in rows],
            "height": bucket.height,
            "width": bucket.width,
            "num_inference_steps": bucket.num_inference_steps,
        }
        if facts.guidance_key:
            arguments[facts.guidance_key] = bucket.guidance_scale
        if bucket.negative_pass and facts.negative_prompts:
            arguments |= self._negatives(rows)
        if self._max_sequence_length and facts.max_sequence_length:
            arguments["max_sequence_length"] = self._max_sequence_length
        if "use_resolution_binning" in facts.arguments:  # else it draws another size and stretches the picture
            arguments["use_resolution_binning"] = False
        return arguments

    def _negatives(self, rows: Sequence[Request]) -> dict[str, Any]:
        """Where no row has one, a pipeline has its own way; one with `true_cfg_scale` would then run no second pass."""
        said = any(row.negative_prompt for row in rows)
        if not said and self._facts.guidance_key != "true_cfg_scale":
            return {}
        arguments: dict[str, Any] = {"negative_prompt": [row.negative_prompt or "" for row in rows]}
        if self._facts.guidance == "embedded":
            arguments["true_cfg_scale"] = self._true_cfg_scale
        return arguments


def _row_by_row(
    encode_prompt: Callable[..., Any], rows: Sequence[Request], *, no_negative: str | None
) -> Callable[..., Any]:
    """The pipeline's own encoding, a row at a time: neither masks nor kernels of a text encoder see a neighbour.

    A row without a negative prompt gets what the call has where it is given none, whatever its neighbours have.
    """
    signature = inspect.signature(encode_prompt)

    def texts(row: Request) -> dict[str, Any]:
        negative = [row.negative_prompt] if row.negative_prompt else no_negative
        return {"prompt": [row.prompt], "negative_prompt": negative}

    def encode(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        assert "negative_prompt" in given, "all batched pipelines pass it on"
        encoded = [encode_prompt(**{**given, **texts(row)}) for row in rows]
        return tuple(_joined(parts) for parts in zip(*encoded, strict=True))

    return encode


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None


def _longest_tokenizer(pipeline: Any) -> Any:
    """Of the encoder with the largest number, which is the one that reads most: T5 in SD3, the only one in others."""
    names = sorted(name for name in pipeline.components if name.startswith("tokenizer"))
    return next((tokenizer for name in reversed(names) if (tokenizer := pipeline.components[name]) is not None), None)


# --- loading ----------------------------------------------------------------------------------------------------------


def check(cfg: ModelConfig) -> None:
    """Refuse a folder that could run code, names classes that are not there, or lacks weights as safetensors."""
    facts = describe(cfg)
    now = f"{facts.name} {facts.digest}"
    if cfg.pipeline not in (None, now):
        raise ConfigError(f"model.path={cfg.path}: it holds {now} now; the settings here are of {cfg.pipeline}")
    folder = find_folder(cfg, weights=True)
    index = _index(folder)
    refuse_code(folder, index=index)
    for part, component in _components(folder, index).items():
        if issubclass(component, nn.Module) and not any((folder / part).glob("*.safetensors")):
            raise ConfigError(f"model.path={cfg.path}: {part} has no weights as safetensors in {folder}")


def _index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model_index.json").read_bytes())


def _components(folder: Path, index: dict[str, Any]) -> dict[str, type]:
    """The class of each component, by its subfolder."""
    found: dict[str, type] = {}
    for part, home in index.items():
        if isinstance(home, list) and home and home[0] is not None:
            library, name = home
            component = getattr(HOMES[library], name, None)
            if not isinstance(component, type):
                raise ConfigError(f"model.path={folder}: model_index.json: {part}: {library} has no {name} here")
            found[part] = component
    return found


def _stored(facts: PipelineFacts, folder: Path, placement: loading.Placement) -> Any:
    """The pipeline on its device: weights by `loading.stored`, which misses no tensor; the rest as diffusers does."""
    modules = {
        part: loading.stored(
            component,
            folder,
            subfolder=part,
            dtype=placement.vae_dtype if part == "vae" else placement.dtype,
            device=placement.device,
        )
        for part, component in _components(folder, _index(folder)).items()
        if issubclass(component, nn.Module)
    }
    try:
        return getattr(diffusers, facts.name).from_pretrained(folder, local_files_only=True, **modules)
    except (OSError, ValueError) as error:
        raise FluxbatchError(f"model.path={folder} cannot be loaded: {first_line(error)}") from error
