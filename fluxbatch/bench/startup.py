"""Question: how long from the start of a process to its first image on disk, and how fast is a step from then on?

python -m fluxbatch bench startup model=flux1_dev model.random_weights=true --size 1024x1024 --steps 8
python -m fluxbatch bench startup model=flux2_klein_base_9b model.random_weights=true --nvfp4-file --cells fused,eager

Each cell is the real command in a process of its own, in a run folder of its own: `eager` (diffusers' modules),
`fused` (our kernels, nothing in their cache), `fused_again`, `regional` (compiled at the first launch, nothing in the
cache), `regional_again`, and `aot`, whose packages `python -m fluxbatch compile` makes before it, timed by itself.
A cell's first image is on disk when its first batch is committed. A step is the median over the later batches, between
CUDA events. Peaks: of the whole process on the host, of its tensors on the GPU. No warm-up, that is the question;
files of weights and Python's own are in the page cache from the cell before, except for the first one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from fluxbatch.bench import jobs
from fluxbatch.bench.measure import Limit, device_of, free_memory, table
from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError
from fluxbatch.models.compile_cache import VARIABLES
from fluxbatch.storage.folder import RunFolder

COLUMNS = ("name", "first image s", "step ms", "job s", "host GiB", "own host GiB", "device GiB", "compile s")
# Cells of one recipe share a cache, in this order.
RECIPES = {
    "eager": ("diffusers", "off"),
    "fused": ("fused", "off"),
    "fused_again": ("fused", "off"),
    "regional": ("diffusers", "regional"),
    "regional_again": ("diffusers", "regional"),
    "aot": ("diffusers", "aot"),
}
BATCHES = 3
LOOK_S = 0.02


def add_options(parser: argparse.ArgumentParser) -> None:
    jobs.add_shape_options(parser, sizes=False)
    parser.set_defaults(batch_size=1)
    parser.add_argument("--cells", default=",".join(RECIPES), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--nvfp4-file", action="store_true", help="write a FLUX.2 with an NVFP4 transformer, load that")
    parser.add_argument("--folder", type=Path, help="of the jobs and their caches; default: a temporary folder")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cells = options.cells.split(",")
    if not set(cells) <= set(RECIPES):
        raise ConfigError(f"--cells must be of {', '.join(RECIPES)}, got {options.cells}")
    limit, size = Limit(options.limit_s), jobs.batch_size(cfg, options)
    bucket = jobs.bucket_of(cfg, options.size, options.steps)
    figures: dict[str, Any] = {"bucket": bucket.name, "batch_size": size, "batches": BATCHES, "cells": {}}
    table(COLUMNS, [])
    with jobs.scratch(options.folder) as folder:
        rows = jobs.requests(BATCHES * size, bucket, guidance_scale=cfg.sampler.guidance_scale)
        jobs.write_manifest(folder / "rows.parquet", rows)
        if options.nvfp4_file:
            cfg, figures["file"] = _stored(cfg, folder)
        _write_job(jobs.with_batch_size(cfg, size), folder)
        for name in cells:
            if limit.over:
                break
            figures["cells"][name] = cell = _cell(name, folder, steps=bucket.num_inference_steps)
            table(COLUMNS, [{"name": name, **cell}], header=False)
            if "error" in cell:
                print(f"{name}: {cell['error']}")
            yield figures


def _stored(cfg: JobConfig, folder: Path) -> tuple[JobConfig, dict[str, Any]]:
    """The settings with stored weights in the place of random ones, and how large the file with the transformer is."""
    from fluxbatch.bench.stored import write_flux2  # imports diffusers
    from fluxbatch.models import loading
    from fluxbatch.models.flux2 import RANDOM

    if cfg.model.family != "flux2":
        raise ConfigError(f"model must be of FLUX.2 for --nvfp4-file, got {cfg.model.name}")
    settings = loading.random_config(RANDOM, cfg.model)
    base, began = folder / "weights", time.perf_counter()
    file = write_flux2(base, settings, distilled=cfg.model.guidance == "none", device=device_of(cfg))
    free_memory(device_of(cfg))
    said = {"gib": round(file.stat().st_size / 2**30, 2), "written_s": round(time.perf_counter() - began, 1)}
    model = replace(cfg.model, random_weights=False, path=str(file), base=str(base))
    return replace(cfg, model=model), said


def _write_job(cfg: JobConfig, folder: Path) -> None:
    """The settings as a job of its own, which the processes are started with."""
    settings = asdict(
        replace(
            cfg,
            manifest=replace(cfg.manifest, path=str(folder / "rows.parquet")),
            telemetry=replace(cfg.telemetry, progress="off"),
        )
    )
    path = folder / "conf" / "job" / "startup.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\n" + yaml.safe_dump(settings), encoding="utf-8")


def _cell(name: str, folder: Path, *, steps: int) -> dict[str, Any]:
    kernels, compiled = RECIPES[name]
    words = [
        f"model.kernels={kernels}",
        f"model.compile={compiled}",
        f"model.compile_cache={folder / f'cache-{kernels}-{compiled}'}",
        f"output.dir={folder / name}",
    ]
    compile_s = None
    if compiled == "aot":
        began = time.perf_counter()
        ended = _ended(_start("compile", words, folder, log=folder / "compile.log"), None, began)
        compile_s = ended["job s"]
        if ended["code"]:
            return {"compile s": compile_s, "error": _error(ended["code"], folder / "compile.log")}
    began = time.perf_counter()
    process = _start("run", words, folder, log=folder / f"{name}.log")
    ended = _ended(process, RunFolder(folder / name).batches, began)
    code = ended.pop("code")
    if code:
        return {**ended, "compile s": compile_s, "error": _error(code, folder / f"{name}.log")}
    return {**ended, **_steady(RunFolder(folder / name), steps=steps), "compile s": compile_s}


def _start(verb: str, words: Sequence[str], folder: Path, *, log: Path) -> subprocess.Popen[bytes]:
    environ = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    command = [sys.executable, "-m", "fluxbatch", verb, "--config-dir", str(folder / "conf"), "job=startup", *words]
    with log.open("wb") as told:
        return subprocess.Popen(command, env=environ, stdout=told, stderr=told)


def _ended(process: subprocess.Popen[bytes], batches: Path | None, began: float) -> dict[str, Any]:
    """Seconds until the first finished batch stood there and until the end, and the process's largest memory."""
    first_s, own_kib = None, 0
    while True:
        own_kib = max(own_kib, _own_kib(process.pid))
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        now_s = time.perf_counter() - began
        if first_s is None and batches is not None and any(batches.glob("[!.]*")):
            first_s = now_s
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return {
                "first image s": first_s and round(first_s, 2),
                "job s": round(now_s, 2),
                "host GiB": round(usage.ru_maxrss / 2**20, 2),
                "own host GiB": round(own_kib / 2**20, 2),
                "code": process.returncode,
            }
        time.sleep(LOOK_S)


def _own_kib(pid: int) -> int:
    """What the process holds in memory that no file backs; 0 where it has ended, or the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _steady(folder: RunFolder, *, steps: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in folder.metrics(0).read_text(encoding="utf-8").splitlines()]
    peaks = [line["peak_allocated_gib"] for line in lines if line["peak_allocated_gib"]]
    return {
        "step ms": round(statistics.median(line["denoise_ms"] for line in lines[1:]) / steps, 2),
        "first batch ms": {stage: lines[0][f"{stage}_ms"] for stage in ("encode", "denoise", "decode")},
        "device GiB": max(peaks, default=None),
    }


def _error(code: int, log: Path) -> str:
    """What the process said at last; more of it where a signal ended it, for then that is where it crashed."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    said = "\n".join(lines[-40:] if code < 0 else lines[-1:])
    return f"exit {code}: {said or 'without a word'}"
