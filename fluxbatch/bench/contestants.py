"""Who takes part in `peers`: diffusers' pipelines in a loop, as users run them, and fluxbatch's real job.

Each is built when it is first needed, warmed up, and then draws in turns. Knows nothing of the order of turns.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fluxbatch import config_rules
from fluxbatch.bench import jobs, recipes
from fluxbatch.bench.measure import GIB, Limit, device_of
from fluxbatch.config import JobConfig, ModelConfig
from fluxbatch.models import Model, check_model, memory
from fluxbatch.plan.cut import batch_size
from fluxbatch.records import Bucket, Request

WARM_UP_STEPS = 4  # shapes are what is compiled, not steps
MIXED_SIDES = ((1024, 1024), (768, 1344), (1344, 768), (832, 1216), (1216, 832), (512, 512))
ENDLESS_ROWS = 2**20  # of a series: enough for any batch size
FEWER_STEPS = 20 / 28  # the second step count of a mixed manifest


@dataclass(frozen=True)
class Cell:
    """What everybody draws: an endless series of rows of one bucket, or the rows of a mixed manifest."""

    cfg: JobConfig
    buckets: tuple[Bucket, ...]
    rows: tuple[Request, ...] = ()

    @classmethod
    def uniform(cls, cfg: JobConfig, bucket: Bucket) -> Cell:
        return cls(cfg, (bucket,))

    @classmethod
    def mixed(cls, cfg: JobConfig, bucket: Bucket, count: int) -> Cell:
        """`count` rows of six shapes around the bucket's size and two step counts, taken in turn."""
        steps = (bucket.num_inference_steps, max(1, round(bucket.num_inference_steps * FEWER_STEPS)))
        multiple = cfg.model.size_multiple
        sizes = [tuple(max(1, side * bucket.height // 1024 // multiple) * multiple for side in s) for s in MIXED_SIDES]
        buckets = [replace(bucket, height=h, width=w, num_inference_steps=n) for n in steps for h, w in sizes]
        guidance = cfg.sampler.guidance_scale
        rows = tuple(jobs.request(n, buckets[n % len(buckets)], guidance_scale=guidance) for n in range(count))
        return cls(cfg, tuple(buckets), rows)

    def batch_size(self, bucket: Bucket) -> int:
        """Images in one launch of this bucket, as the job will plan it."""
        num_rows = sum(_bucket_name(row) == _shape_name(bucket) for row in self.rows) or ENDLESS_ROWS
        return batch_size(bucket, self.cfg.plan, num_rows=num_rows)

    def short_shapes(self) -> dict[Bucket, int]:
        """Every launch shape at few steps, and its batch size."""
        steps = min(WARM_UP_STEPS, min(bucket.num_inference_steps for bucket in self.buckets))
        return {replace(bucket, num_inference_steps=steps): self.batch_size(bucket) for bucket in self.buckets}

    def series(self) -> Iterator[Request]:
        if self.rows:
            return itertools.cycle(self.rows)
        guidance = self.cfg.sampler.guidance_scale
        return (jobs.request(n, self.buckets[0], guidance_scale=guidance) for n in itertools.count())

    def first_rows(self, count: int) -> list[Request]:
        return list(itertools.islice(self.series(), count))

    def rows_of(self, bucket: Bucket, count: int) -> list[Request]:
        return jobs.requests(count, bucket, guidance_scale=self.cfg.sampler.guidance_scale)


@dataclass
class Turn:
    """What one turn drew: images and steady seconds of each bucket; `detail` is the contestant's own."""

    images: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    detail: dict[str, Any] = field(default_factory=dict)

    def add(self, bucket: str, images: int, seconds: float) -> None:
        self.images[bucket] += images
        self.seconds[bucket] += seconds


class Contestant(Protocol):
    name: str
    kind: str  # lossless, quantised, cached
    peak_bytes: int  # its launches' highest, where they reset the allocator's own figure; 0 where they do not

    def missing(self) -> str | None:
        """Why it cannot take part here; None where it can."""

    def build(self) -> None:
        """Weights on the device."""

    def warm_up(self) -> None:
        """Draw every shape once; whatever compiles does so here."""

    def turn(self, seconds: float, limit: Limit) -> Turn:
        """Draw for so many seconds, images on disk."""

    def resident_bytes(self) -> int | None:
        """Of its weights, shared ones too; None: what the device's allocator gave while it was built."""

    def close(self) -> None:
        """Let go of everything on the device."""


class Shelf:
    """Owns the components that diffusers' contestants share: one set a dtype, made when first asked for."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Any]] = {}

    def clear(self) -> None:
        self._parts.clear()

    def parts(self, cfg: ModelConfig) -> dict[str, Any]:
        if cfg.dtype not in self._parts:
            self._parts[cfg.dtype] = recipes.components(cfg)
        return dict(self._parts[cfg.dtype])


class DiffusersLoop:
    """One image after another: `pipe(prompt, ...).images[0].save(path)`."""

    def __init__(
        self,
        name: str,
        kind: str,
        cell: Cell,
        shelf: Shelf,
        folder: Path,
        *,
        recipe: Callable[[Any], None] | None = None,
        needs: Sequence[str] = (),
        compiling: Callable[[], AbstractContextManager[Any]] = nullcontext,
        dtype: str | None = None,
    ) -> None:
        self.name, self.kind, self.peak_bytes = name, kind, 0
        self._cell, self._shelf, self._folder = cell, shelf, folder / name
        self._recipe, self._needs, self._compiling = recipe, needs, compiling
        self._cfg = cell.cfg.model if dtype is None else replace(
            cell.cfg.model, dtype=dtype, text_encoder_dtype=dtype, vae_dtype=dtype
        )  # fmt: skip
        self._pipe: Any = None
        self._drawn = 0

    def missing(self) -> str | None:
        if self._recipe and device_of(self._cell.cfg).type != "cuda":
            return "needs a CUDA device"
        if "fp8" in self._needs and not has_fp8(device_of(self._cell.cfg)):
            return "needs a GPU with FP8 (Ada, Hopper or later)"
        absent = [name for name in self._needs if name != "fp8" and importlib.util.find_spec(name) is None]
        return f"{absent[0]} is not installed" if absent else None

    def build(self) -> None:
        self._folder.mkdir(exist_ok=True)
        parts = self._shelf.parts(self._cfg)
        if self._recipe:
            parts["transformer"] = recipes.sharing_weights(parts["transformer"])
        self._pipe = recipes.pipeline(self._cfg, parts)
        if self._recipe:
            self._recipe(self._pipe)

    def warm_up(self) -> None:
        with self._compiling():
            for shape in self._cell.short_shapes():
                self._draw(*self._cell.rows_of(shape, 1))

    def turn(self, seconds: float, limit: Limit) -> Turn:
        turn, save_s = Turn(), 0.0
        ends_s = time.perf_counter() + min(seconds, limit.left_s())
        for row in self._cell.series():
            start_s = time.perf_counter()
            save_s += self._draw(row)
            now_s = time.perf_counter()
            turn.add(_bucket_name(row), 1, now_s - start_s)
            if now_s >= ends_s:
                break
        turn.detail["save_ms_per_image"] = round(1e3 * save_s / sum(turn.images.values()), 1)
        return turn

    def _draw(self, row: Request) -> float:
        """One image on disk; the seconds that saving took."""
        image = self._pipe(
            prompt=row.prompt,
            height=row.height,
            width=row.width,
            num_inference_steps=row.num_inference_steps,
            guidance_scale=row.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(row.seed),
            max_sequence_length=self._cfg.max_sequence_length,
        ).images[0]
        start_s = time.perf_counter()
        image.save(self._folder / f"{self._drawn:06d}.png")
        self._drawn += 1
        return time.perf_counter() - start_s

    def resident_bytes(self) -> int | None:
        return recipes.resident_bytes(self._pipe)

    def close(self) -> None:
        self._pipe = None


class Fluxbatch:
    """The real job: manifest, plan, pipeline, shards and report on disk, with the model loaded once."""

    def __init__(
        self, name: str, kind: str, cell: Cell, folder: Path, *, quantization: str | None = None, alone: bool = False
    ) -> None:
        self.name, self.kind, self.peak_bytes = name, kind, 0
        model_cfg = cell.cfg.model if quantization is None else replace(cell.cfg.model, quantization=quantization)
        if not alone:
            model_cfg = among_others(model_cfg, device_of(cell.cfg))
        self._cell, self._cfg, self._folder = cell, replace(cell.cfg, model=model_cfg), folder / name
        self._model: Model | None = None
        self._s_per_image = math.inf

    def missing(self) -> str | None:
        return None  # what cannot be had is refused when it is built, in the words that a run has for it

    def build(self) -> None:
        config_rules.check(self._cfg)
        check_model(self._cfg.model)
        self._folder.mkdir(exist_ok=True)
        self._model, _ = jobs.load(self._cfg)

    def warm_up(self) -> None:
        """A job of two batches for each shape; from the last batch's stages it is known how long one takes."""
        for shape, size in self._cell.short_shapes().items():
            cfg = jobs.with_batch_size(self._cfg, size)
            done = self._run(cfg, self._cell.rows_of(shape, 2 * size))
        last, bucket = done.lines[-1], self._cell.buckets[-1]
        step_ms = last["denoise_ms"] / last["num_inference_steps"]
        batch_ms = step_ms * bucket.num_inference_steps + last["decode_ms"] + last["encode_ms"]
        self._s_per_image = batch_ms / 1e3 / size

    def turn(self, seconds: float, limit: Limit) -> Turn:
        rows = self._cell.rows or self._rows_for(min(seconds, limit.left_s()))
        done = self._run(self._cfg, rows)
        images, steady_s = done.whole() if self._cell.rows else done.steady()
        turn = Turn(detail={"whole_job_s": round(done.wall_s, 2), **jobs.stage_figures(done.lines[1:] or done.lines)})
        turn.add(self._cell.buckets[0].name if not self._cell.rows else "", images, steady_s)
        if images:
            self._s_per_image = steady_s / images
        return turn

    def _run(self, cfg: JobConfig, rows: Sequence[Request]) -> jobs.JobRun:
        assert self._model is not None
        done = jobs.run(cfg, self._model, rows, self._folder)
        self.peak_bytes = max(self.peak_bytes, int((done.peak_gib or 0) * GIB))
        return done

    def _rows_for(self, seconds: float) -> list[Request]:
        """One batch to fill the pipeline, and enough of them for the time; at least three."""
        size = self._cell.batch_size(self._cell.buckets[0])
        batches = 1 + max(2, math.ceil(max(0.0, seconds) / (self._s_per_image * size)))
        return self._cell.first_rows(batches * size)

    def resident_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        self._model = None


def among_others(cfg: ModelConfig, device: torch.device) -> ModelConfig:
    """With the whole card as its budget, which is enforced on this process: other contestants stand in it too."""
    if device.type != "cuda" or cfg.memory_budget_gib is not None:
        return cfg
    return replace(cfg, memory_budget_gib=memory.budget(device, wanted_gib=None).total_gib)


def has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _shape_name(bucket: Bucket) -> str:
    """Of its rows, whose columns do not say whether there is a second pass."""
    return replace(bucket, negative_pass=False).name


def _bucket_name(row: Request) -> str:
    return f"{row.height}x{row.width}-{row.num_inference_steps}"
