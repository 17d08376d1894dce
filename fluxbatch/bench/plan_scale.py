"""Question: how much memory and time does a manifest of millions of rows take until its plan stands?

python -m fluxbatch bench plan_scale --rows 10000000 [--words 25] [--group-rows 1000000] [--folder /scratch]

Writes a manifest of prompts of `--words` words (25: 200 characters), 6 shapes, ids and seeds, then measures each step
in a process of its own: `imports` (the floor of memory), `survey` (the verb plan), `prepare` (the first start),
`unchanged` (the next one), `compare` (a start after the manifest was touched) and `first_batch` (from the plan's footer
to one batch of requests).
Memory is the peak resident set of that process. Where others use the machine too, trust CPU seconds. No warm-up; the
manifest is warm in the page cache. Excluded: writing it. Takes no settings but manifest.memory_gib.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fluxbatch.config import JobConfig, ManifestConfig
from fluxbatch.manifest.files import open_manifest
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.plan.planner import prepare, survey
from fluxbatch.records import RowRules
from fluxbatch.storage.folder import RunFolder

SHAPES = ((1024, 1024), (768, 1344), (1344, 768), (832, 1216), (1216, 832), (512, 512))
WORDS = 4096  # of 7 letters and a space
WRITE_ROWS = 250_000
RULES = RowRules(
    height=1024, width=1024, num_inference_steps=28, guidance_scale=3.5, seed=0, size_multiple=16, max_pixels=2**22,
    max_side=2**31 - 1, size_policy="reject", allow_blank_prompts=False, guidance="embedded", negative_prompts=True,
)  # fmt: skip


def write_manifest(path: Path, *, num_rows: int, group_rows: int, words: int = 25) -> None:
    """Rows of `words` random words, written in row groups of `group_rows`."""
    rng = np.random.default_rng(0)
    letters = rng.integers(ord("a"), ord("z") + 1, (WORDS, 8), dtype=np.uint8)
    letters[:, 7] = ord(" ")
    schema = pa.schema(
        {"id": pa.string(), "prompt": pa.string()} | dict.fromkeys(["height", "width", "seed"], pa.int64())
    )
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=["height", "width"]) as writer:
        for first in range(0, num_rows, group_rows):
            steps = range(first, min(first + group_rows, num_rows), min(group_rows, WRITE_ROWS))
            parts = [_rows(rng, letters, words, at, min(steps.step, steps.stop - at)) for at in steps]
            writer.write_table(pa.concat_tables(parts).cast(schema), row_group_size=group_rows)


def _rows(rng: np.random.Generator, letters: np.ndarray, words: int, first: int, num_rows: int) -> pa.Table:
    text = letters[rng.integers(WORDS, size=(num_rows, words))]
    ends = np.arange(num_rows + 1, dtype=np.int32) * (words * letters.shape[1])
    shapes = np.array(SHAPES)[rng.integers(len(SHAPES), size=num_rows)]
    row = np.arange(first, first + num_rows)
    return pa.table(
        {
            "id": np.char.add("prompt-", np.char.zfill(row.astype(str), 9)),
            "prompt": pa.StringArray.from_buffers(num_rows, pa.py_buffer(ends), pa.py_buffer(text.tobytes())),
            "height": shapes[:, 0],
            "width": shapes[:, 1],
            "seed": row,
        }
    )


def _imports(cfg: JobConfig, folder: RunFolder) -> None:
    """Nothing: what the libraries take by themselves."""


def _survey(cfg: JobConfig, folder: RunFolder) -> None:
    survey(open_manifest(cfg.manifest), RULES, cfg)


def _prepare(cfg: JobConfig, folder: RunFolder) -> None:
    prepare(folder, open_manifest(cfg.manifest), RULES, cfg)


def _first_batch(cfg: JobConfig, folder: RunFolder) -> None:
    plan = RunPlan.open(folder)
    assert plan is not None
    plan.batch(plan.shard(0).batches[0])


def _compare(cfg: JobConfig, folder: RunFolder) -> None:
    Path(cfg.manifest.path).touch()
    _prepare(cfg, folder)


Step = Callable[[JobConfig, RunFolder], None]
STEPS: dict[str, Step] = {
    "imports": _imports,
    "survey": _survey,
    "prepare": _prepare,
    "first_batch": _first_batch,
    "unchanged": _prepare,
    "compare": _compare,
}
PASSES = ("survey", "prepare", "compare")  # the steps that read all rows


def measured(step: Step, cfg: JobConfig, folder: RunFolder) -> dict[str, float]:
    """Seconds on the clock and of the processor, and peak memory, of one step in this process."""
    began, before = time.perf_counter(), time.process_time()
    step(cfg, folder)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - before
    return {"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3), "peak_rss_mib": peak_mib}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--words", type=int, default=25, help="words of 8 characters in a prompt")
    parser.add_argument("--group-rows", type=int, default=1_000_000, help="rows in one row group of the manifest")
    parser.add_argument("--folder", type=Path, help="where the manifest and the plan go; default: a temporary folder")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        manifest, folder = Path(scratch) / "manifest.parquet", RunFolder(Path(scratch) / "run")
        with spawn.Pool(1) as pool:
            sizes = {"num_rows": options.rows, "group_rows": options.group_rows, "words": options.words}
            pool.apply(write_manifest, (manifest,), sizes)
        job = JobConfig(manifest=ManifestConfig(path=str(manifest), memory_gib=cfg.manifest.memory_gib))
        result: dict[str, Any] = {"rows": options.rows, "words": options.words, "group_rows": options.group_rows,
                                  "memory_gib": cfg.manifest.memory_gib}  # fmt: skip
        result["manifest_mib"] = manifest.stat().st_size // 2**20
        print(f"{'step':12} {'seconds':>9} {'CPU s':>9} {'peak MiB':>9} {'rows/s':>10}")
        for name, step in STEPS.items():
            with spawn.Pool(1) as pool:
                found = pool.apply(measured, (step, job, folder))
            rate = f"{options.rows / found['wall_s']:10,.0f}" if name in PASSES else ""
            print(
                f"{name:12} {found['wall_s']:9.2f} {found['cpu_s']:9.2f} {found['peak_rss_mib']:9,} {rate}", flush=True
            )
            result[name] = found
            yield result
        result["plan_mib"] = folder.plan().stat().st_size // 2**20
    yield result
