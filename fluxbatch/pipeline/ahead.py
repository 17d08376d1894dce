"""Which packages the launches of a job need, and making those that are not there. Reads no weights, draws nothing.

A launch is rehearsed on tensors that have a shape and no numbers, so that its parts are met exactly as a run calls
them; what each was called with is a package. Only then the compiler is asked, for modules of random weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from fluxbatch.config import ModelConfig
from fluxbatch.errors import ConfigError
from fluxbatch.models import Blueprint, blueprint, compile_cache, loading
from fluxbatch.models.aot.packages import Wanted
from fluxbatch.models.aot.parts import Call, Part
from fluxbatch.pipeline.decode import decode
from fluxbatch.pipeline.denoise import denoise
from fluxbatch.records import Bucket

logger = logging.getLogger("fluxbatch")

Launch = tuple[Bucket, int]  # and the images in it


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a job's launches need: packages that were there, and those that were made."""

    found: tuple[Wanted, ...]
    made: tuple[Wanted, ...]


def settle(cfg: ModelConfig, launches: Iterable[Launch]) -> None:
    """Before a run: all packages are there, or `model.aot_missing=build` makes them, or ConfigError."""
    if cfg.compile != "aot":
        return
    if cfg.aot_missing == "build":
        prepare(cfg, launches)
        return
    missing = [(package, why) for package in needed(cfg, launches) if (why := package.problem())]
    if missing:
        package, why = missing[0]
        others = f" and {len(missing) - 1} more packages" if missing[1:] else ""
        raise ConfigError(
            f"model.compile=aot lacks {package}{others} ({why}): `python -m fluxbatch compile` with the same settings "
            "makes them, so does model.aot_missing=build at the start of a run"
        )


def prepare(cfg: ModelConfig, launches: Iterable[Launch]) -> Prepared:
    """Make every package that these launches need and that is not there, or not sound."""
    wanted = needed(cfg, launches)
    problems = {package.path: package.problem() for package in wanted}
    missing = [package for package in wanted if problems[package.path]]
    if missing:
        from fluxbatch.models.aot.build import build  # the compilers take seconds to import

        device = loading.place(cfg).device
        modules = {part.name: part.modules[0] for part in blueprint(cfg)[1]}
        for package in missing:
            logger.info("%s: %s", package, problems[package.path])
            build(package, modules[package.part.name], device=device)
    return Prepared(tuple(package for package in wanted if not problems[package.path]), tuple(missing))


def needed(cfg: ModelConfig, launches: Iterable[Launch]) -> list[Wanted]:
    """The packages of these launches, each once, in the order in which a run would load them."""
    compile_cache.keep_compiled(cfg, loading.place(cfg).device, os.environ)  # before diffusers imports Inductor
    loading.quiet_libraries()
    loading.fix_cpu_threads(cfg)
    folder, device = compile_cache.packages_folder(cfg, os.environ), loading.place(cfg).device
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model, parts = blueprint(cfg)
        met = _rehearse(model, parts, sorted(set(launches), key=str), decode_max_pixels=cfg.decode_max_pixels)
        return _packages(met, folder=folder, device=device)


def _packages(met: Sequence[tuple[Part, Call]], *, folder: Path, device: torch.device) -> list[Wanted]:
    found = [Wanted.of(part, call, folder=folder, device=device) for part, call in met]
    return list({package.path: package for package in found}.values())


def _rehearse(
    model: Blueprint, parts: Sequence[Part], launches: Sequence[Launch], *, decode_max_pixels: int
) -> list[tuple[Part, Call]]:
    """What each part is called with, in order."""
    met: list[tuple[Part, Call]] = []
    for part in parts:
        for module in part.modules:
            module.forward = partial(_noted, met, part, module.forward)  # type: ignore[method-assign]
    for bucket, size in launches:
        one_step = replace(bucket, num_inference_steps=1)
        with unset_fake_temporarily():
            model.schedule(one_step)  # diffusers' scheduler looks at its numbers
        embeds = model.blank_embeds(size)
        shape = (size, *model.noise_shape(height=bucket.height, width=bucket.width))
        latents = denoise(
            model,
            torch.zeros(shape, device=model.device),
            embeds=embeds,
            negative_embeds=embeds if bucket.negative_pass else None,
            guidance=torch.ones(size, device=model.device),
            bucket=one_step,
            before_step=lambda: None,
        )
        decode(model, latents, bucket=bucket, max_pixels=decode_max_pixels)
    return met


def _noted(met: list[tuple[Part, Call]], part: Part, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    met.append((part, Call.of(args, kwargs)))
    return forward(*args, **kwargs)
