"""Question: what does a precision, or a step cache, change in the pictures of an embedded model?

python -m fluxbatch bench fidelity
python -m fluxbatch bench fidelity model=tiny_flux2

The same prompts and seeds are drawn exactly (float32, diffusers' modules, every step) and then in each variant.
`right`: the share of pictures in which the judge finds everything that the prompt asks for; `checks`: the share of
single things asked for. `psnr_db`: of all pixels together, against the exact pictures. `steps`: that were computed.
Prompts of one thing each, at random but fixed, at the model's size and steps. The embedded model is trained, so
these are pictures; of a 12 B model they say what kind of change to look for, not how large it is.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from fluxbatch import config
from fluxbatch.bench import jobs
from fluxbatch.bench.measure import table
from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError
from fluxbatch.models import Model
from fluxbatch.pipeline.loop import run_pipeline
from fluxbatch.records import Batch, BatchPlan, Bucket, Request
from fluxbatch.step_cache import SCHEDULES
from fluxbatch.tiny import FOLDERS
from fluxbatch.tiny.score import summary, verdicts
from fluxbatch.tiny.words import SCENERY
from fluxbatch.tiny.writer import Writer

COLUMNS = ("name", "right", "checks", "psnr_db", "steps")
EXACT = "float32"


@dataclass(frozen=True)
class Variant:
    """One way to draw: settings of the model and of the sampler that differ from the exact ones."""

    name: str
    model: dict[str, Any]
    sampler: dict[str, Any]


PRECISIONS = (
    Variant("bfloat16", {"dtype": "bfloat16"}, {}),
    *(Variant(name, {"quantization": name}, {}) for name in ("fp8", "int8", "fp8_weight_only", "int8_weight_only")),
)
CACHES = tuple(
    Variant(f"{name}, order {order}", {}, {"step_cache": name, "step_cache_order": order})
    for name in SCHEDULES
    for order in (1, 2)
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=64, help="prompts")
    parser.add_argument("--batch-size", type=int, default=8)


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if cfg.model.name not in FOLDERS:
        raise ConfigError(
            f"model must be {' or '.join(FOLDERS)} for bench fidelity, whose pictures are judged, got {cfg.model.name}"
        )
    bucket = jobs.bucket_of(cfg, None, None)
    rows = _requests(cfg, bucket, options.rows)
    exact_model = _loaded(cfg, Variant(EXACT, {}, {}))
    exact = _draw(exact_model, cfg, rows, bucket, options.batch_size)
    found = [_judged(EXACT, rows, exact, exact) | {"steps": bucket.num_inference_steps}]
    table(COLUMNS, found)
    for variant in (*PRECISIONS, *CACHES):
        own = replace(cfg, sampler=replace(cfg.sampler, **variant.sampler))
        model = _loaded(cfg, variant) if variant.model else exact_model
        drawn = _draw(model, own, rows, bucket, options.batch_size)
        steps = len(config.step_cache(own.sampler).computed(bucket.num_inference_steps))
        found.append(_judged(variant.name, rows, drawn, exact) | {"steps": steps})
        table(COLUMNS, found[-1:], header=False)
        yield {"bucket": bucket.name, "rows": len(rows), "batch_size": options.batch_size, "variants": found}


def _loaded(cfg: JobConfig, variant: Variant) -> Model:
    exact = replace(cfg.model, dtype="float32", kernels="auto", quantization="none", compile="off")
    model, _ = jobs.load(replace(cfg, model=replace(exact, **variant.model)))
    return model


def _requests(cfg: JobConfig, bucket: Bucket, count: int) -> list[Request]:
    """Rows that the model mostly draws right: one thing each, before a plain background."""
    writer, prompts = Writer(seed=7), list[str]()
    while len(prompts) < count:
        scene = writer.scene()
        if len(scene.things) == scene.things[0].num == 1 and scene.background not in SCENERY:
            prompts.append(writer.caption(scene))
    rows = jobs.requests(count, bucket, guidance_scale=cfg.sampler.guidance_scale)
    return [replace(row, prompt=prompt) for row, prompt in zip(rows, prompts, strict=True)]


def _draw(model: Model, cfg: JobConfig, rows: list[Request], bucket: Bucket, size: int) -> list[np.ndarray]:
    """(H, W, 3) uint8 of each row, through the pipeline as a run goes through it."""
    batches = (
        Batch(
            BatchPlan(index, 0, bucket, first, len(rows[first : first + size]), size), tuple(rows[first : first + size])
        )
        for index, first in enumerate(range(0, len(rows), size))
    )
    done = run_pipeline(
        batches,
        model,
        pipeline=cfg.pipeline,
        model_cfg=cfg.model,
        output=replace(cfg.output, image_format="png", embed_parameters=False),
        step_cache=config.step_cache(cfg.sampler),
    )
    images = [result.image for batch in done for result in batch.results]
    return [np.asarray(Image.open(io.BytesIO(image or b""))) for image in images]


def _judged(name: str, rows: list[Request], drawn: list[np.ndarray], exact: list[np.ndarray]) -> dict[str, Any]:
    seen = ((row.prompt, image.astype(np.float32) / 255) for row, image in zip(rows, drawn, strict=True))
    judged = list(verdicts(seen))
    found = summary(judged)
    checks = [right for _, each in judged for right in each.values()]
    return {
        "name": name,
        "right": round(found["right"] / max(1, found["judged"]), 4),
        "checks": round(sum(checks) / max(1, len(checks)), 4),
        "psnr_db": psnr_db(drawn, exact),
        "judged": found["judged"],
    }


def psnr_db(drawn: list[np.ndarray], exact: list[np.ndarray]) -> float | None:
    """Of all pixels together; None where they are equal."""
    squared = [np.square(a.astype(np.float64) - b).mean() for a, b in zip(drawn, exact, strict=True)]
    error = float(np.mean(squared))
    return None if error == 0 else round(10 * math.log10(255**2 / error), 2)
