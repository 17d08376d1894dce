"""What does it cost to commit every batch durably? python tests/faults/durability.py FOLDER [--rows N] [--pairs N]

The real job, in turn with fsync and with an fsync that does nothing, in FOLDER (on the disk that is asked about): with
the fake model, whose batches cost nothing, and with the embedded one. Prints one JSON object for each: images a second
of both (medians), and the milliseconds a batch that fsync took by itself, which neighbours on the machine blur less
than the difference of the two. Excludes loading and the first batch.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pyarrow as pa
import pyarrow.parquet as pq
from fake_model import FakeModel

from fluxbatch import config, config_rules, run
from fluxbatch.compose import with_config

BATCH = 4
SIZES = {"fake": 256, "tiny": 128}
STEPS = {"fake": 1, "tiny": 8}


class Fsync:
    """Counts what fsync takes, or does nothing in its place."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.taken_s = 0.0
        self._real = os.fsync

    def __call__(self, descriptor: Any) -> None:
        if self.on:
            began_s = time.perf_counter()
            self._real(descriptor)
            self.taken_s += time.perf_counter() - began_s

    def __enter__(self) -> "Fsync":
        os.fsync = self
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync = self._real


def wall_s(folder: Path, rows: int, model: str) -> float:
    """From the first finished batch to the last, the commits between them included."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts = [f"a red circle number {number}" for number in range(rows)]
    pq.write_table(pa.table({"prompt": prompts}), folder / "m.parquet")
    settings = [f"manifest.path={folder}/m.parquet", f"output.dir={folder}/run", f"plan.batch_size={BATCH}",
                f"sampler.height={SIZES[model]}", f"sampler.width={SIZES[model]}", "telemetry.progress=off",
                f"sampler.num_inference_steps={STEPS[model]}"]  # fmt: skip
    load: Callable[..., Any] | None = (lambda cfg, rank: FakeModel()) if model == "fake" else None

    def job(cfg: config.JobConfig) -> int:
        config_rules.check(cfg)
        return run.run_job(cfg, load=load)[1]

    assert with_config(settings, job) == 0
    log = (folder / "run" / "logs" / "metrics-rank-00000.jsonl").read_text().splitlines()
    return sum(json.loads(line)["wall_s"] for line in log[1:])


def measure(folder: Path, *, rows: int, pairs: int, model: str) -> dict[str, Any]:
    walls: dict[str, list[float]] = {"on": [], "off": []}
    taken_s = []
    for number in range(pairs + 1):
        for way in walls:
            with Fsync(on=way == "on") as fsync:
                wall = wall_s(folder / way, rows, model)
            if number:  # the first pair warms up
                walls[way].append(wall)
                taken_s += [fsync.taken_s] if fsync.on else []
    batches = rows // BATCH - 1
    return {
        "model": model,
        "size": SIZES[model],
        "images_per_s": {way: round(batches * BATCH / statistics.median(walls[way]), 1) for way in walls},
        "spread_s": {way: [round(min(walls[way]), 2), round(max(walls[way]), 2)] for way in walls},
        "ms_a_batch": round(1000 * statistics.median(walls["on"]) / batches, 1),
        "fsync_ms_a_batch": round(1000 * statistics.median(taken_s) / batches, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    for model in ("fake", "tiny"):
        rows = options.rows if model == "fake" else options.rows // 4
        print(
            json.dumps(measure(options.folder / "durability", rows=rows, pairs=options.pairs, model=model)), flush=True
        )
    shutil.rmtree(options.folder / "durability")


if __name__ == "__main__":
    main()
