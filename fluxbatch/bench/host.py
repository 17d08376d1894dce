"""Question: how many images a second does everything but the model keep up with on this machine, and where is the time?

python -m fluxbatch.bench.host --rows 20000 [--profile] [key=value ...]

The real job (plan, prefetch, noise, transfer, compress, commit, shards, report) with a model that returns at once and
paints each row's noise. Default: 256x256, JPEG. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from fluxbatch import run
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig, check
from fluxbatch.models import PromptEmbeds, Schedule, Tokens
from fluxbatch.records import Bucket


class InstantModel:
    """Returns at once: no weights, and pixels that are the row's own noise, enlarged and softened like a picture."""

    name = "instant"
    device = torch.device("cpu")
    dtype = torch.float32

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        return Tokens({"ids": torch.tensor([[len(prompt)] for prompt in prompts])}, (False,) * len(prompts))

    def encode(self, tokens: dict[str, Tensor]) -> PromptEmbeds:
        return {"prompt_embeds": tokens["ids"].float()}

    def noise_shape(self, *, height: int, width: int) -> tuple[int, ...]:
        return (16, height // 8, width // 8)

    def schedule(self, bucket: Bucket) -> Schedule:
        steps = bucket.num_inference_steps
        return Schedule(torch.linspace(1000, 1000 / steps, steps), torch.linspace(1, 0, steps + 1))

    def pack(self, noise: Tensor) -> Tensor:
        return noise.flatten(1).unsqueeze(1)

    def velocity(
        self, latents: Tensor, *, timestep: Tensor, embeds: PromptEmbeds, guidance: Tensor, bucket: Bucket
    ) -> Tensor:
        return latents

    def cfg_scale(self, guidance: Tensor) -> Tensor:
        return guidance

    def decode(self, latents: Tensor, *, bucket: Bucket) -> Tensor:
        small = latents.reshape(-1, 16, bucket.height // 8, bucket.width // 8)[:, :3].clamp(-1, 1)
        return torch.nn.functional.interpolate(small, scale_factor=8, mode="nearest")


def write_manifest(path: Path, *, rows: int, height: int, width: int) -> None:
    ids = pa.array([f"{n:08d}" for n in range(rows)])
    prompts = pa.array([f"a picture of thing number {n}" for n in range(rows)])
    sizes = {"height": pa.array([height] * rows), "width": pa.array([width] * rows)}
    pq.write_table(pa.table({"id": ids, "prompt": prompts, **sizes}), path)


def measure(cfg: JobConfig, options: argparse.Namespace) -> int:
    check(cfg)
    profile = cProfile.Profile() if options.profile else None
    cpu_before, began = os.times(), time.perf_counter()
    if profile:
        profile.enable()
    counts, code = run.run_job(cfg, load=lambda cfg, rank: InstantModel())
    if profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
    wall_s, cpu = time.perf_counter() - began, os.times()
    summary = {
        "bench": "host", "images": counts.written, "size": f"{options.height}x{options.width}",
        "image_format": cfg.output.image_format, "output": cfg.output.kind, "cores": os.cpu_count(),
        "wall_s": round(wall_s, 2), "images_per_s": round(counts.written / wall_s, 1),
        "cpu_s": round(cpu.user + cpu.system - cpu_before.user - cpu_before.system, 1),
        "stage_ms_per_image": stage_ms_per_image(Path(str(cfg.output.dir))),
    }  # fmt: skip
    print(f"{summary['images_per_s']} images/s, {summary['cpu_s']} CPU seconds for {counts.written} images")
    print(json.dumps(summary))
    return code


def stage_ms_per_image(folder: Path) -> dict[str, float]:
    """Milliseconds an image that each stage worked (stages overlap), out of the batch log."""
    lines = [json.loads(line) for line in (folder / "logs" / "metrics-rank-00000.jsonl").read_text().splitlines()]
    images = sum(line["rows_ok"] for line in lines)
    stages = [key for key in lines[0] if key.endswith("_ms")]
    totals: dict[str, Any] = {key: sum(line[key] or 0 for line in lines) for key in stages}
    return {key: round(total / images, 4) for key, total in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--height", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="profile the thread that commits")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "m.parquet"
        write_manifest(manifest, rows=options.rows, height=options.height, width=options.width)
        settings = [f"manifest.path={manifest}", f"output.dir={folder}/run", "output.image_format=jpeg",
                    "sampler.num_inference_steps=1", "telemetry.nvml=false", *overrides]  # fmt: skip
        code = with_config(settings, lambda cfg: measure(cfg, options))
    sys.exit(code)


if __name__ == "__main__":
    main()
