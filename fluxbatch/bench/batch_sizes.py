"""Question: is the batch size that plan.batch_size=auto takes about as fast as the best of a sweep?

python -m fluxbatch bench batch_sizes model=flux1_dev model.random_weights=true --sizes 1024x1024 512x512 --up-to 16

For each size `auto` first measures as a start does, remembering nothing, for a bucket of many rows. Then one cached
batch of 1, 2, 4, ... images is drawn again and again (see `headspace`), in two turns, up and down, so that every batch
size sees the same temperatures; so is the size that `auto` took. `percent_of_best` compares these. Warm-up: two
batches of each. Excluded: text encoding, files, and whatever a job overlaps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fluxbatch.bench import jobs
from fluxbatch.bench.headspace import CachedBatch
from fluxbatch.bench.measure import Limit, free_memory, table
from fluxbatch.config import JobConfig
from fluxbatch.models import Model, memory
from fluxbatch.pipeline.measure import LaunchMeter
from fluxbatch.plan.batch_size import Machine, MeasuredSizes
from fluxbatch.records import Bucket
from fluxbatch.user_cache import VARIABLE

MANY_ROWS = 100_000
COLUMNS = ("size", "steps", "batch", "s/image", "% of best")


def add_options(parser: argparse.ArgumentParser) -> None:
    jobs.add_shape_options(parser)
    parser.add_argument("--up-to", type=int, default=16, help="the largest batch of the sweep, a power of two")
    parser.add_argument("--seconds", type=float, default=4, help="of replay, each turn of each batch size")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    limit = Limit(options.limit_s)
    cfg = replace(cfg, plan=replace(cfg.plan, batch_size="auto"))
    model, load_s = jobs.load(cfg)
    figures: dict[str, Any] = {"load_s": load_s, "cells": []}
    table(COLUMNS, [])
    for bucket in jobs.buckets_of(cfg, options):
        if limit.over:
            return
        cell = _chosen(model, cfg, bucket)
        sizes = _sweep(options.up_to, cell["batch_size"])
        cell["s_per_image"] = _seconds(model, cfg, bucket, sizes, seconds=options.seconds)
        cell["percent_of_best"] = percent_of_best(cell["s_per_image"], cell["batch_size"])
        table(COLUMNS, _rows(cell), header=False)
        print(f"auto took {cell['batch_size']} in {cell['search_s']} s: {cell['percent_of_best']} % of the best")
        figures["cells"].append(cell)
        yield figures


def _chosen(model: Model, cfg: JobConfig, bucket: Bucket) -> dict[str, Any]:
    """What a start that remembers nothing would take, and the seconds that this takes it."""
    meter = LaunchMeter(model, model_cfg=cfg.model, pipeline=cfg.pipeline, check=lambda: None)
    began = time.perf_counter()
    with _nothing_remembered():
        size = MeasuredSizes(cfg, _machine(model, cfg), meter)(bucket, MANY_ROWS)
    return {
        "size": bucket.name, "steps": bucket.num_inference_steps, "batch_size": size,
        "search_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


@contextmanager
def _nothing_remembered() -> Iterator[None]:
    usual = os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="fluxbatch-bench-") as folder:
        os.environ[VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.pop(VARIABLE)
            if usual is not None:
                os.environ[VARIABLE] = usual


def _machine(model: Model, cfg: JobConfig) -> Machine:
    if model.device.type != "cuda":
        return Machine(gpu="cpu", memory_gib=0.0, budget_gib=float("inf"))
    budget = memory.budget(str(model.device), wanted_gib=cfg.model.memory_budget_gib)
    return Machine(gpu=budget.gpu, memory_gib=budget.total_gib, budget_gib=budget.budget_gib)


def _sweep(up_to: int, chosen: int) -> list[int]:
    return sorted({chosen, *(2**power for power in range(up_to.bit_length()) if 2**power <= up_to)})


def _seconds(model: Model, cfg: JobConfig, bucket: Bucket, sizes: list[int], *, seconds: float) -> dict[int, float]:
    """Seconds an image of each batch size that fits: the mean of one turn upwards and one downwards."""
    turns: dict[int, list[float]] = {}
    for size in [*sizes, *sizes[::-1]]:
        free_memory(model.device)
        try:
            replay = CachedBatch(model, bucket, cfg, size=size).replay(seconds=seconds)
        except torch.OutOfMemoryError:
            continue
        turns.setdefault(size, []).append(replay["s_per_image"])
    return {size: round(sum(found) / len(found), 5) for size, found in turns.items()}


def percent_of_best(s_per_image: dict[int, float], chosen: int) -> float:
    return round(100 * min(s_per_image.values()) / s_per_image[chosen], 2)


def _rows(cell: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for size, seconds in sorted(cell["s_per_image"].items()):
        percent = percent_of_best(cell["s_per_image"], size)
        yield {
            "size": cell["size"], "steps": cell["steps"], "batch": size, "s/image": seconds, "% of best": percent,
        }  # fmt: skip
